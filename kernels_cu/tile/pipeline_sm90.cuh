// How the roles of a persistent Hopper block keep in step: rings of shared-memory stages, and the queue of tiles. Every
// stage has two mbarriers: "full", completed by the copies into it, and "empty", by the arrivals of all who read it.
#ifndef CUPYFLASH_PIPELINE_SM90_CUH
#define CUPYFLASH_PIPELINE_SM90_CUH
#include "hw/ptx_sm90.cuh"
#include "tile/tile.cuh"

// Named barriers, of which a block has 16; 0 is that of all threads.
constexpr int kGroupBarrier = 1;  // + g: the four warps of consumer warpgroup g

// The same number in all lanes, and known to be to the compiler, which then keeps it and what follows from it, above all
// the matrix descriptors, in uniform registers.
__device__ __forceinline__ int uniform(int x) { return ptx::shfl_index(x, 0); }

// A position in a ring of kCount stages. Who fills a stage waits for "empty" with the parity phase ^ 1, which lets the
// first round pass; who reads it waits for "full" with phase.
template <int kCount>
struct RingPosition {
    int stage;
    ptx::u32 phase = 0;
    __device__ explicit RingPosition(int stage = 0) : stage(stage) {}
    // After `steps` steps.
    __device__ static RingPosition of(int steps) {
        RingPosition at(steps % kCount);
        at.phase = steps / kCount & 1;
        return at;
    }
    __device__ void next(int steps = 1) {  // at most kCount
        if ((stage += steps) >= kCount) stage -= kCount, phase ^= 1;
    }
    // The position `steps` steps before, at most kCount.
    __device__ RingPosition before(int steps) const {
        RingPosition at = *this;
        if ((at.stage -= steps) < 0) at.stage += kCount, at.phase ^= 1;
        return at;
    }
};

// One arrival a warp, once all of its lanes are here.
__device__ __forceinline__ void arrive_warp(ptx::u32 bar) {
    ptx::bar_warp_sync();
    if (lane() == 0) ptx::mbarrier_arrive(bar);
}

// What the roles of a persistent block do next, handed from who decides to all others through two slots of kWords * 16 bytes.
// kAsked: the next item is decided when one of the others asks for it.
template <int kWords, bool kAsked = false>
struct WorkQueue {
    struct Item { ptx::U128 x[kWords]; };
    ptx::u32 bars, slots;  // full, full, empty, empty, asked if there is; two items
    RingPosition<2> at;

    static constexpr int kBarriers = kAsked ? 6 : 4, kBytes = 2 * 16 * kWords;  // of 6 one keeps the items aligned
    // `followers`: warps or threads that call next.
    __device__ static void init(ptx::u32 bars, int followers) {
        #pragma unroll 1
        for (int i = 0; i < 4; ++i) ptx::mbarrier_init(bars + 8 * i, i < 2 ? 1 : followers);
        if (kAsked) ptx::mbarrier_init(bars + 32, 1);
    }
    __device__ WorkQueue(ptx::u32 bars, ptx::u32 slots) : bars(bars), slots(slots) {}

    __device__ void publish(const Item &item) {
        ptx::mbarrier_wait(empty(), at.phase ^ 1);  // @slot-of-queue-empty
        #pragma unroll
        for (int i = 0; i < kWords; ++i) ptx::st_shared_v4_b32(slot() + 16 * i, item.x[i]);
        ptx::mbarrier_arrive(full());
        at.next();
    }
    // By a warp.
    __device__ Item next() {
        const Item item = read();
        arrive_warp(empty());
        at.next();
        return item;
    }
    // By a thread that follows alone.
    __device__ Item next_alone() {
        const Item item = read();
        ptx::mbarrier_arrive(empty());
        at.next();
        return item;
    }
    __device__ void ask() const { ptx::mbarrier_arrive(bars + 32); }
    // By the warp that publishes; `requests` is its own.
    __device__ void wait_until_asked(RingPosition<1> &requests) const {
        ptx::mbarrier_wait(bars + 32, requests.phase);
        ptx::bar_warp_sync();  // before it can be asked again @all-lanes-asked
        requests.next();
    }

  private:
    __device__ Item read() const {
        ptx::mbarrier_wait(full(), at.phase);  // @slot-of-queue-full
        Item item;
        #pragma unroll
        for (int i = 0; i < kWords; ++i) item.x[i] = ptx::ld_shared_v4_b32(slot() + 16 * i);
        return item;
    }
    __device__ ptx::u32 full() const { return bars + 8 * at.stage; }
    __device__ ptx::u32 empty() const { return bars + 16 + 8 * at.stage; }
    __device__ ptx::u32 slot() const { return slots + 16 * kWords * at.stage; }
};

#endif  // CUPYFLASH_PIPELINE_SM90_CUH
