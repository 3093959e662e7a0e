#include "clocks.h"

#include "threads.h"

namespace emu {

void Clocks::reset(int thread_count) {
    threads = thread_count;
    size = mbarrier_component(0);
    stride = mbarrier_component(kMaxMbarriers * config.cluster);
    has_proxy = has_cause = false;
    clear(data, 0);
    for (int t = 0; t < threads; ++t) data_of(t)[t] = 1;
}

void Clocks::clear(std::vector<u32> &clocks, int from) const {
    clocks.resize(std::max(clocks.size(), static_cast<size_t>(threads) * stride));
    for (int t = 0; t < threads; ++t) {
        u32 *own = &clocks[static_cast<size_t>(t) * stride];
        std::fill(own + from, own + size, 0);
    }
}

void Clocks::begin_proxy() {
    has_proxy = true;
    clear(proxy, 0);
}

void Clocks::has_mbarriers(int n) {
    const int before = size;
    size = mbarrier_component(n);
    clear(data, before);
    if (has_proxy) clear(proxy, before);
    if (!has_cause) cause.assign(static_cast<size_t>(threads) * threads, 0);
    has_cause = true;
}

std::string Clocks::name(int component) const {
    char out[64];
    if (component < threads)
        snprintf(out, sizeof out, "thread %d (warp %d lane %d)", component, component / 32, component % 32);
    else if (component < bulk_component(0))
        snprintf(out, sizeof out, "wgmma of warp %d", component - wgmma_component(0));
    else if (component < mbarrier_component(0))
        snprintf(out, sizeof out, "bulk copy of warp %d", component - bulk_component(0));
    else snprintf(out, sizeof out, "copy of mbarrier #%d", component - mbarrier_component(0));
    return out;
}

static void maximum(u32 *to, const u32 *from, int n) {
    for (int i = 0; i < n; ++i) to[i] = std::max(to[i], from[i]);
}

void join(Clock &to, const u32 *from, int n) {
    const int known = std::min(n, static_cast<int>(to.size()));
    maximum(to.data(), from, known);
    to.insert(to.end(), from + known, from + n);
}

void join(Knowledge &to, const Knowledge &from) {
    if (!from || to == from) return;
    if (!to) {
        to = from;
        return;
    }
    auto both = std::make_shared<std::map<int, Clock>>(*to);
    for (const auto &[serial, clock] : *from) join((*both)[serial], clock.data(), static_cast<int>(clock.size()));
    to = both;
}

void release(Fiber &f, Released &to) {
    if (!config.race) return;
    Clocks &c = f.cluster->clocks;
    const u32 now = c.now(f.index);
    if (c.has_cause) c.cause_of(f.index)[f.index] = now;
    if (f.common && f.common == to.common && c.has_cause == !to.cause.empty()) {
        to.data[f.index] = now;
        if (c.has_cause) to.cause[f.index] = now;
    } else {
        join(to.data, c.data_of(f.index), c.size);
        if (c.has_proxy) join(to.proxy, c.proxy_of(f.index), c.size);
        if (c.has_cause) join(to.cause, c.cause_of(f.index), c.threads);
        to.common = f.common;
    }
    join(to.blocks, f.known_blocks);
    ++c.data_of(f.index)[f.index];
}

void acquire(Fiber &f, const Released &from) {
    if (!config.race) return;
    f.common = 0;
    Clocks &c = f.cluster->clocks;
    maximum(c.data_of(f.index), from.data.data(), static_cast<int>(from.data.size()));
    if (!from.proxy.empty()) maximum(c.proxy_of(f.index), from.proxy.data(), static_cast<int>(from.proxy.size()));
    if (!from.cause.empty()) maximum(c.cause_of(f.index), from.cause.data(), static_cast<int>(from.cause.size()));
    join(f.known_blocks, from.blocks);
}

void acquire_together(const std::vector<Warp *> &warps, const Released &from) {
    if (!config.race) return;
    static u32 last = 0;
    if (++last == 0) ++last;
    for (Warp *w : warps)
        for (int i = 0; i < 32; ++i) {
            Fiber &f = w->lanes[i];
            Clocks &c = f.cluster->clocks;
            const u32 now = c.now(f.index);
            std::copy(from.data.begin(), from.data.end(), c.data_of(f.index));
            c.data_of(f.index)[f.index] = now;
            if (!from.proxy.empty()) std::copy(from.proxy.begin(), from.proxy.end(), c.proxy_of(f.index));
            if (!from.cause.empty()) std::copy(from.cause.begin(), from.cause.end(), c.cause_of(f.index));
            join(f.known_blocks, from.blocks);
            f.common = last;
        }
}

}  // namespace emu

extern "C" void emu_fence_proxy_async() {
    using namespace emu;
    if (!config.race) return;
    current->common = 0;
    Clocks &c = current->cluster->clocks;
    const u32 *data = c.data_of(current->index);
    u32 *proxy = c.proxy_of(current->index);
    for (int i = 0; i < c.size; ++i) proxy[i] = std::max(proxy[i], data[i]);
}
