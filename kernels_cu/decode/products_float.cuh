// Products of a slice (16 keys of one head) of a cache of fp32 with kWarpRows rows of Q, and with P, by multiplications and additions
// of fp32, by one warp. Of few rows these are fewer instructions than tensor cores need, which take 16 rows and six products of
// bf16 (tile/fp32.cuh), and nothing is split.
//
// S: lane 8 g + c has, of keys 2 g, 2 g + 1, 2 g + 8 and 2 g + 9, the c-th four of every 32 columns; what the eight lanes of a
// group have is added up so that each is left with whole scores of its own rows, kOwn from c * kWarpRows / 8 on. P reaches
// all lanes through shared memory. O: a lane has fours of columns of all rows, of each kKeyParts-th key.
#ifndef CUPYFLASH_PRODUCTS_FLOAT_CUH
#define CUPYFLASH_PRODUCTS_FLOAT_CUH
#include "decode/slices.cuh"

template <class V>
struct FloatProducts {
    using Smem = DecodeSmem<V>;
    static constexpr int kRows = V::kWarpRows, kKeys = 4, kOwn = larger(1, kRows / 8);
    static constexpr int D = Smem::D, kDimV = Smem::kDimV, kFours = ceil_div(kDimV, 128);
    static constexpr int kLanesOfRow = kDimV >= 128 ? 32 : next_power_of_two(kDimV / 4), kKeyParts = 32 / kLanesOfRow;
    static constexpr int kAhead = kRows > 8 ? 1 : 2;  // of chunks of K, and of two rows of V: as registers last
    static_assert(kRows == 4 || kRows == 8 || kRows == 16);
    const typename Smem::TileQ sQ;
    const int row0;          // the first of the warp's
    const ptx::u32 weights;  // a number of each of the slice's keys and each of the rows, in shared memory
    float O[kFours][kRows][4];

    __device__ FloatProducts(typename Smem::TileQ sQ, int row0, ptx::u32 weights)
        : sQ(sQ), row0(row0), weights(weights) {
        for_each_four([](int, int, float (&x)[4]) { x[0] = x[1] = x[2] = x[3] = 0.f; });
    }
    __device__ static int first_key() { return 2 * (lane() / 8); }    // of those that a lane has scores of
    __device__ static int key(int n) { return n % 2 + 8 * (n / 2); }  // the n-th, from that one on
    __device__ static int first_row() { return lane() % 8 * kRows / 8; }
    // Of two lanes that have the same scores, one.
    __device__ static bool owns_scores() { return kRows >= 8 || lane() % 2 == 0; }

