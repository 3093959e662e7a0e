"""Run a call of attention over a cache: on the GPU by launches that are prepared once, or on the CPU path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays.adapters import CPU, TORCH, Native, Signature, place
from ..arrays.readable import check_addresses, unreadable, vet_all
from ..cache.arrays import BY_NAME, CACHE
from ..cache.checks import CacheOptions, make_cache_problem
from ..cache.problem import CacheProblem
from ..cache.values import PLACES, check_length, check_values
from ..cache.writes import check_caches_apart, check_rows_apart
from ..cpu import cache
from ..errors import FROM_ELSEWHERE, ArgumentError
from ..gpu.device import Device
from ..plan.prefill import Way, way_of
from . import attending, decode, last_cached, prefill
from .alignment import cache_aligned_at
from .kept import Kept
from .made import copied
from .passes import is_contiguous
from .prepare import family
from .variables import is_debug, wish

_MAX_CALLS = 1024
Decided = tuple[Way | None] | tuple[()]


class _Kept:
    """A call that was made before.

    Attributes:
        copied: the numbers of the arrays that it takes contiguous, and that are not.
        like: "q", where out is like it.
        made: (shape, dtype) of out where it is not, of lse and of the workspaces.
        forms: of what it makes, from its first run on.
        way: how it takes the forward, beside what is launched here or behind what is appended; None: it does not.
        attending: that forward, once the call was made before; runs: how often it was, until then.
    """

    recent = False
    attending: attending.Attending | None = None
    runs = 0

    def __init__(
        self, launch: decode.CacheCall, problem: CacheProblem, copied: Sequence[int], way: Way | None = None
    ) -> None:
        self.launch, self.problem, self.copied, self.way = launch, problem, tuple(copied), way
        self.forms: Any = None
        self.attends = way is None or way.beside
        of_v = problem.own_v if self.attends else 0
        self.like: tuple[str, ...] = ("q",) if self.attends and not of_v else ()
        out = (((*problem.rows_q, of_v), problem.dtype),) if of_v else ()
        own = (*out, (problem.rows, "fp32")) if self.attends else ()
        self.made: Sequence[tuple[tuple[int, ...], str]] = (*own, *launch.made)


calls: Kept[_Kept] = Kept(_MAX_CALLS)


def forward(
    library: Native, arrays: dict[str, Any], options: CacheOptions, length: int | None = None, decided: Decided = (),
    want_lse: bool = True,
) -> tuple[Any, Any]:  # fmt: skip
    """(out, lse) of arrays of one native library; the caches are written where there is a k. lse may be None where
    nobody wants it.

    Args:
        arrays: by their names in `CACHE_ARRAYS`, in that order: q, k_cache and v_cache are the first.
        length: of all sequences, where there is no cache_seqlens.
        decided: how it takes the forward, which then is the caller's to run: (None, None), unless it does not. Else
            `way_of` says how, and it runs.
    """
    bits = 0
    try:
        keys, pointers = library.look(arrays.values())
    except (ArgumentError, *FROM_ELSEWHERE):
        raise
    except Exception as e:
        raise unreadable(library, e, arrays) from e
    device = keys[0][3]
    if device == CPU:
        return _on_host(library, arrays, keys, pointers, options, length)
    for pointer in pointers:
        bits |= pointer
    in_chunks = bits & 15 == 0 and 0 not in pointers
    aligned, stream = in_chunks, library.stream(device)
    if not in_chunks:
        aligned = _look_at_addresses(library, arrays, pointers)
    call = _call(library, arrays, keys, options, aligned, stream, decided)
    if pointers[1] == pointers[2]:
        check_caches_apart(call.problem)
    if length is not None:
        check_length(call.problem, length)
    if is_debug():
        check_values(call.problem, _on_their_way(library, arrays) | _lengths(call.problem, length))
    copies = copied(library, arrays.values(), call.copied, pointers) if call.copied else ()  # which live until launched
    made = _made(library, call, arrays, pointers)
    call.launch(pointers, stream, length)
    del copies
    if decided and call.way is not None:
        return None, None
    is_usual = in_chunks and not call.copied
    if library is TORCH and is_usual and (call.way is None or call.attending is not None):
        last_cached.remember(calls.last, arrays, options, call, device)
    if call.way is None:
        return made[0], made[1]
    if call.attending is not None and is_usual and not is_debug():
        into = made[:2] if call.attends else ()
        return call.attending(library, arrays, pointers, stream, length, want_lse, into)
    return attending.found(library, call, call.way, arrays, options, made, length, stream, is_usual)


def _made(library: Native, call: _Kept, arrays: Mapping[str, Any], pointers: list[int]) -> Sequence[Any]:
    """New arrays for a call, whose addresses join the others."""
    if call.forms is None:
        makes_some = call.like or call.made
        call.forms = library.forms(call.like, call.made, arrays) if makes_some else ()
    if call.forms:
        return library.make_like(call.forms, pointers)
    made: Sequence[Any] = library.make(call.like, call.made, arrays)
    pointers += library.pointers(made)
    return made


def way(library: Native, names: Sequence[str], keys: Sequence[tuple[Any, ...]], options: CacheOptions) -> Way | None:
    """How arrays on a GPU of these signatures, at addresses that are multiples of 16, take the forward."""
    return _way(*check(library, dict.fromkeys(names), keys, options), True)


def planned(
    library: Native,
    names: Sequence[str],
    keys: Sequence[tuple[Any, ...]],
    options: CacheOptions,
    decided: tuple[Way | None],
) -> Sequence[tuple[tuple[int, ...], str]]:
    """(shape, dtype) of the workspaces of the call that the same arrays will find. Its kernels are loaded then.

    Args:
        decided: as of `forward`.
    """
    return _call(library, dict.fromkeys(names), keys, options, True, 0, decided).launch.made


def _call(
    library: Native, arrays: Mapping[str, Any], keys: Sequence[tuple[Any, ...]], options: CacheOptions, aligned: bool,
    stream: int, decided: Decided,
) -> _Kept:  # fmt: skip
    key = *arrays, *keys, options, aligned, wish(), *decided
    found = calls.find(key)
    if found is None:
        found = calls.keep(key, _prepare(library, arrays, keys, options, aligned, stream, decided))
    return found


def _prepare(
    library: Native,
    arrays: Mapping[str, Any],
    keys: Sequence[tuple[Any, ...]],
    options: CacheOptions,
    aligned: bool,
    stream: int,
    decided: Decided,
) -> _Kept:
    """A call of a kind that is new."""
    vet_all(library, arrays)
    problem, signatures = check(library, arrays, keys, options)
    copied = [name for name, s in signatures.items() if BY_NAME[name].contiguous and not _is_contiguous(s)]
    device = Device.of(signatures["q"].device)
    taken = decided[0] if decided else _way(problem, signatures, aligned)
    attends = taken is None or taken.beside
    names = *arrays, *(("out", "lse") if attends else ())
    own = problem if taken is None else taken.left(problem)
    does = {"attends": attends, "dequantizes": taken is not None and taken.dequantized}
    launch = decode.prepare(own, names, signatures, device, aligned=aligned, stream=stream, **does)
    return _Kept(launch, problem, [names.index(name) for name in (*copied, *launch.copied)], taken)


def _way(problem: CacheProblem, signatures: Mapping[str, Signature], aligned: bool) -> Way | None:
    lie = prefill.lie_of(problem, signatures, aligned)
    return way_of(problem, Device.of(signatures["q"].device), lie, family())


def _is_contiguous(signature: Signature) -> bool:
    return is_contiguous(signature.shape, signature.strides)


def _look_at_addresses(library: Native, arrays: Mapping[str, Any], pointers: Sequence[int]) -> bool:
    """Whether q, k, v and the caches lie at multiples of 16; refuses addresses that no kernel can read."""
    check_addresses(library, pointers, arrays)
    return cache_aligned_at(arrays, pointers)


def _on_their_way(library: Native, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Copies in host memory of what says where things lie, and the other arrays' places; waits for a GPU."""
    wait = (lambda x: x.cpu()) if library is TORCH else (lambda x: x)
    return {name: library.to_numpy(wait(x)) if name in PLACES else np.empty(0) for name, x in arrays.items()}


