"""Which configurations `bench --decode` times: shapes by name, and a grid of batches by lengths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from .cell import short
from .decode_cell import AnyCell, DecodeCell

_EIGHT: dict[str, Any] = {"batch": 64, "capacity": 8192}
_TINY: dict[str, Any] = {"batch": 2, "capacity": 64, "heads": 4, "heads_k": 2, "head_dim": 16}
# By name what differs from one query a sequence, 32 heads over 8, head_dim 128. On the CPU path what ends at once.
SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "B64 8k": _EIGHT,
        "B1 128k": {"batch": 1, "capacity": 131072},
        "B8 32k": {"batch": 8, "capacity": 32768},
        "B64 4k": {"batch": 64, "capacity": 4096},
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
        "MLA B16 8k": {"batch": 16, "capacity": 8192, "heads_k": 32, "head_dim": 192, "head_dim_v": 128},
        "ragged B64 1..16k": {"batch": 64, "capacity": 16384, "ragged": True},
        "4 rows B64 8k": {**_EIGHT, "seqlen_q": 4},
        "256 rows B1 32k": {"batch": 1, "capacity": 32768, "seqlen_q": 256},
        "256 rows B4 32k": {"batch": 4, "capacity": 32768, "seqlen_q": 256},
        "256 rows pages of 16 B4 32k": {"batch": 4, "capacity": 32768, "seqlen_q": 256, "page": 16},
        "mixed 63x1 + 1x256 8k": {**_EIGHT, "chunk": 256},
        "mixed pages of 16 63x1 + 1x256 8k": {**_EIGHT, "chunk": 256, "page": 16},
        "pages of 256 B64 8k": {**_EIGHT, "page": 256},
        "pages of 64 B64 8k": {**_EIGHT, "page": 64},
        "pages of 16 B64 8k": {**_EIGHT, "page": 16},
        "pages of 8 B64 8k": {**_EIGHT, "page": 8},
        "pages of 4 B64 8k": {**_EIGHT, "page": 4},
        "pages of 2 B64 8k": {**_EIGHT, "page": 2},
        "pages of 1 B64 8k": {**_EIGHT, "page": 1},
        "window 4k B64 8k": {**_EIGHT, "window": 4096},
        "softcap B64 8k": {**_EIGHT, "softcap": 30.0},
        "sink B64 8k": {**_EIGHT, "sink": True},
        "alibi B64 8k": {**_EIGHT, "alibi": True},
        "kv_range B64 8k": {**_EIGHT, "kv_range": True},
        "block mask 0.5 B64 8k": {**_EIGHT, "block_mask": "0.5"},
        "block mask 0.1 B64 8k": {**_EIGHT, "block_mask": "0.1"},
        "block mask 0.1 B8 32k": {"batch": 8, "capacity": 32768, "block_mask": "0.1"},
    },
    "cpu": {
        "B2 64": _TINY,
        "MLA B2 64": {**_TINY, "head_dim": 24, "head_dim_v": 16},
        "ragged B2 1..64": {**_TINY, "ragged": True},
        "4 rows B2 64": {**_TINY, "seqlen_q": 4},
        "20 rows B1 64": {**_TINY, "batch": 1, "seqlen_q": 20},
        "mixed 2x1 + 1x20 64": {**_TINY, "batch": 3, "chunk": 20},
        "pages of 16 B2 64": {**_TINY, "page": 16},
        "pages of 2 B2 64": {**_TINY, "page": 2},
        "window 20 B2 64": {**_TINY, "window": 20},
        "softcap B2 64": {**_TINY, "softcap": 30.0},
        "sink B2 64": {**_TINY, "sink": True},
        "alibi B2 64": {**_TINY, "alibi": True},
        "kv_range B2 64": {**_TINY, "kv_range": True},
        "block mask 0.25 B2 400": {**_TINY, "capacity": 400, "block_mask": "0.25"},
    },
}
# Batches, and up to how many keys each; all powers of two from the first one on. In all, up to 4.3 GB of K and V.
GRID = {
    "cuda": (512, {1: 131072, 4: 131072, 16: 65536, 64: 16384}),
    "cpu": (32, {1: 128, 2: 64}),
}


def chosen(options: dict[str, Any]) -> list[DecodeCell]:
    """The cells whose names have one of the texts that are asked for; of caches of 8 bits, those of each kind."""
    known = _grid(options["backend"]) if options["grid"] else SHAPES[options["backend"]]
    texts = options["only"] or ("",)
    for text in texts:
        if not any(_has(name, text) for name in known):
            raise click.BadParameter(
                f"expected a text that one of these has: {', '.join(known)}; got {text!r}", param_hint="--only"
            )
    return [
        DecodeCell(name, options["dtype"], **known[name], cache_dtype=stored)
        for name in known
        if any(_has(name, text) for text in texts)
        for stored in options["cache_dtype"] or ("",)
    ]


def _has(name: str, text: str) -> bool:
    """Whether a shape is meant; ^ and $ are the ends of its name."""
    return text in f"^{name}$"


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
