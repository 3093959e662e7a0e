"""Any call of attention over a cache, drawn: what no table of cases thought of."""

from __future__ import annotations

import hypothesis.strategies as st

from cupyflash.check.cache_case import CacheCase
from cupyflash.check.case_masks import MASKS


@st.composite
def words_of(draw: st.DrawFn, kind: str) -> str:
    """Those of a bias or of a mask, as `check.case_bias` has them."""
    own = [d for d in "bhqk" if draw(st.booleans())]
    more = ["", "fp32 hides", "masks", "turned hides", "whole"] if kind == "bias" else ["bool", "bool turned"]
    return f"{''.join(own) or '-'} {draw(st.sampled_from(more))}"


@st.composite
def cache_cases(draw: st.DrawFn, most: int = 70, head_dims: tuple[int, ...] = (8, 16, 64, 80)) -> CacheCase:
    """Of up to four sequences of up to `most` keys each."""
    lengths = tuple(draw(st.lists(st.integers(0, most), min_size=1, max_size=4)))
    one_length = draw(st.sampled_from([False, False, True]))
    lengths = lengths[:1] * len(lengths) if one_length else lengths
    number = st.integers(0, 5) | st.sampled_from([16, 17, 33])
    packed = draw(st.booleans())
    queries = tuple(draw(number) for _ in lengths) if packed else draw(number)
    group, heads_k = draw(st.sampled_from([(1, 2), (2, 2), (3, 1), (8, 1), (32, 1)]))
    head_dim = draw(st.sampled_from(head_dims))
    append = draw(st.booleans())
    rotary = draw(st.sampled_from([0, 8, head_dim])) if append else 0
    new = draw(st.none() | st.integers(0, 5)) if append and not packed and not rotary else None
    page_size = draw(st.none() | st.sampled_from([1, 2, 3, 8, 16, 50]))
    bound = st.none() | st.integers(-20, 40).filter(lambda b: b != -1)  # which warns
    ranges = tuple(sorted(draw(st.tuples(st.integers(0, most), st.integers(0, most)))) for _ in lengths)
    added = draw(st.sampled_from(["", "", "bias", "mask", "bias + mask"]))
    return CacheCase(
        "random", "full", lengths, queries, head_dim, group * heads_k, heads_k,
        capacity=most + 40, page_size=page_size, append=append, new=new, rotary=rotary,
        rotary_interleaved=draw(st.booleans()), rotary_fp32=draw(st.booleans()),
        positions=draw(st.sampled_from([0, 0, 1, 30])), spare=0 if page_size else draw(st.integers(0, 2)),
        causal=draw(st.booleans()), window=draw(st.tuples(bound, bound).filter(lambda w: None in w or sum(w) >= 0)),
        scale=draw(st.sampled_from([None, None, 1.0, -0.2, 0.0])), softcap=draw(st.sampled_from([None, None, 3.0])),
        alibi=draw(st.sampled_from([0, 0, 1, 2])), sink=draw(st.booleans()),
        bias=" + ".join(draw(words_of(kind)) for kind in added.split(" + ") if kind),
        blocks=draw(st.sampled_from(["", "", "", *MASKS])), mask_room=draw(st.sampled_from([0, 0, 1, 100])),
        ranges=draw(st.none() | st.just(tuple((a, b) for a, b in ranges))),
        num_splits=draw(st.sampled_from([None, None, 1, 3])), batch_invariant=draw(st.booleans()),
        mods=draw(st.sampled_from(["", "", "", "relative", "documents", "capped", "hides", "adds", "scales"])),
        nonfinite=draw(st.sampled_from([False, False, True])),
        head_dim_v=draw(st.sampled_from([None, None, *head_dims])),
        stored=draw(st.sampled_from(["", "", "int8", "e4m3"])), scale_dims=draw(st.integers(1, 2)),
        scale_spread=draw(st.sampled_from([1.0, 12.0])), one_length=one_length,
        memory=draw(st.sampled_from(["contiguous", "contiguous", "heads_first", "padded_rows", "misaligned"])),
    )  # fmt: skip
