"""Attention over a cache as a custom call of XLA's, inside jit too. Where rows are appended, the caches are results
that lie where the arguments lay: in place, if the caller donates them, else in a copy that XLA makes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays.adapters import CPU, NUMPY
from ..cache.checks import CacheOptions
from ..cache.lengths import batch_of
from ..cache.problem import CacheProblem
from ..cache.values import check_length
from ..errors import UnsupportedError
from ..gpu import device as gpu
from ..launch import cached, cached_checks, prefill
from ..launch.passes import WITH_LSE, contiguous_strides
from ..launch.prepare import family
from ..plan.decode import dtypes_over
from ..plan.prefill import Way
from . import ffi
from .buffers import Buffers
from .call import CODE_OF, DTYPES, Static, forward_on_gpu, has_kernels

_TARGET = "cupyflash_cache"
_CACHES = ("k_cache", "v_cache")


class _Static(NamedTuple):
    """All of a call but its arrays. JAX keeps compiled calls by it."""

    names: tuple[str, ...]
    options: CacheOptions
    family: str | None  # of the kernels that were asked for: another one needs another workspace
    way: Way | None = None  # how it takes the forward, a custom call of its own behind this one, on a GPU

    @property
    def written(self) -> tuple[str, ...]:
        """The caches, where rows are appended to them: results before out and lse."""
        return _CACHES if "k" in self.names else ()

    def text(self) -> str:
        return json.dumps([self.names, self.options._asdict(), self.family, self.way], separators=(",", ":"))

    @classmethod
    def parse(cls, text: bytes) -> _Static:
        names, options, family, way = json.loads(text)
        if options["window"] is not None:
            options["window"] = tuple(options["window"])
        return cls(tuple(names), CacheOptions(**options), family, None if way is None else Way(*way))


_parse = functools.lru_cache(maxsize=1024)(_Static.parse)


def attention_with_cache(arrays: dict[str, Any], options: CacheOptions, length: int | None = None) -> tuple[Any, ...]:
    """(out, lse), and the caches after the append where there is one; `length`: in place of cache_seqlens."""
    if length is not None:
        arrays = arrays | {"cache_seqlens": jnp.full((batch_of(arrays),), length, jnp.int32)}
        check_length(_problem(arrays, options), length)
    static = _Static(tuple(arrays), options, family())
    found = _operation(static)(*arrays.values())
    count = len(static.written)
    return *found[count:], *found[:count]


@functools.lru_cache(maxsize=1024)
def _operation(static: _Static) -> Callable[..., Any]:
    """The call, refused by name where a transform would need a rule."""

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    @jax.custom_batching.custom_vmap  # type: ignore[untyped-decorator]
    def one(*arrays: Any) -> Any:
        return tuple(_call(static, arrays))

    def refuse(*_: Any) -> Any:
        raise UnsupportedError(
            "q: attention over a cache has no gradients, and no rule for vmap; use `attention`, or give the whole batch"
        )

    one.fun.def_vmap(refuse)
    one.defjvp(refuse)
    return one


def _call(static: _Static, arrays: Sequence[Any]) -> list[Any]:
    register()
    problem = _problem(dict(zip(static.names, arrays, strict=True)), static.options)
    results = _results(static, arrays, problem)

    def whole(*x: Any) -> list[Any]:
        return _begin(static, results, x)

    if not has_kernels(arrays[0].dtype, functools.partial(dtypes_over, problem.stored)):
        return whole(*arrays)  # then the handler says what is missing
    way = cached.way(Buffers(), static.names, _keys(arrays, 0), static.options)
    own = static._replace(way=way)
    on_gpu = functools.partial(_on_gpu, own, results, _workspace(own, arrays))
    return list(jax.lax.platform_dependent(*arrays, cpu=whole, cuda=on_gpu))


def _begin(static: _Static, made: Sequence[jax.ShapeDtypeStruct], arrays: Sequence[Any]) -> list[Any]:
    """The custom call; what it makes."""
    same = {static.names.index(name): i for i, name in enumerate(static.written)}
    return ffi.call(_TARGET, made, arrays, static.text(), same)


def _on_gpu(
    static: _Static, results: Sequence[jax.ShapeDtypeStruct], workspace: Sequence[jax.ShapeDtypeStruct], *arrays: Any
) -> list[Any]:
    """The results: of one custom call, or of one that appends and attends to some, and the forward behind it."""
    way, count = static.way, len(static.written)
    if way is None:
        return _begin(static, [*results, *workspace], arrays)[: len(results)]
    made = [*results[: None if way.beside else count], *workspace]
    begun = _begin(static, made, arrays) if made else []
    named = dict(zip(static.names, arrays, strict=True))
    problem = _problem(named, static.options)
    named |= zip(static.written, begun, strict=False)
    into = begun[count : count + 2] if way.beside else ()
    named = prefill.ready(named, begun[len(made) - len(workspace) :], problem, way)
    rows = prefill.rows_of(NUMPY, named, problem, way)  # whose own numbers are constants of the program
    forward = Static.of("forward", tuple(rows), prefill.options_of(static.options, way), WITH_LSE)
    out, lse = forward_on_gpu(forward, tuple(rows.values()), into)
    if not problem.packed:
        out, lse = prefill.by_sequence(out, lse, problem)
    return [*begun[:count], out, lse]


def _run(frame: ffi.Frame) -> None:
    """One execution."""
    static = _parse(frame.text)
    arrays, results = dict(zip(static.names, frame.inputs(), strict=True)), frame.results()
    for name, result in zip(static.written, results, strict=False):
        if result.address != arrays[name].address and 0 not in result.shape:  # what is appended would be lost
            raise RuntimeError(f"{name}: XLA did not put the result where the argument lies")
    library = Buffers(results[len(static.written) :], frame.stream)
    cached.forward(library, arrays, static.options, decided=(static.way,))


@functools.cache
def register() -> None:
    """XLA's targets, once."""
    ffi.register(_TARGET, _run, None)
    if gpu.count():
        ffi.register(_TARGET, _run, gpu.current())


