"""What code written for flash-attn uses around attention: padding, rotary embeddings, the KV cache."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from cupyflash import ArgumentError, UnsupportedError

torch = pytest.importorskip("torch")
from cupyflash.compat import einops_names, options  # noqa: E402
from cupyflash.compat.flash_attn import bert_padding, flash_attn_with_kvcache  # noqa: E402
from cupyflash.compat.flash_attn.layers import rotary  # noqa: E402
from tests.torch_exact import exact  # noqa: E402


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def random(*shape: int, grad: bool = False) -> Any:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def int32(*numbers: int) -> Any:
    return torch.tensor(numbers, dtype=torch.int32)


def assert_same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


# ---- bert_padding ----


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_unpad_and_pad(dtype: Any) -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]], dtype=dtype)
    x = random(3, 4, 2, 5, grad=True)
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask)
    assert torch.equal(rows, x[mask.bool()])
    assert (indices.tolist(), indices.dtype) == ([0, 1, 9, 10, 11], torch.int64)
    assert torch.equal(cu_seqlens, int32(0, 2, 2, 5))
    assert (type(longest), longest) == (int, 3)
    assert torch.equal(used, int32(2, 0, 3))
    padded = bert_padding.pad_input(rows, indices, 3, 4)
    assert torch.equal(padded, x * mask[..., None, None])
    dout = torch.randn_like(padded)
    assert torch.equal(torch.autograd.grad(padded, x, dout)[0], dout * mask[..., None, None])


def test_unpad_with_unused_tokens() -> None:
    mask, unused = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 0]]), torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0]])
    x = random(2, 4, 3)
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert torch.equal(rows, x[(mask + unused).bool()])
    assert (indices.tolist(), cu_seqlens.tolist(), longest, used.tolist()) == ([0, 1, 2, 4, 5], [0, 3, 5], 3, [2, 1])
    assert bert_padding.unpad_input(x, torch.zeros_like(mask))[3] == 0


@pytest.mark.parametrize("name", ["attention_mask", "unused_mask"])
def test_masks_of_another_shape_are_refused(name: str) -> None:
    """They would take rows of another sequence."""
    x, good, short = torch.randn(2, 5, 3), torch.ones(2, 5, dtype=torch.int32), torch.ones(2, 4, dtype=torch.int32)
    given = {"attention_mask": good} | {name: short}
    with pytest.raises(ArgumentError, match=rf"^{name}: expected shape \(2, 5\)"):
        bert_padding.unpad_input(x, **given)
    with pytest.raises(ArgumentError, match=r"^attention_mask_in_length: expected shape"):
        bert_padding.unpad_input_for_concatenated_sequences(x, short)


@pytest.mark.parametrize("x", [None, torch.ones(1, 4, 2, 8, dtype=torch.int32)])
def test_rotary_takes_floating_point(x: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^x: expected a torch\.Tensor of floating point"):
        rotary.apply_rotary_emb(x, torch.ones(4, 4), torch.zeros(4, 4))


def test_unpad_concatenated_sequences() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = random(3, 6, 2)
    rows, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(rows, torch.cat((x[0, :5], x[1, :5], x[2])))
    assert indices.tolist() == [*range(5), *range(6, 11), *range(12, 18)]
    assert torch.equal(cu_seqlens, int32(0, 2, 5, 8, 10, 16))
    assert longest == 6


def test_first_axis() -> None:
    x, indices = random(6, 2, grad=True), torch.tensor([4, 0, 5])
    picked, whole = bert_padding.index_first_axis_residual(x, indices)
    assert torch.equal(picked, bert_padding.index_first_axis(x, indices))
    assert torch.equal(picked, x[[4, 0, 5]])
    (grad,) = torch.autograd.grad((picked.sum(), whole.sum()), x)
    assert grad[:, 0].tolist() == [2, 1, 1, 1, 2, 2]
    put = bert_padding.index_put_first_axis(picked, indices, 7)
    assert torch.equal(put[[4, 0, 5]], picked)
    assert not put[[1, 2, 3, 6]].any()


def test_functions_of_einops_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl imports rearrange from here; where einops is not installed, only a call is an error."""
    for module in (bert_padding, rotary):
        assert (module.rearrange, module.repeat) == (einops_names.rearrange, einops_names.repeat)
    monkeypatch.setitem(sys.modules, "einops", types.SimpleNamespace(rearrange=torch.reshape))
    assert einops_names._named("rearrange") is torch.reshape
    monkeypatch.setitem(sys.modules, "einops", None)  # importing it is an ImportError
    found = einops_names._named("rearrange")
    with pytest.raises(UnsupportedError, match="rearrange: it is einops', which is not installed; pip install einops"):
        found(torch.ones(2, 3), "a b -> (a b)")


