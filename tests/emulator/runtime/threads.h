// Threads, warps, blocks and clusters that are resident, and how they wait.
#ifndef EMULATOR_THREADS_H
#define EMULATOR_THREADS_H
#include "clocks.h"
#include "common.h"

namespace emu {

struct Cluster;
struct Cta;
struct Warp;

struct CpAsync {
    u32 dst;
    const void *src;
    int bytes;
    bool valid, done;
    Site site;
};

// One CUDA thread: a stack of its own, switched to by hand.
struct alignas(64) Fiber : EmuThread {
    int lane;
    void *sp = nullptr;
    char *stack = nullptr;
    Warp *warp;
    const char *waits_for;
    Site site;    // where it waits
    u32 operand;  // address or id it waits for
    // Those above are touched each time that threads take turns, and cache lines are what this costs.
    int index;  // in the cluster: its component of vector clocks
    Cta *cta;
    Cluster *cluster;
    bool result;  // of bar.red
    Knowledge known_blocks;
    bool has_waited;  // for the launches in front of this one
    u32 common;       // not 0: who has the same has the same clocks, but for his own component; 0 at any other change
    std::vector<CpAsync> copies;                    // cp.async, open group
    std::vector<std::vector<CpAsync>> copy_groups;  // committed, oldest first
    std::vector<CpAsync> copies_of_before;          // room for a group to come
    std::vector<int> bulk;                          // bulk copies, open group: indices into Cluster::bulk
    std::vector<std::vector<int>> bulk_groups;
};

// A rendezvous of the 32 lanes of a warp; the last one computes for all.
struct Collective {
    u32 arrived = 0;
    const char *op;
    Site site;
    void *args[32];
};

struct WgmmaOp;  // wgmma.cpp
struct WgmmaState {
    std::vector<std::vector<WgmmaOp *>> groups;
    std::vector<WgmmaOp *> open;
    bool fenced = false;
};

struct Warp {
    Cluster *cluster;
    Cta *cta;
    Fiber *lanes;  // 32 of them
    int index;     // in the cluster
    int in_cta;    // in its block
    u32 runnable;  // lanes
    u32 done;      // lanes that have exited
    u32 parked;    // lanes that have reached a wait, while others of the warp may still come
    int priority;
    Collective collective;
    WgmmaState wgmma;
    u32 wgmma_clock = 0, bulk_clock = 0;  // of its asynchronous reads
    int max_registers;
    int cluster_phase;  // in which it has arrived at the cluster's barrier
};

// Hardware barrier 0..15 of a block, or the barrier of a cluster.
struct Barrier {
    int arrived = 0, expected = 0, kind = 0;
    bool value = false;
    Site site{};
    std::vector<Warp *> waiting;
    Released released;
    int phase = 0;  // of a cluster barrier, whose arrivals and waits are separate
    Released done;  // what the arrivals of the phase before have released
};

struct Cta {
    int block;  // index in the grid
    int live;   // threads that have not exited
    u8 *smem;
    Barrier barriers[16];
};

struct MBarrier;
struct BulkOp;
struct SharedShadow;

// Blocks that share distributed shared memory, and the domain of one set of vector clocks. A slot is used by one cluster
// of the grid after the other.
struct Cluster {
    int serial = -1;  // index of the cluster in the grid
    int threads;      // of all its blocks
    int live;
    int ctas_count;
    Cta ctas[kMaxCluster];
    std::vector<Warp> warps;
    Fiber *fibers;
    Barrier barrier;
    std::map<u32, MBarrier> mbarriers;
    std::vector<BulkOp> bulk;
    Clocks &clocks;
    std::unique_ptr<SharedShadow> shadow;

    explicit Cluster(Clocks &clocks);
    ~Cluster();
    u8 *smem(u32 addr) { return ctas[addr >> kCtaShift].smem + (addr & (kCtaSpan - 1)); }
};

extern Fiber *current;         // null outside of fibers
extern const char *own_stack;  // of the running thread; outside of fibers all of memory
extern size_t own_stack_bytes;
void make_current(Fiber *fiber);
extern std::vector<std::unique_ptr<Cluster>> clusters;

// ---- Scheduling (scheduler.cpp) ----
void reset_scheduler();
void add_warps(Cluster &cluster);
// Runs fibers until all threads of some cluster have exited (returns it) or nothing can run any more (null).
Cluster *run_until_exit();
void start_fiber(Fiber &fiber, void (*entry)());
void block_current(const char *what, Site site, u32 operand = 0);
void wake(Fiber &fiber);
void wake_warp(Warp &warp);
void thread_exits();
// Lets other warps go first, now and then: after what hands work over, so that orders are tried out.
void preempt();
// The lanes of a warp gather here before a wait, as they do on the device unless the compiler splits the warp.
void gather();
void sleep_current(Site site);  // until another thread has published something
void publish();                 // something that a sleeping thread may poll for has changed
[[noreturn]] void leave_fiber();
void put_deadlock();

// Asynchronous work of the bulk engine (tma.cpp): completes one pending operation; false if there is none.
bool complete_one_bulk();

// Address check: where the bytes lie. Fails if they are not all inside the block's shared memory.
u8 *checked_smem(u32 addr, u32 bytes, u32 alignment, const char *op, Site site);

// ---- Warp collectives (collectives.cpp) ----
// Waits for all lanes of the warp at the same instruction; the last to arrive calls f(args of the lanes). If f returns
// false the warp stays blocked, and whoever completes the wait wakes it.
template <class F>
void collective(const char *op, void *arg, Site site, F f);
bool join_collective(const char *op, void *arg, Site site);
void finish_collective(bool release);

template <class F>
void collective(const char *op, void *arg, Site site, F f) {
    if (join_collective(op, arg, site)) finish_collective(f(current->warp->collective.args, *current->warp));
    else block_current(op, site);
}

}  // namespace emu
#endif
