"""One configuration of `bench --decode`, attention over a cache, and what is counted of it: bytes of K and V."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

from cupyflash.masks import BlockMask
from cupyflash.problem import ITEMSIZE

from .. import block_masks
from .cell import OURS, SM80, Cell

BYTES_FORMULA = "K and V of the keys that a query sees, once each"
WIDE = "16-bit"  # the contestant beside caches of 8 bits: our own call on a cache of the dtype
PARTS = "parts"  # likewise beside mixed queries: two calls in place of one
COPY = "copy"  # reads as many bytes of K and V, and does nothing else
_READ_THE_CACHE = (OURS, SM80, PARTS, COPY)  # the cell's own; others one of the dtype
STORED = ("int8", "e4m3")


@dataclass(frozen=True)
class DecodeCell:
    """One configuration; the sequences are as long as the cache, or, `ragged`, of any lengths up to there.

    `seqlen_q`: queries of each sequence. `chunk`: those of the last one, where queries are packed; 0: they are not.
    `page`: rows of a page; 0: sequences lie whole in the cache. `window` is the left bound. `cache_dtype`: what the
    cache holds where that is not `dtype`. `alibi`: with slopes, `sink`: with sinks, `kv_range`: padded on the left.
    `head_dim_v`: of v and out; 0: head_dim. `block_mask`: a word of `block_masks`; "": there is none.
    """

    name: str
    dtype: str
    batch: int
    capacity: int
    heads: int = 32
    heads_k: int = 8
    head_dim: int = 128
    seqlen_q: int = 1
    page: int = 0
    ragged: bool = False
    window: int | None = None
    softcap: float | None = None
    cache_dtype: str = ""
    chunk: int = 0
    alibi: bool = False
    sink: bool = False
    kv_range: bool = False
    head_dim_v: int = 0
    block_mask: str = ""

    heading, labels, unit = "TB/s (ours / theirs in tokens a second)", ("cache", "K, V", "MB"), "TB/s"
    packed, length_name = None, "keys of a sequence"

    @property
    def widths(self) -> tuple[int, int]:
        """The head_dims, of q and k, and of v."""
        return self.head_dim, self.head_dim_v or self.head_dim

    @property
    def lengths(self) -> list[int]:
        """Of the sequences, the same ones each time."""
        rng = random.Random(0)
        return [rng.randint(1, self.capacity) if self.ragged else self.capacity for _ in range(self.batch)]

    @property
    def queries(self) -> list[int]:
        """Of the sequences."""
        return [self.seqlen_q] * (self.batch - 1) + [self.chunk or self.seqlen_q]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """First and end of the keys that count; of `kv_range` up to half of them do not, the same ones each time."""
        rng = random.Random(1)
        return [(rng.randint(0, n // 2) if self.kv_range else 0, n) for n in self.lengths]

    @property
    def is_plain(self) -> bool:
        """Whether it has one query a sequence of whole caches, and nothing more but a block mask."""
        plain = DecodeCell(self.name, self.dtype, self.batch, self.capacity, self.heads, self.heads_k, self.head_dim)
        return replace(self, block_mask="", cache_dtype="") == plain

    @property
    def slots(self) -> int:
        """The first dimension of the cache: sequences, or pages, some more than there is need of."""
        return self.batch * self.pages_per_sequence + 5 if self.page else self.batch

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.capacity // self.page) if self.page else 0

    def read_by(self, implementation: str) -> DecodeCell:
        """The cell itself by ours; by others that with a cache of the dtype."""
        return self if implementation in _READ_THE_CACHE else replace(self, cache_dtype="")

    @property
    def whole_bytes(self) -> int:
        """Of K and V of all that the cache holds of the sequences."""
        return self._bytes(self.batch * self.capacity)

    def bytes_of(self, implementation: str) -> int:
        """`BYTES_FORMULA`, counted."""
        seen = 0
        for (first, end), queries in zip(self.ranges, self.queries, strict=True):
            left = 0 if self.window is None else end - queries - self.window  # of the first query
            keys = slice(max(first, left), end)
            seen += self._shown(slice(end - queries, end), keys) if self.block_mask else keys.stop - keys.start
        return self.read_by(implementation)._bytes(seen)

    def mask(self) -> BlockMask:
        """The block mask, of all rows that a sequence can have."""
        return block_masks.make(self.block_mask, self.capacity, self.capacity)

    def _shown(self, rows: slice, keys: slice) -> int:
        """How many of some keys some of the rows sees by it."""
        return int(self.mask().sees(rows, keys)[0, 0].any(axis=0).sum())

    def _bytes(self, keys: int) -> int:
        itemsize = 1 if self.cache_dtype else ITEMSIZE[self.dtype]
        return itemsize * keys * self.heads_k * sum(self.widths)

    def speed(self, direction: str, implementation: str, ms: float) -> float:
        """TB/s."""
        return self.bytes_of(implementation) / ms / 1e9

    def label(self) -> tuple[str, ...]:
        """What a table says of it, under `labels`."""
        return self.name, self.cache_dtype or self.dtype, f"{self.bytes_of(OURS) / 1e6:.3g}"

    @property
    def where(self) -> str:
        """For a sentence."""
        return f"{self.name}, {self.cache_dtype or self.dtype}"

    @property
    def panel(self) -> tuple[str, str]:
        """Of a picture: the row and the column of the panel that has it."""
        return self.cache_dtype or self.dtype, f"batch {self.batch}"

    @property
    def length(self) -> int:
        """Along a panel."""
        return self.capacity

    def record(self) -> dict[str, Any]:
        """Every field."""
        return asdict(self)

    def facts(self, direction: str, implementation: str, ms: float | None) -> dict[str, Any]:
        """What a row says beside times."""
        speed = None if ms is None else self.speed(direction, implementation, ms)
        return {"bytes": self.bytes_of(implementation), "tb_per_s": speed}


AnyCell = Cell | DecodeCell
