"""PagedCache: pages go from sequence to sequence, and each sequence keeps what was written for it."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import cupyflash
from cupyflash import ArgumentError, CacheFullError, PagedCache, UnsupportedError, attention, attention_with_cache

HEADS, D = 2, 8
Q = np.zeros((1, 1, HEADS, D), np.float32)


def cache_of(pages: int, page_size: int, **more: Any) -> PagedCache:
    found = PagedCache(pages, page_size, heads_k=HEADS, head_dim=D, like=Q, **more)
    found.k[...] = np.nan
    found.v[...] = np.nan
    return found


class Model(RuleBasedStateMachine):
    """Sequences as lists of numbers, against what lies in their pages."""

    @initialize(pages=st.integers(1, 12), page_size=st.integers(1, 5))
    def begin(self, pages: int, page_size: int) -> None:
        self.cache = cache_of(pages, page_size, layers=2)
        self.tokens: dict[int, list[float]] = {}
        self.next = 0.0

    @rule()
    def allocate(self) -> None:
        self.tokens[self.cache.allocate()] = []

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if self.tokens:
            old = data.draw(st.sampled_from(sorted(self.tokens)))
            length = data.draw(st.none() | st.integers(0, len(self.tokens[old])))
            self.tokens[self.cache.fork(old, length)] = self.tokens[old][:length]

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        if self.tokens:
            one = data.draw(st.sampled_from(sorted(self.tokens)))
            length = data.draw(st.integers(0, len(self.tokens[one])))
            self.cache.truncate(one, length)
            del self.tokens[one][length:]

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.tokens:
            one = data.draw(st.sampled_from(sorted(self.tokens)))
            self.cache.free(one)
            del self.tokens[one]

    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True)) if self.tokens else []
        counts = data.draw(st.lists(st.integers(0, 7), min_size=len(chosen), max_size=len(chosen)))
        before = self.cache.free_pages, {one: self.cache.length(one) for one in chosen}
        try:
            places = self.cache.append(chosen, counts)
        except (CacheFullError, ArgumentError):
            assert before == (self.cache.free_pages, {one: self.cache.length(one) for one in chosen})
            return
        new = np.arange(self.next, self.next + sum(counts))
        self.next += sum(counts)
        for layer in range(2):
            k = np.broadcast_to((new + layer)[:, None, None], (len(new), HEADS, D)).astype(np.float32)
            q = np.zeros((len(new), HEADS, D), np.float32)
            attention_with_cache(q, *self.cache[layer], k=k, v=-k, **places)
        for one, start, count in zip(chosen, places["cu_seqlens_q"], counts, strict=False):
            self.tokens[one] += list(new[start : start + count])

    @invariant()
    def each_has_its_own(self) -> None:
        chosen = sorted(self.tokens)
        places = self.cache.places(chosen)
        pages = set()
        for one, row, length in zip(chosen, places["block_table"], places["cache_seqlens"], strict=True):
            used = row[: -(-length // self.cache.page_size)]
            pages |= set(used.tolist())
            for layer in range(2):
                k, v = (x[used].reshape(-1, HEADS, D)[:length, 0, 0] for x in self.cache[layer])
                np.testing.assert_array_equal(k, np.array(self.tokens[one]) + layer)
                np.testing.assert_array_equal(v, -np.array(self.tokens[one]) - layer)
        assert self.cache.free_pages == self.cache.k.shape[1] - len(pages)


TestModel = Model.TestCase


@pytest.mark.needs("torch")
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_fork_copies_its_last_page_when_it_writes(library: str, rng: np.random.Generator) -> None:
    import torch

    x = rng.standard_normal((3, 2, 12, HEADS, D))
    q, k, v = (torch.from_numpy(y) if library == "torch" else y for y in x)
    cache = PagedCache(6, 4, heads_k=HEADS, head_dim=D, like=q)
    a = cache.allocate()
    attention_with_cache(q[:1, :6], *cache[0], k=k[:1, :6], v=v[:1, :6], **cache.append([a], 6), causal=True)
    b = cache.fork(a, 5)
    assert cache.free_pages == 4
    places = cache.append([a, b], 1)
    assert cache.free_pages == 3
    out = attention_with_cache(q[:, 6:7], *cache[0], k=k[:, 6:7], v=v[:, 6:7], **places, causal=True)
    for row, keys in ((0, [(0, i) for i in range(7)]), (1, [(0, i) for i in range(5)] + [(1, 6)])):
        k, v = (np.stack([y[at] for at in keys])[None] for y in x[1:])
        np.testing.assert_allclose(np.asarray(out[row]), attention(x[0][row, None, 6:7], k, v)[0], rtol=1e-12)


def test_tables_are_written_where_they_lie() -> None:
    cache = cache_of(8, 2, max_seqlen=6)
    a, b = cache.allocate(), cache.allocate()
    places = cache.append([a, b], 3)
    table, lengths = places["block_table"], places["cache_seqlens"]
    assert table.shape == (2, 3)
    assert cache.append([a, b], 1, into=places) is places
    assert places["block_table"] is table
    np.testing.assert_array_equal(lengths, [3, 3])
    assert cache.free_pages == 4
    cache.truncate(a, 1)
    cache.places([b, a], into=places)
    np.testing.assert_array_equal(lengths, [4, 1])
    fresh = cache.places([b, a])
    np.testing.assert_array_equal(table[0, :2], fresh["block_table"][0, :2])
    assert table[1, 0] == fresh["block_table"][1, 0]


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore:You are using .torch.load:FutureWarning")  # torch 2.4, unpickling
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_copy_goes_its_own_way(library: str, copied: Callable[[PagedCache], PagedCache]) -> None:
    import torch

    like = Q if library == "numpy" else torch.from_numpy(Q)
    cache = PagedCache(4, 2, heads_k=HEADS, head_dim=D, like=like)
    one = cache.allocate()
    places = cache.append([one], 3)
    other = copied(cache)
    assert other.append([one], 2, into=places) is places
    assert (cache.length(one), other.length(one), cache.free_pages, other.free_pages) == (3, 5, 2, 1)
    assert int(places["cache_seqlens"][0]) == 3
    assert type(other.k) is type(cache.k)


def test_lists_of_any_kind() -> None:
    cache = cache_of(8, 2)
    numbers = [cache.allocate() for _ in range(2)]
    for i, (sequences, counts) in enumerate((
        (numbers, [1, 1]), (np.array(numbers), np.array([1, 1])), (dict.fromkeys(numbers).keys(), (1, 1)),
        ((x for x in numbers), (1 for _ in numbers)),
    )):  # fmt: skip
        np.testing.assert_array_equal(cache.append(sequences, counts)["cache_seqlens"], [i, i])  # type: ignore[arg-type]


INTO = {"block_table": np.zeros((1, 4), np.int32), "cache_seqlens": np.zeros(1, np.int32)}
LISTED = INTO | {"cu_seqlens_q": np.zeros(2, np.int32)}
LOCKED = np.zeros(1, np.int32)
LOCKED.flags.writeable = False
WRONG_INTO: tuple[tuple[Any, Any, str], ...] = (
    (1, {}, "into: expected block_table, cache_seqlens, as such a call for 1 sequences returns, got nothing"),
    (1, LISTED, "got block_table, cache_seqlens, cu_seqlens_q; with cu_seqlens_q are those of counts one by one"),
    ([1], INTO, "into: expected block_table, cache_seqlens, cu_seqlens_q, as such a call for 1 sequences returns, got"),
    (None, LISTED, "got block_table, cache_seqlens, cu_seqlens_q; with cu_seqlens_q are those of counts one by one"),
    (1, [1], "into: expected None or what a call for 1 sequences returned, got builtins.list"),
    (1, INTO | {"block_table": np.zeros((1, 4), np.int64)},
     "into['block_table']: expected int32 of shape (1, 4) on the CPU, as such a call for 1 sequences returns, got "
     "int64 of shape (1, 4) on the CPU"),
    (1, INTO | {"cache_seqlens": np.zeros(1)}, "into['cache_seqlens']: expected int32 of shape (1,) on the CPU"),
    (1, INTO | {"block_table": np.zeros((1, 3), np.int32)}, "into['block_table']: expected int32 of shape (1, 4)"),
    (1, INTO | {"cache_seqlens": LOCKED}, "into['cache_seqlens']: expected an array that can be written"),
    (1, INTO | {"cache_seqlens": [0]}, "into['cache_seqlens']: expected an array of CuPy, NumPy, PyTorch or JAX"),
)  # fmt: skip


@pytest.mark.parametrize(("counts", "into", "message"), WRONG_INTO, ids=range(len(WRONG_INTO)))
def test_where_nothing_can_be_written_nothing_changes(counts: Any, into: Any, message: str) -> None:
    """None: a call of places."""
    cache = cache_of(4, 4, max_seqlen=16)
    one = cache.allocate()
    with pytest.raises(ArgumentError, match=re.escape(message)):
        cache.places([one], into) if counts is None else cache.append([one], counts, into)
    assert (cache.length(one), cache.free_pages) == (0, 4)


@pytest.mark.needs("torch")
def test_into_is_of_the_library_of_the_cache() -> None:
    import torch

    cache = cache_of(3, 4, max_seqlen=16)
    one = cache.allocate()
    into = {name: torch.from_numpy(x) for name, x in INTO.items()}
    with pytest.raises(
        ArgumentError, match=re.escape("into['block_table']: expected an array of numpy, got one of torch")
    ):
        cache.append([one], 1, into)
    assert cache.length(one) == 0


WRONG: tuple[tuple[str, tuple[Any, ...], type[Exception], str], ...] = (
    ("append", ([0], 11), ArgumentError,
     "counts: expected at most 10 more tokens of sequence 0, which has 0, got 11; give PagedCache a larger max_seqlen"),
    ("append", ([0], 13), ArgumentError,
     "counts: expected at most 10 more tokens of sequence 0, which has 0, got 13; give PagedCache a larger max_seqlen"),
    ("append", ([0, 1], 8), CacheFullError,
     "PagedCache: 1 pages too few: 3 of 3 are free; free or truncate a sequence"),
    ("append", ([0], -1), ArgumentError, "counts: expected 1 numbers of at least 0, one a sequence, got [-1]"),
    ("append", ([0], [1, 2]), ArgumentError, "counts: expected 1 numbers of at least 0, one a sequence, got [1, 2]"),
    ("append", ([0], [1.5]), ArgumentError, "counts: expected integers, one a sequence, or one integer, got 1.5"),
    ("append", ([0, 0], 1), ArgumentError, "sequences: expected each once, got [0, 0]"),
    ("append", ([7], 1), ArgumentError, "sequences: expected a number that allocate or fork gave, and"),
    ("fork", (0, 1), ArgumentError, "length: expected 0 to 0, the tokens of sequence 0, got 1"),
    ("truncate", (0, -1), ArgumentError, "length: expected 0 to 0, the tokens of sequence 0, got -1"),
    *(
        (method, arguments, ArgumentError, "sequence: expected a number that allocate or fork gave, and not freed, got")
        for method, arguments in (("free", (True,)), ("free", (np.timedelta64(0, "s"),)), ("truncate", (False, 0)))
    ),
    ("free", (2,), ArgumentError, "sequence: expected a number that allocate or fork gave, and not freed, got 2"),
    ("append", (None, 1), ArgumentError, "sequences: expected numbers of sequences, such as a list, got builtins.None"),
    ("append", (0, 1), ArgumentError, "sequences: expected numbers of sequences, such as a list, got builtins.int"),
    ("places", (0,), ArgumentError, "sequences: expected numbers of sequences, such as a list, got builtins.int"),
    ("append", ([[0]], 1), ArgumentError, "sequences: expected a number that allocate or fork gave, and not"),
    ("fork", ([0],), ArgumentError, "sequence: expected a number that allocate or fork gave, and not freed, got [0]"),
    ("append", ([0], np.array(1)), ArgumentError,
     "counts: expected integers, one a sequence, or one integer, got numpy.ndarray"),
    ("append", ([0], None), ArgumentError,
     "counts: expected integers, one a sequence, or one integer, got builtins.NoneType"),
)  # fmt: skip


@pytest.mark.parametrize(("method", "arguments", "kind", "message"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_named(method: str, arguments: Any, kind: type[Exception], message: str) -> None:
    cache = cache_of(3, 4, max_seqlen=10)
    assert (cache.pages_per_sequence, cache.capacity) == (3, 12)
    for _ in range(2):
        cache.allocate()
    with pytest.raises(kind, match=re.escape(message)):
        getattr(cache, method)(*arguments)
    assert ([cache.length(i) for i in range(2)], cache.free_pages) == ([0, 0], 3)


def test_a_sequence_may_be_a_number_of_numpy() -> None:
    cache = cache_of(3, 4)
    one, other = cache.allocate(), cache.allocate()
    cache.append([one, other], 3)
    cache.free(np.int64(one))
    assert (cache.length(np.int32(other)), cache.free_pages) == (3, 2)
    with pytest.raises(ArgumentError, match="sequence"):
        cache.length(one)


def test_a_sequence_has_no_more_pages_than_the_pool() -> None:
    assert cache_of(3, 4, max_seqlen=2**30).capacity == 12


WRONG_NEW: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"pages": 0}, ArgumentError, "pages: expected 1 to 2147483647, got 0"),
    ({"heads_k": 2**63}, ArgumentError, "heads_k: expected 1 to 2147483647, got"),
    ({"dtype": np.dtype("int8")}, ArgumentError, "dtype: expected None, for that of like, 'int8' or 'float8_e4m3fn'"),
    ({"page_size": 1.0}, ArgumentError, "page_size: expected an integer, got 1.0"),
    ({"head_dim": 12}, UnsupportedError, "head_dim: expected a head_dim that is a multiple of 8"),
    ({"head_dim_v": 12}, UnsupportedError, "head_dim_v: expected a head_dim that is a multiple of 8"),
    ({"head_dim_v": 8.0}, ArgumentError, "head_dim_v: expected an integer or None, got 8.0"),
    ({"max_seqlen": 0}, ArgumentError, "max_seqlen: expected 1 to 2147483647, got 0"),
    ({"like": "fp16"}, ArgumentError, "like: expected an array of CuPy, NumPy, PyTorch or JAX"),
    ({"like": np.zeros(1, int)}, ArgumentError, "like: expected an array of a floating-point dtype"),
)


@pytest.mark.parametrize(("change", "kind", "message"), WRONG_NEW, ids=range(len(WRONG_NEW)))
def test_what_is_wrong_of_a_new_one(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    given = {"pages": 3, "page_size": 4, "heads_k": 1, "head_dim": 8, "like": Q}
    with pytest.raises(kind, match=re.escape(message)):
        PagedCache(**given | change)  # type: ignore[arg-type]


def test_values_of_another_head_dim(rng: np.random.Generator) -> None:
    """As attention to all that was appended; a page that is copied is copied whole."""
    cache = PagedCache(6, 4, heads_k=HEADS, head_dim=D, head_dim_v=24, like=Q)
    assert (cache.k.shape, cache.v.shape) == ((1, 6, 4, HEADS, D), (1, 6, 4, HEADS, 24))
    k, v = (rng.standard_normal((1, 7, HEADS, d), dtype=np.float32) for d in (D, 24))
    q = rng.standard_normal((2, 1, HEADS, D), dtype=np.float32)
    one = cache.allocate()
    attention_with_cache(q[:1], *cache[0], k=k[:, :6], v=v[:, :6], **cache.append([one], 6))
    both = [one, cache.fork(one)]
    new = [np.repeat(x[:, 6:], 2, axis=0) for x in (k, v)]
    out = attention_with_cache(q, *cache[0], k=new[0], v=new[1], **cache.append(both, 1))
    expected = attention(q, np.repeat(k, 2, axis=0), np.repeat(v, 2, axis=0))
    assert out.shape == (2, 1, HEADS, 24)
    np.testing.assert_allclose(out, expected, atol=1e-6)


@pytest.mark.needs("jax")
def test_jax_arrays_cannot_be_written() -> None:
    import jax.numpy as jnp

    with pytest.raises(UnsupportedError, match="like: expected an array of NumPy, CuPy or PyTorch, got one of jax"):
        PagedCache(3, 4, heads_k=1, head_dim=8, like=jnp.zeros(1))


def test_a_full_pool_is_a_memory_error() -> None:
    """But what the whole pool does not hold is an error of whoever asks, since no page that is freed helps."""
    cache = cache_of(3, 4)
    one, two = cache.allocate(), cache.allocate()
    cache.append([one], 9)
    message = "PagedCache: 1 pages too few: 0 of 3 are free; free or truncate a sequence"
    with pytest.raises(CacheFullError, match=message):
        cache.append([two], 1)
    with pytest.raises(ArgumentError, match=r"at most 3 more .* has 9, got 4; give PagedCache more pages"):
        cache.append([one], 4)
    assert (cache.length(one), cache.length(two)) == (9, 0)
    assert issubclass(CacheFullError, MemoryError)
    assert issubclass(CacheFullError, cupyflash.CupyflashError)
