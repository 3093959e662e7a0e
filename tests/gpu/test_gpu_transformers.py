"""Models of transformers by cupyflash on a GPU: as exact as eager in the same dtype, and nothing waits."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gpu_arrays import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.needs("torch", "transformers"),
    # torch's compiler warns of its own choices.
    *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")),
]
NAMES = ("phi", "gpt2", "llama", "qwen3", "mistral", "gemma2", "gpt-oss", "bert", "modernbert", "bart", "t5")
DECODERS = NAMES[:7]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch

    from cupyflash.torch import sdpa
    from cupyflash.transformers import holes

    monkeypatch.setattr(sdpa, "_told", set())
    monkeypatch.setattr(holes, "_are_masks_checked", False)
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.cuda.synchronize()
    holes._told.value = 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes that cupyflash ran."""
    from cupyflash.launch import run

    found: list[str] = []
    for name in ("forward", "backward"):
        real = getattr(run, name)

        def count(*args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Any:
            found.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(run, name, count)
    return found


def dtypes() -> list[Any]:
    return [pytest.param(name, id=name) for name in ("bfloat16", "float16")]


def build(name: str, kind: str, dtype: str, **changes: Any) -> Any:
    import torch

    from tests import transformers_models as models

    return models.build(name, kind, **changes).to("cuda", getattr(torch, dtype))


def batch(side: str, seqlen: int = 150) -> tuple[Any, Any]:
    """Longer than a block of keys; padding ends within one."""
    from tests import transformers_models as models

    mask = models.padding(side, seqlen=seqlen)
    if side != "none":
        mask[1] = mask[0]
        mask[1, slice(0, 90) if side == "left" else slice(seqlen - 90, seqlen)] = 0
    return models.tokens(3, seqlen).cuda(), mask.cuda()


def results(model: Any, ids: Any, mask: Any) -> list[Any]:
    """What a model gives for tokens that are no padding, and the gradients of its parameters as one vector."""
    import torch

    from tests import transformers_models as models

    model.zero_grad()
    if hasattr(model, "lm_head"):
        labels = models.labels_of(ids, mask)
        inputs = {"labels": labels} if not model.config.is_encoder_decoder else {"labels": ids[:, :40].contiguous()}
        out = model(ids, attention_mask=mask, **inputs)
        kept = out.logits if model.config.is_encoder_decoder else out.logits[mask.bool()]
        out.loss.backward()
    else:
        kept = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
        kept.float().square().mean().backward()
    gradients = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return [kept.detach().float(), torch.cat(gradients)]


def is_as_exact(found: Any, plain: Any, exact: Any, dtype: str) -> None:
    """At most twice the error of eager in the same dtype, and one rounding: the largest error, and all, squared."""
    import torch

    assert found.isfinite().all()
    eps = torch.finfo(getattr(torch, dtype)).eps
    for norm in (torch.inf, 2):
        error, allowed, size = (torch.linalg.vector_norm(x, norm) for x in (found - exact, plain - exact, exact))
        assert error <= 2 * allowed + eps * size, f"{error} > 2 * {allowed} + {eps} * {size}"


@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_models(name: str, side: str, dtype: str, calls: list[str]) -> None:
    changes = {"max_position_embeddings": 256} if name not in ("gpt2", "t5") else {"n_positions": 256}
    ids, mask = batch(side)
    exact = results(build(name, "eager", "float32", **changes), ids, mask)
    plain = results(build(name, "eager", dtype, **changes), ids, mask)
    found = results(build(name, "cupyflash", dtype, **changes), ids, mask)
    for parts in zip(found, plain, exact, strict=True):
        is_as_exact(*parts, dtype)
    layers = 6 if name in ("bart", "t5") else 2
    assert calls == ["forward"] * layers + ["backward"] * layers


@pytest.mark.parametrize("cache", ["dynamic", "static", "static, compiled"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name: str, cache: str) -> None:
    """Each token is one that eager in float32, given the same tokens before, finds the best, within what rounding in
    bf16 can move it."""
    import torch

    from tests import transformers_models as models

    ids, mask = batch("left", 100)
    options: dict[str, Any] = {} if cache == "dynamic" else {"cache_implementation": "static"}
    if cache == "static":
        options["disable_compile"] = True
    ours = build(name, "cupyflash", "bfloat16")
    torch._dynamo.reset()
    chosen = models.greedy(ours, ids, mask, 16, **options)
    everything = torch.cat([ids, chosen], 1)
    seen = torch.cat([mask, torch.ones_like(chosen)], 1)
    inputs = {"attention_mask": seen, "position_ids": (seen.cumsum(1) - 1).clamp(min=0)}  # as generate() counts them
    with torch.no_grad():
        exact, plain = (
            build(name, "eager", dtype)(everything, **inputs).logits[:, ids.shape[1] - 1 : -1].float()
            for dtype in ("float32", "bfloat16")
        )
    moved = 2 * (2 * (plain - exact).abs().max() + exact.abs().max() * 2**-8)
    lost = exact.amax(-1) - exact.gather(-1, chosen[..., None])[..., 0]
    assert (lost <= moved).all(), f"{lost.max()} > {moved}"
    assert (exact.amax(-1) - exact.mean(-1)).min() > moved, "every token would do"
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["llama", "mistral", "phi", "gpt-oss"])
@pytest.mark.parametrize("told_by", ["positions", "positions and a cache", "collator"])
def test_packed_sequences(name: str, told_by: str, calls: list[str]) -> None:
    import torch

    from tests import transformers_models as models

    lengths = (90, 1, 159)
    ids = models.tokens(1, 250).cuda()
    cu = torch.tensor([0, 90, 91, 250], dtype=torch.int32, device="cuda")
    places = torch.cat([torch.arange(n) for n in lengths])[None].cuda()
    inputs: dict[str, Any] = {"position_ids": places, "use_cache": told_by == "positions and a cache"}
    if told_by == "collator":
        inputs |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 159, "max_length_k": 159}
    long = {"max_position_embeddings": 256}

    def alone(dtype: str) -> list[Any]:
        model = build(name, "eager", dtype, **long)
        logits = torch.cat([model(part).logits for part in ids.split(lengths, 1)], 1)
        return with_gradients(model, logits)

    def with_gradients(model: Any, logits: Any) -> list[Any]:
        logits.float().square().mean().backward()
        return [logits.detach().float(), torch.cat([p.grad.float().flatten() for p in model.parameters()])]

    ours = build(name, "cupyflash", "bfloat16", **long)
    found = with_gradients(ours, ours(ids, **inputs).logits)
    for parts in zip(found, alone("bfloat16"), alone("float32"), strict=True):
        is_as_exact(*parts, "bfloat16")
    assert calls == ["forward"] * 2 + ["backward"] * 2


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_nothing_waits(name: str, side: str) -> None:
    """A step of training on a padded batch, kernels loaded before."""
    from tests.gpu_arrays import nothing_waits

    model = build(name, "cupyflash", "bfloat16").train()
    ids, mask = batch(side, 100)
    for is_watched in (False, True):
        if is_watched:
            with nothing_waits():
                out = model(ids, attention_mask=mask, use_cache=False).logits
                out.backward(out.detach())
        else:
            out = model(ids, attention_mask=mask, use_cache=False).logits
            out.backward(out.detach())


