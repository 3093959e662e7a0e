# ruff: noqa: E501 (a bug a line)
"""Bugs planted where v has another head_dim than q and k: what becomes of marked statements."""

from __future__ import annotations

from .markers import change
from .mutants import Bug

FORWARD_WIDTHS = (
    Bug("as many columns of V as K has", change("columns-of-v-fwd-sm80", "V::kHeadDimV", "V::kHeadDim"), "v-wide-d64"),
    Bug("as many columns of O as Q has", change("columns-of-o-fwd-sm80", "V::kHeadDimV", "V::kHeadDim"), "v-wide-d64"),
    Bug("as many columns of a packed O as Q has", change("columns-of-o-beside-its-neighbour", ", V::kHeadDimV>", ", V::kHeadDim>"), "v-wide-packed", arch="sm_90"),
    Bug("as many columns of O repaired as Q has", change("columns-of-o-repaired", "kDimV", "D"), "v-wide-packed", arch="sm_90"),
)  # fmt: skip

BACKWARD_WIDTHS = (
    Bug("delta of as many columns as Q has", change("columns-of-o-delta", "V::kHeadDimV", "V::kHeadDim"), "v-wide-d64"),
    Bug("columns of dV begin where those of dK do", change("columns-of-dv-bwd-sm80", "part * kColsV", "part * kCols"), "v-narrow-mla-gqa"),
    Bug("as many columns of dV repaired as dK has", change("columns-of-dv-repaired", "kDS ? D : kDimV", "D"), "v-wide-packed", arch="sm_90"),
    Bug("as many columns of dO and V for a bias as Q has", change("columns-of-do-and-v-dbias", "V::kHeadDimV", "V::kHeadDim"), "v-wide-bias-d128"),
    Bug("as many columns of a packed dV as dK has", change("columns-of-dv-bwd-sm90", "Int<kDimV>", "Int<D>"), "v-wide-packed", arch="sm_90"),
    Bug("dP as deep as S", change("depth-of-dp-bwd-sm90", "kDepthV = round_up(kDimV, 16)", "kDepthV = kDepth"), "v-wide-d64", arch="sm_90"),
    Bug("dP as deep as S for dK", change("depth-of-the-role-dkv", "V::kHeadDimV", "V::kHeadDim"), "v-wide-d128", arch="sm_90"),
    Bug("dP as deep as S for dQ", change("depth-of-dp-dq", "V::kHeadDimV", "V::kHeadDim"), "v-wide-d128", arch="sm_90"),
    Bug("dP as deep as S for a bias", change("depth-of-dp-dbias", "V::kHeadDimV", "V::kHeadDim"), "v-wide-bias-d128", arch="sm_90"),
)  # fmt: skip
