"""A pass as one custom call of XLA's, whose attribute says which pass it is, of which arrays, with which options.

XLA owns all memory: results, and the workspace of the kernels, are results of the call. The kernels are compiled and
loaded when the call is traced, since its execution must not wait.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays.adapters import CPU
from ..errors import ArgumentError, UnsupportedError
from ..gpu import device as gpu
from ..launch import find, run
from ..launch.checks import check
from ..launch.passes import contiguous_strides, given_of, has_own_v
from ..launch.prepare import family
from ..launch.variables import wish
from ..operands import BACKWARD, FORWARD
from ..options import Options
from ..plan.extents import Extents
from . import ffi
from .buffers import CODES, Buffers, other_trace

_TARGET, _TARGET_INTO = "cupyflash", "cupyflash_into"
_OF = "\n"  # behind which a text has the shapes of the arrays
PASSES = {which.name: which for which in (FORWARD, BACKWARD)}


class Static(NamedTuple):
    """All of a call but its arrays: which they are, and what is asked for. JAX keeps compiled calls by it."""

    which: str
    names: tuple[str, ...]
    options: Options
    wanted: tuple[str, ...]  # of what is made only where somebody asks for it
    family: str | None  # of the kernels that were asked for: another one needs another workspace

    @classmethod
    def of(cls, which: str, names: tuple[str, ...], options: Options, wanted: tuple[str, ...] = ()) -> Static:
        return cls(which, names, options, wanted, family())

    def text(self, arrays: Sequence[Any]) -> str:
        """As the custom call carries it, into other processes too; behind it the shapes, so that an execution of
        other ones has another text."""
        text = json.dumps([*self[:2], self.options._asdict(), *self[3:]], separators=(",", ":"))
        return text + _OF + " ".join(f"{np.dtype(x.dtype)}{[*x.shape]}" for x in arrays)

    @classmethod
    def parse(cls, text: bytes) -> Static:
        body, mark, _ = text.partition(_OF.encode())
        if not mark:
            raise RuntimeError("the call was exported by an older version of cupyflash: export it again")
        which, names, options, wanted, family = json.loads(body)
        if options["window"] is not None:
            options["window"] = tuple(options["window"])
        return cls(which, tuple(names), Options(**options), tuple(wanted), family)


_parse = functools.lru_cache(maxsize=1024)(Static.parse)


def _key(frame: ffi.Frame) -> tuple[Any, ...]:
    """Under what the call is kept."""
    static = _parse(frame.text)
    keys = [(shape, contiguous_strides(shape), dtype, frame.device) for shape, dtype in frame.kinds]
    return find.key_of(static.names, keys, static.options, static.wanted)


def _run(frame: ffi.Frame) -> None:
    """One execution. A call that was prepared takes the addresses as they are."""
    if frame.device != CPU:
        given = frame.addresses
        kind = frame.text, frame.device, wish()
        call = find.ready(kind, functools.partial(_key, frame), given)
        if call is not None:
            made = frame.result_addresses()
            if len(made) < len(call.likes) + len(call.made):
                raise other_trace()
            call(given + made, frame.stream, frame.device)
            return
    static = _parse(frame.text)
    arrays = dict(zip(static.names, frame.inputs(), strict=True))
    library = Buffers(frame.results(), frame.stream)
    if static.which == "forward":
        run.forward(library, arrays, static.options)
    else:
        run.backward(library, arrays, static.options, static.wanted)


def _run_into(frame: ffi.Frame) -> None:
    """The same, where the last two inputs lie where its results do, of which some rows are to stay."""
    if frame.addresses[-2:] != frame.result_addresses()[:2]:
        raise RuntimeError("out: XLA did not put the result where the argument lies")
    frame.drop(2)
    _run(frame)


@functools.cache
def register() -> None:
    """XLA's targets, once."""
    for target, run_one in ((_TARGET, _run), (_TARGET_INTO, _run_into)):
        ffi.register(target, run_one, None)
        if gpu.count():
            ffi.register(target, run_one, gpu.current())


