"""The launch parameters of attention over a cache: the structs of `kernels_cu/decode/params_decode.cuh`, as a list of
fields, like those of the passes (params.py)."""

from __future__ import annotations

import numpy as np

from ..operand import MOD_ARRAYS
from .params import COMMON_DTYPES, Field, Struct, dtype_of

SHARES = Struct(
    "Shares",
    (
        Field("gang", "int"),
        Field("ranges", "int", "their product is the number of blocks; gang * kHeads divides heads_k"),
        Field("even_ranges", "int", "instead of ranges, where all sequences have the same units; 0: never"),
        Field("clusters", "int", "blocks of a cluster, in which equal sequences are split; 0: never"),
        Field("splits", "int", "0: ranges; else the blocks of a tile, packed at most"),
        Field(
            "split_slices",
            "int",
            "slices of each of them, but the last; packed, times the tiles of a sequence's "
            "rows; 0: a tile's, shared out evenly",
        ),
        Field("row_tiles", "int", "of a sequence's packed rows, kBlockM each"),
        Field("head_turns", "int", "heads_k / (kHeads * gang)"),
        Field("group", "int", "heads_q / heads_k"),
        Field("log_rows", "int", "of a tile's rows, rounded up to a power of two from 4 to kBlockM"),
        Field("by_group", "unsigned"),
        Field("by_gang", "unsigned"),
        Field("by_turns", "unsigned", "for quick_divide"),
        Field("combine_elements", "int", "of a block of decode_combine"),
        Field("unit", "float", "of scores (score.cuh)"),
    ),
    "How the plan shares out the work, and what follows from it and the problem, so that no block has to divide.",
)
DECODE = Struct(
    "DecodeParams",
    (
        Field("q", "const void *", "[batch, seqlen_q, heads_q, head_dim]; packed: [total_q, heads_q, head_dim]"),
        Field("o", "void *", "like q, but head_dim_v"),
        Field("lse", "float *", "[batch, heads_q, seqlen_q] or [heads_q, total_q], contiguous; natural log; null: not "
                                "wanted"),
        Field("k", "const void *", "[rows, seqlen_k, heads_k, head_dim]; paged: [pages, page_size, heads_k, head_dim]"),
        Field("v", "const void *", "like k, but head_dim_v"),
        Field("cache_seqlens", "const int *", "[batch]: keys of each sequence, less those that were appended; null: "
                                             "one_length for all"),
        Field("block_table", "const int *", "[batch, pages of a sequence]: its pages, in order; kPaged"),
        Field("cache_batch_idx", "const int *", "[batch]: its row in the cache; null: its own number"),
        Field("cu_seqlens_q", "const int *", "[batch + 1]; kPacked"),
        Field("alibi_slopes", "const float *", "[batch, heads_q] or [heads_q]; kAlibi"),
        Field("kv_range", "const int *", "[batch, 2]; kKvRange"),
        Field("sink", "const float *", "[heads_q]; kSink"),
        Field("partial_o", "float *", "[2 * blocks, kHeads, kBlockM, head_dim_v], one a block where there are splits: "
                                      "the sum of 2^(..) V"),
        Field("partial_ml", "float *", "[likewise, 2]: maximum of the values of scores, sum of 2^(..)"),
        Field("q_stride", "Strides"),
        Field("o_stride", "Strides"),
        Field("k_stride", "Strides"),
        Field("v_stride", "Strides", "batch: of a row of the cache, or of a page"),
        Field("table_stride", "long long", "of block_table, from one sequence to the next"),
        Field("problem", "Problem", "seqlen_k: what a sequence can hold; seqlen_q, packed: total_q"),
        Field("shares", "Shares"),
        Field("appended", "int", "keys more than cache_seqlens says; packed: as many as queries, unless 0"),
        Field("one_length", "int", "instead of cache_seqlens"),
        Field("places", "int", "rows of the cache, or pages of the pool"),
        Field("page_size", "int", "keys of a page; kPaged"),
        Field("alibi", "int", "how many dimensions the slopes have; with 1 all sequences share them"),
        Field("scale_stride", "int", "of the scales, from one row of the cache or page to the next; 0: all share them"),
        Field("k_scale", "const float *", "[heads_k] or [rows or pages, heads_k]; kInt8, kE4m3"),
        Field("v_scale", "const float *", "likewise"),
        Field("most_queries", "int", "packed: sequences that have more are left to another kernel"),
        Field("bias", "const void *", "broadcasts to [batch, heads_q, seqlen_q, seqlen_k]; packed, [batch, heads_q, "
                                      "max_seqlen_q, seqlen_k]; kBias"),
        Field("bias_stride", "ScoreStrides"),
        Field("mask", "const void *", "likewise; kMask"),
        Field("mask_stride", "ScoreStrides"),
        Field("block_tiles", "const int *", "[batch, heads_q, tiles, tiles] of 64 rows by 64 keys, 1 for batch and "
                                            "heads_q that share theirs: 0 empty, 1 full, 2 + its number among "
                                            "block_bits; kTileMask"),
        Field("block_bits", "const int *", "[any, kMaskTileWords]"),
        Field("block_mask", "int", "1; 1 more: each sequence has its own, 2 more: each head"),
        Field("mask_tiles", "int", "of its rows, and of its keys"),
        Field("max_seqlen_q", "int"),
        Field("max_seqlen_k", "int", "packed: queries and keys of each sequence that a bias and a mask have"),
        *(field for name in MOD_ARRAYS for field in (
            Field(name, "const void *", "of any shape, contiguous; kMods"), Field(f"{name}_lengths", "Lengths"),
        )),
    ),
)  # fmt: skip
APPEND = Struct(
    "AppendParams",
    (
        Field("q", "const void *", "[batch, seqlen_q, heads_q, head_dim]; packed: [total_q, heads_q, head_dim]"),
        Field("k", "const void *", "likewise, heads_k; null: no new rows"),
        Field("v", "const void *", "like k, but head_dim_v"),
        Field("k_cache", "void *", "as in DecodeParams"),
        Field("v_cache", "void *", "like k_cache, but head_dim_v"),
        Field("rotated_q", "void *", "like q, contiguous; null: nothing is turned"),
        Field("cos", "const void *", "[rotary_positions, rotary_dim / 2], contiguous"),
        Field("sin", "const void *", "like cos"),
        Field("cache_seqlens", "const int *", "[batch]: rows in use; null: one_length for all"),
        Field("block_table", "const int *"),
        Field("cache_batch_idx", "const int *"),
        Field("cu_seqlens_q", "const int *", "as in DecodeParams"),
        Field("q_stride", "Strides"),
        Field("k_stride", "Strides"),
        Field("v_stride", "Strides"),
        Field("k_cache_stride", "Strides"),
        Field("v_cache_stride", "Strides"),
        Field("table_stride", "long long"),
        Field(
            "problem", "Problem", "seqlen_q: new rows of a sequence, packed of all; seqlen_k: what a sequence can hold"
        ),
        Field("places", "int"),
        Field("page_size", "int", "as in DecodeParams"),
        Field("rotary_dim", "int"),
        Field("rotary_positions", "int"),
        Field("interleaved", "int", "pairs are neighbours; else columns half of rotary_dim apart"),
        Field("tables_fp32", "int", "cos and sin are; else they are as q"),
        Field("one_length", "int", "as in DecodeParams"),
        Field("scale_stride", "int"),
        Field("k_scale", "const float *"),
        Field("v_scale", "const float *", "as in DecodeParams"),
    ),
)
DEQUANTIZE = Struct(
    "DequantizeParams",
    (
        Field("k_cache", "const void *", "as in DecodeParams"),
        Field("v_cache", "const void *", "like k_cache, but head_dim_v"),
        Field("k_rows", "void *", "[slots, seqlen_k, heads_k, head_dim], contiguous, of q's type"),
        Field("v_rows", "void *", "like k_rows, but head_dim_v"),
        Field("slots", "int *", "[batch]: of a sequence, among k_rows; kPacked"),
        Field("k_scale", "const float *"),
        Field("v_scale", "const float *"),
        Field("cache_seqlens", "const int *"),
        Field("block_table", "const int *"),
        Field("cache_batch_idx", "const int *"),
        Field("cu_seqlens_q", "const int *", "as in DecodeParams"),
        Field("k_cache_stride", "Strides"),
        Field("v_cache_stride", "Strides"),
        Field("table_stride", "long long"),
        Field("problem", "Problem"),
        Field("places", "int"),
        Field("page_size", "int"),
        Field("scale_stride", "int"),
        Field("appended", "int"),
        Field("one_length", "int", "as in DecodeParams"),
    ),
)
DECODE_SM90 = Struct(
    "DecodeSm90Params",
    (
        Field("map_k", "ptx::TensorMap"),
        Field("map_v", "ptx::TensorMap"),
        Field("plain", "DecodeParams", "the same arrays, for what is not TMA's"),
    ),
    first="[64, seqlen_k or page_size, head_dim (or head_dim_v) / 64, heads_k, rows or pages], innermost first, with "
    "the 128-byte swizzle, in boxes of 64 columns by kBoxRows keys by all chunks of columns by kPair heads.",
)

SHARES_DTYPE = dtype_of(SHARES, COMMON_DTYPES)
DECODE_PARAMS: np.dtype[np.void] = dtype_of(DECODE, COMMON_DTYPES | {"Shares": SHARES_DTYPE})
DECODE_SM90_PARAMS: np.dtype[np.void] = dtype_of(DECODE_SM90, COMMON_DTYPES | {"DecodeParams": DECODE_PARAMS})
APPEND_PARAMS: np.dtype[np.void] = dtype_of(APPEND, COMMON_DTYPES)
DEQUANTIZE_PARAMS: np.dtype[np.void] = dtype_of(DEQUANTIZE, COMMON_DTYPES)
STRUCTS = (SHARES, DECODE, DECODE_SM90, APPEND, DEQUANTIZE)
