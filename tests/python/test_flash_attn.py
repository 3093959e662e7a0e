"""cupyflash.compat.flash_attn against plain attention in float64, by flash-attn's names and rules."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest

import cupyflash
from cupyflash import ArgumentError, UnsupportedError

torch = pytest.importorskip("torch")
from cupyflash.compat import flash_attn, functions, options, raw  # noqa: E402
from cupyflash.compat.flash_attn import bert_padding, flash_attn_interface  # noqa: E402
from cupyflash.compat.flash_attn.layers import rotary  # noqa: E402
from tests.torch_exact import exact, exact_packed  # noqa: E402

interface = flash_attn_interface

TAIL = (
    "dropout_p=0.0,softmax_scale=None,causal=False,window_size=(-1, -1),softcap=0.0,alibi_slopes=None,"
    "deterministic=False,return_attn_probs=False"
)
OLD_TAIL = "dropout_p,softmax_scale,causal,window_size_left,window_size_right,softcap,alibi_slopes"
LENGTHS = "cu_seqlens_q,cu_seqlens_k,max_seqlen_q,max_seqlen_k"
# Names, order and defaults of flash-attn 2.8.
SIGNATURES = {
    "flash_attn_func": f"q,k,v,{TAIL}",
    "flash_attn_qkvpacked_func": f"qkv,{TAIL}",
    "flash_attn_kvpacked_func": f"q,kv,{TAIL}",
    "flash_attn_varlen_func": f"q,k,v,{LENGTHS},{TAIL},block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv,cu_seqlens,max_seqlen,{TAIL}",
    "flash_attn_varlen_kvpacked_func": f"q,kv,{LENGTHS},{TAIL}",
    "flash_attn_with_kvcache": "q,k_cache,v_cache,k=None,v=None,rotary_cos=None,rotary_sin=None,cache_seqlens=None,"
    "cache_batch_idx=None,cache_leftpad=None,block_table=None,softmax_scale=None,causal=False,window_size=(-1, -1),"
    "softcap=0.0,rotary_interleaved=True,alibi_slopes=None,num_splits=0,return_softmax_lse=False",
    "_flash_attn_forward": f"q,k,v,{OLD_TAIL},return_softmax",
    "_flash_attn_varlen_forward": f"q,k,v,{LENGTHS},dropout_p,softmax_scale,causal,window_size_left=-1,"
    "window_size_right=-1,softcap=0.0,alibi_slopes=None,return_softmax=False,block_table=None,leftpad_k=None,"
    "seqused_k=None,zero_tensors=False,num_splits=0",
    "_flash_attn_backward": f"dout,q,k,v,out,softmax_lse,dq,dk,dv,{OLD_TAIL},deterministic,rng_state=None",
    "_flash_attn_varlen_backward": f"dout,q,k,v,out,softmax_lse,dq,dk,dv,{LENGTHS},{OLD_TAIL},deterministic,"
    "rng_state=None,zero_tensors=False",
    "bert_padding.unpad_input": "hidden_states,attention_mask,unused_mask=None",
    "bert_padding.unpad_input_for_concatenated_sequences": "hidden_states,attention_mask_in_length",
    "bert_padding.pad_input": "hidden_states,indices,batch,seqlen",
    "rotary.apply_rotary_emb": "x,cos,sin,interleaved=False,inplace=False,seqlen_offsets=0,cu_seqlens=None,"
    "max_seqlen=None",
    "rotary.apply_rotary_emb_qkv_": "qkv,cos,sin,cos_k=None,sin_k=None,interleaved=False,seqlen_offsets=0,"
    "num_heads_q=None",
    "rotary.apply_rotary_emb_kv_": "kv,cos,sin,interleaved=False,seqlen_offsets=0",
    "rotary.apply_rotary_emb_torch": "x,cos,sin,interleaved=False",
    "rotary.rotate_half": "x,interleaved=False",
    "rotary.RotaryEmbedding": "dim,base=10000.0,interleaved=False,scale_base=None,device=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    module, _, function = name.rpartition(".")
    home = {"": interface, "bert_padding": bert_padding, "rotary": rotary}[module]
    got = inspect.signature(getattr(home, function)).parameters.values()
    assert ",".join(str(p.replace(annotation=p.empty)) for p in got) == SIGNATURES[name]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in got)
    if inspect.isfunction(getattr(home, function)):  # as ring attention looks at them
        assert inspect.getfullargspec(getattr(home, function)).args == [p.name for p in got]
    if not module and not function.startswith("_"):
        assert getattr(flash_attn, function) is getattr(interface, function)


def random(*shape: int, dtype: Any = torch.float64, grad: bool = True) -> Any:
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def assert_same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def assert_same_gradients(got: Any, want: Any, inputs: Any) -> None:
    """Of a random sum of the first result of each, and both results themselves."""
    assert_same(got, want)
    dout = torch.randn_like(want[0])
    for a, b in zip(*(torch.autograd.grad(x[0], inputs, dout) for x in (got, want)), strict=True):
        assert_same(a, b)


# What flash-attn calls the options, and what `exact` calls them.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (2, 1)}, {"window": (2, 1)}),
    "left": ({"window_size": [3, -1]}, {"window": (3, -1)}),
    "right": ({"window_size": (-1, 0)}, {"window": (-1, 0)}),
    "causal-window": ({"causal": True, "window_size": (2, 5)}, {"causal": True, "window": (2, -1)}),
    "softcap": ({"softcap": 1.5, "causal": True}, {"softcap": 1.5, "causal": True}),
    "scale": ({"softmax_scale": -0.3, "deterministic": True}, {"scale": -0.3}),
}
SHAPES = {  # batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim
    "square": (2, 7, 7, 2, 2, 16),
    "grouped-more-keys": (1, 4, 9, 4, 2, 8),
    "more-queries": (2, 9, 5, 2, 1, 8),
    "one-more-query": (1, 5, 4, 1, 1, 8),
    "head-dim-5": (1, 6, 8, 2, 1, 5),
    "head-dim-59": (1, 3, 5, 1, 1, 59),
    "no-keys": (1, 3, 0, 1, 1, 8),
    "no-queries": (1, 0, 3, 2, 1, 5),
    "no-batch": (0, 2, 3, 1, 1, 8),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_dense(option: str, shape: str) -> None:
    batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim = SHAPES[shape]
    given, plain = OPTIONS[option]
    q = random(batch, seqlen_q, heads_q, head_dim)
    k, v = (random(batch, seqlen_k, heads_k, head_dim) for _ in range(2))
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, **given, return_attn_probs=True)
    assert (probabilities.shape, probabilities.dtype) == ((0,), q.dtype)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, **given), out)
    assert_same_gradients((out, lse), exact(q, k, v, **plain), (q, k, v))
    kv = torch.stack((k, v), 2).detach().requires_grad_()
    got = flash_attn.flash_attn_kvpacked_func(q, kv, **given, return_attn_probs=True)[:2]
    assert_same_gradients(got, exact(q, *kv.unbind(2), **plain), (q, kv))


@pytest.mark.parametrize("option", OPTIONS)
def test_qkv_packed(option: str) -> None:
    given, plain = OPTIONS[option]
    qkv = random(2, 6, 3, 2, 10)
    got = flash_attn.flash_attn_qkvpacked_func(qkv, **given, return_attn_probs=True)[:2]
    assert_same_gradients(got, exact(*qkv.unbind(2), **plain), (qkv,))
    cu = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    qkv = random(9, 3, 2, 10)
    got = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 5, **given, return_attn_probs=True)[:2]
    assert_same_gradients(got, exact_packed(*qkv.unbind(1), cu, cu, **plain), (qkv,))


@pytest.mark.parametrize("option", OPTIONS)
def test_varlen(option: str) -> None:
    given, plain = OPTIONS[option]
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 5, 5, 11], [0, 2, 8, 12, 12]))
    q, kv = random(11, 4, 12), random(12, 2, 2, 12)
    k, v = kv.unbind(1)
    want = exact_packed(q, k, v, cu_q, cu_k, **plain)
    out, lse, probabilities = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 6, 6, **given, return_attn_probs=True
    )
    assert (lse.shape, probabilities.shape) == ((4, 11), (0,))
    assert_same_gradients((out, lse), want, (q, kv))
    assert torch.equal(flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 6, 6, **given), out)
    got = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 6, 6, **given, return_attn_probs=True)[:2]
    assert_same_gradients(got, exact_packed(q, k, v, cu_q, cu_k, **plain), (q, kv))


def test_varlen_with_pages() -> None:
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 5], [0, 5, 8]))
    q, pages_k, pages_v = random(5, 2, 8), random(7, 4, 1, 8), random(7, 4, 1, 8)
    table = torch.tensor([[5, 2], [3, -9]], dtype=torch.int32)  # the last entry is not in use
    k, v = (torch.cat((x[5], x[2, :1], x[3, :3])) for x in (pages_k, pages_v))
    want = exact_packed(q, k, v, cu_q, cu_k, causal=True)
    got = flash_attn.flash_attn_varlen_func(
        q, pages_k, pages_v, cu_q, cu_k, 3, 5, causal=True, return_attn_probs=True, block_table=table
    )
    assert_same_gradients(got[:2], want, (q, pages_k, pages_v))
    raw = interface._flash_attn_varlen_forward(
        q, pages_k, pages_v, cu_q, cu_k, 3, 5, 0.0, None, True, block_table=table
    )
    assert_same(raw[:2], tuple(x.detach() for x in want))


@pytest.mark.parametrize("more", [{}, {"causal": True, "softcap": 3.0}, {"window_size": (1, 0), "softmax_scale": -0.3}])
def test_pages_stay_where_nobody_wants_gradients(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 5], [0, 5, 8]))
    q, pages_k, pages_v = random(5, 2, 12), random(7, 4, 1, 12), random(7, 4, 1, 12)
    table = torch.tensor([[5, 2], [3, -9]], dtype=torch.int64)
    arguments = q, pages_k, pages_v, cu_q, cu_k, 3, 5
    want = flash_attn.flash_attn_varlen_func(*arguments, **more, return_attn_probs=True, block_table=table)
    for module in (functions, raw):
        monkeypatch.setattr(module, "unpaged", None)
    with torch.no_grad():
        got = flash_attn.flash_attn_varlen_func(*arguments, **more, return_attn_probs=True, block_table=table)
        alone = flash_attn.flash_attn_varlen_func(*arguments, **more, block_table=table)
    for found, expected in zip((*got, alone), (*want, want[0]), strict=True):
        assert_same((found,), (expected.detach(),))
    left, right = more.get("window_size", (-1, -1))
    rest = 0.0, more.get("softmax_scale", 12**-0.5), more.get("causal", False), left, right, more.get("softcap", 0.0)
    wide = (torch.nn.functional.pad(x, (0, 4)) for x in (q, pages_k, pages_v))
    out, lse, *_ = interface._flash_attn_varlen_forward(*wide, *arguments[3:], *rest, block_table=table)
    assert_same((out[..., :12], lse), tuple(x.detach() for x in want[:2]))


def test_positions_of_arguments() -> None:
    """All of them by position, as much code gives them."""
    q, k, v = (random(1, 5, 2, 8) for _ in range(3))
    tail = 0.0, 0.2, True, (2, 0), 3.0, None, True, True
    want = exact(q, k, v, causal=True, window=(2, 0), softcap=3.0, scale=0.2)
    assert_same(flash_attn.flash_attn_func(q, k, v, *tail)[:2], want)
    cu = torch.tensor([0, 5], dtype=torch.int32)
    packed = flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 5, 5, *tail)
    assert_same(packed[:2], tuple(x[0] for x in want))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_attention(dtype: Any) -> None:
    """Bit for bit, with lse in fp32; tensors whose last stride is not 1 are copied, as there."""
    q, k, v = (random(1, 6, 8, 2, dtype=dtype, grad=False).transpose(2, 3).requires_grad_() for _ in range(3))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    plain = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    want = cupyflash.attention(*plain, causal=True)
    assert torch.equal(out, want)
    for a, b in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(want.sum(), plain), strict=True):
        assert torch.equal(a, b)


# ---- The private functions ----


@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("option", ["plain", "causal", "causal-window", "softcap"])
def test_private_dense(option: str, is_strided: bool) -> None:
    given, plain = OPTIONS[option]
    window = given.get("window_size", (-1, -1))
    q, k, v = random(2, 7, 4, 8), random(2, 5, 2, 8), random(2, 5, 2, 8)
    rest = 0.0, 0.4, given.get("causal", False), *window, given.get("softcap", 0.0), None
    out, lse, probabilities, rng_state = interface._flash_attn_forward(q, k, v, *rest, False)
    assert not out.requires_grad
    assert (probabilities.shape, rng_state.shape, rng_state.dtype) == ((0,), (2,), torch.int64)
    want, want_lse = exact(q, k, v, scale=0.4, **plain)
    assert_same((out, lse), (want.detach(), want_lse.detach()))
    dout = torch.randn_like(out)
    packed = torch.full((3, 2, 7, 4, 8), 9.0, dtype=q.dtype)
    places = [packed[i, :, : x.shape[1], : x.shape[2]] for i, x in enumerate((q, k, v))]
    lse = torch.stack((lse, lse), 2)[:, :, 1] if is_strided else lse
    dq, dk, dv = places if is_strided else [torch.full_like(x, torch.nan, requires_grad=False) for x in (q, k, v)]
    softmax_d = interface._flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, *rest, False, rng_state)
    for a, b in zip((dq, dk, dv), torch.autograd.grad(want, (q, k, v), dout), strict=True):
        assert_same(a, b)
    assert softmax_d.shape == (2, 4, 128)
    assert_same(softmax_d[..., :7], (dout * out).sum(-1).transpose(1, 2))
    assert not softmax_d[..., 7:].any()
    assert interface._flash_attn_backward(dout, q, k, v, out, lse, None, None, None, *rest, True).shape == (2, 4, 128)


@pytest.mark.parametrize("option", ["plain", "causal", "causal-window", "softcap"])
def test_private_varlen(option: str) -> None:
    given, plain = OPTIONS[option]
    window = given.get("window_size", (-1, -1))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 4, 9], [0, 3, 5, 9]))
    q, k, v = random(9, 4, 8), random(9, 2, 8), random(9, 2, 8)
    rest = 0.0, 0.4, given.get("causal", False), *window, given.get("softcap", 0.0), None
    out, lse, *others = interface._flash_attn_varlen_forward(q, k, v, cu_q, cu_k, 5, 4, *rest)
    assert [tuple(x.shape) for x in others] == [(0,), (2,)]
    want, want_lse = exact_packed(q, k, v, cu_q, cu_k, scale=0.4, **plain)
    assert_same((out, lse), (want.detach(), want_lse.detach()))
    dout = torch.randn_like(out)
    grads = [torch.full_like(x, torch.nan, requires_grad=False) for x in (q, k, v)]
    softmax_d = interface._flash_attn_varlen_backward(
        dout, q, k, v, out, lse, *grads, cu_q, cu_k, 5, 4, *rest, False, None, True
    )
    for a, b in zip(grads, torch.autograd.grad(want, (q, k, v), dout), strict=True):
        assert_same(a, b)
    delta = (dout * out).sum(-1).t()
    assert softmax_d.shape == (4, 9 + 3 * 128)
    assert_same(softmax_d[:, :4], delta[:, :4])
    assert_same(softmax_d[:, 4 + 256 : 9 + 256], delta[:, 4:])


def test_what_reaches_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are given our lse, -inf for a query without keys, and the option that results do not show."""
    given: list[tuple[Any, Any]] = []

    def spy(function: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            given.append((args[5], keywords["deterministic"]))
            return function(*args, **keywords)

        return call

    for name in ("attention_backward", "attention_varlen_backward"):
        monkeypatch.setattr(raw, name, spy(getattr(raw, name)))
    q, k = random(1, 5, 2, 8, grad=False), random(1, 3, 2, 8, grad=False)
    rest = 0.0, 0.4, True, -1, -1, 0.0, None
    out, lse, *_ = interface._flash_attn_forward(q, k, k, *rest, False)
    interface._flash_attn_backward(q, q, k, k, out, lse, None, None, None, *rest, True)
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (5, 3))
    lengths = cu_q, cu_k, 5, 3
    out, lse, *_ = interface._flash_attn_varlen_forward(q[0], k[0], k[0], *lengths, *rest)
    nowhere = None, None, None
    interface._flash_attn_varlen_backward(q[0], q[0], k[0], k[0], out, lse, *nowhere, *lengths, *rest, False)
    for got, _ in given:
        assert torch.isneginf(got[..., :2]).all()
        assert torch.isfinite(got[..., 2:]).all()
    assert [deterministic for _, deterministic in given] == [True, False]


