// Types, options and error reporting that all parts of the emulator share.
#ifndef EMULATOR_COMMON_H
#define EMULATOR_COMMON_H
#include <string.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "api.h"

namespace emu {

using u8 = uint8_t;
using i16 = int16_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using Site = EmuSite;

constexpr int kMaxFibers = 4096;                           // threads of all resident blocks
constexpr int kStackBytes = 128 * 1024;                    // of one CUDA thread
constexpr u32 kSmemBytes = 232448;                         // largest dynamic shared memory of any GPU, 227 KiB
constexpr u32 kCtaShift = 18, kCtaSpan = 1u << kCtaShift;  // shared address space of one block in its cluster
constexpr int kMaxCluster = 8;
constexpr int kMaxMbarriers = 256;  // of one block
constexpr u64 kMostRaces = 10000;   // that are counted: a launch with so many has shown what there is to see

enum Scheduler { kInOrder = 0, kRandom = 1, kPriority = 2, kStarve = 3 };
enum Completion { kEarly = 0, kLate = 1, kAnyTime = 2 };

// Filled by Python (emulator/launch.py mirrors it field by field).
struct Config {
    u32 blocks, threads, smem_bytes;
    int scheduler, completion, race, seed;
    int poison;       // destinations of asynchronous work hold NaN until it is complete
    int max_reports;  // races described before the rest is only counted
    int cluster;      // blocks in a cluster
    int resident;     // clusters that run at the same time
    int lanes_alone;  // lanes of a warp do not pass waits together
    int votes_order;  // a vote or shuffle orders the memory accesses of a warp
    int whole_a;      // the detector takes each warp of a wgmma to read all 64 rows of A, not its own 16
    int ordered_red;  // additions to one address by different blocks must be ordered (deterministic kernels)
    int planted;      // the number of the bug that is alive
    int dependent;    // it may start before the launch in front of it has ended
};

struct Stats { u64 switches, collectives, matrix_ops, async_ops, accesses, races, ldmatrix, ldmatrix_wavefronts; };

extern Config config;
extern Stats stats;

// ---- Random numbers (xorshift): every choice of a run follows from config.seed ----
u32 random_u32();
inline u32 random_below(u32 n) { return random_u32() % n; }
inline bool one_in(u32 n) { return random_below(n) == 0; }

// ---- Messages ----
// Ends the launch with a message; adds the running thread and its call stack. Callable on fibers and outside.
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void end_launch();                                           // with the messages so far
void put(const char *format, ...) __attribute__((format(printf, 1, 2)));  // adds to the message
bool message_is_empty();
bool has_failed();
void set_failed();
void put_call_stack();                 // of the running thread: {pc+0x..} tokens, resolved by Python
std::string pc_token(const void *pc);  // "{pc+0x..}"
std::string text(Site site);           // "kernels_cu/x.cuh:12"

// ---- Numbers ----
using Row = float __attribute__((vector_size(32)));  // eight of a matrix
float f16_to_f32(u16 x);
u16 f32_to_f16(float x);
inline float bits_to_f32(u32 x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
inline u32 f32_to_bits(float x) {
    u32 y;
    memcpy(&y, &x, 4);
    return y;
}
inline float bf16_to_f32(u16 x) { return bits_to_f32(static_cast<u32>(x) << 16); }
inline float element_to_f32(u16 x, int type) { return type == kEmuBf16 ? bf16_to_f32(x) : f16_to_f32(x); }

}  // namespace emu
#endif
