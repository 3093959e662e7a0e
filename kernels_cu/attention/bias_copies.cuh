// A bias brought into shared memory ahead of the scores that it is added to: each warp copies that of its own tile while the tile
// before is computed (cp.async), and reads it as fragments (ldmatrix) where scores are formed. Copies take no registers while they
// are under way, and read lines as they lie; what added.cuh fetches into registers arrives when scores have waited for it.
//
// For a bias of 16-bit elements whose rows lie in chunks of 16 bytes, where a tile leaves room (kCopiesBias).
#ifndef CUPYFLASH_BIAS_COPIES_CUH
#define CUPYFLASH_BIAS_COPIES_CUH
#include "attention/bias.cuh"

// That of kKeys keys by kQueries, an accumulator of a warp whose rows are the keys.
template <class V, int kQueries, int kKeys = 16>
struct BiasCopy {
    using Element = typename V::Element;
    using Tile = SmemTile<Element, kQueries, kKeys>;
    static constexpr int kChunks = kKeys / 8, kBytes = Tile::kBytes;
    static constexpr int kTaken = 32 / kChunks;  // queries at a time: four matrices of 8 by 8
    static_assert(kQueries % 16 == 0 && (kChunks == 2 || kChunks == 4));
    Tile tile;  // this warp's

    // kTaken queries from `first` on, by their places in the whole.
    struct Taken {
        FetchedBias<Element, false, kKeys, kTaken> part;
        int first;

        __device__ Addend operator()(int queries, int keys) const { return part(queries - first, keys); }
    };

    // Asks for the elements from a query and key on, once all lanes have taken what was asked for before.
    __device__ __forceinline__ void request(const AddedArray<V, false> &bias, int query, int key0) const {
        ptx::bar_warp_sync();  // @copy-of-bias-taken
        const int lane = fresh_lane(), chunk = lane % kChunks, key = key0 + 8 * chunk;
        #pragma unroll 1
        for (int n = 0; n < kQueries * kChunks / 32; ++n) {
            const int row = 32 / kChunks * n + lane / kChunks;
            const bool exists = query + row < bias.seqlen_q && key < bias.seqlen_k;  // else 0 @copied-bias-that-exists
            const Element *const from = exists ? bias.head + (query + row) * bias.row + key : bias.head;
            ptx::cp_async_16(tile.at(row, 8 * chunk), from, exists);
        }
        ptx::cp_async_commit_group();
    }
    // What was asked for is here.
    __device__ __forceinline__ void await() const {
        ptx::cp_async_wait_group<0>();  // @copy-of-bias-landed
        ptx::bar_warp_sync();           // of all lanes @copy-of-bias-of-all-lanes
    }
    __device__ __forceinline__ Taken take(int first) const {
        // Of keys 0, 8 and so on, then the same of the next eight queries.
        const int lane = fresh_lane(), chunk = lane / 8 % kChunks;
        const int query = first + lane / (8 * kChunks) * 8 + lane % 8;
        ptx::u32 x[4];
        ptx::ldmatrix_x4_trans(x, tile.at(query, 8 * chunk));  // @queries-of-the-copy
        Taken found{{}, first};
        #pragma unroll
        for (int n = 0; n < 4; ++n) found.part.pair[n % kChunks][n / kChunks] = {x[n]};
        return found;
    }
};

#endif  // CUPYFLASH_BIAS_COPIES_CUH
