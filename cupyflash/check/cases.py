"""The one table of named cases that `cupyflash verify` and all tests run: CPU path, emulator and GPU.

A case is a shape, options, where the values come from (`values`) and how the arrays lie in memory (`memory`). Its name
is stable: a failure anywhere is reproduced everywhere with ``case(name).inputs(dtype, seed)``.
"""

from __future__ import annotations

from .case import NUMPY_DTYPE as NUMPY_DTYPE
from .case import Case as Case
from .case import Inputs as Inputs
from .cases_bias import BIAS_CASES as BIAS_CASES
from .cases_combined import COMBINED_CASES as COMBINED_CASES
from .cases_masks import MASK_CASES as MASK_CASES
from .cases_mods import MODS_CASES as MODS_CASES
from .cases_sequences import PACKED_CASES as PACKED_CASES
from .cases_sequences import RANGE_CASES as RANGE_CASES
from .cases_widths import WIDTH_CASES as WIDTH_CASES

LEVELS = ("smoke", "quick", "full")  # each contains the one before


DENSE_CASES: tuple[Case, ...] = (
    # every class of head_dim, >= 5 key blocks of 64, no length a multiple of anything
    Case("dense-d64", "smoke", 257, 323, 64),
    Case("causal-d64", "smoke", 323, 323, 64, causal=True),
    Case("dense-d128", "smoke", 131, 323, 128),
    Case("causal-d128", "smoke", 211, 323, 128, causal=True),
    Case("dense-d8", "quick", 137, 327, 8),
    Case("causal-d16", "quick", 149, 321, 16, causal=True),
    Case("dense-d40", "quick", 97, 325, 40),
    Case("causal-d72", "quick", 101, 322, 72, causal=True),
    Case("dense-d80", "quick", 103, 323, 80),
    Case("causal-d96", "quick", 107, 326, 96, causal=True),
    Case("dense-d192", "quick", 65, 321, 192),
    Case("causal-d200", "quick", 71, 323, 200, causal=True),
    Case("dense-d256", "quick", 67, 327, 256),
    Case("causal-d8", "full", 137, 327, 8, causal=True),
    Case("causal-d40", "full", 97, 325, 40, causal=True),
    Case("causal-d80", "full", 103, 323, 80, causal=True),
    Case("causal-d256", "full", 129, 327, 256, causal=True),
    Case("dense-d24", "full", 67, 193, 24),
    Case("dense-d248", "full", 67, 193, 248),
    # lengths
    Case("one-row", "quick", 1, 317),
    Case("one-row-causal-gqa", "quick", 1, 317, 128, batch=2, heads_q=4, heads_k=1, causal=True),
    Case("one-key", "quick", 97, 1),
    Case("one-by-one", "full", 1, 1, 128, batch=2),
    Case("primes", "quick", 239, 331, 128, batch=3, heads_q=3, heads_k=3),
    Case("more-queries-causal", "smoke", 293, 131, causal=True),
    Case("more-queries-causal-d128", "full", 293, 31, 128, causal=True),
    Case("tile-multiples", "quick", 256, 320, 128, causal=True),
    Case("one-over-tile-multiples", "full", 129, 257, 128, causal=True),
    Case("one-under-tile-multiples", "full", 127, 255, 64, causal=True),
    Case("long-keys", "full", 5, 4099, 64),
    Case("long-causal", "full", 1031, 1031, 64, heads_q=1, heads_k=1, causal=True),
    Case("many-heads", "full", 33, 65, 32, batch=17, heads_q=12, heads_k=4, causal=True),
    # windows
    Case("window", "quick", 251, 323, window=(70, 40)),
    Case("window-left-causal", "quick", 323, 323, 128, window=(64, None), causal=True),
    Case("window-right", "full", 177, 301, window=(None, 90)),
    Case("window-diagonal", "quick", 199, 199, window=(0, 0)),
    Case("window-behind", "quick", 301, 301, window=(100, -37)),
    Case("window-ahead", "full", 301, 301, window=(-37, 100)),
    Case("window-one-key-behind", "full", 173, 173, 128, window=(5, -5)),
    Case("window-more-queries", "full", 307, 111, window=(30, 10)),
    Case("window-sees-nothing", "quick", 61, 67, window=(None, -200)),
    Case("window-wider-than-keys", "full", 97, 131, window=(1000, 1000), causal=True),
    # scale
    Case("scale-zero", "quick", 83, 197, scale=0.0, causal=True),
    Case("scale-negative", "quick", 83, 197, 128, scale=-0.3),
    Case("scale-large", "full", 83, 197, 64, scale=4.0, causal=True),
    # softcap: alone, saturated, and with each option that touches the same hook
    Case("softcap", "smoke", 201, 323, 64, softcap=1.5),
    Case("softcap-causal", "quick", 211, 323, 128, softcap=30.0, scale=1.0, causal=True),
    Case("softcap-gqa-dlse-d256", "quick", 131, 203, 256, heads_q=4, heads_k=2, softcap=5.0, scale=0.5, dlse=True),
    Case("softcap-window-d192", "full", 203, 251, 192, softcap=2.0, window=(70, 40)),
    Case("softcap-scale-negative", "full", 83, 197, 80, softcap=3.0, scale=-0.4, causal=True),
    Case("softcap-scale-zero", "full", 83, 197, softcap=3.0, scale=0.0),
    Case("softcap-deterministic", "full", 201, 323, 64, softcap=10.0, deterministic=True, causal=True),
    Case("softcap-misaligned", "full", 75, 203, 64, softcap=1.5, memory="misaligned"),
    Case("softcap-saturated", "full", 83, 197, 64, softcap=4.0, values="large_scores"),
    Case("softcap-nan-in-visible-key", "full", 131, 203, 64, softcap=4.0, values="nan_in_visible_key", causal=True),
    Case("softcap-inf-in-visible-key", "full", 131, 203, 128, softcap=4.0, values="inf_in_visible_key"),
    Case("softcap-nan-in-hidden-key", "full", 131, 203, 200, softcap=4.0, values="nan_in_hidden_key", window=(90, -9)),
    # ALiBi: alone, with slopes of each sequence, and with each option that touches the same hook
    Case("alibi", "smoke", 201, 323, 64, alibi=1),
    Case("alibi-causal-d128", "smoke", 323, 323, 128, batch=2, causal=True, alibi=2),
    Case("alibi-gqa-dlse-d256", "quick", 131, 203, 256, heads_q=4, heads_k=2, alibi=2, dlse=True, causal=True),
    Case("alibi-softcap", "quick", 157, 203, 64, heads_q=4, heads_k=2, softcap=2.0, alibi=1, dlse=True),
    Case("alibi-softcap-window-d192", "full", 203, 151, 192, softcap=2.0, window=(70, 40), alibi=1),
    Case("alibi-more-queries", "quick", 293, 131, 128, causal=True, alibi=1),
    Case("alibi-window-behind", "full", 251, 301, 64, window=(100, -37), alibi=1, batch=2),
    Case("alibi-sees-nothing", "full", 61, 67, window=(None, -200), alibi=2),
    Case("alibi-scale-negative", "full", 83, 197, 80, scale=-0.4, causal=True, alibi=1),
    Case("alibi-scale-zero", "full", 83, 197, scale=0.0, alibi=2),
    Case("alibi-scale-tiny", "full", 83, 197, scale=1e-30, alibi=1),
    Case("alibi-deterministic", "quick", 201, 323, 64, deterministic=True, causal=True, heads_q=4, alibi=1),
    Case("alibi-misaligned", "full", 75, 203, 64, batch=2, memory="misaligned", alibi=2),
    Case("alibi-bhsd", "quick", 111, 205, batch=2, layout="bhsd", memory="bhsd_storage", causal=True, alibi=1),
    Case("alibi-nan-in-visible-key", "full", 131, 203, 64, values="nan_in_visible_key", causal=True, alibi=1),
    Case("alibi-inf-in-visible-key", "full", 131, 203, 128, values="inf_in_visible_key", alibi=1),
    Case("alibi-nan-in-hidden-key", "full", 131, 203, 200, values="nan_in_hidden_key", window=(90, -9), alibi=1),
    Case("alibi-nan-in-other-batch", "full", 75, 203, 64, batch=2, values="nan_in_other_batch", alibi=2),
    Case("alibi-growing-maxima", "full", 75, 329, 128, values="growing_maxima", alibi=1),
    Case("alibi-empty", "quick", 65, 0, batch=2, alibi=2),
    Case("alibi-empty-batch", "full", 65, 65, batch=0, alibi=1),
    # sinks: alone, and with each option that touches the sum of a row or its lse
    Case("sink", "smoke", 201, 323, 64, sink=True, dlse=True),
    Case("sink-causal-d128", "smoke", 323, 323, 128, batch=2, causal=True, sink=True),
    Case("sink-gqa-dlse-d256", "quick", 131, 203, 256, heads_q=6, heads_k=2, sink=True, dlse=True, causal=True),
    Case("sink-softcap-alibi", "quick", 157, 203, 64, heads_q=4, heads_k=2, softcap=2.0, alibi=1, sink=True, dlse=True),
    Case("sink-window-d192", "full", 203, 151, 192, window=(70, 40), sink=True),
    Case("sink-more-queries", "quick", 293, 131, 128, causal=True, sink=True, dlse=True),
    Case("sink-sees-nothing", "quick", 61, 67, window=(None, -200), sink=True, dlse=True),
    Case("sink-scale-negative", "full", 83, 197, 80, scale=-0.4, causal=True, sink=True),
    Case("sink-scale-zero", "full", 83, 197, scale=0.0, sink=True),
    Case("sink-deterministic", "full", 201, 323, 64, deterministic=True, causal=True, heads_q=4, sink=True),
    Case("sink-misaligned", "full", 75, 203, 64, batch=2, memory="misaligned", sink=True),
    Case("sink-bhsd", "quick", 111, 205, batch=2, layout="bhsd", memory="bhsd_storage", causal=True, sink=True),
    Case("sink-nan-in-visible-key", "full", 131, 203, 64, values="nan_in_visible_key", causal=True, sink=True),
    Case("sink-inf-in-visible-key", "full", 131, 203, 128, values="inf_in_visible_key", sink=True),
    Case("sink-nan-in-hidden-key", "full", 131, 203, 200, values="nan_in_hidden_key", window=(90, -9), sink=True),
    Case("sink-minus-inf-scores", "full", 131, 203, 64, values="minus_inf_scores", sink=True),
    Case("sink-growing-maxima", "full", 75, 329, 128, values="growing_maxima", sink=True),
    Case("sink-scores-in-the-hundreds", "full", 131, 323, 64, values="large_scores", sink=True),
    Case("sink-empty", "quick", 65, 0, batch=2, sink=True, dlse=True),
    Case("sink-empty-batch", "full", 65, 65, batch=0, sink=True),
    # dropout: alone, and with each option that touches P, dP or where they lie
    Case("dropout", "smoke", 201, 323, 64, dropout_p=0.2, dlse=True),
    Case("dropout-causal-d128", "smoke", 323, 323, 128, batch=2, causal=True, dropout_p=0.1),
    Case("dropout-gqa-dlse-d256", "quick", 131, 203, 256, heads_q=6, heads_k=2, dropout_p=0.3, dlse=True, causal=True),
    Case("dropout-half-d80", "quick", 103, 323, 80, batch=2, dropout_p=0.5),
    Case("dropout-nearly-all", "quick", 75, 203, 64, dropout_p=0.999),
    Case(
        "dropout-softcap-alibi-sink",
        "quick",
        157,
        203,
        64,
        heads_q=4,
        heads_k=2,
        softcap=2.0,
        alibi=1,
        sink=True,
        dropout_p=0.2,
        dlse=True,
    ),
    Case("dropout-softcap-window-d192", "full", 203, 151, 192, softcap=2.0, window=(70, 40), dropout_p=0.2),
    Case("dropout-alibi-d200", "full", 131, 151, 200, causal=True, alibi=2, dropout_p=0.2),
    Case("dropout-more-queries", "quick", 293, 131, 128, causal=True, dropout_p=0.25),
    Case("dropout-sees-nothing", "full", 61, 67, window=(None, -200), dropout_p=0.2),
    Case("dropout-scale-negative", "full", 83, 197, 80, scale=-0.4, causal=True, dropout_p=0.2),
    Case("dropout-deterministic", "full", 201, 323, 64, deterministic=True, causal=True, heads_q=4, dropout_p=0.2),
    Case("dropout-misaligned", "full", 75, 203, 64, batch=2, memory="misaligned", dropout_p=0.2),
    Case("dropout-bhsd", "quick", 111, 205, batch=2, layout="bhsd", memory="bhsd_storage", causal=True, dropout_p=0.2),
    Case("dropout-nan-in-visible-key", "full", 131, 203, 64, values="nan_in_visible_key", causal=True, dropout_p=0.2),
    Case("dropout-inf-in-visible-key", "full", 131, 203, 128, values="inf_in_visible_key", dropout_p=0.2),
    Case(
        "dropout-nan-in-hidden-key", "full", 131, 203, 200, values="nan_in_hidden_key", window=(90, -9), dropout_p=0.2
    ),
    Case("dropout-minus-inf-scores", "full", 131, 203, 64, values="minus_inf_scores", dropout_p=0.2),
    Case("dropout-growing-maxima", "full", 75, 329, 128, values="growing_maxima", dropout_p=0.2),
    Case("dropout-empty", "quick", 65, 0, batch=2, dropout_p=0.2, dlse=True),
    # heads
    Case("gqa", "smoke", 113, 323, 64, heads_q=4, heads_k=2, causal=True),
    Case("gqa-six-to-two", "full", 77, 259, 128, heads_q=6, heads_k=2),
    Case("mqa", "quick", 113, 259, 64, heads_q=5, heads_k=1, causal=True),
    Case("mqa-d200", "quick", 131, 70, 200, heads_q=4, heads_k=1, causal=True, dlse=True),
    Case("mqa-d96", "full", 77, 140, 96, heads_q=6, heads_k=1),
    # memory
    Case("bhsd", "quick", 111, 205, batch=2, heads_q=4, heads_k=2, layout="bhsd", memory="bhsd_storage", causal=True),
    Case("fused-qkv", "smoke", 203, 203, 64, batch=2, memory="fused_qkv", causal=True),
    Case("broadcast-batch", "quick", 93, 199, 64, batch=3, memory="broadcast_batch"),
    Case("broadcast-heads", "quick", 93, 199, 128, heads_q=4, heads_k=4, memory="broadcast_heads", causal=True),
    Case("broadcast-dout", "full", 93, 199, 64, memory="broadcast_dout"),
    Case("padded-rows", "quick", 93, 199, 80, batch=2, memory="padded_rows", causal=True),
    Case("misaligned", "quick", 93, 199, 64, batch=2, memory="misaligned", causal=True),
    Case("every-second-row", "full", 93, 199, 128, batch=2, memory="every_second_row"),
    # values
    Case("outliers", "quick", 211, 323, 128, values="outliers"),
    Case("outliers-causal", "full", 323, 323, 64, values="outliers", causal=True),
    Case("growing-maxima", "quick", 75, 329, 64, values="growing_maxima"),
    Case("growing-maxima-causal", "full", 329, 329, 128, values="growing_maxima", causal=True),
    Case("falling-maxima", "quick", 75, 329, 64, values="falling_maxima"),
    Case("falling-maxima-causal", "full", 329, 329, 128, values="falling_maxima", causal=True),
    Case("growing-maxima-window", "full", 203, 329, 256, values="growing_maxima", window=(200, 10)),
    Case("falling-maxima-window", "full", 203, 329, 256, values="falling_maxima", window=(200, 10)),
    Case("scores-in-the-hundreds", "quick", 131, 323, 128, values="large_scores"),
    Case("scores-in-the-hundreds-causal", "full", 323, 323, 64, values="large_scores", causal=True),
    Case("overflow", "smoke", 131, 323, 80, values="overflow"),
    Case("overflow-causal", "full", 131, 323, 128, values="overflow", causal=True),
    Case("nan-in-hidden-key", "smoke", 201, 301, 64, window=(90, -30), values="nan_in_hidden_key"),
    Case("nan-in-hidden-key-causal", "quick", 301, 301, 128, window=(None, -16), values="nan_in_hidden_key"),
    Case("nan-in-hidden-key-d72", "full", 181, 201, 72, window=(90, -30), values="nan_in_hidden_key"),
    Case("nan-in-other-batch", "quick", 75, 203, 64, batch=2, values="nan_in_other_batch"),
    Case("nan-in-other-batch-causal", "full", 203, 203, 128, batch=2, values="nan_in_other_batch", causal=True),
    Case("nan-in-visible-key", "quick", 131, 323, 64, values="nan_in_visible_key"),
    Case("nan-in-visible-key-causal", "smoke", 323, 323, 64, values="nan_in_visible_key", causal=True),
    Case("nan-in-visible-key-window", "full", 323, 323, 128, values="nan_in_visible_key", window=(40, 10)),
    Case("inf-in-visible-key", "quick", 131, 323, 64, values="inf_in_visible_key"),
    Case("inf-in-visible-key-causal", "full", 323, 323, 128, values="inf_in_visible_key", causal=True),
    Case("minus-inf-scores", "quick", 131, 323, 64, values="minus_inf_scores"),
    Case("minus-inf-scores-causal", "full", 323, 323, 64, values="minus_inf_scores", causal=True),
    # gradients
    Case("dlse", "quick", 101, 203, 64, batch=2, dlse=True, causal=True),
    Case("dlse-gqa-masked-rows", "full", 203, 101, 128, heads_q=4, heads_k=2, dlse=True, causal=True),
    Case("deterministic", "smoke", 201, 323, 64, heads_q=4, heads_k=2, deterministic=True, causal=True),
    Case("deterministic-d128", "full", 201, 323, 128, deterministic=True),
    # nothing to do
    Case("empty-batch", "quick", 65, 65, batch=0, causal=True),
    Case("empty-seqlen-q", "quick", 0, 65, batch=2),
    Case("empty-seqlen-k", "quick", 65, 0, batch=2, causal=True, dlse=True),
    Case("empty-seqlens", "full", 0, 0, 128),
)

CASES = DENSE_CASES + PACKED_CASES + RANGE_CASES + BIAS_CASES + MASK_CASES + COMBINED_CASES + MODS_CASES + WIDTH_CASES


def case(name: str) -> Case:
    """The case of that name; KeyError if there is none."""
    return _BY_NAME[name]


def select(
    level: str = "full", dtype: str | None = None, head_dim: int | None = None, tag: str | None = None
) -> list[Case]:
    """The cases of `level` and below, in table order, that have the dtype, head_dim and tag asked for."""
    wanted = LEVELS[: LEVELS.index(level) + 1]
    return [
        c
        for c in CASES
        if c.level in wanted
        and (dtype is None or dtype in c.dtypes)
        and (head_dim is None or head_dim == c.head_dim)
        and (tag is None or tag in c.tags)
    ]


_BY_NAME = {c.name: c for c in CASES}