    // S = Q K^T.
    __device__ void multiply_k(typename Smem::TileK sK, float (&S)[kOwn][kKeys]) const {
        float sum[kRows][kKeys] = {};
        #pragma unroll kAhead
        for (int c = 0; c < Smem::TileK::kChunks; ++c) {
            const int col = 32 * c + 4 * (lane() % 8);
            if (D % 32 && col >= D) continue;  // @columns-of-k-float
            float k[kKeys][4];
            #pragma unroll
            for (int n = 0; n < kKeys; ++n) ptx::ld_shared_v4_f32(k[n], sK.at(first_key() + key(n), c, lane() % 8));
            #pragma unroll
            for (int r = 0; r < kRows; ++r) {
                float q[4];
                ptx::ld_shared_v4_f32(q, sQ.at(row0 + r, col));
                #pragma unroll
                for (int n = 0; n < kKeys; ++n)
                    #pragma unroll
                    for (int e = 0; e < 4; ++e) sum[r][n] = fmaf(q[e], k[n][e], sum[r][n]);
            }
        }
        add_up<4, kRows>(sum);
        #pragma unroll
        for (int r = 0; r < kOwn; ++r)
            #pragma unroll
            for (int n = 0; n < kKeys; ++n) S[r][n] = sum[r][n];
    }
    // Leaves a number of the lane's r-th row and of the i-th key, for all lanes.
    __device__ void leave(int i, int r, float x) const {
        if (owns_scores()) ptx::st_shared_b32(weights + 4 * (kRows * i + first_row() + r), ptx::float_as_uint(x));
    }
    // O += P V, where P is what was left. seen(i): whether some row sees the i-th key.
    template <class Seen>
    __device__ void multiply_v(typename Smem::TileV sV, Seen seen) {
        #pragma unroll 2 * kAhead
        for (int i = 0; i < kSlice; i += kKeyParts) {
            const int own = i + lane() / kLanesOfRow;
            float P[kRows];
            read(own, P);
            #pragma unroll
            for (int f = 0; f < kFours; ++f) {
                const int col = column(f);
                if (kDimV % (4 * kLanesOfRow) && col >= kDimV) continue;
                float v[4];
                ptx::ld_shared_v4_f32(v, sV.at(own, col / 32, col / 4 % 8));
                #pragma unroll
                for (int e = 0; e < 4; ++e) v[e] = seen(own) ? v[e] : 0.f;  // 0 * NaN of what nobody sees
                #pragma unroll
                for (int r = 0; r < kRows; ++r)
                    #pragma unroll
                    for (int e = 0; e < 4; ++e) O[f][r][e] = fmaf(P[r], v[e], O[f][r][e]);
            }
        }
    }
    // O times what was left of key 0.
    __device__ void scale() {
        float by[kRows];
        read(0, by);
        for_each_four([&](int, int r, float (&x)[4]) {
            #pragma unroll
            for (int e = 0; e < 4; ++e) x[e] *= by[r];
        });
    }
    // The end: of all keys.
    __device__ void finish() {
        for_each_four([](int, int, float (&x)[4]) {
            #pragma unroll
            for (int mask = kLanesOfRow; mask < 32; mask *= 2)
                #pragma unroll
                for (int e = 0; e < 4; ++e) x[e] += ptx::shfl_xor(x[e], mask);  // @keys-of-other-lanes
        });
    }
    // f(first column, row, elements) of O, as far as this lane answers for it.
    template <class F>
    __device__ void for_each_own(F f) {
        for_each_four([&](int four, int r, float (&x)[4]) {
            if (lane() < kLanesOfRow) f(column(four), r, x);
        });
    }

  private:
    __device__ static int column(int four) { return 4 * (lane() % kLanesOfRow) + 128 * four; }
    template <class F>
    __device__ void for_each_four(F f) {
        #pragma unroll
        for (int i = 0; i < kFours; ++i)
            #pragma unroll
            for (int r = 0; r < kRows; ++r) f(i, r, O[i][r]);
    }
    // What was left of the i-th key, of all rows.
    __device__ void read(int i, float (&x)[kRows]) const {
        #pragma unroll
        for (int r = 0; r < kRows; r += 4) {
            float four[4];
            ptx::ld_shared_v4_f32(four, weights + 4 * (kRows * i + r));
            #pragma unroll
            for (int e = 0; e < 4; ++e) x[r + e] = four[e];
        }
    }
    // The first kCount rows of x, over lanes that differ in bits up to kMask: a lane is left with half of them each time, in
    // order, and last with one.
    template <int kMask, int kCount>
    __device__ static void add_up(float (&x)[kRows][kKeys]) {
        if constexpr (kMask > 0) {
            constexpr int kLeft = larger(1, kCount / 2);
            const bool upper = lane() & kMask;
            #pragma unroll
            for (int r = 0; r < kLeft; ++r)
                #pragma unroll
                for (int n = 0; n < kKeys; ++n) {
                    const float low = x[r][n], high = x[kCount - kLeft + r][n];
                    x[r][n] = (upper ? high : low) + ptx::shfl_xor(upper ? low : high, kMask);  // @rows-of-a-lane
                }
            add_up<kMask / 2, kLeft>(x);
        }
    }
};

#endif  // CUPYFLASH_PRODUCTS_FLOAT_CUH
