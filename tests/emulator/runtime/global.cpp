// Global memory: bounds, races between threads of all blocks, atomics, acquire and release.
#include "global.h"

#include <sys/mman.h>

#include <set>

namespace emu {

std::vector<Buffer> buffers;
const char *lowest, *highest;
Bounds loaded[256];
static void forget_bounds() { std::fill(std::begin(loaded), std::end(loaded), Bounds{}); }

// What st.release and atomics have published, by address.
static std::map<const void *, Knowledge> flags;
// Who has added to an integer since the last store to it.
static std::map<const void *, std::vector<GlobalAccess>> additions;

// ---- Launches that overlap ----
// Those in front of this one that may not have ended: the one before, if this one depends on it; and those that may not have
// ended when that one started, if it let others start before it had waited itself.
static std::set<int> running;
static int launch_number;
static bool starts_others_early;

static void begin_launch() {
    if (!config.dependent || !starts_others_early) running.clear();
    if (config.dependent) running.insert(launch_number);
    ++launch_number;
    starts_others_early = false;
    for (Buffer &b : buffers) b.written_before = b.written, b.read_before = b.read;
}

void reset_global() {
    begin_launch();
    forget_bounds();
    flags.clear();
    additions.clear();
    for (Buffer &b : buffers) {
        b.cells.clear();
        b.more.clear();
    }
}

Buffer *find_buffer(const void *p) {
    const char *c = static_cast<const char *>(p);
    if (c < lowest || c >= highest) return nullptr;
    // Guards of 1 MiB lie between them, so what lies in one stretch of that size is of one buffer.
    static u16 last[256];
    u16 &likely = last[reinterpret_cast<uintptr_t>(p) >> 20 & 255];
    const auto has = [&](size_t i) {
        return i < buffers.size() && c >= buffers[i].map && c < buffers[i].map + buffers[i].map_bytes;
    };
    if (has(likely)) return &buffers[likely];
    for (size_t i = 0; i < buffers.size(); ++i)
        if (has(i)) {
            likely = static_cast<u16>(i);
            return &buffers[i];
        }
    return nullptr;
}

void put_fault(const void *address) {
    if (const Buffer *b = find_buffer(address)) {
        const long long offset = static_cast<const char *>(address) - b->lo;
        const bool inside = offset >= 0 && offset < static_cast<long long>(b->bytes);
        put("memory fault: %s at byte %lld of buffer '%s' (%zu bytes)", inside ? "write to an input" : "out of bounds",
            offset, b->name, b->bytes);
    } else {
        put("memory fault at address %p, which is in no buffer", address);
    }
}

static bool happened_before(const Fiber &f, const GlobalAccess &a) {
    if (a.cluster < 0) return true;
    if (a.cluster == f.cluster->serial)
        return a.component == f.index || a.clock <= f.cluster->clocks.data_of(f.index)[a.component];
    if (!f.known_blocks) return false;
    const auto known = f.known_blocks->find(a.cluster);
    return known != f.known_blocks->end() && a.component < static_cast<int>(known->second.size()) &&
           a.clock <= known->second[a.component];
}

static std::string name(const GlobalAccess &a, const Fiber &f) {
    if (a.cluster == f.cluster->serial) return f.cluster->clocks.name(a.component);
    return "block " + std::to_string(a.cluster * config.cluster) + ", " + f.cluster->clocks.name(a.component);
}

// Checks one granule against what came before it, and records the access.
static void check(Fiber &f, Buffer &b, GlobalCell &cell, const GlobalAccess &now, int kind, size_t offset, Site site) {
    const auto report = [&](const char *what, const GlobalAccess &before) {
        report_race(what, "buffer '" + std::string(b.name) + "' + " + std::to_string(offset), name(now, f),
                    name(before, f), site, before.site);
    };
    const auto by_the_same = [&](const GlobalAccess &a) {  // thread; what is asynchronous is ordered by who issues it
        return a.component == f.index && now.component == f.index && a.cluster == now.cluster;
    };
    std::vector<GlobalAccess> *more = cell.more ? &b.more[cell.more] : nullptr;
    if (kind == kGlobalRead && !more && by_the_same(cell.read)) {  // nothing was written since, which forgets reads
        cell.read = now;
        return;
    }
    if (!happened_before(f, cell.write))
        report(kind == kGlobalRead ? "read after write" : "write after write", cell.write);
    if (more)
        for (const GlobalAccess &a : *more)
            if ((a.atomic || kind != kGlobalRead) && !happened_before(f, a)) {
                if (!a.atomic || kind != kGlobalAtomic)
                    report(a.atomic ? "plain access after an addition" : "write after read", a);
                else if (config.ordered_red) report("additions in no fixed order", a);
            }
    if (kind != kGlobalRead && !happened_before(f, cell.read)) report("write after read", cell.read);
    if (kind == kGlobalWrite) {
        cell.write = now;
        cell.read.cluster = -1;
        if (more) more->clear();
        return;
    }
    if (kind == kGlobalRead && (cell.read.cluster < 0 || happened_before(f, cell.read))) {
        cell.read = now;
        return;
    }
    if (!more) {
        if (b.more.empty()) b.more.emplace_back();
        cell.more = static_cast<int>(b.more.size());
        b.more.emplace_back();
        more = &b.more.back();
    }
    auto same = std::find_if(more->begin(), more->end(),
                             [&](const GlobalAccess &a) { return a.atomic == now.atomic && by_the_same(a); });
    if (same == more->end())
        same = std::find_if(more->begin(), more->end(),
                            [&](const GlobalAccess &a) { return a.atomic == now.atomic && happened_before(f, a); });
    if (same == more->end()) more->push_back(now);
    else *same = now;
}

// What others may still write is not read, and what they may still read or write is not written.
static void check_awaited(const Fiber &f, Buffer &b, int kind, Site site) {
    const bool writes = kind != kGlobalRead;
    if (!f.has_waited && (running.count(b.written_before) || (writes && running.count(b.read_before))))
        report_race("access before griddepcontrol.wait", "buffer '" + std::string(b.name) + "'",
                    f.cluster->clocks.name(f.index), "", site, 0);
    (writes ? b.written : b.read) = launch_number;
}

void global_access_async(Fiber &f, const void *p, u32 bytes, int kind, int component, u32 clock, const char *op,
                         Site site) {
    Buffer *b = find_buffer(p);
    if (!b) fail("%s at %s: global address %p is in no buffer", op, text(site).c_str(), p);
    const long long offset = static_cast<const char *>(p) - b->lo;
    if (offset < 0 || offset + bytes > static_cast<long long>(b->bytes))
        fail("%s at %s: bytes [%lld, %lld) of buffer '%s' are out of bounds, it has %zu", op, text(site).c_str(),
             offset, offset + bytes, b->name, b->bytes);
    if (kind != kGlobalRead && !b->writable)
        fail("%s at %s: writes to the input '%s'", op, text(site).c_str(), b->name);
    if (!config.race || !b->writable) {
        if (kind == kGlobalRead) loaded_near(p) = {b->lo, b->lo + b->bytes};
        return;
    }
    check_awaited(f, *b, kind, site);
    if (b->cells.empty()) b->cells.resize(b->bytes / b->granule + 1);
    const GlobalAccess now{f.cluster->serial, clock, static_cast<i16>(component), intern(site), kind == kGlobalAtomic};
    for (long long a = offset / b->granule; a <= (offset + bytes - 1) / b->granule; ++a)
        check(f, *b, b->cells[a], now, kind, a * b->granule, site);
}

void global_access(const void *p, u32 bytes, int kind, const char *op, Site site) {
    const u32 now = config.race ? current->cluster->clocks.now(current->index) : 0;
    global_access_async(*current, p, bytes, kind, current->index, now, op, site);
}

// ---- Acquire and release between blocks ----
static void publish_at(const void *p, bool replace) {
    publish();
    if (!config.race) return;
    Fiber &f = *current;
    Clocks &clocks = f.cluster->clocks;
    auto knowledge = std::make_shared<std::map<int, Clock>>();
    if (f.known_blocks) *knowledge = *f.known_blocks;
    (*knowledge)[f.cluster->serial] = Clock(clocks.data_of(f.index), clocks.data_of(f.index) + clocks.size);
    ++clocks.data_of(f.index)[f.index];
    Knowledge &flag = flags[p];
    if (replace) flag.reset();
    join(flag, knowledge);
}

static void learn_from(const void *p) {
    const auto flag = flags.find(p);
    if (!config.race || flag == flags.end()) return;
    Fiber &f = *current;
    join(f.known_blocks, flag->second);
    const auto own = flag->second->find(f.cluster->serial);
    if (own == flag->second->end()) return;
    f.common = 0;
    u32 *data = f.cluster->clocks.data_of(f.index);
    for (size_t i = 0; i < own->second.size(); ++i) data[i] = std::max(data[i], own->second[i]);
}

}  // namespace emu

