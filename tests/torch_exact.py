"""Plain attention by torch, scores and all, by flash-attn's rules: its gradients come from autograd."""

from __future__ import annotations

from typing import Any

import torch


def exact(
    q: Any,
    k: Any,
    v: Any,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    scale: float | None = None,
    slopes: Any = None,
    stored: Any = None,
) -> tuple[Any, Any]:
    """(out, lse) of bshd tensors, in their dtype, float64 say; 0 and +inf for a query that sees no key.

    stored: a dtype that probabilities and out are rounded to, as plain attention of that dtype does.
    """
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = (torch.arange(x.shape[1], device=q.device) for x in (q, k))
    to_the_left = rows[:, None] + k.shape[1] - q.shape[1] - keys
    if slopes is not None:
        scores = scores - slopes[..., None, None] * to_the_left.abs()
    left, right = window
    visible = torch.ones_like(to_the_left, dtype=torch.bool)
    for is_bound, seen in ((left >= 0, to_the_left <= left), (right >= 0, -to_the_left <= right)):
        visible = visible & seen if is_bound else visible
    visible = visible & (to_the_left >= 0) if causal else visible
    some = visible.any(-1, keepdim=True)  # a row without any is computed with zeros, and left out
    scores = scores.masked_fill(some & ~visible, -torch.inf).masked_fill(~some, 0)
    p = scores.softmax(-1).masked_fill(~some, 0) if k.shape[1] else scores
    lse = scores.logsumexp(-1) if k.shape[1] else scores.sum(-1)
    p = p if stored is None else p.to(stored).to(p.dtype)
    out = torch.einsum("bhij,bjhd->bihd", p, v)
    return out if stored is None else out.to(stored), lse.masked_fill(~some[:, 0], torch.inf)


def exact_packed(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, slopes: Any = None, **options: Any) -> tuple[Any, Any]:
    """The same of packed sequences, one by one; rows of no sequence get 0 and +inf."""
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), torch.inf, dtype=q.dtype)
    for b in range(len(cu_q) - 1):
        rows, keys = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_k[b]), int(cu_k[b + 1]))
        own = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
        found, found_lse = exact(q[None, rows], k[None, keys], v[None, keys], slopes=own, **options)
        out = torch.cat((out[: rows.start], found[0], out[rows.stop :]))
        lse = torch.cat((lse[:, : rows.start], found_lse[0], lse[:, rows.stop :]), dim=1)
    return out, lse
