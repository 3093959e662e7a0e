"""A small GPT, forward, backward and optimiser, with CuPy and cupyflash and nothing else; NumPy where there is no GPU.

It learns to continue the Python functions of snippets.py, a token a character, and completes ``def factorial(n):``.
Each layer is two methods, `forward` and `backward`; attention is cupyflash's. Products of matrices are cuBLAS's, which
the lean CuPy does not bring: ``pip install "cupy-cuda12x[ctk]"`` does, and without it a small kernel computes them.

\b
    python -m examples.gpt_cupy
    python -m examples.gpt_cupy --size toy --steps 30 --array numpy
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import cupyflash

END, VOCABULARY = 0, 128
SIZES = {  # layers, heads, head_dim, tokens in a row
    "small": (6, 8, 64, 256),
    "toy": (2, 2, 8, 32),
}

# ---- Products of matrices ----

MATMUL = r"""
// c[i, j] = sum over k of a[i, k] b[k, j], in tiles of 32 x 32, a thread an element; strides in elements.
extern "C" __global__ void matmul(const float *a, const float *b, float *c, int m, int n, int depth, int a_row,
                                  int a_col, int b_row, int b_col) {
    __shared__ float s_a[32][33], s_b[32][33];  // 33: a column lies in as many banks as a row
    const int x = threadIdx.x, y = threadIdx.y, i = blockIdx.y * 32 + y, j = blockIdx.x * 32 + x;
    float sum = 0;
    for (int first = 0; first < depth; first += 32) {
        const int k_a = first + x, k_b = first + y;
        s_a[y][x] = i < m && k_a < depth ? a[(long long)i * a_row + (long long)k_a * a_col] : 0;
        s_b[y][x] = j < n && k_b < depth ? b[(long long)k_b * b_row + (long long)j * b_col] : 0;
        __syncthreads();
        for (int k = 0; k < 32; ++k) sum += s_a[y][k] * s_b[k][x];
        __syncthreads();
    }
    if (i < m && j < n) c[(long long)i * n + j] = sum;
}
"""


def has_cublas() -> bool:
    try:
        importlib.import_module("cupy_backends.cuda.libs.cublas")
    except ImportError:
        return False
    return True


@functools.cache
def _kernel() -> Any:
    import cupy

    return cupy.RawKernel(MATMUL, "matmul")


def matmul(a: Any, b: Any) -> Any:
    """a b, of two dimensions and any strides."""
    if isinstance(a, np.ndarray) or has_cublas():
        return a @ b
    import cupy

    (m, depth), n = a.shape, b.shape[1]
    c = cupy.empty((m, n), np.float32)
    strides = [np.int32(s // x.itemsize) for x in (a, b) for s in x.strides]
    sizes = [np.int32(x) for x in (m, n, depth)]
    _kernel()(((n + 31) // 32, (m + 31) // 32), (32, 32), (a, b, c, *sizes, *strides))
    return c


# ---- Layers: forward keeps what backward needs ----


class Parameter:
    """Values, and the gradient of the loss with respect to them."""

    def __init__(self, value: Any) -> None:
        self.value, self.gradient = value, value * 0


class Linear:
    """y = x W + b"""

    def __init__(self, xp: Any, rng: np.random.Generator, inputs: int, outputs: int, dtype: Any) -> None:
        self.weight = Parameter(xp.asarray(rng.normal(0, inputs**-0.5, (inputs, outputs)).astype(dtype)))
        self.bias = Parameter(xp.zeros(outputs, dtype))

    def forward(self, x: Any) -> Any:
        self.x = x.reshape(-1, x.shape[-1])
        return (matmul(self.x, self.weight.value) + self.bias.value).reshape(*x.shape[:-1], -1)

    def backward(self, dy: Any) -> Any:
        flat = dy.reshape(-1, dy.shape[-1])
        self.weight.gradient += matmul(self.x.T, flat)
        self.bias.gradient += flat.sum(0)
        return matmul(flat, self.weight.value.T).reshape(*dy.shape[:-1], -1)


class LayerNorm:
    """y = g n + b,  n = (x - mean(x)) / sqrt(var(x) + 1e-5)"""

    def __init__(self, xp: Any, width: int, dtype: Any) -> None:
        self.gain, self.bias = Parameter(xp.ones(width, dtype)), Parameter(xp.zeros(width, dtype))

    def forward(self, x: Any) -> Any:
        centered = x - x.mean(-1, keepdims=True)
        self.scale = ((centered * centered).mean(-1, keepdims=True) + 1e-5) ** -0.5
        self.n = centered * self.scale
        return self.gain.value * self.n + self.bias.value

    def backward(self, dy: Any) -> Any:
        over = tuple(range(dy.ndim - 1))
        self.gain.gradient += (dy * self.n).sum(over)
        self.bias.gradient += dy.sum(over)
        dn = dy * self.gain.value
        return self.scale * (dn - dn.mean(-1, keepdims=True) - self.n * (dn * self.n).mean(-1, keepdims=True))


class Gelu:
    """y = x / 2 (1 + t),  t = tanh(sqrt(2 / pi) (x + 0.044715 x^3))"""

    def forward(self, x: Any) -> Any:
        xp = _library(x)
        self.x, self.t = x, xp.tanh(_GELU * (x + 0.044715 * x * x * x))
        return 0.5 * x * (1 + self.t)

    def backward(self, dy: Any) -> Any:
        slope = _GELU * (1 + 3 * 0.044715 * self.x * self.x)
        return dy * 0.5 * (1 + self.t + self.x * (1 - self.t * self.t) * slope)


_GELU = math.sqrt(2 / math.pi)


class Attention:
    """y = softmax(q k^T / sqrt(head_dim), causal) v W_o,  (q, k, v) = x W_qkv: views of one array, not copied"""

    def __init__(self, xp: Any, rng: np.random.Generator, heads: int, head_dim: int, dtype: Any) -> None:
        width = heads * head_dim
        self.heads, self.head_dim = heads, head_dim
        self.inputs = Linear(xp, rng, width, 3 * width, dtype)
        self.outputs = Linear(xp, rng, width, width, dtype)

    def forward(self, x: Any) -> Any:
        batch, seqlen, _ = x.shape
        qkv = self.inputs.forward(x).reshape(batch, seqlen, 3, self.heads, self.head_dim)
        self.qkv = qkv if isinstance(x, np.ndarray) else qkv.astype(np.float16)  # on a GPU attention is of two bytes
        self.out, self.lse = cupyflash.attention(*self._parts(), causal=True, return_lse=True)
        return self.outputs.forward(self.out.astype(x.dtype).reshape(x.shape))

    def backward(self, dy: Any) -> Any:
        dout = (self.outputs.backward(dy) * _SCALE).reshape(self.out.shape).astype(self.out.dtype)
        gradients = cupyflash.attention_backward(dout, *self._parts(), self.out, self.lse, causal=True)
        dqkv = _library(dy).stack([x.astype(dy.dtype) / _SCALE for x in gradients], 2)
        return self.inputs.backward(dqkv.reshape(*dy.shape[:2], -1))

    def _parts(self) -> tuple[Any, Any, Any]:
        return self.qkv[:, :, 0], self.qkv[:, :, 1], self.qkv[:, :, 2]


_SCALE = 4096  # of gradients in fp16, which has no numbers below 6e-8


class Block:
    """x + attention(norm(x)), and of that z: z + mlp(norm(z))"""

    def __init__(self, xp: Any, rng: np.random.Generator, heads: int, head_dim: int, dtype: Any) -> None:
        width = heads * head_dim
        self.attention = [LayerNorm(xp, width, dtype), Attention(xp, rng, heads, head_dim, dtype)]
        wide = Linear(xp, rng, width, 4 * width, dtype), Gelu(), Linear(xp, rng, 4 * width, width, dtype)
        self.mlp = [LayerNorm(xp, width, dtype), *wide]

    def forward(self, x: Any) -> Any:
        for part in (self.attention, self.mlp):
            y = x
            for layer in part:
                y = layer.forward(y)
            x = x + y
        return x

    def backward(self, dx: Any) -> Any:
        for part in (self.mlp, self.attention):
            dy = dx
            for layer in reversed(part):
                dy = layer.backward(dy)
            dx = dx + dy
        return dx


class Gpt:
    """Token and position embeddings, blocks, a last norm, and a linear layer to the logits of the next token."""

    def __init__(
        self, xp: Any, layers: int, heads: int, head_dim: int, longest: int, dtype: Any = np.float32, seed: int = 0
    ) -> None:
        rng, width = np.random.default_rng(seed), heads * head_dim
        self.xp, self.longest = xp, longest
        self.tokens = Parameter(xp.asarray(rng.normal(0, 0.3, (VOCABULARY, width)).astype(dtype)))
        self.places = Parameter(xp.asarray(rng.normal(0, 0.3, (longest, width)).astype(dtype)))
        blocks = [Block(xp, rng, heads, head_dim, dtype) for _ in range(layers)]
        self.layers = [*blocks, LayerNorm(xp, width, dtype), Linear(xp, rng, width, VOCABULARY, dtype)]

    def forward(self, ids: Any) -> Any:
        """(batch, seqlen, vocabulary): logits."""
        x = self.tokens.value[ids] + self.places.value[: ids.shape[1]]
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def loss(self, ids: Any, targets: Any) -> float:
        """Mean of -ln p(target), and its gradient in all parameters."""
        logits = self.forward(ids)
        shifted = logits - logits.max(-1, keepdims=True)
        log_p = shifted - self.xp.log(self.xp.exp(shifted).sum(-1, keepdims=True))
        hit = targets[..., None] == self.xp.arange(VOCABULARY)
        dx = (self.xp.exp(log_p) - hit) / targets.size
        for layer in reversed(self.layers):
            dx = layer.backward(dx)
        self.xp.add.at(self.tokens.gradient, ids, dx)
        self.places.gradient[: ids.shape[1]] += dx.sum(0)
        return float(-(log_p * hit).sum() / targets.size)

    def parameters(self) -> list[Parameter]:
        return _parameters_of(self)


def _parameters_of(part: Any) -> list[Parameter]:
    """All that a layer holds, in the order of its attributes."""
    if isinstance(part, Parameter):
        return [part]
    parts = part if isinstance(part, (list, tuple)) else vars(part).values() if hasattr(part, "__dict__") else ()
    return [x for p in parts if isinstance(p, (Parameter, list, tuple, *_LAYERS)) for x in _parameters_of(p)]


_LAYERS = (Linear, LayerNorm, Attention, Block)


def _library(x: Any) -> Any:
    """numpy or cupy, whichever x is of."""
    return np if isinstance(x, np.ndarray) else importlib.import_module("cupy")


class AdamW:
    """w -= rate (m / (sqrt(v) + eps) + decay w), with m and v the corrected means of gradients and their squares."""

    def __init__(self, parameters: list[Parameter], rate: float, decay: float = 0.01) -> None:
        self.parameters, self.rate, self.decay, self.count = parameters, rate, decay, 0
        self.means = [(p.value * 0, p.value * 0) for p in parameters]

    def step(self) -> None:
        self.count += 1
        for p, (m, v) in zip(self.parameters, self.means, strict=True):
            m += 0.1 * (p.gradient - m)
            v += 0.01 * (p.gradient * p.gradient - v)
            direction = m / (1 - 0.9**self.count) / ((v / (1 - 0.99**self.count)) ** 0.5 + 1e-8)
            p.value -= self.rate * (direction + self.decay * p.value)
            p.gradient[...] = 0


# ---- Training ----


def corpus() -> list[int]:
    """The functions of snippets.py one behind the other, each with END before it."""
    source = (Path(__file__).parent / "snippets.py").read_text()
    functions = [part.strip() + "\n" for part in source.split("\n\n\n") if part.startswith("def ")]
    return [code for text in functions for code in (END, *text.encode("ascii"))]


def train(model: Gpt, steps: int, batch: int, rate: float) -> list[float]:
    rng, text = np.random.default_rng(1), np.array([*corpus(), END])
    optimizer, losses = AdamW(model.parameters(), rate), []
    for _ in range(steps):
        starts = rng.integers(0, len(text) - model.longest - 1, batch)
        rows = model.xp.asarray(np.stack([text[i : i + model.longest + 1] for i in starts]))
        losses.append(model.loss(rows[:, :-1], rows[:, 1:]))
        optimizer.step()
    return losses


def complete(model: Gpt, prompt: str, longest: int) -> str:
    """The prompt and what follows, greedily; all of it is computed again for each character."""
    ids = [END, *prompt.encode("ascii")]
    for _ in range(longest):
        logits = model.forward(model.xp.asarray([ids[-model.longest :]]))[0, -1]
        ids.append(int(logits.argmax()))
        if ids[-1] == END:
            break
    return bytes(code for code in ids if code != END).decode("ascii")


def _library_by_name(name: str) -> Any:
    from cupyflash.gpu import device

    if name == "auto":
        name = "cupy" if device.count() else "numpy"
    return importlib.import_module(name)


@click.command(help=__doc__)
@click.option("--size", type=click.Choice(list(SIZES)), default="small", show_default=True)
@click.option("--steps", default=1000, show_default=True, help="Steps of training.")
@click.option("--batch", default=16, show_default=True, help="Rows of text in a batch.")
@click.option("--rate", default=1e-3, show_default=True, help="Learning rate.")
@click.option("--longest", default=120, show_default=True, help="Characters to complete at most.")
@click.option("--array", type=click.Choice(["auto", "cupy", "numpy"]), default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON, and nothing else.")
def main(size: str, steps: int, batch: int, rate: float, longest: int, array: str, as_json: bool) -> None:
    xp = _library_by_name(array)
    model = Gpt(xp, *SIZES[size])
    begin = time.perf_counter()
    losses = train(model, steps, batch, rate)
    seconds = time.perf_counter() - begin
    text = complete(model, "def factorial(n):", longest)
    products = "NumPy" if xp is np else "cuBLAS" if has_cublas() else "a kernel of this file"
    if as_json:
        results = {"array": xp.__name__, "products_by": products, "seconds": seconds, "losses": losses, "text": text}
        click.echo(json.dumps(results, indent=2))
        return
    count = sum(p.value.size for p in model.parameters())
    title = f"{count:,} parameters, {steps} steps in {seconds:.0f} s, {xp.__name__}, products by {products}"
    table = Table("step", "loss", title=title, title_justify="left")
    for i in sorted({0, steps // 4, steps // 2, steps - 1}):
        table.add_row(f"{i + 1}", f"{losses[i]:.3f}")
    Console().print(table)
    click.echo(text)


if __name__ == "__main__":
    main()