def test_private_varlen_with_used_keys() -> None:
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    used = torch.tensor([2, 5], dtype=torch.int32)
    q, k, v = (random(9, 2, 8, grad=False) for _ in range(3))
    got = interface._flash_attn_varlen_forward(q, k, v, cu, cu, 5, 5, 0.0, None, True, seqused_k=used)
    for b, (start, end) in enumerate(itertools.pairwise(cu.tolist())):
        keys = slice(start, start + int(used[b]))
        want = exact(q[None, start:end], k[None, keys], v[None, keys], causal=True)
        assert_same((got[0][None, start:end], got[1][None, :, start:end]), want)


def test_a_ring_of_two() -> None:
    """Forward and backward over halves of the keys, merged by lse, as ring attention does with these functions."""
    q, k, v = (random(1, 6, 2, 8) for _ in range(3))
    rest = 0.0, 8**-0.5, False, -1, -1, 0.0, None
    halves = list(zip(k.chunk(2, 1), v.chunk(2, 1), strict=True))
    outs, lses = zip(*(interface._flash_attn_forward(q, *kv, *rest, False)[:2] for kv in halves), strict=True)
    lse = torch.logaddexp(*lses)
    out = sum(o * (x - lse).exp().transpose(1, 2)[..., None] for o, x in zip(outs, lses, strict=True))
    want = exact(q, k, v)
    assert_same((out, lse), tuple(x.detach() for x in want))
    dout = torch.randn_like(out)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for i, kv in enumerate(halves):
        places = [torch.empty_like(q), dk[:, 3 * i : 3 * i + 3], dv[:, 3 * i : 3 * i + 3]]
        interface._flash_attn_backward(dout, q, *kv, out, lse, *places, *rest, False)
        dq += places[0]
    for a, b in zip((dq, dk, dv), torch.autograd.grad(want[0], (q, k, v), dout), strict=True):
        assert_same(a, b)


