"""Run a call: on the GPU by its plan, on the caller's stream, or on the CPU path."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..arrays.adapters import CPU, CUPY, NUMPY, Native
from ..arrays.readable import unreadable, vet_all
from ..errors import FROM_ELSEWHERE, ArgumentError, DeviceError
from ..gpu import device
from ..gpu.device import Device
from ..operands import BACKWARD, FORWARD, Pass
from ..options import Options
from ..plan.families import GPU_DTYPES, check_supported, is_taken
from ..problem import Problem
from ..sequences import Sequences
from . import on_cpu, staging, where
from .checks import check
from .find import find
from .last import again
from .made import launched
from .packed import sequences_of, vet_lengths
from .passes import WITH_LSE, given_of, has_own_v
from .pieces import without_repeats
from .variables import is_debug, wish

Found = tuple[tuple[str, ...], Sequence[Any]]
BACKENDS = ("auto", "cuda", "cpu")


def asked_backend() -> str:
    """What CUPYFLASH_BACKEND asks for.

    Raises:
        ArgumentError: it has another value.
    """
    wish = os.environ.get("CUPYFLASH_BACKEND") or "auto"
    if wish not in BACKENDS:
        raise ArgumentError(f"CUPYFLASH_BACKEND: expected one of {', '.join(BACKENDS)}, got {wish!r}")
    return wish


def backend() -> str:
    """ "cuda" or "cpu": where NumPy arrays run, by CUPYFLASH_BACKEND and what this machine has.

    Raises:
        ArgumentError: if the variable has another value.
        DeviceError: if it asks for a GPU and none is usable.
    """
    wish = asked_backend()
    if wish == "cuda" and device.count() == 0:
        raise DeviceError(f"CUPYFLASH_BACKEND=cuda: {device.why_none()}")
    if wish == "auto":
        usable = device.count() > 0 and Device.of(0).capability >= device.MIN_CAPABILITY
        return "cuda" if usable else "cpu"
    return wish


def forward(
    library: Native,
    arrays: Mapping[str, Any],
    options: Options,
    want_lse: bool = True,
    into: Sequence[Any] | None = None,
) -> tuple[Any, Any | None]:
    """(out, lse) of arrays of one native library; out is contiguous, in the caller's layout.

    Where nobody wants lse it may be None: allocating it costs the host as much as allocating out.

    Args:
        arrays: q, k, v and what features bring, by the names of the table of arrays.
        into: the results on a GPU that it writes, as it would make them; None: new ones.
    """
    _, found = _run(FORWARD, library, arrays, options, WITH_LSE if want_lse else (), into)
    return found[0], found[1] if want_lse else None


def forward_again(
    names: tuple[str, ...], tensors: Collection[Any], options: Options, want_lse: bool, are_plain: bool = True
) -> tuple[Any, Any | None] | None:
    """`forward` of plain tensors as those of the last call or series of its kind were, which the comparison with these
    says, too; None: somebody must look at them.

    Args:
        are_plain: only if they need no gradient; False: nobody records what becomes of them.
    """
    if is_debug():
        return None
    found = again((names, options, WITH_LSE if want_lse else (), wish()), tensors, are_plain)
    if found is None:
        return None
    made = found[1]
    return made[0], made[1] if want_lse else None


def backward_again(
    names: tuple[str, ...], tensors: Collection[Any], options: Options, wanted: tuple[str, ...]
) -> dict[str, Any] | None:
    """Likewise `backward`, which nobody records."""
    found = None if is_debug() else again((names, options, wanted, wish()), tensors)
    return found and dict(zip(found[0].names, found[1]))  # noqa: B905 (as below)


def backward(
    library: Native, arrays: Mapping[str, Any], options: Options, wanted: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The gradients by name, of arrays of one native library; contiguous, in the caller's layout.

    Args:
        arrays: q, k, v, out, dout, lse, and what of dlse and of features there is, by the names of the table of arrays.
        wanted: the gradients that are made only where somebody asks for them.
    """
    return dict(zip(*_run(BACKWARD, library, arrays, options, wanted)))  # noqa: B905 (which costs the host)


def _run(
    which: Pass,
    library: Native,
    arrays: Mapping[str, Any],
    options: Options,
    wanted: tuple[str, ...],
    into: Sequence[Any] | None = None,
) -> Found:
    """What a pass makes, in the order of `Given.made` and `Given.shaped`, after the names of the first of it; `into`:
    as of `forward`."""
    kind, tensors = (tuple(arrays), options, wanted, wish()), arrays.values()
    found = again(kind, tensors, False, into) if library.compares and not is_debug() else None
    if found is None:
        try:
            keys, pointers = library.look(tensors)
        except FROM_ELSEWHERE:
            raise
        except Exception as e:
            raise unreadable(library, e, arrays) from e
        device = keys[0][3]
        if device == CPU:
            return _on_host(which, library, arrays, keys, options, wanted)
        stream = library.stream(device)
        call = find(which, library, arrays, keys, pointers, kind, stream)
        found = call, launched(library, call, tensors, pointers, stream, into)
    return found[0].names, found[1]


def _on_gpu(library: Native, problem: Problem, is_worth: Callable[[], bool], *, backward: bool = False) -> bool:
    """Whether arrays in host memory are copied to the GPU: NumPy's alone, where it has a kernel for them and, unless
    CUPYFLASH_BACKEND asks for it, the call is worth it. No GPU is looked for unless it decides."""
    if library is not NUMPY:
        return False
    asked = os.environ.get("CUPYFLASH_BACKEND") or "auto"
    if asked == "auto" and not (problem.dtype in GPU_DTYPES and is_worth()):
        return False
    if backend() == "cpu":
        return False
    if asked == "cuda":  # what has no kernel is refused by name
        check_supported(problem, Device.of(0))
        return True
    return is_taken(problem, Device.of(0), backward=backward)


def _through_gpu(which: Pass, arrays: Mapping[str, np.ndarray], options: Options, wanted: tuple[str, ...]) -> Found:
    """`_run` of NumPy arrays by way of the current GPU. What broadcasts to scores is copied without what repeats."""
    import cupy

    spread = {name for name in arrays if which.rows[name].broadcasts}
    once = [without_repeats(x) if name in spread else x for name, x in arrays.items()]
    copies = dict(zip(arrays, staging.to_gpu(once), strict=True))
    copies |= {name: cupy.broadcast_to(copies[name], arrays[name].shape) for name in spread}
    names, found = _run(which, CUPY, copies, options, wanted)
    made = [name for name in which.made(arrays, wanted) if not which.rows[name].hopper]
    return names, staging.to_host(found[: len(made)])


def _on_host(
    which: Pass,
    library: Native,
    arrays: Mapping[str, Any],
    keys: Sequence[tuple[Any, ...]],
    options: Options,
    wanted: tuple[str, ...],
) -> Found:
    """`_run` of arrays in host memory; whatever a pass can make, it makes."""
    vet_all(library, arrays)
    names = tuple(arrays)
    problem, _ = check(which, names, library, keys, options)
    lengths = (
        vet_lengths(library, sequences_of(arrays), problem) if not arrays.keys().isdisjoint(Sequences._fields) else None
    )
    is_worth = partial(where.worth_the_gpu, which, arrays, problem, lengths, wanted)
    if _on_gpu(library, problem, is_worth, backward=which is BACKWARD):
        return _through_gpu(which, arrays, options, wanted)
    found = on_cpu.compute(which, library, arrays, problem, options, lengths, wanted)
    return given_of(which, names, wanted, has_own_v(names, keys)).made, found
