"""The process that `tools.cycles` measures: calls of some cells, by the cupyflash that PYTHONPATH names, old or new."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable
from typing import NamedTuple

TOKENS, HIDDEN, CALLS = 16384, 2048, 2  # in all; heads * head_dim; calls of a cell in one run


class Cell(NamedTuple):
    pass_: str
    head_dim: int
    mask: str
    seqlen: int

    @property
    def text(self) -> str:
        return f"{self.pass_} {self.head_dim} {self.mask} {self.seqlen}"


def work(cells: Iterable[Cell]) -> None:
    """Each cell's calls, before each a kernel of torch's that sleeps."""
    torch, cupyflash = (importlib.import_module(name) for name in ("torch", "cupyflash"))
    cudart = torch.cuda.cudart()
    for cell in cells:
        shape = TOKENS // cell.seqlen, cell.seqlen, HIDDEN // cell.head_dim, cell.head_dim
        q, k, v, dout = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        causal = cell.mask == "causal"
        out, lse = cupyflash.attention(q, k, v, causal=causal, return_lse=True)
        for i in range(CALLS + 1):  # the first one compiles
            if i == 1:
                torch.cuda.synchronize()
                cudart.cudaProfilerStart()
            torch.cuda._sleep(100)
            if cell.pass_ == "fwd":
                cupyflash.attention(q, k, v, causal=causal)
            else:
                cupyflash.attention_backward(dout, q, k, v, out, lse, causal=causal)
        torch.cuda.synchronize()
        cudart.cudaProfilerStop()


if __name__ == "__main__":
    work(Cell(*cell) for cell in json.loads(sys.argv[1]))
