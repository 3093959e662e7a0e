// g++ -fsanitize=thread announces every plain load and store of the kernel by a call. These are our own definitions;
// libtsan is never linked. Kernels reach shared memory through ptx:: only, so what arrives here is global memory or the
// thread's own stack.
#include "global.h"

#include <cstdint>

namespace emu {

// Most accesses of kernels that are not optimised: those to the thread's own variables.
static inline bool is_own(const void *p) {
    return static_cast<size_t>(static_cast<const char *>(p) - own_stack) < own_stack_bytes;
}

// Whether there is nothing to check: what is read lies in no buffer (see below).
static inline bool is_let_pass(const void *p, bool write) {
    return is_own(p) || (!write && (p < lowest || p >= highest));
}

[[gnu::noinline]] static void plain_access(const void *p, u32 bytes, bool write, const void *pc) {
    const Site site{static_cast<const char *>(pc), -1};
    if (!find_buffer(p)) {
        if (!write) return;  // the kernel's arguments and constants; a wild pointer faults by itself
        fail("store at %s: address %p is in no buffer", text(site).c_str(), p);
    }
    global_access(p, bytes, write ? kGlobalWrite : kGlobalRead, write ? "store" : "load", site);
}

// Of one instruction, which a GPU refuses at an address that is no multiple of its size.
[[gnu::noinline]] static void aligned_access(const void *p, u32 bytes, bool write, const void *pc) {
    if (reinterpret_cast<std::uintptr_t>(p) % bytes && find_buffer(p))
        fail("%s at %s: global address %p is not aligned to %u bytes", write ? "store" : "load",
             text(Site{static_cast<const char *>(pc), -1}).c_str(), p, bytes);
    plain_access(p, bytes, write, pc);
}

}  // namespace emu

#define HOOK(name, check, bytes, write)                                                            \
    void name {                                                                                    \
        if (!emu::is_let_pass(p, write)) emu::check(p, bytes, write, __builtin_return_address(0)); \
    }
#define ACCESS(size)                                                      \
    HOOK(__tsan_read##size(void *p), aligned_access, size, false)         \
    HOOK(__tsan_write##size(void *p), aligned_access, size, true)         \
    HOOK(__tsan_unaligned_read##size(void *p), plain_access, size, false) \
    HOOK(__tsan_unaligned_write##size(void *p), plain_access, size, true)

extern "C" {
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
HOOK(__tsan_read_range(void *p, size_t n), plain_access, n, false)
HOOK(__tsan_write_range(void *p, size_t n), plain_access, n, true)
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void __tsan_vptr_update(void *, void *) {}
void __tsan_vptr_read(void *) {}
}
