// Vector clocks: which access happens before which.
//
// A cluster's clocks have one component for each thread, two for each warp (its asynchronous reads: wgmma, and bulk copies
// out of shared memory) and one for each mbarrier (the copies that complete on it). Every thread has
//   data   what happens before its next access;
//   proxy  what happens before its next asynchronous access: follows `data` only at fence.proxy.async;
//   cause  like data, but also along asynchronous work (a copy cannot arrive before it was issued); orders no memory.
// Barriers of many threads cost most of what the detector does, so proxy is left out until some thread has come to a
// fence.proxy.async, before which it is 0, and cause until there is an mbarrier, whose waits alone ask for it.
// Blocks of other clusters are known only through acquire and release in global memory: `Knowledge`.
#ifndef EMULATOR_CLOCKS_H
#define EMULATOR_CLOCKS_H
#include <map>
#include <memory>
#include <vector>

#include "common.h"

namespace emu {

using Clock = std::vector<u32>;  // components that were added since are 0
// Serial number of a cluster -> what of its threads is known to have happened.
using Knowledge = std::shared_ptr<const std::map<int, Clock>>;

// What a release hands to an acquire.
struct Released {
    Clock data, proxy, cause;
    Knowledge blocks;
    u32 common = 0;  // the last of those who have released to it: see Fiber::common
    void clear() { data.clear(), proxy.clear(), cause.clear(), blocks.reset(), common = 0; }
};

struct Fiber;
struct Warp;

// The clocks of one cluster.
struct Clocks {
    int threads = 0, size = 0;  // components so far: those of mbarriers come last, as these are initialised
    int stride = 0;
    bool has_proxy = false, has_cause = false;
    // [threads][stride], [threads][stride], [threads][threads]; kept from cluster to cluster, of rows `size` is in use
    std::vector<u32> data, proxy, cause;

    void reset(int threads);
    u32 *data_of(int thread) { return &data[static_cast<size_t>(thread) * stride]; }
    u32 *proxy_of(int thread) {
        if (!has_proxy) begin_proxy();
        return &proxy[static_cast<size_t>(thread) * stride];
    }
    u32 *cause_of(int thread) { return &cause[static_cast<size_t>(thread) * threads]; }
    u32 now(int thread) { return data_of(thread)[thread]; }
    int wgmma_component(int warp) const { return threads + warp; }
    int bulk_component(int warp) const { return threads + threads / 32 + warp; }
    int mbarrier_component(int i) const { return threads + threads / 32 * 2 + i; }
    void has_mbarriers(int n);
    std::string name(int component) const;

  private:
    void begin_proxy();
    void clear(std::vector<u32> &clocks, int from) const;  // components from this one to `size`, of all threads
};

// All do nothing unless the race detector is on.
void release(Fiber &fiber, Released &to);
void acquire(Fiber &fiber, const Released &from);
// The same, by all who have released to it and have waited since: none of them knows anything else.
void acquire_together(const std::vector<Warp *> &warps, const Released &from);
void join(Clock &to, const u32 *from, int n);
void join(Knowledge &to, const Knowledge &from);

}  // namespace emu
#endif