# ---- What is not taken ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dropout_p": 1.1}, r"dropout_p: expected a number from 0 on and below 1, got 1.1"),
        ({"window_size": 3}, r"window_size: expected a pair"),
        ({"softcap": 1e9}, r"softcap: expected a number from"),
        ({"q": [1.0]}, r"q: expected a torch.Tensor, got list"),
        ({"v": torch.zeros(1, 4, 2, 16)}, r"v: .*shape of k but for head_dim"),
        ({"k": torch.zeros(1, 5, 2)}, r"k: expected 4 dimensions"),
        ({"k": torch.zeros(1, 5, 2, 7), "v": torch.zeros(1, 5, 2, 7)}, r"k: expected the head_dim of q, 8, got 7"),
        ({"alibi_slopes": [0.1, 0.1]}, r"alibi_slopes: expected a torch.Tensor or None, got list"),
        ({"window_size": ("a", 1)}, r"window_size: expected integers or None, got 'a'"),
        ({"softcap": torch.ones(2)}, r"softcap: expected a number"),
    ],
    ids=["dropout", "window", "softcap", "list", "shape-of-v", "dims", "width-of-k", "slopes", "bound", "caps"],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    arguments = {name: torch.zeros(1, 5, 2, 8) for name in "qkv"} | change
    with pytest.raises((ArgumentError, UnsupportedError), match=message):
        flash_attn.flash_attn_func(**arguments)


