"""The arguments of the operators, by their schemas.

They follow from the table of arrays and the list of options: the inputs that every call has, in the table's order; of a
backward, which gradients are wanted; of the overload `more` alone, the inputs that a call may lack; the options, flat.
So a call without such inputs has few arguments: each costs the host 0.05 us, and one that is handed on 0.1.
What a call may lack, and options, have defaults. Those at the end that are equal to theirs, torch does not hand on.
Inductor writes what was left out into its programs again, by name, which costs twice as much. So a call that may become
part of a program has a last argument that is not as its default, and nothing is left out: the version of cupyflash,
without which one version would take from torch's cache on disk what another has written into its programs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..arrays.imported import constant_in_programs
from ..operands import BACKWARD, FORWARD, GRADIENT, INPUT, RESULT, Pass
from ..options import Options
from ..version import VERSION

# The options as an operator's arguments: name, type, default.
OPTIONS: tuple[tuple[str, str, Any], ...] = (
    ("causal", "bool", False),
    ("scale", "float?", None),
    ("window_left", "SymInt?", None),
    ("window_right", "SymInt?", None),
    ("layout", "str", "bshd"),
    ("deterministic", "bool", False),
    ("softcap", "float?", None),
    ("dropout_p", "float", 0.0),
    ("mods", "str", ""),
    ("tall", "bool", False),
)
_OPTIONS = (*OPTIONS, ("by", "str", ""))
_DEFAULTS = tuple([default for _, _, default in _OPTIONS])
_NO_OPTIONS = Options()


def flat(options: Options) -> tuple[Any, ...]:
    """The values of `OPTIONS`: those of `Options` but the last, which only attention over a cache sets."""
    causal, scale, window, *others, _ = options
    return causal, scale, *(window or (None, None)), *others


def options_of(values: Sequence[Any]) -> Options:
    """The inverse of `flat`."""
    try:
        return _known(*values)
    except TypeError:  # symbolic numbers have no hash
        return _unflat(*values)


def _unflat(causal: Any = False, scale: Any = None, left: Any = None, right: Any = None, *others: Any) -> Options:
    return Options(causal, scale, None if left is None and right is None else (left, right), *others)


_known = functools.lru_cache(maxsize=256)(_unflat)  # the schema fixes types: what is equal here means the same


class _Places(NamedTuple):
    """Where the arguments of a pass's operator stand.

    Attributes:
        first, last: the arrays that each call has, and those that it may lack.
        start: where these begin, of `more`, or else the options.
        names: of all arguments; names_of_more: likewise.
    """

    first: tuple[str, ...]
    last: tuple[str, ...]
    start: int
    names: tuple[str, ...]
    names_of_more: tuple[str, ...]


def _find(which: Pass) -> _Places:
    first = tuple([name for name in which.names(INPUT) if name not in which.optional])
    last = tuple([name for name in which.names(INPUT) if name in which.optional])
    before = (*first, *(("wanted",) if which.name == "backward" else ()))
    options = tuple([name for name, _, _ in _OPTIONS])
    return _Places(first, last, len(before), (*before, *options), (*before, *last, *options))


_PLACES = {which.name: _find(which) for which in (FORWARD, BACKWARD)}


@constant_in_programs  # which then do not ask at each call whether the table is as it was
def _places(name: str) -> _Places:
    return _PLACES[name]


def results_of(which: Pass) -> tuple[str, ...]:
    """All that the pass ever makes for a caller."""
    return which.names(RESULT, GRADIENT, where=lambda row: not row.hopper)


def has_more(which: Pass, values: Sequence[Any]) -> bool:
    """Whether these are arguments of the overload `more`: behind the first is none of the options, a bool."""
    start = _places(which.name).start
    return len(values) > start and type(values[start]) is not bool


def names_of(which: Pass, values: Sequence[Any]) -> tuple[str, ...]:
    """The names of these arguments of an operator: the first of all."""
    of = _PLACES[which.name]
    return (of.names_of_more if has_more(which, values) else of.names)[: len(values)]


def schema(which: Pass, more: bool) -> str:
    """The operator's schema, or that of its overload `more`."""
    of = _find(which)
    given = [f"Tensor {name}" for name in of.first]
    given += ["str[] wanted"] if "wanted" in of.names else []
    given += [f"Tensor? {name}=None" for name in of.last] if more else []
    given += [f"{kind} {name}={_written(default)}" for name, kind, default in _OPTIONS]
    results = ", ".join(f"Tensor {name}" for name in results_of(which))
    return f"{which.name}{'.more' * more}({', '.join(given)}) -> ({results})"


def _written(default: Any) -> str:
    return f'"{default}"' if isinstance(default, str) else str(default)


def arguments(
    which: Pass, arrays: Mapping[str, Tensor], options: Options, wanted: tuple[str, ...] = (), whole: bool = False
) -> tuple[Any, ...]:
    """What an operator is called with, up to the last argument that is not as its default; `whole`: all."""
    of = _places(which.name)
    before: list[Any] = [arrays[name] for name in of.first]
    if of.start > len(before):
        before.append(list(wanted))
    if len(arrays) > len(of.first):
        before += [arrays.get(name) for name in of.last]
    values = [*flat(options), VERSION if whole else ""]
    count = len(values)
    while count and _is_default(values[count - 1], _DEFAULTS[count - 1]):
        count -= 1
    return (*before, *values[:count])


def _is_default(value: Any, default: Any) -> bool:
    """Asks no symbolic number what it is equal to."""
    return value is default or (isinstance(value, (str, float)) and value == default)


def read(which: Pass, values: tuple[Any, ...]) -> tuple[tuple[str, ...], tuple[Any, ...], Options, tuple[str, ...]]:
    """The inverse of `arguments`, which no compiler follows: names of arrays, the arrays, options, what is wanted."""
    names, last, start, _, _ = _PLACES[which.name]
    tensors, wanted = values[: len(names)], tuple(*values[len(names) : start])
    if len(values) == start:
        return names, tensors, _NO_OPTIONS, wanted
    if type(values[start]) is not bool:  # `has_more`
        more = {name: x for name, x in zip(last, values[start:], strict=False) if x is not None}
        names, tensors, start = (*names, *more), (*tensors, *more.values()), start + len(last)
    return names, tensors, options_of(values[start : start + len(OPTIONS)]), wanted


def read_by_name(which: Pass, values: tuple[Any, ...]) -> tuple[dict[str, Any], Options, tuple[str, ...]]:
    """Likewise, with the arrays by their names."""
    names, tensors, options, wanted = read(which, values)
    return dict(zip(names, tensors, strict=True)), options, wanted
