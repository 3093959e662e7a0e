// The scales of V of an 8-bit cache (stored.cuh), folded into P.
#ifndef CUPYFLASH_VALUE_UNIT_CUH
#define CUPYFLASH_VALUE_UNIT_CUH
#include "tile/tile.cuh"

// O is in units of a power of two that is never below the largest scale so far by half or
// more: P times its scales over the unit is at most 2, which fp16 holds as well as P; kRoom takes small weights with it.
struct ValueUnit {
    static constexpr int kRoom = 14;  // powers of two
    float unit = 0x1p-100f;

    // scales: of 16 keys, in shared memory. By whole warps, of which all lanes find the same unit.
    template <int D>
    __device__ void fold(AccTile<16, 16> &P, AccTile<16, D> &O, ptx::u32 scales) {
        float scale[2][2], largest = 0.f;
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
            ptx::ld_shared_v2_f32(scale[j][0], scale[j][1], scales + (8 * j + 2 * (lane() % 4)) * 4);
            largest = fmaxf(largest, fmaxf(fabsf(scale[j][0]), fabsf(scale[j][1])));
        }
        largest = quad_reduce(largest, [](float a, float b) { return fmaxf(a, b); });
        const float power = ptx::uint_as_float(ptx::float_as_uint(largest) & 0x7f800000u);
        if (power > unit) {
            O.scale(unit / power);  // @unit-follows-the-scales
            unit = power;
        }
        const float by = ptx::uint_as_float(((254 + kRoom) << 23) - ptx::float_as_uint(unit));  // 2^kRoom / unit
        #pragma unroll
        for (int j = 0; j < 2; ++j)
            #pragma unroll
            for (int e = 0; e < 4; ++e) P.x[0][j][e] *= scale[j][e % 2] * by;
    }
    // O as it is.
    template <int D>
    __device__ void finish(AccTile<16, D> &O) const {
        O.scale(unit * ptx::uint_as_float((127 - kRoom) << 23));
    }
};
template <bool kScaled>
struct UnitOf : ValueUnit {};
template <>
struct UnitOf<false> {};

#endif  // CUPYFLASH_VALUE_UNIT_CUH
