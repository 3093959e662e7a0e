"""`bench --framework jax`: our calls and jax.nn's, all inside `jit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cupyflash.check.cases import NUMPY_DTYPE

from .cell import ORDERED, OURS, SM80, Cell
from .clocks import JaxClock, Work
from .lengths import DENSE
from .work import Bench

_IMPLEMENTATIONS = {"cudnn": "cudnn", "math": "xla"}


class JaxBench(Bench):
    """JAX arrays, on a GPU or the CPU; gradients through JAX, for ours as for the peers."""

    name = "jax"

    def __init__(self, on_gpu: bool) -> None:
        import jax

        super().__init__()
        self.jax, self.on_gpu = jax, on_gpu
        self.device = jax.devices("gpu" if on_gpu else "cpu")[0]
        self.clock = JaxClock(self.device)
        self.key = jax.device_put(jax.random.key(0), self.device)

    def absent(self, peer: str) -> str | None:
        if peer in (DENSE, ORDERED, "math"):
            return None
        if peer == SM80:
            return "a program of JAX's keeps its family"
        if peer not in _IMPLEMENTATIONS:
            return "jax.nn has cudnn and math"
        return None if self.on_gpu else "needs a GPU"

    def counts_memory(self, name: str) -> bool:
        return False  # XLA's allocator has no peak that can be reset

    def random(self, dtype: str, shape: tuple[int, ...], std: float = 1.0) -> Any:
        self.key, key = self.jax.random.split(self.key)
        return self.jax.random.normal(key, shape, NUMPY_DTYPE[dtype]) * std

    def array(self, x: np.ndarray) -> Any:
        return self.jax.device_put(x, self.device)

    def attention(
        self, name: str, cell: Cell, brought: Mapping[str, Any] | None = None
    ) -> Callable[[Any, Any, Any], Any]:
        if cell.learned:
            raise NotImplementedError("the gradient of a bias is not timed with JAX")
        if name == OURS:
            return self.ours(cell, brought)[0]
        lacks = ("packed sequences" if cell.packed else "a softcap" if cell.softcap is not None else
                 "ALiBi" if cell.alibi else "a sink" if cell.sink else
                 "block masks" if cell.block_mask else None)  # fmt: skip
        if cell.bias or cell.mask or cell.dropout or cell.mod or cell.padded:
            what = "a bias, a mask, dropout, mods or padding"
            raise NotImplementedError(f"jax.nn.dot_product_attention is not timed with {what}")
        if lacks:
            raise NotImplementedError(f"jax.nn.dot_product_attention has no {lacks}")
        window = None if cell.window is None else (cell.window, 0 if cell.causal else cell.seqlen)
        options = {"is_causal": cell.causal, "implementation": _IMPLEMENTATIONS[name], "local_window_size": window}
        return lambda q, k, v: self.jax.nn.dot_product_attention(q, k, v, **options)

    def works(self, name: str, cell: Cell) -> dict[str, Work]:
        jax, attention = self.jax, self.jax.jit(self.attention(name, cell))
        q, k, v, dout = self.inputs(cell)
        run_back = jax.jit(lambda pullback, dout: pullback(dout))
        recorded: list[Any] = []  # what the forward leaves for `backward`, made by its first call

        def backward() -> Any:
            if not recorded:
                recorded.append(jax.vjp(attention, q, k, v)[1])
            return run_back(recorded[0], dout)

        def out_and_gradients(q: Any, k: Any, v: Any, dout: Any) -> Any:
            out, pullback = jax.vjp(attention, q, k, v)
            return out, pullback(dout)

        both = jax.jit(out_and_gradients)
        return {"fwd": lambda: attention(q, k, v), "bwd": backward, "both": lambda: both(q, k, v, dout)}

    def versions(self, peers: Sequence[str]) -> dict[str, str]:
        return {}

    def matmul(self) -> tuple[Work, float]:
        n, dtype = (8192, "bfloat16") if self.on_gpu else (1024, "float32")
        a = self.jax.random.normal(self.key, (n, n), dtype)
        product = self.jax.jit(lambda a: a @ a)
        return lambda: product(a), 2.0 * n**3
