"""Masks of transformers as ranges of keys, compared with the masks that transformers itself makes; and the names."""

from __future__ import annotations

import ctypes
import itertools
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
from transformers import masking_utils  # noqa: E402

import cupyflash.transformers  # noqa: E402
from cupyflash import ArgumentError, UnsupportedError  # noqa: E402
from cupyflash.torch import sdpa  # noqa: E402
from cupyflash.transformers import attention, fallback, holes, masks, packing, ranges, registration  # noqa: E402
from cupyflash.transformers.patterns import FULL, Pattern, pattern_of  # noqa: E402
from tests import transformers_models as models  # noqa: E402

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")]
CAUSAL, BOTH = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")
    monkeypatch.setattr(sdpa, "_told", set())
    monkeypatch.setattr(holes, "_are_masks_checked", False)


# ---- Patterns ----

KINDS: dict[str, tuple[Any, Pattern | None]] = {
    "causal": (CAUSAL, Pattern(None, 0)),
    "both": (BOTH, FULL),
    "window": (masking_utils.sliding_window_causal_mask_function(4), Pattern(3, 0)),
    "window to both sides": (masking_utils.sliding_window_bidirectional_mask_function(4), Pattern(4, 4)),
    "chunks": (masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64)), None),
    "or": (masking_utils.or_masks(CAUSAL, lambda b, h, i, j: j == 3), None),
    "and": (masking_utils.and_masks(CAUSAL, lambda b, h, i, j: j != 3), None),
    "half a window": (masking_utils.sliding_window_overlay(4), None),
    "something else": (len, None),
}


@pytest.mark.parametrize(("function", "pattern"), KINDS.values(), ids=KINDS)
def test_what_a_mask_function_says(function: Any, pattern: Pattern | None) -> None:
    assert pattern_of(function, None, None, True) == pattern


def test_mask_functions_of_packed_sequences() -> None:
    numbers = torch.tensor([[0, 0, 0, 1, 1]])
    places = torch.tensor([[0, 1, 2, 0, 1]])
    of_one = masking_utils.packed_sequence_mask_function(numbers)
    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", lambda f, _: f)  # older ones do not
    for of, (left, right) in ((CAUSAL, (None, 0)), (masking_utils.sliding_window_causal_mask_function(2), (1, 0))):
        for inner in (of, remap(of, places)):
            found = pattern_of(masking_utils.and_masks(of_one, inner), None, None, True)
            assert found is not None
            assert found[:2] == (left, right)
            assert found.sequences is numbers
    assert packing.of_numbers(numbers).tolist() == [0, 3, 5]
    assert packing.of_numbers(torch.tensor([[0, 1], [0, 0]])).tolist() == [0, 1, 2, 4]


def test_the_names_of_transformers_that_are_read() -> None:
    """Without one of them its masks are made whole: this transformers has them."""
    names = ("and_masks", "sliding_window_overlay", "sliding_window_bidirectional_overlay")
    for name in (*names, "packed_sequence_mask_function", "sdpa_mask"):
        assert hasattr(masking_utils, name), name
    assert hasattr(transformers.PreTrainedModel, registration._CHECK)
    assert hasattr(transformers.PreTrainedModel, "_can_set_attn_implementation")


# ---- Ranges ----


def whole(mask: Any, kind: str, queries: int, keys: int) -> Any:
    """(batch, 1, queries, keys): what attention makes of a mask of this kind."""
    window: tuple[int | None, int | None] = (None, None)
    causal = True if mask is None else ranges.is_causal(mask)
    if queries > 1 or mask is None:
        causal = causal and kind in ("causal", "window")
        window = {"window": (3, 0), "window to both sides": (4, 4)}.get(kind, (None, 0 if causal else None))
    used = keys if mask is None or queries == 1 else mask.shape[2]
    kv_range = None if mask is None else ranges.kv_range_of(mask)
    return ranges.in_full(queries, keys, used, window, kv_range, "cpu")


PLACES = [  # queries, their offset, keys, the keys' offset
    (9, 0, 9, 0),
    (5, 4, 9, 0),
    (1, 8, 9, 0),
    (9, 0, 14, 0),
    (5, 4, 14, 0),
    (1, 8, 14, 0),
    (3, 9, 6, 6),
    (1, 11, 4, 8),
]


