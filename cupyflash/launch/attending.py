"""The forward of a call over a cache that was made before (prefill.py), ready but for addresses.

All that a new call has to find out follows from what is known of that one: which arrays it is given, at which of its
addresses, and what it makes. To look at them again would cost the host three times as much as all launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..arrays.adapters import Native
from ..cache.checks import CacheOptions
from ..cache.problem import CacheProblem
from ..gpu.device import Device
from ..operands import FORWARD
from ..plan.prefill import Way
from . import constants, find, prefill
from .made import divide
from .passes import WITH_LSE
from .prepared import Call
from .variables import is_debug, wish

_TRIES = 4  # to know how a call attends, but for its first run: one that is captured when new is known later


class Attending:
    """Attributes: the call; which of its addresses are constants, and which are those of the cache's call; where
    that of `seqused_k` goes if it is made; what else is made, as `Native.forms` has it."""

    def __init__(
        self, library: Native, arrays: Mapping[str, Any], p: CacheProblem, way: Way, call: Call,
        addresses: Sequence[int], moves: Sequence[tuple[int, int]], used_at: int | None,
    ) -> None:  # fmt: skip
        self._p, self._way, self._call = p, way, call
        self._addresses, self._moves, self._used_at = tuple(addresses), tuple(moves), used_at
        self._in_place = p.packed or p.batch == 1  # lse lies as who asks for it wants it
        lse = p.rows if self._in_place else (p.heads_q, p.batch * p.seqlen_q)
        made = [] if way.beside else [((*p.rows_q, p.head_dim_v), p.dtype), (lse, "fp32")]
        made += [((call.room,), "fp32")] if call.room else []
        self._forms: Any = library.forms((), made, arrays) if made else None

    def __call__(
        self, library: Native, arrays: Mapping[str, Any], pointers: Sequence[int], stream: int, length: int | None,
        want_lse: bool, into: Sequence[Any] = (),
    ) -> tuple[Any, Any]:  # fmt: skip
        """(out, lse), queued on `stream`; lse may be None where nobody wants it.

        Args:
            arrays: of the cache's call; pointers: theirs and those of all that it made.
            length: of all sequences, where there is no cache_seqlens.
            into: out and lse, of which those of some sequences are written.
        """
        p, call = self._p, self._call
        addresses = [*self._addresses]
        for at, i in self._moves:
            addresses[at] = pointers[i]
        if self._used_at is not None:
            q = arrays["q"]
            lengths = arrays["cache_seqlens"] if length is None else library.full((p.batch,), length, q)
            used = prefill.used_of(lengths, p, self._way)  # lives until the launch
            addresses[self._used_at] = library.pointer(used)
        if into:
            addresses += library.pointers(into)
        made = [*into, *(library.make_like(self._forms, addresses) if self._forms else ())]
        if call.room:
            divide(call, addresses)
        call(addresses, stream)
        out, lse = made[:2]
        if self._in_place:
            return out, lse
        return out, library.contiguous(prefill.lse_by_sequence(lse, p)) if want_lse else None


class Made(Protocol):
    """A call over a cache, as `cached` keeps it."""

    problem: CacheProblem
    attends: bool
    attending: Attending | None
    runs: int


def found(
    library: Native, call: Made, way: Way, arrays: dict[str, Any], options: CacheOptions, made: Sequence[Any],
    length: int | None, stream: int, is_usual: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """(out, lse) by the forward, which is looked for, behind a call that has been launched and has made some arrays.

    Args:
        is_usual: whether all arrays lie at multiples of 16, and none was copied: the call will know how the next time.
    """
    names, p = tuple(arrays), call.problem
    if length is not None:
        arrays = arrays | {"cache_seqlens": library.full((p.batch,), length, arrays["q"])}
    given = prefill.ready(arrays, made[2 * call.attends :], p, way)
    if is_usual and 0 < call.runs < _TRIES and not is_debug():
        call.attending = _known(library, names, len(made), given, p, options, way, stream)
    call.runs += 1
    return prefill.attend(library, given, p, options, way, made[:2] if call.attends else None)


def _known(
    library: Native, names: Sequence[str], made: int, given: Mapping[str, Any], p: CacheProblem, options: CacheOptions,
    way: Way, stream: int,
) -> Attending | None:  # fmt: skip
    """That of arrays at multiples of 16; None where the forward has to be found each time.

    Args:
        names: of the arrays of the cache's call; made: how many it makes, out and lse the first if it is `way.beside`.
        given: the arrays that are attended to, as `prefill.ready` has them.
    """
    if not library.allocates:
        return None
    rows = prefill.rows_of(library, given, p, way)
    keys, pointers = library.look(rows.values())
    kind = tuple(rows), prefill.options_of(options, way), WITH_LSE, wish()
    call = find.find(FORWARD, library, rows, keys, pointers, kind, stream)
    if call.copied or call.order[: len(rows) + 2] != (*rows, "out", "lse"):
        return None
    count = len(names)
    at = prefill.ready({name: i for i, name in enumerate(names)}, range(count + 2 * way.beside, count + made), p, way)
    addresses, moves, used_at = [0] * len(rows), [], None
    device = Device.of(keys[0][3])
    for i, source in enumerate(map(prefill.sources(at, p, way).__getitem__, rows)):
        if isinstance(source, prefill.Steps):
            with device.current():
                addresses[i] = constants.on(device.ordinal).steps(*source, stream)
            if not addresses[i]:
                return None
        elif source == "cache_seqlens" and (source not in at or prefill.counts_used(p, way)):
            used_at = i
        else:
            moves.append((i, at[source]))
    return Attending(library, given, p, way, call, addresses, moves, used_at)