# ---- rotary ----


def tables(positions: int, columns: int) -> tuple[Any, Any]:
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), 100.0 ** -torch.linspace(0, 1, columns // 2))
    return angles.cos(), angles.sin()


def turned(x: Any, cos: Any, sin: Any, positions: Any, interleaved: bool) -> Any:
    """The same by complex numbers, head by head; x is (rows, heads, head_dim)."""
    n = cos.shape[1]
    first, second = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if interleaved else (slice(0, n), slice(n, 2 * n))
    z = torch.complex(x[..., first], x[..., second]) * torch.complex(cos, sin)[positions][:, None]
    y = x.clone()
    y[..., first], y[..., second] = z.real, z.imag
    return y


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, "tensor"])
def test_rotary(offsets: Any, interleaved: bool) -> None:
    cos, sin = tables(9, 6)
    x, given = random(2, 5, 3, 10, grad=True), int32(1, 4) if offsets == "tensor" else offsets
    starts = given.tolist() if offsets == "tensor" else [given, given]
    want = torch.stack([turned(x[b], cos, sin, torch.arange(5) + starts[b], interleaved) for b in range(2)])
    got = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=given)
    assert_same(got, want)
    dout = torch.randn_like(got)
    back = torch.stack([turned(dout[b], cos, -sin, torch.arange(5) + starts[b], interleaved) for b in range(2)])
    assert_same(torch.autograd.grad(got, x, dout)[0], back)
    in_place = x * 1  # not a leaf, like the output of a projection
    assert rotary.apply_rotary_emb(in_place, cos, sin, interleaved, True, given) is in_place
    assert_same(in_place, want)
    assert_same(torch.autograd.grad(in_place, x, dout)[0], back)


@pytest.mark.parametrize("offsets", [0, 2, "tensor"])
def test_rotary_of_packed_sequences(offsets: Any) -> None:
    cos, sin = tables(8, 8)
    x, cu = random(7, 2, 8, grad=True), int32(0, 3, 3, 7)
    given = int32(1, 9, 4) if offsets == "tensor" else offsets
    starts = given.tolist() if offsets == "tensor" else [given] * 3
    positions = torch.tensor([i + starts[0] for i in range(3)] + [i + starts[2] for i in range(4)])
    got = rotary.apply_rotary_emb(x, cos, sin, True, seqlen_offsets=given, cu_seqlens=cu, max_seqlen=4)
    assert_same(got, turned(x, cos, sin, positions, True))


def test_rotary_beyond_the_tables() -> None:
    """Of tensors of offsets nobody knows in time: such rows are not rotated, as in flash-attn. Integers are checked."""
    cos, sin = tables(4, 8)
    x = random(1, 3, 1, 8)
    got = rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=int32(2))
    assert_same(got[0, :2], turned(x[0, :2], cos, sin, torch.tensor([2, 3]), False))
    assert torch.equal(got[0, 2], x[0, 2])
    with pytest.raises(ArgumentError, match="seqlen_offsets: expected rows 2 to 5 to be among the 4 of cos"):
        rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=2)
    for wrong in (int32(0, 1, 2), torch.zeros(len(x)), 1.0, None):
        with pytest.raises(ArgumentError, match="seqlen_offsets: expected an integer"):
            rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=wrong)


