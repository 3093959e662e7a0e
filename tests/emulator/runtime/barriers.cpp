// Barriers of a block (0..15) and of a cluster.
#include "threads.h"

namespace emu {

struct BarrierArgs {
    int id, threads, kind;
    bool value;
};

static void release_warp(Warp &w, Released &to) {
    for (int i = 0; i < 32; ++i) release(w.lanes[i], to);
}
static void acquire_warp(Warp &w, const Released &from) {
    for (int i = 0; i < 32; ++i) acquire(w.lanes[i], from);
}

// All threads that are expected have come.
static void complete(Barrier &b) {
    acquire_together(b.waiting, b.released);
    for (Warp *w : b.waiting)
        for (int i = 0; i < 32; ++i) w->lanes[i].result = b.value;
    std::vector<Warp *> waiting;
    waiting.swap(b.waiting);
    b.arrived = 0;
    b.value = false;
    b.released.clear();
    for (Warp *w : waiting) wake_warp(*w);
}

// The whole warp arrives. Returns whether it may go on.
static bool arrive_at_barrier(void **args, Warp &w) {
    const auto &first = *static_cast<BarrierArgs *>(args[0]);
    const Site site = w.collective.site;
    const int expected = first.threads < 0 ? static_cast<int>(config.threads) : first.threads;
    if (first.id < 0 || first.id > 15) fail("barrier %d at %s: the hardware has 0 to 15", first.id, text(site).c_str());
    if (expected % 32 || expected > static_cast<int>(config.threads))
        fail("barrier %d at %s: %d threads of a block of %u", first.id, text(site).c_str(), expected, config.threads);
    Barrier &b = w.cta->barriers[first.id];
    const int kind = first.kind == kEmuBarRedOr;
    if (b.arrived && (b.expected != expected || b.kind != kind))
        fail("barrier %d: %d threads %s at %s, but %d threads %s at %s", first.id, expected,
             kind ? "bar.red" : "bar.sync", text(site).c_str(), b.expected, b.kind ? "bar.red" : "bar.sync",
             text(b.site).c_str());
    b.expected = expected;
    b.kind = kind;
    b.site = site;
    for (int i = 0; i < 32; ++i) {
        const auto &lane = *static_cast<BarrierArgs *>(args[i]);
        if (lane.id != first.id || lane.threads != first.threads)
            fail("the lanes of a warp name different barriers at %s", text(site).c_str());
        b.value |= lane.value;
        w.lanes[i].operand = first.id;
    }
    release_warp(w, b.released);
    b.arrived += 32;
    if (first.kind != kEmuBarArrive) b.waiting.push_back(&w);
    const bool last = b.arrived == expected;
    if (last) complete(b);
    return last || first.kind == kEmuBarArrive;
}

static void arrive_at_cluster(Warp &w) {
    Barrier &b = w.cluster->barrier;
    b.site = w.collective.site;
    w.cluster_phase = b.phase;
    release_warp(w, b.released);
    b.arrived += 32;
    if (b.arrived < w.cluster->threads) return;
    std::swap(b.done, b.released);
    b.released.clear();
    b.arrived = 0;
    ++b.phase;
    std::vector<Warp *> waiting;
    waiting.swap(b.waiting);
    for (Warp *other : waiting) {
        acquire_warp(*other, b.done);
        wake_warp(*other);
    }
}

// Waits for the phase that this warp has arrived at.
static bool wait_for_cluster(Warp &w) {
    Barrier &b = w.cluster->barrier;
    if (b.phase > w.cluster_phase) {
        acquire_warp(w, b.done);
        return true;
    }
    b.waiting.push_back(&w);
    return false;
}

}  // namespace emu

using namespace emu;

bool emu_bar(int id, int threads, int kind, bool value, Site site) {
    BarrierArgs mine{id, threads, kind, value};
    if (kind == kEmuBarArrive) preempt();
    collective(kind == kEmuBarRedOr  ? "bar.red"
               : kind == kEmuBarSync ? "bar.sync"
                                     : "bar.arrive",
               &mine, site, arrive_at_barrier);
    return current->result;
}

void emu_cluster_arrive(Site site) {
    collective("barrier.cluster.arrive", nullptr, site, [](void **, Warp &w) {
        arrive_at_cluster(w);
        return true;
    });
}

void emu_cluster_wait(Site site) {
    collective("barrier.cluster.wait", nullptr, site, [](void **, Warp &w) { return wait_for_cluster(w); });
}
