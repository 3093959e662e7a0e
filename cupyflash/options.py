"""Options as plain Python values: what the user gave is converted, or refused by name, before anything looks at it.

Plain values compare and hash by what they say. A tensor compares by identity and can change in place, so it must not
become part of the key under which a call is kept. A 0-d array on a GPU is read, which waits for the GPU.
"""

from __future__ import annotations

import math
import numbers
import sys
import warnings
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from .arrays.imported import constant_in_programs, is_instance
from .arrays.torch_private import is_differentiated
from .errors import FROM_ELSEWHERE, ArgumentError, UnsupportedError

LAYOUTS = ("bshd", "bhsd")

Window = tuple["int | None", "int | None"]
T = TypeVar("T")


class Options(NamedTuple):
    """The options of a call: values of exactly these types, as `make_options` gives them."""

    causal: bool = False
    scale: float | None = None
    window: Window | None = None
    layout: str = "bshd"
    deterministic: bool = False
    softcap: float | None = None
    dropout_p: float = 0.0
    mods: str = ""  # as `mods.bind` makes it
    tall: bool = False  # whether there is a block mask that is (BlockMask)
    of_8_bits: bool = False  # whether keys in pages were written from a cache of 8 bits (plan/prefill.py)


def make_options(
    causal: Any = False,
    scale: Any = None,
    window: Any = None,
    layout: Any = "bshd",
    deterministic: Any = False,
    softcap: Any = None,
    dropout_p: Any = 0.0,
    mods: str = "",
) -> Options:
    """The `Options` that a user's arguments mean.

    Raises:
        ArgumentError: one is not of its type.
        UnsupportedError: a derivative with respect to one would be lost.
    """
    if not (causal is False or causal is True):
        causal = flag("causal", causal)
    if not (scale is None or type(scale) is float):
        scale = number("scale", scale)
    if window is not None and not (
        type(window) is tuple and len(window) == 2 and type(window[0]) is type(window[1]) is int
    ):
        window = _pair(window)
    if type(layout) is not str or layout not in LAYOUTS:
        layout = choice("layout", layout, LAYOUTS)
    if not (deterministic is False or deterministic is True):
        deterministic = flag("deterministic", deterministic)
    if not (softcap is None or type(softcap) is float):
        softcap = number("softcap", softcap)
    if type(dropout_p) is not float:
        dropout_p = number("dropout_p", dropout_p, "a number from 0 on and below 1")
    return Options(causal, scale, window, layout, deterministic, softcap, dropout_p, mods)


def flag(name: str, x: Any) -> bool:
    """True or False, of Python or NumPy; 0 or 1; or a 0-d array that holds one of these."""
    value = _value(name, x)
    if isinstance(value, bool) or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise ArgumentError(f"{name}: expected True or False, got {_shown(x)}")


def number(name: str, x: Any, what: str = "a number or None") -> float:
    """A finite real number, of Python or NumPy, or a 0-d array that holds one. True is not a number."""
    value = _value(name, x)
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, Decimal)):
        raise ArgumentError(f"{name}: expected {what}, got {_shown(x)}")
    try:
        result = float(value)
    except (ArithmeticError, TypeError, ValueError):  # 10**400, a signalling NaN
        result = math.nan
    is_array = type(x) is not int and type(x) is not float and _shape(x) is not None
    if not is_array and not math.isfinite(result):  # of arrays `problem` asks: a tracer has no answer yet
        raise ArgumentError(f"{name}: expected a finite number, got {_shown(x)}")
    return result


def whole(name: str, x: Any, what: str = "an integer") -> int:
    """An integer, of Python or NumPy, or a 0-d array that holds one. Neither True nor 2.0 is an integer."""
    value = _value(name, x)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentError(f"{name}: expected {what}, got {_shown(x)}")
    return int(value)


def choice(name: str, x: Any, choices: tuple[str, ...]) -> str:
    """One of `choices`."""
    if not isinstance(x, str) or x not in choices:
        expected = " or ".join(f'"{c}"' for c in choices)
        raise ArgumentError(f"{name}: expected {expected}, got {_shown(x)}")
    return str.__str__(x)  # a plain one, also of an Enum's member


def several(name: str, x: Any, convert: Callable[[str, Any], T]) -> tuple[T, ...]:
    """One value, or an iterable of them, as a tuple of what `convert` makes of each."""
    items = (x,)
    if not isinstance(x, (str, bytes, Mapping)) and hasattr(type(x), "__iter__") and _shape(x) != ():
        items = tuple(x)
    if not items:
        raise ArgumentError(f"{name}: expected at least one value, got {_shown(x)}")
    return tuple(convert(name, item) for item in items)


