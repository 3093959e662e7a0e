"""flash-attn's rotary position embeddings, by torch; `RotaryEmbedding` keeps the tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...einops_names import rearrange, repeat
from ...rotary import (
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
    rotate_half,
)

apply_rotary_emb_func = apply_rotary_emb

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rearrange",
    "repeat",
    "rotate_half",
]


class RotaryEmbedding(torch.nn.Module):
    """Rotates q and k in place, with tables of angles ``position / base ** (2i / dim)`` that grow as needed.

    Args:
        dim: how many columns are rotated.
        base: of the frequencies.
        interleaved: as in `apply_rotary_emb`.
        scale_base: of XPos (Sun et al. 2022), 512 say; None: no scales.
        device: where the frequencies are made.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        columns = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        scale = None if scale_base is None else (columns + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        # Tables of q, and of k where it has scales; flash-attn's own modules read them by these names.
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None
        self._seq_len_cached = 0
        self._kind: Any = None  # of the tables: dtype, device, whether for inference

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """Rotate in place, and return what was given.

        Args:
            qkv: as in `apply_rotary_emb_qkv_`; with kv it is q (batch, seqlen, heads, head_dim).
            kv: (batch, seqlen, 2, heads_k, head_dim).
            seqlen_offset: position of the first row, an integer or (batch,).
            max_seqlen: how many positions tables need; given with a tensor of offsets, which is not waited for.
            num_heads_q: as in `apply_rotary_emb_qkv_`.
        """
        if max_seqlen is not None or not isinstance(seqlen_offset, Tensor):
            most = qkv.shape[1] + int(seqlen_offset) if max_seqlen is None else max_seqlen
            self._update_cos_sin_cache(most, qkv.device, qkv.dtype)
        if self._cos_cached is None:
            self._update_cos_sin_cache(qkv.shape[1], qkv.device, qkv.dtype)
        cos, sin, cos_k, sin_k = self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached
        assert cos is not None
        assert sin is not None
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(
            kv, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, self.interleaved, seqlen_offset
        )

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        """The frequencies, which a subclass may change."""
        columns = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return self.base ** (-columns / self.dim)

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> None:
        """Make tables for so many positions, of a dtype and on a device, unless they are there."""
        device, dtype = torch.device(device or self.inv_freq.device), dtype or torch.get_default_dtype()
        kind = (dtype, device, torch.is_inference_mode_enabled())
        if self._kind == kind and self._seq_len_cached >= seqlen:
            return
        rows = torch.arange(seqlen, device=device, dtype=torch.float32)
        frequencies = self.inv_freq
        if frequencies.dtype is not torch.float32 or frequencies.is_meta:  # cast with the model, which takes digits
            frequencies = self._compute_inv_freq(device)
        angles = torch.outer(rows, frequencies.to(device))
        cos, sin = angles.cos(), angles.sin()
        if self.scale_base is None or self.scale is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
        else:
            scale = self.scale.to(device, torch.float32) ** ((rows - seqlen // 2) / self.scale_base)[:, None]
            self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
            self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)
        self._seq_len_cached, self._kind = seqlen, kind