using namespace emu;

// Strong operations on one address do not race with each other: bounds only.
static void strong_access(const void *p, int kind, const char *op, Site site) {
    const int race = config.race;
    config.race = 0;
    global_access(p, 4, kGlobalWrite, op, site);
    config.race = race;
    if (race) check_awaited(*current, *find_buffer(p), kind, site);
}

int emu_ld_acquire(const int *p, Site site) {
    strong_access(p, kGlobalRead, "ld.acquire", site);
    preempt();
    learn_from(p);
    return *p;
}

// Of a count, which begins at 0: every other time what it was at first, as a GPU may show it. An acquiring fence follows.
int emu_ld_relaxed(const int *p, Site site) {
    strong_access(p, kGlobalRead, "ld.relaxed", site);
    preempt();
    if (one_in(2)) return 0;
    learn_from(p);
    return *p;
}

// A store that is not ordered after every addition may come before one of them on the device.
static void check_store_over_additions(const void *p, Site site) {
    if (!config.race) return;
    const Fiber &f = *current;
    const GlobalAccess now{f.cluster->serial, f.cluster->clocks.now(f.index), static_cast<i16>(f.index), 0, false};
    for (const GlobalAccess &a : additions[p])
        if (!happened_before(f, a))
            report_race("store not ordered after an addition", "buffer '" + std::string(find_buffer(p)->name) + "'",
                        name(now, f), name(a, f), site, a.site);
    additions.erase(p);
}

