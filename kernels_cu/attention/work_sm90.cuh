// Tiles of work of a persistent block: who draws which, and how one is handed from the producer to all other roles.
#ifndef CUPYFLASH_WORK_SM90_CUH
#define CUPYFLASH_WORK_SM90_CUH
#include "attention/lists.cuh"
#include "attention/packed_sm90.cuh"
#include "attention/key_parts.cuh"
#include "tile/pipeline_sm90.cuh"

// The numbers of the tiles that a block computes: its own index, then what it draws from a counter that all blocks share.
// The last block to finish clears the counter for the next launch. Without a counter the numbers come in a fixed stride.
struct TileNumbers {
    int *counter;  // tiles drawn, blocks that are done
    int number;

    __device__ explicit TileNumbers(int *counter) : counter(counter), number(ptx::block_index()) {}
    __device__ void draw() {
        // @numbers-differ
        number = counter ? ptx::grid_size() + ptx::atomic_add(counter, 1) : number + ptx::grid_size();
    }
    __device__ void finish() const {
        if (counter && ptx::atomic_add_acq_rel(counter + 1, 1) == ptx::grid_size() - 1) {  // @last-block-done
            ptx::st_release(counter, 0);                                                   // @counter-cleared
            ptx::st_release(counter + 1, 0);                                               // @done-count-cleared
        }
    }
};

// Packed, a block's first tile is known late: the maps that its loads need are fetched meanwhile. By all threads.
template <class V, class... Maps>
__device__ __forceinline__ void prefetch_if_packed(const Maps &...maps) {
    if (V::kPacked && ptx::thread_index() == 0) (ptx::prefetch_tensormap(maps), ...);
}

__device__ __forceinline__ void draw_by_warp(TileNumbers &numbers) {
    if (lane() == 0) numbers.draw();
    numbers.number = ptx::shfl_index(numbers.number, 0);
}

// Items of the queue: a tile. Its sequence is looked up again, but if packed, where that would take a while.
template <bool kPacked>
using TileQueue = WorkQueue<kPacked ? 2 : 1, kPacked>;

template <bool kPacked>
__device__ __forceinline__ typename TileQueue<kPacked>::Item pack_tile(const Tile<kPacked> &tile) {
    const auto u = [](int x) { return static_cast<ptx::u32>(x); };
    const Sequence<kPacked> &s = tile.sequence;
    if constexpr (kPacked)
        return {{{u(tile.block), u(tile.head), u(s.index), u(s.row_q)},
                 {u(s.row_k), u(s.seqlen_q), u(s.seqlen_k), u(s.rows_k)}}};
    else return {{{u(tile.block), u(tile.head), u(s.index)}}};
}
template <bool kPacked, class Params>
__device__ __forceinline__ Tile<kPacked> unpack_tile(const Params &p, const typename TileQueue<kPacked>::Item &item) {
    const auto x = [&](int i) { return static_cast<int>(item.x[i / 4].x[i % 4]); };
    if constexpr (kPacked) return {x(0), x(1), {x(2), x(5), x(6), x(3), x(4), x(7)}};  // @sequence-in-the-queue
    else return {x(0), x(1), Sequence<false>::of(p, x(2))};
}

// Tile after tile, drawn and published by one thread, the producer of K and V; block is -1 where there are no more.
template <class V, class Rows, int kRows, bool kDescending, class Params>
struct TileSource {
    const Params &p;
    TileNumbers numbers;
    TileQueue<false> queue;
    const int count;

    __device__ TileSource(const Params &p, int *counter, const TileQueue<false> &queue)
        : p(p), numbers(counter), queue(queue), count(count_tiles<V, Rows, kRows>(p)) {}

    __device__ void draw() { numbers.draw(); }
    __device__ Tile<false> next() {
        Tile<false> tile{-1, 0, {}};
        if (numbers.number < count) tile = tile_at<V, Rows, kRows, kDescending>(p, numbers.number);
        queue.publish(pack_tile(tile));
        if (tile.block < 0) numbers.finish();
        return tile;
    }
};

