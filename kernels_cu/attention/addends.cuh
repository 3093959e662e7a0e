// The elements of a bias or of a mask, one and two at a time, and what they add to scores.
#ifndef CUPYFLASH_ADDENDS_CUH
#define CUPYFLASH_ADDENDS_CUH
#include "tile/key_order.cuh"
#include "tile/tile.cuh"

// That nothing has been read ahead.
struct NotFetched {};

// Whether a key is visible.
struct Shown { unsigned char raw; };
__device__ __forceinline__ float bias_if(bool is_shown) {
    return is_shown ? 0.f : -ptx::infinity();  // @shown-or-hidden
}

// Two neighbouring elements, and their values.
template <class T>
struct BiasPair {
    ptx::u32 raw;
    __device__ static BiasPair of(T a, T b) { return {a.raw | static_cast<ptx::u32>(b.raw) << 16}; }
    __device__ float value(int i) const { return i ? T::hi(raw) : T::lo(raw); }
};
template <>
struct alignas(8) BiasPair<float> {
    float x[2];
    __device__ static BiasPair of(float a, float b) { return {{a, b}}; }
    __device__ float value(int i) const { return x[i]; }
};
template <>
struct BiasPair<Shown> {
    ptx::u16 raw;
    __device__ static BiasPair of(Shown a, Shown b) { return {static_cast<ptx::u16>(a.raw | b.raw << 8)}; }
    __device__ float value(int i) const { return bias_if(raw >> 8 * i & 0xff); }
};
template <class T>
__device__ __forceinline__ float bias_value(const T &x) {
    return T::lo(x.raw);
}
__device__ __forceinline__ float bias_value(float x) { return x; }
__device__ __forceinline__ float bias_value(Shown x) { return bias_if(x.raw); }
// One whose value is 0.
template <class T>
__device__ __forceinline__ T bias_of_0() {
    return {0};
}
template <>
__device__ __forceinline__ Shown bias_of_0<Shown>() {
    return {1};
}

// Eight neighbours, which lie at a multiple of as many bytes as one load takes.
template <class T>
struct alignas(8 * sizeof(T) < 16 ? 8 * sizeof(T) : 16) BiasRun {
    BiasPair<T> pair[4];
    __device__ static BiasRun of(T x) {
        const auto two = BiasPair<T>::of(x, x);
        return {{two, two, two, two}};
    }
    __device__ float value(int i) const { return pair[i / 2].value(i % 2); }
};

// What is added to one score.
struct Addend {
    float bias;

    __device__ bool hides() const { return bias == -ptx::infinity(); }
    __device__ float biased(float s) const { return hides() ? bias : s + bias; }  // @bias-that-hides
    // The same, but NaN stays NaN where it is hidden.
    __device__ float added(float s) const { return s + bias; }
};
// Nothing.
struct NothingAdded {
    __device__ float biased(float s) const { return s; }
    __device__ float added(float s) const { return s; }
    __device__ bool hides() const { return false; }
};

// What is added to the elements that a lane holds of an accumulator, two neighbours of a row in one.
template <class Element, bool kRowsAreQueries, int kRows, int kCols>
struct FetchedBias {
    BiasPair<Element> pair[kRows / 8][kCols / 8];

    __device__ Addend operator()(int queries, int keys) const {
        const int row = kRowsAreQueries ? queries : keys, col = kRowsAreQueries ? keys : queries;
        return {pair[row / 8][col / 8].value(col % 2)};
    }
};
// The same where all queries have one row: the elements of the lane's keys.
template <class Element, bool kRowsAreQueries, int kRows, int kCols>
struct FetchedKeys {
    static constexpr int kOfEight = kRowsAreQueries ? 2 : 1;
    Element x[(kRowsAreQueries ? kCols : kRows) / 8][kOfEight];

    __device__ Addend operator()(int /* queries */, int keys) const {
        return {bias_value(x[keys / 8][keys % kOfEight])};
    }
};
// Of queries with rows of their own where rows are queries and keys are interleaved, eight neighbours in one.
template <class Element, int kRows, int kCols>
struct FetchedRuns {
    BiasRun<Element> run[kRows / 8][kCols / 32];

    __device__ Addend operator()(int queries, int keys) const { return {run[queries / 8][keys / 32].value(keys % 32)}; }
};

#endif  // CUPYFLASH_ADDENDS_CUH