DTYPES = {
    "fp16": jnp.float16, "bf16": jnp.bfloat16, "fp32": jnp.float32, "fp64": jnp.float64, "int32": jnp.int32,
    "int64": jnp.int64, "bool": jnp.bool_, "int8": jnp.int8, "uint8": jnp.uint8, "float8_e4m3fn": jnp.float8_e4m3fn,
}  # fmt: skip
CODE_OF = {np.dtype(dtype): CODES[name] for name, dtype in DTYPES.items()}


def _keys(static: Static, arrays: Sequence[Any], device: int) -> list[tuple[Any, ...]]:
    """The signatures that the arrays will have when XLA hands them over."""
    found = []
    for name, x in zip(static.names, arrays, strict=True):
        dtype = np.dtype(x.dtype)
        found.append((tuple(x.shape), contiguous_strides(x.shape), CODE_OF.get(dtype, dtype.name), device))
        if not x.shape and name in "qkv":
            raise ArgumentError(f"{name}: expected 4 dimensions, got a scalar")
        if not all(isinstance(n, int) for n in x.shape):
            raise UnsupportedError(f"{name}: expected a shape of numbers, got {x.shape}; export once for each shape")
    return found


def results_of(static: Static, arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """What a pass makes, after all checks of shapes and dtypes."""
    which = PASSES[static.which]
    keys = _keys(static, arrays, CPU)
    problem, _ = check(which, static.names, Buffers(), keys, static.options)
    given = given_of(which, static.names, static.wanted, has_own_v(static.names, keys))
    named = dict(zip(static.names, arrays, strict=True))
    found = [jax.ShapeDtypeStruct(named[like].shape, named[like].dtype) for like in given.likes]
    for shape, dtype in given.shapes(Extents.of(problem), problem.widths, problem.dtype, static.options.layout):
        wide = dtype == "fp32" and problem.dtype == "fp64"
        found.append(jax.ShapeDtypeStruct(shape, DTYPES["fp64" if wide else dtype]))
    return found


def _workspace(static: Static, arrays: Sequence[Any], results: int) -> list[jax.ShapeDtypeStruct]:
    """What the kernels need beside results on this machine's GPUs, on each of which they are loaded."""
    which, found = PASSES[static.which], []
    for ordinal in range(gpu.count()):
        keys = _keys(static, arrays, ordinal)
        planned = find.planned(which, Buffers(), static.names, keys, static.options, static.wanted)
        made = planned.made[results - len(planned.likes) :]
        found = [jax.ShapeDtypeStruct(shape, DTYPES[dtype]) for shape, dtype in made]
    return found


def has_kernels(dtype: Any, dtypes: Callable[[gpu.Device], Iterable[str]] = lambda device: device.dtypes) -> bool:
    """Whether there are GPUs, and all have kernels for it; `dtypes`: those that one has kernels for."""
    known = [[DTYPES[name] for name in dtypes(gpu.Device.of(ordinal))] for ordinal in range(gpu.count())]
    return bool(known) and all(dtype in kinds for kinds in known)


def call(static: Static, *arrays: Any) -> list[Any]:
    """The custom call; what it makes."""
    register()
    results = results_of(static, arrays)

    def on(workspace: Sequence[jax.ShapeDtypeStruct]) -> Callable[..., list[Any]]:
        return lambda *x: ffi.call(_TARGET, [*results, *workspace], x, static.text(x))[: len(results)]

    if not has_kernels(arrays[0].dtype):  # then the handler says what is missing
        return on(())(*arrays)
    return list(jax.lax.platform_dependent(*arrays, cpu=on(()), cuda=on(_workspace(static, arrays, len(results)))))


def forward_on_gpu(static: Static, arrays: Sequence[Any], into: Sequence[Any] = ()) -> list[Any]:
    """(out, lse) of the custom call of a forward, where only a GPU gets to.

    Args:
        into: out and lse, of whose rows it writes those of its sequences; else they are new.
    """
    register()
    results = results_of(static, arrays)
    made, given = [*results, *_workspace(static, arrays, len(results))], (*arrays, *into)
    if not into:
        return ffi.call(_TARGET, made, given, static.text(arrays))[:2]
    same = {len(arrays) + i: i for i in range(2)}
    return ffi.call(_TARGET_INTO, made, given, static.text(arrays), same)[:2]