def test_packed_tensors_are_checked() -> None:
    with pytest.raises(ArgumentError, match=r"qkv: expected a torch.Tensor of shape \(batch, seqlen, 3, heads"):
        flash_attn.flash_attn_qkvpacked_func(torch.zeros(1, 4, 2, 2, 8))
    cu = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"kv: .*\(total, 2, heads, head_dim\), got \(4, 3, 2, 8\)"):
        flash_attn.flash_attn_varlen_kvpacked_func(torch.zeros(4, 2, 8), torch.zeros(4, 3, 2, 8), cu, cu, 4, 4)
    x = torch.zeros(4, 2, 8)
    with pytest.raises(UnsupportedError, match="leftpad_k: expected None"):
        interface._flash_attn_varlen_forward(x, x, x, cu, cu, 4, 4, 0.0, None, False, leftpad_k=cu[1:])


@pytest.mark.parametrize("dims", [1, 2])
def test_alibi(dims: int) -> None:
    """Computed where `attention` has slopes, refused by name where it has not; never differentiated."""
    q, k, v = random(2, 5, 2, 8), random(2, 6, 2, 8), random(2, 6, 2, 8)
    slopes = torch.rand(2, 2, dtype=torch.float64)[:, 0] if dims == 1 else torch.rand(2, 2, dtype=torch.float64)
    slopes.requires_grad_()
    if not options._HAS_ALIBI:
        with pytest.raises(UnsupportedError, match="alibi_slopes: this version of cupyflash has no ALiBi"):
            flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes)
        return
    got = flash_attn.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, return_attn_probs=True)
    assert_same_gradients(got[:2], exact(q, k, v, causal=True, slopes=slopes.detach()), (q, k, v))
    assert torch.autograd.grad(got[0].sum(), slopes, allow_unused=True) == (None,)
    cu = torch.tensor([0, 4, 5], dtype=torch.int32)
    packed = [x.detach().flatten(0, 1)[:5] for x in (q, k, v)]
    got = flash_attn.flash_attn_varlen_func(*packed, cu, cu, 4, 4, alibi_slopes=slopes, return_attn_probs=True)
    assert_same(got[:2], exact_packed(*packed, cu, cu, slopes=slopes.detach()))


