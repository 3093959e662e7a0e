// In which order a block of the backward visits query tiles where each visit adds a share to dQ (dq_accum.cuh), and who
// stores the first share of a tile.
//
// Where every key block visits all query tiles and the first share is stored, block b of n begins after b / n of them. In the
// first n-th of its visits it meets tiles that nobody was at, and stores its share; it comes to the others' once these have
// stored theirs. All store equally many, and hardly anybody waits. In deterministic mode, too, whose order of shares follows:
// that of who stores, then the block before, and so on. Blocks wait for such with a higher index: the plan sees to it that
// all of a head of a sequence run at the same time.
#ifndef CUPYFLASH_DQ_VISITS_CUH
#define CUPYFLASH_DQ_VISITS_CUH
#include "attention/dq_accum.cuh"
#include "attention/tile_list.cuh"
#include "attention/visits.cuh"

template <class V>
struct DqVisits : BwdVisits<V> {
    static constexpr bool kTurned = !Mask<V>::kHides && !V::kBlockMask;
    int begin;  // kTurned: of each head, the query tile that is visited first

    __device__ explicit DqVisits(const BwdParams &p, int number = ptx::block_index())
        : BwdVisits<V>(p, key_tile(p, number)) {
        if constexpr (kTurned) {
            if (first_share_is_stored(p, this->sequence)) this->m_block -= this->block * this->blocks / key_blocks();
            begin = this->m_block;
        }
    }
    __device__ void next() {
        if constexpr (kTurned) {
            this->m_block = after();
            if (this->m_block == begin) ++this->head;
        } else {
            BwdVisits<V>::next();
        }
    }
    __device__ bool is_last_of_head() const {
        if constexpr (kTurned) return after() == begin;
        else return BwdVisits<V>::is_last_of_head();
    }
    // How many key blocks come to the visit's tile before this one, if all go in order.
    __device__ int rank(const BwdParams &p) const {
        if constexpr (V::kBlockMask) {
            return BwdVisits<V>::rank();
        } else {
            if constexpr (kTurned) {
                if (first_share_is_stored(p, this->sequence)) return turned_rank();
            }
            // @rank-in-the-query-tile-sm90
            return this->block - Mask<V>(this->sequence, p.problem).first_key_block(this->q0());
        }
    }

  private:
    __device__ static Tile<V::kPacked> key_tile(const BwdParams &p, int number) {
        if constexpr (V::kPacked) {
            const int tiles = TileList<V::kBlockN>::size(p);
            return TileList<V::kBlockN>::at(p, TileIndex::at<false>(number, p.schedule, tiles, KeysOf<V>::heads(p), 1));
        } else {
            return tile_at<V, KeysOf<V>, V::kBlockN, false>(p, number);
        }
    }
    __device__ int turned_rank() const {
        const int n = key_blocks(), place = this->blocks - 1 - this->m_block;
        const int stores = ((place + 1) * n - 1) / this->blocks;  // the block that does
        return stores - this->block + (stores < this->block ? n : 0);
    }
    __device__ int after() const { return this->m_block > 0 ? this->m_block - 1 : this->blocks - 1; }
    __device__ int key_blocks() const {
        const int blocks = ceil_div(this->sequence.seqlen_k, V::kBlockN);
        return V::kPacked ? max(1, blocks) : blocks;
    }
};

#endif  // CUPYFLASH_DQ_VISITS_CUH
