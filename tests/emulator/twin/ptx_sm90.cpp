// What the twins of ptx_sm90.cuh do.
#include "ptx_sm90.h"

namespace ptx {

u32 dynamic_smem_1024() { return emu_smem_base(); }

// ---- Programmatic dependent launch ----
void griddepcontrol_wait() { emu_wait_for_launches(); }  // which have ended: what counts is who has waited (global.cpp)
void griddepcontrol_launch_dependents() { emu_start_dependents(); }

// ---- Clusters ----
u32 cluster_ctarank() { return static_cast<u32>(emu_self->cluster_rank); }
void barrier_cluster_arrive(EMU_PLACE) { emu_cluster_arrive(EMU_SITE); }
void barrier_cluster_wait(EMU_PLACE) { emu_cluster_wait(EMU_SITE); }
u32 mapa(u32 addr, u32 rank, EMU_PLACE) { return emu_mapa(addr, rank, EMU_SITE); }
void ld_shared_cluster_v4_f32(float (&x)[4], u32 addr, EMU_PLACE) { emu_ld_shared(addr, 16, x, EMU_SITE); }
void ld_shared_cluster_v2_f32(float &x, float &y, u32 addr, EMU_PLACE) {
    float both[2];
    emu_ld_shared(addr, 8, both, EMU_SITE);
    x = both[0], y = both[1];
}

// ---- mbarrier ----
void mbarrier_init(u32 bar, u32 count, EMU_PLACE) { emu_mbarrier_init(bar, count, EMU_SITE); }
void fence_mbarrier_init() { emu_fence_proxy_async(); }
void mbarrier_arrive(u32 bar, EMU_PLACE) { emu_mbarrier_arrive(bar, -1, EMU_SITE); }
void mbarrier_arrive_expect_tx(u32 bar, u32 bytes, EMU_PLACE) { emu_mbarrier_arrive(bar, bytes, EMU_SITE); }
void mbarrier_wait(u32 bar, u32 parity, EMU_PLACE) { emu_mbarrier_wait(bar, parity, EMU_SITE); }
void fence_proxy_async() { emu_fence_proxy_async(); }
void fence_proxy_async_global() {}  // no second clock for global memory

// ---- stmatrix ----
void stmatrix_x2(u32 addr, u32 r0, u32 r1, EMU_PLACE) {
    const u32 r[2] = {r0, r1};
    emu_stmatrix(addr, r, 2, false, EMU_SITE);
}
void stmatrix_x4(u32 addr, const u32 (&r)[4], EMU_PLACE) { emu_stmatrix(addr, r, 4, false, EMU_SITE); }
void stmatrix_x4_trans(u32 addr, const u32 (&r)[4], EMU_PLACE) { emu_stmatrix(addr, r, 4, true, EMU_SITE); }

// ---- Bulk copies ----
void cp_async_bulk_load(u32 dst, const void *src, u32 bytes, u32 bar, EMU_PLACE) {
    emu_bulk(kEmuLoad1d, dst, const_cast<void *>(src), bytes, 0, bar, EMU_SITE);
}
void cp_async_bulk_store(void *dst, u32 src, u32 bytes, EMU_PLACE) {
    emu_bulk(kEmuStore1d, src, dst, bytes, 0, 0, EMU_SITE);
}
void cp_reduce_async_bulk_add_f32(float *dst, u32 src, u32 bytes, EMU_PLACE) {
    emu_bulk(kEmuReduce1d, src, dst, bytes, 0, 0, EMU_SITE);
}
void cp_async_bulk_commit_group() { emu_bulk_commit(); }

// ---- TMA ----
void prefetch_tensormap(const TensorMap &) {}
void tma_load_4d(u32 dst, const TensorMap &map, u32 bar, int c0, int c1, int c2, int c3, u64, EMU_PLACE) {
    const int c[] = {c0, c1, c2, c3};
    emu_tma(kEmuLoad, dst, &map, bar, c, 4, 0, EMU_SITE);
}
void tma_load_5d(u32 dst, const TensorMap &map, u32 bar, int c0, int c1, int c2, int c3, int c4, u64, EMU_PLACE) {
    const int c[] = {c0, c1, c2, c3, c4};
    emu_tma(kEmuLoad, dst, &map, bar, c, 5, 0, EMU_SITE);
}
void tma_store_4d(const TensorMap &map, u32 src, int c0, int c1, int c2, int c3, EMU_PLACE) {
    const int c[] = {c0, c1, c2, c3};
    emu_tma(kEmuStore, src, &map, 0, c, 4, 0, EMU_SITE);
}

// ---- wgmma ----
void wgmma_fence(EMU_PLACE) { emu_wgmma_fence(EMU_SITE); }
void wgmma_commit_group(EMU_PLACE) { emu_wgmma_commit(EMU_SITE); }

}  // namespace ptx
