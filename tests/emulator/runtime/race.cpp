// Races in shared memory, and how races are reported.
#include "race.h"

#include <set>
#include <unordered_map>

namespace emu {

// ---- Reports ----
static std::vector<Site> sites(1);
static std::unordered_map<u64, u16> site_index;
static std::set<u64> reported;

u16 intern(Site site) {
    static Site last;
    static u16 last_index;
    if (site.file == last.file && site.line == last.line) return last_index;
    u16 &index = site_index[reinterpret_cast<u64>(site.file) * 0x9E3779B97F4A7C15ull ^ static_cast<u64>(site.line)];
    if (!index) {
        if (sites.size() > 0x7fff) fail("a kernel accesses memory in more than 32767 places");
        index = static_cast<u16>(sites.size());
        sites.push_back(site);
    }
    last = site;
    return last_index = index;
}
Site site_of(u16 interned) { return sites[interned]; }

void reset_races() {
    reported.clear();
    sites.resize(1);
    site_index.clear();
    intern(Site{"", -2});  // forgets the last site
}

bool report_once(u64 key) {
    ++stats.races;
    set_failed();
    return reported.insert(key).second && static_cast<int>(reported.size()) <= config.max_reports;
}

void report_race(const char *kind, const std::string &where, const std::string &now, const std::string &before,
                 Site site, u16 before_site) {
    if (!report_once(reinterpret_cast<u64>(kind) ^ static_cast<u64>(intern(site)) << 20 ^
                     static_cast<u64>(before_site) << 42)) {
        if (stats.races >= kMostRaces) end_launch();
        return;
    }
    put("%sRACE, %s: %s, %s at %s", message_is_empty() ? "" : "\n", kind, where.c_str(), now.c_str(),
        text(site).c_str());
    if (!before.empty()) put(", after %s at %s", before.c_str(), text(site_of(before_site)).c_str());
    if (current) put(" [block %d, warp %d, lane %d]", current->cta->block, current->warp->in_cta, current->lane);
    put_call_stack();
}

// ---- Shared memory ----
void SharedShadow::reset(int ctas, u32 smem_bytes) {
    cta_lines = smem_bytes / kLine + 1;
    lines.assign(static_cast<size_t>(ctas) * cta_lines, SharedCell());
    parts.clear();
    free_parts.clear();
    more.assign(1, {});
    free_more.clear();
}

int SharedShadow::new_more() {
    if (free_more.empty()) {
        free_more.push_back(static_cast<int>(more.size()));
        more.emplace_back();
    }
    const int index = free_more.back();
    free_more.pop_back();
    more[index].clear();
    return index;
}

SharedShadow::Parts &SharedShadow::split(SharedCell &line) {
    if (!line.whole) return parts[line.more];
    if (free_parts.empty()) {
        free_parts.push_back(static_cast<int>(parts.size()));
        parts.emplace_back();
    }
    const int index = free_parts.back();
    free_parts.pop_back();
    Parts &own = parts[index];
    own.fill(line);
    if (line.more)
        for (u32 i = 1; i < own.size(); ++i) {
            own[i].more = new_more();
            more[own[i].more] = more[line.more];
        }
    line.whole = false;
    line.more = index;
    return own;
}

void SharedShadow::join(SharedCell &line) {
    free_parts.push_back(line.more);
    line = parts[line.more][0];
}

// f(record, address) for all records of some bytes. If that leaves the same in all granules of a line, they have one.
template <class F>
static void for_each_record(SharedShadow &shadow, u32 addr, u32 bytes, bool leaves_the_same, F f) {
    const u32 end = addr + bytes;
    for (u32 a = addr / kGranule * kGranule; a < end;) {
        SharedCell &line = shadow.line(a);
        if (a % kLine || end - a < kLine) {
            f(shadow.split(line)[a % kLine / kGranule], a);
            a += kGranule;
            continue;
        }
        if (line.whole) {
            f(line, a);
        } else {
            SharedShadow::Parts &own = shadow.parts[line.more];
            for (u32 i = 0; i < own.size(); ++i) f(own[i], a + i * kGranule);
            if (leaves_the_same && std::all_of(own.begin(), own.end(), [&](const SharedCell &c) {
                    return c.copy_pending == own[0].copy_pending;
                }))
                shadow.join(line);
        }
        a += kLine;
    }
}

// One access that is being checked, and who makes it.
struct Check {
    Cluster &cluster;
    const u32 *data, *proxy;  // clocks of the issuing thread; proxy only for asynchronous accesses
    Access access;
    Site site;

