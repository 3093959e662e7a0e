"""Models of transformers by cupyflash compared with the same ones eager, in float32 on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
import numpy as np  # noqa: E402
import transformers  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

from cupyflash.dropout import STEPS, kept, limit_of  # noqa: E402
from cupyflash.torch import sdpa, seeds  # noqa: E402
from tests import transformers_models as models  # noqa: E402
from tests.transformers_models import build, greedy, labels_of, logits_and_gradients, padding, tokens  # noqa: E402

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")]
SIDES = ("none", "left", "right")


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")
    monkeypatch.setattr(sdpa, "_told", set())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The passes that cupyflash ran; of few queries, attention over a cache."""
    from cupyflash.launch import cached, run

    found: list[str] = []
    for name, module in (("forward", run), ("backward", run), ("step", cached)):
        attribute = "forward" if name == "step" else name
        real = getattr(module, attribute)

        def count(*args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Any:
            found.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(module, attribute, count)
    return found


def pair(name: str, **changes: Any) -> tuple[Any, Any]:
    """A model eager and by cupyflash."""
    eager, ours = (build(name, kind, **changes) for kind in ("eager", "cupyflash"))
    return eager, ours


def close(found: Any, want: Any, scale: float = 0.0) -> None:
    """Within 32 roundings of the largest number, or of `scale`."""
    assert found.shape == want.shape
    assert found.isfinite().all()
    error, largest = (found - want).abs().max().item(), max(scale, want.abs().max().item())
    assert error <= 2**-18 * largest, f"{error} of {largest}"


def close_all(found: dict[str, Any], want: dict[str, Any]) -> None:
    """By name; some are 0 but for rounding, and all are measured by the largest."""
    assert found.keys() == want.keys()
    largest = max(x.abs().max().item() for x in want.values())
    for name, gradient in want.items():
        close(found[name], gradient, largest)


def gradients_of(model: Any) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# ---- What the models give ----


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", models.MODELS | models.LATENT)
def test_logits_and_gradients(name: str, side: str, calls: list[str]) -> None:
    eager, ours = pair(name)
    ids, mask = tokens(), padding(side)
    want, found = (logits_and_gradients(model, ids, mask) for model in (eager, ours))
    close(found[0], want[0])
    close_all(found[1], want[1])
    assert calls == ["forward"] * 2 + ["backward"] * 2
    close(ours(ids).logits, eager(ids).logits)


def test_a_default_device(calls: list[str]) -> None:
    """Which torch keeps as a mode: `torch.set_default_device("cuda")` is the first line of many programs."""
    eager, ours = pair("llama")
    ids, mask = tokens(), padding("left")
    with torch.device("cpu"):
        want, found = (logits_and_gradients(model, ids, mask) for model in (eager, ours))
    close(found[0], want[0])
    close_all(found[1], want[1])
    assert calls == ["forward"] * 2 + ["backward"] * 2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", models.MODELS)
def test_generate(name: str, cache: str, calls: list[str]) -> None:
    """Greedy tokens; more than a sliding window holds, and fewer than a static cache has room for."""
    eager, ours = pair(name)
    options = {} if cache == "dynamic" else {"cache_implementation": "static", "disable_compile": True}
    for side in ("left", "none"):
        want, found = (greedy(model, tokens(), padding(side), **options) for model in (eager, ours))
        assert torch.equal(found, want)
        assert len(want.unique()) > 9, "random weights repeat themselves: this would not tell much"
    assert calls == (["forward"] * 2 + ["step"] * 2 * 8) * 2


def test_generate_with_another_head_dim_of_v(calls: list[str]) -> None:
    """Steps are over a cache there, too."""
    eager, ours = pair("deepseek-v3")
    for side in ("left", "none"):
        want, found = (greedy(model, tokens(), padding(side)) for model in (eager, ours))
        assert torch.equal(found, want)
    assert calls == (["forward"] * 2 + ["step"] * 2 * 8) * 2


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", models.ENCODERS)
def test_encoders(name: str, side: str, calls: list[str]) -> None:
    eager, ours = pair(name)
    ids, mask = tokens(), padding(side)
    want, found = (model(ids, attention_mask=mask).last_hidden_state[mask.bool()] for model in (eager, ours))
    close(found, want)
    for out in (want, found):
        out.square().sum().backward()
    close_all(gradients_of(ours), gradients_of(eager))
    assert calls == ["forward"] * 2 + ["backward"] * 2
    close(ours(ids).last_hidden_state, eager(ids).last_hidden_state)


@pytest.mark.parametrize("name", models.SEQ2SEQ)
def test_cross_attention(name: str, calls: list[str]) -> None:
    """T5 adds a bias to its scores, which is learned."""
    eager, ours = pair(name)
    ids, mask, target = tokens(), padding("right"), tokens(3, 7)
    want, found = (model(ids, attention_mask=mask, labels=target) for model in (eager, ours))
    close(found.logits, want.logits)
    close(found.loss, want.loss)
    for out in (found, want):
        out.loss.backward()
    close_all(gradients_of(ours), gradients_of(eager))
    assert calls == ["forward"] * 6 + ["backward"] * 6
    for options in ({}, {"cache_implementation": "static", "disable_compile": True}):
        assert torch.equal(*(greedy(model, ids, mask, **options) for model in (ours, eager)))


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_training_step(is_checkpointed: bool) -> None:
    eager, ours = pair("phi")
    ids, mask = tokens(), padding("right")
    for model in (eager, ours):
        model.train()
        if is_checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(ids, attention_mask=mask, labels=labels_of(ids, mask), use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    close_all(dict(ours.named_parameters()), dict(eager.named_parameters()))


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_cache_is_continued(name: str, cache: str, calls: list[str]) -> None:
    """A prompt in pieces of many tokens, some and one: those of several end within the room of a static cache."""
    from transformers import DynamicCache, StaticCache

    eager, ours = pair(name)
    ids, mask = tokens(), padding("left")

    def pieces(model: Any) -> list[Any]:
        kept = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=23)
        found, start = [], 0
        for end in (8, 11, 12, 13, 17):
            out = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=kept).logits
            found.append(out[mask[:, start:end].bool()])
            start = end
        return found

    with torch.no_grad():
        for a, b in zip(pieces(ours), pieces(eager), strict=True):
            close(a, b)
    assert calls == ["step"] * 10


