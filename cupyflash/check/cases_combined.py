"""The named cases of features that meet: a bias, a mask, a block mask, dropout.

Each carries several axes besides: head_dims that take other tiles, pairs of keys or single ones, masks, values.
"""

from __future__ import annotations

from .case import Case

COMBINED_CASES: tuple[Case, ...] = (
    # dropout beside a bias, as T5 trains with, and beside a mask
    Case("bias-dropout", "smoke", 201, 322, 64, batch=2, heads_q=4, heads_k=2, bias="hqk", dropout_p=0.2, dlse=True),
    Case("bias-dropout-d128", "quick", 157, 203, 128, batch=2, bias="bk fp32 hides", dropout_p=0.3, sink=True,
         deterministic=True, dlse=True),
    Case("bias-dropout-d256", "quick", 131, 204, 256, heads_q=4, heads_k=2, bias="hqk hides", dropout_p=0.2,
         causal=True, dlse=True),
    Case("bias-dropout-nan-visible", "full", 131, 203, 64, bias="qk hides", dropout_p=0.2, heads_k=1,
         values="nan_in_visible_key", causal=True),
    Case("mask-dropout", "quick", 157, 203, 64, heads_q=4, heads_k=2, bias="bqk bool", dropout_p=0.2, alibi=1,
         softcap=2.0, dlse=True, deterministic=True),
    Case("mask-dropout-d128", "quick", 203, 322, 128, heads_k=1, bias="hqk bool", dropout_p=0.1, causal=True),
    Case("mask-dropout-range-d256", "full", 131, 204, 256, batch=2, bias="bk bool", dropout_p=0.2,
         values="nan_outside", ranges=((65, 204), (3, 140)), causal=True),
    # a mask beside a bias: of padding and of positions, and any others
    Case("bias-mask", "smoke", 201, 322, 64, batch=2, heads_q=4, heads_k=2, bias="hqk + bk bool", dlse=True),
    Case("bias-mask-d128", "quick", 157, 203, 128, batch=2, heads_k=1, bias="bk fp32 hides + hqk bool turned",
         causal=True, deterministic=True, sink=True),
    Case("bias-mask-dropout-d256", "full", 131, 204, 256, batch=2, heads_k=1, bias="qk hides + bhqk bool",
         dropout_p=0.2, causal=True, dlse=True),
    Case("bias-mask-dropout", "full", 131, 204, 64, bias="hqk + k bool", dropout_p=0.2, alibi=1),
    # block masks
    Case("block-mask-dropout", "quick", 203, 330, 64, batch=2, heads_q=4, heads_k=2, mask="stripes", dropout_p=0.2,
         dlse=True, deterministic=True),
    Case("block-mask-dropout-d128", "quick", 203, 323, 128, batch=2, mask="tiles_of_heads", dropout_p=0.3, causal=True),
    Case("block-mask-dropout-d256", "full", 131, 330, 256, heads_k=1, mask="stripes", dropout_p=0.2, dlse=True),
    Case("block-mask-bias", "quick", 203, 330, 64, batch=2, heads_q=4, heads_k=2, mask="tiles_of_heads", dlse=True,
         bias="hqk"),
    Case("block-bias-mask-dropout-d128", "full", 157, 323, 128, batch=2, mask="tiles_of_batch", sink=True,
         bias="qk fp32 hides + bk bool", dropout_p=0.2, causal=True, deterministic=True),
    Case("block-mask-mask-d256", "full", 131, 204, 256, heads_k=1, mask="tiles", bias="bqk bool", dlse=True),
    Case("block-mask-bias-holes", "full", 157, 203, 64, mask="holes", values="nan_in_hidden_key", bias="hk hides",
         dropout_p=0.2),
    # mods, to whose scores a bias is added
    Case("mods-bias", "quick", 131, 203, 64, batch=2, heads_q=4, heads_k=2, mods="relative", bias="hqk", dlse=True),
    Case("mods-bias-mask-d128", "full", 131, 150, 128, batch=2, heads_k=1, mods="capped", sink=True, alibi=1,
         bias="qk fp32 hides + bk bool", causal=True, deterministic=True),
    Case("mods-mask-d256", "full", 131, 204, 256, batch=2, mods="documents", bias="bqk bool", dropout_p=0.2),
    Case("bias-mask-nan-in-visible-key", "full", 131, 203, 64, bias="qk hides + qk bool", values="nan_in_visible_key"),
)  # fmt: skip
