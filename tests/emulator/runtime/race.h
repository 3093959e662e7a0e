// The race detector: every access is compared with those before it by happens-before, so that a race is found on any
// schedule in which both accesses occur.
#ifndef EMULATOR_RACE_H
#define EMULATOR_RACE_H
#include <array>

#include "threads.h"

namespace emu {

constexpr u32 kGranule = 4;  // bytes of shared memory with one record; no wrapper accesses fewer
constexpr u32 kLine = 16;    // bytes that most accesses take at once: while all do, one record stands for its granules

// An access by component `component` of the cluster's clocks at its time `clock`. component < 0: none.
struct Access {
    i16 component = -1;
    u16 site = 0;
    u32 clock = 0;
};

struct alignas(32) SharedCell {  // half a cache line: most of the time goes into fetching them
    Access write, reads[2];
    int more = 0;               // further reads: index into SharedShadow::more, 0 for none
    bool async_write = false;   // the write was asynchronous (TMA)
    bool copy_pending = false;  // cp.async is under way
    bool whole = true;          // of a line: its record is that of all granules; else they are in parts[more]
};

struct SharedShadow {
    using Parts = std::array<SharedCell, kLine / kGranule>;
    std::vector<SharedCell> lines;  // of all blocks of the cluster, one after the other
    std::vector<Parts> parts;       // the granules of lines that are not whole
    std::vector<std::vector<Access>> more;
    std::vector<int> free_parts, free_more;
    u32 cta_lines;

    void reset(int ctas, u32 smem_bytes);
    SharedCell &line(u32 addr) { return lines[(addr >> kCtaShift) * cta_lines + (addr & (kCtaSpan - 1)) / kLine]; }
    const SharedCell &cell(u32 addr) {
        const SharedCell &all = line(addr);
        return all.whole ? all : parts[all.more][addr % kLine / kGranule];
    }
    Parts &split(SharedCell &line);  // gives each granule a record of its own, unless it has one
    void join(SharedCell &line);     // those are all the same: one record for them
    int new_more();
};

// An ordinary access of the running thread.
void shared_access(u32 addr, u32 bytes, bool write, Site site);
// An asynchronous access on behalf of thread `issuer`.
void shared_access_async(Fiber &issuer, u32 addr, u32 bytes, bool write, int component, u32 clock, Site site);
void shared_copy_pending(u32 addr, u32 bytes, bool pending, Site site);  // cp.async issued, or waited for

void report_race(const char *kind, const std::string &where, const std::string &now, const std::string &before,
                 Site site, u16 before_site);
u16 intern(Site site);
Site site_of(u16 interned);
bool report_once(u64 key);  // counts a race; whether to describe it

// ---- Global memory ----
enum { kGlobalRead, kGlobalWrite, kGlobalAtomic };
// Checks bounds; in race mode also orders the access among those of all blocks.
void global_access(const void *p, u32 bytes, int kind, const char *op, Site site);
void global_access_async(Fiber &issuer, const void *p, u32 bytes, int kind, int component, u32 clock, const char *op,
                         Site site);

}  // namespace emu
#endif
