"""One call of attention over a cache, checked: what the user asked for, without framework and without GPU."""

from __future__ import annotations

from dataclasses import dataclass

from ..bias import MAX_SEQLEN, Bias
from ..options import Window
from ..problem import ITEMSIZE


@dataclass(frozen=True)
class CacheProblem:
    """Shapes and options of one call, as every backend sees them.

    With used = cache_seqlens[b], clamped to 0 to capacity, as the user gave it, and new the keys that are appended to
    sequence b (0 without), the cache holds ``keys = min(used + new, capacity)`` keys of it when its queries look.
    Query i of seqlen_q sees key j if

        i + keys - seqlen_q - left <= j <= i + keys - seqlen_q + right,  0 <= j < keys,  start <= j < end

    with ``window = (left, right)``, where causal is folded in as ``right = min(right, 0)``, and [start, end) its
    kv_range. Its score is that of `Problem`: scale, softcap, ALiBi by the distance ``abs(i + keys - seqlen_q - j)``, a
    bias of query i and key j, of which -inf hides the key, and so does a mask. With a sink, softmax and lse count
    exp(sink[head]) among those of the scores. A query that sees no key has out 0 and lse -inf, or the sink. What the
    cache holds behind the keys has no effect.

    Caches of 8 bits, `stored`, hold multiples of scales: a key is ``k_scale[s, h] * k_cache[s, r, h]`` for head h of
    the row r that lies in slot s, or ``k_scale[h] * ...``, a value likewise.

    Row r of sequence b lies in ``k_cache[s, r]`` with ``s = b``, or ``cache_batch_idx[b]`` where there is one; with
    pages in ``k_cache[block_table[b, r // page_size], r % page_size]``. Sequences and pages are clamped to those that
    the cache has. New rows lie behind: number i goes to row used + i; those beyond the capacity are not written.

    Attributes:
        dtype: of q, caches, k, v and out: "fp16", "bf16", "fp32"; on the CPU also "fp64".
        head_dim: of q and k; head_dim_v: of v and out.
        batch: sequences of the call.
        seqlen_q: queries of each, or, packed, total_q: all rows of q.
        slots: the first dimension of the caches: sequences, or pages of the pool.
        page_size: rows of a page; None: sequences lie whole in the cache.
        capacity: rows that a sequence can have: of a page times pages_per_sequence, or the cache's second dimension.
        seqlen_new: keys that are appended to each sequence; packed, 0 or total_q: to each as many as it has queries.
        alibi: how many dimensions the slopes have; 0 without.
        kv_range: whether each sequence has a range of keys that its queries may see.
        sink: whether heads of q have sinks.
        bias: what is added to scores, a bias, a mask or both; None: nothing.
        block_mask: 0 without; with one as in `Problem`: 1, and 1 more if each sequence has its own, 2 more if each head
            of q. Query i stands at row ``i + keys - seqlen_q`` of its sequence, and sees what the mask shows to that
            row; above row 0 it sees nothing. mask_tiles: how many tiles of rows the mask has, of keys likewise, for all
            rows that a sequence can have.
        mods: a user's expressions of scores, between softcap and ALiBi, of the query's number i among the call's and of
            the key's row j; mod_shapes: of what they read.
        max_seqlen_q: packed, of how many queries of each sequence these have elements; any, if all broadcast along
            them.
        packed: q (total_q, heads_q, head_dim), and k and v likewise, by cu_seqlens_q.
        chosen: whether cache_batch_idx is given.
        rotary_dim: how many columns of q and k, the first ones, are rotated by their position, that of query and of
            new key i being used + i; 0: none. Positions that the tables do not have are not rotated.
        rotary_positions: rows of the tables.
        rotary_interleaved: pairs are columns 2i and 2i + 1 (GPT-J); else i and i + rotary_dim / 2 (GPT-NeoX).
        rotary_dtype: of the tables: dtype or "fp32".
        num_splits: into how many parts the keys of each sequence are split, at most; None: as the plan finds best.
        batch_invariant: whether results must not depend, bit by bit, on what else is in the batch.
        stored: what the caches hold: "int8", "e4m3"; "": elements of dtype.
        scale_dims: of k_scale and v_scale: 1, (heads_k,), or 2, (slots, heads_k); 0 without.
        one_length: whether cache_seqlens is an integer, the same for all sequences. Which one is the launch's to know.
        most_queries: packed, of the sequences that are attended to: those that have more are appended to alone, and
            left to the forward (plan/prefill.py); None: any.
    """

    dtype: str
    batch: int
    seqlen_q: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    slots: int
    page_size: int | None
    capacity: int
    scale: float
    window: Window = (None, None)
    softcap: float | None = None
    alibi: int = 0
    kv_range: bool = False
    packed: bool = False
    chosen: bool = False
    seqlen_new: int = 0
    rotary_dim: int = 0
    rotary_positions: int = 0
    rotary_interleaved: bool = False
    rotary_dtype: str = ""
    num_splits: int | None = None
    batch_invariant: bool = False
    sink: bool = False
    stored: str = ""
    scale_dims: int = 0
    most_queries: int | None = None
    bias: Bias | None = None
    block_mask: int = 0
    mask_tiles: int = 0
    mods: str = ""
    mod_shapes: tuple[tuple[int, ...], ...] = ()
    max_seqlen_q: int = MAX_SEQLEN
    one_length: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the caches."""
        return 1 if self.stored else ITEMSIZE[self.dtype]

    @property
    def widths(self) -> tuple[int, int]:
        """The head_dims, of q and k, and of v."""
        return self.head_dim, self.head_dim_v

    @property
    def own_v(self) -> int:
        """The head_dim of v where it differs from that of q and k; else 0."""
        return self.head_dim_v if self.head_dim_v != self.head_dim else 0

    @property
    def widest(self) -> int:
        """The larger head_dim."""
        return max(self.widths)

    @property
    def by_element(self) -> bool:
        """Whether what becomes of scores is read, or computed, for each of them."""
        return self.bias is not None or self.mods != "" or self.block_mask > 0

    @property
    def masks_alone(self) -> bool:
        """Whether a mask is added, and no bias, so that many queries take it as a block mask."""
        return self.bias is not None and self.bias.dtype == "bool"

    @property
    def pages_per_sequence(self) -> int:
        """Columns of block_table; 0 without pages."""
        return self.capacity // self.page_size if self.page_size else 0

    @property
    def group(self) -> int:
        """Heads of q that share a head of k."""
        return self.heads_q // self.heads_k

    @property
    def rows_q(self) -> tuple[int, ...]:
        """The shape of q and of out, but for head_dim."""
        return (self.seqlen_q, self.heads_q) if self.packed else (self.batch, self.seqlen_q, self.heads_q)

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of lse."""
        return (self.heads_q, self.seqlen_q) if self.packed else (self.batch, self.heads_q, self.seqlen_q)
