"""What can be said of the arrays that tell where sequences lie and which of their keys count, and reading them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..arrays.adapters import TORCH, Native, place
from ..errors import ArgumentError
from ..problem import Problem
from ..sequences import Sequences, check_lengths, check_room


def count(library: Native, signatures: Mapping[str, tuple[Any, ...]], device: int) -> int:
    """How many sequences there are, by the signatures of arrays that fit each other and lie on `device`, that of q.

    Raises:
        ArgumentError: one is not an int32 vector of the right length, contiguous, on that device.
    """
    shape = tuple(signatures["cu_seqlens_q"][0])
    if len(shape) != 1 or shape[0] == 0:
        raise ArgumentError(
            f"cu_seqlens_q: expected shape (batch + 1,), got {shape}; a batch of none has the one entry 0"
        )
    batch = shape[0] - 1
    for name, signature in signatures.items():
        check_integers(library, name, signature, batch, device)
    return batch


_SHAPES = {"seqused_k": ("(batch,)", 0, ()), "kv_range": ("(batch, 2)", 0, (2,))}


def check_integers(library: Native, name: str, signature: Sequence[Any], batch: int, device: int) -> None:
    """Refuse one of these arrays that is not int32, of the right shape, on `device`."""
    shape, _, dtype, where = signature
    kind = library.dtype_name(dtype)
    if kind != "int32":
        raise ArgumentError(f"{name}: expected dtype int32, got {kind}; give {library.cast(name, 'int32')}")
    words, more, rest = _SHAPES.get(name, ("(batch + 1,)", 1, ()))
    wanted = (batch + more, *rest)
    if tuple(shape) != wanted:
        like = "q" if name == "kv_range" else "cu_seqlens_q"
        raise ArgumentError(f"{name}: expected shape {words} = {wanted} as {like} has it, got {tuple(shape)}")
    if where != device:
        raise ArgumentError(f"{name}: expected the device of q, {place(device)}, got {place(where)}; move it there")


def on_host(library: Native, sequences: Sequences) -> Sequences:
    """The same as NumPy arrays; what lies on a GPU is waited for."""
    wait = (lambda x: x.cpu()) if library is TORCH else (lambda x: x)
    return Sequences.of(**{name: library.to_numpy(wait(x)) for name, x in sequences.named().items()})


def sequences_of(arrays: Mapping[str, Any]) -> Sequences:
    """Those among a call's arrays by name."""
    return Sequences.of(**{name: arrays[name] for name in Sequences._fields if name in arrays})


def vet_lengths(library: Native, sequences: Sequences, problem: Problem) -> Sequences:
    """`on_host`, checked; on a GPU this waits.

    Raises:
        ArgumentError: they contradict each other or the arrays, or are beyond a bias or a mask.
    """
    lengths = on_host(library, sequences)
    check_lengths(lengths, problem.seqlen_q, problem.seqlen_k)
    if problem.packed:
        check_room(lengths, problem)
    return lengths
