// Twin of kernels_cu/ptx_sm90.cuh: the same names, on the emulator.
#ifndef CUPYFLASH_PTX_SM90_CUH
#define CUPYFLASH_PTX_SM90_CUH
#include "ptx.h"

#pragma GCC visibility push(default)  // what is declared only is in the runtime
namespace ptx {

u32 dynamic_smem_1024();

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
void griddepcontrol_wait();
void griddepcontrol_launch_dependents();

// ---- Clusters ----
u32 cluster_ctarank();
void barrier_cluster_arrive(EMU_HERE);
void barrier_cluster_wait(EMU_HERE);
u32 mapa(u32 addr, u32 rank, EMU_HERE);
void ld_shared_cluster_v4_f32(float (&x)[4], u32 addr, EMU_HERE);
void ld_shared_cluster_v2_f32(float &x, float &y, u32 addr, EMU_HERE);

// ---- mbarrier ----
void mbarrier_init(u32 bar, u32 count, EMU_HERE);
void fence_mbarrier_init();
void mbarrier_arrive(u32 bar, EMU_HERE);
void mbarrier_arrive_expect_tx(u32 bar, u32 bytes, EMU_HERE);
void mbarrier_wait(u32 bar, u32 parity, EMU_HERE);
void fence_proxy_async();
void fence_proxy_async_global();

// ---- stmatrix ----
void stmatrix_x2(u32 addr, u32 r0, u32 r1, EMU_HERE);
void stmatrix_x4(u32 addr, const u32 (&r)[4], EMU_HERE);
void stmatrix_x4_trans(u32 addr, const u32 (&r)[4], EMU_HERE);

// ---- Bulk copies ----
void cp_async_bulk_load(u32 dst, const void *src, u32 bytes, u32 bar, EMU_HERE);
void cp_async_bulk_store(void *dst, u32 src, u32 bytes, EMU_HERE);
void cp_reduce_async_bulk_add_f32(float *dst, u32 src, u32 bytes, EMU_HERE);
void cp_async_bulk_commit_group();
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
void prefetch_tensormap(const TensorMap &);

void tma_load_4d(u32 dst, const TensorMap &map, u32 bar, int c0, int c1, int c2, int c3, u64 = kEvictNormal, EMU_HERE);
void tma_load_5d(u32 dst, const TensorMap &map, u32 bar, int c0, int c1, int c2, int c3, int c4, u64 = kEvictNormal,
                 EMU_HERE);
void tma_store_4d(const TensorMap &map, u32 src, int c0, int c1, int c2, int c3, EMU_HERE);

// ---- wgmma ----
void wgmma_fence(EMU_HERE);
void wgmma_commit_group(EMU_HERE);
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
#pragma GCC visibility pop

#endif
