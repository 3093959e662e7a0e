"""Run a call of attention over a cache: on the GPU by launches that are prepared once, or on the CPU path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..arrays.adapters import CPU, TORCH, Native, Signature
from ..arrays.readable import check_addresses, unreadable, vet_all
from ..cache.arrays import BY_NAME
from ..cache.checks import CacheOptions
from ..cache.problem import CacheProblem
from ..cache.values import check_length, check_values
from ..cache.writes import Lies, check_caches_apart
from ..cpu import cache
from ..errors import FROM_ELSEWHERE, ArgumentError
from ..gpu.device import Device
from ..plan.prefill import Way, way_of
from . import attending, decode, last_cached, prefill
from .alignment import cache_aligned_at
from .cached_checks import check, lengths, on_their_way
from .kept import Kept
from .made import copied
from .passes import is_contiguous
from .prepare import family
from .variables import is_debug, wish

_MAX_CALLS = 1024
_CACHES = "k_cache", "v_cache"
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
        reach: how many bytes a cache that is appended to takes, gaps included; 0 where none is. apart: how far the
            caches that were looked at last are from each other, which have no memory in common.
    """

    recent = False
    reach = 0
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
        self._caches: list[Lies] = []
        self.apart: int | None = None

    def appends_to(self, signatures: Mapping[str, Signature]) -> None:
        """The caches of this call are written."""
        size = 1 if self.problem.stored else self.problem.itemsize
        for name in _CACHES:
            shape, strides, *_ = signatures[name]
            self._caches.append(Lies(0, tuple(shape), tuple(size * step for step in strides), size))
        self.reach = max(end - start for start, end in (x.reach for x in self._caches))

    def check_apart(self, k_cache: int, v_cache: int) -> None:
        """Raise where caches at these addresses have memory in common."""
        if v_cache - k_cache != self.apart:  # else as the last ones lay
            k, v = self._caches
            check_caches_apart(k._replace(address=k_cache), v._replace(address=v_cache))
            self.apart = v_cache - k_cache


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
    if abs(pointers[2] - pointers[1]) < call.reach:
        call.check_apart(pointers[1], pointers[2])
    if length is not None:
        check_length(call.problem, length)
    if is_debug():
        check_values(call.problem, on_their_way(library, arrays) | lengths(call.problem, length))
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
    kept = _Kept(launch, problem, [names.index(name) for name in (*copied, *launch.copied)], taken)
    if problem.seqlen_new:
        kept.appends_to(signatures)
    return kept


def _way(problem: CacheProblem, signatures: Mapping[str, Signature], aligned: bool) -> Way | None:
    lie = prefill.lie_of(problem, signatures, aligned)
    return way_of(problem, Device.of(signatures["q"].device), lie, family())


def _is_contiguous(signature: Signature) -> bool:
    return is_contiguous(signature.shape, signature.strides)


def _look_at_addresses(library: Native, arrays: Mapping[str, Any], pointers: Sequence[int]) -> bool:
    """Whether q, k, v and the caches lie at multiples of 16; refuses addresses that no kernel can read."""
    check_addresses(library, pointers, arrays)
    return cache_aligned_at(arrays, pointers)


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
    plain = {name: library.to_numpy(x) for name, x in arrays.items()} | lengths(problem, length)
    check_values(problem, plain)
    caches = [plain["k_cache"], plain["v_cache"]] if "k" in arrays else []
    for name, x in zip(_CACHES, caches, strict=False):
        if not x.flags.writeable:
            raise ArgumentError(
                f"{name}: expected an array that can be written, since k is appended to it; give a copy of it"
            )
    if caches and problem.seqlen_new:
        check_caches_apart(*[Lies(x.ctypes.data, x.shape, x.strides, x.itemsize) for x in caches])
    out, lse = cache.forward(plain, problem)
    return library.from_numpy(out), library.from_numpy(lse)