# ---- Packed sequences ----


def positions(*lengths: int) -> Any:
    return torch.cat([torch.arange(n) for n in lengths])[None]


@pytest.mark.parametrize("name", ["llama", "mistral", "phi", "gpt-oss"])
@pytest.mark.parametrize("told_by", ["positions", "positions and a cache", "collator"])
def test_packed_sequences(name: str, told_by: str, calls: list[str]) -> None:
    """Each sequence is what it is alone; a collator's cu_seqlens say it, or positions that start again."""
    eager, ours = pair(name)
    ids = tokens(1, 29)
    cu = torch.tensor([0, 9, 10, 29], dtype=torch.int32)
    given = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 19, "max_length_k": 19}
    inputs: dict[str, Any] = {"position_ids": positions(9, 1, 19), "use_cache": told_by == "positions and a cache"}
    if told_by == "collator":
        inputs |= given
    found = ours(ids, **inputs).logits
    want = torch.cat([eager(part).logits for part in ids.split([9, 1, 19], 1)], 1)
    close(found, want)
    for logits in (found, want):
        logits.square().sum().backward()
    close_all(gradients_of(ours), gradients_of(eager))
    assert calls == ["forward"] * 2 + ["backward"] * 2


@pytest.mark.parametrize("places", [torch.zeros(1, 19, dtype=torch.long), torch.arange(19)[None] % 7 * 2,
                                    torch.randperm(19, generator=torch.Generator().manual_seed(1))[None]])  # fmt: skip
def test_positions_that_say_nothing_of_sequences(places: torch.Tensor) -> None:
    """gpt-oss's model makes no mask of them, so eager sees one sequence."""
    eager, ours = pair("gpt-oss")
    want, found = (model(tokens(1, 19), position_ids=places, use_cache=False).logits for model in (eager, ours))
    close(found, want)


def test_packed_sequences_in_a_batch(calls: list[str]) -> None:
    eager, ours = pair("llama")
    ids = tokens(3, 17)
    places = torch.cat([positions(5, 12), positions(17), positions(1, 3, 13)])
    want, found = (model(ids, position_ids=places, use_cache=False).logits for model in (eager, ours))
    close(found, want)
    assert len(calls) == 2


@pytest.mark.filterwarnings("ignore:cupyflash.transformers:UserWarning")
def test_packed_sequences_by_transformers() -> None:
    """Of a head_dim that is not ours, and with a softcap, by eager."""
    for name, changes in (("mistral", {"head_dim": 12}), ("gemma2", {"head_dim": 12})):
        eager, ours = pair(name, **changes)
        ids = tokens(1, 29)
        found = ours(ids, position_ids=positions(9, 1, 19)).logits
        close(found, torch.cat([eager(part).logits for part in ids.split([9, 1, 19], 1)], 1))


