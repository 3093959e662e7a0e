"""One configuration of `bench --decode`, attention over a cache, and what is counted of it: bytes of K and V."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from cupyflash.problem import ITEMSIZE

from .cell import OURS, Cell, short

BYTES_FORMULA = "K and V of the keys that a query sees, once each"
WIDE = "16-bit"  # the contestant beside caches of 8 bits: our own call on a cache of the dtype
STORED = ("int8", "e4m3")

_EIGHT: dict[str, Any] = {"batch": 64, "capacity": 8192}
_TINY: dict[str, Any] = {"batch": 2, "capacity": 64, "heads": 4, "heads_k": 2, "head_dim": 16}
# By name what differs from one query a sequence, 32 heads over 8, head_dim 128. On the CPU path what ends at once.
SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "B64 8k": _EIGHT,
        "B1 128k": {"batch": 1, "capacity": 131072},
        "B8 32k": {"batch": 8, "capacity": 32768},
        "B128 1k": {"batch": 128, "capacity": 1024},
        "B256 512": {"batch": 256, "capacity": 512},
        "B1 8k": {"batch": 1, "capacity": 8192},
        "B1 2k": {"batch": 1, "capacity": 2048},
        "B4 4k": {"batch": 4, "capacity": 4096},
        "B2 8k": {"batch": 2, "capacity": 8192},
        "MQA B64 8k": {**_EIGHT, "heads_k": 1},
        "MHA B32 2k": {"batch": 32, "capacity": 2048, "heads_k": 32},
        "d64 B64 8k": {**_EIGHT, "head_dim": 64},
        "d256 B64 8k": {**_EIGHT, "head_dim": 256},
        "ragged B64 1..16k": {"batch": 64, "capacity": 16384, "ragged": True},
        "4 rows B64 8k": {**_EIGHT, "seqlen_q": 4},
        "pages of 256 B64 8k": {**_EIGHT, "page": 256},
        "pages of 64 B64 8k": {**_EIGHT, "page": 64},
        "pages of 16 B64 8k": {**_EIGHT, "page": 16},
        "pages of 8 B64 8k": {**_EIGHT, "page": 8},
        "pages of 1 B64 8k": {**_EIGHT, "page": 1},
        "window 4k B64 8k": {**_EIGHT, "window": 4096},
        "softcap B64 8k": {**_EIGHT, "softcap": 30.0},
    },
    "cpu": {
        "B2 64": _TINY,
        "ragged B2 1..64": {**_TINY, "ragged": True},
        "4 rows B2 64": {**_TINY, "seqlen_q": 4},
        "pages of 16 B2 64": {**_TINY, "page": 16},
        "window 20 B2 64": {**_TINY, "window": 20},
        "softcap B2 64": {**_TINY, "softcap": 30.0},
    },
}
# Batches, and up to how many keys each; all powers of two from the first one on. In all, up to 4.3 GB of K and V.
GRID = {
    "cuda": (512, {1: 131072, 4: 131072, 16: 65536, 64: 16384}),
    "cpu": (32, {1: 128, 2: 64}),
}


@dataclass(frozen=True)
class DecodeCell:
    """One configuration; the sequences are as long as the cache, or, `ragged`, of any lengths up to there.

    `seqlen_q`: queries of each sequence. `page`: rows of a page; 0: sequences lie whole in the cache. `window` is the
    left bound. `cache_dtype`: what the cache holds where that is not `dtype`.
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

    heading, labels, unit = "TB/s (ours / theirs in tokens a second)", ("cache", "K, V", "MB"), "TB/s"
    packed, length_name = None, "keys of a sequence"

    @property
    def lengths(self) -> list[int]:
        """Of the sequences, the same ones each time."""
        rng = random.Random(0)
        return [rng.randint(1, self.capacity) if self.ragged else self.capacity for _ in range(self.batch)]

    @property
    def slots(self) -> int:
        """The first dimension of the cache: sequences, or pages, some more than there is need of."""
        return self.batch * self.pages_per_sequence + 5 if self.page else self.batch

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.capacity // self.page) if self.page else 0

    def read_by(self, implementation: str) -> DecodeCell:
        """The cell itself by ours; by others that with a cache of the dtype."""
        return self if implementation == OURS else replace(self, cache_dtype="")

    @property
    def whole_bytes(self) -> int:
        """Of K and V of all that the cache holds of the sequences."""
        return self._bytes(self.batch * self.capacity)

    def bytes_of(self, implementation: str) -> int:
        """`BYTES_FORMULA`, counted."""
        seen = sum(n if self.window is None else min(n, self.window + self.seqlen_q) for n in self.lengths)
        return self.read_by(implementation)._bytes(seen)

    def _bytes(self, keys: int) -> int:
        itemsize = 1 if self.cache_dtype else ITEMSIZE[self.dtype]
        return 2 * itemsize * keys * self.heads_k * self.head_dim

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


def chosen(options: dict[str, Any]) -> list[DecodeCell]:
    """The cells whose names have the text that is asked for; of caches of 8 bits, those of each kind."""
    known = _grid(options["backend"]) if options["grid"] else SHAPES[options["backend"]]
    found = [name for name in known if options["only"] in name]
    if not found:
        raise click.BadParameter(
            f"expected a text that one of these has: {', '.join(known)}; got {options['only']!r}", param_hint="--only"
        )
    return [
        DecodeCell(name, options["dtype"], **known[name], cache_dtype=stored)
        for name in found
        for stored in options["cache_dtype"] or ("",)
    ]


def _grid(backend: str) -> dict[str, dict[str, Any]]:
    """Shapes by name, as `SHAPES` has them: batches and lengths alone."""
    first, last = GRID[backend]
    heads = _TINY if backend == "cpu" else {}
    return {
        _grid_name(batch, n): {**heads, "batch": batch, "capacity": n}
        for batch, most in last.items()
        for n in (first << i for i in range((most // first).bit_length()))
    }


def _grid_name(batch: int, length: int) -> str:
    return f"B{batch} {short(length)}"


def are_a_grid(cells: Iterable[AnyCell]) -> bool:
    """Whether a picture can show them: over a cache, they differ in batch, length and dtype alone."""
    return all(c.name == _grid_name(c.batch, c.capacity) for c in cells if isinstance(c, DecodeCell))
