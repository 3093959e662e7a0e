// Twin of kernels_cu/ptx_sm90.cuh: the same names, on the emulator.
#ifndef CUPYFLASH_PTX_SM90_CUH
#define CUPYFLASH_PTX_SM90_CUH
#include "ptx.h"

#pragma GCC push_options
#pragma GCC optimize("O2")  // see cuda_language.h
namespace ptx {

inline u32 dynamic_smem_1024() { return emu_smem_base(); }

// ---- Warps and registers ----
template <int kRegisters>
inline void setmaxnreg_inc(EMU_HERE) {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
    emu_setmaxnreg(kRegisters, EMU_SITE);
}
template <int kRegisters>
inline void setmaxnreg_dec(EMU_HERE) {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
    emu_setmaxnreg(kRegisters, EMU_SITE);
}

// ---- Programmatic dependent launch ----
inline void griddepcontrol_wait() {}  // launches run one after the other
inline void griddepcontrol_launch_dependents() {}

// ---- Clusters ----
inline u32 cluster_ctarank() { return static_cast<u32>(emu_self->cluster_rank); }
inline void barrier_cluster_arrive(EMU_HERE) { emu_cluster_arrive(EMU_SITE); }
inline void barrier_cluster_wait(EMU_HERE) { emu_cluster_wait(EMU_SITE); }
inline u32 mapa(u32 addr, u32 rank, EMU_HERE) { return emu_mapa(addr, rank, EMU_SITE); }
inline void ld_shared_cluster_v4_f32(float (&x)[4], u32 addr, EMU_HERE) { emu_ld_shared(addr, 16, x, EMU_SITE); }
inline void ld_shared_cluster_v2_f32(float &x, float &y, u32 addr, EMU_HERE) {
    float both[2];
    emu_ld_shared(addr, 8, both, EMU_SITE);
    x = both[0], y = both[1];
}

// ---- mbarrier ----
inline void mbarrier_init(u32 bar, u32 count, EMU_HERE) { emu_mbarrier_init(bar, count, EMU_SITE); }
inline void fence_mbarrier_init() { emu_fence_proxy_async(); }
inline void mbarrier_arrive(u32 bar, EMU_HERE) { emu_mbarrier_arrive(bar, -1, EMU_SITE); }
inline void mbarrier_arrive_expect_tx(u32 bar, u32 bytes, EMU_HERE) { emu_mbarrier_arrive(bar, bytes, EMU_SITE); }
inline void mbarrier_wait(u32 bar, u32 parity, EMU_HERE) { emu_mbarrier_wait(bar, parity, EMU_SITE); }
inline void fence_proxy_async() { emu_fence_proxy_async(); }
inline void fence_proxy_async_global() {}  // no second clock for global memory

// ---- stmatrix ----
inline void stmatrix_x2(u32 addr, u32 r0, u32 r1, EMU_HERE) {
    const u32 r[2] = {r0, r1};
    emu_stmatrix(addr, r, 2, false, EMU_SITE);
}
inline void stmatrix_x4(u32 addr, const u32 (&r)[4], EMU_HERE) { emu_stmatrix(addr, r, 4, false, EMU_SITE); }
inline void stmatrix_x4_trans(u32 addr, const u32 (&r)[4], EMU_HERE) { emu_stmatrix(addr, r, 4, true, EMU_SITE); }

// ---- Bulk copies ----
inline void cp_async_bulk_load(u32 dst, const void *src, u32 bytes, u32 bar, EMU_HERE) {
    emu_bulk(kEmuLoad1d, dst, const_cast<void *>(src), bytes, 0, bar, EMU_SITE);
}
inline void cp_async_bulk_store(void *dst, u32 src, u32 bytes, EMU_HERE) {
    emu_bulk(kEmuStore1d, src, dst, bytes, 0, 0, EMU_SITE);
}
inline void cp_reduce_async_bulk_add_f32(float *dst, u32 src, u32 bytes, EMU_HERE) {
    emu_bulk(kEmuReduce1d, src, dst, bytes, 0, 0, EMU_SITE);
}
inline void cp_async_bulk_commit_group() { emu_bulk_commit(); }
template <int kPending>
inline void cp_async_bulk_wait_group() {
    emu_bulk_wait(kPending, false);
}
template <int kPending>
inline void cp_async_bulk_wait_group_read() {
    emu_bulk_wait(kPending, true);
}

// ---- TMA ----
struct alignas(64) TensorMap { u64 opaque[16]; };
constexpr u64 kEvictNormal = 0x1000000000000000, kEvictFirst = 0x12F0000000000000, kEvictLast = 0x14F0000000000000;
inline void prefetch_tensormap(const TensorMap &) {}

inline void tma_load_4d(u32 dst, const TensorMap &map, u32 bar, int c0, int c1, int c2, int c3, u64 = kEvictNormal,
                        EMU_HERE) {
    const int c[] = {c0, c1, c2, c3};
    emu_tma(kEmuLoad, dst, &map, bar, c, 4, 0, EMU_SITE);
}
inline void tma_load_5d(u32 dst, const TensorMap &map, u32 bar, int c0, int c1, int c2, int c3, int c4,
                        u64 = kEvictNormal, EMU_HERE) {
    const int c[] = {c0, c1, c2, c3, c4};
    emu_tma(kEmuLoad, dst, &map, bar, c, 5, 0, EMU_SITE);
}
inline void tma_store_4d(const TensorMap &map, u32 src, int c0, int c1, int c2, int c3, EMU_HERE) {
    const int c[] = {c0, c1, c2, c3};
    emu_tma(kEmuStore, src, &map, 0, c, 4, 0, EMU_SITE);
}

// ---- wgmma ----
inline void wgmma_fence(EMU_HERE) { emu_wgmma_fence(EMU_SITE); }
inline void wgmma_commit_group(EMU_HERE) { emu_wgmma_commit(EMU_SITE); }
template <int kPending>
inline void wgmma_wait_group(EMU_HERE) {
    emu_wgmma_wait(kPending, EMU_SITE);
}
template <int kHalf>
inline void wgmma_pin(float (&d)[kHalf]) {
    asm volatile("" : : "r"(&d[0]) : "memory");
}

#define EMU_WGMMA(name, type)                                                                 \
    template <int kTransA, int kTransB, int kHalf>                                            \
    inline void name(float (&d)[kHalf], u64 a, u64 b, bool accumulate, EMU_HERE) {            \
        emu_wgmma(d, 2 * kHalf, nullptr, a, b, accumulate, kTransA, kTransB, type, EMU_SITE); \
    }                                                                                         \
    template <int kTransB, int kHalf>                                                         \
    inline void name(float (&d)[kHalf], const u32(&a)[4], u64 b, bool accumulate, EMU_HERE) { \
        emu_wgmma(d, 2 * kHalf, a, 0, b, accumulate, false, kTransB, type, EMU_SITE);         \
    }
EMU_WGMMA(wgmma_bf16, kEmuBf16)
EMU_WGMMA(wgmma_f16, kEmuF16)
#undef EMU_WGMMA

}  // namespace ptx
#pragma GCC pop_options

#endif
