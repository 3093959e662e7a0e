// What happens to a raw score q . k between the GEMM and the softmax, and its derivative. The order of the features is
// fixed: scale, softcap, mods, ALiBi, bias. Whoever takes the exponential multiplies by log2_factor and uses 2^x.
//
// A score is a function of s and of its place (places.cuh).
//
// With a bias that is given scores have no unit, and what is subtracted from them is subtracted before they become powers of
// two: a bias may be as large as fp32 holds, as those are that stand for a mask. Row_stats then has lse as it is (kNatural).
//
// All kernels form P and dS here:
//     P  = exp(score - lse)
//     dS = P * d score / d (scale * q . k) * (dP - delta) = weight * (dP - delta);
// dQ = scale * dS K and dK = scale * dS^T Q take the factor `scale` at their end.
#ifndef CUPYFLASH_SCORE_CUH
#define CUPYFLASH_SCORE_CUH
#include "attention/places.cuh"

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// In row_stats, the lse of a row whose scores are all -inf, which a bias can do: P is 0 then. Of no other row: it is as large as
// a number can be.
constexpr float kLseOfNothing = 3.402823466e38f;

// The largest score of a row, to be subtracted from all: where they are -inf, or there are none, 0, so that P is 0 and not the NaN
// of -inf - -inf.
__device__ __forceinline__ float finite_or_zero(float top) { return top == -ptx::infinity() ? 0.f : top; }

// weight * factor, weight >= 0, but 0 only where one of them is; what is too small for fp32 becomes its smallest number.
__device__ __forceinline__ float product_in_repair(float weight, float factor) {
    const float product = weight * factor, least = ptx::uint_as_float(1);  // @product-that-is-not-0
    return product != 0.f || weight == 0.f || factor == 0.f ? product : factor < 0.f ? -least : least;
}

// tanh(x), x = scale * q . k / c, from r = 1 / (1 + e^2x): 1 - 2 r, and its derivative 4 r (1 - r). Two instructions of the
// special function unit; tanh.approx would be one, with an error of 2^-11, which for c = 50 is 2.5 % of P.
// Times c if kNatural.
template <bool kSoftcap, bool kNatural>
struct Softcap {
    __device__ explicit Softcap(const Problem &) {}
};
template <>
struct Softcap<true, false> {
    float factor;

    // @tanh-of-the-scaled-score
    __device__ explicit Softcap(const Problem &p) : factor(2 * kLog2e * (p.scale / p.softcap)) {}
    __device__ float value(float s) const { return fmaf(-2.f, r(s), 1.f); }
    __device__ float derivative(float s) const { return 4.f * r(s) * (1.f - r(s)); }
    // The same, but 0 only where that of float64 is, whose tanh is 1 from e^-2|x| = 2^-55 on.
    __device__ float derivative_in_repair(float s) const {
        const float x = fabsf(s * factor), r = ptx::rcp(1.f + ptx::ex2(-x));
        return x > 55.f ? 0.f : 4.f * ptx::ex2(-x) * r * r;  // @derivative-that-is-not-0
    }

  private:
    __device__ float r(float s) const { return ptx::rcp(1.f + ptx::ex2(s * factor)); }
};

template <>
struct Softcap<true, true> : Softcap<true, false> {
    float most;

    __device__ explicit Softcap(const Problem &p) : Softcap<true, false>(p), most(p.softcap) {}
    __device__ float value(float s) const { return most * Softcap<true, false>::value(s); }
};

template <class V>
struct Score {
    using At = typename Places<V>::At;
    static constexpr bool kNatural = V::kBias, kModded = is_score_modded<V>();
    float scale;        // of the raw score; the gradients with respect to q and k are multiplied by it at their end
    float unit;         // value() times this is the score
    float log2_factor;  // > 0: value() times this is the score in powers of two
    Softcap<V::kSoftcap, kNatural> softcap;

    // A positive factor is folded into the exponent, where it costs nothing: the scale, or the softcap. A scale that is not
    // positive (kScaleFirst) is applied first, because the row maximum of scaled and of raw scores then differ. @unit-of-scores
    __device__ explicit Score(const Problem &p)
        : scale(p.scale),
          unit(kNatural         ? 1.f
               : V::kSoftcap    ? p.softcap
               : V::kScaleFirst ? 1.f
                                : p.scale),
          log2_factor(unit * kLog2e),
          softcap(p) {}

    __device__ float value(float s, At at) const { return at.biased(own(s)); }
    // The same, as float64 has it: a score_mod may hide by adding -inf, and the sum of that and NaN is NaN.
    __device__ float value_or_hidden(float s, At at) const {
        const float found = value(s, at);
        if constexpr (kModded)
            if (found != found && at.hides()) return -ptx::infinity();  // @hidden-though-nan
        return found;
    }
    // The same in a forward: a NaN stays where a bias of -inf, or a score_mod, hides it. Such rows are computed again (repair_output.cuh), and a
    // test of each score less costs less than they do.
    __device__ float value_or_nan(float s, At at) const { return at.added(own(s)); }

    // P in powers of two; lse too, as row_stats has it.
    __device__ float exponent(float s, At at, float lse) const {
        if constexpr (kNatural) return (value(s, at) - lse) * log2_factor;
        else return fmaf(value(s, at), log2_factor, -lse);
    }
    __device__ float P(float s, At at, float lse) const { return ptx::ex2(exponent(s, at, lse)); }
    // By which dP - delta is multiplied to make dS. kWeightIsP: it is P.
    static constexpr bool kWeightIsP = !V::kSoftcap && !kModded;
    __device__ float weight(float s, float P) const {
        if constexpr (V::kSoftcap) return P * softcap.derivative(s);  // @softcap-derived
        else return P;
    }
    __device__ float dS(float s, float P, float dP, float delta) const { return weight(s, P) * (dP - delta); }
    // The same at a place, for which mods ask.
    __device__ float weight(float s, float P, At at) const {
        if constexpr (kModded) {
            const float found = weight(s, P) * at.derivative(own(s));  // computed in any case: no branch @mod-derived
            return P == 0.f ? 0.f : found;
        } else return weight(s, P);
    }
    __device__ float dS(float s, float P, float dP, float delta, At at) const {
        return weight(s, P, at) * (dP - delta);
    }
    // The same where NaN and inf are repaired: 0 only where P or a derivative is.
    __device__ float weight_in_repair(float s, float P, At at) const {
        float found = P;
        if constexpr (V::kSoftcap) found = product_in_repair(found, softcap.derivative_in_repair(s));
        if constexpr (kModded) found = P == 0.f ? 0.f : product_in_repair(found, at.derivative(own(s)));
        return found;
    }
    // Whether scores may be finite though q is not.
    static constexpr bool kFiniteOfAnyQ = V::kSoftcap || kModded;

    // The score before its place has a say.
    __device__ float own(float s) const {
        if constexpr (V::kSoftcap) return softcap.value(s);
        else return V::kScaleFirst || kNatural ? s * scale : s;  // @scaled-first
    }
};

#endif  // CUPYFLASH_SCORE_CUH
