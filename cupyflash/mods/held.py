"""What functions of Python hold: arrays, and all else that decides what they compute."""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any

# Whose modules and functions stay as they are.
_LIBRARIES = ("builtins", "cupy", "cupyflash", "jax", "jaxlib", "numpy", "torch")
_CONSTANT = (*_LIBRARIES, "math", "operator", "_operator")
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_IMPORT = dis.opmap["IMPORT_NAME"]
# How names begin of what looks up something that code does not name, or asks what differs from call to call.
_ASKING = ("__import__", "eval", "exec", "globals", "input", "locals", "open", "vars",
           "current_", "get_", "initial_seed", "is_", "normal", "rand")  # fmt: skip


def captured(function: Callable[..., Any], is_array: Callable[[Any], bool]) -> list[tuple[str, Any, bool]]:
    """Name, array and whether the function itself has it: all that its closure, defaults or module hold and its code
    names, and likewise functions that it names or holds (torch's and_masks holds several)."""
    return [(word, x, of is function) for of in functions_in(function) for word, x in held(of).items() if is_array(x)]


def functions_in(function: Any) -> list[types.FunctionType]:
    """A function of Python, and those of the user's that it calls by name."""
    found: dict[int, types.FunctionType] = {}
    left = [function]
    while left:
        x = left.pop(0)
        if isinstance(x, (tuple, list)) and all(map(callable, x)):
            left.extend(x)
        elif isinstance(x, types.FunctionType) and id(x) not in found and (x is function or _is_of_user(x)):
            found[id(x)] = x
            left.extend(held(x).values())
    return list(found.values())


def _is_of_user(function: types.FunctionType) -> bool:
    home = str(function.__module__)
    return home == "torch.nn.attention.flex_attention" or home.split(".")[0] not in _LIBRARIES


def held(function: types.FunctionType) -> dict[str, Any]:
    """What a function's code names, in its defaults, its module and its closure."""
    module, defaults, closure = _parts(function)
    return module | defaults | closure


def _parts(function: types.FunctionType) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """That of its module, its defaults and its closure, which may have one name for different things."""
    code, module = function.__code__, function.__globals__
    named = {word: module[word] for word in names_in(code) if word in module}
    defaults = function.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount]
    given = dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
    closure = zip(code.co_freevars, function.__closure__ or (), strict=True)
    around = {word: cell.cell_contents for word, cell in closure if _is_filled(cell)}
    return named, given | (function.__kwdefaults__ or {}), around


def names_in(code: types.CodeType) -> set[str]:
    """Names that code and what is defined in it look up in the module."""
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return set(code.co_names).union(*map(names_in, inner))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _imports(code: types.CodeType) -> bool:
    """Whether code, or what is defined in it, imports something."""
    return _IMPORT in code.co_code[::2] or any(_imports(x) for x in code.co_consts if isinstance(x, types.CodeType))


def _is_constant(home: str, word: str) -> bool:
    """Whether what a library calls so computes the same in each call."""
    return home.split(".")[0] in _CONSTANT and not word.startswith(_ASKING) and ".rand" not in home


class Unknown(Exception):
    """A function holds something that may change unseen."""


class Held:
    """A function as it is now: equal to another, or to itself later on, if both hold the same, and so compute the same.

    Args:
        function: of Python.
        labels: the names of the arrays that it may hold, by their ids; arrays count by these.

    Raises:
        Unknown: it holds something of which that cannot be told: an object of a class, a dict, a module of the user's.
    """

    def __init__(self, function: Any, labels: Mapping[int, str]) -> None:
        if not isinstance(function, types.FunctionType):
            raise Unknown
        functions = functions_in(function)
        self.function: Any = function
        self.labels = labels
        self._numbers = {id(x): i for i, x in enumerate(functions)}
        self._key = tuple(map(self._of_function, functions))

    def release(self) -> None:
        """Keeps no array alive from now on: what is compared needs none."""
        self.function, self.labels = None, {}

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self._key == other._key

    def _of_function(self, function: types.FunctionType) -> Hashable:
        code, module = function.__code__, function.__globals__
        others = [word for word in names_in(code) if word not in module]
        if function.__dict__ or _imports(code) or any(word.startswith(_ASKING) for word in others):
            raise Unknown
        untyped: Any = function  # not every version of typeshed knows its builtins
        below = untyped.__builtins__
        parts = (*_parts(function), {word: below[word] for word in others if word in below})
        return code, *(tuple((word, self._of(x)) for word, x in part.items()) for part in parts)

    def _of(self, x: Any) -> Hashable:
        kind = type(x)
        if id(x) in self.labels:
            return "array", self.labels[id(x)]
        if kind in _PLAIN:
            return kind, repr(x)
        if kind.__module__ == "numpy" and getattr(x, "shape", None) == () and not x.dtype.hasobject:
            return kind, x.dtype, x.tobytes()
        if kind in (tuple, list):
            if any(id(item) in self.labels for item in x):  # for which a trace has no symbols there
                raise Unknown
            return kind, tuple(map(self._of, x))
        if id(x) in self._numbers:
            return "function", self._numbers[id(x)]
        word = getattr(x, "__name__", None)
        home = word if kind is types.ModuleType else None
        if callable(x):
            home = getattr(x, "__module__", None) or kind.__module__  # NumPy's ufuncs have none before 2.2
        if isinstance(home, str) and isinstance(word, str) and _is_constant(home, word):
            library = sys.modules.get(home)
            if x is library or x is getattr(library, word, None):  # else an object of a class, or somebody's own
                return "library", id(x)  # its library keeps it
        raise Unknown
