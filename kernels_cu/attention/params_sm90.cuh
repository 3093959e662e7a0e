// Launch-time arguments of the sm90 family; mirrored by cupyflash/plan/params.py like those of params.cuh.
#ifndef CUPYFLASH_PARAMS_SM90_CUH
#define CUPYFLASH_PARAMS_SM90_CUH
#include "attention/params.cuh"
#include "hw/ptx_sm90.cuh"

struct FwdSm90Params {
    // [head_dim, seqlen, heads, batch], innermost first, in boxes of 64 columns by 64 (q, o) or kBlockN (k, v) rows,
    // with the 128-byte swizzle.
    ptx::TensorMap map_q, map_k, map_v, map_o;
    FwdParams plain;    // the same arrays, for the few accesses that are not TMA's
    int *counter;       // two zeros, left as zeros: tiles drawn, blocks that are done; null: tiles in a fixed stride
    long long *clocks;  // [blocks, 2]: cycles and nanoseconds that each block took; kClocks only
};

struct BwdSm90Params {
    // As above: boxes of 64 columns by kBlockM (q, dout), kBlockN (k, v) or 64 (dq, dk, dv) rows; of bwd_dkv and bwd_dq,
    // which share one struct, all by 64 rows.
    ptx::TensorMap map_q, map_k, map_v, map_dout, map_dq, map_dk, map_dv;
    BwdParams plain;  // the same arrays, and those that TMA does not see
    int *counter;     // as above; of bwd_dkv and bwd_dq
};

#endif  // CUPYFLASH_PARAMS_SM90_CUH
