"""One problem as one line: what is asked, how its arrays lie in memory, what they hold, and how the emulator runs it.

A line names what differs from the defaults, as in ``dtype=fp16 d=72 sq=33 causal=1 v=padded``.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyflash.block_mask import code_of
from cupyflash.check.case_bias import form_of, room_of
from cupyflash.check.case_masks import MASKS
from cupyflash.check.case_mods import ModInputs
from cupyflash.check.cases import NUMPY_DTYPE
from cupyflash.problem import Problem, make_problem
from cupyflash.sequences import Sequences

from . import modding


@functools.lru_cache(maxsize=4)
def _seen(blocks: str, seed: int, shape: tuple[int, int, int, int]) -> NDArray[Any]:
    return MASKS[blocks](np.random.default_rng([seed, 2]), shape)


@dataclass(frozen=True)
class Spec:
    """One problem.

    Attributes:
        d: head_dim.
        packed: of each sequence queries:keys:used, as in ``61:97:90,0:5:5``; sq and sk then count the rows behind the
            last one, and batch says nothing. Empty: a batch.
        ranges: of each sequence the keys [start, end) that its queries may see, as in ``0:5,3:9``; empty: all.
        heads: of k and v; each is shared by `group` heads of q.
        left, right: of the window.
        alibi: how many dimensions the slopes have; 0: there are none.
        sink: whether heads of q have sinks.
        bias: what is added to the scores, in the words of `cupyflash.check.case_bias`; empty: nothing.
        dropout: its p; 0: none. Its seed, alone or with an offset, follows from `seed`.
        blocks: a block mask, a key of `cupyflash.check.case_masks.MASKS`; empty: none.
        mods: a key of `modding.MODS`; empty: none.
        q, k, v, dout: how the inputs lie in memory, keys of `arrays.MEMORY`.
        o, dq, dk, dv: the same for results; in the emulator alone, which takes any strides.
        values: what the inputs hold, a key of `arrays.VALUES`.
        seed: of the values.
        arch, family, sms, section: of the device in the emulator: its multiprocessors, and by how many heads of k it
            takes its tiles of work, the last time one more; 0 is as planned. An empty family is as planned.
        mode, order: how the emulator runs, a key of `MODES`, and its seed.
    """

    dtype: str = "bf16"
    d: int = 64
    batch: int = 1
    sq: int = 64
    sk: int = 64
    packed: str = ""
    ranges: str = ""
    heads: int = 1
    group: int = 1
    causal: bool = False
    left: int | None = None
    right: int | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi: int = 0
    sink: bool = False
    bias: str = ""
    dropout: float = 0.0
    blocks: str = ""
    mods: str = ""
    layout: str = "bshd"
    dlse: bool = False
    deterministic: bool = False
    q: str = "contiguous"
    k: str = "contiguous"
    v: str = "contiguous"
    dout: str = "contiguous"
    o: str = "contiguous"
    dq: str = "contiguous"
    dk: str = "contiguous"
    dv: str = "contiguous"
    values: str = "normal"
    seed: int = 0
    arch: str = "sm_90"
    family: str = ""
    sms: int = 2
    section: int = 0
    mode: str = "race"
    order: int = 0

    def __str__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        texts = {n: str(int(x) if isinstance(x, bool) else x) for n, x in given.items()}
        words = {n: text.replace(" + ", "&").replace(" ", "+") for n, text in texts.items()}
        return " ".join(f"{name}={word}" for name, word in words.items()) or "d=64"

    @classmethod
    def parse(cls, line: str) -> Spec:
        """The inverse of str."""
        types = {f.name: str(f.type) for f in dataclasses.fields(cls)}
        given: dict[str, Any] = {}
        for word in line.split():
            name, _, text = word.partition("=")
            if name not in types:
                raise ValueError(f"{word}: expected name=value with a name of {', '.join(types)}")
            kind = types[name].split(" | ")[0]
            if kind == "str":
                given[name] = text.replace("+", " ").replace("&", " + ")
            else:
                given[name] = float(text) if kind == "float" else int(text)
            if kind == "bool":
                given[name] = bool(given[name])
        return cls(**given)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of q and of k, as bshd; packed, of a batch of one."""
        if self.packed:
            sq, sk = (sum(x[i] for x in self.lengths) + (self.sq, self.sk)[i] for i in (0, 1))
            return dataclasses.replace(self, packed="", batch=1, sq=sq, sk=sk).shapes
        return (self.batch, self.sq, self.heads * self.group, self.d), (self.batch, self.sk, self.heads, self.d)

    @property
    def lengths(self) -> list[tuple[int, int, int]]:
        """Queries, keys, used keys of each sequence."""
        return [(int(a), int(b), int(c)) for a, b, c in (x.split(":") for x in self.packed.split(",") if x)]

    @property
    def bounds(self) -> list[str]:
        """`ranges`, one for each sequence; the last one for all that have none."""
        n, found = len(self.lengths) if self.packed else self.batch, self.ranges.split(",")
        return (found + found[-1:] * n)[:n]

    def parts(self) -> list[tuple[int, slice, slice, Spec]]:
        """Of each sequence, or each of the batch: which one of the arrays' batch, rows, used keys, it alone."""
        if not self.packed:
            alone = [dataclasses.replace(self, batch=1, ranges=r) for r in self.bounds]
            return [(b, slice(0, self.sq), slice(0, self.sk), one) for b, one in enumerate(alone)]
        found, row, key = [], 0, 0
        for (a, b, used), r in zip(self.lengths, self.bounds, strict=True):
            alone = dataclasses.replace(self, packed="", ranges=r, batch=1, sq=a, sk=used)
            found.append((0, slice(row, row + a), slice(key, key + used), alone))
            row, key = row + a, key + b
        return found

    def sequences(self) -> Sequences | None:
        """Where they lie."""
        pairs = [[int(n) for n in r.split(":")] for r in self.bounds if r]
        ranges = np.array(pairs, np.int32).reshape(-1, 2) if self.ranges else None
        if not self.packed:
            return None if ranges is None else Sequences(kv_range=ranges)
        q, k, used = (np.array(x, np.int32) for x in zip(*self.lengths, strict=True))
        first = [np.concatenate(([0], x.cumsum())).astype(np.int32) for x in (q, k)]
        return Sequences(*first, None if (used == k).all() else used, ranges)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `attention`, but for the layout."""
        window = None if self.left is None and self.right is None else (self.left, self.right)
        return {
            "causal": self.causal, "window": window, "scale": self.scale, "softcap": self.softcap,
            "deterministic": self.deterministic, "dropout_p": self.dropout,
        }  # fmt: skip

    def problem(self) -> Problem:
        """The checked problem; an error of cupyflash if there is none."""
        q, k = (shape[1:] if self.packed else shape for shape in self.shapes)
        sequences = len(self.lengths) if self.packed else None
        more: dict[str, Any] = {"sequences": sequences, "alibi": self.alibi, "kv_range": bool(self.ranges)}
        more |= {"sink": self.sink, "bias": form_of(self.bias, self.dtype), "dropout": self.seed_dims}
        if self.packed:
            more["max_seqlens"] = room_of(self.bias, self.room, bool(self.blocks))
        if self.blocks:
            more |= {"block_mask": code_of(self.seen().shape), "tall": self.seed % 2 > 0}  # either tile takes any mask
        if self.mods_given is not None:
            text, arrays = self.mods_given.bound()
            more |= {"mods": text, "mod_shapes": tuple(x.shape for x in arrays.values())}
        return make_problem((q, k, k), (self.dtype,) * 3, **self.options, **more)

    @property
    def room(self) -> tuple[int, int]:
        """Queries and keys that a bias of packed sequences has: as many as the longest one needs, or a few more; not
        none, of which there are no block masks."""
        queries, _, used = (max(x) for x in zip(*self.lengths, strict=True))
        return max(1, queries + self.seed % 2), max(1, used + self.seed % 3)

    @property
    def seed_dims(self) -> int:
        """Of dropout's seed: 2 with an offset; 0: there is none."""
        return 1 + self.seed % 2 if self.dropout else 0

    @property
    def mods_given(self) -> ModInputs | None:
        """Mods and what they read."""
        n = len(self.lengths) if self.packed else self.batch
        return modding.given(self.mods, self.seed, n, self.heads * self.group) if self.mods else None

    def seen(self) -> NDArray[Any]:
        """What the block mask lets see: (batch or 1, heads of q or 1, sq, sk) booleans; packed, with room for all
        sequences."""
        batch, lengths = self.batch, (self.sq, self.sk)
        if self.packed:
            batch, lengths = len(self.lengths), self.room
        return _seen(self.blocks, self.seed, (batch, self.heads * self.group, *lengths))

    @property
    def factor(self) -> float:
        """The scale, given or not."""
        return self.d**-0.5 if self.scale is None else self.scale

    @property
    def numpy_dtype(self) -> Any:
        return NUMPY_DTYPE[self.dtype]

    @functools.cached_property
    def visible(self) -> NDArray[Any]:
        """The keys [first, end) that each query of a batch of one sees: aligned at the bottom right, of all keys."""
        same = np.arange(self.sq) + self.sk - self.sq
        start, stop = (int(n) for n in (self.ranges or f"0:{self.sk}").split(":"))
        first = np.full(self.sq, max(0, start)) if self.left is None else np.maximum(same - self.left, max(0, start))
        end = np.full(self.sq, min(self.sk, stop))
        if self.right is not None:
            end = np.minimum(end, same + self.right + 1)
        if self.causal:
            end = np.minimum(end, same + 1)
        return np.where(first < end, (first, end), 0).T
