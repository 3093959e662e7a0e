# ruff: noqa: E501 (a bug a line)
"""Bugs planted in dropout."""

from __future__ import annotations

from functools import partial

from .markers import change
from .mutants import Bug

_sm90 = partial(Bug, arch="sm_90")

FORWARD_DROPOUT = (
    Bug("dropout: six rounds of Philox", change("rounds-of-philox", "round < 7", "round < 6"), "dropout"),
    Bug("dropout: neighbouring keys share a number", change("numbers-of-neighbours", "(pair & 0x7fff7fffu)", "(pair & 0x7fffu) * 0x10001u"), "dropout"),
    Bug("dropout: every sequence drops as the first", change("dropout-of-its-sequence", "static_cast<ptx::u32>(sequence)", "0u * sequence"), "dropout-causal-d128"),
    Bug("dropout: every head drops as the first", change("dropout-of-its-head", "static_cast<ptx::u32>(head)", "0u * head"), "dropout"),
    Bug("dropout: what is kept is not multiplied", change("o-of-what-is-kept", "O.scale(factor(p))", "(void)p, (void)O"), "dropout"),
    _sm90("dropout: nothing is dropped on Hopper", change("pairs-dropped", "kept.mask(a, k, i)", "~0u"), "dropout"),
    Bug("dropout: the bits of another pair", change("bits-of-the-pair", "k % 4 * 4 + i", "k % 4 * 4 + (i ^ 1)"), "dropout"),
)  # fmt: skip
BACKWARD_DROPOUT = (
    Bug("dropout: halves of the wrong lane", change("halves-exchanged", "lane ^ 4", "lane ^ 8"), "dropout"),
    _sm90("dropout: halves of the wrong lane on Hopper", change("halves-exchanged", "lane ^ 4", "lane"), "dropout"),
    Bug("dropout: delta without its factor", change("delta-of-what-is-kept", "1.f / p.dropout_inverse", "1.f"), "dropout"),
    Bug("dropout: lse in powers of two beside a bias", change("lse-of-what-is-kept", "(V::kBias ? kLn2 : 1.f)", "1.f"), "bias-dropout"),
    Bug("dropout: dbias of what is dropped", change("dbias-of-what-is-kept", "Dropout<V>::of_kept(kept(row, col), raw)", "raw"), "bias-dropout"),
    _sm90("dropout: dP of what is dropped", change("zero-where-dropped", "kept ? x : 0.f", "(void)kept, x"), "dropout-gqa-dlse-d256"),
)  # fmt: skip
# With an offset beside the seed, as tests/kernels/test_emulator_dropout.py has it.
OFFSET_DROPOUT = (
    Bug("dropout: the offset does not count", change("offset-of-the-seed", "p.dropout == 2", "false"), "dropout"),
)
