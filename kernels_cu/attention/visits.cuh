// Which query tiles a block of the backward visits: all that see its keys, or those of its list (lists.cuh).
#ifndef CUPYFLASH_VISITS_CUH
#define CUPYFLASH_VISITS_CUH
#include "attention/shares.cuh"

// One visit: a query tile of a head.
struct Visit { int head, m_block; };

// The query tiles that keys [k0, k0 + kBlockN) visit: head by head of the group, each in descending order.
template <class V, bool kListed = V::kBlockMask>
struct QueryTiles {
    int first, blocks, count;  // query tiles [first, first + blocks) of each head; visits in all

    __device__ QueryTiles(const Mask<V> &mask, int k0, int group)
        : first(mask.first_query_block(k0)), blocks(max(0, mask.end_query_block(k0) - first)) {
        if (!Mask<V>::kAllCount && !mask.some_count(k0)) blocks = 0;  // @visits-of-no-key
        count = group * blocks;                                       // @visits-of-all-heads
    }
    __device__ QueryTiles(const BwdParams &, const Mask<V> &mask, const Tile<V::kPacked> &tile, int group)
        : QueryTiles(mask, tile.block * V::kBlockN, group) {}
    __device__ Visit begin(int head) const { return {head, first + blocks - 1}; }
    __device__ Visit after(const Visit &v) const {
        return v.m_block > first ? Visit{v.head, v.m_block - 1} : begin(v.head + 1);
    }
    __device__ bool is_last_of_head(const Visit &v) const { return v.m_block == first; }
    __device__ bool nothing_of(int /* head */) const { return count == 0; }
    // How many key blocks the visit's tile visits before number `block`, if all go in order.
    __device__ static int rank(const Visit &v, const Mask<V> &mask, int block) {
        return block - mask.first_key_block(v.m_block * V::kBlockM);  // @rank-in-the-query-tile-sm80
    }
};

// The same by lists, one a head of q. A visit knows its list, and so its way to the next one.
struct ListedVisit : Visit {
    const int *list;
    int i;  // in the list
    ListedBlock tile;
};

template <class V>
struct QueryTiles<V, true> {
    const BwdParams &p;
    const int *first;  // the list of the group's first head
    int count;         // visits in all

    __device__ QueryTiles(const BwdParams &p, const Mask<V> &, const Tile<V::kPacked> &tile, int group)
        : p(p), first(query_list<V>(p, tile.sequence, tile.head * group, tile.block)), count(0) {
        for (int n = 0; n < group; ++n) count += of(n);  // @visits-of-all-lists
    }
    // How many there are of a head, counted from the group's first one.
    __device__ int of(int n) const { return first[n * to_next_head()]; }
    __device__ ListedVisit begin(int head) const { return found(head, first, 0); }
    __device__ ListedVisit after(const ListedVisit &v) const { return found(v.head, v.list, v.i + 1); }
    __device__ static bool is_last_of_head(const ListedVisit &v) { return v.i + 1 == v.list[0]; }
    __device__ bool nothing_of(int n) const { return of(n) == 0; }
    // How many key blocks the visit's tile visits before this one, if all go in order.
    __device__ int rank(const ListedVisit &v, const Mask<V> &, int /* block */) const { return rank(v); }
    __device__ int rank(const ListedVisit &v) const { return v.list[1 + listed_queries<V>(aside(p)) + v.i]; }

  private:
    // Whether the heads of q have lists of their own, or one for all, those of a key block lie so far apart.
    __device__ long long to_next_head() const { return query_lists_of_head<V>(aside(p)); }
    // The i-th of a head, or the first one of the next head that has any. There may be no more.
    __device__ ListedVisit found(int head, const int *list, int i) const {
        const int heads = aside(p).problem.heads_q;
        while (i >= list[0]) {
            if (++head >= heads) return {{head, 0}, list, 0, {0}};
            list += to_next_head(), i = 0;  // @next-head-with-visits
        }
        const ListedBlock tile{list[1 + i]};
        return {{head, tile.block()}, list, i, tile};
    }
};

// The keys of a block, and the query tiles that it visits: head by head of the group, each in descending order.
template <class V, bool kListed = V::kBlockMask>
struct BwdVisits {
    int key_head;  // as tiles are counted (shares.cuh)
    SequenceOf<V> sequence;
    int k0, block;             // first key, and the block's number in the sequence
    int first, blocks, count;  // query tiles [first, first + blocks) of each head; visits in all
    int head, m_block;         // the current visit

    __device__ BwdVisits(const BwdParams &p, const Tile<V::kPacked> &tile)
        : key_head(tile.head),
          sequence(with_range<V>(tile.sequence, p)),
          k0(tile.block * V::kBlockN),
          block(tile.block) {
        const Mask<V> mask(sequence, p.problem);
        const int group = KeysOf<V>::group(p);
        const QueryTiles<V> tiles(mask, k0, group);
        first = tiles.first, blocks = tiles.blocks, count = tiles.count;
        head = key_head * group, m_block = first + blocks - 1;  // @first-head-of-the-group-sm90
    }
    __device__ void next() {
        if (--m_block < first) ++head, m_block = first + blocks - 1;
    }
    __device__ bool is_last_of_head() const { return m_block == first; }
    __device__ bool nothing_of(int /* head */) const { return count == 0; }
    __device__ int q0() const { return m_block * V::kBlockM; }
};

template <class V>
struct BwdVisits<V, true> {
    int key_head;
    SequenceOf<V> sequence;
    int k0, block;
    QueryTiles<V> tiles;
    int count, head, m_block;
    ListedVisit current;

    __device__ BwdVisits(const BwdParams &p, const Tile<V::kPacked> &tile)
        : key_head(tile.head),
          sequence(with_range<V>(tile.sequence, p)),
          k0(tile.block * V::kBlockN),
          block(tile.block),
          tiles(p, Mask<V>(sequence, p.problem), tile, KeysOf<V>::group(p)),
          count(tiles.count) {
        visit(tiles.begin(key_head * KeysOf<V>::group(p)));
    }
    __device__ void next() { visit(tiles.after(current)); }
    __device__ bool is_last_of_head() const { return tiles.is_last_of_head(current); }
    __device__ bool nothing_of(int head) const { return tiles.of(head - key_head * KeysOf<V>::group(tiles.p)) == 0; }
    __device__ int q0() const { return m_block * V::kBlockM; }
    __device__ int rank() const { return tiles.rank(current); }
    // What a group of 64 of the keys sees of the tile.
    __device__ int sight(int group) const { return current.tile.sight(group); }

  private:
    __device__ void visit(const ListedVisit &v) { current = v, head = v.head, m_block = v.m_block; }
};

#endif  // CUPYFLASH_VISITS_CUH
