// Global memory: buffers between guard pages.
#ifndef EMULATOR_GLOBAL_H
#define EMULATOR_GLOBAL_H
#include "race.h"

namespace emu {

// An access to global memory by thread or asynchronous component `component` of cluster number `cluster`.
struct GlobalAccess {
    int cluster = -1;
    u32 clock = 0;
    i16 component = 0;
    u16 site : 15, atomic : 1;
};

struct GlobalCell {
    GlobalAccess write, read;
    int more = 0;  // further reads and all atomic additions since the last write: index into Buffer::more
};

struct Buffer {
    char name[32];
    char *lo;
    size_t bytes;
    int granule;  // bytes with one record: the smallest element
    char *map;
    size_t map_bytes;
    bool writable;
    int written, read;                // the number of the last launch that did; 0: none
    int written_before, read_before;  // the same, but for this launch
    std::vector<GlobalCell> cells;    // made at the first write
    std::vector<std::vector<GlobalAccess>> more;
};

extern std::vector<Buffer> buffers;
extern const char *lowest, *highest;  // all of them lie between
// Buffers of which a load has found that loads need nothing but these bounds, by the MiB: most loads are of such ones.
struct Bounds { const char *lo, *hi; };
extern Bounds loaded[256];
inline Bounds &loaded_near(const void *p) { return loaded[reinterpret_cast<uintptr_t>(p) >> 20 & 255]; }
Buffer *find_buffer(const void *p);
void put_fault(const void *address);  // describes an access that hit a guard page
void reset_global();

}  // namespace emu
#endif
