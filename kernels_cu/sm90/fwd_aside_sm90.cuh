// What fwd_sm90.cuh does rarely, aside: in line it stands in the way of what each tile does next.
#ifndef CUPYFLASH_FWD_ASIDE_SM90_CUH
#define CUPYFLASH_FWD_ASIDE_SM90_CUH
#include "attention/repair_output.cuh"
#include "tile/epilogue.cuh"

// Rows of O that are not finite.
template <class V, class Tile>
__device__ __noinline__ void repair_aside(const FwdParams &p, int sequence, int head, int query0, Tile tile, int row0) {
    repair_output<V, false, 16>(p, sequence, head, query0, tile, row0);
}

// O of a packed sequence's last tile: behind its last query are those of the next one, which TMA would write too.
template <class V, class Tile>
__device__ __noinline__ void write_aside(const FwdParams &p, const Sequence<V::kPacked> &s, int head, int query0,
                                         Tile tile, int row0) {
    using T = typename V::Element;
    T *const o = static_cast<T *>(p.o) + s.q_offset(p.o_stride, head);
    // @columns-of-o-beside-its-neighbour
    write_rows<16, round_up(V::kHeadDimV, 16), V::kHeadDimV>(tile, row0, o, p.o_stride.row, query0, s.seqlen_q);
}

#endif  // CUPYFLASH_FWD_ASIDE_SM90_CUH
