// Slices: 16 keys of one K/V head, the units of work, and shared memory: rings of slices, where kScaleBytes with the scales of
// their keys | Q | scratch of the merge | statistics of the merge | of fp32, P of a slice | what the loader needs.
#ifndef CUPYFLASH_SLICES_CUH
#define CUPYFLASH_SLICES_CUH
#include "decode/stored.cuh"

constexpr int kSlice = 16;  // keys: the depth of one mma

__device__ constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

// A slice as TMA writes it: boxes of kBoxRows keys one after the other, in a box chunks of 128 bytes a key. The
// 16-byte piece c of the 128-byte line i is in place c ^ (i % 8); TMA needs it aligned to 1024 bytes.
template <int kBoxRows, int kRowBytes>
struct SliceTile {
    static constexpr int kChunks = ceil_div(kRowBytes, 128), kBytes = kSlice * kChunks * 128;
    static constexpr int kChunkBytes = kBoxRows * 128;  // of all keys of a box
    ptx::u32 base;

    __device__ ptx::u32 at(int row, int chunk, int piece) const {
        const int line = (row / kBoxRows * kChunks + chunk) * kBoxRows + row % kBoxRows;
        return base + line * 128 + (piece ^ line % 8) * 16;  // @pieces-swizzled
    }
};

// Of rows of 64 bytes, two to a line of 128: the piece c of a row of the line i is in place c ^ (i % 4) of its half (TMA's 64-byte
// swizzle, aligned to 512 bytes).
template <int kBoxRows>
struct HalfLines {
    static constexpr int kChunks = 1, kBytes = kSlice * 64, kChunkBytes = kBytes;
    ptx::u32 base;

    __device__ ptx::u32 at(int row, int /* chunk */, int piece) const {
        return base + row * 64 + (piece ^ row / 2 % 4) * 16;  // @pieces-swizzled-in-halves
    }
};

// Teams of kTeam warps, of kWarpRows query rows each, share slices. A stage of a team's ring holds K and V of one slice of kPair
// heads: a unit. Of each slice of the block's kHeads heads there are kGroups units, and kMerge teams take those of the same heads.
template <class V>
struct DecodeSmem {
    using T = typename V::Element;
    static constexpr int D = round_up(V::kHeadDim, 16), kDimV = round_up(V::kHeadDimV, 16), kRows = V::kBlockM;
    static constexpr int kTeams = V::kWarps / V::kTeam, kGroups = V::kHeads / V::kPair, kMerge = kTeams / kGroups;
    static_assert(kRows == V::kWarpRows * V::kTeam && kTeams * V::kTeam == V::kWarps);
    static_assert(kGroups * V::kPair == V::kHeads && kMerge * kGroups == kTeams);
    using TileQ = SmemTile<T, kRows, D, true>;  // a row's end holds its scale (queries.cuh)
    template <int kRowBytes>
    using Slice =
        typename Either<kScaled<V> && kRowBytes == 64, HalfLines<V::kBoxRows>, SliceTile<V::kBoxRows, kRowBytes>>::Type;
    using TileK = Slice<D * sizeof(Stored<V>)>;
    using TileV = Slice<kDimV * sizeof(Stored<V>)>;
    static_assert(sizeof(Stored<V>) == V::kKvBytes);
    static constexpr int kScaleBytes = kSlice * V::kScaleBytes;  // of the keys of one of K and V
    static constexpr int kStageBytes = V::kPair * (TileK::kBytes + TileV::kBytes + 2 * kScaleBytes);
    static constexpr int kQ = kTeams * V::kStages * kStageBytes, kScratch = kQ + V::kHeads * TileQ::kBytes;
    // The merge: kColumns columns of all rows at a time, or more of fewer rows; a row is padded by 8 floats.
    static constexpr int kStats = kScratch + kTeams * kRows * (V::kColumns + 8) * 4;
    static constexpr int kWeights = kStats + kTeams * kRows * 8;
    static constexpr int kBars = kWeights + (sizeof(T) == 4 ? kTeams * kRows * kSlice * 4 : 0);
    ptx::u32 base;

    __device__ ptx::u32 stage(int team, int i) const { return base + (team * V::kStages + i) * kStageBytes; }
    __device__ TileK k(ptx::u32 stage, int head) const { return {stage + head * TileK::kBytes}; }
    __device__ TileV v(ptx::u32 stage, int head) const {
        return {stage + V::kPair * TileK::kBytes + head * TileV::kBytes};  // @v-behind-k
    }
    __device__ ptx::u32 scales(ptx::u32 stage) const { return stage + V::kPair * (TileK::kBytes + TileV::kBytes); }
    __device__ TileQ q(int head) const { return {base + kQ + head * TileQ::kBytes}; }
    __device__ ptx::u32 scratch() const { return base + kScratch; }
    __device__ ptx::u32 stats(int team, int row) const { return base + kStats + (team * kRows + row) * 8; }
    __device__ ptx::u32 weights(int team, int row) const {
        return base + kWeights + (team * kRows + row) * (kSlice * 4);  // @p-of-the-warp
    }
    __device__ ptx::u32 bars() const { return base + kBars; }
};

#endif  // CUPYFLASH_SLICES_CUH
