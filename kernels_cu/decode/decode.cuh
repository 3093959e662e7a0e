// Attention of few query rows to the long K and V of a cache,
//     O = softmax(scale * Q K^T) V,   lse = ln sum exp(scale * Q K^T),
// bound by how fast K and V are read. No host ever sees a length.
//
// The query rows of all heads that share a K/V head are packed into the rows of one mma tile (rows.cuh). Every block has a
// contiguous range of units of work (shares.cuh, slices.cuh). In it a team of kTeam warps, one for every kWarpRows packed
// rows, works for itself: it takes every kTeams-th unit, brings K and V into its own ring of stages (load_*.cuh), computes S, P,
// O and softmax statistics (warp_decode.cuh; of 8-bit caches warp_stored.cuh, of fp32 warp_float.cuh), and asks for the next
// unit, of the next tile too. Beside a block mask it passes by the units of which no row sees anything (seen_units.cuh).
// No other team is waited for until the tile ends. There is no producer: with kStages units in flight in every team, it does
// not matter that those who ask also compute.
//
// Whole rows. A row of the cache holds all heads, and DRAM is 2 to 7 % faster if those of one row are read at the same time.
// kHeads > 1: units of neighbouring heads follow each other; the number of teams is a multiple of that of units a slice, so a
// team stays with its heads. kPair > 1: a unit is of so many heads itself. gang > 1: so many neighbouring blocks go through the
// same keys side by side, each for heads of its own, and keep in step well enough by themselves.
//
// The end of a tile. The teams of each head add up through shared memory, while the next tile's first stages arrive. If the tile
// lies in the block's range that is the result; otherwise the block leaves a partial result in fp32, and the kernel behind
// this one combines them (decode_combine.cuh), or the blocks of a cluster do (parts.cuh).
#ifndef CUPYFLASH_DECODE_CUH
#define CUPYFLASH_DECODE_CUH
#include "decode/cursor.cuh"
#include "decode/merge.cuh"
#include "decode/repair_decode.cuh"

// The end of a tile that a cluster shares.
template <class V, class Part>
__device__ __forceinline__ void combine_in_cluster(const DecodeShares<V> &shares, Part &part,
                                                   const DecodeTile<V> &tile) {
    const DecodeCluster<V> cluster{part.smem.base};
    const auto leave = [&](const PartialSum &sum, int, int row, int col) {
        cluster.leave((row * V::kHeadDimV + col) / 4, sum);
    };
    merge_teams<V>(part, [] {}, leave);
    const int all = part.rows.count * (V::kHeadDimV / 4), share = ceil_div(all, V::kCluster);
    const int first = min(all, static_cast<int>(ptx::cluster_ctarank()) * share), last = min(all, first + share);
    const bool finite = cluster.combine(part.rows, first, last);
    if (ptx::bar_red_or(0, 32 * V::kWarps, !finite)) repair_elements(shares, tile, first, last, part.smem.scratch());
}

template <class V, class Loader>
__device__ __forceinline__ void decode_keys(const typename Loader::Source &source) {
    using Smem = DecodeSmem<V>;
    using Own = typename Either<sizeof(typename V::Element) == 4, FloatWarp<V>, DecodeWarp<V>>::Type;
    using Part = typename Either<kScaled<V>, StoredWarp<V, typename Loader::Scales>, Own>::Type;
    constexpr int kThreads = 32 * V::kWarps, kTeams = Smem::kTeams;
    static_assert(Smem::kBars + Loader::kBytes == V::kSmemBytes);
    static_assert(repaired_bytes<V>() <= Smem::kWeights - Smem::kScratch);  // what comes next is in use by then
    const DecodeParams &p = Loader::plain(source);
    const Smem smem{Loader::shared_memory()};
    const int warp_index = ptx::shfl_index(warp(), 0), team = warp_index / V::kTeam;
    Loader::prepare(source, smem, warp_index);
    if constexpr (Loader::kDependent) {  // nothing that others may have written has been read yet
        ptx::griddepcontrol_wait();      // @appended-rows-awaited
        // Only now: the kernel that combines reads lengths at once. Where there is none, the next call would start on the
        // multiprocessors that these clusters leave idle, and read at half of the rate there (docs/performance.md).
        if (!V::kCluster || p.partial_o) ptx::griddepcontrol_launch_dependents();
    }

    const int block = ptx::block_index();
    const int gang = p.shares.gang,
              member = p.shares.splits ? block % gang : block - quick_divide(block, p.shares.by_gang) * gang;
    const DecodeShares<V> shares(p, V::kCluster ? 0 : member);
    const OwnUnits<V> own(shares);
    if (!(V::kCluster && shares.in_clusters) && own.begin == own.end) return;
    // This team's first unit from `unit` on.
    const auto own_from = [&](int unit) { return unit + (team + kTeams - unit % kTeams) % kTeams; };
    Loader loader(source, shares, smem, own.start, warp_index, own_from(own.begin), own.end);
    ptx::bar_sync();  // @q-and-barriers-are-there

    DecodeCursor<V> at(shares, own.start, own.begin);
    #pragma unroll 1
    while (true) {
        loader.wait_q();
        const int first_key = at.tile.cached.first_slice * kSlice;
        const int own_first = first_key + (own_from(at.unit) - at.tile.begin) / Smem::kGroups * kSlice;
        if constexpr (kScaled<V>) {
            StoredQueries<V>::prepare(smem, PackedRows<V>(shares, at.tile).count);
            Loader::show_q_to_copies();
            ptx::bar_sync();  // @q-is-prepared
        }
        Part part(shares, smem, at.tile, warp_index, own_first);
        #pragma unroll 1
        for (int unit = at.seen_from(shares, at.tile, team, own_from(at.unit)); unit < min(own.end, at.tile.end);
             unit = at.seen_from(shares, at.tile, team, unit + kTeams)) {
            const ptx::u32 stage = loader.wait();
            const int key = first_key + (unit - at.tile.begin) / Smem::kGroups * kSlice;
            part.unit(stage, key, at.is_shown());
            loader.release();
        }
        if constexpr (V::kCluster > 0)
            if (shares.in_clusters) return combine_in_cluster(shares, part, at.tile);
        const DecodeTile<V> tile = at.tile;
        const bool more = tile.end < own.end;
        const bool whole = p.shares.splits ? own.whole : own.begin <= tile.begin && tile.end <= own.end;
        const long long place =
            p.shares.splits ? own.place : shares.place(tile, quick_divide(ptx::block_index(), p.shares.by_gang));
        if (more) at.unit = tile.end, at.catch_up(shares);
        bool finite = true;
        const auto request_next_q = [&] {
            if (more) loader.request_q(at.tile);
        };
        merge_teams<V>(part, request_next_q, [&](PartialSum &sum, int head, int row, int col) {
            if (whole) {
                finite = sum.store(part.rows, head, row, col) && finite;
            } else {
                const long long to = place + head * Smem::kRows + row;
                store4(p.partial_o + to * V::kHeadDimV + col, sum.x);
                if (col == 0) p.partial_ml[2 * to] = sum.top, p.partial_ml[2 * to + 1] = sum.sum;
            }
        });
        // @written-and-finite
        if (whole && ptx::bar_red_or(0, kThreads, !finite)) repair_elements(shares, tile, 0, 1 << 30, smem.scratch());
        if (!more) return;
    }
}

#endif  // CUPYFLASH_DECODE_CUH