def test_a_captured_forward_is_replayed_with_other_padding() -> None:
    import torch

    model = build("llama", "cupyflash", "bfloat16")
    ids, left = batch("left", 100)
    _, right = batch("right", 100)
    mask = left.clone()

    def forward() -> Any:
        with torch.no_grad():
            return model(ids, attention_mask=mask, use_cache=False).logits

    graph, replayed = captured(forward)
    for other in (right, left):
        mask.copy_(other)
        replayed.fill_(float("nan"))
        graph.replay()
        assert torch.equal(replayed[mask.bool()], forward()[mask.bool()])


def test_ranges_by_one_launch_are_those_of_torch() -> None:
    """The mask function on the GPU and on the CPU, for every kind of padding and place of the queries."""
    import torch
    from transformers import masking_utils

    from cupyflash.transformers import launched, masks, ranges

    rng = torch.Generator().manual_seed(0)
    window = masking_utils.sliding_window_causal_mask_function(40)
    asked = itertools.product(
        (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function, window),
        ((9, 0, 9, 0), (1, 308, 309, 0), (1, 308, 400, 0), (5, 300, 400, 0), (1, 308, 200, 109)),
        ("none", "left", "right"), (False, True),
    )  # fmt: skip
    for function, (queries, offset, keys, first), side, is_on_device in asked:
        total = offset + queries
        places = torch.arange(total)
        edge = torch.randint(0, total, (3, 1), generator=rng)
        padding = {"none": None, "left": places >= edge, "right": places <= edge}[side]
        q_offset = torch.tensor([offset]) if is_on_device and queries == 1 else offset
        found = [
            masks.mask(
                3, queries, keys, q_offset.to(device) if is_on_device and queries == 1 else offset, first, function,
                None if padding is None else padding.to(device), device=torch.device(device),
            )
            for device in ("cpu", "cuda")
        ]  # fmt: skip
        of_cpu, of_gpu = found
        assert (of_cpu is None) == (of_gpu is None)
        if of_cpu is not None:
            torch.testing.assert_close(of_gpu.cpu(), of_cpu, rtol=0, atol=0)
    assert launched.key_ranges._on  # they were made by it
    on_host = torch.tensor([5]), torch.ones(3, 9, dtype=torch.bool)  # whose addresses are no GPU's
    counting = ranges.Counting(3, 5, 9, (None, 0), on_host[1])
    assert launched.ranges(counting._replace(first=on_host[0], padding=None), "cuda") is None
    assert launched.ranges(counting._replace(window=(None, None)), "cuda") is None
    assert launched.ranges(counting._replace(padding=on_host[1].cuda()), "cuda") is not None


