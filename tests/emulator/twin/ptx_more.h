// Twin of tests/emulator/kernels/ptx_more.cuh.
#ifndef CUPYFLASH_PTX_MORE_CUH
#define CUPYFLASH_PTX_MORE_CUH
#include "ptx_sm90.h"

#pragma GCC visibility push(default)  // what is declared only is in the runtime
namespace ptx {

void ldmatrix_x1(u32 &r, u32 addr, EMU_HERE);
void ldmatrix_x2_trans(u32 (&r)[2], u32 addr, EMU_HERE);
void mma_m16n8k8_bf16(float (&d)[4], u32 a0, u32 a1, u32 b, EMU_HERE);
void mma_m16n8k8_f16(float (&d)[4], u32 a0, u32 a1, u32 b, EMU_HERE);
void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, EMU_HERE);

// ---- sm_90a: warps, launches, barriers ----
bool elect_sync(EMU_HERE);

// ---- Clusters ----
void mbarrier_arrive_cluster(u32 bar, EMU_HERE);
u32 ld_shared_cluster_b32(u32 addr, EMU_HERE);
void st_shared_cluster_b32(u32 addr, u32 x, EMU_HERE);
void cp_async_bulk_to_peer(u32 dst, u32 src, u32 bytes, u32 bar, EMU_HERE);

// ---- stmatrix ----
void stmatrix_x1(u32 addr, u32 r0, EMU_HERE);
void stmatrix_x1_trans(u32 addr, u32 r0, EMU_HERE);
void stmatrix_x2_trans(u32 addr, u32 r0, u32 r1, EMU_HERE);

// ---- TMA ----
#define EMU_LIST(...) __VA_ARGS__
#define EMU_TMA(kDims, coordinates, values)                                                                  \
    inline void tma_load_##kDims##d(u32 dst, const TensorMap &map, u32 bar, coordinates, u64 = kEvictNormal, \
                                    EMU_HERE) {                                                              \
        const int c[] = {values};                                                                            \
        emu_tma(kEmuLoad, dst, &map, bar, c, kDims, 0, EMU_SITE);                                            \
    }                                                                                                        \
    inline void tma_store_##kDims##d(const TensorMap &map, u32 src, coordinates, EMU_HERE) {                 \
        const int c[] = {values};                                                                            \
        emu_tma(kEmuStore, src, &map, 0, c, kDims, 0, EMU_SITE);                                             \
    }
EMU_TMA(1, EMU_LIST(int c0), EMU_LIST(c0))
EMU_TMA(2, EMU_LIST(int c0, int c1), EMU_LIST(c0, c1))
EMU_TMA(3, EMU_LIST(int c0, int c1, int c2), EMU_LIST(c0, c1, c2))
#undef EMU_TMA
void tma_store_5d(const TensorMap &map, u32 src, int c0, int c1, int c2, int c3, int c4, EMU_HERE);

#define EMU_TMA(kDims, coordinates, values)                                                                  \
    inline void tma_load_multicast_##kDims##d(u32 dst, const TensorMap &map, u32 bar, u16 mask, coordinates, \
                                              u64 = kEvictNormal, EMU_HERE) {                                \
        const int c[] = {values};                                                                            \
        emu_tma(kEmuLoad, dst, &map, bar, c, kDims, mask, EMU_SITE);                                         \
    }                                                                                                        \
    inline void tma_reduce_add_##kDims##d(const TensorMap &map, u32 src, coordinates, EMU_HERE) {            \
        const int c[] = {values};                                                                            \
        emu_tma(kEmuReduce, src, &map, 0, c, kDims, 0, EMU_SITE);                                            \
    }
EMU_TMA(1, EMU_LIST(int c0), EMU_LIST(c0))
EMU_TMA(2, EMU_LIST(int c0, int c1), EMU_LIST(c0, c1))
EMU_TMA(3, EMU_LIST(int c0, int c1, int c2), EMU_LIST(c0, c1, c2))
EMU_TMA(4, EMU_LIST(int c0, int c1, int c2, int c3), EMU_LIST(c0, c1, c2, c3))
EMU_TMA(5, EMU_LIST(int c0, int c1, int c2, int c3, int c4), EMU_LIST(c0, c1, c2, c3, c4))
#undef EMU_TMA
#undef EMU_LIST

}  // namespace ptx
#pragma GCC visibility pop

#endif
