"""The named cases of mods."""

from __future__ import annotations

from .case import Case

MODS_CASES: tuple[Case, ...] = (
    Case("mods", "smoke", 131, 203, 64, batch=2, mods="relative", dlse=True),
    Case("mods-documents-d128", "quick", 203, 203, 128, batch=2, heads_q=2, heads_k=1, mods="documents", causal=True),
    Case("mods-capped-d256", "quick", 131, 203, 256, heads_q=4, heads_k=2, mods="capped", dlse=True),
    Case("mods-hides", "quick", 75, 140, 64, mods="hides", values="nan_in_hidden_key", window=(90, -9),
         deterministic=True),
    Case("mods-every", "quick", 131, 150, 64, batch=2, heads_q=4, heads_k=2, mods="every"),
    Case("mods-every-d128", "full", 131, 150, 128, batch=2, heads_q=4, heads_k=2, mods="every", causal=True),
    Case("mods-functions", "quick", 65, 131, 64, mods="functions"),

    Case("mods-scales", "quick", 140, 203, 64, batch=2, heads_q=4, heads_k=2, mods="scales", causal=True),
    Case("mods-heated-d128", "quick", 131, 150, 128, mods="heated", dlse=True, sink=True),

    Case("mods-softcap-alibi", "quick", 131, 150, 80, mods="capped", softcap=2.0, alibi=1, sink=True),
    Case("mods-alibi-d256", "full", 131, 150, 256, mods="relative", alibi=2, batch=2),
    Case("mods-range-d96", "full", 131, 204, 96, batch=2, mods="documents", values="nan_outside",
         ranges=((65, 204), (3, 140)), causal=True),

    Case("mods-scale-negative", "full", 83, 98, 40, mods="capped", scale=-0.4, causal=True),
    Case("mods-nan-in-visible-key", "full", 131, 203, 64, values="nan_in_visible_key", mods="documents"),
    Case("mods-nan-in-visible-key-d256", "full", 70, 130, 256, values="nan_in_visible_key", mods="documents"),
    Case("mods-adds-nan-hidden", "quick", 70, 150, 64, values="nan_in_hidden_key", mods="adds", dlse=True),
    Case("mods-adds-nan-hidden-d128", "full", 67, 131, 128, values="nan_in_hidden_key", mods="adds",
         causal=True),
    Case("mods-adds-nan-hidden-d256", "full", 67, 101, 256, values="nan_in_hidden_key", mods="adds"),
    Case("mods-repelled-nan", "quick", 70, 130, 64, values="nan_in_visible_key", mods="repelled", causal=True),
    Case("mods-repelled-bias-d128", "full", 67, 131, 128, mods="repelled", bias="hqk", dlse=True),
    Case("mods-misaligned", "full", 75, 103, 64, batch=2, memory="misaligned", mods="relative"),
    Case("mods-bhsd", "full", 111, 105, batch=2, layout="bhsd", memory="bhsd_storage", causal=True, mods="every"),
    Case("mods-packed", "quick", 160, 190, 64, batch=3, lengths_q=(70, 0, 80), lengths_k=(67, 20, 90), mods="relative"),
    Case("mods-packed-d128", "full", 160, 190, 128, batch=3, lengths_q=(70, 0, 80), lengths_k=(67, 20, 90),
         mods="documents", causal=True),
    Case("mods-dropout-block-mask", "quick", 131, 203, 64, batch=2, heads_q=2, heads_k=1, mods="capped", dropout_p=0.3,
         mask="tiles_of_heads"),
    Case("mods-dropout-block-mask-d128", "full", 131, 203, 128, mods="relative", dropout_p=0.2, mask="tiles",
         dlse=True),
    Case("mods-empty", "quick", 65, 0, mods="relative"),
)  # fmt: skip
