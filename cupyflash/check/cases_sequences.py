"""The named cases of packed sequences and of ranges of keys."""

from __future__ import annotations

from typing import Any

from .case import Case


def _packed(
    name: str,
    level: str,
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...] | None = None,
    head_dim: int = 64,
    *,
    outside: tuple[int, int] = (0, 0),
    **more: Any,
) -> Case:
    """A packed case, with so many rows of q and of k behind its last sequence."""
    total_q, total_k = sum(lengths_q) + outside[0], sum(lengths_k or lengths_q) + outside[1]
    more = {"lengths_q": lengths_q, "lengths_k": lengths_k, **more}
    return Case(f"packed-{name}", level, total_q, total_k, head_dim, len(lengths_q), **more)


PACKED_CASES: tuple[Case, ...] = (
    # lengths
    _packed("one", "quick", (203,), causal=True),
    _packed("equal-d128", "quick", (67, 67, 67), None, 128),
    _packed("two-tiles", "full", (37, 290), causal=True),  # of queries of the Hopper forward, 256 or 192 rows each
    _packed("two-tiles-d128", "full", (21, 240, 3), None, 128, heads_q=1, heads_k=1, window=(200, 0)),
    _packed("unequal", "smoke", (1, 197, 6, 89), causal=True),
    _packed("unequal-d128", "quick", (131, 3, 65), (5, 170, 67), 128, heads_q=4, causal=True),
    _packed("forty-short", "quick", (1, 17, 2, 9, 3, 16, 1, 4) * 5, causal=True),
    _packed("zero-lengths", "quick", (0, 0, 61, 0, 97, 0, 0, 0), causal=True),
    _packed("zero-queries-or-keys", "quick", (31, 0, 45, 0, 7), (0, 67, 71, 0, 0), 80, causal=True, dlse=True),
    _packed("all-empty", "quick", (0, 0, 0), causal=True, dlse=True),
    _packed("no-sequences", "full", (), None, 128),
    _packed("more-queries", "quick", (130, 71), (33, 70), causal=True),
    _packed("more-keys-window-d160", "quick", (17, 66), (150, 131), 160, window=(40, 3)),
    # keys that are not used, rows outside
    _packed("used", "quick", (41, 53, 37), (97, 61, 83), 80, used_k=(0, 37, 83), values="nan_outside", causal=True),
    _packed("used-dlse-d256", "full", (41, 53), (97, 91), 256, used_k=(66, 1), values="nan_outside", dlse=True),
    _packed("outside", "quick", (61, 70), outside=(29, 29), values="nan_outside", causal=True),
    _packed("all-outside", "full", (0, 0), outside=(37, 37), values="nan_outside", dlse=True),
    _packed("outside-d128", "full", (70, 9), (33, 101), 128, outside=(66, 3), values="nan_outside", window=(None, 7)),
    # other options
    _packed("gqa-softcap-d256", "quick", (21, 66, 35), None, 256, heads_q=4, softcap=2.0, scale=0.4, dlse=True),
    _packed("mqa-deterministic", "quick", (101, 30, 67), heads_q=5, heads_k=1, deterministic=True, causal=True),
    _packed("deterministic-d160", "full", (70, 131), None, 160, deterministic=True, window=(30, 10)),
    _packed("softcap-window-gqa", "full", (99, 3, 70), (90, 65, 71), heads_q=6, softcap=1.5, window=(50, -3)),
    _packed("alibi", "quick", (61, 0, 130, 9), (70, 5, 101, 30), heads_q=4, causal=True, alibi=2, dlse=True),
    _packed("alibi-shared-d160", "full", (61, 70), (93, 71), 160, used_k=(60, 71), alibi=1, window=(40, 9)),
    _packed("alibi-outside", "full", (70, 9), outside=(66, 66), values="nan_outside", alibi=2),
    _packed("sink", "quick", (61, 0, 130, 9), (70, 5, 101, 0), heads_q=4, causal=True, sink=True, dlse=True),
    _packed(
        "sink-outside-d160", "full", (70, 9), outside=(66, 66), head_dim=160, values="nan_outside", sink=True, dlse=True
    ),
    _packed("dropout", "quick", (61, 0, 130, 9), (70, 5, 101, 30), heads_q=4, causal=True, dropout_p=0.2, dlse=True),
    _packed("dropout-outside-d160", "full", (70, 9), None, 160, outside=(66, 66), values="nan_outside", dropout_p=0.2),
    # biases and masks, whose positions are those of each sequence
    _packed("bias", "smoke", (61, 0, 130, 9), (70, 5, 101, 30), heads_q=4, causal=True, bias="hqk", dlse=True),
    _packed("bias-used-d128", "quick", (41, 53, 37), (97, 141, 83), 128, used_k=(0, 121, 83), values="nan_outside",
            bias="bhqk fp32 hides", heads_q=4, dropout_p=0.2),
    _packed("bias-outside-d160", "full", (70, 9), (133, 101), 160, outside=(66, 3), values="nan_outside", dlse=True,
            bias="bk hides", sink=True),
    _packed("bias-of-queries", "full", (99, 3, 70), (90, 65, 72), heads_q=6, bias="hq", deterministic=True, alibi=2),
    _packed("bias-mask-d160", "quick", (21, 66, 35), None, 160, heads_q=4, bias="qk turned + bk bool", softcap=2.0,
            window=(50, 3)),
    _packed("mask-range", "quick", (1, 130, 6, 89), causal=True, values="nan_outside", bias="bqk bool", mods="capped",
            ranges=((0, 1), (65, 130), (6, 6), (7, 80))),
    _packed("mask-of-keys", "quick", (61, 0, 130, 9), (70, 5, 101, 30), heads_q=4, bias="bk bool", causal=True),
    _packed("mask-tiles-d128", "quick", (99, 3, 130), (190, 65, 71), 128, heads_q=4, heads_k=2, dlse=True,
            bias="bhqk bool tiles", deterministic=True),
    _packed("bias-mask-tiles", "full", (130, 89, 6), (150, 101, 70), heads_q=4, bias="hqk + bqk bool tiles",
            outside=(9, 9), values="nan_outside", causal=True),
    _packed("mask-minus-inf-scores", "full", (70, 1, 60), heads_q=2, values="minus_inf_scores", bias="bqk bool tiles"),
    # block masks, whose tiles are those of each sequence
    _packed("block-mask", "smoke", (150, 0, 75, 67), (173, 5, 60, 70), outside=(9, 9), heads_q=4, causal=True,
            mask="tiles_of_heads", dlse=True),
    _packed("block-mask-d128", "quick", (99, 3, 130), (190, 65, 71), 128, deterministic=True, mask="tiles_of_batch",
            values="nan_in_neighbours", alibi=1),
    _packed("block-mask-bias-range", "full", (130, 89, 6), (150, 101, 70), heads_q=4, mask="tiles", bias="hqk",
            values="nan_outside", ranges=((0, 150), (65, 101), (6, 6))),
    # memory
    _packed("bhsd", "quick", (70, 35, 93), heads_q=4, layout="bhsd", memory="bhsd_storage", causal=True),
    _packed("fused-qkv-d128", "quick", (33, 70, 5), None, 128, memory="fused_qkv", causal=True),
    _packed("misaligned", "full", (65, 70), memory="misaligned"),
    # values
    _packed("growing-maxima", "full", (97, 129), (131, 190), values="growing_maxima", causal=True),
    _packed("nan-in-neighbours", "smoke", (63, 66, 65, 1, 70), values="nan_in_neighbours", causal=True),
    _packed("nan-in-neighbours-d128", "full", (13, 50, 7), (130, 9, 65), 128, values="nan_in_neighbours", dlse=True),
    _packed(
        "nan-at-borders", "quick", (15, 33, 19, 31, 17, 30, 35, 29, 31), values="nan_at_borders", heads_q=4, causal=True
    ),
)  # fmt: skip

