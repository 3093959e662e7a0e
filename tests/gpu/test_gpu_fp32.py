"""fp32 on a GPU in each library, by kernels whose products are as exact as those of fp32 (tile/fp32.cuh)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash

torch = pytest.importorskip("torch")
F = torch.nn.functional
pytestmark = [
    pytest.mark.gpu,
    *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")),
]


def random(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda")


def plain(q: Any, k: Any, v: Any, dtype: Any, mask: Any = None) -> tuple[Any, ...]:
    """Out and gradients of its sum of cosines by PyTorch's own operations, in a dtype; layout bhsd."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
    out = scores.softmax(-1) @ v
    return out, *torch.autograd.grad(out.cos().sum(), (q, k, v))


def judge(found: tuple[Any, ...], *inputs: Any, mask: Any = None) -> None:
    exact, single = plain(*inputs, torch.float64, mask), plain(*inputs, torch.float32, mask)
    for x, e, s in zip(found, exact, single, strict=True):
        compare(x, e, s)


def judge_out(out: Any, *inputs: Any, mask: Any) -> None:
    compare(out, plain(*inputs, torch.float64, mask)[0], plain(*inputs, torch.float32, mask)[0])


def compare(x: Any, exact: Any, single: Any) -> None:
    """By the 2x rule."""
    assert (x.dtype, x.shape) == (torch.float32, exact.shape)
    assert (x - exact).abs().max() <= 2 * (single - exact).abs().max() + 2.0**-24 * exact.abs().max()


@pytest.fixture(autouse=True)
def no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fp32 is compared to is fp32."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def with_gradients(call: Any, *inputs: Any) -> tuple[Any, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = call(*leaves)
    return out, *torch.autograd.grad(out.cos().sum(), leaves)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_autograd(head_dim: int, compiled: bool) -> None:
    inputs = [random(2, 3, 300, head_dim, seed=i) for i in range(3)]
    call = torch.compile(cupyflash.attention, fullgraph=True) if compiled else cupyflash.attention
    mask = torch.ones(300, 300, dtype=torch.bool, device="cuda").tril()
    judge(with_gradients(lambda *x: call(*x, causal=True, layout="bhsd"), *inputs), *inputs, mask=mask)


def test_sdpa() -> None:
    """It is ours: torch's own is not asked."""
    inputs = [random(2, 3, 300, 64, seed=i) for i in range(3)]
    mask = random(2, 1, 300, 300, seed=4) > -1
    own = cupyflash.torch.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", None)
        judge(with_gradients(lambda *x: own(*x, attn_mask=mask), *inputs), *inputs, mask=mask)
        judge(with_gradients(own, *inputs), *inputs)


def test_numpy_arrays_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (random(1, 200, 4, 64, seed=i) for i in range(3))
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cuda")
    found = cupyflash.attention(*(x.cpu().numpy() for x in (q, k, v)))
    assert isinstance(found, np.ndarray)
    assert np.array_equal(found, cupyflash.attention(q, k, v).cpu().numpy())


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    inputs = [random(2, 300, 3, 64, seed=i) for i in range(3)]
    arrays = [jax.numpy.asarray(x.cpu().numpy()) for x in inputs]

    def loss(*x: Any) -> Any:
        out = cupyflash.attention(*x)
        return jax.numpy.cos(out).sum(), out

    gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    found = [torch.tensor(np.asarray(x)).cuda().transpose(1, 2) for x in (out, *gradients)]
    judge(tuple(found), *(x.transpose(1, 2) for x in inputs))


def cache_of(rows: int = 200) -> dict[str, Any]:
    """Two sequences of other lengths, and a new row of each."""
    new = {name: random(2, 1, heads, 128, seed=i) for i, (name, heads) in enumerate((("q", 8), ("k", 2), ("v", 2)))}
    caches = {name: random(2, rows, 2, 128, seed=7 + i) for i, name in enumerate(("k_cache", "v_cache"))}
    return new | caches | {"cache_seqlens": torch.tensor([rows - 1, 70], dtype=torch.int32, device="cuda")}


def judge_steps(out: Any, x: dict[str, Any]) -> None:
    """Of caches to which the new rows were appended."""
    keys = torch.arange(x["k_cache"].shape[1], device="cuda")
    mask = (keys <= x["cache_seqlens"][:, None])[:, None, None]
    k, v = (x[name].repeat_interleave(4, 2).transpose(1, 2) for name in ("k_cache", "v_cache"))
    judge_out(out.transpose(1, 2), x["q"].transpose(1, 2), k, v, mask=mask)


def test_steps_over_a_cache_in_one_graph() -> None:
    x = cache_of()
    cupyflash.attention_with_cache(**x)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cupyflash.attention_with_cache(**x)
    for seed, length in ((20, 5), (30, 150)):
        x["q"].copy_(random(2, 1, 8, 128, seed=seed)), x["v"].copy_(random(2, 1, 2, 128, seed=seed + 1))
        x["cache_seqlens"].fill_(length)
        graph.replay()
        assert torch.equal(x["v_cache"][:, length], x["v"][:, 0])
        judge_steps(out, x)


def test_steps_over_a_cache_inside_jax() -> None:
    jax = pytest.importorskip("jax")
    x = cache_of()
    arrays = {name: jax.numpy.asarray(y.cpu().numpy()) for name, y in x.items()}
    out, *caches = jax.jit(lambda given: cupyflash.attention_with_cache(**given))(arrays)
    x["k_cache"], x["v_cache"] = (torch.tensor(np.asarray(y)).cuda() for y in caches)
    judge_steps(torch.tensor(np.asarray(out)).cuda(), x)


def test_a_model_generates_as_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    import cupyflash.transformers
    from cupyflash.transformers import attention

    cupyflash.transformers.register()
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").cuda().eval()
    tokens = torch.randint(3, 128, (2, 20), device="cuda")
    seen = torch.ones_like(tokens)
    seen[0, :7] = 0
    options = {"attention_mask": seen, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(tokens, **options)
    model.set_attn_implementation("cupyflash")
    called, steps, step = [], [], attention._step
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: called.append(a))
    monkeypatch.setattr(attention, "_step", lambda *a: (steps.append(a), step(*a))[1])
    assert torch.equal(model.generate(tokens, **options), expected)
    assert (len(called), len(steps)) == (0, 2 * 19)