def _pair(window: Any) -> Window:
    """A window of plain integers and None."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ArgumentError(
            "window: expected a pair (left, right), a tuple or list of integers and None, or None alone; "
            f"got {_shown(window)}"
        )
    left, right = window[0], window[1]
    if not (type(left) is int or left is None):
        left = whole("window", left, "left to be an integer or None")
    if not (type(right) is int or right is None or is_instance(right, "torch", "SymInt")):  # of torch.export
        right = whole("window", right, "right to be an integer or None")
    return left, right


_minus_one_is_known = False


@constant_in_programs
def warn_of_minus_one(window: Window) -> None:
    """Say once in this process what a bound of -1 means here; to users of flash-attn it means "unbounded"."""
    global _minus_one_is_known
    if _minus_one_is_known or (None not in window and sum(filter(None, window)) < 0):
        return  # a sum below 0 is an error, whose message says the same
    frame, level = sys._getframe(), 1  # of this function, for `warnings`
    while frame.f_back is not None and Path(__file__).parent in Path(frame.f_code.co_filename).parents:
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"window: in {window}, the bound of -1 hides the query's own position. If an unbounded side is meant, as -1 "
        "means in flash-attn, write None",
        UserWarning,
        stacklevel=level,
    )
    _minus_one_is_known = True


def _value(name: str, x: Any) -> Any:
    """The Python value of a NumPy scalar or a 0-d array; anything else as it is; None for what is no number."""
    if type(x) in (int, float, bool):
        return x
    if isinstance(x, np.ma.MaskedArray):
        return None
    if isinstance(x, np.ndarray) and x.shape == ():
        x = x[()]
    if isinstance(x, np.generic):
        number_like = x.dtype.kind in "biuf" or x.dtype.type.__module__ == "ml_dtypes"
        return x.item() if number_like else None  # a time is an integer to Python's numbers
    return _read(name, x) if _shape(x) == () and hasattr(type(x), "item") else x


def _shape(x: Any) -> tuple[int, ...] | None:
    """The shape of an array of any library; None for what has none, or no plain one."""
    try:
        shape = x.shape
    except FROM_ELSEWHERE:
        raise
    except Exception:
        return None
    return shape if isinstance(shape, tuple) else None


def _read(name: str, x: Any) -> Any:
    """The value of a 0-d array of any library, after the work that computes it."""
    if _is_followed(x):
        raise UnsupportedError(
            f"{name}: expected a plain Python value, got one that autograd or JAX follows and would lose sight of here"
            + ("; for its gradient multiply q by it and give scale=1.0" if name == "scale" else "")
            + "; inside jax.jit, name it in static_argnames"
        )
    try:
        if _is_capturing(x):
            raise RuntimeError("it lies on a GPU whose work is being captured in a CUDA graph")
        return x.item()
    except FROM_ELSEWHERE:
        raise
    except Exception as e:
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise ArgumentError(f"{name}: expected a value that can be read now, got {_shown(x)}: {reason}") from e


def _is_followed(x: Any) -> bool:
    """Whether torch or JAX would differentiate what is computed with x."""
    if is_instance(x, "torch", "Tensor"):
        return is_differentiated(x)
    return is_instance(x, "jax", "Array") and isinstance(x, sys.modules["jax"].core.Tracer)


def _is_capturing(x: Any) -> bool:
    """Whether x lies on a GPU whose work is being captured, so that waiting for it is not allowed."""
    if is_instance(x, "torch", "Tensor"):
        return x.is_cuda and sys.modules["torch"].cuda.is_current_stream_capturing()
    return is_instance(x, "cupy", "ndarray") and sys.modules["cupy"].cuda.get_current_stream().is_capturing()


def _shown(x: Any) -> str:
    """A short form of any object, for messages; nothing is waited for."""
    kind, shape = f"{type(x).__module__}.{type(x).__qualname__}", _shape(x)
    if shape is not None and not isinstance(x, (np.ndarray, np.generic)):
        return f"a {kind} of shape {tuple(shape)}"
    try:
        words = " ".join(repr(x).split())
    except FROM_ELSEWHERE:
        raise
    except Exception:
        words = f"a {kind}"
    return words if len(words) <= 100 else words[:97] + "..."
