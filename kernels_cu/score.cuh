// What happens to a raw score q . k between the GEMM and the softmax, and its derivative. The order of the features is
// fixed: scale, softcap, ALiBi, bias. Whoever takes the exponential multiplies by log2_factor and uses 2^x.
#ifndef CUPYFLASH_SCORE_CUH
#define CUPYFLASH_SCORE_CUH
#include "params.cuh"

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

template <class V>
struct Score {
    float scale;        // of the raw score; the gradients with respect to q and k are multiplied by it at their end
    float unit;         // operator() times this is the score
    float log2_factor;  // > 0: operator() times this is the score in powers of two

    // A positive scale is folded into the exponent, where it costs nothing; otherwise (kScaleFirst) it is applied first,
    // because the row maximum of scaled and of raw scores then differ.
    __device__ explicit Score(const Problem &p)
        : scale(p.scale), unit(V::kScaleFirst ? 1.f : p.scale), log2_factor(unit * kLog2e) {}

    __device__ float operator()(float s) const { return V::kScaleFirst ? s * scale : s; }
    // d operator() / d s times the gradient that arrives, less the factor `scale`.
    __device__ float grad(float ds) const { return ds; }
};

#endif  // CUPYFLASH_SCORE_CUH
