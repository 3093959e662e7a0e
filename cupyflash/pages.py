"""A cache of keys and values in pages, for sequences that begin, grow, share a prefix and end: `PagedCache`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import options
from .arrays.adapters import CUPY, NUMPY, TORCH, Native
from .arrays.libraries import TORCH_SUBCLASS, library_of
from .arrays.vetting import vet_tensor
from .cache.pool import Pool, Tokens
from .cache.tables import Tables, lasting
from .errors import ArgumentError, UnsupportedError
from .problem import DTYPES, check_head_dim

_MOST = 2**31 - 1  # pages, rows and lengths are integers of 32 bits


class PagedCache:
    """A pool of pages of keys and values, and which sequence has which of them.

    Which page belongs to whom is known on the host; keys, values, block tables and lengths lie on the device, and no
    method waits for it. A page can belong to several sequences (`fork`); who writes into one that others have too gets
    a copy of it first. For one thread at a time; calls are in the order of the library's current stream.

    Attributes:
        k, v: ``(layers, pages, page_size, heads_k, head_dim)``, of v head_dim_v, plain arrays; ``cache[layer]`` are
            those of a layer.
        page_size: tokens of a page.
        pages_per_sequence: pages that a sequence can have: columns of the block tables.
        capacity: rows of so many pages: what a bias or a block mask must have room for.

    Example:
        >>> import numpy as np
        >>> from cupyflash import attention_with_cache
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 7, 4, 64), dtype=np.float32)
        >>> cache = PagedCache(100, 16, heads_k=4, head_dim=64, like=q)
        >>> a, b = cache.allocate(), cache.allocate()
        >>> places = cache.append([a, b], 7)
        >>> out = attention_with_cache(q, *cache[0], k=k, v=v, **places, causal=True)
        >>> c = cache.fork(a)  # shares what a has so far
        >>> places = cache.append([a, b, c], 1)
        >>> cache.length(c), cache.free_pages
        (8, 97)
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        *,
        heads_k: int,
        head_dim: int,
        head_dim_v: int | None = None,
        like: Any,
        layers: int = 1,
        max_seqlen: int | None = None,
        dtype: str | None = None,
    ) -> None:
        """An empty cache.

        Args:
            pages, page_size: how many pages of how many tokens; each layer has as many.
            heads_k, head_dim: of keys and values.
            head_dim_v: of values, where it is another one (MLA: 128 beside 192); None: head_dim.
            like: a NumPy, CuPy or PyTorch array, the queries say: the arrays are of its library, dtype and device.
            layers: of the model, which share block tables and lengths.
            dtype: None: that of like; "int8" or "float8_e4m3fn": 8 bits, uint8 in CuPy for the latter. Every call then
                gives k_scale and v_scale, one of each head: pages that are copied keep their meaning.
            max_seqlen: tokens that a sequence can have; None: as many as the pool. Block tables have room for them, in
                whole pages.

        Raises:
            ArgumentError, UnsupportedError: an argument is wrong; the message says which.
        """
        self._library, like = _native(like)
        own = self._library.dtype_name(like.dtype)
        if own not in DTYPES:
            raise ArgumentError(f"like: expected an array of a floating-point dtype ({', '.join(DTYPES)}), got {own}")
        if not (dtype is None or (isinstance(dtype, str) and dtype in ("int8", "float8_e4m3fn"))):
            raise ArgumentError(f"dtype: expected None, for that of like, 'int8' or 'float8_e4m3fn', got {dtype!r}")
        pages, self.page_size = _at_least_one("pages", pages), _at_least_one("page_size", page_size)
        heads_k, layers = _at_least_one("heads_k", heads_k), _at_least_one("layers", layers)
        widths = [options.whole("head_dim", head_dim)] * 2
        if head_dim_v is not None:
            widths[1] = options.whole("head_dim_v", head_dim_v, "an integer or None")
        for name, width in zip(("head_dim", "head_dim_v"), widths, strict=True):
            check_head_dim(name, width)
        most = None if max_seqlen is None else _at_least_one("max_seqlen", max_seqlen)
        self.pages_per_sequence = pages if most is None else min(pages, -(-most // self.page_size))
        self.capacity = self.page_size * self.pages_per_sequence
        shape = layers, pages, self.page_size, heads_k
        with lasting(self._library):
            self.k, self.v = (self._library.empty((*shape, width), dtype or own, like) for width in widths)
        self._pool = Pool(pages, self.page_size, most)
        self._tables = Tables(self._library, self.k, self.pages_per_sequence)

    def __getitem__(self, layer: int) -> tuple[Any, Any]:
        """k_cache and v_cache of a layer, ``(pages, page_size, heads_k, head_dim)``, of v head_dim_v."""
        return self.k[layer], self.v[layer]

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has."""
        return self._pool.free

    def length(self, sequence: int) -> int:
        """How many tokens a sequence has."""
        return self._pool.of(sequence).length

    def allocate(self) -> int:
        """A new, empty sequence: the number by which the other methods know it."""
        return self._pool.begin()

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that begins with the first `length` tokens of another (None: all), in the same pages."""
        tokens = self._pool.of(sequence)
        return self._pool.begin(tokens, self._length(sequence, tokens.length if length is None else length))

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first `length` tokens: what was drafted and not accepted, say."""
        self._pool.shorten(self._pool.of(sequence), self._length(sequence, length))

    def free(self, sequence: int) -> None:
        """End a sequence; pages that no other has are free."""
        self._pool.end(sequence)

    def append(
        self, sequences: Sequence[int], counts: int | Sequence[int], into: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Make room for so many more tokens of each sequence, and count them as there: the caller writes them now.

        Args:
            sequences: their numbers, in the order of the batch.
            counts: tokens of each, or one number for all.
            into: what an earlier call for as many sequences returned, with counts of the same kind: it is written
                again, where it lies, for CUDA graphs that read it.

        Returns:
            Arguments of `attention_with_cache` that append k and v in each layer: block_table, cache_seqlens (before
            the append) and, where counts are given one by one, cu_seqlens_q.

        Raises:
            CacheFullError: there are too few free pages.
            ArgumentError: a number is of no sequence, a sequence would be longer than `max_seqlen` or the whole pool,
                or `into` is not what such a call returned. In each case nothing has changed.
        """
        numbers, listed = _numbers(sequences), not isinstance(counts, (int, np.integer))
        each = _counts(counts, len(numbers))
        chosen = self._pool.chosen(numbers)
        found = self._tables.ready(into, len(chosen), listed=listed)
        used = _lengths(chosen)
        copies = self._pool.grow(numbers, chosen, each)
        try:
            for old, new in copies:
                for x in (self.k, self.v):
                    x[:, new] = x[:, old]
            arrays = {"block_table": self._pool.table(chosen), "cache_seqlens": used}
            if listed:
                arrays["cu_seqlens_q"] = np.concatenate(([0], np.cumsum(each))).astype(np.int32)
            self._tables.write(found, arrays)
        except BaseException:  # of the arrays' library, or an interrupt
            self._pool.shrink(chosen, used.tolist(), copies)
            raise
        return found

    def places(self, sequences: Sequence[int], into: dict[str, Any] | None = None) -> dict[str, Any]:
        """The arguments of `attention_with_cache` that read what the sequences have, and append nothing; `into` is what
        such a call returned, or an append of one number for all.
        """
        chosen = self._pool.chosen(_numbers(sequences))
        found = self._tables.ready(into, len(chosen), listed=False)
        self._tables.write(found, {"block_table": self._pool.table(chosen), "cache_seqlens": _lengths(chosen)})
        return found

    def _length(self, sequence: int, x: Any) -> int:
        length, most = options.whole("length", x), self._pool.of(sequence).length
        if not 0 <= length <= most:
            raise ArgumentError(f"length: expected 0 to {most}, the tokens of sequence {sequence}, got {length}")
        return length


def _native(like: Any) -> tuple[Native, Any]:
    """Its library, and the array, of the library's own class."""
    library = library_of("like", like)
    if library is TORCH_SUBCLASS:  # which computes as torch does
        library, like = TORCH, like.as_subclass(sys.modules["torch"].Tensor)
    if library is TORCH:
        vet_tensor("like", like)
    if library not in (NUMPY, CUPY, TORCH):
        raise UnsupportedError(
            f"like: expected an array of NumPy, CuPy or PyTorch, got one of {library.name}, which cannot be written"
        )
    return library, like


def _at_least_one(name: str, x: Any) -> int:
    value = options.whole(name, x)
    if not 1 <= value <= _MOST:
        raise ArgumentError(f"{name}: expected 1 to {_MOST}, got {value}")
    return value


def _listed(name: str, x: Any, what: str) -> list[Any]:
    try:
        return list(x)
    except TypeError:
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise ArgumentError(f"{name}: expected {what}, got {kind}") from None


def _numbers(sequences: Any) -> list[Any]:
    return _listed("sequences", sequences, "numbers of sequences, such as a list")


def _lengths(chosen: Sequence[Tokens]) -> NDArray[np.int32]:
    return np.array([tokens.length for tokens in chosen], np.int32)


def _counts(counts: Any, sequences: int) -> list[int]:
    what = "integers, one a sequence, or one integer"
    if isinstance(counts, (int, np.integer)):
        found = [options.whole("counts", counts, what)] * sequences
    else:
        found = [options.whole("counts", count, what) for count in _listed("counts", counts, what)]
    if len(found) != sequences or min(found, default=0) < 0:
        raise ArgumentError(f"counts: expected {sequences} numbers of at least 0, one a sequence, got {found}")
    return found
