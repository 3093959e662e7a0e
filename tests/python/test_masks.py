"""Block masks: the generators against their definitions, combinations, torch's BlockMask, and what is refused."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, BlockMask, masks
from cupyflash.check.accuracy import Oracle
from cupyflash.check.case import NUMPY_DTYPE
from cupyflash.check.features import Features
from cupyflash.mask_tiles import no_bits
from cupyflash.problem import make_problem
from tests.pretended_gpu import pretend

Array = np.ndarray
N = 331  # a multiple of nothing


def dense(mask: BlockMask) -> Array:
    """(batch or 1, heads or 1, seqlen_q, seqlen_k)."""
    return mask.sees(slice(0, mask.seqlen_q), slice(0, mask.seqlen_k))


def pairs(seqlen_q: int = N, seqlen_k: int = N) -> tuple[Array, Array]:
    """Positions of queries, aligned at the bottom right, and keys."""
    return np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, np.arange(seqlen_k)


def test_local_is_the_window() -> None:
    i, j = pairs(203, N)
    assert (dense(masks.local(203, N, left=70, right=9)) == ((j >= i - 70) & (j <= i + 9))).all()


def test_global_tokens_see_all_and_are_seen_by_all() -> None:
    i, j = pairs()
    for tokens in (3, [5, 200]):
        positions = range(3) if tokens == 3 else tokens
        wanted = abs(i - j) <= 40
        for t in positions:  # type: ignore[attr-defined]
            wanted = wanted | (i == t) | (j == t)
        assert (dense(masks.global_local(N, window=40, global_tokens=tokens)) == wanted).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("block", [32, 64, 128])
def test_bigbird_has_its_blocks_in_each_row(block: int) -> None:
    mask = masks.bigbird(20 * block, block=block, window_blocks=3, global_blocks=2, random_blocks=3, heads=2, seed=5)
    seen = dense(mask)[0].reshape(2, 20, block, 20, block)
    blocks = seen.all(axis=(2, 4))
    assert (blocks == seen.any(axis=(2, 4))).all()
    assert blocks[:, :2].all()
    assert blocks[:, :, :2].all()
    for row in range(2, 20):
        window = {0, 1, row - 1, row, min(row + 1, 19)}
        assert blocks[:, row, sorted(window)].all()
        assert (blocks[:, row].sum(axis=1) == len(window) + 3).all()
    assert (blocks[0] != blocks[1]).any()


def test_strided_is_that_of_the_sparse_transformer() -> None:
    i, j = pairs()
    assert (dense(masks.strided(N, stride=50)) == ((j <= i) & ((i - j < 50) | ((i - j) % 50 == 0)))).all()


def test_butterfly_differs_in_one_bit() -> None:
    seen = dense(masks.butterfly(1024, block=128))[0, 0].reshape(8, 128, 8, 128).any(axis=(1, 3))
    wanted = [[bin(a ^ b).count("1") <= 1 for b in range(8)] for a in range(8)]
    assert (seen == wanted).all()


def test_documents_and_prefixes_of_each_sequence() -> None:
    i, j = pairs()
    ids = np.stack([np.arange(N) // 50, np.arange(N) // 121])
    wanted = (ids[:, :, None] == ids[:, None, :]) & (j <= i)
    assert (dense(masks.causal_document(ids))[:, 0] == wanted).all()
    found = dense(masks.prefix(N, length=[10, 200]))[:, 0]
    assert (found == np.stack([(j < n) | (j <= i) for n in (10, 200)])).all()


def test_blocks_of_any_size() -> None:
    blocks = np.random.default_rng(3).random((2, 7, 4)) < 0.5
    found = dense(masks.from_blocks(blocks, (50, 90), N, N))[0]
    assert (found == np.repeat(np.repeat(blocks, 50, 1), 90, 2)[:, :N, :N]).all()


def test_masks_combine() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.random((2, 1, N, N)) < 0.3, rng.random((1, 3, N, N)) < 0.3
    a[:, :, 64:128], b[..., 64:128] = True, False
    one, other = masks.from_dense(a), masks.from_dense(b)
    assert (dense(one & other) == (a & b)).all()
    assert (dense(one | other) == (a | b)).all()
    with pytest.raises(cupyflash.ArgumentError, match="same lengths"):
        one & masks.local(N, 64, left=3)


def test_patterns_are_kept_once() -> None:
    """A window has the same tiles along its diagonals."""
    assert len(masks.local(4096, left=100, right=100).bits) < 8


def attend(mask: Any, **options: Any) -> None:
    """attention with a mask against the reference with its booleans."""
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 2, N, 2, 64)).astype(NUMPY_DTYPE["fp32"])
    out, lse = cupyflash.attention(q, k, v, block_mask=mask, return_lse=True, **options)
    grads = cupyflash.attention_backward(dout, q, k, v, out, lse, block_mask=mask, **options)
    oracle = Oracle(
        make_problem((q.shape,) * 3, ("fp32",) * 3, **options), q, k, v, dout, features=Features(block_mask=mask)
    )
    results = oracle.judge_forward(out, lse) + oracle.judge_backward(*grads)
    assert all(r.passed for r in results), "\n".join(map(str, results))


def test_attention_sees_what_the_mask_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")
    attend(masks.bigbird(N, heads=2) & masks.causal_document(np.arange(N) // 140))
    attend(masks.global_local(N, window=30, global_tokens=2), causal=True)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (masks.local(N - 1, left=3), "of 331 queries and 331 keys"),
        (np.ones((N, N), bool), "masks.from_dense takes booleans"),
        (masks.from_dense(np.ones((1, 3, N, N), bool)), "heads_q of 1 or 2"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask: Any, words: str) -> None:
    q = np.zeros((2, N, 2, 64), np.float32)
    with pytest.raises(cupyflash.ArgumentError, match=words):
        cupyflash.attention(q, q, q, block_mask=mask)


def test_a_window_may_have_no_bound() -> None:
    i, j = pairs()
    assert (dense(masks.local(N, left=None)) == (j <= i)).all()
    assert dense(masks.local(N, left=None, right=None)).all()


def test_masks_without_keys() -> None:
    for tokens in (0, 2, []):
        assert masks.global_local(5, 0, window=5, global_tokens=tokens).seqlen_k == 0  # type: ignore[arg-type]


def test_a_number_of_global_tokens_may_be_one_of_numpy() -> None:
    found = masks.global_local(N, window=4, global_tokens=np.int64(3))  # type: ignore[arg-type]
    assert (dense(found) == dense(masks.global_local(N, window=4, global_tokens=3))).all()


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: masks.strided(N, stride=0), "stride: expected an integer from 1 on, got 0"),
    (lambda: masks.strided(N, stride=5, window=-1), "window: expected an integer from 0 on, got -1"),
    (lambda: masks.bigbird(N, block=0), "block: expected an integer from 1 on, got 0"),
    (lambda: masks.bigbird(N, window_blocks=2), "window_blocks: expected an odd number"),
    (lambda: masks.bigbird(N, random_blocks=-1), "random_blocks: expected an integer from 0 on, got -1"),
    (lambda: masks.bigbird(N, heads=0), "heads: expected an integer from 1 on, got 0"),
    (lambda: masks.butterfly(N, block=0), "block: expected an integer from 1 on, got 0"),
    (lambda: masks.local(100, left=-1), r"left: expected left \+ right >= 0, got \(-1, 0\), which hides every key"),
    (lambda: masks.causal_document([[0], [0, 1]]), "document_ids: expected as many elements of each sequence"),
    (lambda: masks.global_local(100, window=3, global_tokens=[500]), "global_tokens: expected how many, or positions"),
    (lambda: masks.global_local(100, window=3, global_tokens=[-1]), r"positions from 0 to 99, got \[-1\]"),
    (lambda: masks.global_local(100, window=3, global_tokens=-1), "global_tokens: expected an integer from 0 on"),
    (lambda: masks.global_local(100, window=-3, global_tokens=1), "window: expected an integer from 0 on, got -3"),
    (lambda: masks.local(N, left="3"), "left: expected an integer, got"),  # type: ignore[arg-type]
    (lambda: masks.local(2.5, left=3), "seqlen_q: expected an integer, got"),  # type: ignore[arg-type]
    (lambda: masks.prefix(N, length=-1), "length: expected a number of keys from 0 on, or one a sequence, got -1"),
    (lambda: masks.prefix(N, length=[3, 1.5]), "length: expected a number"),  # type: ignore[list-item]
    (lambda: masks.from_blocks(np.ones((2, 2), bool), 0, 100), "block_size: expected an integer from 1 on, got 0"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_pattern_that_is_none_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(cupyflash.ArgumentError, match=words):
        make()


def test_masks_that_do_not_combine_are_refused() -> None:
    two, three = (masks.from_dense(np.ones((n, 1, 5, 5), bool)) for n in (2, 3))
    with pytest.raises(cupyflash.ArgumentError, match="the same batch, or one of 1, got 2 and 3"):
        two & three
    one, booleans = masks.local(5, left=1), np.ones((5, 5), bool)
    for combine in (lambda: one & booleans, lambda: booleans | one, lambda: one | True):
        with pytest.raises(cupyflash.ArgumentError, match=r"masks\.from_dense takes booleans"):
            combine()


def test_a_mask_is_shown_in_a_line() -> None:
    """However large it is, and also where it is part of a larger one."""
    assert repr(masks.local(200, left=70, right=0)) == (
        "BlockMask(batch=1, heads=1, seqlen_q=200, seqlen_k=200, 4 x 4 tiles, "
        "density=0.562: 0 full, 9 in part, 7 empty)"
    )
    two = masks.from_dense(np.arange(130) < np.array([64, 128])[:, None, None, None])
    kinds = "1 x 3 tiles, density=0.5: 3 full, 0 in part, 3 empty)"
    assert repr(two) == f"BlockMask(batch=2, heads=1, seqlen_q=1, seqlen_k=130, {kinds}"
    assert "batch=1, heads=1, seqlen_q=1, seqlen_k=65, " in repr(two.part(1, 1, slice(0, 65)))


def test_which_masks_are_tall() -> None:
    """Those of which blocks of 192 by 64 hold less that nobody sees: what is seen nearly everywhere, not squares of
    128, or of 512 as documents have."""
    n = 2304
    rng = np.random.default_rng(0)
    squares = [masks.from_blocks(rng.random((18, 18)) < part, 128, n) for part in (0.1, 0.5, 0.95)]
    everything, documents = masks.from_dense(np.ones((n, n), bool)), masks.from_blocks(np.eye(5, dtype=bool), 512, n)
    assert [mask.tall for mask in squares] == [False, False, True]
    assert everything.tall
    assert not documents.tall
    assert not (documents & everything).tall
    assert (documents | everything).tall
    assert pickle.loads(pickle.dumps(everything)).tall
    assert not masks.from_dense(np.ones((128, 128), bool)).tall  # one square, or a third of one that is higher
    assert not masks.from_dense(np.zeros((n, n), bool)).tall


@pytest.mark.parametrize(("is_tall", "tile"), [(True, "m192n64"), (False, "m128n128")])
def test_tall_masks_have_a_tile_of_their_own(is_tall: bool, tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = pretend(monkeypatch, "sm_90")
    n = 1152
    q = np.zeros((1, n, 2, 128), np.float16)
    seen = np.ones((n, n), bool)
    if not is_tall:
        seen[:, 128:] = False
        seen[:128] = False
    mask = masks.from_dense(seen)
    assert mask.tall == is_tall
    cupyflash.attention(q, q, q, block_mask=mask)
    assert [tile in launched.symbol for launched in gpu.launched if launched.symbol.startswith("fwd")] == [True]


def test_nobody_writes_to_a_mask() -> None:
    mask = masks.local(70, left=3) & masks.prefix(70, length=2)
    for x in (mask.tiles, mask.bits):
        with pytest.raises(ValueError, match="read-only"):
            x[...] = 0


@pytest.mark.needs("torch")
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_a_mask_is_as_one_that_is_new(copied: Callable[[BlockMask], BlockMask]) -> None:
    """Without the copies on devices, which another process may not have; nobody writes to it, either."""
    import torch

    mask = masks.local(70, left=3).part(0, 70, slice(0, 65))
    q, k = torch.ones(1, 70, 1, 8), torch.ones(1, 65, 1, 8)
    cupyflash.attention(q, k, k, block_mask=mask)
    found = copied(mask)
    assert mask.kept.keys() - found.kept.keys()
    assert not found.kept.keys() - {"padded"}
    assert (dense(found) == dense(mask)).all()
    for x in (found.tiles, found.bits):
        with pytest.raises(ValueError, match="read-only"):
            x[...] = 0


@pytest.mark.needs("torch")
@pytest.mark.parametrize("at_once", [1, 1 << 24])
def test_a_mask_of_flex_attention_whose_partial_blocks_have_no_partial_tile(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of 128 is partial to torch where its last tile is cut off, or where its tiles are empty and full."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    import cupyflash.torch.masks

    monkeypatch.setattr(cupyflash.torch.masks, "ELEMENTS_AT_ONCE", at_once)
    for n, mod in ((200, lambda b, h, q, k: k >= 0), (N, lambda b, h, q, k: q // 64 == k // 64)):
        i, j = np.arange(n)[:, None], np.arange(n)
        found = masks.from_torch(flex.create_block_mask(mod, None, None, n, n, device="cpu"))
        assert (dense(found) == mod(0, 0, i, j)).all()
        assert len(found.bits) == 1


@pytest.mark.needs("torch")
def test_a_mask_of_flex_attention_combines() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    theirs = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, N, N, device="cpu")
    i, j = pairs()
    window = masks.local(N, left=40, right=9)
    seen = (j >= i - 40) & (j <= i + 9)
    for both in (window & theirs, theirs & window):
        assert (dense(both) == (seen & (j <= i))).all()
    for either in (window | theirs, theirs | window):
        assert (dense(either) == (seen | (j <= i))).all()


@pytest.mark.needs("torch")
def test_lists_of_flex_attention_that_its_kernels_do_not_read_are_refused() -> None:
    import torch

    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    for dims, length in ((3, 128), (2, 128), (4, 129)):
        counts = torch.ones((1,) * (dims - 1), dtype=torch.int32)
        indices = torch.arange(2, dtype=torch.int32).reshape((1,) * (dims - 1) + (2,))
        made = flex.BlockMask.from_kv_blocks(counts, indices, seq_lengths=(length, 256))
        with pytest.raises(cupyflash.ArgumentError, match=r"block_mask: expected kv_num_blocks \(batch, heads"):
            masks.from_torch(made)


@pytest.mark.needs("torch")
def test_a_slice_of_a_mask_of_flex_attention_needs_its_lengths() -> None:
    """torch leaves those of the whole mask to it, and takes away the mask_mod."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    whole = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 384, 384, device="cpu")
    part = whole[:, :, 1:2]
    part.mask_mod = lambda b, h, q, k: q + 128 >= k
    with pytest.raises(cupyflash.ArgumentError, match=r"to a slice give its lengths, mask\.seq_lengths = "):
        masks.from_torch(part)
    part.seq_lengths = (128, 384)
    assert (dense(masks.from_torch(part))[0, 0] == (np.arange(128, 256)[:, None] >= np.arange(384))).all()


