"""What the arrays of a `Spec` hold (`VALUES`) and how each of them lies in memory (`MEMORY`)."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from cupyflash import masks
from cupyflash.check.case_bias import draw_added
from cupyflash.check.cases import Inputs
from cupyflash.check.features import Features

from .spec import Spec

Array = NDArray[Any]
Tensors = tuple[Array, Array, Array, Array]
Rng = np.random.Generator

# ---- What they hold: contiguous float64 ----


def normal(rng: Rng, s: Spec) -> Tensors:
    """N(0, 1)."""
    q, k = s.shapes
    return rng.standard_normal(q), rng.standard_normal(k), rng.standard_normal(k), rng.standard_normal(q)


def outliers(rng: Rng, s: Spec) -> Tensors:
    """A few values are ten times as large."""
    q, k, v, dout = (x * np.where(rng.random(x.shape) < 0.005, 10, 1) for x in normal(rng, s))
    return q, k, v, dout


def constant(rng: Rng, s: Spec) -> Tensors:
    """Each array repeats one row: P is uniform, and dP - delta is 0."""
    q, k, v, dout = (np.broadcast_to(rng.standard_normal(s.d), x.shape).copy() for x in normal(rng, s))
    return q, k, v, dout


def large(rng: Rng, s: Spec) -> Tensors:
    """Scores of tens: few keys decide a row."""
    q, k, v, dout = normal(rng, s)
    return q * min(100.0, 40 / (s.d**0.5 * (abs(s.factor) or 1))), k, v, dout


def _along_keys(rng: Rng, s: Spec, score: Array) -> Tensors:
    """`score` (seqlen_k) is added to the scores of every row, as far as 16 bits can express it."""
    q, k, v, dout = normal(rng, s)
    size = 4 * abs(s.factor) if abs(s.factor) > 1e-3 else 4.0
    q[..., 0] = 4
    k[..., 0] = np.sign(s.factor) * score[None, :, None] / size
    return q, k, v, dout


def growing(rng: Rng, s: Spec) -> Tensors:
    """The maximum grows with every block of keys, by 0.5 to 8."""
    return _along_keys(rng, s, np.arange(s.sk) // 32 * rng.uniform(0.5, 8))


def falling(rng: Rng, s: Spec) -> Tensors:
    """And falls."""
    return _along_keys(rng, s, -(np.arange(s.sk) // 32) * rng.uniform(0.5, 8))


def cliff(rng: Rng, s: Spec) -> Tensors:
    """Scores of 0, then of 11.5 (fp16) or 88: exp of that is beyond fp16, or next to the end of fp32."""
    q, k, v, dout = _along_keys(rng, s, np.where(np.arange(s.sk) < s.sk // 2, 0, 11.5 if s.dtype == "fp16" else 88))
    k[..., 1:] = 0
    return q, k, 8 * v, dout


def dominated(rng: Rng, s: Spec) -> Tensors:
    """One key has 128, 256, ... times the weight of the first one, by head, times 1 and half a rounding step.

    Three columns of k add up to the score, so that 16 bits hold it up to 2^-16; all of v is one number.
    """
    q, k, v, dout = (np.zeros_like(x) for x in normal(rng, s))
    step = 2.0**-7 if s.dtype == "bf16" else 2.0**-10
    score = np.full(k.shape[:3], -24.0)
    score[:, 0] = 0
    score[:, s.sk // 2] = np.log(2.0 ** (7 + np.arange(s.heads) % 8) * (1 + 0.51 * step))
    rest = score / (abs(s.factor) if abs(s.factor) > 1e-2 else 1)
    for column in range(3):
        k[..., column] = rest.astype(s.numpy_dtype)
        rest = rest - k[..., column]
    q[..., :3] = 1 if s.factor > 0 else -1
    return q, k, v + 1.0625, dout + rng.standard_normal(s.d)


def few(rng: Rng, s: Spec) -> Tensors:
    """A few keys stand out together, by up to 9; V and dO are constant or not."""
    score = np.zeros(s.sk)
    score[rng.integers(s.sk, size=rng.integers(1, 9))] = rng.uniform(0, 9)
    q, k, v, dout = _along_keys(rng, s, score)
    if rng.random() < 0.5:
        v, dout = np.ones_like(v), np.ones_like(dout)
    return q, k, v, dout


def hidden(rng: Rng, s: Spec) -> Tensors:
    """NaN and inf in keys that no query sees, and in queries that see no key, in the last head of the last sequence and
    in some others. Rows that are computed again take the emulator long.
    """
    q, k, v, dout = normal(rng, s)
    seen, blind = np.zeros(s.sk, bool), np.zeros(s.sq, bool)
    for i, (first, end) in enumerate(s.visible):
        seen[first:end], blind[i] = True, first == end
    some = {heads: rng.random((s.batch, heads)) < 0.25 for heads in (k.shape[2], q.shape[2])}
    for x, rows in ((k, ~seen), (v, ~seen), (q, blind), (dout, blind)):
        heads = some[x.shape[2]]
        heads[-1, -1] = True
        where = heads[:, None, :] & rows[:, None]
        x[where] = rng.choice([np.nan, np.inf, -np.inf], x[where].shape)
    return q, k, v, dout


def nonfinite(rng: Rng, s: Spec) -> Tensors:
    """NaN and inf in one to three places."""
    tensors = normal(rng, s)
    for _ in range(rng.integers(1, 4)):
        x = tensors[rng.integers(4)]
        x[tuple(rng.integers(x.shape))] = rng.choice([np.nan, np.inf, -np.inf])
    return tensors


def last_infinite(rng: Rng, s: Spec) -> Tensors:
    """inf in v and in dout, in the last head of the last batch."""
    q, k, v, dout = normal(rng, s)
    v[-1, 3 * s.sk // 4, -1, 1] = dout[-1, s.sq // 2, -1, 2] = np.inf
    return q, k, v, dout


def infinite_scores(rng: Rng, s: Spec) -> Tensors:
    """Scores of -inf (of +inf for a negative scale): of half the keys of the first head, of all of the last one's."""
    q, k, v, dout = normal(rng, s)
    q[..., 0] = 0.5 + np.abs(q[..., 0])
    k[:, : s.sk // 2, 0, 0] = -np.inf
    if s.heads > 1:
        k[:, :, -1, 0] = -np.inf
    return q, k, v, dout


def infinite_queries(rng: Rng, s: Spec) -> Tensors:
    """inf in one of ten rows of q, whose scores are all -inf, and in one of dout."""
    q, k, v, dout = normal(rng, s)
    k[..., 0] = 0.5 + np.abs(k[..., 0])
    q[rng.random(q.shape[:3]) < 0.1, 0] = -np.copysign(np.inf, s.factor)
    dout[tuple(rng.integers(dout.shape))] = np.inf
    return q, k, v, dout


# ---- How they lie in memory; gaps hold NaN ----


def _filled(shape: tuple[int, ...], x: Array) -> Array:
    return np.full(shape, np.nan, x.dtype)


def contiguous(x: Array) -> Array:
    return x


def bhsd(x: Array) -> Array:
    """Heads outside of rows."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def rows_first(x: Array) -> Array:
    """Rows outside of batches."""
    return np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)


def _with_gaps(x: Array, gap: int, offset: int) -> Array:
    shape = (*x.shape[:-1], x.shape[-1] + gap)
    buffer = _filled((offset + int(np.prod(shape)),), x)
    view = buffer[offset:].reshape(shape)[..., : x.shape[-1]]
    view[...] = x
    return view


def padded(x: Array) -> Array:
    """Rows head_dim + 8 elements apart: aligned."""
    return _with_gaps(x, 8, 0)


def misaligned(x: Array) -> Array:
    """Rows head_dim + 3 elements apart, from the second element of an allocation on."""
    return _with_gaps(x, 3, 1)


def shifted(x: Array) -> Array:
    """Contiguous from the second element of an allocation on."""
    return _with_gaps(x, 0, 1)


def every_second(x: Array) -> Array:
    """Every second row."""
    buffer = _filled((x.shape[0], 2 * x.shape[1], *x.shape[2:]), x)
    buffer[:, ::2] = x
    return buffer[:, ::2]


def backwards(x: Array) -> Array:
    """The last row first: a negative stride."""
    return np.ascontiguousarray(x[:, ::-1])[:, ::-1]


def _repeated(axis: int) -> Callable[[Array], Array]:
    def repeat(x: Array) -> Array:
        strides = tuple(0 if i == axis else stride for i, stride in enumerate(x.strides))
        return as_strided(x, x.shape, strides)

    return repeat


_VALUES = (
    normal,
    outliers,
    constant,
    large,
    growing,
    falling,
    cliff,
    dominated,
    few,
    hidden,
    nonfinite,
    last_infinite,
    infinite_scores,
    infinite_queries,
)
_MEMORY = (contiguous, bhsd, rows_first, padded, misaligned, shifted, every_second, backwards)
VALUES: dict[str, Callable[[Rng, Spec], Tensors]] = {f.__name__: f for f in _VALUES}
MEMORY: dict[str, Callable[[Array], Array]] = {f.__name__: f for f in _MEMORY}
MEMORY |= {"one_batch": _repeated(0), "one_row": _repeated(1), "one_head": _repeated(2)}
UNALIGNED = ("misaligned", "shifted")
NOT_FOR_TMA = (*UNALIGNED, "backwards", "one_batch", "one_row", "one_head")
FOR_RESULTS = ("contiguous", "bhsd", "rows_first", "padded", "every_second")  # aligned, every element once


def _values(rng: Rng, s: Spec) -> Tensors:
    """Each sequence of its own; what belongs to none, or is not used, is NaN."""
    found = tuple(np.full(s.shapes[i], np.nan if s.packed else 0.0) for i in (0, 1, 1, 0))
    if not s.packed and not s.ranges:
        return found if 0 in (*s.shapes[0], *s.shapes[1]) else VALUES[s.values](rng, s)
    for b, rows, keys, alone in s.parts():
        empty = 0 in (alone.sq, alone.sk)
        drawn = normal(rng, alone) if empty else VALUES[s.values](rng, alone)
        for x, part, at in zip(found, drawn, (rows, keys, keys, rows), strict=True):
            x[b : b + 1, at] = part
    return found


def draw(s: Spec) -> Inputs:
    """Fresh arrays; the same spec gives the same numbers on every machine."""
    shape = f"{s.dtype} {s.shapes} {s.values}"
    rng = np.random.default_rng([zlib.crc32(shape.encode()), s.seed])
    tensors = _values(rng, s)
    with np.errstate(all="ignore"):
        q, k, v, dout = (
            MEMORY[how](x.astype(s.numpy_dtype)) for how, x in zip((s.q, s.k, s.v, s.dout), tensors, strict=True)
        )
    lse_shape = (s.shapes[0][0], s.heads * s.group, s.shapes[0][1])
    dlse = rng.standard_normal(lse_shape) if s.dlse else None
    dlse = None if dlse is None else dlse.astype(np.float64 if s.dtype == "fp64" else np.float32)
    bias, mask = _bias(s)
    features = Features(
        sequences=s.sequences(),
        alibi_slopes=_slopes(s),
        sink=_sinks(s),
        bias=bias,
        mask=mask,
        dropout_seed=_dropout_seed(s),
        block_mask=masks.from_dense(s.seen()) if s.blocks else None,
        mods=s.mods_given,
    )
    x = Inputs(q, k, v, dout, dlse, features)
    return (
        x
        if not s.packed
        else x._replace(**{n: a[0] for n, a in zip(x._fields[:5], x[:5], strict=True) if a is not None})
    )


def _bias(s: Spec) -> tuple[np.ndarray | None, np.ndarray | None]:
    """A bias and a mask. Drawn apart, so that the other arrays are those of the spec without them."""
    return draw_added(s.bias, np.random.default_rng([s.seed, 1]), s.problem(), s.numpy_dtype)


def _dropout_seed(s: Spec) -> np.ndarray | None:
    """Its words, or those of a seed and an offset."""
    shape = (2, 2)[2 - s.seed_dims :]
    return np.random.default_rng([s.seed, 3]).integers(-(2**31), 2**31, shape).astype(np.int32) if shape else None


def _slopes(s: Spec) -> np.ndarray | None:
    """From 2^-9 to 1/2 in size, some negative; small where NaN and inf must lie as in float64."""
    if not s.alibi:
        return None
    rng, most = np.random.default_rng(s.seed), -1 if s.values in ("normal", "constant", "outliers") else -4
    shape = (len(s.lengths) if s.packed else s.batch, s.heads * s.group)[2 - s.alibi :]
    slopes = 2.0 ** rng.uniform(-9, most, shape) * np.where(rng.random(shape) < 0.2, -0.2, 1)
    return slopes.astype(np.float64 if s.dtype == "fp64" else np.float32)


def _sinks(s: Spec) -> np.ndarray | None:
    """From next to nothing to more than many keys; now and then none."""
    if not s.sink:
        return None
    rng = np.random.default_rng(s.seed + 1)
    logits = np.where(rng.random(s.heads * s.group) < 0.15, -np.inf, rng.uniform(-4, 9, s.heads * s.group))
    return logits.astype(np.float64 if s.dtype == "fp64" else np.float32)
