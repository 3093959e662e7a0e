"""Many queries over a cache on the CPU: the forward by a table of pages, alone and beside other queries."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash.check.cache_case import CacheCase, problem_of
from cupyflash.check.cache_inputs import GARBAGE
from cupyflash.check.cache_reference import CacheOracle
from tests.ahead import Ahead
from tests.emulator import EmulatorError, attention, decode
from tests.emulator.attention import small_device
from tests.emulator.decode import CacheSession
from tests.emulator.launch import MODES
from tests.emulator.prefill import PrefillSession
from tests.emulator.require import require_compiler
from tests.planted.mutants import Bug
from tests.planted.mutants_prefill import BACK, BLOCKS, CLAMPED_PAGES, LENGTHS, OUTWEIGHED, PAGES, PARTS

require_compiler()

FAMILIES = ("sm80", "sm90")

CASES = {
    case.name: case
    for case in (
        CacheCase("pages", "full", (33, 0, 70), 130, page_size=16, append=True),
        CacheCase("pages-of-48-d128", "full", (300, 131), 128, 128, page_size=48, window=(90, 5), causal=False),
        CacheCase("pages-of-some-new-d72", "full", (150, 60), 130, 72, page_size=32, append=True, new=7),
        CacheCase("pages-nonfinite", "full", (250, 160), 140, page_size=16, nonfinite=True),
        CacheCase("chosen-d256", "full", (203, 160), 129, 256, spare=2, softcap=3.0),
        CacheCase("contiguous", "full", (101, 40), 150, capacity=255, append=True, alibi=2, memory="heads_first"),
        CacheCase("mixed", "full", (90, 20, 0, 33, 7), (1, 140, 33, 32, 0), page_size=16, append=True, sink=True),
        CacheCase("mixed-many", "full", (3,) * 38, (130, *(0, 1) * 17, 1, 131, 129), heads_q=2, heads_k=1, append=True),
        CacheCase("mixed-ranges-d128", "full", (200, 150), (128, 3), 128, page_size=64, ranges=((20, 190), (5, 100))),
        CacheCase(
            "mixed-d256", "full", (90, 50, 5), (1, 300, 129), 256, heads_q=2, heads_k=1, page_size=64, append=True
        ),
        CacheCase("mixed-none-appended", "full", (150, 160), (5, 140), page_size=16, scale=-0.2),
        CacheCase("one-long-d128", "full", (250,), 130, 128, page_size=16, append=True, softcap=4.0),
        CacheCase("unseen", "full", (100,), 140, page_size=16),
        CacheCase("mixed-long", "full", (700, 0, 90), (131, 129, 2), 72, page_size=32, append=True, nonfinite=True),
        CacheCase("mixed-many-alone", "full", (3, 40), (130, 140), page_size=16, append=True, rotary=32),
        CacheCase("mla", "full", (203,), 130, 192, page_size=16, append=True, nonfinite=True, head_dim_v=128),
        CacheCase("v-wide-mixed", "full", (90, 33), (1, 129), 72, page_size=48, append=True, head_dim_v=96),
        CacheCase("int8", "full", (101, 0), 130, append=True, stored="int8"),
        CacheCase(
            "int8-pages", "full", (250, 40), 130, 128, page_size=48, append=True, new=7, stored="int8", scale_dims=2
        ),
        CacheCase("int8-chosen", "full", (60, 33), 129, spare=2, stored="int8", scale_dims=2, memory="heads_first"),
        CacheCase(
            "e4m3-mixed",
            "full",
            (90, 20, 0, 33),
            (1, 140, 130, 127),
            page_size=16,
            append=True,
            stored="e4m3",
            scale_dims=2,
            nonfinite=True,
            rotary=32,
        ),
        CacheCase("bias-d128", "full", (203, 40), 130, 128, page_size=16, append=True, bias="hqk hides"),
        CacheCase(
            "bias-of-each-mixed",
            "full",
            (90, 20, 33),
            (1, 140, 130),
            page_size=48,
            append=True,
            bias="bhqk",
            window=(90, 5),
            causal=False,
        ),
        CacheCase(
            "mask-mixed", "full", (150, 60), (131, 2), 72, page_size=16, append=True, bias="bqk bool", nonfinite=True
        ),
        CacheCase("bias-and-mask-d256", "full", (120,), 129, 256, bias="hqk fp32 + bk bool"),
        CacheCase("mods", "full", (160, 33), 131, 96, append=True, mods="relative"),
        CacheCase("mods-and-bias-mixed", "full", (90, 20), (132, 7), 128, page_size=16, mods="every", bias="hk"),
        CacheCase("int8-mods-d64", "full", (101, 0), 130, append=True, stored="int8", mods="documents", sink=True),
        CacheCase("blocks-d128", "full", (323, 60), 140, 128, page_size=16, append=True, blocks="tiles"),
        CacheCase("blocks-of-each", "full", (250, 99), 131, page_size=64, blocks="tiles_of_batch", softcap=3.0),
        CacheCase(
            "blocks-mixed",
            "full",
            (190, 7, 130, 0),
            (140, 1, 77, 5),
            72,
            page_size=48,
            append=True,
            sink=True,
            blocks="tiles_of_heads",
        ),
        CacheCase(
            "blocks-ranges", "full", (330, 150), 130, 96, ranges=((70, 430), (0, 190)), blocks="stripes", alibi=1
        ),
        CacheCase(
            "blocks-of-each-mixed",
            "full",
            (450, 7, 230),
            (140, 1, 77),
            80,
            page_size=32,
            append=True,
            blocks="tiles_of_batch",
        ),
        CacheCase("blocks-nonfinite", "full", (300, 200), 130, page_size=16, nonfinite=True, blocks="blocks"),
        CacheCase("mask-padding-d128", "full", (300, 60), 140, 128, page_size=16, append=True, bias="bk bool"),
        CacheCase("mask-of-heads", "full", (150, 60), 131, 64, bias="bhqk bool", capacity=333, softcap=3.0),
        CacheCase("mask-of-queries-mods", "full", (260,), 140, 96, page_size=48, bias="q bool", mods="relative"),
        CacheCase(
            "mask-mixed-heads",
            "full",
            (190, 7, 130),
            (140, 1, 77),
            80,
            page_size=32,
            append=True,
            sink=True,
            bias="hk bool",
        ),
        CacheCase("blocks-above-d256", "full", (60, 200), 129, 256, spare=1, blocks="everything", causal=False),
        CacheCase("blocks-nothing-window", "full", (190,), 130, 64, window=(100, 0), blocks="nothing"),
        CacheCase("int8-blocks-mods", "full", (190, 60), 130, 128, stored="int8", blocks="tiles", mods="relative"),
        CacheCase("e4m3-d96", "full", (333,), 128, 96, capacity=400, stored="e4m3", nonfinite=True, scale_spread=6.0),
    )
}


# Into how many parts keys are divided: also more than there are blocks of keys.
SPLITS = {
    "bias-d128": 2, "mods": 3,
    "pages": 2, "pages-nonfinite": 3, "chosen-d256": 2, "one-long-d128": 3, "unseen": 4, "mixed-d256": 3,
    "mixed-long": 4, "mla": 3,
    "blocks-d128": 2, "blocks-nonfinite": 3, "blocks-above-d256": 2, "blocks-nothing-window": 4,
    "blocks-of-each-mixed": 3, "mask-padding-d128": 2, "mask-of-heads": 3,
}  # fmt: skip


def dtype_of(name: str, family: str) -> str:
    dtypes = ("bf16", "fp16", "fp32") if family == "sm80" and not CASES[name].stored else ("bf16", "fp16")
    return dtypes[list(CASES).index(name) % len(dtypes)]


def inputs_of(case: CacheCase, dtype: str) -> dict[str, np.ndarray]:
    """As the case has them, but v of rows that are not in use is NaN and inf in the last head only. In the others it is
    so large that a weight would show: rows whose sum is not finite are summed again, which takes most of the time."""
    arrays = case.inputs(dtype)
    v = arrays["v_cache"][:, :, :-1]  # where no case has anything that is not finite in use
    if v.dtype.kind != "i":
        v[~np.isfinite(v.astype(np.float32))] = 400
    return arrays


def _rehearse(name: str, family: str, **_: int) -> None:
    arrays = inputs_of(CASES[name], dtype_of(name, family))
    how = PrefillSession(family=family, splits=SPLITS.get(name, 1))
    how.run(arrays, problem_of(arrays, CASES[name].options()))


def with_bug(bug: Bug) -> PrefillSession:
    return PrefillSession(headers=bug.headers(), family=bug.family, splits=SPLITS.get(bug.case, 1))


def _rehearse_with(bug: Bug) -> None:
    arrays = inputs_of(CASES[bug.case], "bf16")
    with_bug(bug).run(arrays, problem_of(arrays, CASES[bug.case].options()))


AHEAD, AHEAD_OF_BUGS = (Ahead(rehearse, attention, decode) for rehearse in (_rehearse, _rehearse_with))


def failures(how: PrefillSession, case: CacheCase, dtype: str = "bf16") -> list[str]:
    arrays = inputs_of(case, dtype)
    p = problem_of(arrays, case.options())
    return [str(x) for x in CacheOracle(p, arrays).judge(*how.run(arrays, p)) if not x.passed]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, family: str, seed: int, request: pytest.FixtureRequest) -> None:
    AHEAD(request)
    how = PrefillSession(seed=seed, family=family, splits=SPLITS.get(name, 1))
    assert not failures(how, CASES[name], dtype_of(name, family))


def outweighed(where: str) -> tuple[CacheCase, dict[str, np.ndarray]]:
    """Keys from 190 on weigh 0 in float64, too, and the last of four parts holds none but such: of some v is not
    finite. `where`: they lie "far" below the others, or have scores of -inf, these alone or "all" keys.
    """
    case = CacheCase("outweighed", "full", (250,), 140, page_size=16, scale=1.0, causal=False)
    arrays = inputs_of(case, "bf16")
    arrays["q"][..., 0] = 1
    if where == "far":
        arrays["q"][:, ::3, :, 0] = 0  # one in three sees them among the others
    pages = arrays["block_table"][0]
    key = np.arange(250)
    low = -2000 if where == "far" else -np.inf
    arrays["k_cache"][pages[key // 16], key % 16, :, 0] = np.where((key < 190) & (where != "all"), 0, low)[:, None]
    for number, x in ((200, np.inf), (201, np.nan)):
        arrays["v_cache"][pages[number // 16], number % 16, :, number % 16] = x
    return case, arrays


def failures_outweighed(how: PrefillSession, where: str) -> list[str]:
    case, arrays = outweighed(where)
    p = problem_of(arrays, case.options())
    return [str(x) for x in CacheOracle(p, arrays).judge(*how.run(arrays, p)) if not x.passed]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("where", ["far", "inf", "all"])
def test_parts_that_weigh_nothing(where: str, family: str) -> None:
    """0 times NaN is NaN, whether a part has that weight or a key of it."""
    for splits in (1, 4):
        assert not failures_outweighed(PrefillSession(family=family, splits=splits), where)


@pytest.mark.parametrize("bug", OUTWEIGHED, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_part_that_is_left_out_is_found(bug: Bug) -> None:
    assert failures_outweighed(PrefillSession(headers=bug.headers(), family=bug.family, splits=4), "far")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["starve", "race lanes"])
def test_orders(mode: str, family: str, seed: int) -> None:
    assert not failures(PrefillSession(mode, seed, family=family), CASES["mixed"])


WILD = CacheCase("wild", "full", (40, 60, 9), (130, 140, 2), page_size=16)


def run_wild(how: PrefillSession) -> None:
    arrays = WILD.inputs("bf16")
    arrays["cache_seqlens"] = np.array([-5, 2**31 - 1, 9], np.int32)
    arrays["block_table"] = np.resize(np.array((0, *GARBAGE), np.int32), arrays["block_table"].shape)
    for name in ("k_cache", "v_cache"):  # so that pages are read again where rows are repaired
        arrays[name][...] = np.nan
    how.run(arrays, problem_of(arrays, WILD.options()))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_tables_that_say_anything(family: str, splits: int) -> None:
    """Nothing outside of a buffer is touched: the emulator would report it."""
    run_wild(PrefillSession("any", family=family, splits=splits))


@pytest.mark.parametrize("family", FAMILIES)
def test_more_sequences_of_many_queries_than_rows_are_for(family: str) -> None:
    """Edges that go back: of three such sequences of 8 bits two have a slot. Nothing outside of a buffer is touched."""
    case = CacheCase("wild-8-bits", "full", (40, 60, 9, 7, 150), (140, 132, 0, 0, 0), page_size=16, stored="e4m3",
                     scale_dims=2)  # fmt: skip
    arrays = case.inputs("bf16")
    arrays["cu_seqlens_q"] = np.array([0, 272, 0, 272, 0, 272], np.int32)
    arrays["cache_seqlens"][1] = 2**31 - 1
    arrays["block_table"] = np.resize(np.array((0, *GARBAGE), np.int32), arrays["block_table"].shape)
    PrefillSession("any", family=family).run(arrays, problem_of(arrays, case.options()))


def run_back(how: PrefillSession, page_size: int | None = 16) -> None:
    """Edges that go back: the last sequence that starts before a row starts behind it."""
    case = CacheCase("back", "full", (40, 60, 9), (243, 0, 0), page_size=page_size, capacity=320, append=True)
    arrays = case.inputs("bf16")
    arrays["cu_seqlens_q"] = np.array([0, 243, 0, 243], np.int32)
    how.run(arrays, problem_of(arrays, case.options()))


@pytest.mark.parametrize("page_size", [16, None])
def test_edges_that_go_back_append_nothing_outside(page_size: int | None) -> None:
    run_back(PrefillSession("any"), page_size)


@pytest.mark.parametrize("bug", BACK, ids=lambda bug: bug.name.replace(" ", "-"))
def test_edges_that_go_back_are_looked_at(bug: Bug) -> None:
    with pytest.raises(EmulatorError, match=bug.finds):
        run_back(PrefillSession("any", headers=bug.headers()))


@pytest.mark.parametrize("bug", PAGES + PARTS + BLOCKS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_planted_bug_is_found(bug: Bug, request: pytest.FixtureRequest) -> None:
    AHEAD_OF_BUGS(request)
    how = with_bug(bug)
    if bug.finds:
        with pytest.raises((EmulatorError, AssertionError), match=bug.finds):
            assert not failures(how, CASES[bug.case])
    else:
        assert failures(how, CASES[bug.case])


@pytest.mark.parametrize("bug", CLAMPED_PAGES, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_missing_clamp_is_reported(bug: Bug) -> None:
    with pytest.raises(EmulatorError, match=bug.finds):
        run_wild(PrefillSession("any", headers=bug.headers(), family=bug.family))


ROWS = CacheCase("rows", "full", (0, 30, 0, 20), (130, 5, 140, 150), page_size=16, capacity=320, append=True)


def run_clamped(how: PrefillSession) -> None:
    """Lengths and edges beyond what there is, which both ways clamp alike."""
    arrays = ROWS.inputs("bf16")
    arrays["cache_seqlens"] = np.array([-5, 30, 2**31 - 1, 20], np.int32)
    arrays["cu_seqlens_q"] = np.array([7, 130, 135, 275, 2_000_000], np.int32)
    table = arrays["block_table"]
    table[...] = np.arange(table.size).reshape(table.shape)
    for name in ("k_cache", "v_cache"):
        arrays[name][...] = np.random.default_rng(0).standard_normal(arrays[name].shape)
    p = problem_of(arrays, ROWS.options())
    alone = CacheSession(small_device("sm_80", 4), MODES["any"]).run(arrays, p)
    for found, expected in zip(how.run(arrays, p), alone, strict=True):
        np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), atol=3e-2)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_that_contradict(family: str, splits: int) -> None:
    run_clamped(PrefillSession("any", family=family, splits=splits))


@pytest.mark.parametrize("bug", LENGTHS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_lengths_clamped_in_another_way_are_found(bug: Bug) -> None:
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run_clamped(PrefillSession("any", headers=bug.headers(), family=bug.family))
