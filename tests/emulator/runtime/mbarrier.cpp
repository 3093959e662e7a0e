#include "mbarrier.h"

#include "race.h"

namespace emu {

// What the eight bytes of an initialised barrier hold, so that overwriting one is noticed.
static u64 cookie(u32 bar) { return 0x6d62617272696572ull ^ bar; }

MBarrier &find_mbarrier(u32 bar, const char *op, Site site) {
    const u8 *p = checked_smem(bar, 8, 8, op, site);
    MBarrier &m = current->cluster->mbarriers[bar];
    u64 stored;
    memcpy(&stored, p, 8);
    if (!m.ready) fail("%s at %s: shared memory + %u is not an initialised mbarrier", op, text(site).c_str(), bar);
    if (stored != cookie(bar))
        fail("%s at %s: the mbarrier at shared memory + %u was overwritten", op, text(site).c_str(), bar);
    if (config.race) {  // its initialisation must come before
        const SharedCell &cell = current->cluster->shadow->cell(bar);
        const Clocks &clocks = current->cluster->clocks;
        if (cell.write.component >= 0 && cell.write.component != current->index &&
            cell.write.clock > current->cluster->clocks.data_of(current->index)[cell.write.component])
            report_race("mbarrier used before its initialisation is visible", "shared memory + " + std::to_string(bar),
                        clocks.name(current->index), clocks.name(cell.write.component), site, cell.write.site);
    }
    return m;
}

// A wait names its phase by parity only. So phase k + 1 must not complete before every warp that waits for phase k has
// returned from that wait: else it takes the phase after for the one before and waits for ever. Checked by cause, so it
// does not depend on the schedule. One lane is enough, unless lanes are alone: the others pass the wait with it.
static void check_overrun(u32 bar, MBarrier &m) {
    if (!config.race) return;
    struct Waiter {
        int id;  // warp, or thread if lanes are alone
        Site site;
        bool returned;
    };
    const int lanes = config.lanes_alone ? 1 : 32;
    std::vector<Waiter> waiters;
    for (const MBarrier::Seen &s : m.seen) {
        if (s.phase + 1 != m.phase) continue;
        auto w = std::find_if(waiters.begin(), waiters.end(), [&](const Waiter &x) {
            return x.id == s.thread / lanes && x.site.line == s.site.line && x.site.file == s.site.file;
        });
        if (w == waiters.end()) w = waiters.insert(w, {s.thread / lanes, s.site, false});
        w->returned |= !m.collecting.cause.empty() && m.collecting.cause[s.thread] >= s.clock;
    }
    m.seen.clear();
    for (const Waiter &w : waiters) {
        if (w.returned) continue;
        if (!report_once(0x9000000000000000ull ^ reinterpret_cast<u64>(w.site.file) ^
                         static_cast<u64>(w.site.line) << 40))
            continue;
        put("%sPHASE OVERRUN: the mbarrier at shared memory + %u can complete phase %u before %s %d has seen phase %d, for "
            "which it waits at %s: that wait may never return",
            message_is_empty() ? "" : "\n", bar & (kCtaSpan - 1), m.phase, lanes == 1 ? "thread" : "warp", w.id,
            static_cast<int>(m.phase - 1), text(w.site).c_str());
    }
}

// The other way round: whoever waits for phase k must know by then that phase k - 1 is complete, or the wait may return
// at once, taking phase k - 2 for it.
static void check_underrun(u32 bar, const MBarrier &m, Site site) {
    if (!config.race || m.phase < 2) return;
    const u32 *known = current->cluster->clocks.data_of(current->index);
    bool ordered = true;
    for (size_t i = 0; i < m.earlier.data.size(); ++i) ordered &= m.earlier.data[i] <= known[i];
    if (ordered ||
        !report_once(0xa000000000000000ull ^ reinterpret_cast<u64>(site.file) ^ static_cast<u64>(site.line) << 40))
        return;
    put("%sPHASE UNDERRUN: the mbarrier at shared memory + %u: thread %d may wait for phase %u at %s before phase %u is "
        "complete: that wait returns at once",
        message_is_empty() ? "" : "\n", bar & (kCtaSpan - 1), current->index, m.phase - 1, text(site).c_str(),
        m.phase - 2);
    put_call_stack();
}

static void complete_phase_if_due(u32 bar, MBarrier &m) {
    if (m.pending != 0 || m.tx != 0) return;
    check_overrun(bar, m);
    ++m.phase;
    m.pending = m.count;
    std::swap(m.earlier, m.done);
    m.done = m.collecting;  // clocks only grow: the next phase keeps what this one has released
    for (Fiber *f : m.waiting) wake(*f);
    m.waiting.clear();
}

void complete_tx(Cluster &cluster, BulkOp &op, u32 bytes) {
    MBarrier &m = cluster.mbarriers[op.bar];
    m.tx -= bytes;
    if (config.race) {
        Clocks &c = cluster.clocks;
        m.collecting.data.resize(c.size);
        u32 &copies = m.collecting.data[op.component];
        copies = std::max(copies, op.clock);
        join(m.collecting.cause, op.cause.data(), c.threads);
    }
    complete_phase_if_due(op.bar, m);
}

}  // namespace emu

using namespace emu;

void emu_mbarrier_init(u32 bar, u32 count, Site site) {
    u8 *p = checked_smem(bar, 8, 8, "mbarrier.init", site);
    if (!count) fail("mbarrier.init at %s: a count of 0", text(site).c_str());
    shared_access(bar, 8, true, site);
    auto &all = current->cluster->mbarriers;
    const bool again = all.count(bar) && all[bar].ready;
    const int number = again ? all[bar].number : static_cast<int>(all.size());
    const int most = kMaxMbarriers * config.cluster;
    if (number >= most) fail("mbarrier.init at %s: more than %d mbarriers", text(site).c_str(), most);
    MBarrier &m = all[bar];
    m = MBarrier();
    m.ready = true;
    m.count = m.pending = count;
    m.number = number;
    m.site = site;
    if (config.race && !again) current->cluster->clocks.has_mbarriers(number + 1);
    const u64 c = cookie(bar);
    memcpy(p, &c, 8);
}

void emu_mbarrier_arrive(u32 bar, int64_t tx, Site site) {
    preempt();
    checked_smem(bar, 8, 8, "mbarrier.arrive", site);
    if (!current->cluster->ctas[bar >> kCtaShift].live)
        fail("mbarrier.arrive at %s: on a block of the cluster that has exited", text(site).c_str());
    MBarrier &m = find_mbarrier(bar, "mbarrier.arrive", site);
    if (!m.pending) fail("mbarrier.arrive at %s: more arrivals than the count of %u", text(site).c_str(), m.count);
    release(*current, m.collecting);
    if (tx > 0) m.tx += tx;
    --m.pending;
    complete_phase_if_due(bar, m);
    preempt();
}

void emu_mbarrier_wait(u32 bar, u32 parity, Site site) {
    gather();
    if (config.lanes_alone) preempt();
    find_mbarrier(bar, "mbarrier.try_wait", site);
    for (;;) {
        MBarrier &m = current->cluster->mbarriers[bar];
        if ((m.phase & 1) != (parity & 1)) {
            check_underrun(bar, m, site);
            acquire(*current, m.done);
            if (config.race)
                m.seen.push_back({m.phase - 1, current->index, current->cluster->clocks.now(current->index), site});
            return;
        }
        m.waiting.push_back(current);
        block_current("mbarrier.try_wait", site, bar);
    }
}