@pytest.mark.parametrize("side", ["none", "all", "left", "right", "short", "empty"])
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("kind", ["causal", "both", "window", "window to both sides"])
@pytest.mark.parametrize("is_on_device", [False, True])
def test_ranges_say_what_the_mask_says(kind: str, place: tuple[int, ...], side: str, is_on_device: bool) -> None:
    queries, offset, keys, first = place
    function, total = KINDS[kind][0], offset + queries
    padding = None
    if side != "none":
        padding = torch.ones(3, total, dtype=torch.bool)
        padding[0, {"left": slice(0, 4), "right": slice(total - 2, None)}.get(side, slice(0, 0))] = False
        padding[1, {"left": slice(0, 7), "empty": slice(None)}.get(side, slice(0, 0))] = False
        if side == "short":
            padding = padding[:, : total - 1]
    q_offset = torch.tensor(offset) if is_on_device else offset
    arguments = (3, queries, keys, q_offset, first, function, padding)
    want = masking_utils.sdpa_mask(*arguments, allow_is_causal_skip=False).expand(3, 1, queries, keys)
    mask = masks.mask(*arguments)
    if mask is not None and mask.dtype is torch.float32:
        assert kind == "window to both sides"
        assert total != keys + first
        found = mask == 0
    else:
        found = whole(mask, kind, queries, keys).expand(3, 1, queries, keys)
    np.testing.assert_array_equal(found.numpy(), want.numpy())


@pytest.mark.parametrize("kind", ["chunks", "or", "and", "half a window"])
def test_what_says_more_is_the_mask_itself(kind: str) -> None:
    padding = torch.tensor([[True, True, True, False, False]] * 2)
    arguments = (2, 5, 5, 0, 0, KINDS[kind][0], padding)
    for dtype in (torch.float32, torch.bfloat16):
        found = masks.mask(*arguments, dtype=dtype)
        assert torch.equal(found, masking_utils.eager_mask(*arguments, dtype=dtype))


def test_every_padding_mask() -> None:
    """All rows of six keys: those with one range are a range, the others are found."""
    for row in itertools.product([False, True], repeat=6):
        padding = torch.tensor([row, [True] * 6])
        mask = masks.mask(2, 6, 6, attention_mask=padding)
        assert mask is not None
        if sum(a < b for a, b in itertools.pairwise((False, *row))) > 1:
            assert mask.dtype is torch.float32
        else:
            start, end = ranges.kv_range_of(mask)[0].tolist()
            assert [start <= i < end for i in range(6)] == list(row)


def test_a_range_mask_is_a_view() -> None:
    """Its rows cost eight bytes each, however many keys there are; generate() hands on what has four dimensions."""
    mask = masks.mask(2, 4096, 4096, attention_mask=torch.ones(2, 4096, dtype=torch.bool))
    assert mask is not None
    assert (mask.dim(), mask.untyped_storage().nbytes()) == (4, 16)
    assert ranges.kv_range_of(mask).data_ptr() == mask.data_ptr()
    moved = mask.clone(memory_format=torch.contiguous_format)
    assert torch.equal(ranges.kv_range_of(moved), ranges.kv_range_of(mask))


# ---- Verdicts that come later ----


@pytest.fixture
def _told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was told yet, and no GPU was asked."""
    monkeypatch.setattr(holes, "_told", ctypes.c_int(0))
    monkeypatch.setattr(holes, "_asked", set())


@pytest.mark.usefixtures("_told")
def test_verdicts_are_heard_when_they_are_there() -> None:
    holes.look()
    holes._told.value = 1
    with pytest.raises(UnsupportedError, match="throw it away and repeat it"):
        holes.look()
    assert holes.are_checked()
    holes.look()


@pytest.mark.usefixtures("_told")
def test_the_last_verdict_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holes, "_asked", {3})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda ordinal: setattr(holes._told, "value", ordinal))
    with pytest.warns(UserWarning, match="throw it away"):
        holes._look_at_exit()


# ---- Names ----


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2", "flex_attention", "paged|x", "", None])
def test_names_that_are_taken(name: Any) -> None:
    with pytest.raises(ArgumentError, match="name: expected"):
        cupyflash.transformers.register(name)


def test_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cupyflash.transformers.register("cupy_fa", check_masks=True)
    cupyflash.transformers.register("cupy_fa")
    assert not holes._are_masks_checked
    ids = models.tokens()
    close = torch.testing.assert_close
    close(models.build("llama", "cupy_fa")(ids).logits, models.build("llama", "cupyflash")(ids).logits)


def test_models_take_the_name_as_it_is() -> None:
    """transformers would put another kernel there for gpt-oss, and look for flash-attn's functions for all."""
    model = models.build("gpt-oss", "eager")
    assert type(model)._compatible_flash_implementations
    model.set_attn_implementation("cupyflash")
    assert model.config._attn_implementation == "cupyflash"
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


def test_models_with_attention_of_their_own() -> None:
    config = transformers.MptConfig(vocab_size=128, d_model=64, n_layers=2, n_heads=4, max_seq_len=64)
    with pytest.warns(UserWarning, match="MptForCausalLM has attention of its own"):
        model = transformers.MptForCausalLM._from_config(config, attn_implementation="cupyflash")
    assert model.config._attn_implementation == "eager"


