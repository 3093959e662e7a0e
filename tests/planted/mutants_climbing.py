# ruff: noqa: E501 (a bug a line)
"""Bugs planted in what the Hopper forward does where its hope for maxima fails, with cases of
`tests/kernels/test_emulator_climbing.py`.
"""

from __future__ import annotations

from functools import partial

from .markers import change
from .mutants import Bug

_sm90 = partial(Bug, arch="sm_90")

CLIMBING = (
    _sm90("lowered however large P is", change("p-that-is-lowered", "4294967296.f", "1.8446744e19f"), "up-to-0"),
    _sm90("lowered by what the maximum was rounded from", change("what-follows-from-m", "(before - m[r]) * factor", "-ptx::lg2(fmaxf(1.f, row_maximum(P, r)))"), "some-stay-far"),
    _sm90("another block while scores climb", change("while-scores-climb", "step(j,", "step(j - 1,"), "bias"),
    _sm90("bias of a listed block for that of the next one while scores climb", change("listed-while-scores-climb", "next);", "listed.block());"), "bias-tiles"),
)  # fmt: skip
