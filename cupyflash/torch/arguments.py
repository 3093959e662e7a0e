"""The arguments of the operators, by their schemas.

They follow from the table of arrays and the list of options: the inputs that every call has, in the table's order; of a
backward, which gradients are wanted; the options, flat; then the inputs that a call may lack. Options and what stands
behind them have defaults. Those at the end that are equal to theirs, torch does not hand on: each would cost 0.1 us.
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
)

_BY = "by"


def flat(options: Options) -> tuple[Any, ...]:
    """The values of `OPTIONS`."""
    causal, scale, window, *others = options
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


_DEFAULTS = Options()


class _Arguments(NamedTuple):
    """The arguments of an operator.

    Attributes:
        names: of all, of which the last says who gives them; first, last: of the arrays before and after the others.
        options, end: where options begin and end; before them stands what is wanted, of a backward.
        defaults: of the options and the last arrays.
    """

    names: tuple[str, ...]
    first: tuple[str, ...]
    last: tuple[str, ...]
    options: int
    end: int
    defaults: tuple[Any, ...]


def _look_at(which: Pass) -> _Arguments:
    first = tuple([name for name in which.names(INPUT) if name not in which.optional])
    last = tuple([name for name in which.names(INPUT) if name in which.optional])
    before = (*first, *(("wanted",) if which.name == "backward" else ()))
    options = tuple([name for name, _, _ in OPTIONS])
    defaults = (*[default for _, _, default in OPTIONS], *[None for _ in last])
    names, end = (*before, *options, *last, _BY), len(before) + len(options)
    return _Arguments(names, first, last, len(before), end, defaults)


_ARGUMENTS = {which.name: _look_at(which) for which in (FORWARD, BACKWARD)}


@constant_in_programs  # which then do not ask at each call whether the table is as it was
def _arguments(name: str) -> _Arguments:
    return _ARGUMENTS[name]


def results_of(which: Pass) -> tuple[str, ...]:
    """All that the pass ever makes for a caller."""
    return which.names(RESULT, GRADIENT, where=lambda row: not row.hopper)


def names_of(which: Pass, values: Sequence[Any]) -> tuple[str, ...]:
    """The names of these arguments of an operator: the first of all."""
    return _arguments(which.name).names[: len(values)]


def schema(which: Pass) -> str:
    """The operator's schema."""
    of = _look_at(which)
    arrays = [f"Tensor {name}" for name in of.first]
    wanted = ["str[] wanted"] if "wanted" in of.names else []
    options = [f"{kind} {name}={_written(default)}" for name, kind, default in OPTIONS]
    more = [*(f"Tensor? {name}=None" for name in of.last), f'str {_BY}=""']
    results = ", ".join(f"Tensor {name}" for name in results_of(which))
    return f"{which.name}({', '.join([*arrays, *wanted, *options, *more])}) -> ({results})"


def _written(default: Any) -> str:
    return f'"{default}"' if isinstance(default, str) else str(default)


def arguments(
    which: Pass, arrays: Mapping[str, Tensor], options: Options, wanted: tuple[str, ...] = (), whole: bool = False
) -> tuple[Any, ...]:
    """What an operator is called with, up to the last argument that is not as its default; `whole`: all."""
    of = _arguments(which.name)
    before = [arrays.get(name) for name in of.first]
    if of.options > len(before):
        before.append(list(wanted))
    values = [*flat(options), *[arrays.get(name) for name in of.last]]
    if whole:
        return (*before, *values, VERSION)
    count = len(values)
    while count and _is_default(values[count - 1], of.defaults[count - 1]):
        count -= 1
    return (*before, *values[:count])


def _is_default(value: Any, default: Any) -> bool:
    """Asks no tensor, and no symbolic number, what it is equal to."""
    return value is default or (isinstance(value, (str, float)) and value == default)


def read(which: Pass, values: Sequence[Any]) -> tuple[dict[str, Any], Options, tuple[str, ...]]:
    """The inverse of `arguments`, which no compiler follows."""
    first, last, start, end = _places(which)
    arrays, count = dict(zip(first, values)), len(values)  # noqa: B905
    if count > end:
        arrays.update({name: x for name, x in zip(last, values[end:], strict=False) if x is not None})
    options = options_of(values[start:end]) if count > start else _DEFAULTS
    return arrays, options, tuple(*values[len(first) : start])


@functools.cache
def _places(which: Pass) -> tuple[tuple[str, ...], tuple[str, ...], int, int]:
    """What `read` takes of an `_Arguments`, which would take longer to take apart."""
    _, first, last, start, end, _ = _ARGUMENTS[which.name]
    return first, last, start, end