def test_a_replayed_mask_with_holes_is_found() -> None:
    """Masks of captured graphs, too, are judged where they are used."""
    import torch

    from cupyflash import UnsupportedError
    from cupyflash.transformers import holes, masks

    padding = torch.ones(2, 50, dtype=torch.bool, device="cuda")
    graph, _ = captured(lambda: masks.mask(2, 50, 50, attention_mask=padding, device=padding.device))
    torch.cuda.synchronize()
    holes.look()
    padding[1, 10:20] = False
    graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(UnsupportedError, match="throw it away"):
        holes.look()


def test_a_mask_with_holes_is_an_error_after_the_fact() -> None:
    import torch

    from cupyflash import UnsupportedError
    from cupyflash.transformers import holes

    model = build("llama", "cupyflash", "bfloat16")
    ids, mask = batch("left", 100)
    mask[2, 10:20] = 0

    def go_on() -> None:
        model(ids, attention_mask=mask)  # a later layer may hear of it already
        torch.cuda.synchronize()
        model(ids)

    with torch.no_grad(), pytest.raises(UnsupportedError, match="throw it away and repeat it"):
        go_on()
    assert holes._are_masks_checked
    assert_answered(model, ids, mask)


def test_a_mask_with_holes_is_answered_on_demand() -> None:
    import cupyflash.transformers

    cupyflash.transformers.register(check_masks=True)
    ids, mask = batch("left", 100)
    mask[2, 10:20] = 0
    assert_answered(build("llama", "cupyflash", "bfloat16"), ids, mask)


def assert_answered(model: Any, ids: Any, mask: Any) -> None:
    import torch

    with torch.no_grad():
        found = model(ids, attention_mask=mask).logits[mask.bool()].float()
    with torch.no_grad():
        plain, exact = (
            build("llama", "eager", dtype)(ids, attention_mask=mask).logits[mask.bool()].float()
            for dtype in ("bfloat16", "float32")
        )
    is_as_exact(found, plain, exact, "bfloat16")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str) -> None:
    import torch

    torch._dynamo.reset()
    ours = build("llama", "cupyflash", "bfloat16")
    compiled = torch.compile(ours, fullgraph=True, mode=mode)
    plain, exact = (build("llama", "eager", dtype) for dtype in ("bfloat16", "float32"))
    for side in ("left", "right", "left"):
        ids, mask = batch(side, 100)
        with torch.no_grad():
            torch.compiler.cudagraph_mark_step_begin()
            parts = [
                model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()].float().clone()
                for model in (compiled, plain, exact)
            ]
        is_as_exact(*parts, "bfloat16")
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_dtypes(dtype: str) -> None:
    """fp32 has kernels; fp64 goes to torch's own attention, which is said. (transformers' eager one gives NaN in fp64
    for rows that see nothing.)"""
    import torch

    ids, mask = batch("left", 100)
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = build("llama", "cupyflash", dtype)(ids, attention_mask=mask).logits[mask.bool()]
    with torch.no_grad():
        want = build("llama", "sdpa", dtype)(ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    assert any("expected fp16, bf16 or fp32 on a GPU" in str(w.message) for w in told) is (dtype == "float64")
