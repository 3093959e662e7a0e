"""The named cases whose v, and so out, has another head_dim than q and k: as in MLA (DeepSeek), and wider ones.

Each carries other axes besides; the pairs of head_dims meet on either side of what tiles are chosen by.
"""

from __future__ import annotations

from .case import Case

WIDTH_CASES: tuple[Case, ...] = (
    Case("v-narrow-mla", "smoke", 149, 322, 192, head_dim_v=128, causal=True),
    Case("v-narrow-mla-gqa", "quick", 131, 203, 192, batch=2, heads_q=4, heads_k=1, head_dim_v=128, dlse=True),
    Case("v-narrow-d64", "quick", 157, 323, 64, head_dim_v=24, causal=True, heads_q=4, heads_k=2, dlse=True),
    Case("v-narrow-d128", "quick", 131, 323, 128, head_dim_v=64, window=(70, 40), deterministic=True),
    Case("v-narrow-d96", "full", 67, 201, 96, head_dim_v=80, softcap=3.0, sink=True),
    Case("v-narrow-d256", "quick", 67, 195, 256, head_dim_v=64, heads_q=4, heads_k=2, causal=True),
    Case("v-wide-d64", "smoke", 149, 322, 64, head_dim_v=128, causal=True, dlse=True),
    Case("v-wide-d40", "quick", 101, 203, 40, head_dim_v=72, heads_q=4, heads_k=2, memory="padded_rows"),
    Case("v-wide-d8", "full", 97, 193, 8, head_dim_v=256, memory="misaligned", causal=True),
    Case("v-wide-d128", "quick", 71, 203, 128, head_dim_v=192, heads_q=4, heads_k=2, deterministic=True, dlse=True),
    Case("v-wide-d80-nan-visible", "full", 131, 203, 80, head_dim_v=96, values="nan_in_visible_key", causal=True),
    Case("v-narrow-mla-nan-visible", "full", 131, 203, 192, head_dim_v=128, values="nan_in_visible_key", causal=True),
    Case("v-narrow-mla-outliers", "full", 207, 303, 192, head_dim_v=128, values="outliers", causal=True),
    Case("v-narrow-d160-range", "full", 131, 251, 160, batch=2, head_dim_v=96, window=(70, -9), alibi=1,
         values="nan_outside", ranges=((64, 192), (33, 251)), dlse=True),
    Case("v-narrow-shares", "full", 70, 190, 64, head_dim_v=32, heads_q=8, heads_k=1, causal=True),
    Case("v-wide-shares", "full", 70, 190, 136, head_dim_v=200, heads_q=8, heads_k=1),
    Case("v-narrow-bias-dropout", "quick", 131, 204, 64, batch=2, heads_q=4, heads_k=2, head_dim_v=40, bias="hqk",
         dropout_p=0.2, dlse=True),
    Case("v-wide-bias-d128", "full", 131, 204, 72, head_dim_v=128, bias="bk fp32 hides", alibi=1, causal=True),
    Case("v-narrow-block-mask", "quick", 131, 330, 128, batch=2, head_dim_v=72, mask="tiles_of_heads", heads_k=1),
    Case("v-wide-mods", "full", 131, 150, 48, head_dim_v=64, mods="relative"),
    Case("v-narrow-packed", "quick", 166, 166, 192, 4, heads_q=4, heads_k=2, head_dim_v=128, causal=True,
         lengths_q=(70, 0, 65, 31), values="nan_outside", dlse=True),
    Case("v-wide-packed", "full", 166, 166, 64, 3, head_dim_v=96, layout="bhsd", lengths_q=(70, 65, 31),
         values="nan_in_neighbours"),
    Case("v-narrow-bhsd", "full", 67, 131, 72, head_dim_v=40, batch=2, layout="bhsd", heads_q=4, heads_k=2,
         causal=True),
)  # fmt: skip