def test_dropout() -> None:
    """As by `attention` with a seed from torch's generator; the private functions hand it over as rng_state."""
    q, k, v = (random(2, 5, 2, 8).requires_grad_() for _ in range(3))
    torch.manual_seed(5)
    out = flash_attn.flash_attn_func(q, k, v, dropout_p=0.4, causal=True)
    torch.manual_seed(5)
    assert out.equal(cupyflash.attention(q, k, v, dropout_p=0.4, causal=True))
    x = [t.detach() for t in (q, k, v)]
    out, lse, _, state = interface._flash_attn_forward(*x, 0.4, 0.3, True, -1, -1, 0.0, None, False)
    assert out.equal(cupyflash.attention(*x, dropout_p=0.4, dropout_seed=state, causal=True, scale=0.3))
    places = [torch.empty_like(t) for t in x]
    interface._flash_attn_backward(out, *x, out, lse, *places, 0.4, 0.3, True, -1, -1, 0.0, None, False, state)
    want = cupyflash.attention(q, k, v, dropout_p=0.4, dropout_seed=state, causal=True, scale=0.3)
    for a, b in zip(places, torch.autograd.grad(want, (q, k, v), out), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(ArgumentError, match="dropout_seed: expected the seed of the forward"):
        interface._flash_attn_backward(out, *x, out, lse, *places, 0.4, 0.3, True, -1, -1, 0.0, None, False)


# ---- Integers ----

QUERIES, PAGES = torch.zeros(10, 4, 16), torch.zeros(6, 8, 2, 16)
TABLE = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
CU_Q, CU_K = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 10], [0, 20, 40]))


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"block_table": TABLE + 0.7},
            "block_table: expected a torch.Tensor of two dimensions of integers",
        ),
        (
            {"block_table": TABLE.tolist()},
            "block_table: expected a torch.Tensor of two dimensions of integers",
        ),
        ({"block_table": TABLE + 10**6}, "block_table: expected numbers of the 6 pages of the pool"),
        (
            {"block_table": TABLE.long() + 2**32},
            "block_table: expected numbers of the 6 pages of the pool",
        ),
        ({"cu_seqlens_k": None}, "cu_seqlens_k: expected a torch.Tensor of one dimension of integers, got NoneType"),
        (
            {"cu_seqlens_k": CU_K * 1.5},
            "cu_seqlens_k: expected a torch.Tensor of one dimension of integers",
        ),
        ({"k": PAGES[:0], "v": PAGES[:0]}, "block_table: expected numbers of the 0 pages"),
        ({"k": PAGES[..., :15]}, "k: expected the head_dim of q, 16, got 15"),
    ],
)
def test_places_in_pages_are_whole_numbers_of_the_pool(change: dict[str, Any], message: str, dropout_p: float) -> None:
    given = {"q": QUERIES, "k": PAGES, "v": PAGES, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "block_table": TABLE}
    with pytest.raises(ArgumentError, match=message):
        flash_attn.flash_attn_varlen_func(**given | change, max_seqlen_q=7, max_seqlen_k=20, dropout_p=dropout_p)


