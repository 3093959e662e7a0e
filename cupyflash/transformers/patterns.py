"""Which masks a model asks for, read off transformers' mask functions: a window of positions, or packed sequences.

transformers describes a mask by a function of (batch, head, query, key), composed of small closures. Those that say no
more than a window are known by their code, which all closures of one function share; any other is not ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

MaskFunction = Callable[..., Any]


class Pattern(NamedTuple):
    """The query at position i sees keys from i - left to i + right, None is unbounded; of its own sequence alone where
    `sequences`, (batch, seqlen), numbers the sequence of each token."""

    left: int | None = None
    right: int | None = None
    sequences: Tensor | None = None

    def __and__(self, other: Pattern) -> Pattern:
        sequences = other.sequences if self.sequences is None else self.sequences
        return Pattern(_least(self.left, other.left), _least(self.right, other.right), sequences)


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


CAUSAL, FULL = Pattern(right=0), Pattern()


def pattern_of(function: MaskFunction, local_size: int | None, config: Any, is_plain: bool) -> Pattern | None:
    """What a mask function says, or None if it says more: to the right all keys count, none, or as many as to the left.

    torch.compile does not let closures be read. Compiled, a window is known by what else transformers tells:
    `local_size`, its size, and whether the mask is a `is_plain` one, which nothing was added to.
    """
    if not torch.compiler.is_compiling():
        found = _read(function)
        return found if found and (found.right in (0, found.left)) else None
    if function is masking_utils.causal_mask_function:
        return CAUSAL
    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        return FULL
    is_chunk = local_size == getattr(config, "attention_chunk_size", None)
    if not is_plain or local_size is None or is_chunk or local_size != getattr(config, "sliding_window", None):
        return None
    causal = getattr(config, "is_causal", True)
    return Pattern(local_size - 1, 0) if causal else None


def _read(function: MaskFunction) -> Pattern | None:
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    reader = _READERS.get(code)
    return reader(_variables(function)) if reader else None


def _variables(function: MaskFunction) -> dict[str, Any]:
    """What a closure holds, by name."""
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _all_of(held: dict[str, Any]) -> Pattern | None:
    pattern = FULL
    for function in held["mask_functions"]:
        part = _read(function)
        if part is None:
            return None
        pattern &= part
    return pattern


def _readers() -> Iterator[tuple[str, tuple[Any, ...], Callable[[dict[str, Any]], Pattern | None]]]:
    """Names of mask functions, or of what makes them and something to call it with, and how they are read."""
    some = torch.zeros((1, 1), dtype=torch.int64)
    yield "causal_mask_function", (), lambda held: CAUSAL
    yield "bidirectional_mask_function", (), lambda held: FULL
    yield "and_masks", (masking_utils.causal_mask_function,), _all_of
    yield "sliding_window_overlay", (1,), lambda held: Pattern(left=held["sliding_window"] - 1)
    yield "sliding_window_bidirectional_overlay", (1,), lambda held: Pattern(*[held["sliding_window"]] * 2)
    yield "packed_sequence_mask_function", (some,), lambda held: Pattern(sequences=held["packed_sequence_mask"])
    # Positions count from the start of each sequence: a window of positions is one of places.
    yield "remap_positions_for_packed_sequence", (None, some), lambda held: _read(held["mask_function"])


def _by_code() -> dict[Any, Callable[[dict[str, Any]], Pattern | None]]:
    found: dict[Any, Callable[[dict[str, Any]], Pattern | None]] = {}
    for name, arguments, reader in _readers():
        known = getattr(masking_utils, name, None)  # None: a name that this transformers lacks
        if known is not None:
            found[(known(*arguments) if arguments else known).__code__] = reader
    return found


_READERS = _by_code()
