"""One attention call, checked: what the user asked for, without framework and without GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .bias import MAX_SEQLEN as MAX_SEQLEN
from .bias import Bias as Bias
from .dropout import STEPS, limit_of, vet_p
from .errors import ArgumentError, UnsupportedError
from .options import LAYOUTS as LAYOUTS
from .options import Window as Window
from .options import make_options
from .scales import MAX_SCALE as MAX_SCALE
from .scales import SOFTCAPS as SOFTCAPS
from .scales import vet_scale, vet_softcap

DTYPES = ("fp16", "bf16", "fp32", "fp64")
HALF = ("fp16", "bf16")
ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8, "bool": 1}
MAX_HEAD_DIM = 256
NO_PAGES = 0, 0, False
KEY_BLOCK = 64  # keys that are read at a time where they lie in pages


@dataclass(frozen=True)
class Problem:
    """Shapes and options of one call, as every backend sees them.

    ``out = softmax(score, over the visible keys) v`` with ``score = scale * q k^T``, or of a `softcap` c
    ``c * tanh(scale * q k^T / c)``; query i sees keys
    ``[i + seqlen_k - seqlen_q - left, i + seqlen_k - seqlen_q + right]`` with ``window = (left, right)``. ``causal`` is
    already folded in: it is ``right = min(right, 0)``.

    `alibi`: how many dimensions the slopes have, (heads_q,) or (batch, heads_q), that take
    ``slope * abs(i + seqlen_k - seqlen_q - j)`` from each score; 0 without. `bias`: what is added to the scores then;
    -inf hides a key. `sink`: each head of q has a logit that the softmax's denominator counts as the score of one
    more key. `dropout`: how many dimensions the seed has by which elements of the softmax are dropped, each with
    `dropout_p`; 0 without.

    Of a packed problem, batch is the number of sequences and seqlen_q and seqlen_k are total_q and total_k, all rows of
    q and of k; what is said of lengths above holds for each sequence with its own (`sequences.parts`). Biases and masks
    then have room for `max_seqlen_q` queries and `max_seqlen_k` keys of each, MAX_SEQLEN if all broadcast along them.
    With a `kv_range`, each sequence has a range of keys beyond which its queries see none.

    `block_mask`: 0 without; with one 1, and 1 more if each sequence has its own, 2 more if each head of q; `tall` as
    BlockMask. `mods`: what a user's expressions make of scores, between softcap and ALiBi; `mod_shapes`: of what they
    read. `pages`: packed keys lie in so many, of `page_size` rows, in the order of a table (launch/prefill.py);
    `whole_pages`: 64 from a multiple of 64 on lie in one; `of_8_bits`: they were written from a cache of 8 bits.
    `head_dim_v`: of v; made with 0, as of q.
    """

    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    scale: float
    window: Window = (None, None)
    deterministic: bool = False
    softcap: float | None = None
    packed: bool = False
    alibi: int = 0
    kv_range: bool = False
    sink: bool = False
    bias: Bias | None = None
    dropout_p: float = 0.0
    dropout: int = 0
    block_mask: int = 0
    tall: bool = False
    mods: str = ""
    mod_shapes: tuple[tuple[int, ...], ...] = ()
    max_seqlen_q: int = MAX_SEQLEN
    max_seqlen_k: int = MAX_SEQLEN
    page_size: int = 0
    pages: int = 0
    whole_pages: bool = False
    of_8_bits: bool = False
    head_dim_v: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of lse."""
        return (self.heads_q, self.seqlen_q) if self.packed else (self.batch, self.heads_q, self.seqlen_q)

    @property
    def widths(self) -> tuple[int, int]:
        """The head_dims, of q and k, and of v."""
        return self.head_dim, self.head_dim_v

    @property
    def dropout_added(self) -> int:
        """(1 - p) * 2^15, rounded, in each half of an int of 32 bits: to two numbers, to see which of both are kept."""
        kept = STEPS - limit_of(self.dropout_p)
        return (kept - (kept == STEPS) * 2 * STEPS) * 2 * STEPS + kept

    @property
    def dropout_inverse(self) -> float:
        """By which what is kept is multiplied."""
        return STEPS / (STEPS - limit_of(self.dropout_p))

    @property
    def causal(self) -> bool:
        """Whether the mask is exactly the causal one."""
        return self.window == (None, 0)

    @property
    def masked(self) -> bool:
        """Whether any query may see fewer than all keys."""
        return self.window != (None, None)

    @property
    def diagonal(self) -> int:
        """The key at which query 0 stands: query i at key i + diagonal, from which masks and ALiBi count."""
        return self.seqlen_k - self.seqlen_q

    def visible(self, query: int) -> tuple[int, int]:
        """The half-open range of keys that query number `query` sees; empty when it sees none."""
        left, right = self.window
        own = query + self.diagonal
        first = 0 if left is None else max(0, own - left)
        end = self.seqlen_k if right is None else min(self.seqlen_k, own + right + 1)
        return (first, end) if first < end else (0, 0)