// Packed, a warp does that and nothing else, since looking up a sequence takes a while: when the producer asks, not earlier, or
// blocks would hold tiles that others have the time for. Tiles without rows are passed over.
template <class Rows, int kRows, class Tiles>
__device__ __forceinline__ void schedule_tiles(const Tiles &tiles, int count, int *counter, TileQueue<true> queue) {
    TileNumbers numbers(counter);
    RingPosition<1> requests;
    for (bool is_wanted = true; is_wanted;) {
        Tile<true> tile{-1, 0, {}};
        while (tile.block < 0 && numbers.number < count) {
            const Tile<true> found = tiles.at(numbers.number);
            if (found.block * kRows < Rows::rows(found.sequence)) tile = found;
            else draw_by_warp(numbers);
        }
        if (lane() == 0) queue.publish(pack_tile(tile));
        is_wanted = tile.block >= 0;
        if (is_wanted) {
            queue.wait_until_asked(requests);
            draw_by_warp(numbers);
        }
    }
    if (lane() == 0) numbers.finish();
}
template <class V, class Rows, int kRows, bool kDescending, class Params>
__device__ __forceinline__ void schedule_tiles(const Params &p, int *counter, const TileQueue<true> &queue) {
    const int count = count_tiles<V, Rows, kRows>(p);
    if (p.problem.batch <= 32)
        schedule_tiles<Rows, kRows>(KeptTiles<V, Rows, kRows, kDescending, Params>(p), count, counter, queue);
    else schedule_tiles<Rows, kRows>(SearchedTiles<V, Rows, kRows, kDescending, Params>{p}, count, counter, queue);
}

// The same tiles as one thread finds them in the queue, and asks for the next. As a lane of a warp whose others wait for it in
// each step, it costs a forward 5 % of its time (docs/performance.md).
template <class Params>
struct TileFollower {
    const Params &p;
    TileQueue<true> queue;

    __device__ void draw() const { queue.ask(); }
    __device__ Tile<true> next() { return unpack_tile<true>(p, queue.next_alone()); }
};

// The tiles of the producer of K and V, one thread.
template <class V, class Rows, int kRows, bool kDescending, class Params>
__device__ __forceinline__ auto producer_tiles(const Params &p, int *counter, const TileQueue<V::kPacked> &queue) {
    if constexpr (V::kPacked) return TileFollower<Params>{p, queue};
    else return TileSource<V, Rows, kRows, kDescending, Params>(p, counter, queue);
}

// Which part of the keys a tile visits; here there is one.
template <bool kSplitKeys>
struct PartOf {
    static constexpr int part = 0;
    __device__ PartOf(int) {}
};
template <>
struct PartOf<true> {
    int part;
    __device__ PartOf(int part) : part(part) {}
};

// A tile of kBlockM queries, and which key blocks [first, end) its rows see. An empty range is widened to one block, in which
// the mask then hides everything. With a block mask these are numbers in the tile's list.
template <class V>
struct QueryWork : ListOf<V>, PartOf<V::kSplitKeys> {
    int block, head;  // block: along the sequence; -1: there are no more tiles
    SequenceOf<V> sequence;
    int q0, first, end;

    template <class Params>
    __device__ QueryWork(const Tile<V::kPacked> &tile, const Params &p)
        : PartOf<V::kSplitKeys>(part_number<V>(p, tile.head)),
          block(tile.block),
          head(tile_number<V>(p, tile.head)),
          sequence(with_part<V>(tile.sequence, p, this->part)),
          q0(block * V::kBlockM) {
        if constexpr (V::kBlockMask) {
            first = 0, end = 1;
            if (!exists()) return;
            const ListPart<V> visited(p, sequence, head, block, this->part);
            end = max(1, visited.count);
            if constexpr (V::kSplitKeys) sequence = visited.keys_of(tile.sequence);
            if (!V::kSplitKeys || visited.count > 0) this->list = visited.list;
        } else {
            const Mask<V> mask(sequence, p.problem);
            first = mask.first_key_block(q0), end = max(first + 1, mask.end_key_block(q0));
        }
    }
    __device__ bool exists() const { return block >= 0; }
    __device__ int head_k(const Problem &p) const { return head / (p.heads_q / p.heads_k); }  // @head-of-k-sm90
};

#endif  // CUPYFLASH_WORK_SM90_CUH
