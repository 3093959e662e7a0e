// The partial results that decode.cuh's blocks leave of the same tile, into the tile's result: the kernel behind it, with as
// many blocks as there are pieces of combine_elements times four columns. Ranges: for every border between two of them the tile
// that it cuts, unless an earlier border cuts that tile too. Splits: for every tile, in the order of its splits.
#ifndef CUPYFLASH_DECODE_COMBINE_CUH
#define CUPYFLASH_DECODE_COMBINE_CUH
#include "decode/repair_decode.cuh"

// What block `number` combines: elements from `begin` on of a tile of which there are parts [first, last].
template <class V>
struct CombinedTile {
    DecodeTile<V> tile;
    int first = 0, last = 0;  // the same: nothing
    int begin;

    __device__ CombinedTile(const DecodeShares<V> &shares, int index, int begin) : begin(begin) {
        const Shares &s = shares.p.shares;
        if (s.splits) {
            tile = shares.tile_at(index), last = tile.end ? shares.parts(tile.cached) - 1 : 0;
            return;
        }
        const int cut = shares.begin(index + 1);
        if (shares.in_clusters || index + 1 >= shares.ranges || cut >= shares.begin(shares.ranges)) return;
        tile = shares.find(cut);
        // @tiles-that-a-border-cuts-first
        if (tile.begin < cut && shares.begin(index) <= tile.begin) first = index, last = shares.range_of(tile.end - 1);
    }
};

template <class V>
__device__ __forceinline__ void decode_combine(const DecodeParams &p) {
    constexpr int kThreads = 32 * V::kWarps;
    static_assert(larger(24 * kThreads, repaired_bytes<V>()) == V::kSmemBytes);
    const Shares &s = p.shares;
    if constexpr (V::kDependent)
        if (!s.clusters) ptx::griddepcontrol_launch_dependents();  // beside idle multiprocessors: see decode.cuh
    const int rows = V::kPacked ? V::kBlockM : min(V::kBlockM, p.problem.seqlen_q * s.group);
    const int pieces = ceil_div(V::kHeads * rows * (V::kHeadDimV / 4), s.combine_elements);
    const int number = ptx::block_index() / pieces, index = number / s.gang;
    const DecodeShares<V> shares(p, number % s.gang);
    const CombinedTile<V> own(shares, index, ptx::block_index() % pieces * s.combine_elements);
    // Also where nothing is combined: what follows on the stream must find the main kernel at its end.
    if constexpr (V::kDependent)
        if (own.first < own.last || ptx::block_index() == 0) ptx::griddepcontrol_wait();
    if (own.first == own.last) return;
    int before = 0;  // packed splits: parts of other tiles
    if constexpr (V::kPacked)
        if (s.splits) before = shares.first_part(own.tile);
    const int end = own.begin + s.combine_elements;
    const auto place = [&](int r) {
        if (!s.splits) return shares.place(own.tile, r);
        const int part = (V::kPacked ? before : index * s.splits) + r;
        return static_cast<long long>(part * s.gang + shares.member) * (V::kHeads * V::kBlockM);
    };
    const bool finite =
        combine_parts<V, kThreads>({shares, own.tile}, own.first, own.last, place, own.begin, end, ptx::dynamic_smem());
    // @combined-and-finite
    if (ptx::bar_red_or(0, kThreads, !finite))
        repair_elements<V>(shares, own.tile, own.begin, end, ptx::dynamic_smem());
}

#endif  // CUPYFLASH_DECODE_COMBINE_CUH