def make_problem(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[str], *, causal: bool = False, scale: float | None = None,
    window: Window | None = None, layout: str = "bshd", deterministic: bool = False, softcap: float | None = None,
    sequences: int | None = None, alibi: int = 0, kv_range: bool = False, sink: bool = False, bias: Bias | None = None,
    dropout_p: float = 0.0, dropout: int = 0, block_mask: int = 0, tall: bool = False, mods: str = "",
    mod_shapes: tuple[tuple[int, ...], ...] = (), max_seqlens: tuple[int, int] = (MAX_SEQLEN, MAX_SEQLEN),
    pages: tuple[int, int, bool] = NO_PAGES, of_8_bits: bool = False,
) -> Problem:  # fmt: skip
    """Check the shapes and dtypes of q, k, v (in the caller's layout) and the options; return the `Problem`.

    `sequences`: how many there are of packed arrays, which have no dimension for the batch; None: arrays that have one.
    `max_seqlens`: queries and keys of each of them that a bias has room for. `pages`: size, number. Others: `Problem`.

    Raises:
        ArgumentError: for everything that is wrong in itself.
        UnsupportedError: for what is meaningful but beyond this version's limits.
    """
    options = make_options(causal, scale, window, layout, deterministic, softcap, dropout_p)
    batch, seqlen_q, heads_q, head_dim = _bshd("q", shapes[0], options.layout, sequences)
    _, seqlen_k, heads_k, _ = _bshd("k", shapes[1], options.layout, sequences)
    _check_keys(shapes, batch, head_dim, options.layout, sequences)
    _check_dtypes(dtypes)
    _check_heads(heads_q, heads_k)
    check_head_dim("q", head_dim)
    check_head_dim("v", int(shapes[2][-1]))
    _check_lengths(seqlen_q, seqlen_k)
    vet_p(options.dropout_p, dropout)
    scale_of_scores = vet_scale(options.scale, head_dim, dtypes[0])
    names = "max_seqlen_q", "max_seqlen_k", "page_size", "pages", "whole_pages"
    rooms: dict[str, Any] = dict(zip(names, (*max_seqlens, *pages), strict=True))
    return Problem(
        dtypes[0], batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim,
        scale=scale_of_scores,
        window=_window(options.window, options.causal),
        deterministic=options.deterministic,
        softcap=vet_softcap(options.softcap, scale_of_scores, dtypes[0]),
        packed=sequences is not None,
        alibi=alibi,
        kv_range=kv_range,
        sink=sink,
        bias=bias,
        dropout_p=options.dropout_p if dropout else 0.0, dropout=dropout if options.dropout_p else 0,
        block_mask=block_mask, tall=tall and block_mask > 0, mods=mods, mod_shapes=mod_shapes,
        head_dim_v=int(shapes[2][-1]), of_8_bits=of_8_bits,
        **rooms,
    )  # fmt: skip