def _keys(arrays: Sequence[Any], device: int) -> list[tuple[Any, ...]]:
    """The signatures that the arrays will have when XLA hands them over."""
    kinds = [np.dtype(x.dtype) for x in arrays]
    return [
        (tuple(x.shape), contiguous_strides(x.shape), CODE_OF.get(kind, kind.name), device)
        for x, kind in zip(arrays, kinds, strict=True)
    ]


def _problem(arrays: Mapping[str, Any], options: CacheOptions) -> CacheProblem:
    """All checks of shapes and dtypes."""
    return cached_checks.check(Buffers(), arrays, _keys(tuple(arrays.values()), CPU), options)[0]


def _results(static: _Static, arrays: Sequence[Any], problem: CacheProblem) -> list[jax.ShapeDtypeStruct]:
    """The caches that are written, out and lse."""
    named = dict(zip(static.names, arrays, strict=True))
    found = [jax.ShapeDtypeStruct(named[name].shape, named[name].dtype) for name in static.written]
    found += [jax.ShapeDtypeStruct((*named["q"].shape[:-1], problem.head_dim_v), named["q"].dtype)]
    return [*found, jax.ShapeDtypeStruct(problem.rows, DTYPES["fp64" if problem.dtype == "fp64" else "fp32"])]


def _workspace(static: _Static, arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """What its kernels need beside results on this machine's GPUs, on each of which they are loaded."""
    found = []
    for ordinal in range(gpu.count()):
        made = cached.planned(Buffers(), static.names, _keys(arrays, ordinal), static.options, (static.way,))
        found = [jax.ShapeDtypeStruct(shape, DTYPES[dtype]) for shape, dtype in made]
    return found