def test_rotary_keeps_the_dtype_and_no_gradient_of_tables() -> None:
    cos, sin = (t.float().requires_grad_() for t in tables(5, 8))
    x = torch.randn(1, 5, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    got = rotary.apply_rotary_emb(x, cos, sin)
    wide = rotary.apply_rotary_emb(x.float(), cos, sin)
    assert torch.equal(got, wide.bfloat16())  # one rounding
    assert torch.autograd.grad(got.sum(), (x, cos), allow_unused=True)[1] is None
    with pytest.raises(ArgumentError, match="cos, sin: expected the same shape"):
        rotary.apply_rotary_emb(x, cos[:, :2], sin)
    with pytest.raises(ArgumentError, match=r"x: expected shape \(total, heads, head_dim\)"):
        rotary.apply_rotary_emb(x, cos, sin, cu_seqlens=int32(0, 5))


@pytest.mark.parametrize("scale_base", [None, 512])
@pytest.mark.parametrize("kind", ["qkv", "grouped", "q-kv"])
def test_rotary_embedding(kind: str, scale_base: int | None) -> None:
    """Tables grow; q and k turn, v stays; XPos scales k by the inverse of q's scales."""
    module = rotary.RotaryEmbedding(6, base=100.0, interleaved=True, scale_base=scale_base)
    assert not module.state_dict()
    for seqlen, offset in ((3, 0), (4, 2)):
        positions = seqlen + offset
        angles = torch.outer(torch.arange(float(positions)), 100.0 ** (-torch.arange(0, 6, 2) / 6))
        scale = torch.ones(3) if scale_base is None else (torch.arange(0, 6, 2) + 0.4 * 6) / (1.4 * 6)
        powers = scale ** ((torch.arange(positions)[:, None] - positions // 2) / (scale_base or 1))
        q, k, v = (torch.randn(2, seqlen, heads, 8) for heads in (4, 2 if kind == "grouped" else 4, 2))
        v = v if kind == "grouped" else torch.randn_like(q)
        want_q, want_k = (
            rotary.apply_rotary_emb(x, angles.cos() * s, angles.sin() * s, True, seqlen_offsets=offset)
            for x, s in ((q, powers), (k, 1 / powers))
        )
        if kind == "q-kv":
            given = q.clone(), torch.stack((k, v), 2)
            got_q, got_kv = module(*given, seqlen_offset=offset)
            assert got_q is given[0]
            got = got_q, *got_kv.unbind(2)
        elif kind == "qkv":
            got = module(torch.stack((q, k, v), 2), seqlen_offset=offset).unbind(2)
        else:
            offsets = torch.full((2,), offset)
            got = module(torch.cat((q, k, v), 2), None, offsets, positions, 4).split((4, 2, 2), dim=2)
        for a, b in zip(got, (want_q, want_k, v), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_frequencies_that_are_changed() -> None:
    """As scaled positions have them, by the buffer or by a subclass; digits that a cast takes come back."""
    x, angles = torch.randn(1, 4, 2, 8), torch.outer(torch.arange(4.0), 100.0 ** (-torch.arange(0, 8, 2) / 8))

    class Halved(rotary.RotaryEmbedding):
        def _compute_inv_freq(self, device: Any = None) -> Any:
            return super()._compute_inv_freq(device) / 2

    plain, halved = rotary.RotaryEmbedding(8, base=100.0), Halved(8, base=100.0)
    plain.inv_freq = plain.inv_freq / 2
    want = rotary.apply_rotary_emb(x, (angles / 2).cos(), (angles / 2).sin())
    for module in (plain, halved, halved.bfloat16()):
        qkv = module(torch.stack((x, x, x), 2))
        torch.testing.assert_close(qkv[:, :, 0], want)
    assert (plain._cos_k_cached, plain._seq_len_cached) == (None, 4)
    plain._update_cos_sin_cache(9, x.device, torch.float32)  # as flash-attn's own modules ask
    torch.testing.assert_close(plain._cos_cached[:4], (angles / 2).cos())
    torch.testing.assert_close(plain._sin_cached[:4], (angles / 2).sin())
    assert len(plain._cos_cached) == 9


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_by_torch(interleaved: bool) -> None:
    x, (cos, sin) = random(2, 5, 3, 8, grad=True), random(2, 5, 3).unbind(0)
    got = rotary.apply_rotary_emb_torch(x, cos, sin, interleaved)
    assert_same(got, rotary.apply_rotary_emb(x, cos, sin, interleaved))
    assert_same(rotary.apply_rotary_emb_torch(x, cos.expand(2, 5, 3), sin.expand(2, 5, 3), interleaved), got)
    whole = torch.zeros(5, 4, dtype=x.dtype), torch.ones(5, 4, dtype=x.dtype)  # a quarter turn
    assert_same(rotary.rotate_half(x, interleaved), rotary.apply_rotary_emb(x, *whole, interleaved))
    assert rotary.apply_rotary_emb_torch(x.bfloat16(), cos.bfloat16(), sin.bfloat16()).dtype is torch.bfloat16
    cos.requires_grad_()
    assert torch.autograd.grad(rotary.apply_rotary_emb_torch(x, cos, sin).sum(), cos)[0].shape == cos.shape
    with pytest.raises(ArgumentError, match="cos: expected rotary_dim / 2 of at most 4, got 5"):
        rotary.apply_rotary_emb_torch(x, random(5, 5), random(5, 5))


def test_packed_rotary_is_checked() -> None:
    cos, sin = tables(4, 8)
    with pytest.raises(ArgumentError, match="qkv: expected shape"):
        rotary.apply_rotary_emb_qkv_(random(1, 4, 6, 8), cos, sin)
    with pytest.raises(ArgumentError, match="kv: expected shape"):
        rotary.apply_rotary_emb_kv_(random(1, 4, 3, 2, 8), cos, sin)


# ---- The KV cache ----


def wanted(
    q: Any, k_cache: Any, v_cache: Any, lengths: list[int], pads: list[int] | None = None, **plain: Any
) -> tuple[Any, Any]:
    """Sequence by sequence over the rows of the cache that count."""
    parts = []
    for b, length in enumerate(lengths):
        rows = slice(pads[b] if pads else 0, length)
        parts.append(exact(q[b : b + 1], k_cache[b : b + 1, rows], v_cache[b : b + 1, rows], **plain))
    return torch.cat([x[0] for x in parts]), torch.cat([x[1] for x in parts])


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 8), (5, 5), (16, 5)])
@pytest.mark.parametrize("lengths", [4, [4, 7], None], ids=str)
@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({}, {}),
        ({"causal": True, "softcap": 2.0}, {"causal": True, "softcap": 2.0}),
        ({"window_size": (2, 0), "softmax_scale": 0.7}, {"window": (2, 0), "scale": 0.7}),
    ],
    ids=["plain", "causal", "window"],
)
def test_cache_is_read(given: Any, plain: Any, lengths: Any, head_dim: int, head_dim_v: int) -> None:
    q, k_cache, v_cache = random(2, 3, 4, head_dim), random(2, 9, 2, head_dim), random(2, 9, 2, head_dim_v)
    used = int32(*lengths) if isinstance(lengths, list) else lengths
    each = lengths if isinstance(lengths, list) else [9 if lengths is None else lengths] * 2
    before = k_cache.clone()
    got = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=used, **given, return_softmax_lse=True)
    assert_same(got, wanted(q, k_cache, v_cache, each, **plain))
    assert torch.equal(flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=used, **given), got[0])
    assert torch.equal(k_cache, before)


