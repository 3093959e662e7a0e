"""Models that do not hand masks on as they are given them, or choose keys themselves: by cupyflash and eager."""

from __future__ import annotations

import copy
import types
import warnings
from typing import Any

import pytest

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
import transformers  # noqa: E402

from cupyflash import UnsupportedError  # noqa: E402
from cupyflash.torch import sdpa  # noqa: E402
from cupyflash.transformers import call, fallback, models  # noqa: E402
from tests.transformers_models import _GQA, padding, tokens  # noqa: E402

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")]
_EXPERTS = _GQA | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_WINDOW = {"sliding_window": 5}
_INDEXER = {"index_topk": 4, "index_n_heads": 4, "index_head_dim": 16}
_COUNTS = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Their masks know of a window, their attention does not.
    "qwen2-moe": ("Qwen2MoeForCausalLM", _EXPERTS | _WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "phimoe": ("PhimoeForCausalLM", _GQA | _WINDOW | {"num_local_experts": 2}),
    "doge": ("DogeForCausalLM", _GQA),  # adds to its mask
}
OF_THEIR_OWN: dict[str, tuple[str, dict[str, Any], str]] = {
    "nllb-moe": (
        "NllbMoeForConditionalGeneration",
        _COUNTS | {"vocab_size": 128, "d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_experts": 2},
        "made for eager attention alone",
    ),
    "deepseek-v3.2": (
        "DeepseekV32ForCausalLM",
        _GQA | _LATENT | _INDEXER | {"num_key_value_heads": 4, "first_k_dense_replace": 2},
        "hides keys that it does not choose",
    ),
}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")
    monkeypatch.setattr(sdpa, "_told", set())


def build(kind: str, settings: dict[str, Any], implementation: str) -> Any:
    model_class = getattr(transformers, kind, None)
    if model_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    torch.manual_seed(0)
    config = model_class.config_class(**copy.deepcopy(settings))
    model = model_class._from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for x in model.parameters():
            if x.dim() > 1:
                x.normal_(std=0.15)
    return model.eval()


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_masks_that_are_read_say_all(name: str, side: str) -> None:
    eager, ours = (build(*MODELS[name], kind) for kind in ("eager", "cupyflash"))
    assert ours.config._attn_implementation == "cupyflash"
    ids = tokens(3, 14)
    mask = padding(side, *ids.shape)
    given = {} if side == "none" else {"attention_mask": mask}
    with torch.no_grad():
        found, want = (model(ids, **given).logits[mask.bool()] for model in (ours, eager))
    torch.testing.assert_close(found, want, rtol=0, atol=2e-6 * want.abs().max().item())


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_models_that_are_not_made_for_it_get_their_default(name: str) -> None:
    kind, settings, reason = OF_THEIR_OWN[name]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = build(kind, settings, "cupyflash")
    assert model.config._attn_implementation in ("eager", "sdpa")
    assert any(f"{kind}" in str(w.message) and reason in str(w.message) for w in told)
    ids = tokens(2, 7)
    given = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found, want = (m(ids, **given).logits for m in (model, build(kind, settings, "eager")))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", call.CHOSEN)
def test_keys_that_a_model_chooses_are_refused(name: str) -> None:
    """They would be lost: sdpa does not know them."""
    attend = transformers.AttentionInterface()["cupyflash"]
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(UnsupportedError, match=f"^{name}: .*attn_implementation=.eager."):
        attend(types.SimpleNamespace(is_causal=True), q, q, q, None, **{name: torch.zeros(1, 5, 2)})


def test_a_head_mask_is_eagers(monkeypatch: pytest.MonkeyPatch) -> None:
    """sdpa would leave it out."""
    given: list[dict[str, Any]] = []

    def eager(*x: Any, **options: Any) -> Any:
        given.append(options)
        return x[1].transpose(1, 2), None

    monkeypatch.setattr(fallback, "_eager_of", lambda module: eager)
    attend = transformers.AttentionInterface()["cupyflash"]
    q = torch.randn(1, 2, 5, 8)
    with pytest.warns(UserWarning, match="there is a head_mask"):
        attend(types.SimpleNamespace(is_causal=True), q, q, q, None, head_mask=torch.ones(2))
    assert "head_mask" in given[0]


def test_a_model_without_a_source_is_taken_at_its_word() -> None:
    assert not models._source_of(types.ModuleType("nowhere"))
    assert not models._drops_windows(types.ModuleType("nowhere"))
