// Who computes dK and dV of a head of k. A block of the backward visits the query heads of its group one after the other. Where
// that leaves the GPU too few blocks, the plan divides the group into `shares` of equally many heads (kGrouped). Tiles are then
// counted as if each share were a head of k, here a key head. Its blocks leave their sums in fp32, and bwd_shares.cuh adds up
// those of a group, always in the same order.
#ifndef CUPYFLASH_SHARES_CUH
#define CUPYFLASH_SHARES_CUH
#include "attention/lists.cuh"
#include "tile/tile.cuh"

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

struct alignas(8) FloatPair { float x, y; };

// f(element (row, column) of an accumulator and its neighbour, where they lie in a share) for each pair of a warp's rows that has
// a key. first_key: that of row 0, whose share begins at `share`, as does column col0.
template <int kColumns, int kRows, int kCols, class F>
__device__ __forceinline__ void for_each_pair(AccTile<kRows, kCols> &acc, float *share, int first_key, int col0,
                                              int keys, F f) {
    #pragma unroll
    for (int a = 0; a < acc.kRowTiles; ++a)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int key = first_key + acc.row(a, 2 * h);
            if (key >= keys) continue;  // @keys-of-the-share
            float *const row = share + key * static_cast<long long>(kColumns) + col0 + acc.col(0, 0);
            #pragma unroll
            for (int j = 0; j < acc.kColTiles; ++j)
                if (kColumns % (8 * acc.kColTiles) == 0 || col0 + 8 * j < kColumns)
                    f(acc.x[a][j][2 * h], acc.x[a][j][2 * h + 1], reinterpret_cast<FloatPair *>(row + 8 * j));
        }
}

// Where the share of a key head begins in dk_shares or dv_shares, [batch, key heads, seqlen_k, head_dim]: that of the sequence's
// first key.
template <class V>
__device__ __forceinline__ float *share_at(const BwdParams &p, float *shares, const Sequence<V::kPacked> &s,
                                           int key_head) {
    // @share-of-its-head
    const long long head = (V::kPacked ? 0 : s.index) * p.problem.heads_k * p.shares + key_head;
    return shares + (head * p.problem.seqlen_k + s.row_k) * V::kHeadDim;
}

// A warp's rows of dK or dV leave as a share.
template <class V, int kRows, int kCols>
__device__ __forceinline__ void leave_share(const BwdParams &p, float *shares, const Sequence<V::kPacked> &s,
                                            int key_head, int first_key, AccTile<kRows, kCols> &acc, int col0 = 0) {
    for_each_pair<V::kHeadDim>(acc, share_at<V>(p, shares, s, key_head), first_key, col0, s.rows_k,
                               [](float x, float y, FloatPair *at) { *at = {x, y}; });  // @share-left
}

#endif  // CUPYFLASH_SHARES_CUH
