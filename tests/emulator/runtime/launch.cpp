// Running a grid: residency, exit checks, deadlocks, faults.
#include "launch.h"

#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "global.h"
#include "mbarrier.h"

namespace emu {

using Kernel = void (*)(void **);
static Kernel kernel;
static void **kernel_args;
static const void *module;
static std::vector<Fiber> fibers;

const void *kernel_module() { return module; }

static void thread_main() {
    kernel(kernel_args);
    const Warp &w = *current->warp;
    if (!current->bulk.empty() || !current->bulk_groups.empty()) {
        const auto &group = current->bulk_groups.empty() ? current->bulk : current->bulk_groups.front();
        if (!group.empty())
            fail("a thread exits without waiting for the bulk copy that it issued at %s",
                 text(current->cluster->bulk[group.front()].site).c_str());
    }
    if (!w.wgmma.open.empty() || !w.wgmma.groups.empty()) fail("a warp exits while its wgmma are in flight");
    thread_exits();
}

// ---- Memory of blocks and threads, made once and kept ----
static u8 *cta_memory(int slot) {
    static std::vector<u8 *> all;
    while (static_cast<int>(all.size()) <= slot) {
        const size_t bytes = (kSmemBytes + 4095) / 4096 * 4096;
        char *p = static_cast<char *>(
            mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        all.push_back(reinterpret_cast<u8 *>(p));
    }
    return all[slot];
}

static Clocks &clocks_memory(int slot) {
    static std::vector<std::unique_ptr<Clocks>> all;
    while (static_cast<int>(all.size()) <= slot) all.push_back(std::make_unique<Clocks>());
    return *all[slot];
}

static void make_fibers() {
    if (!fibers.empty()) return;
    fibers.resize(kMaxFibers);
    for (Fiber &f : fibers) {
        char *p = static_cast<char *>(mmap(nullptr, kStackBytes + 4096, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        mprotect(p, 4096, PROT_NONE);
        f.stack = p + 4096;
    }
}

static void start_thread(Cluster &c, int index) {
    const int in_cta = index % static_cast<int>(config.threads), rank = index / static_cast<int>(config.threads);
    Fiber &f = c.fibers[index];
    f.thread = in_cta;
    f.block = c.ctas[rank].block;
    f.threads = static_cast<int>(config.threads);
    f.blocks = static_cast<int>(config.blocks);
    f.cluster_rank = rank;
    f.warp = &c.warps[index / 32];
    f.cta = &c.ctas[rank];
    f.cluster = &c;
    f.index = index;
    f.lane = index % 32;
    f.result = false;
    f.operand = 0;
    f.known_blocks.reset();
    f.has_waited = false;
    f.common = 0;
    f.copies.clear();
    f.copy_groups.clear();
    f.bulk.clear();
    f.bulk_groups.clear();
    start_fiber(f, thread_main);
}

// Places cluster number `serial` of the grid into slot `slot`.
static void start_cluster(int slot, int serial) {
    clusters[slot] = std::make_unique<Cluster>(clocks_memory(slot));
    Cluster &c = *clusters[slot];
    c.serial = serial;
    c.ctas_count = config.cluster;
    c.threads = c.live = static_cast<int>(config.threads) * config.cluster;
    c.fibers = &fibers[static_cast<size_t>(slot) * c.threads];
    for (int i = 0; i < config.cluster; ++i) {
        Cta &cta = c.ctas[i];
        cta.block = serial * config.cluster + i;
        cta.live = static_cast<int>(config.threads);
        cta.smem = cta_memory(slot * config.cluster + i);
        memset(cta.smem, 0xff, config.smem_bytes);
    }
    c.warps = std::vector<Warp>(c.threads / 32);
    const int share = std::min(255, static_cast<int>(65536 / config.threads) / 8 * 8);  // registers a thread
    for (int i = 0; i < static_cast<int>(c.warps.size()); ++i) {
        Warp &w = c.warps[i];
        w.cluster = &c;
        w.lanes = &c.fibers[32 * i];
        w.index = i;
        w.in_cta = i % static_cast<int>(config.threads / 32);
        w.cta = &c.ctas[i / static_cast<int>(config.threads / 32)];
        w.runnable = ~0u;
        w.done = w.parked = 0;
        w.max_registers = share;
        w.cluster_phase = 0;
    }
    if (config.race) {
        c.clocks.reset(c.threads);
        c.shadow = std::make_unique<SharedShadow>();
        c.shadow->reset(config.cluster, config.smem_bytes);
    }
    c.bulk.reserve(64);
    for (int i = 0; i < c.threads; ++i) start_thread(c, i);
    add_warps(c);
}

void check_cluster_at_exit(Cluster &c) {
    int registers = 0;
    for (const Warp &w : c.warps) registers += 32 * w.max_registers;
    if (registers > 65536 * config.cluster)
        fail("setmaxnreg: the warps of a block ask for %d registers, an SM has 65536", registers / config.cluster);
    for (const BulkOp &op : c.bulk)
        if (!op.done) fail("the bulk copy issued at %s is in flight when its block exits", text(op.site).c_str());
    for (const auto &[bar, m] : c.mbarriers)
        if (m.tx)
            fail("the mbarrier at shared memory + %u (initialised at %s) is left with %lld bytes expected", bar,
                 text(m.site).c_str(), static_cast<long long>(m.tx));
    for (const Cta &cta : c.ctas)
        for (const Barrier &b : cta.barriers)
            if (b.arrived)
                fail("the barrier of %s has %d of %d threads when its block exits", text(b.site).c_str(), b.arrived,
                     b.expected);
}

// What each warp waits for, and every barrier's state.
void put_deadlock() {
    set_failed();
    put("DEADLOCK: no thread can run, and no asynchronous operation is in flight.");
    for (const auto &c : clusters) {
        if (!c || !c->live) continue;
        for (const Warp &w : c->warps) {
            std::map<std::string, u32> waits;
            for (int l = 0; l < 32; ++l) {
                const Fiber &f = w.lanes[l];
                std::string what = "exited";
                if (!(w.done >> l & 1)) {
                    what = f.waits_for + std::string(" at ") + text(f.site);
                    if (strncmp(f.waits_for, "mbar", 4) == 0)
                        what += " (shared memory + " + std::to_string(f.operand & (kCtaSpan - 1)) + ")";
                    if (strncmp(f.waits_for, "bar.sync", 8) == 0 || strncmp(f.waits_for, "bar.red", 7) == 0)
                        if (!w.collective.arrived) what += " (barrier " + std::to_string(f.operand) + ")";
                }
                waits[what] |= 1u << l;
            }
            for (const auto &[what, lanes] : waits)
                put("\n  block %d warp %d lanes %08x: %s", w.cta->block, w.in_cta, lanes, what.c_str());
        }
        for (const auto &[bar, m] : c->mbarriers)
            put("\n  mbarrier at shared memory + %u of block %d (initialised at %s): phase %u, %u of %u arrivals missing, %lld bytes missing",
                bar & (kCtaSpan - 1), c->ctas[bar >> kCtaShift].block, text(m.site).c_str(), m.phase, m.pending,
                m.count, static_cast<long long>(m.tx));
        for (const Cta &cta : c->ctas)
            for (int id = 0; id < 16; ++id)
                if (cta.barriers[id].arrived)
                    put("\n  barrier %d of block %d (%s): %d of %d threads have arrived", id, cta.block,
                        text(cta.barriers[id].site).c_str(), cta.barriers[id].arrived, cta.barriers[id].expected);
    }
}

static void run_grid() {
    const int total = static_cast<int>(config.blocks) / config.cluster;
    const int slots =
        std::min({total, config.resident, kMaxFibers / static_cast<int>(config.threads * config.cluster)});
    clusters.clear();
    clusters.resize(slots);
    int next = 0, finished = 0;
    for (int slot = 0; slot < slots; ++slot) start_cluster(slot, next++);
    while (finished < total) {
        Cluster *done = run_until_exit();
        if (has_failed() && !done) return;
        if (!done) return put_deadlock();
        check_cluster_at_exit(*done);
        if (has_failed() && stats.races > static_cast<u64>(config.max_reports)) return;
        ++finished;
        for (int slot = 0; slot < slots; ++slot)
            if (clusters[slot].get() == done) {
                if (next < total) start_cluster(slot, next++);
                break;
            }
    }
}

static sigjmp_buf fault_return;
static void *fault_address;
static bool fault_is_arithmetic;
static void on_fault(int signal, siginfo_t *info, void *) {
    fault_address = info->si_addr;
    fault_is_arithmetic = signal == SIGFPE;
    siglongjmp(fault_return, 1);
}

static void describe_fault() {
    set_failed();
    if (!message_is_empty()) put("\n");
    bool stack = false;
    for (const Fiber &f : fibers)
        stack |= fault_address >= f.stack - 4096 && fault_address < static_cast<void *>(f.stack);
    if (fault_is_arithmetic) put("integer division by zero");
    else if (stack) put("stack overflow of a thread (%d bytes)", kStackBytes);
    else put_fault(fault_address);
    if (current) put(" [block %d, warp %d, lane %d]", current->cta->block, current->warp->in_cta, current->lane);
}

}  // namespace emu

using namespace emu;

static const void *fault_pc;
static void on_fault_with_pc(int signal, siginfo_t *info, void *context) {
#if defined(__x86_64__)
    fault_pc = reinterpret_cast<const void *>(static_cast<ucontext_t *>(context)->uc_mcontext.gregs[REG_RIP]);
#endif
    on_fault(signal, info, context);
}

extern "C" bool emu_planted(int number) { return number == config.planted; }

// Runs a kernel; 0 if all went well. args: pointers to the arguments, as for cuLaunchKernel.
extern "C" int emu_launch(void (*entry)(void **), void **args, const Config *how, char *message, size_t message_bytes,
                          Stats *out) {
    make_fibers();
    config = *how;
    stats = Stats();
    kernel = entry;
    kernel_args = args;
    Dl_info info;
    module = dladdr(reinterpret_cast<void *>(entry), &info) ? info.dli_fbase : nullptr;
    reset_report(config.seed);
    reset_races();
    reset_global();
    reset_scheduler();
    static char *signal_stack = static_cast<char *>(malloc(1 << 16));
    stack_t alternative{}, old_stack;
    alternative.ss_sp = signal_stack;
    alternative.ss_size = 1 << 16;
    sigaltstack(&alternative, &old_stack);
    struct sigaction action{}, old_segv, old_bus, old_fpe;
    action.sa_sigaction = on_fault_with_pc;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &old_segv);
    sigaction(SIGBUS, &action, &old_bus);
    sigaction(SIGFPE, &action, &old_fpe);
    const bool fits = config.threads % 32 == 0 && config.threads > 0 && config.threads <= 1024 && config.cluster >= 1 &&
                      config.cluster <= kMaxCluster && config.blocks % config.cluster == 0 &&
                      config.smem_bytes <= kSmemBytes;
    if (!fits) {
        set_failed();
        put("launch of %u blocks of %u threads, %u bytes, cluster of %d: not possible", config.blocks, config.threads,
            config.smem_bytes, config.cluster);
    } else if (sigsetjmp(fault_return, 1)) {
        describe_fault();
        const std::string at = pc_token(static_cast<const char *>(fault_pc) + 1);
        if (!at.empty()) put("\n    at %s", at.c_str());
    } else {
        try {
            run_grid();
        } catch (const Failure &) {}
    }
    make_current(nullptr);
    sigaction(SIGSEGV, &old_segv, nullptr);
    sigaction(SIGBUS, &old_bus, nullptr);
    sigaction(SIGFPE, &old_fpe, nullptr);
    sigaltstack(&old_stack, nullptr);
    clusters.clear();
    if (stats.races > static_cast<u64>(config.max_reports))
        put("\n%llu races%s", static_cast<unsigned long long>(stats.races),
            stats.races >= kMostRaces ? ", and the launch was ended" : " in all");
    snprintf(message, message_bytes, "%s", message_text().c_str());
    if (out) *out = stats;
    return has_failed();
}
