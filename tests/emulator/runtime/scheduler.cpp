// Which thread runs next. One operating-system thread; fibers switch to each other.
#include <stdlib.h>

#include "mbarrier.h"
#include "threads.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

EmuThread *emu_self;

namespace emu {

Fiber *current;
const char *own_stack;
size_t own_stack_bytes = ~size_t{0};
std::vector<std::unique_ptr<Cluster>> clusters;

static std::vector<Warp *> warps;  // of all resident clusters
static int runnable;               // threads
static Warp *victim;               // of the starving scheduler
static Cluster *exited;
static std::vector<Fiber *> sleepers;
static bool published, woke_for_nothing;
static Warp *last_warp;

// ---- Switching stacks ----
#if defined(__x86_64__)
extern "C" void emu_switch(void **save, void *to);
asm(R"(.text
.globl emu_switch
.hidden emu_switch
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi); movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
static void *main_sp;

static void prepare_stack(Fiber &f, void (*entry)()) {
    // Each at a place of its own in its page: else the threads of a warp would take turns with a few lines of the cache.
    const uintptr_t top = reinterpret_cast<uintptr_t>(f.stack) + kStackBytes - 64 - f.index % 16 * 256;
    void **sp = reinterpret_cast<void **>(top & ~uintptr_t{15});
    *--sp = nullptr;  // return address of entry: never used, but keeps the stack aligned as after a call
    *--sp = reinterpret_cast<void *>(entry);
    for (int i = 0; i < 6; ++i) *--sp = nullptr;
    f.sp = sp;
}
static void switch_stack(Fiber *from, Fiber *to) { emu_switch(from ? &from->sp : &main_sp, to ? to->sp : main_sp); }
#else  // portable and several times slower
static ucontext_t main_context;

static void prepare_stack(Fiber &f, void (*entry)()) {
    if (!f.sp) f.sp = new ucontext_t;
    auto *context = static_cast<ucontext_t *>(f.sp);
    getcontext(context);
    context->uc_stack.ss_sp = f.stack;
    context->uc_stack.ss_size = kStackBytes;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
}
static void switch_stack(Fiber *from, Fiber *to) {
    swapcontext(from ? static_cast<ucontext_t *>(from->sp) : &main_context,
                to ? static_cast<ucontext_t *>(to->sp) : &main_context);
}
#endif

void make_current(Fiber *to) {
    current = to;
    emu_self = to;
    own_stack = to ? to->stack : nullptr;
    own_stack_bytes = to ? kStackBytes : ~size_t{0};
}

static void go(Fiber *to) {
    ++stats.switches;
    Fiber *from = current;
    if (to == from) return;
    make_current(to);
    if (to) last_warp = to->warp;
    switch_stack(from, to);
}

void leave_fiber() {
    go(nullptr);
    abort();
}

void start_fiber(Fiber &f, void (*entry)()) { prepare_stack(f, entry); }

// ---- Choosing ----
static Fiber *any_lane(Warp &w, u32 lanes) {
    if (config.scheduler == kInOrder || !config.lanes_alone) return &w.lanes[__builtin_ctz(lanes)];
    const u32 r = random_u32() & 31;
    const u32 rotated = lanes >> r | (r ? lanes << (32 - r) : 0);
    return &w.lanes[(__builtin_ctz(rotated) + r) & 31];
}

static Warp *first_runnable(int start, const Warp *except) {
    const int n = static_cast<int>(warps.size());
    for (int i = 0; i < n; ++i) {
        Warp *w = warps[(start + i) % n];
        if (w->runnable && w != except) return w;
    }
    return nullptr;
}

static Warp *choose_warp() {
    const int n = static_cast<int>(warps.size());
    switch (config.scheduler) {
        case kRandom:
            return first_runnable(random_below(n), nullptr);
        case kPriority: {
            if (one_in(64)) warps[random_below(n)]->priority = random_u32() >> 1;
            Warp *best = nullptr;
            for (Warp *w : warps)
                if (w->runnable && (!best || w->priority > best->priority)) best = w;
            return best;
        }
        case kStarve: {  // the victim runs only when nothing else can happen, asynchronous work included
            if (!victim || one_in(4096)) victim = warps[random_below(n)];
            Warp *w = first_runnable(random_below(n), victim);
            if (w) return w;
            return complete_one_bulk() ? nullptr : victim;
        }
        default: {
            const auto at = std::find(warps.begin(), warps.end(), last_warp);
            return first_runnable(at == warps.end() ? 0 : static_cast<int>(at - warps.begin()), nullptr);
        }
    }
}

// Threads that poll wake up when something was published, or, once, when nothing else can run.
static bool wake_sleepers() {
    if (sleepers.empty() || (!published && woke_for_nothing)) return false;
    woke_for_nothing = !published;
    published = false;
    std::vector<Fiber *> all;
    all.swap(sleepers);
    for (Fiber *f : all) wake(*f);
    return true;
}

static Fiber *pick_warp() {
    for (;;) {
        if (config.completion == kAnyTime && one_in(8)) complete_one_bulk();
        if (!sleepers.empty() && published && one_in(4)) wake_sleepers();
        if (!runnable) {
            if (complete_one_bulk() || wake_sleepers()) continue;
            return nullptr;
        }
        Warp *w = choose_warp();
        if (!w) continue;  // the starving scheduler has let a copy complete instead
        w->parked = 0;
        return any_lane(*w, w->runnable);
    }
}

static inline Fiber *pick() {
    if (!config.lanes_alone && current) {  // the lanes of a warp stay together
        const u32 lanes = current->warp->runnable & ~current->warp->parked;
        if (lanes) return &current->warp->lanes[__builtin_ctz(lanes)];
    }
    return pick_warp();
}

static void yield() {
    if (Fiber *f = pick()) go(f);
}

static void make_waiting(const char *what, Site site, u32 operand) {
    Fiber &f = *current;
    f.waits_for = what;
    f.site = site;
    f.operand = operand;
    f.warp->runnable &= ~(1u << f.lane);
    --runnable;
}

void block_current(const char *what, Site site, u32 operand) {
    make_waiting(what, site, operand);
    go(pick());
}

void sleep_current(Site site) {
    sleepers.push_back(current);
    make_waiting("nanosleep", site, 0);
    go(pick());
}

void publish() {
    published = true;
    woke_for_nothing = false;
}

static void wake_lanes(Warp &w, u32 lanes) {
    lanes &= ~(w.runnable | w.done);
    w.runnable |= lanes;
    runnable += __builtin_popcount(lanes);
}

void wake(Fiber &f) { wake_lanes(*f.warp, 1u << f.lane); }

void wake_warp(Warp &w) { wake_lanes(w, ~0u); }

void preempt() {
    if (config.scheduler == kInOrder) return;
    if (config.lanes_alone) {
        if (one_in(4)) yield();
    } else if (one_in(16)) {
        current->warp->parked = ~0u;
        yield();
    }
}

void gather() {
    if (config.lanes_alone || config.scheduler == kInOrder) return;
    current->warp->parked |= 1u << current->lane;
    if (config.scheduler == kPriority && one_in(128)) current->warp->priority = -static_cast<int>(random_u32() >> 2);
    yield();
}

void thread_exits() {
    Fiber &f = *current;
    f.warp->done |= 1u << f.lane;
    f.warp->runnable &= ~(1u << f.lane);
    --runnable;
    --f.cta->live;
    if (--f.cluster->live == 0) {
        exited = f.cluster;
        leave_fiber();
    }
    go(pick());
    abort();
}

Cluster *run_until_exit() {
    exited = nullptr;
    make_current(nullptr);
    if (Fiber *f = pick()) go(f);
    make_current(nullptr);
    if (exited)
        warps.erase(std::remove_if(warps.begin(), warps.end(), [](Warp *w) { return w->cluster == exited; }),
                    warps.end());
    if (exited && victim && victim->cluster == exited) victim = nullptr;
    if (exited && last_warp && last_warp->cluster == exited) last_warp = nullptr;
    publish();
    return exited;
}

void add_warps(Cluster &cluster) {
    for (Warp &w : cluster.warps) {
        w.priority = static_cast<int>(random_u32() >> 1);
        warps.push_back(&w);
        runnable += 32;
    }
    if (config.scheduler == kStarve && !victim && config.seed < static_cast<int>(warps.size()))
        victim = warps[config.seed];
}

void reset_scheduler() {
    warps.clear();
    sleepers.clear();
    runnable = 0;
    victim = last_warp = nullptr;
    published = woke_for_nothing = false;
    make_current(nullptr);
}

}  // namespace emu
