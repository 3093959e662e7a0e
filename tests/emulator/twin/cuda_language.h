// What CUDA C++ gives a kernel besides PTX: qualifiers, a few functions, and the way in.
#ifndef EMULATOR_CUDA_LANGUAGE_H
#define EMULATOR_CUDA_LANGUAGE_H
#include "../runtime/api.h"

// Those functions of the C library that kernels call. Its headers, read in C++, take longer than a kernel's own.
extern "C" {
float copysignf(float x, float sign);
float cosf(float x);
float exp2f(float x);
float expf(float x);
float fabsf(float x);
float floorf(float x);
float fmaf(float x, float y, float z);
float fmaxf(float x, float y);
float fminf(float x, float y);
float ldexpf(float x, int exponent);
float log2f(float x);
float logf(float x);
float powf(float x, float y);
float rintf(float x);
float sinf(float x);
float sqrtf(float x);
float tanhf(float x);
void *memcpy(void *to, const void *from, size_t bytes);
}

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__ __restrict
// __shared__ is left out on purpose: a static shared array is an error, shared memory is reached through ptx:: only.

// The caller's place in the source, for messages: the last parameters of every wrapper.
#define EMU_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define EMU_PLACE const char *file, int line  // where the wrapper is defined
#define EMU_SITE (EmuSite{file, line})

constexpr int min(int a, int b) { return a < b ? a : b; }
constexpr int max(int a, int b) { return a > b ? a : b; }
constexpr unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
constexpr unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
constexpr long long min(long long a, long long b) { return a < b ? a : b; }
constexpr long long max(long long a, long long b) { return a > b ? a : b; }

// emu_entry_<kernel>(args) calls a kernel with the arguments that args[0], args[1], ... point to, like cuLaunchKernel.
namespace emu_entry_detail {
template <int... I>
struct Sequence {};
template <int N, int... I>
struct Make : Make<N - 1, N - 1, I...> {};
template <int... I>
struct Make<0, I...> {
    using Type = Sequence<I...>;
};
template <class T>
struct Plain {
    using Type = T;
};
template <class T>
struct Plain<const T> {
    using Type = T;
};
template <class... A, int... I>
inline void call(void (*kernel)(A...), void **args, Sequence<I...>) {
    kernel(*static_cast<typename Plain<A>::Type *>(args[I])...);
}
template <class... A>
inline void call(void (*kernel)(A...), void **args) {
    call(kernel, args, typename Make<sizeof...(A)>::Type());
}
}  // namespace emu_entry_detail
#define EMU_ENTRY(kernel)                                                                    \
    extern "C" __attribute__((visibility("default"))) void emu_entry_##kernel(void **args) { \
        emu_entry_detail::call(&kernel, args);                                               \
    }

#endif
