"""Draws docs/masks.png: what each function of cupyflash.masks makes, for 1024 queries and keys.

    python -m tools.draw_masks

Black is seen; grey lines are the tiles of 64 by 64, of which those without black cost nothing.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np

from cupyflash import BlockMask, masks

mpl.use("Agg")

import matplotlib.pyplot as plt

N = 1024
DOCUMENTS = np.searchsorted([300, 420, 800], np.arange(N), side="right")
SHOWN: dict[str, BlockMask] = {
    "local(left=150)": masks.local(N, left=150),
    "global_local(window=60, global_tokens=64)": masks.global_local(N, window=60, global_tokens=64),
    "bigbird()": masks.bigbird(N),
    "strided(stride=64)": masks.strided(N, stride=64),
    "butterfly(block=64)": masks.butterfly(N, block=64),
    "causal_document(...)": masks.causal_document(DOCUMENTS),
    "prefix(length=300)": masks.prefix(N, length=300),
    "causal_document(...) & local(left=150)": masks.causal_document(DOCUMENTS) & masks.local(N, left=150),
}


def main() -> None:
    figure, axes = plt.subplots(2, 4, figsize=(14, 8), layout="constrained")
    for axis, (name, mask) in zip(axes.flat, SHOWN.items(), strict=True):
        axis.imshow(~mask.of(0, 0), cmap="gray", vmin=-0.3, interpolation="nearest")
        axis.set_title(f"{name}\n{mask.density:.0%} of the tiles", fontsize=9)
        axis.set_xticks(np.arange(0, N, 64) - 0.5, labels=[])
        axis.set_yticks(np.arange(0, N, 64) - 0.5, labels=[])
        axis.tick_params(length=0)
        axis.grid(color="0.75", linewidth=0.4)
    figure.supxlabel("keys", fontsize=9)
    figure.supylabel("queries", fontsize=9)
    figure.savefig(Path(__file__).resolve().parents[1] / "docs" / "masks.png", dpi=80)


if __name__ == "__main__":
    main()
