"""Block masks as calls take them: ours, or torch's, of flex_attention, and their arrays beside q and k."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from .arrays import torch_private
from .arrays.imported import constant_in_programs, shape_of, torch_itself
from .arrays.libraries import FOREIGN, library_of
from .arrays.placed import placed
from .block_mask import BlockMask, converters
from .errors import ArgumentError, UnsupportedError


def from_torch(mask: Any) -> BlockMask:
    """That of a `torch.nn.attention.flex_attention.BlockMask`; its mask_mod is asked once, in its partial blocks.

    `attention` takes such masks as they are, and converts each once, and again where its mask_mod, lengths or lists
    have been replaced. Converting waits for the GPU that it is on.

    Raises:
        ArgumentError: it is none.
        UnsupportedError: a program of torch.compile makes it, or, before PyTorch 2.13, is the first that asks.
    """
    if not _takes_objects() and torch_itself().compiler.is_dynamo_compiling():
        if not _is_converted(mask):
            raise UnsupportedError(
                "block_mask: expected a mask that has been converted, as PyTorch before 2.13 compiles: call "
                "cupyflash.masks.from_torch(mask) before the program does"
            )
    else:
        _convert(mask)
    found: BlockMask = mask._cupyflash_mask
    for x in (found, mask.mask_mod, *(getattr(mask, name) for name in _LISTS)):
        if x is not None:
            id(x)  # which a program of torch.compile then watches: with another one it is another program
    return found


@constant_in_programs
def _convert(mask: Any) -> None:
    """See to it that a mask has, as an attribute, what it says now. (A dictionary of all masks would be one more thing
    whose changes a compiled program watches.)"""
    if not hasattr(mask, "BLOCK_SIZE"):  # as torch.compile knows those that a program makes
        if not _is_of_flex(type(mask)):
            raise _no_mask(mask)
        raise UnsupportedError("block_mask: expected a mask that is made outside of the program of torch.compile")
    if not _is_converted(mask):
        import cupyflash.torch.masks

        parts = [getattr(mask, name, None) for name in _PARTS]
        mask._cupyflash_mask, mask._cupyflash_parts = cupyflash.torch.masks.convert(mask), parts


def _is_converted(mask: Any) -> bool:
    """Whether a mask has that already, and none of its parts has been replaced since."""
    parts = getattr(mask, "_cupyflash_parts", None)
    if parts is None or getattr(mask, _PARTS[0], None) != parts[0]:  # a tuple, which torch.compile knows by its value
        return False
    return all(getattr(mask, name) is x for name, x in zip(_PARTS[1:], parts[1:], strict=True))


@constant_in_programs
def _takes_objects() -> bool:
    """Whether torch.compile, if there is one, hands any object to a function like these: from 2.13 on."""
    return "torch" not in sys.modules or torch_private.version() >= (2, 13)


# What says which keys a mask of torch shows.
_LISTS = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"
_PARTS = "seq_lengths", "mask_mod", *_LISTS


def join(block_mask: Any, arrays: dict[str, Any], layout: str) -> bool:
    """Have the arrays of a mask join q and k, in their library and on their device, by the names of the table of
    arrays. Whether it is tall.

    Raises:
        ArgumentError: it is no mask, or one of other lengths; or, beside packed sequences, one of none. Numbers in its
            text are ints: torch.compile writes no symbols into texts.
    """
    mask = block_mask if isinstance(block_mask, BlockMask) else _other(block_mask)
    q, k, axis, packed = arrays["q"], arrays["k"], 1 if layout == "bshd" else 2, "cu_seqlens_q" in arrays
    of_q, of_k = _shape("q", q), _shape("k", k)
    if len(of_q) != 4 - packed:  # which is refused by name
        return False
    if not packed and len(of_k) == 4:
        lengths = of_q[axis], of_k[axis]
        if lengths != (mask.seqlen_q, mask.seqlen_k):
            raise ArgumentError(
                f"block_mask: expected one of {int(lengths[0])} queries and {int(lengths[1])} keys, as q and k have, "
                f"got one of {int(mask.seqlen_q)} and {int(mask.seqlen_k)}"
            )
    _check_owners(mask, arrays, of_q[0], of_q[3 - axis - packed])
    if packed and mask.tiles.size == 0:
        raise ArgumentError(
            "block_mask: expected room for the longest sequence, at least 1 query and 1 key, got a mask of "
            f"{int(mask.seqlen_q)} and {int(mask.seqlen_k)}"
        )
    if packed:  # sequences may end anywhere in its last tiles
        mask = mask.padded()
    _place(mask, arrays)
    return mask.tall and not packed


def join_cache(block_mask: Any, arrays: dict[str, Any]) -> None:
    """The same beside q and the caches, of a mask whose queries count as keys do: by the rows of a sequence.

    Raises:
        ArgumentError: it is no mask, or one for another number of rows.
    """
    mask = block_mask if isinstance(block_mask, BlockMask) else _other(block_mask)
    q, table = arrays["q"], arrays.get("block_table")
    of_q, of_cache = _shape("q", q), _shape("k_cache", arrays["k_cache"])
    of_table = None if table is None else _shape("block_table", table)
    if len(of_q) != 4 - ("cu_seqlens_q" in arrays):  # which is refused by name
        return
    if len(of_cache) == 4 and (of_table is None or len(of_table) == 2):
        rows = of_cache[1] * (1 if of_table is None else of_table[1])
        if mask.seqlen_q != mask.seqlen_k or rows > mask.seqlen_k:
            raise ArgumentError(
                f"block_mask: expected one of n queries and n keys, n at least {int(rows)}, the rows that a sequence "
                f"can have, since a query counts by the row at which it stands, got one of {int(mask.seqlen_q)} and "
                f"{int(mask.seqlen_k)}"
            )
    _check_owners(mask, arrays, of_q[0], of_q[-2])
    _place(mask, arrays)


def _shape(name: str, x: Any) -> Any:
    """Of an array that need not have one, as DLPack asks for none."""
    shape = shape_of(x)
    return FOREIGN.adopt({name: x})[name].shape if shape == () and library_of(name, x) is FOREIGN else shape


def _check_owners(mask: BlockMask, arrays: Mapping[str, Any], batch: int, heads_q: int) -> None:
    """batch: of q; of packed sequences cu_seqlens says how many there are."""
    if "cu_seqlens_q" in arrays:
        batch = math.prod(_shape("cu_seqlens_q", arrays["cu_seqlens_q"])) - 1
    for i, (name, n) in enumerate((("batch", batch), ("heads_q", heads_q))):
        if mask.tiles.shape[i] not in (1, n):
            raise ArgumentError(f"block_mask: expected {name} of 1 or {n}, as q has, got {mask.tiles.shape[i]}")


def _place(mask: BlockMask, arrays: dict[str, Any]) -> None:
    of_mask = {"block_tiles": mask.tiles, "block_bits": mask.bits}
    arrays.update({name: placed(name, x, arrays["q"], mask.kept) for name, x in of_mask.items()})


@constant_in_programs
def _is_of_flex(kind: type) -> bool:
    """Whether masks of this type are torch's. By name: in `sys.modules` torch.compile would watch all modules."""
    return any((x.__module__, x.__name__) == ("torch.nn.attention.flex_attention", "BlockMask") for x in kind.__mro__)


def _other(mask: Any) -> BlockMask:
    if _is_of_flex(type(mask)):
        return from_torch(mask)
    raise _no_mask(mask)


def _no_mask(mask: Any) -> ArgumentError:
    return ArgumentError(
        f"block_mask: expected a cupyflash.BlockMask, of cupyflash.masks, or one of torch's flex_attention, got a "
        f"{type(mask).__module__}.{type(mask).__qualname__}; masks.from_dense takes booleans"
    )


converters.append(_other)