@pytest.mark.needs("torch")
def test_a_mask_of_flex_attention_is_taken_as_it_is() -> None:
    import torch

    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    documents = torch.arange(N) // 70

    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (documents[q] == documents[k]) & (q >= k) & ((q - k) % (h + 2) != 1)

    block_mask = flex.create_block_mask(mod, None, 2, N, N, device="cpu")
    i, j = torch.arange(N)[:, None], torch.arange(N)
    seen = torch.stack([mod(0, h, i, j) for h in range(2)])
    assert (dense(masks.from_torch(block_mask))[0] == seen.numpy()).all()
    q, k, v = (torch.randn(2, N, 2, 64, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = cupyflash.attention(q, k, v, block_mask=block_mask)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    wanted = sdpa(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen).transpose(1, 2)
    dout = torch.randn_like(out)
    torch.testing.assert_close(out, wanted)
    for a, b in zip(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(wanted, (q, k, v), dout), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("size", [32, 96, (1, 128), (128, 50)])
def test_blocks_of_flex_attention_of_any_size(size: Any) -> None:
    import torch

    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    documents = torch.arange(N) // 70

    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (documents[q] == documents[k]) & (q >= k) | (h == 1) & (k < 5) & (b == 0)

    made = flex.create_block_mask(mod, 2, 2, 200, N, device="cpu", BLOCK_SIZE=size)
    places = (torch.from_numpy(x) for x in np.ix_(*(np.arange(n) for n in (2, 2, 200, N))))
    assert (dense(masks.from_torch(made)) == mod(*places).numpy()).all()


@pytest.mark.needs("torch")
def test_a_mask_of_flex_attention_whose_parts_are_replaced_is_another_one() -> None:
    """As a step of text generation cuts a row of blocks out of a mask, and gives it the step's own mask_mod."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    row = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, N, N, device="cpu")[:, :, 2]
    row.seq_lengths = 1, N
    for position in (260, 300, N - 1):
        row.mask_mod = lambda b, h, q, k, position=position: q + position >= k
        assert (dense(masks.from_torch(row))[0, 0, 0] == (np.arange(N) <= position)).all()


@pytest.mark.needs("torch")
@pytest.mark.parametrize("is_converted", [pytest.param(False, marks=pytest.mark.needs("torch>=2.13")), True])
@pytest.mark.parametrize("is_argument", [True, False])
def test_a_compiled_program_takes_a_mask_of_flex_attention(is_argument: bool, is_converted: bool) -> None:
    """Also one that nobody has used before, where torch hands it on."""
    import torch

    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, N, N, device="cpu")
    if is_converted:
        masks.from_torch(mask)
    x = torch.randn(1, N, 2, 16, dtype=torch.float64, requires_grad=True)
    torch._dynamo.reset()

    def of_argument(x: Any, given: Any) -> Any:
        return cupyflash.attention(x, x, x, block_mask=given)

    def of_closure(x: Any, _: Any) -> Any:
        return cupyflash.attention(x, x, x, block_mask=mask)

    attend = torch.compile(of_argument if is_argument else of_closure, fullgraph=True, backend="aot_eager")
    wanted = cupyflash.attention(x, x, x, causal=True)
    for _ in range(2):
        out = attend(x, mask if is_argument else None)
        torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (out, wanted)))


@pytest.mark.needs("torch>=2.13")  # before, not every version's programs watch which function a mask has
@pytest.mark.parametrize("is_asked_between", [True, False])
def test_a_compiled_program_sees_that_parts_of_a_mask_are_replaced(is_asked_between: bool) -> None:
    """By functions of one code, back to one that it had, and by lists."""
    import torch

    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def nearer_than(n: int) -> Any:
        return lambda b, h, q, k: (q - k).abs() < n

    near, far = nearer_than(9), nearer_than(40)
    mask = flex.create_block_mask(far, None, None, N, N, device="cpu")
    x = torch.randn(1, N, 2, 16, dtype=torch.float64)
    torch._dynamo.reset()

    def attend(x: Any) -> Any:
        return cupyflash.attention(x, x, x, block_mask=mask)

    program = torch.compile(attend, fullgraph=True, backend="eager")

    def check(wanted: BlockMask) -> None:
        if is_asked_between:
            masks.from_torch(mask)
        for _ in range(2):  # the first finds no copy on the device, and is another program
            torch.testing.assert_close(program(x), cupyflash.attention(x, x, x, block_mask=wanted))

    ours = {mod: masks.from_torch(flex.create_block_mask(mod, None, None, N, N, device="cpu")) for mod in (near, far)}
    for mod in (far, near, far):
        mask.mask_mod = mod
        check(ours[mod])
    mask.kv_num_blocks = torch.zeros_like(mask.kv_num_blocks)
    check(ours[far] & masks.from_torch(mask))


@pytest.mark.needs("torch>=2.13")
def test_a_mask_of_flex_attention_that_a_program_makes_is_refused_by_name() -> None:
    import torch

    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    torch._dynamo.reset()

    def attend(x: Any) -> Any:
        mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, N, N, device="cpu")
        return cupyflash.attention(x, x, x, block_mask=mask)

    with pytest.raises(Exception, match=r"block_mask: expected a mask that is made outside of the program"):
        torch.compile(attend, backend="eager")(torch.randn(1, N, 2, 16))


@pytest.mark.needs("torch")
@pytest.mark.parametrize("first", ["inference_mode", "grad", "fake", "export"])
def test_a_mask_that_was_first_used_where_torch_follows(first: str) -> None:
    """Its copy on a device serves all calls, also those that are trained, and is not in the way of FakeTensors."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    mask, x = masks.causal_document(np.arange(N) // 70), torch.randn(1, N, 2, 16, requires_grad=True)

    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return cupyflash.attention(x, x, x, block_mask=mask)

    attend = Module()

    def followed() -> None:
        plain = x.detach()
        if first == "inference_mode":
            with torch.inference_mode():
                attend(plain)
        elif first == "grad":
            torch.func.grad(lambda x: attend(x).sum())(plain)
        elif first == "export":
            torch.export.export(attend, (plain,), strict=False)
        else:
            with FakeTensorMode() as mode:
                assert attend(mode.from_tensor(plain)).shape == x.shape

    for _ in range(2):
        followed()
        torch.testing.assert_close(attend(x), cupyflash.attention(x, x, x, mask=torch.from_numpy(dense(mask))))
        assert torch.isfinite(torch.autograd.grad(attend(x).sum(), x)[0]).all()


@pytest.mark.needs("torch")
def test_a_compiled_program_names_a_mask_of_other_lengths() -> None:
    import torch

    torch._dynamo.reset()
    x, cu_seqlens = torch.randn(2, N, 2, 16), torch.tensor([0, N], dtype=torch.int32)
    options: dict[str, Any] = {"backend": "eager", "fullgraph": True, "dynamic": True}
    dense = torch.compile(lambda x, mask: cupyflash.attention(x, x, x, block_mask=mask), **options)
    packed = torch.compile(lambda x, mask: cupyflash.attention_varlen(x, x, x, cu_seqlens, block_mask=mask), **options)
    dense(x, masks.local(N, left=3))
    with pytest.raises(
        Exception, match=f"block_mask: expected one of {N} queries and {N} keys, .*, got one of 9 and 8"
    ):
        dense(x, masks.local(9, 8, left=3))
    packed(x[0], masks.local(N, left=3))
    with pytest.raises(Exception, match=r"block_mask: expected room for .*, got a mask of 0 and 8"):
        packed(x[0], masks.local(0, 8, left=3))


@pytest.mark.needs("torch")
@pytest.mark.parametrize("theirs", [False, True])
def test_a_compiled_program_serves_all_masks(theirs: bool) -> None:
    """Of documents, say, which each batch has others of; with as many patterns, and with others."""
    import torch
    from torch._dynamo.testing import CompileCounter

    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def mask_of(ids: Any) -> BlockMask:
        if not theirs:
            return masks.causal_document(ids)

        def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (ids[b, q] == ids[b, k]) & (q >= k)

        ids = torch.from_numpy(ids)
        return masks.from_torch(flex.create_block_mask(mod, 2, None, N, N, device="cpu"))

    torch._dynamo.reset()
    programs = CompileCounter()
    attend = torch.compile(lambda x, mask: cupyflash.attention(x, x, x, block_mask=mask), backend=programs)
    rng, x = np.random.default_rng(0), torch.randn(2, N, 2, 16, dtype=torch.float64)
    counts = []
    for _ in range(8):
        mask = mask_of(np.sort(rng.integers(0, 6, (2, N)), 1))
        for _ in range(2):  # new to the device, and on it
            torch.testing.assert_close(attend(x, mask), cupyflash.attention(x, x, x, block_mask=mask))
        counts.append(programs.frame_count)
    # Two each, for the first number of patterns and for any; torch may make one more ("Unexpected recompilation").
    assert counts[4:] == counts[4:5] * 4
    assert counts[-1] <= 5


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("lengths", "shape"),  # batch, queries, keys; the mask's
    [
        *(((0, 63, 127), shape) for shape in ((0, 1, 63, 127), (0, 4, 63, 127), (1, 1, 63, 127), (63, 127))),
        *(((2, 63, 0), shape) for shape in ((2, 1, 63, 0), (2, 4, 1, 0))),
        *(((2, 0, 127), shape) for shape in ((2, 4, 0, 127), (2, 4, 0, 1))),
    ],
)
def test_no_mask_is_read_where_there_are_no_scores(
    arch: str, lengths: tuple[int, int, int], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have no elements: a kernel that read it would end every later call of the process."""
    gpu, (batch, queries, keys) = pretend(monkeypatch, arch), lengths
    q, k = np.zeros((batch, queries, 4, 64), np.float16), np.zeros((batch, keys, 4, 64), np.float16)
    mask, lse = np.zeros(shape, bool), np.zeros((batch, 4, queries), np.float32)
    cupyflash.attention(q, k, k, mask=mask)
    cupyflash.attention(q, k, k, mask_mod="k <= q")
    cupyflash.attention(q, k, k, mask_mod="k < 3")
    cupyflash.attention_backward(q, q, k, k, q, lse, mask=mask)
    assert not [one for one in gpu.launched if "mask_tiles" in one.symbol]
    assert batch or not gpu.launched


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.from_dense([[True], [True, False]]), "mask: expected as many"),
        (lambda: masks.from_blocks([[True], [True, False]], 64, 100), "blocks: expected as many"),
        (lambda: masks.from_blocks(np.ones((1, 1), bool), (64, 64, 64), 100), "block_size: expected an integer"),
        (lambda: masks.global_local(10, window=2, global_tokens=[[1], [1, 2]]), "global_tokens: expected as many"),
        (lambda: masks.prefix(10, length=[[1], [2, 3]]), "length: expected as many"),
        (lambda: masks.bigbird(100, seed=-1), "seed: expected an integer from 0 on"),
        (lambda: masks.from_torch(3), "expected a cupyflash.BlockMask"),
        (lambda: masks.from_dense(np.ma.array(np.ones((4, 4), bool), mask=True)), "mask: expected a plain array"),
        (lambda: masks.bigbird(100, heads=2**63), "heads: expected at most"),
        (lambda: masks.butterfly(-1), "seqlen: expected a length from 0"),
        (
            lambda: BlockMask(np.full((1, 1, 1, 1), 7, np.int32), no_bits(), 10, 10),
            "tiles: expected numbers from 0",
        ),
        (lambda: BlockMask(np.ones((1, 1, 1, 1), np.int32), no_bits(), 65, 10), "tiles: expected int32 .*2 x 1 tiles"),
        (lambda: BlockMask(np.ones((1, 1, 1, 1), np.int64), no_bits(), 10, 10), "tiles: expected int32"),
        (lambda: BlockMask(np.ones((1, 1, 1, 1), np.int32), no_bits()[:, 1:], 10, 10), "bits: expected int32"),
    ],
)
def test_what_no_mask_can_be_made_of(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.mark.needs("torch")
@pytest.mark.parametrize("form", ["meta", "sparse"])
def test_tensors_of_which_no_mask_can_be_made(form: str) -> None:
    import torch

    x = torch.ones(4, 4, dtype=torch.bool, device="meta" if form == "meta" else "cpu")
    with pytest.raises(ArgumentError, match="mask: expected a plain array in host memory"):
        masks.from_dense(x if form == "meta" else x.to_sparse())


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64, np.int8])
def test_lengths_may_be_numbers_of_numpy(kind: Any) -> None:
    """Which would wrap if they were counted with."""
    blocks = np.array([[True, False], [True, True]])
    for make in (
        lambda n: masks.local(n(100), n(90), left=n(3), right=n(1)),
        lambda n: masks.from_blocks(blocks, n(64), n(100)),
        lambda n: masks.bigbird(n(100), block=n(16), window_blocks=n(1), global_blocks=n(1), random_blocks=n(2)),
        lambda n: masks.butterfly(n(100), block=n(32)),
        lambda n: masks.strided(n(100), stride=n(7)),
        lambda n: masks.global_local(n(100), window=n(7), global_tokens=n(3)),
        lambda n: masks.prefix(n(100), length=n(3)),
    ):
        assert np.array_equal(make(kind).of(0, 0), make(int).of(0, 0))


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("wrong", ["q", "k"])
def test_what_is_no_array_is_refused_beside_a_mask(library: str, wrong: str) -> None:
    if library == "torch":
        pytest.importorskip("torch")
    x, mask = np.zeros((1, 8, 2, 16), np.float32), masks.local(8, left=3)
    good = x if library == "numpy" else sys.modules["torch"].from_numpy(x)
    for bad in (x.tolist(), good[0, 0, 0]):
        q, k = (bad, good) if wrong == "q" else (good, bad)
        lse = np.zeros((1, 2, 8), np.float32)
        with pytest.raises(ArgumentError, match=f"{wrong}: expected"):
            cupyflash.attention(q, k, good, block_mask=mask)
        with pytest.raises(ArgumentError, match=f"{wrong}(_cache)?: expected"):
            cupyflash.attention_with_cache(q, k, good, cache_seqlens=3, block_mask=mask)
        with pytest.raises(ArgumentError, match="expected"):
            cupyflash.attention_backward(good, q, k, good, good, lse, block_mask=mask)
        with pytest.raises(ArgumentError, match="expected"):
            cupyflash.attention_varlen(q if wrong == "q" else q[0], k, good[0], np.array([0, 8], "i4"), block_mask=mask)


def test_numbers_beyond_all_lengths() -> None:
    """They are as good as those that no sequence reaches."""
    huge, everything = 10**30, np.ones((1, 1), bool)
    same = (
        (masks.local(100, left=huge), masks.local(100, left=None)),
        (masks.strided(100, stride=huge), masks.local(100, left=None)),
        (masks.from_blocks(everything, huge, 100), masks.from_dense(np.ones((100, 100), bool))),
        (masks.butterfly(100, block=huge), masks.from_dense(np.ones((100, 100), bool))),
        (masks.global_local(100, window=huge, global_tokens=0), masks.from_dense(np.ones((100, 100), bool))),
        (masks.prefix(100, length=np.uint64(2**63 + 5)), masks.from_dense(np.ones((100, 100), bool))),
    )
    for a, b in same:
        assert np.array_equal(a.of(0, 0), b.of(0, 0))
