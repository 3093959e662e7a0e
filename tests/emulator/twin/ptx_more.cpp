// What the twins of ptx_more.cuh do.
#include "ptx_more.h"

namespace ptx {

void ldmatrix_x1(u32 &r, u32 addr, EMU_PLACE) { emu_ldmatrix(&r, 1, addr, false, EMU_SITE); }
void ldmatrix_x2_trans(u32 (&r)[2], u32 addr, EMU_PLACE) { emu_ldmatrix(r, 2, addr, true, EMU_SITE); }
void mma_m16n8k8_bf16(float (&d)[4], u32 a0, u32 a1, u32 b, EMU_PLACE) {
    const u32 a[2] = {a0, a1};
    emu_mma(d, a, &b, 8, kEmuBf16, EMU_SITE);
}
void mma_m16n8k8_f16(float (&d)[4], u32 a0, u32 a1, u32 b, EMU_PLACE) {
    const u32 a[2] = {a0, a1};
    emu_mma(d, a, &b, 8, kEmuF16, EMU_SITE);
}
void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, EMU_PLACE) {
    const u32 b[2] = {b0, b1};
    emu_mma(d, a, b, 8, kEmuTf32, EMU_SITE);
}

// ---- sm_90a: warps, launches, barriers ----
bool elect_sync(EMU_PLACE) { return emu_elect(EMU_SITE); }

// ---- Clusters ----
void mbarrier_arrive_cluster(u32 bar, EMU_PLACE) { emu_mbarrier_arrive(bar, -1, EMU_SITE); }
u32 ld_shared_cluster_b32(u32 addr, EMU_PLACE) {
    u32 x;
    emu_ld_shared(addr, 4, &x, EMU_SITE);
    return x;
}
void st_shared_cluster_b32(u32 addr, u32 x, EMU_PLACE) { emu_st_shared(addr, 4, &x, EMU_SITE); }
void cp_async_bulk_to_peer(u32 dst, u32 src, u32 bytes, u32 bar, EMU_PLACE) {
    emu_bulk(kEmuToPeer, src, nullptr, bytes, dst, bar, EMU_SITE);
}

// ---- stmatrix ----
void stmatrix_x1(u32 addr, u32 r0, EMU_PLACE) { emu_stmatrix(addr, &r0, 1, false, EMU_SITE); }
void stmatrix_x1_trans(u32 addr, u32 r0, EMU_PLACE) { emu_stmatrix(addr, &r0, 1, true, EMU_SITE); }
void stmatrix_x2_trans(u32 addr, u32 r0, u32 r1, EMU_PLACE) {
    const u32 r[2] = {r0, r1};
    emu_stmatrix(addr, r, 2, true, EMU_SITE);
}

// ---- TMA ----
void tma_store_5d(const TensorMap &map, u32 src, int c0, int c1, int c2, int c3, int c4, EMU_PLACE) {
    const int c[] = {c0, c1, c2, c3, c4};
    emu_tma(kEmuStore, src, &map, 0, c, 5, 0, EMU_SITE);
}

}  // namespace ptx