void emu_st_release(int *p, int x, Site site) {
    strong_access(p, kGlobalWrite, "st.release", site);
    check_store_over_additions(p, site);
    publish_at(p, true);
    *p = x;
    preempt();
}

int emu_atomic_add_s32(int *p, int x, bool acquire_release, Site site) {
    strong_access(p, kGlobalAtomic, "atom.add", site);
    if (config.race) {
        Fiber &f = *current;
        additions[p].push_back(
            {f.cluster->serial, f.cluster->clocks.now(f.index), static_cast<i16>(f.index), intern(site), true});
    }
    if (acquire_release) {
        learn_from(p);
        publish_at(p, false);
    } else {
        publish();
    }
    const int before = *p;
    *p += x;
    preempt();
    return before;
}

void emu_red_add_f32(float *p, const float *x, int count, Site site) {
    if (reinterpret_cast<uintptr_t>(p) % (4 * count))
        fail("red.global.add at %s: address %p is not aligned to %d bytes", text(site).c_str(), static_cast<void *>(p),
             4 * count);
    global_access(p, 4 * count, kGlobalAtomic, "red.global.add", site);
    for (int i = 0; i < count; ++i) p[i] += x[i];
}

void emu_wait_for_launches() { current->has_waited = true; }
void emu_start_dependents() { starts_others_early |= !current->has_waited; }

void emu_nanosleep(Site site) { sleep_current(site); }

// ---- Buffers, for Python ----
extern "C" {
// Memory between two guards: its end, or with at_start its start, touches one of them. It starts `pad` bytes after a
// multiple of 16.
constexpr size_t kPage = 4096, kGuard = 1 << 20;

void *emu_alloc(const char *buffer_name, size_t bytes, int at_start, int granule, int pad) {
    const size_t body = std::max(kPage, (pad + bytes + kPage - 1) / kPage * kPage);
    char *map = static_cast<char *>(
        mmap(nullptr, body + 2 * kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    mprotect(map + kGuard, body, PROT_READ | PROT_WRITE);
    memset(map + kGuard, 0xff, body);
    Buffer b{};
    snprintf(b.name, sizeof b.name, "%s", buffer_name);
    b.lo = pad + (at_start ? map + kGuard : map + kGuard + body - (pad + bytes + 15) / 16 * 16);
    b.bytes = bytes;
    b.granule = granule;
    b.map = map;
    b.map_bytes = body + 2 * kGuard;
    b.writable = true;
    lowest = buffers.empty() ? map : std::min<const char *>(lowest, map);
    highest = buffers.empty() ? map + b.map_bytes : std::max<const char *>(highest, map + b.map_bytes);
    buffers.push_back(b);
    return b.lo;
}

void emu_protect(void *p, int writable) {
    Buffer *b = find_buffer(p);
    if (!b) return;
    forget_bounds();
    b->writable = writable;
    mprotect(b->map + kGuard, b->map_bytes - 2 * kGuard, writable ? PROT_READ | PROT_WRITE : PROT_READ);
}

void emu_free(void *p) {
    forget_bounds();
    if (Buffer *b = find_buffer(p)) {
        munmap(b->map, b->map_bytes);
        buffers.erase(buffers.begin() + (b - buffers.data()));
    }
}
}
