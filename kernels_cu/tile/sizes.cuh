// Sizes: arithmetic of compile-time and run-time numbers, and numbers as types.
#ifndef CUPYFLASH_SIZES_CUH
#define CUPYFLASH_SIZES_CUH

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__device__ constexpr int next_power_of_two(int n) { return n <= 1 ? 1 : 2 * next_power_of_two((n + 1) / 2); }

__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
// The larger one of the head_dims of q and of v.
template <class V>
constexpr int kWidest = larger(V::kHeadDim, V::kHeadDimV);

// One of two types.
template <bool kFirst, class First, class Second>
struct Either {
    using Type = First;
};
template <class First, class Second>
struct Either<false, First, Second> {
    using Type = Second;
};

// Compile-time values as arguments.
template <int kValue>
struct Int {
    static constexpr int value = kValue;
};
template <bool kValue>
struct Bool {
    static constexpr bool value = kValue;
};

// f(Int<0>), ..., f(Int<kCount - 1>).
template <int kCount, int kFrom = 0, class F>
__device__ __forceinline__ void for_each_constant(F f) {
    if constexpr (kFrom < kCount) {
        f(Int<kFrom>{});
        for_each_constant<kCount, kFrom + 1>(f);
    }
}

struct Nothing {};

#endif  // CUPYFLASH_SIZES_CUH
