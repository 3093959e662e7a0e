// Who computes dK and dV of a head of k. A block of the backward visits the query heads of its group one after the other. Where
// that leaves the GPU too few blocks, the plan divides the group into `shares` of equally many heads (kGrouped). Tiles are then
// counted as if each share were a head of k, here a key head. Its blocks leave their sums in fp32, and bwd_shares.cuh adds up
// those of a group, always in the same order.
#ifndef CUPYFLASH_SHARES_CUH
#define CUPYFLASH_SHARES_CUH
#include "attention/lists.cuh"
#include "tile/float_rows.cuh"

// Keys, whose tiles are counted by key heads.
template <class V>
struct KeysOf : Keys {
    __device__ static int heads(const BwdParams &p) { return p.problem.heads_k * shares(p); }
    __device__ static int head_k(const BwdParams &p, int key_head) { return key_head / shares(p); }  // @head-of-k-share
    // How many query heads a key head has.
    __device__ static int group(const BwdParams &p) { return p.problem.heads_q / heads(p); }
    __device__ static bool are_shared(const BwdParams &p) { return shares(p) > 1; }

  private:
    __device__ static int shares(const BwdParams &p) {
        if constexpr (V::kGrouped) return p.shares;
        else return 1;
    }
};

// Where the share of a key head begins in dk_shares or dv_shares, [batch, key heads, seqlen_k, kColumns]: that of the sequence's
// first key.
template <class V, int kColumns>
__device__ __forceinline__ float *share_at(const BwdParams &p, float *shares, const Sequence<V::kPacked> &s,
                                           int key_head) {
    // @share-of-its-head
    const long long head = (V::kPacked ? 0 : s.index) * p.problem.heads_k * p.shares + key_head;
    return shares + (head * p.problem.seqlen_k + s.row_k) * kColumns;
}

// A warp's rows of dK or dV leave as a share; kColumns and kCovered as of for_each_pair.
template <class V, int kColumns, int kCovered, int kRows, int kCols>
__device__ __forceinline__ void leave_share(const BwdParams &p, float *shares, const Sequence<V::kPacked> &s,
                                            int key_head, int first_key, AccTile<kRows, kCols> &acc, int col0 = 0) {
    for_each_pair<kColumns, kCovered>(acc, share_at<V, kColumns>(p, shares, s, key_head), first_key, col0, s.rows_k,
                                      [](float x, float y, FloatPair *at) { *at = {x, y}; });  // @share-left
}

#endif  // CUPYFLASH_SHARES_CUH
