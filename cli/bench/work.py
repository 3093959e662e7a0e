"""What `bench` times: cupyflash and its peers as functions of no arguments, on random arrays of one cell."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from cupyflash import api, varlen
from cupyflash.check.cases import NUMPY_DTYPE

from .. import block_masks
from . import mods
from . import peers as bench_peers
from .cell import CPU, ORDERED, OURS, PLAIN, SHOWN, SM80, Cell
from .clocks import Clock, TorchClock, Work
from .decode_cell import COPY, PARTS, WIDE
from .flex import flex, flex_is_missing
from .lengths import DENSE
from .sdpa import TORCH_CPU, sdpa

PEERS = (
    *("flash2", "cudnn", "efficient", "math", TORCH_CPU, "fa4", "flex"),
    *(DENSE, ORDERED, PARTS, SM80, COPY, PLAIN, CPU),
)
ANYWHERE = (DENSE, ORDERED, WIDE, PARTS)  # our own calls, of other cells or in another form
BY_NUMPY = "a way of --framework numpy where there is a GPU"


class Bench:
    """Functions on NumPy arrays, ours alone, and the interface of the others."""

    name = "numpy"
    on_gpu = False
    clock: Clock

    def __init__(self) -> None:
        self.clock = Clock()
        self.rng = np.random.default_rng(0)

    def absent(self, peer: str) -> str | None:
        """Why a peer cannot be timed here, or None."""
        if peer in (PLAIN, CPU):
            return BY_NUMPY
        if peer in (SM80, COPY):
            return None if self.on_gpu else "needs a GPU"
        return None if peer in ANYWHERE else "needs torch"

    def counts_memory(self, name: str) -> bool:
        """Whether the clock sees what an implementation allocates."""
        return True

    def random(self, dtype: str, shape: tuple[int, ...], std: float = 1.0) -> Any:
        """Of N(0, std^2)."""
        return (self.rng.standard_normal(shape, np.float32) * np.float32(std)).astype(NUMPY_DTYPE[dtype])

    def inputs(self, cell: Cell) -> list[Any]:
        """q, k, v and dout."""
        of_q, *others = cell.shapes()
        return [self.random(cell.dtype, of_q, cell.score_std), *(self.random(cell.dtype, x) for x in others)]

    def array(self, x: np.ndarray) -> Any:
        """A NumPy array where the inputs are."""
        return x

    def shown(self, shape: tuple[int, ...]) -> Any:
        """A mask of `SHOWN`."""
        return self.array(self.rng.random(shape) < SHOWN)

    def brought(self, cell: Cell) -> dict[str, Any]:
        """What features of the cell bring, as arguments."""
        found = {name: self.array(x) for name, x in cell.brought().items()}
        if cell.bias:
            found["bias"] = self.random(cell.dtype, cell.added_shape(cell.bias))
        if cell.mask:
            found["mask"] = self.shown(cell.added_shape(cell.mask))
        if cell.mod:
            arrays = mods.drawn(cell.mod, self.rng, cell.heads, cell.seqlen)
            found["mod_arrays"] = {name: self.array(x) for name, x in arrays.items()}
            found |= mods.MODS[cell.mod].expressions
        if cell.block_mask:
            found["block_mask"] = block_masks.make(cell.block_mask, cell.seqlen, cell.seqlen)
        return found

    def ours(
        self, cell: Cell, brought: Mapping[str, Any] | None = None
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Our forward and backward with the options of the cell, and what `brought` made."""
        forward, backward, lengths = api.attention, api.attention_backward, {}
        if cell.packed:
            forward, backward = varlen.attention_varlen, varlen.attention_varlen_backward  # type: ignore[assignment]
            lengths = {"cu_seqlens_q": self.array(np.array(cell.cu_seqlens, np.int32))}
        options = cell.options | lengths | dict(self.brought(cell) if brought is None else brought)
        learned: dict[str, Any] = {"gradients_of": ("bias",)} if cell.learned else {}
        return functools.partial(forward, **options), functools.partial(backward, **options, **learned)

    def attention(
        self, name: str, cell: Cell, brought: Mapping[str, Any] | None = None
    ) -> Callable[[Any, Any, Any], Any]:
        """(q, k, v) -> out, of arrays that `brought` made."""
        return self.ours(cell, brought)[0]

    def works(self, name: str, cell: Cell) -> dict[str, Work]:
        """The three directions of one implementation."""
        q, k, v, dout = self.inputs(cell)
        attention, attention_backward = self.ours(cell)

        def forward() -> Any:
            return attention(q, k, v, return_lse=True)

        out, lse = forward()

        def backward() -> Any:
            return attention_backward(dout, q, k, v, out, lse)

        def both() -> Any:
            o, s = forward()
            return o, s, attention_backward(dout, q, k, v, o, s)

        return {"fwd": forward, "bwd": backward, "both": both}

    def version(self) -> str:
        """Of the framework."""
        return metadata.version(self.name)

    def versions(self, peers: Sequence[str]) -> dict[str, str]:
        """Of those that have one apart from the framework's."""
        return {}

    def matmul(self) -> tuple[Work, float] | None:
        """A large matrix product in fp32 (bf16 on a GPU) and its FLOPs; None where there is none to time."""
        a = self.rng.standard_normal((1024, 1024), np.float32)
        return lambda: a @ a, 2.0 * 1024**3


