// Whether a warp's scores climb from key block to key block, by what is added to them: where the hope of an optimistic softmax
// (softmax.cuh) fails again and again, maxima are looked for in all whole blocks that follow.
#ifndef CUPYFLASH_CLIMB_CUH
#define CUPYFLASH_CLIMB_CUH

// kMay: whether they may at all.
template <bool kMay>
struct Climb {
    static constexpr bool kAny = kMay;
    static constexpr int kFailures = 5;  // each in the next block but one at the latest; those by far count for three
    int failures = 0, soon = 0;

    __device__ bool on() const { return kMay && failures >= kFailures; }
    __device__ void hope_failed(int block) { failures = block <= soon ? failures + 1 : 1, soon = block + 2; }
    __device__ void by_far() { failures += 2; }
};

#endif  // CUPYFLASH_CLIMB_CUH
