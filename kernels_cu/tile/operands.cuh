// Operands of the GEMMs of one warp, as fragments that mma.sync takes: from shared memory, and those of A from registers, too.
#ifndef CUPYFLASH_OPERANDS_CUH
#define CUPYFLASH_OPERANDS_CUH
#include "tile/tile.cuh"

// Where a lane reads its share of a fragment: of four matrices of 8 x 8 in a tile, side by side, the pair at row g, columns 2 t
// and 2 t + 1 of each, or the same of its transpose. kColumnsFirst: matrices 0 and 1 lie in the same rows, not columns.
template <class Tile, bool kColumnsFirst, bool kTransposed>
struct FourMatrices {
    using T = typename Tile::Element;
    using Pair = typename T::Pair;
    static constexpr int kPeriod = larger(Tile::kSwizzle / 2, 1);  // steps of 16 columns after which rows repeat
    Tile from[kPeriod];                                            // where step i begins

    __device__ FourMatrices(const Tile &tile, int row, int col) {
        const int lane = fresh_lane();
        if constexpr (sizeof(T) == 2) {
            #pragma unroll
            for (int i = 0; i < kPeriod; ++i)
                from[i].base = kColumnsFirst ? tile.at(row + lane / 16 * 8 + lane % 8, col + 16 * i + lane / 8 % 2 * 8)
                                             : tile.at(row + lane % 16, col + 16 * i + lane / 16 * 8);
        } else {
            from[0].base = kTransposed ? tile.at(row + 2 * (lane % 4), col + lane / 4)
                                       : tile.at(row + lane / 4, col + 2 * (lane % 4));
        }
    }
    // Those that begin row rows and col columns further, multiples of 8 and of 16.
    __device__ __forceinline__ void load(Pair (&x)[4], int row, int col) const {
        if constexpr (sizeof(T) == 2) {
            const int step = col / 16;
            // @place-of-the-step
            const ptx::u32 at = from[step % kPeriod].rows(row).base + step / kPeriod * kPeriod * 32;
            if constexpr (kTransposed) ptx::ldmatrix_x4_trans(x, at);
            else ptx::ldmatrix_x4(x, at);
        } else {
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = row + 8 * (kColumnsFirst ? i / 2 : i % 2), c = col + 8 * (kColumnsFirst ? i % 2 : i / 2);
                if constexpr (kTransposed)
                    x[i] = {ptx::uint_as_float(ptx::ld_shared_b32(from[0].at(r, c))),
                            ptx::uint_as_float(ptx::ld_shared_b32(from[0].at(r + 1, c)))};
                else x[i] = ld_shared_pair<T>(from[0].at(r, c));
            }
        }
    }
};

// ---- A operands: [kRows, kDepth] as fragments of 16 x 16; get(k) gives those of depth step k. kUnroll: see gemm ----

// In registers.
template <class T, int kRows, int kDepth>
struct FragA {
    static constexpr int kRowTiles = kRows / 16, kSteps = kDepth / 16, kUnroll = kSteps;
    using Pair = typename T::Pair;
    Pair x[kSteps][kRowTiles][4];

    __device__ void get(int k, Pair (&a)[kRowTiles][4]) const {
        #pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
            #pragma unroll
            for (int i = 0; i < 4; ++i) a[r][i] = x[k][r][i];
    }
    // The accumulator of one GEMM, rounded to T, is the A operand of the next: same lanes, no shuffle.
    __device__ void from(const AccTile<kRows, kDepth> &acc, int k) {  // depth step k
        #pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float *pair = &acc.x[r][2 * k + i / 2][2 * (i % 2)];
                x[k][r][i] = T::pack(pair[0], pair[1]);
            }
    }
    __device__ void from(const AccTile<kRows, kDepth> &acc) {
        #pragma unroll
        for (int k = 0; k < kSteps; ++k) from(acc, k);
    }
    // Reads it, of 16 bits, from rows [row0, ...), columns [col0, ...) of a shared-memory tile.
    template <class Tile>
    __device__ void load(const Tile &tile, int row0, int col0 = 0) {
        const int lane = fresh_lane();
        #pragma unroll
        for (int k = 0; k < kSteps; ++k)
            #pragma unroll
            for (int r = 0; r < kRowTiles; ++r)
                ptx::ldmatrix_x4(x[k][r], tile.at(row0 + 16 * r + lane % 16, col0 + 16 * k + lane / 16 * 8));
    }
    // Writes the operand to rows [row0, ...), columns [col0, ...), a multiple of the operand's, of a shared-memory tile.
    template <class Tile>
    __device__ void store(const Tile &tile, int row0, int col0) const {
        const int lane = fresh_lane();
        const ptx::u32 first = tile.at(row0 + lane / 4, col0 + 2 * (lane % 4));
        #pragma unroll
        for (int k = 0; k < kSteps; ++k)
            #pragma unroll
            for (int r = 0; r < kRowTiles; ++r)
                #pragma unroll
                for (int i = 0; i < 4; ++i)
                    st_shared_pair(tile.behind(first, 16 * r + 8 * (i % 2), 16 * k + 8 * (i / 2)), x[k][r][i]);
    }
};

// Rows [row0, row0 + kRows_) of a shared-memory tile.
template <class Tile, int kRows_>
struct SmemA {
    static constexpr int kRowTiles = kRows_ / 16, kSteps = Tile::kCols / 16, kUnroll = kSteps;
    const FourMatrices<Tile, false, false> from;

    __device__ SmemA(const Tile &tile, int row0) : from(tile, row0, 0) {}
    __device__ void get(int k, typename Tile::Element::Pair (&a)[kRowTiles][4]) const {
        #pragma unroll
        for (int r = 0; r < kRowTiles; ++r) from.load(a[r], 16 * r, 16 * k);
    }
};

// The same, of which few depth steps are unrolled: for where registers are scarce.
template <class Tile, int kRows_>
struct FewSteps : SmemA<Tile, kRows_> {
    static constexpr int kSteps = SmemA<Tile, kRows_>::kSteps;
    static constexpr int kUnroll = sizeof(typename Tile::Element) == 4 ? (kSteps % 2 == 0 ? 2 : 1)
                                   : kSteps <= 4                       ? kSteps
                                   : kSteps % 4 == 0                   ? 4
                                   : kSteps % 3 == 0                   ? 3
                                   : kSteps % 2 == 0                   ? 2
                                                                       : 1;
    using SmemA<Tile, kRows_>::SmemA;
};

// Columns [col0, col0 + kRows_) of a shared-memory tile, transposed.
template <class Tile, int kRows_, int kUnroll_>
struct SmemATransposed {
    static constexpr int kRowTiles = kRows_ / 16, kSteps = Tile::kRows / 16, kUnroll = kUnroll_ ? kUnroll_ : kSteps;
    const FourMatrices<Tile, true, true> from;

    __device__ SmemATransposed(const Tile &tile, int col0) : from(tile, 0, col0) {}
    __device__ void get(int k, typename Tile::Element::Pair (&a)[kRowTiles][4]) const {
        #pragma unroll
        for (int r = 0; r < kRowTiles; ++r) from.load(a[r], 16 * k, 16 * r);
    }
};

#endif  // CUPYFLASH_OPERANDS_CUH