def _lengths(p: CacheProblem, length: int | None) -> dict[str, np.ndarray]:
    """cache_seqlens of one length for all, in host memory."""
    return {} if length is None else {"cache_seqlens": np.full(p.batch, length, np.int32)}


def check(
    library: Native, arrays: Mapping[str, Any], keys: Sequence[tuple[Any, ...]], options: CacheOptions
) -> tuple[CacheProblem, dict[str, Signature]]:
    """All checks of the arrays by their signatures: the problem, and the signatures spelled out."""
    found = dict(zip(arrays, keys, strict=True))
    shapes = {name: tuple(key[0]) for name, key in found.items()}
    problem = make_cache_problem(shapes, {name: library.dtype_name(key[2]) for name, key in found.items()}, options)
    signatures = {name: library.describe(name, key) for name, key in found.items()}
    device = signatures["q"].device
    for name, signature in signatures.items():
        if signature.device != device:
            raise ArgumentError(f"{name}: expected the device of q, {place(device)}, got {place(signature.device)}")
        last = signature.strides[-1] if signature.strides else 1
        if BY_NAME[name].strided and last != 1 and signature.shape[-1] > 1 and 0 not in signature.shape:
            raise ArgumentError(f"{name}: expected a stride of 1 along its last dimension, got {last}; copy it first")
        if problem.seqlen_new and BY_NAME[name].role == CACHE:
            check_rows_apart(name, signature.shape, signature.strides)
    return problem, signatures


def _on_host(
    library: Native,
    arrays: Mapping[str, Any],
    keys: Sequence[tuple[Any, ...]],
    pointers: Sequence[int],
    options: CacheOptions,
    length: int | None,
) -> tuple[Any, Any]:
    """`forward` of arrays in host memory."""
    vet_all(library, arrays)
    problem, _ = check(library, arrays, keys, options)
    if pointers[1] == pointers[2]:
        check_caches_apart(problem)
    plain = {name: library.to_numpy(x) for name, x in arrays.items()} | _lengths(problem, length)
    check_values(problem, plain)
    for name in ("k_cache", "v_cache") if "k" in arrays else ():
        if not plain[name].flags.writeable:
            raise ArgumentError(f"{name}: expected an array that can be written, since k is appended to it")
    out, lse = cache.forward(plain, problem)
    return library.from_numpy(out), library.from_numpy(lse)
