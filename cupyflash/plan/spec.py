"""Spec: what decides which kernels a call takes. Lengths and other numbers do not: those are its `Extents`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..bias import becomes_blocks, flags_of_added
from ..operands import BACKWARD
from ..options import Window
from ..problem import ITEMSIZE, Problem
from . import mod_tiles

LEAST_UNIT = 1e-20  # slopes over a scale that is smaller might not fit fp32
NARROW = 4096  # keys
# The gradients that a backward makes if asked to, but for those of mods: each that a feature brings is a field below.
LEARNED = tuple(f"d{BACKWARD.rows[name].feature}" for name in BACKWARD.learned)
PAIRS, CHUNKS, ONE_ROW = 1, 2, 4  # how neighbouring keys of a bias lie (launch/alignment.py)


def _width(window: Window) -> float:
    """How many keys a query may see by it."""
    left, right = window
    return math.inf if left is None or right is None else left + right + 1


class Spec(NamedTuple):
    """What calls that have the same kernels on a device have in common.

    A kernel has the feature of a field whose name is also a flag of its variant (`Variant.of`).

    Attributes:
        causal, window: the mask is the causal one, is another one (with ranges of keys, too); neither: there is none.
        narrow: a backward by whose window no query sees more than `NARROW` keys.
        scale_first: scores are scaled before their maximum is taken.
        softcap: by value, since prepared params hold it. packed: sequences lie one behind the other.
        alibi: how many dimensions the slopes have, by value like softcap. dalibi: a backward makes their gradient.
        kv_range: each sequence has a range of keys.
        sink: each head of q has one. dsink: a backward makes their gradient.
        bias: scores have a bias, or a mask, or both; wide_bias: the bias is of fp32, not of q's dtype; mask: there is a
            mask; masked_bias: beside a bias; paired_bias: two neighbouring keys of both are read together: PAIRS or
            CHUNKS; bias_of_keys: queries share a row.
        dbias: of a backward that makes its gradient, along which dimensions the bias has elements of its own.
        dropout: how many dimensions the seed of dropout has, and dropout_p, by value like softcap.
        block_mask: there is a block mask: 1, and who has one of its own (Problem), by value like softcap. tall: of a
            forward, it is (BlockMask). mask_tiles: it is made of a mask, which no other kernel then reads: along which
            dimensions the mask has elements of its own, likewise. mask_mod: the mask is this mod.
        mods: a user's expressions, which count as a bias; bias_beside_mods: there is one, or a mask; mod_shapes: of
            the arrays that they read, by value like softcap; dmods: the numbers of those whose gradients a backward
            makes.
        is_empty: no queries, keys or sequences. backward, not forward; grouped: of fewer heads of k than of q.
        unaligned: some row of the arrays does not start at a multiple of 16 bytes. tma: TMA can read the arrays.
        family: that the user insists on. clocks: blocks record how long each took, where the family has such a form.
        page_size, pages, whole_pages, of_8_bits: of a forward over a cache, as `Problem`, by value like softcap.
        head_dim_v: that of v, out and their gradients, where it differs from that of q and k; else 0.
        split_keys: not of a call, but of those of its kernels that divide keys (splits.py).
    """

    dtype: str
    head_dim: int
    causal: bool = False
    window: bool = False
    scale_first: bool = False
    softcap: float | None = None
    deterministic: bool = False
    packed: bool = False
    alibi: int = 0
    dalibi: bool = False
    kv_range: bool = False
    sink: bool = False
    dsink: bool = False
    bias: bool = False
    wide_bias: bool = False
    mask: bool = False
    paired_bias: int = 0
    bias_of_keys: bool = False
    masked_bias: bool = False
    dbias: tuple[bool, ...] | None = None
    dropout: int = 0
    dropout_p: float = 0.0
    block_mask: int = 0
    tall: bool = False
    mask_tiles: tuple[bool, ...] | None = None
    mask_mod: str = ""
    bias_beside_mods: bool = False
    mods: str = ""
    mod_shapes: tuple[tuple[int, ...], ...] = ()
    dmods: tuple[int, ...] = ()
    is_empty: bool = False
    backward: bool = False
    grouped: bool = False
    unaligned: bool = False
    tma: bool = True
    family: str | None = None
    clocks: bool = False
    page_size: int = 0
    pages: int = 0
    whole_pages: bool = False
    of_8_bits: bool = False
    split_keys: bool = False
    narrow: bool = False
    head_dim_v: int = 0

    @classmethod
    def of(
        cls, problem: Problem, *, aligned: bool = True, tma: bool = True, dalibi: bool = False, dsink: bool = False,
        dbias: bool = False, dmods: tuple[int, ...] = (), paired_bias: int = 0, tiles_fit: bool | None = None,
        **asked: Any,
    ) -> Spec:  # fmt: skip
        """That of a problem.

        Args:
            aligned: whether every row of q, k and v (and out and dout) starts at a multiple of 16 bytes.
            tma: whether TMA can read q, k and v (and dout), if they are aligned.
            dalibi, dsink, dbias: whether a backward makes the gradient of the slopes, the sinks, the bias, where there
                are any.
            dmods: the numbers of the arrays of mods whose gradients a backward makes.
            paired_bias: how neighbouring keys of a bias (and of a mask) lie, as `Access` has it.
            tiles_fit: what `mod_tiles` says of those of a mask or a mask_mod; None: of the problem's.
            asked: `backward`, `family`, `clocks`.
        """
        learns_bias = dbias and problem.bias is not None and problem.bias.dtype != "bool"
        least = LEAST_UNIT if problem.alibi else 0
        return cls(
            problem.dtype,
            problem.head_dim,
            causal=problem.causal and not problem.kv_range,
            window=(problem.masked and not problem.causal) or problem.kv_range,
            scale_first=problem.scale <= least and problem.softcap is None,
            softcap=problem.softcap,
            deterministic=problem.deterministic,
            packed=problem.packed,
            alibi=problem.alibi,
            dalibi=dalibi and problem.alibi > 0 and bool(asked.get("backward")),
            kv_range=problem.kv_range,
            sink=problem.sink,
            dsink=dsink and problem.sink and bool(asked.get("backward")),
            dbias=problem.bias.own if problem.bias and learns_bias and asked.get("backward") else None,
            dropout=problem.dropout,
            dropout_p=problem.dropout_p,
            tall=problem.tall and not asked.get("backward"),
            mod_shapes=problem.mod_shapes,
            dmods=dmods if asked.get("backward") else (),
            grouped=bool(asked.get("backward")) and problem.heads_q != problem.heads_k,
            is_empty=0 in (problem.batch, problem.seqlen_q, problem.seqlen_k),
            unaligned=not aligned,
            tma=tma and aligned,
            page_size=problem.page_size,
            pages=problem.pages,
            whole_pages=problem.whole_pages,
            of_8_bits=problem.of_8_bits,
            narrow=bool(asked.get("backward")) and _width(problem.window) <= NARROW,
            head_dim_v=problem.head_dim_v if problem.head_dim_v != problem.head_dim else 0,
            **_added(problem, paired_bias, mod_tiles.fit_in(problem) if tiles_fit is None else tiles_fit, bool(dmods)),
            **asked,
        )

    @property
    def width_v(self) -> int:
        """head_dim of v."""
        return self.head_dim_v or self.head_dim

    @property
    def widest(self) -> int:
        """The larger head_dim, by which tiles are chosen."""
        return max(self.head_dim, self.width_v)

    @property
    def widths(self) -> tuple[int, int, int]:
        """What sizes of tiles in shared memory depend on: head_dim, that of v where it differs, bytes of an element."""
        return self.head_dim, self.head_dim_v, ITEMSIZE[self.dtype]

    @property
    def paged(self) -> bool:
        """Whether keys lie in pages."""
        return self.page_size > 0

    @property
    def of_whole(self) -> bool:
        """Whether a block mask has rows of whole sequences, of which queries over a cache are the last."""
        return self.paged and self.block_mask > 0 and self.mask_tiles is None

    @property
    def masked(self) -> bool:
        """Whether any query may see fewer than all keys."""
        return self.causal or self.window or self.block_mask > 0

    @property
    def crowded(self) -> bool:
        """Whether elements have so much besides their scores that it does not fit the registers that tiles leave for
        one feature: two of a bias, a mask, mods, a block mask and dropout."""
        added = self.bias + self.masked_bias + self.bias_beside_mods
        return added + (self.block_mask > 0) + (self.dropout > 0) > 1

    def interleaves_keys(self, block_n: int, *, beside_others: bool = False) -> bool:
        """Whether blocks of so many keys lie in the order in which a lane of a forward has eight neighbours
        (key_order.cuh). Wider heads would spill with a window. `beside_others`: mods, a block mask."""
        more = (self.dropout or self.masked_bias) if beside_others else self.crowded
        fits = self.widest <= 128 and block_n % 32 == 0 and not (more or self.packed or self.paged)
        return self.paired_bias == CHUNKS and fits

    @property
    def may_copy_bias(self) -> bool:
        """Whether a backward can read its bias through shared memory (bias_copies.cuh)."""
        more = self.mask, self.masked_bias, self.mods, self.dropout, self.wide_bias, self.packed
        return self.paired_bias == CHUNKS and not any(more)

    @property
    def holds_bias(self) -> bool:
        """Whether threads hold so many elements of a bias that its kernels do not fit the tiles of those without."""
        more = self.backward and (self.dalibi or self.softcap or self.unaligned)
        return self.bias and (not self.bias_of_keys or self.mods != "" or self.crowded or bool(more))

    @property
    def uneven(self) -> bool:
        """Whether tiles of work differ in length."""
        return self.masked or self.packed or self.kv_range


def _added(problem: Problem, paired_bias: int, tiles_fit: bool, learns_mods: bool) -> dict[str, Any]:
    """What is added to scores, and what hides keys by element, by the names of fields.

    A mask becomes a block mask (`becomes_blocks`), if its tiles fit, unless there is one beside it; over a cache, or a
    bias. So does a mask_mod with nothing beside it, not of packed sequences; but for one alone whose arrays' gradients,
    which are 0, are asked for.
    """
    bias, mods, mask_mod, own = problem.bias, problem.mods, "", None
    if not problem.block_mask:
        if bias is not None and bias.mask is not None:
            is_alone = bias.dtype == "bool"
            if is_alone if problem.page_size else tiles_fit and becomes_blocks(bias.mask, problem.packed):
                own, bias = bias.mask, None if is_alone else bias._replace(beside=None)
        elif (
            bias is None
            and not problem.packed
            and tiles_fit
            and (found := mod_tiles.apart(mods))
            and (found.score or not learns_mods)
        ):
            mods, mask_mod, own = found
    fits = max(problem.head_dim, problem.head_dim_v) <= 128 and problem.dtype != "fp32" and not problem.packed
    of_keys = bias is not None and paired_bias & ONE_ROW > 0 and fits
    return flags_of_added(bias, bool(mods)) | {
        "paired_bias": 0 if bias is None or of_keys else paired_bias & ~ONE_ROW,
        "bias_of_keys": of_keys,
        "block_mask": 1 + own[0] + 2 * own[1] if own else problem.block_mask,
        "mask_tiles": own,
        "mask_mod": mask_mod,
        "mods": mods,
    }