def test_registering_twice_wraps_once() -> None:
    before = getattr(transformers.PreTrainedModel, registration._CHECK)
    cupyflash.transformers.register()
    assert getattr(transformers.PreTrainedModel, registration._CHECK) is before


def test_a_transformers_without_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(transformers.PreTrainedModel, registration._CHECK)
    with pytest.warns(UserWarning, match='register\\("cupy_fa"\\)'):
        cupyflash.transformers.register()


# ---- Before 4.53: models make their masks themselves ----


@pytest.fixture
def _without_mask_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention, registration):
        monkeypatch.setattr(module, "HAS_MASK_FUNCTIONS", False)


def attended(module: Any, mask: Any, **more: Any) -> Any:
    q, k, v = torch.randn(3, 2, 2, 7, 16, generator=torch.Generator().manual_seed(0))
    return attention.attention(module, q, k, v, mask, scaling=0.3, **more)[0]


def wanted(seen: Any) -> Any:
    q, k, v = torch.randn(3, 2, 2, 7, 16, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=0.3).transpose(1, 2)


LOWER = torch.ones(7, 7, dtype=torch.bool).tril()
PADDED = torch.tensor([[1] * 7, [1] * 5 + [0] * 2]).bool()[:, None, None]


@pytest.mark.usefixtures("_without_mask_functions")
@pytest.mark.parametrize(
    ("module", "is_causal", "mask", "seen"),
    [
        ({"is_causal": True}, None, torch.nn.functional.pad(LOWER & PADDED, (0, 1)), LOWER & PADDED),
        ({"is_causal": True, "is_cross_attention": False}, False, PADDED, LOWER & PADDED),
        ({"is_causal": True, "is_cross_attention": True}, False, PADDED, PADDED),
        ({"is_causal": False}, None, PADDED, PADDED),
    ],
    ids=["longer than the keys", "of padding alone", "across", "of an encoder"],
)
@pytest.mark.parametrize("backend", ["cpu", "auto"])  # ours, transformers'
def test_masks_that_models_make(
    module: Any, is_causal: bool | None, mask: Any, seen: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", backend)
    monkeypatch.setattr(fallback, "tell", lambda *told: None)
    bias = ranges.as_bias(mask, torch.float32)
    found = attended(SimpleNamespace(**module), bias, is_causal=is_causal)
    torch.testing.assert_close(found, wanted(seen), rtol=1e-5, atol=1e-5)


def test_a_mask_longer_than_the_keys_is_ours_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 of 4.53 makes such a one, as every model did before."""
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")
    bias = ranges.as_bias(torch.nn.functional.pad(LOWER & PADDED, (0, 1)), torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that it is transformers' own
        found = attended(SimpleNamespace(is_causal=True), bias, is_causal=False)
    torch.testing.assert_close(found, wanted(LOWER & PADDED), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_without_mask_functions")
def test_packed_sequences_beside_a_mask_of_the_model() -> None:
    cu = torch.tensor([0, 3, 7])
    q, k, v = torch.randn(3, 1, 2, 7, 16, generator=torch.Generator().manual_seed(0))
    mask = ranges.as_bias(LOWER[None, None], torch.float32)
    given = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "scaling": 0.3}
    found, _ = attention.attention(SimpleNamespace(is_causal=True), q, k, v, mask, **given)
    number = (torch.arange(7) >= 3)[:, None]
    seen = LOWER & (number == number.T)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_without_mask_functions")
def test_models_with_attention_of_their_own_before_there_was_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the name of a class follows from that of the implementation."""

    class Old:
        @classmethod
        def _autoset_attn_implementation(cls, config: Any, torch_dtype: Any = None) -> Any:
            config._attn_implementation = config._attn_implementation or "sdpa"
            return config

    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(registration, "PreTrainedModel", Old)
    own = type("OwnModel", (Old,), {"__module__": __name__})
    flags = {"_supports_flash_attn_2": True}
    shared = type("SharedModel", (Old,), {"__module__": modeling_llama.__name__, **flags})
    for _ in range(2):
        cupyflash.transformers.register()
    config = SimpleNamespace(_attn_implementation="cupyflash")
    assert shared._autoset_attn_implementation(config, torch_dtype=None)._attn_implementation == "cupyflash"
    with pytest.warns(UserWarning, match="OwnModel has attention of its own"):
        assert own._autoset_attn_implementation(config)._attn_implementation == "sdpa"
    assert not hasattr(Old._autoset_attn_implementation.__func__._without_cupyflash, "_without_cupyflash")
