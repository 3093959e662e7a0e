"""One problem as one line: what is asked, how its arrays lie in memory, what they hold, and how the emulator runs it.

A line names what differs from the defaults, as in ``dtype=fp16 d=72 sq=33 causal=1 v=padded``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from cupyflash.check.cases import NUMPY_DTYPE
from cupyflash.problem import Problem, make_problem


@dataclass(frozen=True)
class Spec:
    """One problem.

    Attributes:
        d: head_dim.
        heads: of k and v; each is shared by `group` heads of q.
        left, right: of the window.
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
    heads: int = 1
    group: int = 1
    causal: bool = False
    left: int | None = None
    right: int | None = None
    scale: float | None = None
    softcap: float | None = None
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
        words = {n: str(int(x) if isinstance(x, bool) else x).replace(" ", "+") for n, x in given.items()}
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
            given[name] = text.replace("+", " ") if kind == "str" else float(text) if kind == "float" else int(text)
            if kind == "bool":
                given[name] = bool(given[name])
        return cls(**given)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of q and of k, as bshd."""
        return (self.batch, self.sq, self.heads * self.group, self.d), (self.batch, self.sk, self.heads, self.d)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `attention`, but for the layout."""
        window = None if self.left is None and self.right is None else (self.left, self.right)
        return {
            "causal": self.causal, "window": window, "scale": self.scale, "softcap": self.softcap,
            "deterministic": self.deterministic,
        }  # fmt: skip

    def problem(self) -> Problem:
        """The checked problem; an error of cupyflash if there is none."""
        q, k = self.shapes
        return make_problem((q, k, k), (self.dtype,) * 3, **self.options)

    @property
    def factor(self) -> float:
        """The scale, given or not."""
        return self.d**-0.5 if self.scale is None else self.scale

    @property
    def numpy_dtype(self) -> Any:
        return NUMPY_DTYPE[self.dtype]

    def visible(self, query: int) -> tuple[int, int]:
        """The keys [first, end) that a query sees: aligned at the bottom right."""
        same = query + self.sk - self.sq
        first = 0 if self.left is None else same - self.left
        last = self.sk - 1 if self.right is None else same + self.right
        if self.causal and same < last:
            last = same
        first, end = max(first, 0), min(last, self.sk - 1) + 1
        return (first, end) if first < end else (0, 0)