@pytest.mark.skipif(
    "paged|sdpa" in transformers.AttentionInterface._global_mapping
    and "cache" not in inspect.signature(sdpa_attention_forward).parameters,
    reason="it asks for another name here",
)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
def test_continuous_batching(name: str, calls: list[str]) -> None:
    """Requests of different lengths, packed, whose keys transformers gathers from pages."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    eager, ours = pair(name)
    ids, mask = tokens(), padding("left")
    requests = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
    found = ours.generate_batch(
        inputs=requests,
        generation_config=GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64),
        progress_bar=False,
    )
    by_prompt = {tuple(result.prompt_ids): result.generated_tokens for result in found.values()}
    assert [by_prompt[tuple(prompt)] for prompt in requests] == greedy(eager, ids, mask, 6).tolist()
    assert calls
    assert set(calls) == {"forward"}


# ---- Masks that say more: added to the scores ----


def test_masks_that_are_no_range_are_answered(calls: list[str]) -> None:
    eager, ours = pair("llama")
    ids, mask = tokens(), padding("left")
    mask[2, 4:9] = 0
    found = ours(ids, attention_mask=mask).logits
    close(found[mask.bool()], eager(ids, attention_mask=mask).logits[mask.bool()])
    assert len(calls) == 2
    right = padding("right")  # what comes next lies behind padding
    assert torch.equal(*(greedy(model, ids, right) for model in (ours, eager)))


def test_masks_by_chunks(calls: list[str]) -> None:
    """Of the two layers one sees chunks, the other all."""
    eager, ours = pair("llama4", layer_types=["chunked_attention", "full_attention"])
    ids, mask = tokens(), padding("left")
    found = ours(ids, attention_mask=mask).logits
    close(found[mask.bool()], eager(ids, attention_mask=mask).logits[mask.bool()])
    assert calls == ["forward"] * 2


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_masks_of_the_user(name: str, calls: list[str]) -> None:
    eager, ours = pair(name)
    ids = tokens()
    seen = torch.rand(3, 1, 17, 17, generator=torch.Generator().manual_seed(3)) < 0.5
    seen |= torch.eye(17, dtype=torch.bool)
    mask = torch.zeros(seen.shape, dtype=torch.float32).masked_fill_(~seen, -1e38)
    close(ours(ids, attention_mask=mask).logits, eager(ids, attention_mask=mask).logits)
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_boolean_mask_of_the_user(name: str, calls: list[str]) -> None:
    """Of T5 beside its bias of positions, which then hides what the mask does."""
    eager, ours = pair(name)
    ids = tokens()
    seen = torch.rand(3, 1, 17, 17, generator=torch.Generator().manual_seed(3)) < 0.5
    seen |= torch.eye(17, dtype=torch.bool)
    mask = torch.zeros(seen.shape).masked_fill_(~seen, -1e38)
    if name == "t5":
        found, want = (model.encoder(ids, attention_mask=x)[0] for model, x in ((ours, seen), (eager, mask)))
    else:
        found, want = (model(ids, attention_mask=x).logits for model, x in ((ours, seen), (eager, mask)))
    close(found, want)
    assert calls == ["forward"] * 2


def dropping(module: Any, q: Any, k: Any, v: Any, mask: Any, dropout: float, scaling: float, **_: Any) -> Any:
    """Attention as the models' eager functions have it, but for which elements are dropped: those of cupyflash."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    batch, heads, n, m = *q.shape[:3], k.shape[2]
    seed = seeds.words(None, q, draw=True).numpy()
    numbers = np.divmod(np.arange(batch * heads), heads)
    z = kept(seed, limit_of(dropout), *numbers, slice(0, n), slice(0, m)).reshape(batch, heads, n, m)
    scores = (q @ k.transpose(-2, -1) * scaling).masked_fill(~mask, -torch.inf)
    p = torch.softmax(scores, -1).nan_to_num() * torch.from_numpy(z) / (1 - limit_of(dropout) / STEPS)
    return (p @ v).transpose(1, 2), None


