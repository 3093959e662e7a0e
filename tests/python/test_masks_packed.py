"""Block masks of packed sequences: tiles are those of each sequence, what is beyond a mask is hidden, errors."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from cupyflash import ArgumentError, attention_varlen, attention_varlen_backward, masks
from cupyflash.block_mask import BlockMask
from cupyflash.gpu.device import Device
from cupyflash.mask_tiles import TILE
from cupyflash.plan.families import plan_call
from cupyflash.problem import make_problem

B, H, TOTAL = 4, 4, 206
CU = np.array([0, 5, 110, 110, 200], np.int32)
LONGEST = 105


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_BACKEND", "cpu")


@pytest.fixture
def arrays(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    q, k, v, dout = rng.standard_normal((4, TOTAL, H, 16))
    return q, k[:, :2], v[:, :2], dout


def seen_of(rng: np.random.Generator, room: int, owners: tuple[int, int]) -> np.ndarray:
    """Few keys for each query; for some rows of tiles all, for others none."""
    seen = rng.random((*owners, room, room)) < 0.05
    seen[..., : room // 2, :TILE], seen[..., 70:80, :] = True, False
    return seen


def both(x: tuple[np.ndarray, ...], **options: Any) -> tuple[np.ndarray, ...]:
    q, k, v, dout = x
    out, lse = attention_varlen(q, k, v, CU, return_lse=True, **options)
    return out, lse, *attention_varlen_backward(dout, q, k, v, out, lse, CU, **options)


@pytest.mark.parametrize("owners", [(1, 1), (B, H), (1, H), (B, 1)], ids=str)
@pytest.mark.parametrize("room", [LONGEST, 128, 130])
def test_sees_what_the_same_booleans_say(
    room: int, owners: tuple[int, int], arrays: tuple[np.ndarray, ...], rng: np.random.Generator
) -> None:
    seen = seen_of(rng, room, owners)
    for options in ({}, {"causal": True, "alibi_slopes": rng.uniform(0, 0.1, H)}):
        found = both(arrays, block_mask=masks.from_dense(seen), **options)
        for a, b in zip(found, both(arrays, mask=seen, **options), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_beside_a_bias_and_a_mask(arrays: tuple[np.ndarray, ...], rng: np.random.Generator) -> None:
    seen, shown = seen_of(rng, LONGEST, (B, 1)), rng.random((1, H, LONGEST, LONGEST)) < 0.8
    bias = rng.standard_normal((H, LONGEST, LONGEST))
    found = both(arrays, block_mask=masks.from_dense(seen), mask=shown, bias=bias)
    for a, b in zip(found, both(arrays, mask=seen & shown, bias=bias), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("queries", "keys"), [(105, 130), (64, 100), (1, 128), (128, 64)])
def test_a_mask_of_whole_tiles(queries: int, keys: int, rng: np.random.Generator) -> None:
    """Sees the same, and nothing beyond; full tiles at the border, too."""
    seen = rng.random((2, 1, queries, keys)) < 0.5
    seen[0] = True
    mask = masks.from_dense(seen)
    whole = mask.padded()
    assert (whole.seqlen_q % TILE, whole.seqlen_k % TILE) == (0, 0)
    found = whole.sees(slice(0, whole.seqlen_q), slice(0, whole.seqlen_k))
    np.testing.assert_array_equal(found[:, :, :queries, :keys], seen)
    assert not found[:, :, queries:].any()
    assert not found[..., keys:].any()
    assert (whole is mask) == (queries % TILE == keys % TILE == 0)


WRONG: tuple[tuple[BlockMask, dict[str, Any], str], ...] = (
    (masks.local(64, left=3), {}, r"^block_mask: expected room for at least 105 queries, those of sequence 1, got 64"),
    (
        masks.local(128, 64, left=3),
        {},
        r"^block_mask: expected room for at least 105 keys, those of sequence 1, got 64",
    ),
    (masks.local(0, left=3), {}, r"^block_mask: expected room for the longest sequence, .* got a mask of 0 and 0"),
    (masks.from_dense(np.ones((3, 1, 128, 128), bool)), {}, r"^block_mask: expected batch of 1 or 4"),
    (masks.from_dense(np.ones((1, 3, 128, 128), bool)), {}, r"^block_mask: expected heads_q of 1 or 4"),
    (
        masks.local(LONGEST, left=3),
        {"bias": np.zeros((140, 1))},
        r"^block_mask: expected 3 tiles of 64 queries, since bias has room for 140, got 2; make both for",
    ),
    (
        masks.local(140, LONGEST, left=3),
        {"mask": np.ones((140, 140), bool)},
        r"^block_mask: expected 3 tiles of 64 keys, since mask has room for 140, got 2",
    ),
)


@pytest.mark.parametrize(("mask", "options", "message"), WRONG, ids=lambda x: str(x)[:40])
def test_what_is_wrong_is_refused(
    mask: BlockMask, options: dict[str, Any], message: str, arrays: tuple[np.ndarray, ...]
) -> None:
    turned = [x.swapaxes(0, 1) for x in arrays[:3]]
    with pytest.raises(ArgumentError, match=message):
        attention_varlen(*arrays[:3], CU, block_mask=mask, **options)
    with pytest.raises(ArgumentError, match=message):
        attention_varlen(*turned, CU, block_mask=mask, layout="bhsd", **options)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_lists_grow_with_the_rows(arch: str) -> None:
    """Of a thousand sequences with room for a long one: a list a tile of rows, not one a tile of room."""
    shape, longest, totals = (1 << 17, 4, 64), 1 << 15, {}
    for sequences in (1, 1000):
        problem = make_problem(
            [shape] * 3, ["bf16"] * 3, sequences=sequences, block_mask=1, max_seqlens=(longest, longest), causal=True
        )
        for backward in (False, True):
            plan = plan_call(problem, Device.synthetic(arch), backward=backward)
            found = {name: shape for name, (shape, _) in plan.workspace.items() if name.endswith("_lists")}
            assert len(found) == 1 + backward
            for name, (batch, heads, lists, entries) in found.items():
                assert (batch, heads) == (1, 1)
                totals[sequences, backward, name] = lists * entries
                launch = next(x for x in plan.launches if x.variant.over == name)
                assert launch.grid == lists
    for (_, backward, name), n in totals.items():
        assert n <= 3 * totals[1, backward, name]


@pytest.mark.needs("torch")
def test_torch(arrays: tuple[np.ndarray, ...], rng: np.random.Generator) -> None:
    """Differentiated, compiled, and a mask of flex_attention as it is."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v, dout = (torch.tensor(x, requires_grad=True) for x in arrays)
    cu, seen = torch.tensor(CU), seen_of(rng, LONGEST, (1, H))
    mask = masks.from_dense(seen)

    def attend(q: Any, k: Any, v: Any, mask: Any = mask) -> Any:
        return attention_varlen(q, k, v, cu, block_mask=mask)

    want = both(arrays, block_mask=mask)
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        out = function(q, k, v)
        np.testing.assert_array_equal(out.detach(), want[0])
        for a, b in zip(torch.autograd.grad(out, (q, k, v), dout), want[2:], strict=True):
            np.testing.assert_array_equal(a, b)
    flex = create_block_mask(lambda b, h, i, j: i - j < 30, None, None, 128, 128, device="cpu")
    ours = masks.from_dense(np.arange(128)[:, None] - np.arange(128) < 30)
    torch.testing.assert_close(attend(q, k, v, flex), attend(q, k, v, ours))


