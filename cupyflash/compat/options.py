"""flash-attn's options and conventions in terms of ours, and what it takes that we do not, refused by name."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import Tensor

from ..api import attention
from ..errors import ArgumentError, UnsupportedError
from ..options import number, whole

_HAS_ALIBI = "alibi_slopes" in inspect.signature(attention).parameters


class Given(NamedTuple):
    """The options of a call of flash-attn, in its terms.

    Attributes:
        window_size: (left, right) in keys; what is below 0 is unbounded.
        softcap: 0 for none.
        alibi_slopes: (heads_q,) or (batch, heads_q), fp32; never differentiable.
    """

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Any = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False

    def ours(self, head_dim: int) -> dict[str, Any]:
        """The keyword arguments of `attention` and its kin; `head_dim` as the user gave it, not padded.

        Raises:
            UnsupportedError: slopes where this version has none.
            ArgumentError: window_size is no pair.
        """
        scale = self.softmax_scale
        if scale is None and head_dim:
            scale = head_dim**-0.5
        elif scale is not None and type(scale) is not float:
            scale = number("softmax_scale", scale)
        keywords = {
            "causal": self.causal,
            "scale": scale,
            "window": _window(self.window_size),
            "softcap": _number("softcap", self.softcap) or None,
            "deterministic": self.deterministic,
        }
        if dropout_p := _number("dropout_p", self.dropout_p):
            keywords["dropout_p"] = dropout_p
        if self.alibi_slopes is not None:
            if not _HAS_ALIBI:
                raise UnsupportedError(
                    "alibi_slopes: this version of cupyflash has no ALiBi; leave them out, or give the bias to "
                    "torch.nn.functional.scaled_dot_product_attention as attn_mask"
                )
            if not isinstance(self.alibi_slopes, Tensor):
                kind = type(self.alibi_slopes).__name__
                raise ArgumentError(f"alibi_slopes: expected a torch.Tensor or None, got {kind}")
            keywords["alibi_slopes"] = self.alibi_slopes.detach()
        return keywords


def _number(name: str, x: Any) -> float:
    """0 for None, as flash-attn's callers may have it."""
    return 0.0 if x is None else x if type(x) is float else number(name, x)


def _window(window_size: Any) -> tuple[int | None, int | None] | None:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ArgumentError(
            f"window_size: expected a pair (left, right) of integers, -1 for an unbounded side, got {window_size!r}"
        )
    bounds = (b if b is None or type(b) is int else whole("window_size", b, "integers or None") for b in window_size)
    left, right = (None if bound is None or bound < 0 else bound for bound in bounds)
    return None if left is right is None else (left, right)
