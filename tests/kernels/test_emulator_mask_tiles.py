"""A mask or a mask_mod that becomes a block mask on the device: planted bugs (`planted/mutants_masks.py`), and tiles
that are left out.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupyflash import masks
from cupyflash.bias import Bias, own_of
from cupyflash.check.accuracy import Oracle
from cupyflash.check.case_mods import ModInputs
from cupyflash.check.cases import Case, Inputs
from tests.emulator import EmulatorError
from tests.emulator.attention import Session
from tests.emulator.require import require_compiler
from tests.planted.mutants import Bug
from tests.planted.mutants_masks import BACKWARD_MASK_TILES, FORWARD_MASK_TILES

require_compiler()


def _case(name: str, seqlen_q: int, seqlen_k: int, bias: str, head_dim: int = 64, **more: Any) -> Case:
    shape = {"batch": 2, "heads_q": 2, "heads_k": 1, **more}
    return Case(f"mask-tiles-{name}", "full", seqlen_q, seqlen_k, head_dim, **shape, bias=bias)


CASES = {
    "ragged": _case("ragged", 203, 330, "bhqk bool tiles"),
    "chunks": _case("chunks", 200, 336, "bqk bool tiles"),
    "bytes": _case("bytes", 200, 336, "qk bool tiles"),
    "heads": _case("heads", 200, 330, "hqk bool tiles", causal=True),
    "keys": _case("keys", 200, 330, "bk bool tiles"),
    "queries": _case("queries", 200, 330, "bq bool tiles"),
    "one": _case("one", 200, 330, "b bool"),
    "turned": _case("turned", 200, 330, "qk bool tiles turned"),
    "expanded": _case("expanded", 200, 330, "bqk bool tiles whole"),
    "d128": _case("d128", 200, 330, "bqk bool tiles", 128, batch=1),
    "documents": _case("documents", 200, 330, "", mods="documents"),
    "padded": _case("padded", 200, 330, "", mods="padded", sink=True),
    "rows": _case("rows", 200, 330, "", mods="rows", causal=True),
}


@functools.cache
def inputs_of(name: str, nonfinite: bool) -> Inputs:
    """One query sees nothing. Where keys differ, some are hidden from all, by element and by tile; where both differ,
    half of the queries of a tile see all of it, and the others nothing. `nonfinite`: hidden keys of the first sequence
    hold NaN and inf, of one alone, since its queries are computed again, at length.
    """
    x = CASES[name].inputs("bf16")
    if CASES[name].mods:
        return x
    assert x.features.mask is not None
    mask = x.features.mask.copy()
    if min(mask.shape[-2:]) > 1:
        mask[..., :32, :64] = mask[..., 96:128, 64:128] = True
        mask[..., 32:64, :64] = mask[..., 64:96, 64:128] = False
    if mask.shape[-2] > 1:
        mask[..., 5, :] = False
    if mask.shape[-1] > 1:
        mask[..., 130] = mask[..., 192:256] = False
        if nonfinite:
            x.k[0, [130, 200]], x.v[0, [130, 200]] = np.nan, np.inf
    return x.having(mask=mask)


@functools.cache
def oracle(name: str, nonfinite: bool) -> Oracle:
    return Oracle(CASES[name].problem("bf16"), *inputs_of(name, nonfinite))


def given(name: str, nonfinite: bool) -> Inputs:
    """The mask as kernels get it."""
    x = inputs_of(name, nonfinite)
    if x.features.mask is None:
        return x
    if name == "bytes":  # any but 0 shows a key
        bytes_of = np.random.default_rng(0).integers(1, 256, x.features.mask.shape).astype(np.uint8)
        return x.having(mask=np.where(x.features.mask, bytes_of, 0).astype(np.uint8).view(bool))
    if name == "turned":
        return x.having(mask=np.ascontiguousarray(x.features.mask.swapaxes(-1, -2)).swapaxes(-1, -2))
    if name == "expanded":
        return x.having(mask=np.broadcast_to(x.features.mask[:, :1], x.features.mask.shape))
    return x


def wrong(name: str, family: str, *, backward: bool, nonfinite: bool, **more: Any) -> list[str]:
    exact, session = oracle(name, nonfinite), Session.of_family(family, **more)
    inputs = given(name, nonfinite)
    if backward:
        found = exact.judge_backward(*session.backward(inputs, *exact.plain_forward, exact.problem))
    else:
        found = exact.judge_forward(*session.forward(inputs, exact.problem))
    return [str(c) for c in found if not c.passed]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("name", "family"), [*((name, "sm90") for name in CASES), ("ragged", "sm80")])
def test_nothing_is_wrong_without_bugs(name: str, family: str, backward: bool) -> None:
    """The kernel is that of both families."""
    assert not wrong(name, family, backward=backward, nonfinite=True)


@pytest.mark.parametrize("bug", FORWARD_MASK_TILES + BACKWARD_MASK_TILES, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_reported(bug: Bug) -> None:
    def planted() -> list[str]:
        backward = bug in BACKWARD_MASK_TILES
        return wrong(bug.case, bug.family, backward=backward, nonfinite=False, headers=bug.headers())

    if bug.finds:
        with pytest.raises(EmulatorError, match=bug.finds):
            planted()
    else:
        assert planted()


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_a_packed_sequence_that_is_longer_than_the_mask(family: str) -> None:
    """Nothing beyond the mask is read, which the emulator would report; other sequences have what they have anyway."""
    case = Case("longer", "full", 300, 300, 64, 3, 2, 1, lengths_q=(90, 150, 60), lengths_k=(90, 150, 60),
                bias="bqk bool tiles")  # fmt: skip
    x, problem, session = case.inputs("bf16"), case.problem("bf16"), Session.of_family(family)
    assert x.features.mask is not None
    others = np.r_[0:90, 240:300]
    short = x.having(mask=x.features.mask[..., :100, :100].copy())
    less = replace(problem, max_seqlen_q=100, max_seqlen_k=100)
    forward, of_short = session.forward(x, problem), session.forward(short, less)
    for a, b in zip(forward, of_short, strict=True):
        axis = a.shape.index(300)
        assert a.take(others, axis).tobytes() == b.take(others, axis).tobytes()
    whole = session.backward(x, *forward, problem)
    for a, b in zip(whole, session.backward(short, *forward, less), strict=True):
        assert a.take(others, a.shape.index(300)).tobytes() == b.take(others, b.shape.index(300)).tobytes()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_hidden_tiles_are_not_computed(family: str, backward: bool) -> None:
    """As many products as with the block mask of the same keys: of four documents, less than 0.6 of those of all tiles,
    beside a bias, too."""
    case = Case("documents", "full", 512, 512, 64, bias="qk bool")
    x, problem = case.inputs("bf16"), case.problem("bf16")
    document = np.arange(512) // 128
    mask = document[:, None] == document

    def products(inputs: Inputs, **more: Any) -> int:
        own, session = replace(problem, **more), Session.of_family(family, "early", learns=False)
        if backward:
            session.backward(inputs, x.q, np.zeros(own.rows, np.float32), own)
        else:
            session.forward(inputs, own)
        return session.matrix_ops

    alone = products(x.having(mask=mask))
    block_mask = x.having(mask=None, block_mask=masks.from_dense(mask))
    assert alone == products(block_mask, bias=None, block_mask=1)
    mod = ModInputs(None, "document[q] == document[k]", {"document": document})
    by_mod = x.having(mask=None, mods=mod)
    assert alone == products(by_mod, bias=None, mods=mod.bound()[0], mod_shapes=((512,),))
    bias, zeros = Bias("bf16", (False, False, False, True), own_of(mask.shape)), np.zeros((1, 512), x.q.dtype)
    beside, all_shown = (products(x.having(mask=m, bias=zeros), bias=bias) for m in (mask, np.ones_like(mask)))
    assert beside < 0.6 * all_shown