@pytest.mark.needs("torch")
@pytest.mark.parametrize("is_pickled", [False, True])
def test_a_compiled_program_takes_masks_that_no_call_had(is_pickled: bool, rng: np.random.Generator) -> None:
    """Of lengths that are no multiples of a tile, another one each time; the whole call is in the program."""
    import torch
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    programs = CompileCounter()
    attend = torch.compile(
        lambda x, cu, mask: attention_varlen(x, x, x, cu, block_mask=mask), backend=programs, fullgraph=True
    )
    x, cu = torch.from_numpy(rng.standard_normal((TOTAL, H, 16))), torch.from_numpy(CU)
    for room in (LONGEST, LONGEST, 128, 150, 139, 200):
        seen = seen_of(rng, room, (1, 1))
        mask = masks.from_dense(seen)
        found = attend(x, cu, pickle.loads(pickle.dumps(mask)) if is_pickled else mask)
        torch.testing.assert_close(found, attention_varlen(x, x, x, cu, mask=torch.from_numpy(seen)))
    assert programs.frame_count <= 5


@pytest.mark.needs("jax")
def test_jax(arrays: tuple[np.ndarray, ...], rng: np.random.Generator) -> None:
    """Inside jit, where it is a constant of the program."""
    import jax
    import jax.numpy as jnp

    x = [jnp.asarray(a, jnp.float32) for a in arrays]
    mask, cu = masks.from_dense(seen_of(rng, LONGEST, (1, H))), jnp.asarray(CU)

    def value(q: Any, k: Any, v: Any) -> Any:
        return (attention_varlen(q, k, v, cu, block_mask=mask) * x[3]).sum()

    found = jax.jit(jax.grad(value, (0, 1, 2)))(*x[:3])
    want = both(tuple(np.asarray(a) for a in x), block_mask=mask)
    for a, b in zip(found, want[2:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
