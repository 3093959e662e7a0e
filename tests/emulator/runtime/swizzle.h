// Shared-memory swizzles: XOR of bits 4..6 of the address with the bits that number 128-byte rows.
#ifndef EMULATOR_SWIZZLE_H
#define EMULATOR_SWIZZLE_H
#include "common.h"

namespace emu {

// As cuTensorMapEncodeTiled numbers them.
enum { kSwizzleNone = 0, kSwizzle32 = 1, kSwizzle64 = 2, kSwizzle128 = 3 };

inline u32 swizzled(u32 addr, int swizzle) {
    constexpr u32 kMask[] = {0, 0x10, 0x30, 0x70};
    return addr ^ (addr >> 3 & kMask[swizzle]);
}
constexpr u32 swizzle_span(int swizzle) { return 16u << swizzle; }  // bytes of a row that is permuted

}  // namespace emu
#endif
