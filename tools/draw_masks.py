"""Draws docs/masks.png: what each function of cupyflash.masks makes, for 1024 queries and keys.

    python -m tools.draw_masks

Black is seen; grey lines are the tiles of 64 by 64, of which those without black cost nothing. A pixel is exactly 2
queries by 2 keys, black where one of the four is seen: no line is lost or thinned between pixels.
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
    side, gap, above, dpi = N // 2, 40, 70, 120  # in pixels
    width, height = 4 * (side + gap) + gap, 2 * (side + above) + gap
    figure = plt.figure(figsize=(width / dpi, height / dpi), dpi=dpi)
    for n, (name, mask) in enumerate(SHOWN.items()):
        left, bottom = gap + n % 4 * (side + gap), gap + (1 - n // 4) * (side + above)
        axis = figure.add_axes((left / width, bottom / height, side / width, side / height))
        seen = mask.of(0, 0).reshape(side, 2, side, 2).any(axis=(1, 3))
        axis.imshow(~seen, cmap="gray", vmin=-0.3, interpolation="none")
        axis.set_title(f"{name}\n{mask.density:.0%} of the tiles", fontsize=9)
        axis.set_xticks(np.arange(0, side, 32) - 0.5, labels=[])
        axis.set_yticks(np.arange(0, side, 32) - 0.5, labels=[])
        axis.tick_params(length=0)
        axis.grid(color="0.75", linewidth=0.4)
    figure.text(0.5, 12 / height, "keys", fontsize=9, ha="center")
    figure.text(12 / width, 0.5, "queries", fontsize=9, va="center", rotation="vertical")
    figure.savefig(Path(__file__).resolve().parents[1] / "docs" / "masks.png", dpi=dpi)


if __name__ == "__main__":
    main()
