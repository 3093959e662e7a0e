// Twin of tests/emulator/kernels/ptx_more.cuh.
#ifndef CUPYFLASH_PTX_MORE_CUH
#define CUPYFLASH_PTX_MORE_CUH
#include "ptx.h"

namespace ptx {

inline void ldmatrix_x1(u32 &r, u32 addr, EMU_HERE) { emu_ldmatrix(&r, 1, addr, false, EMU_SITE); }
inline void ldmatrix_x2_trans(u32 (&r)[2], u32 addr, EMU_HERE) { emu_ldmatrix(r, 2, addr, true, EMU_SITE); }
inline void mma_m16n8k8_bf16(float (&d)[4], u32 a0, u32 a1, u32 b, EMU_HERE) {
    const u32 a[2] = {a0, a1};
    emu_mma(d, a, &b, 8, kEmuBf16, EMU_SITE);
}
inline void mma_m16n8k8_f16(float (&d)[4], u32 a0, u32 a1, u32 b, EMU_HERE) {
    const u32 a[2] = {a0, a1};
    emu_mma(d, a, &b, 8, kEmuF16, EMU_SITE);
}
inline void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, EMU_HERE) {
    const u32 b[2] = {b0, b1};
    emu_mma(d, a, b, 8, kEmuTf32, EMU_SITE);
}

}  // namespace ptx

#endif