# Ranges that begin and end within a block of keys, with one, between two; all keys, some, one, none.
RANGE_CASES: tuple[Case, ...] = (
    # left and right padding
    Case("range-left-causal", "smoke", 203, 203, 64, batch=3, causal=True, values="nan_outside",
         ranges=((0, 203), (70, 203), (131, 203))),
    Case("range-left-causal-d128", "quick", 203, 203, 128, batch=2, causal=True, values="nan_outside",
         ranges=((64, 203), (199, 203))),
    Case("range-right", "quick", 70, 323, 64, batch=3, values="nan_outside",
         ranges=((0, 323), (0, 130), (0, 1))),
    Case("range-right-d128", "quick", 131, 203, 128, batch=3, values="nan_outside",
         ranges=((0, 128), (0, 203), (0, 75))),
    Case("range-right-causal-d256", "quick", 131, 203, 256, batch=2, causal=True, values="nan_outside",
         ranges=((0, 64), (0, 139))),
    Case("range-both-d200", "full", 37, 327, 200, batch=2, values="nan_outside", ranges=((65, 259), (130, 131))),
    Case("range-more-queries", "quick", 203, 97, 64, batch=2, causal=True, values="nan_outside",
         ranges=((10, 90), (65, 97))),
    # no keys
    Case("range-none", "quick", 70, 197, 64, batch=4, values="nan_outside", dlse=True,
         ranges=((0, 0), (64, 64), (197, 197), (3, 190))),
    Case("range-none-causal-d256", "full", 70, 131, 256, batch=3, causal=True, values="nan_outside",
         ranges=((131, 131), (128, 131), (0, 0))),
    # other options
    Case("range-window", "quick", 203, 251, 64, batch=2, window=(70, 40), values="nan_outside",
         ranges=((61, 200), (0, 97))),
    Case("range-window-d192", "full", 131, 251, 192, batch=2, window=(70, -9), values="nan_outside",
         ranges=((64, 192), (33, 251))),
    Case("range-gqa-dlse-d256", "full", 67, 203, 256, batch=2, heads_q=2, heads_k=1, causal=True, dlse=True,
         values="nan_outside", ranges=((100, 203), (0, 150))),
    Case("range-alibi", "quick", 203, 203, 64, batch=3, heads_q=4, causal=True, alibi=2, values="nan_outside",
         ranges=((0, 203), (70, 190), (131, 203))),
    Case("range-alibi-softcap-d192", "full", 131, 251, 192, batch=2, softcap=2.0, alibi=1, values="nan_outside",
         window=(90, -9), dlse=True, ranges=((64, 192), (33, 251))),
    Case("range-alibi-none-d256", "full", 70, 131, 256, batch=3, alibi=2, values="nan_outside",
         ranges=((131, 131), (5, 131), (0, 100))),
    Case("range-deterministic", "quick", 203, 323, 64, batch=2, heads_q=4, deterministic=True, causal=True,
         values="nan_outside", ranges=((193, 323), (33, 260))),
    Case("range-deterministic-d128", "full", 203, 323, 128, batch=2, deterministic=True, window=(60, 20),
         values="nan_outside", ranges=((129, 323), (7, 200))),
    Case("range-softcap-scale-negative", "full", 75, 203, 64, batch=2, softcap=2.0, scale=-0.4, values="nan_outside",
         ranges=((65, 203), (0, 70))),
    Case("range-misaligned", "full", 75, 203, 64, batch=2, memory="misaligned", causal=True, values="nan_outside",
         ranges=((7, 203), (0, 190))),
    Case("range-bhsd", "full", 75, 131, 128, batch=2, heads_q=4, layout="bhsd", memory="bhsd_storage",
         values="nan_outside", ranges=((64, 131), (0, 64))),
    # values
    Case("range-none-sink", "full", 70, 197, 64, batch=3, values="nan_outside", dlse=True, sink=True,
         ranges=((0, 0), (64, 64), (3, 190))),
    Case("range-dropout", "full", 70, 197, 64, batch=3, values="nan_outside", dropout_p=0.2, causal=True,
         ranges=((0, 197), (64, 190), (3, 140))),
    Case("range-growing-maxima", "full", 75, 329, 64, batch=2, values="growing_maxima", ranges=((70, 329), (0, 200))),
    Case("range-nan-in-visible-key", "full", 131, 323, 64, batch=2, values="nan_in_visible_key", causal=True,
         ranges=((30, 323), (100, 110))),
    Case("range-inf-in-visible-key", "full", 131, 203, 128, batch=2, values="inf_in_visible_key",
         ranges=((40, 180), (80, 203))),
    Case("range-nan-in-neighbours", "full", 75, 203, 64, batch=3, values="nan_in_neighbours", causal=True,
         ranges=((64, 203), (10, 203), (0, 100))),
    # packed
    _packed("range", "smoke", (1, 130, 6, 89), causal=True, values="nan_outside",
            ranges=((0, 1), (65, 130), (6, 6), (7, 80))),
    _packed("range-used-d128", "quick", (41, 53, 37), (97, 161, 83), 128, used_k=(0, 137, 83), values="nan_outside",
            causal=True, ranges=((0, 97), (60, 161), (64, 70))),
    _packed("range-outside-d256", "quick", (70, 9), (133, 101), 256, outside=(66, 3), values="nan_outside", dlse=True,
            ranges=((64, 133), (0, 33))),
    _packed("range-alibi", "quick", (41, 53, 37), (97, 161, 83), heads_q=4, causal=True, alibi=2, values="nan_outside",
            ranges=((0, 97), (60, 150), (64, 70))),
    _packed("range-deterministic", "full", (99, 3, 70), (190, 65, 71), heads_q=4, window=(150, 20),
            deterministic=True, values="nan_outside", ranges=((100, 190), (0, 65), (0, 64))),
)  # fmt: skip
