// Launch-time arguments of the sm90 family. Made from the table of arrays, cupyflash/operands.py, by
// `python -m tools.params`; the generated entry unit asserts the sizes.
#ifndef CUPYFLASH_PARAMS_SM90_CUH
#define CUPYFLASH_PARAMS_SM90_CUH
#include "attention/params.cuh"
#include "hw/ptx_sm90.cuh"

struct FwdSm90Params {
    // [head_dim (or head_dim_v), seqlen, heads, batch], innermost first, with the 128-byte swizzle, in boxes of 64
    // columns by 64 (q, o) or kKeyRows (k, v) rows; kernels that share the struct share the boxes, those of the first.
    // Arrays whose rows a kernel interleaves have five dimensions (tile_sm90.cuh).
    ptx::TensorMap map_q, map_k, map_v, map_o;
    int *counter;       // [4]; zeros, left as zeros: twice tiles drawn, blocks that are done; null: tiles in a fixed
                        // stride
    long long *clocks;  // [blocks, 2]; cycles and nanoseconds that each block took; kClocks only
    FwdParams plain;    // the same arrays, for what is not TMA's
};

struct BwdSm90Params {
    // [head_dim (or head_dim_v), seqlen, heads, batch], innermost first, with the 128-byte swizzle, in boxes of 64
    // columns by kBlockM (q, dout), kBlockN (k, v) or 64 (dq, dk, dv) rows; kernels that share the struct share the
    // boxes, those of the first. Arrays whose rows a kernel interleaves have five dimensions (tile_sm90.cuh).
    ptx::TensorMap map_q, map_k, map_v, map_dout, map_dq, map_dk, map_dv;
    int *counter;     // [4]; as in the forward: for bwd_dkv and bwd_dbias, and for bwd_dq
    BwdParams plain;  // the same arrays, for what is not TMA's
};

#endif  // CUPYFLASH_PARAMS_SM90_CUH