def _bshd(name: str, shape: Sequence[int], layout: str, sequences: int | None) -> tuple[int, int, int, int]:
    """The four sizes in the order batch, seqlen, heads, head_dim; packed, seqlen is the total."""
    names = ["batch", "seqlen", "heads", "head_dim"] if sequences is None else ["total", "heads", "head_dim"]
    if len(shape) != len(names):
        if layout == "bhsd":
            names[-3:-1] = names[-2], names[-3]
        raise ArgumentError(f"{name}: expected {len(names)} dimensions ({', '.join(names)}), got shape {tuple(shape)}")
    batch, a, b, head_dim = (int(n) for n in (shape if sequences is None else (sequences, *shape)))
    return (batch, a, b, head_dim) if layout == "bshd" else (batch, b, a, head_dim)


def _check_keys(shapes: Sequence[Sequence[int]], batch: int, head_dim: int, layout: str, sequences: int | None) -> None:
    for name, shape in (("k", shapes[1]), ("v", shapes[2])):
        b, _, _, d = _bshd(name, shape, layout, sequences)
        if b != batch:
            raise ArgumentError(f"{name}: expected the batch size of q, {batch}, got {b} (shape {tuple(shape)})")
        if name == "k" and d != head_dim:
            raise ArgumentError(f"k: expected the head_dim of q, {head_dim}, got {d} (shape {tuple(shape)})")
    wanted = (*shapes[1][:-1], shapes[2][-1])
    if tuple(shapes[2]) != wanted:
        raise ArgumentError(f"v: expected the shape of k but for head_dim, {wanted}, got {tuple(shapes[2])}")


def _check_lengths(*lengths: int) -> None:
    for name, length in zip("qk", lengths, strict=True):
        if length > MAX_SEQLEN:
            raise UnsupportedError(f"{name}: expected a sequence length of at most {MAX_SEQLEN}, got {length}")


def _check_dtypes(dtypes: Sequence[str]) -> None:
    for name, dtype in zip("qkv", dtypes, strict=True):
        if dtype not in DTYPES:
            hint = "; its bytes are in another order than this machine's" if dtype.startswith((">", "<")) else ""
            raise ArgumentError(f"{name}: expected a floating-point dtype ({', '.join(DTYPES)}), got {dtype}{hint}")
    for name, dtype in zip("kv", dtypes[1:], strict=True):
        if dtype != dtypes[0]:
            raise ArgumentError(f"{name}: expected the dtype of q, {dtypes[0]}, got {dtype}; cast one of them")


def _check_heads(heads_q: int, heads_k: int) -> None:
    if heads_k == 0 or heads_q % heads_k:
        raise ArgumentError(f"k: expected heads_k to divide heads_q = {heads_q}, got heads_k = {heads_k}")


def check_head_dim(name: str, head_dim: int) -> None:
    """Raise unless kernels and the CPU path take this size; `name`: the argument that asks for it."""
    if head_dim <= 0:
        raise ArgumentError(f"{name}: expected a head_dim of at least 8, got {head_dim}")
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        raise UnsupportedError(
            f"{name}: expected a head_dim that is a multiple of 8 and at most {MAX_HEAD_DIM}, got {head_dim}"
            + ("" if head_dim > MAX_HEAD_DIM else "; pad q, k and v with zeros and give scale explicitly")
        )


def _window(window: Window | None, causal: bool) -> Window:
    left, right = window or (None, None)
    if left is not None and right is not None and left + right < 0:
        raise ArgumentError(
            f"window: expected left + right >= 0, got ({left}, {right}), which hides every key; "
            "write None, not -1, for an unbounded side"
        )
    if causal:
        right = 0 if right is None else min(right, 0)
    return _bound(left), _bound(right)


def _bound(bound: int | None) -> int | None:
    """A bound no sequence can reach is no bound."""
    return None if bound is None or bound > MAX_SEQLEN else max(bound, -MAX_SEQLEN)
