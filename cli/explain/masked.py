"""What `explain` says of a block mask: the tiles that are visited, and what the kernels do that list them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cupyflash.operand import MASK_TILE, TILE_WORDS
from cupyflash.plan.families import Plan
from cupyflash.problem import Problem

from .. import block_masks
from .work import Work, added_shape, workspace_bytes

LISTS = ("key_lists", "query_lists")  # what kernels before the others write


def facts(problem: Problem, text: str | None) -> dict[str, Any] | None:
    """For JSON and the report; None: there is no mask."""
    if text is None:
        return None
    found = block_masks.visited(text, problem)
    return {"mask": text, "tile": MASK_TILE, "bytes": _bytes(problem, text), "density": found.density,
            **found._asdict()}  # fmt: skip


def bits_instead(problem: Problem, options: Mapping[str, Any], plan: Plan) -> int:
    """How many bytes more other kernels read where a mask becomes a block mask, all of which may be seen in part."""
    bits = workspace_bytes(plan.workspace).get("block_bits", 0)
    reads_mods = not problem.bias and any(x.variant.mods for x in plan.launches if x.variant.over != "mask_tiles")
    return bits - (0 if reads_mods else _mask_bytes(problem, options)) if bits else 0


def list_work(problem: Problem, options: Mapping[str, Any], plan: Plan) -> list[Work]:
    """Of the launches before the others, which make a block mask of a mask or of a mask_mod, or read one and write
    lists of what each tile visits."""
    size, found, text = workspace_bytes(plan.workspace), [], options["block_mask"]
    tiles = size.get("block_tiles", 0)
    if text is not None:
        tiles = 4 * math.prod(block_masks.make(text, problem.seqlen_q, problem.seqlen_k).tiles.shape)
    for over in (x.variant.over for x in plan.launches):
        if over == "mask_tiles":
            found.append(Work(0.0, _mask_bytes(problem, options) + tiles + size["block_bits"]))
        elif over in LISTS:
            found.append(Work(0.0, tiles + size[over]))
    return found


def _mask_bytes(problem: Problem, options: Mapping[str, Any]) -> int:
    """Of a mask, or of the arrays that mods read."""
    if problem.bias is None:
        return int(options["mod_bytes"])
    assert problem.bias.mask is not None
    return math.prod(added_shape(problem, problem.bias.mask))


def _bytes(problem: Problem, text: str) -> int:
    """Of the mask on the device: a word a tile, and the bits of those that are seen in part."""
    mask = block_masks.make(text, problem.seqlen_q, problem.seqlen_k)
    return int(4 * mask.tiles.size + 4 * len(mask.bits) * TILE_WORDS)