    bool after(const Access &a) const { return a.component == access.component || a.clock <= data[a.component]; }
    void report(const char *kind, u32 addr, const Access &before) const {
        const std::string where =
            "shared memory + " + std::to_string(addr & (kCtaSpan - 1)) + (addr >> kCtaShift ? " of block rank 1" : "");
        report_race(kind, where, cluster.clocks.name(access.component),
                    before.component < 0 ? "" : cluster.clocks.name(before.component), site, before.site);
    }
};

static void check_write(const Check &c, SharedShadow &shadow, SharedCell &cell, u32 addr) {
    for (Access &r : cell.reads) {
        if (r.component >= 0 && !c.after(r)) c.report("write after read", addr, r);
        r.component = -1;
    }
    if (cell.more) {
        for (const Access &r : shadow.more[cell.more])
            if (!c.after(r)) c.report("write after read", addr, r);
        shadow.free_more.push_back(cell.more);
        cell.more = 0;
    }
    cell.write = c.access;
    cell.async_write = c.proxy != nullptr;
}

// Keeps the read unless a record of one that is ordered before it can be replaced.
static void record_read(const Check &c, SharedShadow &shadow, SharedCell &cell) {
    for (Access &r : cell.reads)
        if (r.component < 0 || c.after(r)) {
            r = c.access;
            return;
        }
    if (!cell.more) cell.more = shadow.new_more();
    std::vector<Access> &more = shadow.more[cell.more];
    for (Access &r : more)
        if (c.after(r)) {
            r = c.access;
            return;
        }
    more.push_back(c.access);
}

static void check(const Check &c, u32 addr, u32 bytes, bool write) {
    SharedShadow &shadow = *c.cluster.shadow;
    for_each_record(shadow, addr, bytes, write, [&](SharedCell &cell, u32 a) {
        ++stats.accesses;
        if (cell.copy_pending && !c.proxy)
            c.report("access to the destination of cp.async before its wait_group", a, cell.write);
        if (cell.write.component >= 0) {
            if (!c.after(cell.write)) c.report(write ? "write after write" : "read after write", a, cell.write);
            else if (c.proxy && !cell.async_write && cell.write.clock > c.proxy[cell.write.component])
                c.report("fence.proxy.async is missing between a write and an asynchronous access", a, cell.write);
        }
        if (write) check_write(c, shadow, cell, a);
        else record_read(c, shadow, cell);
    });
}

void shared_access(u32 addr, u32 bytes, bool write, Site site) {
    if (!config.race) return;
    Cluster &cluster = *current->cluster;
    Clocks &clocks = cluster.clocks;
    const int me = current->index;
    check({cluster, clocks.data_of(me), nullptr, {static_cast<i16>(me), intern(site), clocks.now(me)}, site}, addr,
          bytes, write);
}

void shared_access_async(Fiber &issuer, u32 addr, u32 bytes, bool write, int component, u32 clock, Site site) {
    if (!config.race) return;
    Cluster &cluster = *issuer.cluster;
    Clocks &clocks = cluster.clocks;
    check({cluster,
           clocks.data_of(issuer.index),
           clocks.proxy_of(issuer.index),
           {static_cast<i16>(component), intern(site), clock},
           site},
          addr, bytes, write);
}

void shared_copy_pending(u32 addr, u32 bytes, bool pending, Site site) {
    if (!config.race) return;
    Cluster &cluster = *current->cluster;
    const Access landed{static_cast<i16>(current->index), intern(site), cluster.clocks.now(current->index)};
    for_each_record(*cluster.shadow, addr, bytes, false, [&](SharedCell &cell, u32) {
        cell.copy_pending = pending;
        if (!pending) cell.write = landed, cell.async_write = false;  // ordered by the wait, not by the issue
    });
}

}  // namespace emu
