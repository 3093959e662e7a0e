"""Shapes and dtypes of a call and its options: the `CacheProblem` that they mean, or what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..bias import max_seqlens
from ..block_mask import code_of
from ..errors import ArgumentError, UnsupportedError
from ..mods.description import read
from ..operand import MOD_ARRAYS
from ..options import Window, flag, make_options, whole
from ..problem import DTYPES, HALF, MAX_SEQLEN, Problem, check_head_dim, make_problem
from .arrays import BY_NAME
from .problem import CacheProblem
from .shapes import bias_of, check_dims, check_shape, mask_tiles_of

MAX_SPLITS = 1024
# What caches of 8 bits hold, by their dtypes; CuPy, which has no float8_e4m3fn, views it as uint8.
STORED = {"int8": "int8", "float8_e4m3fn": "e4m3", "uint8": "e4m3"}
Shape = tuple[int, ...]


class CacheOptions(NamedTuple):
    """The options of a call: plain values, as `make_cache_options` gives them; what they mean says `CacheProblem`."""

    causal: bool = False
    scale: float | None = None
    window: Window | None = None
    softcap: float | None = None
    rotary_interleaved: bool = False
    num_splits: int | None = None
    batch_invariant: bool = False
    mods: str = ""


def make_cache_options(
    causal: Any, scale: Any, window: Any, softcap: Any, interleaved: Any, num_splits: Any, batch_invariant: Any
) -> CacheOptions:
    """The `CacheOptions` that a user's arguments mean.

    Raises:
        ArgumentError: one is not of its type or range.
    """
    options = make_options(causal, scale, window, softcap=softcap)
    if num_splits is not None:
        num_splits = _splits(num_splits)
    if type(batch_invariant) is not bool:
        batch_invariant = flag("batch_invariant", batch_invariant)
    if type(interleaved) is not bool:
        interleaved = flag("rotary_interleaved", interleaved)
    plain = options.causal, options.scale, options.window, options.softcap
    return CacheOptions(*plain, interleaved, num_splits, batch_invariant)


def _splits(num_splits: Any) -> int:
    splits = whole("num_splits", num_splits, "an integer or None")
    if not 1 <= splits <= MAX_SPLITS:
        raise ArgumentError(
            f"num_splits: expected 1 to {MAX_SPLITS}, or None for the best for the lengths, got {splits}"
        )
    return splits


def make_cache_problem(shapes: Mapping[str, Shape], dtypes: Mapping[str, str], options: CacheOptions) -> CacheProblem:
    """Check the arrays of a call by their shapes and dtypes; what they hold is not looked at.

    Args:
        shapes, dtypes: of the arrays given, by their names in `CACHE_ARRAYS`. Without cache_seqlens it is an integer.

    Raises:
        ArgumentError: for everything that is wrong in itself.
        UnsupportedError: for what is meaningful but beyond this version's limits.
    """
    _check_together(shapes)
    for name, shape in shapes.items():
        check_dims(name, shape, shapes)
    read(options.mods).check([(dtypes[name], shapes[name]) for name in MOD_ARRAYS if name in shapes])
    _check_dtypes(dtypes)
    _check_scales(shapes, dtypes["k_cache"])
    dense = _dense(shapes, dtypes["q"], options)
    problem = _sized(shapes, dtypes, options, dense)
    for name, shape in shapes.items():
        check_shape(BY_NAME[name], shape, problem)
    _check_append(shapes, problem)
    return problem


def _check_together(given: Mapping[str, Any]) -> None:
    """Refuse arguments that contradict each other, or miss another."""
    for a, b in (("k", "v"), ("v", "k"), ("rotary_cos", "rotary_sin"), ("rotary_sin", "rotary_cos")):
        if a in given and b not in given:
            raise ArgumentError(f"{b}: expected an array, since {a} is given")
    if "rotary_cos" in given and "k" not in given:
        raise ArgumentError(
            "rotary_cos: expected None, since there is no k to append; give q rotated, or append what it belongs to"
        )
    if "block_table" in given and "cache_batch_idx" in given:
        raise ArgumentError(
            "cache_batch_idx: expected None together with block_table; give the rows block_table[cache_batch_idx]"
        )


def _check_dtypes(dtypes: Mapping[str, str]) -> None:
    q = dtypes["q"]
    if q not in DTYPES:
        raise ArgumentError(f"q: expected a floating-point dtype ({', '.join(DTYPES)}), got {q}")
    for name, dtype in dtypes.items():
        kind = BY_NAME[name].dtype
        if BY_NAME[name].free:
            continue
        wanted: tuple[str, ...] = (kind or q,)
        if kind == "added":
            wanted = (q, "fp32") if q in HALF else (q,)
        elif kind == "sum":
            wanted = ("fp64" if q == "fp64" else "fp32",)
        elif kind == "cache":
            wanted = (dtypes["k_cache"],) if name == "v_cache" else (q, *STORED)
        elif kind == "rotary":
            wanted = (q,) if q == "fp64" else tuple({q: 0, "fp32": 0})
        if dtype not in wanted:
            of_q = "" if kind else " of q"
            if kind == "cache":
                of_q = ", that of k_cache" if name == "v_cache" else ", q's or one of 8 bits with k_scale and v_scale"
            raise ArgumentError(f"{name}: expected dtype {' or '.join(wanted)}{of_q}, got {dtype}; cast it")
    if len({dtypes.get(name) for name in ("rotary_cos", "rotary_sin")}) > 1:
        raise ArgumentError(
            f"rotary_sin: expected the dtype of rotary_cos, {dtypes['rotary_cos']}, got {dtypes['rotary_sin']}"
        )


def _check_scales(shapes: Mapping[str, Shape], dtype: str) -> None:
    for name in ("k_scale", "v_scale"):
        if dtype in STORED and name not in shapes:
            raise ArgumentError(
                f"{name}: expected an fp32 array of shape (heads_k,) or (slots, heads_k), since k_cache is {dtype}: "
                "what is stored times it is what is meant; give ones if it means itself"
            )
        if dtype not in STORED and name in shapes:
            raise ArgumentError(f"{name}: expected None, since k_cache is {dtype}; only caches of 8 bits have scales")
    if "k_scale" in shapes and len(shapes["k_scale"]) != len(shapes["v_scale"]):
        raise ArgumentError(
            f"v_scale: expected as many dimensions as k_scale has, {len(shapes['k_scale'])}, got shape "
            f"{tuple(shapes['v_scale'])}; expand it"
        )


def _dense(shapes: Mapping[str, Shape], dtype: str, options: CacheOptions) -> Problem:
    """Scale, window and softcap, checked as those of `attention` are; and what can be said of heads and lengths."""
    *_, heads_q, head_dim = shapes["q"]
    slots, slot_rows, heads_k, head_dim_k = shapes["k_cache"]
    *rows_of_v, head_dim_v = shapes["v_cache"]
    if tuple(rows_of_v) != (slots, slot_rows, heads_k):
        wanted = slots, slot_rows, heads_k, head_dim_v
        raise ArgumentError(
            f"v_cache: expected the shape of k_cache but for head_dim, {wanted}, got {tuple(shapes['v_cache'])}"
        )
    if head_dim_k != head_dim:
        raise ArgumentError(f"k_cache: expected the head_dim of q, {head_dim}, got {head_dim_k}")
    check_head_dim("v_cache", head_dim_v)
    if heads_k == 0 or heads_q % heads_k:
        raise ArgumentError(f"k_cache: expected heads_k to divide heads_q = {heads_q}, got heads_k = {heads_k}")
    if "block_table" in shapes and slot_rows == 0:
        raise ArgumentError(f"k_cache: expected a page_size of at least 1, got shape {tuple(shapes['k_cache'])}")
    capacity = slot_rows * (shapes["block_table"][1] if "block_table" in shapes else 1)
    if max(capacity, slots) > MAX_SEQLEN:
        raise UnsupportedError(
            f"k_cache: expected at most {MAX_SEQLEN} rows of a sequence, and as many sequences or pages, got "
            f"{capacity} and {slots}"
        )
    rows_k = 1, capacity, heads_k
    return make_problem(
        ((1, shapes["q"][-3], heads_q, head_dim), (*rows_k, head_dim), (*rows_k, head_dim_v)), (dtype,) * 3,
        causal=options.causal, scale=options.scale, window=options.window, softcap=options.softcap,
        alibi=len(shapes.get("alibi_slopes", ())),
    )  # fmt: skip


def _sized(
    shapes: Mapping[str, Shape], dtypes: Mapping[str, str], options: CacheOptions, dense: Problem
) -> CacheProblem:
    packed, cos = "cu_seqlens_q" in shapes, shapes.get("rotary_cos", (0, 0))
    slots, slot_rows = shapes["k_cache"][:2]
    if packed and shapes["cu_seqlens_q"][0] == 0:
        raise ArgumentError("cu_seqlens_q: expected shape (batch + 1,), got (0,); a batch of none has the one entry 0")
    return CacheProblem(
        dtype=dense.dtype,
        batch=shapes["cu_seqlens_q"][0] - 1 if packed else shapes["q"][0],
        seqlen_q=dense.seqlen_q,
        heads_q=dense.heads_q,
        heads_k=dense.heads_k,
        head_dim=dense.head_dim,
        head_dim_v=dense.head_dim_v,
        slots=slots,
        page_size=slot_rows if "block_table" in shapes else None,
        capacity=dense.seqlen_k,
        scale=dense.scale,
        window=dense.window,
        softcap=dense.softcap,
        alibi=dense.alibi,
        kv_range="kv_range" in shapes,
        packed=packed,
        chosen="cache_batch_idx" in shapes,
        seqlen_new=shapes["k"][-3] if "k" in shapes else 0,
        rotary_dim=2 * cos[1],
        rotary_positions=cos[0],
        rotary_interleaved=options.rotary_interleaved and "rotary_cos" in shapes,
        rotary_dtype=dtypes.get("rotary_cos", ""),
        num_splits=options.num_splits,
        batch_invariant=options.batch_invariant,
        sink="sink" in shapes,
        stored=STORED.get(dtypes["k_cache"], ""),
        scale_dims=len(shapes.get("k_scale", ())),
        bias=bias_of(shapes, dtypes),
        block_mask=code_of(shapes["block_tiles"]) if "block_tiles" in shapes else 0,
        mask_tiles=mask_tiles_of(shapes, dense.seqlen_k),
        mods=options.mods,
        mod_shapes=tuple(tuple(shapes[name]) for name in MOD_ARRAYS if name in shapes),
        max_seqlen_q=max_seqlens([shapes[name] for name in ("bias", "mask") if name in shapes])[0],
        one_length="cache_seqlens" not in shapes,
    )


def _check_append(shapes: Mapping[str, Shape], p: CacheProblem) -> None:
    if not p.chosen and p.page_size is None and p.slots != p.batch:
        raise ArgumentError(
            f"k_cache: expected the caches of {p.batch} sequences, as q has, got {p.slots}; say by cache_batch_idx "
            "which they are"
        )
    if p.packed and "k" in shapes and p.seqlen_new != p.seqlen_q:
        raise ArgumentError(
            f"k: expected as many rows as q has, {p.seqlen_q}, since both are packed by cu_seqlens_q, got "
            f"{p.seqlen_new}"
        )
    if p.seqlen_new > p.capacity and not p.packed:
        raise ArgumentError(f"k: expected at most {p.capacity} new keys, the capacity of the cache, got {p.seqlen_new}")
    if p.rotary_dim > p.head_dim:
        raise ArgumentError(
            f"rotary_cos: expected at most head_dim / 2 = {p.head_dim // 2} columns, got {p.rotary_dim // 2}"
        )
    if p.rotary_dim and p.seqlen_new != p.seqlen_q:
        raise ArgumentError(
            f"rotary_cos: expected as many new keys as queries, {p.seqlen_q}, got {p.seqlen_new}: which positions have "
            "the queries? Give q and k rotated"
        )
