"""attention_with_cache with a block mask, whose queries count by the rows at which they stand."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyflash import ArgumentError, BlockMask, PagedCache, attention, attention_with_cache, masks
from cupyflash.gpu.device import Device
from cupyflash.plan.families import plan_call
from cupyflash.plan.params_decode import DECODE_PARAMS, DECODE_SM90_PARAMS
from cupyflash.plan.prefill import Lie, Way, problem_of, way_of
from cupyflash.plan.shipped_cache import problem
from tests import pretended_gpu
from tests.small_cache import small

N = 150  # rows of a sequence
MASKS: dict[str, Callable[[], BlockMask]] = {
    "longformer": lambda: masks.global_local(N, window=20, global_tokens=5),
    "each head": lambda: masks.bigbird(N, block=16, heads=4, seed=1),
    "each sequence": lambda: masks.causal_document(np.arange(N) // np.array([[40], [70]])),
    "combined": lambda: masks.strided(N, stride=32, window=8) | masks.prefix(N, length=10),
}


def whole(rng: np.random.Generator) -> Any:
    return rng.standard_normal((3, 2, N, 4, 16), dtype=np.float32)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("step", [1, 7, 64])
def test_steps_give_what_the_whole_gives(name: str, step: int, rng: np.random.Generator) -> None:
    """One mask, that of the whole sequence, serves each step."""
    (q, k, v), mask = whole(rng), MASKS[name]()
    expected, expected_lse = attention(q, k, v, causal=True, block_mask=mask, return_lse=True)
    k_cache, v_cache = np.full((2, 2, N, 4, 16), np.nan, np.float32)
    for first in range(0, N, step):
        rows = slice(first, min(first + step, N))
        given = {"k": k[:, rows], "v": v[:, rows], "cache_seqlens": first, "block_mask": mask, "causal": True}
        out, lse = attention_with_cache(q[:, rows], k_cache, v_cache, **given, return_lse=True)
        np.testing.assert_allclose(out, expected[:, rows], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, expected_lse[:, :, rows], rtol=1e-5, atol=1e-6)


def test_packed_steps_of_pages(rng: np.random.Generator) -> None:
    """Sequences of different lengths, of which each stands elsewhere in the mask."""
    (q, k, v), mask = whole(rng), masks.global_local(160, window=20, global_tokens=5)
    cache = PagedCache(pages=30, page_size=16, heads_k=4, head_dim=16, like=q, max_seqlen=150)
    sequences = cache.allocate(), cache.allocate()
    expected = [attention(*(x[b : b + 1, :n] for x in (q, k, v)), causal=True, block_mask=part(mask, n))
                for b, n in enumerate((100, 31))]  # fmt: skip
    for b, n in enumerate((97, 30)):
        places = cache.append(sequences[b : b + 1], n)
        attention_with_cache(q[b : b + 1, :n], *cache[0], k=k[b : b + 1, :n], v=v[b : b + 1, :n], **places)
    rows = [np.concatenate((x[0, 97:100], x[1, 30:31])) for x in (q, k, v)]
    places = cache.append(sequences, (3, 1))
    out = attention_with_cache(rows[0], *cache[0], k=rows[1], v=rows[2], **places, causal=True, block_mask=mask)
    wanted = np.concatenate((expected[0][0, 97:], expected[1][0, 30:]))
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)


def part(mask: BlockMask, n: int) -> BlockMask:
    """Its first rows and keys."""
    return masks.from_dense(mask.of(0, 0)[:n, :n])


def test_rows_above_the_first_see_nothing(rng: np.random.Generator) -> None:
    """Five queries of sequences with three keys and eight; NaN in what nobody sees."""
    q, (k_cache, v_cache) = rng.standard_normal((2, 5, 2, 8)), rng.standard_normal((2, 2, 20, 2, 8))
    shown = np.zeros((20, 20), bool)
    shown[:, 1] = True
    mask, lengths = masks.from_dense(shown), np.array([3, 8], np.int32)
    k_cache[:, 2:], v_cache[:, 2:] = np.nan, np.inf
    out, lse = attention_with_cache(q, k_cache, v_cache, cache_seqlens=lengths, block_mask=mask, return_lse=True)
    assert not out[0, :2].any()
    assert np.isneginf(lse[0, :, :2]).all()
    np.testing.assert_allclose(out[0, 2:], np.broadcast_to(v_cache[0, 1], (3, 2, 8)))
    np.testing.assert_allclose(out[1], np.broadcast_to(v_cache[1, 1], (5, 2, 8)))


def wrong(*shape: int) -> BlockMask:
    return masks.from_dense(np.ones(shape, bool))


WRONG: tuple[tuple[Any, str], ...] = (
    (wrong(1, 20), "block_mask: expected one of n queries and n keys, n at least 20, the rows that a sequence can "
                   "have, since a query counts by the row at which it stands, got one of 1 and 20"),
    (wrong(20, 19), "got one of 20 and 19"),
    (wrong(19, 19), "got one of 19 and 19"),
    (wrong(3, 2, 20, 20), "block_mask: expected heads_q of 1 or 4, as q has, got 2"),
    (wrong(2, 1, 20, 20), "block_mask: expected batch of 1 or 3, as q has, got 2"),
    (np.ones((20, 20), bool), "block_mask: expected a cupyflash.BlockMask, of cupyflash.masks, or one of torch's"),
)  # fmt: skip


@pytest.mark.parametrize(("mask", "message"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_named(mask: Any, message: str, rng: np.random.Generator) -> None:
    x = small(rng)
    before = x["k_cache"].copy()
    with pytest.raises(ArgumentError, match=re.escape(message)):
        attention_with_cache(**x, block_mask=mask)
    np.testing.assert_array_equal(x["k_cache"], before)


def test_pages_count(rng: np.random.Generator) -> None:
    x = small(rng) | {"block_table": np.arange(6, dtype=np.int32).reshape(3, 2)}
    x["k_cache"], x["v_cache"] = rng.standard_normal((2, 6, 10, 2, 16), dtype=np.float32)
    assert attention_with_cache(**x, block_mask=wrong(20, 20)).shape == (3, 1, 4, 16)
    with pytest.raises(ArgumentError, match="expected one of n queries and n keys, n at least 20, "):
        attention_with_cache(**x, block_mask=wrong(10, 10))
    x["block_table"] = x["block_table"].ravel()
    with pytest.raises(ArgumentError, match=re.escape("block_table: expected shape (batch, pages_per_sequence)")):
        attention_with_cache(**x, block_mask=wrong(20, 20))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", ["longformer", "each head", "each sequence"])
def test_what_is_launched(name: str, arch: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = pretended_gpu.pretend(monkeypatch, arch)
    q, k_cache, v_cache = (x.astype(np.float16) for x in whole(rng))
    mask = MASKS[name]()
    given = {"cache_seqlens": np.array([5, 150], np.int32), "block_mask": mask}
    attention_with_cache(q[:, :1].copy(), k_cache, v_cache, **given)
    main = next(x for x in gpu.launched if "decode_sm" in x.symbol)
    params = np.frombuffer(main.params, DECODE_SM90_PARAMS if "decode_sm90" in main.symbol else DECODE_PARAMS)[0]
    plain = params["plain"] if "decode_sm90" in main.symbol else params
    assert main.symbol.endswith("_bias_tile_mask")
    assert [plain["block_tiles"], plain["block_bits"]] == [x.ctypes.data for x in (mask.tiles, mask.bits)]
    assert plain["block_mask"] == {"longformer": 1, "each sequence": 2, "each head": 3}[name]
    assert (plain["shares"]["unit"], plain["bias"], plain["mask"]) == (1, 0, 0)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_many_queries_take_the_forward(arch: str) -> None:
    """With the block mask as it is, and lists that are made on the device; in parts too."""
    gpu = Device.synthetic(arch)
    for batch in (1, 8):
        p = problem("bf16", 128, batch, seqlen_q=256, capacity=16384, block_mask=4, mask_tiles=300)
        way = way_of(p, gpu, Lie())
        assert way == Way(paged=True)
        plan = plan_call(problem_of(p, way), gpu)
        names = [x.variant.header for x in plan.launches if x.grid]
        forward = f"fwd_{'sm90' if arch == 'sm_90' else 'sm80'}"
        assert names == ["key_lists", forward, "fwd_parts"][: 3 if batch == 1 else 2]
        heads, tiles = p.heads_q, plan.launches[0].tiles // p.heads_q
        assert plan.workspace["key_lists"] == ((1, heads, tiles, 1 + 300), "int32")
        assert ("o_parts" in plan.workspace) == (batch == 1)


@pytest.mark.needs("torch")
def test_in_a_program_of_torch(rng: np.random.Generator) -> None:
    """It serves all lengths, and all masks of the same lengths; flex_attention's masks as they are."""
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, k, v = map(torch.from_numpy, whole(rng))
    programs = []

    def backend(graph: Any, _: Any) -> Any:
        programs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def step(q: Any, lengths: Any, mask: Any) -> Any:
        return attention_with_cache(q, k, v, cache_seqlens=lengths, causal=True, block_mask=mask)

    made: list[int] = []
    for window in (3, 9, 20, 50):
        mask = masks.global_local(N, window=window, global_tokens=2)
        expected = attention(q, k, v, causal=True, block_mask=mask)
        for n in (30, 140):
            out = step(q[:, n - 1 : n], torch.full((2,), n, dtype=torch.int32), mask)
            torch.testing.assert_close(out, expected[:, n - 1 : n])
        made.append(len(programs))
    assert made[1:] == [made[1]] * 3  # the second mask may show that numbers of patterns differ
    theirs = flex.create_block_mask(lambda b, h, i, j: (i - j < 3) | (j < 2), None, None, N, N, device="cpu")
    out = attention_with_cache(q[:, 99:100], k, v, cache_seqlens=100, causal=True, block_mask=theirs)
    torch.testing.assert_close(out, attention(q, k, v, causal=True, block_mask=theirs)[:, 99:100])


@pytest.mark.needs("jax")
def test_in_a_program_of_jax(rng: np.random.Generator) -> None:
    jax = pytest.importorskip("jax")
    q, k, v = map(jax.numpy.asarray, whole(rng))
    mask = MASKS["each head"]()

    @jax.jit
    def step(lengths: Any) -> Any:
        return attention_with_cache(q[:, 99:100], k, v, cache_seqlens=lengths, causal=True, block_mask=mask)

    expected = attention(q, k, v, causal=True, block_mask=mask)
    np.testing.assert_allclose(step(np.full(2, 100, np.int32)), expected[:, 99:100], rtol=1e-5, atol=1e-6)