@pytest.mark.parametrize("kind", ["plain", "integer", "rows-apart", "chosen", "pages", "left-padded"])
@pytest.mark.parametrize("turn", [None, "causal", "window", "no-mask"])
def test_cache_is_extended(turn: str | None, kind: str) -> None:
    """New rows, rotated or not, go behind those in use, and attention sees them; nothing else is written."""
    lengths, capacity, head_dim = [5, 5] if kind == "integer" else [3, 6], 9, 16
    q, k, v = (random(2, 2, heads, head_dim) for heads in (4, 2, 2))
    caches = [random(4, capacity, 2, head_dim) for _ in range(2)]  # of four sequences, of which two are used
    cos, sin = tables(12, 16)
    mask = {"causal": {"causal": True}, "window": {"window_size": (4, 0)}, "no-mask": {}, None: {"causal": True}}[turn]
    plain = {"window" if name == "window_size" else name: x for name, x in mask.items()}
    chosen = [3, 1] if kind == "chosen" else [0, 1]

    want_caches = [x.clone()[chosen] for x in caches]
    new_k, new_q = k, q
    if turn:
        new_k = torch.stack([turned(k[b], cos, sin, torch.arange(2) + n, True) for b, n in enumerate(lengths)])
        steps = torch.zeros(2, dtype=torch.int64) if turn == "no-mask" else torch.arange(2)
        new_q = torch.stack([turned(q[b], cos, sin, steps + n, True) for b, n in enumerate(lengths)])
    for b, n in enumerate(lengths):
        want_caches[0][b, n : n + 2], want_caches[1][b, n : n + 2] = new_k[b], v[b]
    pads = [2, 1] if kind == "left-padded" else None
    want = wanted(new_q, *want_caches, [n + 2 for n in lengths], pads, **plain)

    arguments: dict[str, Any] = {"cache_seqlens": 5 if kind == "integer" else int32(*lengths), **mask}
    if turn:
        arguments |= {"rotary_cos": cos, "rotary_sin": sin}
    if kind == "chosen":
        arguments["cache_batch_idx"] = int32(*chosen)
    elif kind == "pages":  # of 3 rows each, anywhere
        table = torch.tensor([[7, 0, 4], [2, 5, 1]], dtype=torch.int32)
        stores = [random(8, 3, 2, head_dim) for _ in caches]
        for store, cache in zip(stores, caches, strict=True):
            store[table.long()] = cache[:2].unflatten(1, (3, 3))
        caches, arguments["block_table"] = stores, table
    else:
        caches = [x[:2] for x in caches]
        if kind == "left-padded":
            arguments["cache_leftpad"] = int32(*pads or ())
        elif kind == "rows-apart":
            caches = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in caches]
    got = flash_attn_with_kvcache(q, *caches, k, v, **arguments, return_softmax_lse=True)
    assert_same(got, want)
    for cache, want_cache in zip(caches, want_caches, strict=True):
        shown = cache[arguments["block_table"].long()].flatten(1, 2) if kind == "pages" else cache
        assert_same(shown[chosen] if kind == "chosen" else shown, want_cache)


