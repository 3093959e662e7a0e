// Launch-time arguments, one struct by value a kernel. cupyflash/params.py mirrors them field by field; the generated
// entry unit asserts the sizes, and a test compares names, order and offsets.
#ifndef CUPYFLASH_PARAMS_CUH
#define CUPYFLASH_PARAMS_CUH

struct Strides { long long batch, row, head; };  // in elements; the stride along head_dim is always 1

// What was asked for: the same in every launch of one call.
struct Problem {
    int batch, seqlen_q, seqlen_k;
    int heads_q, heads_k;           // heads_q is a multiple of heads_k (GQA, MQA)
    int window_left, window_right;  // query i sees keys [i + seqlen_k - seqlen_q - left, ... + right]; or kUnbounded
    int section;                    // heads scheduled together, so that their K and V stay in L2 (schedule.cuh)
    float scale;                    // of the scores, before the softmax
};

constexpr int kUnbounded = 1 << 30;  // larger than any sequence; i + kUnbounded still fits an int

struct FwdParams {
    const void *q;  // [batch, seqlen_q, heads_q, head_dim]
    const void *k;  // [batch, seqlen_k, heads_k, head_dim]
    const void *v;  // like k
    void *o;        // like q
    float *lse;     // [batch, heads_q, seqlen_q], contiguous; natural log; null: not wanted
    Strides q_stride, k_stride, v_stride, o_stride;
    Problem problem;
};

struct BwdParams {
    const void *q, *k, *v, *o;  // as in the forward
    const void *dout;           // like o
    const float *lse;           // [batch, heads_q, seqlen_q], contiguous
    const float *dlse;          // like lse; null: zero
    void *dq, *dk, *dv;         // like q, k, v
    float *row_stats;  // [batch, heads_q, m_blocks * block_m, 2]: LSE * log2(e), delta = rowsum(dO * O) - dLSE;
                       // beyond seqlen_q inf and 0, which make P and dS zero
    float *dq_accum;   // [batch, heads_q, m_blocks, block_m * head_dim_padded], fragment order (dq_accum.cuh);
                       // null: bwd_dq computes dQ as a whole
    int *dq_turn;      // [batch, heads_q, m_blocks]: which key block may add next; null unless deterministic
    Strides q_stride, k_stride, v_stride, o_stride, dout_stride, dq_stride, dk_stride, dv_stride;
    Problem problem;
};

#endif  // CUPYFLASH_PARAMS_CUH
