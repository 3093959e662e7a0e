// mbarrier objects: shared-memory barriers whose phases complete by arrivals and by bytes of asynchronous copies.
#ifndef EMULATOR_MBARRIER_H
#define EMULATOR_MBARRIER_H
#include "threads.h"

namespace emu {

struct MBarrier {
    bool ready = false;  // initialised
    u32 count = 0, pending = 0, phase = 0;
    int64_t tx = 0;  // bytes expected less bytes arrived
    int number = 0;  // its component of the clocks
    u32 copies = 0;  // clock of that component
    Site site{};     // of its initialisation
    std::vector<Fiber *> waiting;
    Released collecting;  // by the arrivals of this phase
    Released done;        // by those of the phase before
    Released earlier;     // by those of the phase before that
    // Who has returned from a wait for which phase, and when.
    struct Seen {
        u32 phase;
        int thread;
        u32 clock;
        Site site;
    };
    std::vector<Seen> seen;
};

// A kind of asynchronous copy or reduction between shared and global memory (or another block's shared memory).
struct TensorMap;
struct BulkOp {
    int kind;
    Fiber *issuer;
    u32 smem, bar, peer, bytes;
    char *global;
    std::shared_ptr<TensorMap> map;
    int coordinates[5];
    Site site;
    bool done = false, read_done = false;
    int component = 0;
    u32 clock = 0;
    Clock cause;  // of the issuer
};

MBarrier &find_mbarrier(u32 bar, const char *op, Site site);
void complete_tx(Cluster &cluster, BulkOp &op, u32 bytes);

}  // namespace emu
#endif
