// Launch-time arguments of attention over a cache. Made from the fields in cupyflash/plan/params_decode.py, by
// `python -m tools.params`; the generated entry unit asserts the sizes.
#ifndef CUPYFLASH_PARAMS_DECODE_CUH
#define CUPYFLASH_PARAMS_DECODE_CUH
#include "attention/params.cuh"
#include "hw/ptx_sm90.cuh"

// How the plan shares out the work, and what follows from it and the problem, so that no block has to divide.
struct Shares {
    int gang, ranges;                      // their product is the number of blocks; gang * kHeads divides heads_k
    int even_ranges;                       // instead of ranges, where all sequences have the same units; 0: never
    int clusters;                          // blocks of a cluster, in which equal sequences are split; 0: never
    int splits;                            // 0: ranges; else the blocks of a tile, packed at most
    int split_slices;                      // slices of each of them, but the last; packed, times the tiles of a
                                           // sequence's rows; 0: a tile's, shared out evenly
    int row_tiles;                         // of a sequence's packed rows, kBlockM each
    int head_turns;                        // heads_k / (kHeads * gang)
    int group;                             // heads_q / heads_k
    int log_rows;                          // of a tile's rows, rounded up to a power of two from 4 to kBlockM
    unsigned by_group, by_gang, by_turns;  // for quick_divide
    int combine_elements;                  // of a block of decode_combine
    float unit;                            // of scores (score.cuh)
};

struct DecodeParams {
    const void *q;                                   // [batch, seqlen_q, heads_q, head_dim]; packed: [total_q, heads_q,
                                                     // head_dim]
    void *o;                                         // like q, but head_dim_v
    float *lse;                                      // [batch, heads_q, seqlen_q] or [heads_q, total_q], contiguous;
                                                     // natural log; null: not wanted
    const void *k;                                   // [rows, seqlen_k, heads_k, head_dim]; paged: [pages, page_size,
                                                     // heads_k, head_dim]
    const void *v;                                   // like k, but head_dim_v
    const int *cache_seqlens;                        // [batch]: keys of each sequence, less those that were appended;
                                                     // null: one_length for all
    const int *block_table;                          // [batch, pages of a sequence]: its pages, in order; kPaged
    const int *cache_batch_idx;                      // [batch]: its row in the cache; null: its own number
    const int *cu_seqlens_q;                         // [batch + 1]; kPacked
    const float *alibi_slopes;                       // [batch, heads_q] or [heads_q]; kAlibi
    const int *kv_range;                             // [batch, 2]; kKvRange
    const float *sink;                               // [heads_q]; kSink
    float *partial_o;                                // [2 * blocks, kHeads, kBlockM, head_dim_v], one a block where
                                                     // there are splits: the sum of 2^(..) V
    float *partial_ml;                               // [likewise, 2]: maximum of the values of scores, sum of 2^(..)
    Strides q_stride, o_stride, k_stride, v_stride;  // batch: of a row of the cache, or of a page
    long long table_stride;                          // of block_table, from one sequence to the next
    Problem problem;                                 // seqlen_k: what a sequence can hold; seqlen_q, packed: total_q
    Shares shares;
    int appended;          // keys more than cache_seqlens says; packed: as many as queries, unless 0
    int one_length;        // instead of cache_seqlens
    int places;            // rows of the cache, or pages of the pool
    int page_size;         // keys of a page; kPaged
    int alibi;             // how many dimensions the slopes have; with 1 all sequences share them
    int scale_stride;      // of the scales, from one row of the cache or page to the next; 0: all share them
    const float *k_scale;  // [heads_k] or [rows or pages, heads_k]; kInt8, kE4m3
    const float *v_scale;  // likewise
    int most_queries;      // packed: sequences that have more are left to another kernel
    const void *bias;      // broadcasts to [batch, heads_q, seqlen_q, seqlen_k]; packed, [batch, heads_q, max_seqlen_q,
                           // seqlen_k]; kBias
    ScoreStrides bias_stride;
    const void *mask;  // likewise; kMask
    ScoreStrides mask_stride;
    const int *block_tiles;          // [batch, heads_q, tiles, tiles] of 64 rows by 64 keys, 1 for batch and heads_q
                                     // that share theirs: 0 empty, 1 full, 2 + its number among block_bits; kTileMask
    const int *block_bits;           // [any, kMaskTileWords]
    int block_mask;                  // 1; 1 more: each sequence has its own, 2 more: each head
    int mask_tiles;                  // of its rows, and of its keys
    int max_seqlen_q, max_seqlen_k;  // packed: queries and keys of each sequence that a bias and a mask have
    const void *mod_array_0;         // of any shape, contiguous; kMods
    Lengths mod_array_0_lengths;
    const void *mod_array_1;  // of any shape, contiguous; kMods
    Lengths mod_array_1_lengths;
    const void *mod_array_2;  // of any shape, contiguous; kMods
    Lengths mod_array_2_lengths;
    const void *mod_array_3;  // of any shape, contiguous; kMods
    Lengths mod_array_3_lengths;
};

struct DecodeSm90Params {
    // [64, seqlen_k or page_size, head_dim (or head_dim_v) / 64, heads_k, rows or pages], innermost first, with the
    // 128-byte swizzle, in boxes of 64 columns by kBoxRows keys by all chunks of columns by kPair heads.
    ptx::TensorMap map_k, map_v;
    DecodeParams plain;  // the same arrays, for what is not TMA's
};

struct AppendParams {
    const void *q;             // [batch, seqlen_q, heads_q, head_dim]; packed: [total_q, heads_q, head_dim]
    const void *k;             // likewise, heads_k; null: no new rows
    const void *v;             // like k, but head_dim_v
    void *k_cache;             // as in DecodeParams
    void *v_cache;             // like k_cache, but head_dim_v
    void *rotated_q;           // like q, contiguous; null: nothing is turned
    const void *cos;           // [rotary_positions, rotary_dim / 2], contiguous
    const void *sin;           // like cos
    const int *cache_seqlens;  // [batch]: rows in use; null: one_length for all
    const int *block_table;
    const int *cache_batch_idx;
    const int *cu_seqlens_q;  // as in DecodeParams
    Strides q_stride, k_stride, v_stride, k_cache_stride, v_cache_stride;
    long long table_stride;
    Problem problem;                                // seqlen_q: new rows of a sequence, packed of all; seqlen_k: what a
                                                    // sequence can hold
    int places, page_size;                          // as in DecodeParams
    int rotary_dim, rotary_positions, interleaved;  // pairs are neighbours; else columns half of rotary_dim apart
    int tables_fp32;                                // cos and sin are; else they are as q
    int one_length;                                 // as in DecodeParams
    int scale_stride;
    const float *k_scale;
    const float *v_scale;  // as in DecodeParams
};

struct DequantizeParams {
    const void *k_cache;  // as in DecodeParams
    const void *v_cache;  // like k_cache, but head_dim_v
    void *k_rows;         // [slots, seqlen_k, heads_k, head_dim], contiguous, of q's type
    void *v_rows;         // like k_rows, but head_dim_v
    int *slots;           // [batch]: of a sequence, among k_rows; kPacked
    const float *k_scale;
    const float *v_scale;
    const int *cache_seqlens;
    const int *block_table;
    const int *cache_batch_idx;
    const int *cu_seqlens_q;  // as in DecodeParams
    Strides k_cache_stride, v_cache_stride;
    long long table_stride;
    Problem problem;
    int places, page_size, scale_stride, appended, one_length;  // as in DecodeParams
};

#endif  // CUPYFLASH_PARAMS_DECODE_CUH