@pytest.mark.parametrize("used", [4, torch.tensor(4, dtype=torch.int32), int32(4, 4)], ids=["integer", "0-d", "each"])
@pytest.mark.parametrize("queries", [2, 3])
def test_new_rows_beyond_the_tables_are_not_turned(queries: int, used: Any) -> None:
    """However the lengths are given, and whoever turns them: the kernels or torch."""
    q, k, (cos, sin) = random(2, queries, 2, 8), random(2, 2, 2, 8), tables(5, 8)
    cache = random(2, 9, 2, 8)
    flash_attn_with_kvcache(q, cache, cache.clone(), k, k, cos, sin, used, causal=True)
    assert_same(cache[0, 4:5], turned(k[0, :1], cos, sin, torch.tensor([4]), True))
    assert torch.equal(cache[:, 5], k[:, 1])


def test_a_left_padded_sequence_without_keys() -> None:
    q, cache = random(2, 1, 2, 8), random(2, 6, 1, 8)
    used, pads = int32(4, 3), int32(4, 1)
    out, lse = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=used, cache_leftpad=pads, return_softmax_lse=True)
    assert_same((out, lse), wanted(q, cache, cache, [4, 3], [4, 1]))
    assert torch.isposinf(lse[0]).all()


@pytest.mark.parametrize("pads", [None, [1, 2]], ids=["plain", "left-padded"])
def test_cache_with_alibi(pads: list[int] | None) -> None:
    q, cache, slopes = random(2, 2, 2, 8), random(2, 6, 1, 8), torch.rand(2, 2, dtype=torch.float64)
    given = {"cache_seqlens": int32(4, 6), "cache_leftpad": int32(*pads) if pads else None, "alibi_slopes": slopes}
    if not options._HAS_ALIBI:
        with pytest.raises(UnsupportedError, match="alibi_slopes: this version of cupyflash has no ALiBi"):
            flash_attn_with_kvcache(q, cache, cache, **given)
        return
    got = flash_attn_with_kvcache(q, cache, cache, **given, causal=True, return_softmax_lse=True)
    for b, length in enumerate((4, 6)):
        keys = cache[b : b + 1, pads[b] if pads else 0 : length]
        want = exact(q[b : b + 1], keys, keys, causal=True, slopes=slopes[b])
        assert_same(tuple(x[b : b + 1] for x in got), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": None}, "k: expected a tensor, since v is one"),
        ({"cache_seqlens": None}, "cache_seqlens: expected lengths, since k is given"),
        ({"cache_seqlens": 8}, r"cache_seqlens: expected lengths of 0 to 7, a capacity of 9 less 2 new keys, got 8"),
        ({"cache_seqlens": int32(3, -1)}, r"cache_seqlens: .* = -1"),
        ({"rotary_cos": torch.ones(9, 4)}, "rotary_cos, rotary_sin: expected both"),
        ({"k": None, "v": None, "rotary_cos": torch.ones(9, 4), "rotary_sin": torch.ones(9, 4)}, "no new k"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32), "cache_leftpad": int32(0, 0)}, "block_table: expected"),
        ({"cache_leftpad": [0, 1]}, r"cache_leftpad: expected a torch.Tensor of one dimension of integers, got list"),
        ({"cache_leftpad": int32(0)}, r"cache_leftpad: expected integers of shape \(2,\), got \(1,\)"),
    ],
    ids=["k", "no-lengths", "too-long", "negative", "no-sin", "no-k", "pages", "listed", "short"],
)
def test_contradictions_are_errors(change: dict[str, Any], message: str) -> None:
    caches = random(2, 9, 1, 8), random(2, 9, 1, 8)
    before = [x.clone() for x in caches]
    new = {"k": random(2, 2, 1, 8), "v": random(2, 2, 1, 8), "cache_seqlens": 3}
    with pytest.raises(ArgumentError, match=message):
        flash_attn_with_kvcache(random(2, 2, 2, 8), *caches, **(new | change))
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        ((None, random(2, 9, 1, 8)), "k_cache: expected a torch.Tensor, got NoneType"),
        ((random(2, 9, 1, 8), random(2, 9, 1, 8).numpy()), "v_cache: expected a torch.Tensor, got ndarray"),
        ((random(2, 9, 1, 8).to(torch.int8),) * 2, "k_cache: expected the dtype of q, torch.float64, got torch.int8"),
    ],
)
def test_caches_that_are_none_of_flash_attns(caches: tuple[Any, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        flash_attn_with_kvcache(random(2, 2, 2, 8), *caches, num_splits=None)  # type: ignore[arg-type]
