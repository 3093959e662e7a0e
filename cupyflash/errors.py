"""What cupyflash raises.

    CupyflashError
    +-- ArgumentError       an argument is wrong                          (also a ValueError)
    +-- UnsupportedError    a valid wish that this version, GPU or driver cannot fulfil (also a NotImplementedError)
    +-- DeviceError         a GPU was asked for and none is usable        (also a RuntimeError)
    +-- CompileError        the compiler refused a kernel                 (also a RuntimeError)
    +-- CacheFullError      a PagedCache has too few free pages           (also a MemoryError)

Each message names the argument, what was expected, what came, and the way out. All checks run before anything reaches
CUDA: after an error nothing was launched and nothing is lost.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class CupyflashError(Exception):
    """Base of all errors that cupyflash raises on purpose."""


class ArgumentError(CupyflashError, ValueError):
    """An argument has the wrong type, shape, dtype, device or value."""


class UnsupportedError(CupyflashError, NotImplementedError):
    """The request is meaningful, but this version, GPU, driver or installation cannot serve it."""


class DeviceError(CupyflashError, RuntimeError):
    """A GPU was asked for and none is usable."""


class CacheFullError(CupyflashError, MemoryError):
    """A `PagedCache` has too few free pages for what was asked; nothing was changed."""


class CompileError(CupyflashError, RuntimeError):
    """NVRTC refused a kernel.

    Attributes:
        symbol: name of the kernel.
        arch: architecture it was compiled for, such as ``sm_90``.
        log: the whole compiler log.
        mods: what the kernel has of a user's own expressions, as text.
    """

    def __init__(self, symbol: str, arch: str, log: str, mods: str = "") -> None:
        first_error = next((line for line in log.splitlines() if "error" in line), log.strip()[:200])
        super().__init__(
            f"kernel {symbol}: NVRTC could not compile it for {arch}: {first_error}\n"
            + "".join(f"It has {line:.500}\n" for line in mods.splitlines())
            + "Please report this together with the output of `cupyflash doctor --json`."
        )
        self.symbol, self.arch, self.log, self.mods = symbol, arch, log, mods

    def __reduce__(self) -> tuple[type[CompileError], tuple[str, str, str, str]]:
        return type(self), (self.symbol, self.arch, self.log, self.mods)


def by_their_names(**theirs: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for functions that have other names for arguments of ours: errors name them as the caller did.

    Args:
        theirs: by our name.
    """
    word = re.compile(rf"\b({'|'.join(theirs)})\b")

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except (ArgumentError, UnsupportedError) as error:
                message = word.sub(lambda name: theirs[name[0]], str(error))
                raise type(error)(message).with_traceback(error.__traceback__) from error.__cause__

        return call

    return decorated


# What is raised while an array is looked at and is not about it: by a handler of signals that ends what takes long, or
# where memory is short. It goes on as it is, while all else that an array or its library raises is an ArgumentError.
FROM_ELSEWHERE = (TimeoutError, MemoryError)