def test_dropout(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The elements that torch's generator says, and none in evaluation."""
    ours, other = (build("llama", kind, attention_dropout=0.3).train() for kind in ("cupyflash", "sdpa"))
    monkeypatch.setitem(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", dropping)
    ids, mask = tokens(), padding("right")
    found = []
    for model in (ours, other):
        torch.manual_seed(5)
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
        logits.square().sum().backward()
        found.append([logits, *(p.grad for p in model.parameters())])
    for got, want in zip(*found, strict=True):
        close(got, want, scale=1.0)
    assert calls == ["forward"] * 2 + ["backward"] * 2
    again = ours(ids, attention_mask=mask).logits[mask.bool()]
    assert not torch.equal(again, found[0][0])
    ours.eval()
    assert torch.equal(*(ours(ids, attention_mask=mask).logits for _ in range(2)))


# ---- What goes to transformers, and why ----


@pytest.mark.filterwarnings("ignore:cupyflash.transformers:UserWarning")
def test_masks_and_biases_by_transformers() -> None:
    """Of a head_dim that is not ours: masks that say more by sdpa and eager, and T5's bias with a static cache."""
    hidden = padding("left")
    hidden[2, 4:9] = 0
    for name in ("llama", "gemma2"):
        eager, ours = pair(name, head_dim=12)
        want, found = (model(tokens(), attention_mask=hidden).logits[hidden.bool()] for model in (eager, ours))
        close(found, want)
    eager, ours = pair("t5", d_kv=12)
    mask = padding("right")
    for options in ({}, {"cache_implementation": "static", "disable_compile": True}):
        assert torch.equal(*(greedy(model, tokens(), mask, **options) for model in (ours, eager)))


def test_dropout_beside_a_mask_that_is_no_range(calls: list[str]) -> None:
    """The mask is the causal one, written out: what a call without it drops."""
    ours = build("llama", "cupyflash", attention_dropout=0.3).train()
    ids, seen = tokens(), torch.ones(3, 1, 17, 17, dtype=torch.bool).tril()
    found = []
    for mask in (seen, None):
        torch.manual_seed(5)
        found.append(ours(ids, attention_mask=mask).logits)
    close(*found)
    assert calls == ["forward"] * 4


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_what_sdpa_lacks_goes_to_eager(name: str) -> None:
    """Softcaps and sinks, of a head_dim that is not ours."""
    eager, ours = pair(name, head_dim=12)
    ids, mask = tokens(), padding("left")
    with pytest.warns(UserWarning, match="a multiple of 8"):
        want, found = (logits_and_gradients(model, ids, mask) for model in (eager, ours))
    close(found[0], want[0])
    assert torch.equal(*(greedy(model, ids, mask) for model in (ours, eager)))


def test_attention_weights() -> None:
    eager, ours = pair("llama")
    with pytest.warns(UserWarning, match="there are no attention weights"):
        found = ours(tokens(), output_attentions=True).attentions
    if found is None or found[0] is None:
        pytest.fail("no weights")
    close(found[1], eager(tokens(), output_attentions=True).attentions[1])


def test_a_reason_is_told_once() -> None:
    ours = build("llama", "cupyflash", head_dim=12)
    with pytest.warns(UserWarning, match="a multiple of 8"):
        ours(tokens())
    ours(tokens())  # a warning is an error


def test_on_the_cpu_transformers_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPYFLASH_BACKEND")
    with pytest.warns(UserWarning, match="tensors in host memory are faster there"):
        build("llama", "cupyflash")(tokens())


# ---- torch.compile ----


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiled(name: str, calls: list[str]) -> None:
    eager, ours = pair(name)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for side in ("left", "right"):
        want, found = (logits_and_gradients(model, tokens(), padding(side)) for model in (eager, compiled))
        close(found[0], want[0])
        close_all({name.removeprefix("_orig_mod."): x for name, x in found[1].items()}, want[1])
    assert len(calls) == 8
    with torch.no_grad():  # transformers then takes all for packed sequences, which cannot be looked at
        close(compiled(tokens(), use_cache=False).logits, eager(tokens()).logits)
    assert len(calls) == 10
    hidden = padding("left")
    hidden[2, 4:9] = 0
    with pytest.raises(RuntimeError, match="one range of keys"):
        compiled(tokens(), attention_mask=hidden)
    torch._dynamo.reset()


def test_generate_compiled() -> None:
    from transformers import CompileConfig

    eager, ours = pair("llama")
    torch._dynamo.reset()
    config = CompileConfig(fullgraph=True, backend="aot_eager", dynamic=None, mode=None)
    config._compile_all_devices = True
    options = {"cache_implementation": "static"}
    found = greedy(ours, tokens(), padding("left"), 5, compile_config=config, **options)
    assert torch.equal(found, greedy(eager, tokens(), padding("left"), 5, disable_compile=True, **options))
    torch._dynamo.reset()


# ---- Two bytes a number ----


@pytest.mark.parametrize("name", ["phi", "mistral"])
def test_bf16(name: str) -> None:
    """At most twice the error of eager in the same dtype, against eager in float32."""
    ids, mask = tokens(), padding("left")
    exact = build(name, "eager")(ids, attention_mask=mask).logits[mask.bool()]
    errors = []
    for kind in ("eager", "cupyflash"):
        model = build(name, kind).bfloat16()
        errors.append((model(ids, attention_mask=mask).logits[mask.bool()].float() - exact).abs().max())
    assert errors[1] <= 2 * errors[0] + exact.abs().max() * 2**-8
