// The scales of V of an 8-bit cache (stored.cuh), folded into P: O is in units of a power of two that is never below the
// largest scale so far by half or more. P times its scales over the unit is at most 2, which fp16 holds as well as P; kRoom
// takes small weights with it.
#ifndef CUPYFLASH_VALUE_UNIT_CUH
#define CUPYFLASH_VALUE_UNIT_CUH
#include "tile/tile.cuh"

struct ValueUnit {
    static constexpr int kRoom = 14;  // powers of two
    float unit = 0x1p-100f;

    // The power of two in a size.
    __device__ static float power(float size) { return ptx::uint_as_float(ptx::float_as_uint(size) & 0x7f800000u); }
    // By which scales are multiplied, 2^kRoom / unit, and O at the end.
    __device__ float of_scales() const { return ptx::uint_as_float(((254 + kRoom) << 23) - ptx::float_as_uint(unit)); }
    __device__ float of_o() const { return unit * ptx::uint_as_float((127 - kRoom) << 23); }
    // The unit becomes a power of two, if that is larger: by which O is multiplied, the quotient of the two.
    __device__ float follow(float to) {
        const float before = unit;
        unit = fmaxf(unit, to);
        const int bits = (127 << 23) + ptx::float_as_uint(before) - ptx::float_as_uint(unit);
        return ptx::uint_as_float(max(0, bits));
    }
};

#endif  // CUPYFLASH_VALUE_UNIT_CUH
