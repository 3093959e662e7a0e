"""The named cases of biases (`case_bias` says what the words mean)."""

from __future__ import annotations

from .case import Case

# Lengths are even where two neighbouring keys are to be read together, odd where they must not.
BIAS_CASES: tuple[Case, ...] = (
    Case("bias", "smoke", 201, 322, 64, bias="bhqk"),
    Case("bias-causal-d128", "smoke", 323, 324, 128, batch=2, causal=True, bias="hqk fp32"),
    Case("bias-odd", "quick", 101, 323, 64, batch=2, bias="bhqk"),
    Case("bias-odd-d128", "full", 101, 201, 128, bias="qk fp32", causal=True),
    # rows of whole chunks of 16 bytes
    Case("bias-chunks", "smoke", 201, 328, 64, batch=2, heads_q=4, heads_k=2, bias="bhqk", causal=True, dlse=True),
    Case("bias-chunks-window", "quick", 203, 200, 40, batch=2, bias="hqk hides", window=(70, 30), deterministic=True),
    Case("bias-chunks-d128", "quick", 131, 200, 128, batch=2, heads_q=4, heads_k=2, causal=True, bias="hqk fp32"),
    Case("bias-chunks-bhsd", "full", 111, 208, batch=2, layout="bhsd", memory="bhsd_storage", bias="bqk", sink=True),
    Case("bias-chunks-alibi-d80", "full", 131, 264, 80, softcap=2.0, alibi=1, bias="bhqk", window=(70, 30)),
    Case("bias-chunks-far", "full", 75, 328, 64, bias="hqk far"),
    Case("bias-chunks-nan-in-hidden-key", "full", 131, 200, 128, values="nan_in_hidden_key", window=(90, -9),
         bias="hqk"),
    # broadcast along each dimension
    Case("bias-of-heads-and-keys", "quick", 131, 204, 64, batch=2, heads_q=4, heads_k=2, bias="hk"),
    Case("bias-of-keys", "quick", 131, 204, 128, batch=3, heads_q=4, heads_k=2, bias="bk fp32 hides", dlse=True),
    Case("bias-of-queries", "full", 131, 202, 64, batch=2, bias="bhq", dlse=True),
    Case("bias-of-heads", "full", 75, 131, 64, batch=2, bias="h fp32"),
    Case("bias-of-nothing", "full", 75, 131, 80, batch=2, bias="-", dlse=True),
    Case("bias-expanded", "full", 75, 132, 64, batch=2, bias="qk whole"),
    # memory
    Case("bias-turned", "quick", 93, 199, 64, batch=2, heads_q=4, heads_k=2, bias="hqk turned"),
    Case("bias-shifted-d128", "full", 93, 198, 128, bias="bhqk shifted"),
    Case("bias-bhsd", "quick", 111, 206, batch=2, layout="bhsd", memory="bhsd_storage", causal=True, bias="bqk"),
    Case("bias-misaligned", "full", 75, 202, 64, batch=2, memory="misaligned", bias="bhqk"),
    # -inf hides keys, of some rows all
    Case("bias-hides", "smoke", 201, 322, 64, batch=2, bias="bqk hides", dlse=True),
    Case("bias-hides-causal-d128", "quick", 203, 203, 128, heads_q=4, heads_k=2, causal=True, bias="hqk hides"),
    Case("bias-hides-d256", "quick", 131, 204, 256, heads_q=4, heads_k=2, bias="bhqk hides", dlse=True, causal=True),
    Case("bias-masks", "quick", 131, 204, 64, bias="bhqk fp32 masks", backward=False),
    Case("bias-masks-d128", "full", 131, 204, 128, bias="bhqk masks", backward=False),
    # other options
    Case("bias-gqa-dlse-d256", "full", 131, 203, 256, heads_q=4, heads_k=2, bias="hqk", dlse=True),
    Case("bias-softcap-alibi", "quick", 157, 204, 64, heads_q=4, heads_k=2, softcap=2.0, alibi=1, bias="qk", dlse=True),
    Case("bias-softcap-window-d192", "full", 203, 150, 192, softcap=2.0, window=(70, 40), bias="hqk"),
    Case("bias-window-behind", "full", 251, 301, 64, window=(100, -37), bias="bqk fp32", batch=2),
    Case("bias-more-queries", "quick", 293, 131, 128, causal=True, bias="hqk"),
    Case("bias-sees-nothing", "full", 61, 67, window=(None, -200), bias="qk"),
    Case("bias-scale-negative", "full", 83, 198, 80, scale=-0.4, causal=True, bias="hqk"),
    Case("bias-scale-zero", "full", 83, 197, scale=0.0, bias="bhqk"),
    Case("bias-scale-tiny", "full", 83, 198, scale=1e-30, alibi=1, bias="qk fp32"),
    Case("bias-deterministic", "quick", 201, 322, 64, batch=2, deterministic=True, causal=True, heads_q=4, bias="hqk"),
    Case("bias-deterministic-d128", "full", 131, 202, 128, batch=2, deterministic=True, bias="k fp32"),
    Case("bias-range", "quick", 75, 204, 64, batch=2, heads_q=4, heads_k=2, bias="qk", values="nan_outside",
         ranges=((65, 204), (3, 140)), causal=True),
    Case("bias-range-d200", "full", 70, 202, 200, batch=2, bias="bk fp32", values="nan_outside",
         ranges=((64, 192), (0, 0))),
    # values
    Case("bias-far", "quick", 75, 330, 64, bias="hqk far"),
    Case("bias-growing-maxima", "full", 75, 330, 128, values="growing_maxima", bias="qk"),
    Case("bias-nan-in-visible-key", "full", 131, 203, 64, values="nan_in_visible_key", causal=True, bias="qk hides"),
    Case("bias-nan-in-visible-key-d256", "full", 70, 130, 256, values="nan_in_visible_key", bias="qk hides"),
    Case("bias-inf-in-visible-key", "full", 131, 203, 128, values="inf_in_visible_key", bias="qk hides"),
    Case("bias-nan-in-hidden-key", "full", 131, 203, 200, values="nan_in_hidden_key", window=(90, -9), bias="hqk"),
    Case("bias-nan-in-other-batch", "full", 75, 203, 64, batch=2, values="nan_in_other_batch", bias="qk"),
    # masks
    Case("mask", "smoke", 201, 322, 64, batch=2, bias="bqk bool", dlse=True),
    Case("mask-chunks", "quick", 201, 328, 64, batch=2, bias="bqk bool", window=(70, 40)),
    Case("mask-causal-d128", "quick", 203, 323, 128, heads_q=4, heads_k=2, causal=True, bias="hqk bool"),
    Case("mask-of-keys-d256", "quick", 131, 204, 256, batch=2, heads_q=4, heads_k=2, bias="bk bool"),
    Case("mask-turned-window", "full", 131, 204, 64, bias="qk bool turned", window=(70, 40), deterministic=True),
    Case("mask-softcap-alibi", "full", 157, 204, 64, softcap=2.0, alibi=1, bias="bhqk bool shifted", dlse=True),
    Case("mask-range", "full", 131, 204, 64, batch=2, bias="qk bool whole", values="nan_outside",
         ranges=((65, 204), (3, 140)), causal=True),
    Case("mask-nan-in-visible-key", "full", 131, 203, 64, values="nan_in_visible_key", bias="qk bool"),
    Case("mask-sink", "full", 131, 204, 128, bias="hqk bool", sink=True, dlse=True),
    Case("mask-empty", "full", 65, 0, batch=2, bias="q bool"),
    # nothing to do
    Case("bias-empty", "quick", 65, 0, batch=2, bias="hq"),
    Case("bias-empty-batch", "full", 65, 66, batch=0, bias="qk"),
)  # fmt: skip
