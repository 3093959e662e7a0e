"""The table of cases: names, levels, coverage, and arrays that lie in memory as the case says."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from cupyflash.check.case_inputs import MEMORY, VALUES
from cupyflash.check.case_packed import PACKED_VALUES
from cupyflash.check.cases import (
    CASES,
    DENSE_CASES,
    LEVELS,
    NUMPY_DTYPE,
    PACKED_CASES,
    Case,
    case,
    select,
)
from cupyflash.problem import DTYPES

by_name = pytest.mark.parametrize("c", CASES, ids=lambda c: c.name)


def test_names_are_unique_and_kebab_case() -> None:
    names = [c.name for c in CASES]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in names)
    assert case("causal-d64") is next(c for c in CASES if c.name == "causal-d64")
    with pytest.raises(KeyError):
        case("no-such-case")


def test_levels_contain_each_other() -> None:
    smoke, quick, full = (select(level) for level in LEVELS)
    assert 0 < len(smoke) < len(quick) < len(full) == len(CASES)
    assert set(smoke) < set(quick) < set(full)


def test_select_filters() -> None:
    assert {c.head_dim for c in select(head_dim=128)} == {128}
    assert all("gqa" in c.tags and c.heads_q != c.heads_k for c in select(tag="gqa"))
    assert select("smoke", "bf16", 64, "emulator")
    assert not select(head_dim=7)


def test_every_requirement_has_a_case() -> None:
    assert {8, 16, 40, 64, 72, 80, 96, 128, 192, 200, 256} <= {c.head_dim for c in DENSE_CASES}
    assert {c.values for c in DENSE_CASES} == set(VALUES)
    assert {c.memory for c in DENSE_CASES} == set(MEMORY)
    for tag in ("empty", "gqa", "dlse", "deterministic", "strided", "nonfinite", "masked"):
        assert select("quick", tag=tag), tag
    assert any(c.seqlen_q == 1 for c in DENSE_CASES)
    assert any(c.seqlen_k == 1 for c in DENSE_CASES)
    assert any(c.seqlen_q > c.seqlen_k > 0 and c.causal for c in DENSE_CASES)
    assert any(c.layout == "bhsd" for c in DENSE_CASES)
    assert any(c.scale == 0 for c in DENSE_CASES)
    assert any(c.scale is not None and c.scale < 0 for c in DENSE_CASES)
    assert {(c.batch, c.seqlen_q, c.seqlen_k).index(0) for c in select(tag="empty")} == {0, 1, 2}
    assert sum(c.seqlen_k > 5 * 64 - 1 for c in select("quick", tag="emulator")) >= 10


def test_every_requirement_has_a_packed_case() -> None:
    lengths = [(c, c.lengths_q or (), c.lengths_k or c.lengths_q or ()) for c in PACKED_CASES]
    assert {64, 80, 128, 160, 256} == {c.head_dim for c in PACKED_CASES}
    assert set(PACKED_VALUES) <= {c.values for c in PACKED_CASES}
    assert {"fused_qkv", "bhsd_storage", "misaligned"} <= {c.memory for c in PACKED_CASES}
    for tag in ("gqa", "dlse", "deterministic", "softcap", "strided", "masked", "empty", "nonfinite"):
        assert any(tag in c.tags for c in PACKED_CASES), tag
    assert {len(q) for _, q, _ in lengths} >= {0, 1, 40}
    assert any(q[0] == q[-1] == 0 and sum(q) and "0, 0, 0" in str(q) for _, q, _ in lengths)  # several in a row
    assert any(n == 0 < m for _, q, k in lengths for n, m in zip(q, k, strict=True))
    assert any(m == 0 < n for _, q, k in lengths for n, m in zip(q, k, strict=True))
    assert any(n > m > 0 and c.causal for c, q, k in lengths for n, m in zip(q, k, strict=True))
    used = [(u, m) for c, _, k in lengths for u, m in zip(c.used_k or (), k, strict=c.used_k is not None)]
    assert {"none" if u == 0 else "all" if u == m else "part" for u, m in used} == {"none", "all", "part"}
    assert any(c.seqlen_q > sum(q) and c.seqlen_k > sum(k) for c, q, k in lengths)
    assert all("emulator" in c.tags and c.packed for c in PACKED_CASES)
    assert {bool(c.room[1] % 2) for c in PACKED_CASES if c.bias} == {False, True}  # which are read in pairs


def test_packed_inputs() -> None:
    x = next(c for c in PACKED_CASES if c.name == "packed-used").inputs("fp32")
    assert x.features.sequences is not None
    places = x.features.sequences.named().values()
    assert [a.tolist() for a in places] == [[0, 41, 94, 131], [0, 97, 158, 241], [0, 37, 83]]
    assert {a.dtype for a in places} == {np.dtype(np.int32)}
    unused = np.r_[0:97, 134:158]
    assert np.isnan(x.k[unused]).all()
    assert np.isfinite(np.delete(x.v, unused, axis=0)).all()
    x = next(c for c in PACKED_CASES if c.name == "packed-nan-in-neighbours").inputs("fp32")
    assert x.features.sequences is not None
    assert x.features.sequences.cu_seqlens_k is x.features.sequences.cu_seqlens_q
    assert np.flatnonzero(np.isnan(x.dout).all(axis=(1, 2))).tolist() == [*range(63, 129), 194]
    x = next(c for c in PACKED_CASES if c.name == "packed-nan-at-borders").inputs("fp32")
    firsts = [int(np.flatnonzero(np.isnan(a).any(axis=(1, 2)))[0]) for a in (x.k, x.v, x.q, x.dout)]
    assert firsts == [15, 67, 115, 180]


@by_name
def test_inputs(c: Case) -> None:
    for dtype in c.dtypes:
        p, x = c.problem(dtype), c.inputs(dtype)
        batch = () if c.packed else (p.batch,)
        assert x.q.shape == (*batch, p.seqlen_q, p.heads_q, p.head_dim)
        assert x.k.shape == (*batch, p.seqlen_k, p.heads_k, p.head_dim)
        assert (x.dout.shape, x.v.shape) == ((*x.q.shape[:-1], p.head_dim_v), (*x.k.shape[:-1], p.head_dim_v))
        assert {a.dtype for a in x[:4]} == {NUMPY_DTYPE[dtype]}
        assert (x.dlse is not None) == c.dlse
        assert "nonfinite" in c.tags or all(np.isfinite(a).all() for a in x[:4])
        assert c.in_layout(c.in_layout(x.q)).shape == x.q.shape


def test_dtypes_are_known() -> None:
    assert tuple(NUMPY_DTYPE) == DTYPES
    assert all(set(c.dtypes) <= set(DTYPES) for c in CASES)


def test_inputs_depend_on_name_and_seed_only() -> None:
    first, again, other_seed = (case("gqa").inputs("fp32", seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.q, again.q)
    assert (first.q != other_seed.q).any()
    assert not np.array_equal(first.q[:, :101], case("dlse").inputs("fp32", 1).q[:1, :101, :2])
    np.testing.assert_allclose(case("gqa").inputs("fp16", 1).q.astype(np.float32), first.q, rtol=1e-3, atol=1e-6)


def elements(a: np.ndarray) -> tuple[int, ...]:
    """Strides in elements."""
    return tuple(s // a.itemsize for s in a.strides)


@pytest.mark.parametrize("c", [c for c in CASES if "empty" not in c.tags], ids=lambda c: c.name)
def test_memory(c: Case) -> None:
    x = c.inputs("bf16")
    if c.packed:
        x = x._replace(q=x.q[None], k=x.k[None], v=x.v[None], dout=x.dout[None])
    d, heads = c.head_dim, c.heads_q
    assert all(elements(a)[3] == 1 for a in x[:4])
    if c.memory == "fused_qkv":
        assert x.q.base is x.k.base is x.v.base is not None
        assert elements(x.q)[1] == (heads + 2 * c.heads_k) * d
    elif c.memory == "bhsd_storage":
        assert all(c.in_layout(a).flags.c_contiguous for a in x[:4])
    elif c.memory == "broadcast_batch":
        assert elements(x.k)[0] == elements(x.v)[0] == 0 != elements(x.q)[0]
    elif c.memory == "broadcast_heads":
        assert elements(x.k)[2] == elements(x.v)[2] == 0 != elements(x.q)[2]
    elif c.memory == "broadcast_dout":
        assert elements(x.dout) == (0, 0, 0, 1)
    elif c.memory == "padded_rows":
        assert elements(x.q)[1:] == (heads * (d + 8), d + 8, 1)
    elif c.memory == "misaligned":
        assert elements(x.q)[1:] == (heads * (d + 3), d + 3, 1)
        assert x.q.ctypes.data % 4 == 2
    elif c.memory == "every_second_row":
        assert elements(x.q)[1] == 2 * heads * d
    else:
        assert c.memory == "contiguous"
        assert all(a.flags.c_contiguous for a in x[:4])


def test_values_are_what_they_are_called() -> None:
    x, p = case("nan-in-hidden-key").inputs("fp16"), case("nan-in-hidden-key").problem("fp16")
    seen = {key for query in range(p.seqlen_q) for key in range(*p.visible(query))}
    hidden = sorted(set(range(p.seqlen_k)) - seen)
    assert hidden
    assert not np.isfinite(x.k[:, hidden]).any()
    assert np.isfinite(x.k[:, sorted(seen)]).all()
    assert (np.abs(case("overflow").inputs("fp16").q) == 300).all()
    x = case("growing-maxima").inputs("fp64")
    scores = x.q[0, :, 0] @ x.k[0, :, 0].T * case("growing-maxima").problem("fp64").scale
    maxima = [scores[:, start : start + 32].max(axis=1).mean() for start in range(0, 320, 32)]
    assert all(after > before + 1 for before, after in itertools.pairwise(maxima))