class TorchBench(Bench):
    """Torch tensors, on a GPU or the CPU; gradients through autograd, for ours as for the peers."""

    name = "torch"

    def __init__(self, on_gpu: bool) -> None:
        import torch

        super().__init__()
        self.torch, self.on_gpu = torch, on_gpu
        self.device = "cuda" if on_gpu else "cpu"
        self.clock = TorchClock() if on_gpu else Clock()
        torch.manual_seed(0)

    def absent(self, peer: str) -> str | None:
        if peer in (PLAIN, CPU):
            return BY_NUMPY
        if peer not in ("math", *ANYWHERE) and self.on_gpu == (peer == TORCH_CPU):
            return "needs --backend cpu" if self.on_gpu else "needs a GPU"
        if peer == "fa4":  # asked of the package: its module shares a folder with FlashAttention-2
            try:
                metadata.version("flash-attn-4")
            except metadata.PackageNotFoundError:
                return "flash-attn-4 is not installed"
        return "this torch has no flex_attention" if peer == "flex" and flex_is_missing() else None

    def counts_memory(self, name: str) -> bool:
        return self.on_gpu or name in (OURS, ORDERED, DENSE)  # on the CPU ours allocates through NumPy, which is traced

    def random(self, dtype: str, shape: tuple[int, ...], std: float = 1.0) -> Any:
        kind = getattr(self.torch, np.dtype(NUMPY_DTYPE[dtype]).name)
        return self.torch.randn(shape, device=self.device, dtype=kind).mul_(std)

    def array(self, x: np.ndarray) -> Any:
        return self.torch.from_numpy(x).to(self.device)

    def shown(self, shape: tuple[int, ...]) -> Any:
        return self.torch.rand(shape, device=self.device) < SHOWN

    def attention(
        self, name: str, cell: Cell, brought: Mapping[str, Any] | None = None
    ) -> Callable[[Any, Any, Any], Any]:
        given = self.brought(cell) if brought is None else brought
        if name == OURS:
            return self.ours(cell, given)[0]
        if cell.mod and name != "flex":
            raise NotImplementedError(f"{name} takes no mods in a form of its own that is timed; flex does")
        slopes, sinks = given.get("alibi_slopes"), given.get("sink")
        if cell.packed:
            if name not in bench_peers.VARLEN:
                raise NotImplementedError(f"{name} is not timed with packed sequences")
            if cell.bias or cell.mask:
                raise NotImplementedError(f"{name} has no bias or mask of packed sequences")
            return bench_peers.VARLEN[name](cell, self.array(np.array(cell.cu_seqlens, np.int32)), slopes, sinks)
        if name == "flex":
            return flex(cell, self.device, given)
        if name == "fa4":
            return bench_peers.fa4(cell, sinks)
        if lacks := bench_peers.sdpa_lacks(cell):
            return bench_peers.beyond_sdpa(name, cell, slopes, lacks)
        return sdpa(name, cell, given)

    def works(self, name: str, cell: Cell) -> dict[str, Work]:
        brought, grad = self.brought(cell), self.torch.autograd.grad
        learned = [brought["bias"].requires_grad_()] if cell.learned else []
        attention = forward_only = self.attention(name, cell, brought)
        q, k, v, dout = self.inputs(cell)
        plain = [x.detach() for x in (q, k, v)]  # nothing to record, and no context to enter, which costs host time
        leaves = [*(x.requires_grad_() for x in (q, k, v)), *learned]
        if cell.learned:
            forward_only = self.attention(name, cell, brought | {"bias": brought["bias"].detach()})

        def forward() -> Any:
            return forward_only(*plain)

        recorded: list[Any] = []  # the graph that `backward` runs, made by its first call

        def backward() -> Any:
            if not recorded:
                recorded.append(attention(q, k, v))
            return grad(recorded[0], leaves, dout, retain_graph=True)

        def both() -> Any:
            out = attention(q, k, v)
            return out, grad(out, leaves, dout)

        return {"fwd": forward, "bwd": backward, "both": both}

    def versions(self, peers: Sequence[str]) -> dict[str, str]:
        found = {}
        if "cudnn" in peers and (number := self.torch.backends.cudnn.version()):
            found["cudnn"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"  # as of cuDNN 9
        if "fa4" in peers and not self.absent("fa4"):
            found["fa4"] = metadata.version("flash-attn-4")
        return found

    def matmul(self) -> tuple[Work, float]:
        n, dtype = (8192, self.torch.bfloat16) if self.on_gpu else (1024, self.torch.float32)
        a = self.torch.randn(n, n, device=self.device, dtype=dtype)
        return lambda: a @ a, 2.0 * n**3