def test_a_table_behind_the_last_page_in_use_may_hold_anything() -> None:
    table = torch.tensor([[0, 1, -7], [3, 4, 10**6]], dtype=torch.int64)
    lengths = CU_Q, torch.tensor([0, 16, 32], dtype=torch.int32), 7, 16
    out = flash_attn.flash_attn_varlen_func(QUERIES, PAGES, PAGES, *lengths, dropout_p=0.5, block_table=table)
    assert out.shape == QUERIES.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache_seqlens": torch.tensor([3.9, 20.0])}, "cache_seqlens: expected a torch.Tensor of one dimension"),
        ({"cache_seqlens": torch.tensor([2**32 + 3, 20])}, "cache_seqlens: expected lengths of 0 to 32, got"),
        ({"cache_leftpad": torch.tensor([1.5, 2.0])}, "cache_leftpad: expected a torch.Tensor of one dimension"),
        ({"cache_leftpad": torch.tensor([1])}, r"cache_leftpad: expected integers of shape \(2,\), got \(1,\)"),
        ({"block_table": torch.tensor([0])}, "block_table: expected a torch.Tensor of two dimensions of integers"),
        ({"cache_batch_idx": torch.tensor([0.0, 1.0])}, "cache_batch_idx: expected a torch.Tensor of one dimension"),
        ({"cache_seqlens": torch.zeros(3, dtype=torch.int32)}, r"cache_seqlens: .* of shape \(2,\), got shape \(3,\)"),
        (
            {"k": torch.zeros(3, 5, 2, 16), "v": torch.zeros(3, 5, 2, 16)},
            r"k: expected shape \(2, seqlen_new, 2, head_dim",
        ),
        ({"cache_leftpad": torch.tensor([0, 33])}, r"cache_leftpad: expected 0 to 32, .* got \[0, 33\]"),
        ({"softmax_scale": "1"}, "^softmax_scale: expected a number or None, got '1'"),
        ({"num_splits": float("nan")}, "num_splits: expected an integer, got nan"),
        ({"k_cache": torch.zeros(16)}, r"k_cache: expected 4 dimensions, got shape \(16,\)"),
        ({"k_cache": torch.zeros(2, 32, 2, 15)}, "k_cache: expected the head_dim of q, 16, got 15"),
        ({"k": torch.zeros(2, 5, 2, 15), "v": torch.zeros(2, 5, 2, 16)}, "k: expected the head_dim of q, 16, got 15"),
        (
            {"k": torch.zeros(2, 5, 2, 16), "v": torch.zeros(2, 5, 2, 15)},
            "v: expected the head_dim of v_cache, 16",
        ),
        ({"rotary_cos": [1.0]}, "rotary_cos: expected a torch.Tensor, got list"),
        ({"rotary_interleaved": "no"}, "rotary_interleaved: expected True or False, got 'no'"),
    ],
)
def test_what_a_cache_does_not_take(change: dict[str, Any], message: str) -> None:
    caches = {name: torch.zeros(2, 32, 2, 16) for name in ("k_cache", "v_cache")}
    given = {"q": torch.zeros(2, 5, 4, 16), "cache_seqlens": 3, **caches}
    with pytest.raises(ArgumentError, match=message):
        flash_attn.flash_attn_with_kvcache(**given | change)
