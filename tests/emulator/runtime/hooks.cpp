// -fsanitize=thread announces every plain load and store of the kernel by a call. These are our own definitions;
// libtsan is never linked. Kernels reach shared memory through ptx:: only, so what arrives here is global memory or the
// thread's own stack.
#include "global.h"

#include <cstdint>
#include <cstring>

namespace emu {

// Most accesses of kernels that are not optimised: those to the thread's own variables.
static inline bool is_own(const void *p) {
    return static_cast<size_t>(static_cast<const char *>(p) - own_stack) < own_stack_bytes;
}

// Whether there is nothing to check: what is read lies in no buffer (see below), or in one that nobody writes.
static inline bool is_let_pass(const void *p, size_t bytes, u32 alignment, bool write) {
    if (is_own(p)) return true;
    if (write) return false;
    if (p < lowest || p >= highest) return true;
    const Bounds &b = loaded_near(p);
    return p >= b.lo && static_cast<const char *>(p) + bytes <= b.hi && reinterpret_cast<uintptr_t>(p) % alignment == 0;
}

// `alignment`: the bytes of one instruction, which a GPU refuses at an address that is no multiple of them; else 1.
[[gnu::noinline]] static void access(const void *p, u32 bytes, u32 alignment, bool write, const void *pc) {
    const Site site{static_cast<const char *>(pc), -1};
    const char *op = write ? "store" : "load";
    if (!find_buffer(p)) {
        if (!write) return;  // the kernel's arguments and constants; a wild pointer faults by itself
        fail("store at %s: address %p is in no buffer", text(site).c_str(), p);
    }
    if (reinterpret_cast<uintptr_t>(p) % alignment)
        fail("%s at %s: global address %p is not aligned to %u bytes", op, text(site).c_str(), p, alignment);
    global_access(p, bytes, write ? kGlobalWrite : kGlobalRead, op, site);
}

static inline void announce(const void *p, size_t bytes, u32 alignment, bool write, const void *pc) {
    if (!is_let_pass(p, bytes, alignment, write)) access(p, bytes, alignment, write, pc);
}

}  // namespace emu

#define HOOK(name, bytes, alignment, write) \
    void name { emu::announce(p, bytes, alignment, write, __builtin_return_address(0)); }
#define ACCESS(size)                                           \
    HOOK(__tsan_read##size(void *p), size, size, false)        \
    HOOK(__tsan_write##size(void *p), size, size, true)        \
    HOOK(__tsan_unaligned_read##size(void *p), size, 1, false) \
    HOOK(__tsan_unaligned_write##size(void *p), size, 1, true)

extern "C" {
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
HOOK(__tsan_read_range(void *p, size_t n), n, 1, false)
HOOK(__tsan_write_range(void *p, size_t n), n, 1, true)
// clang++ makes calls of copies and fills, by these names; before version 15 by those of the C library, which the link renames.
// One of as many bytes as an instruction has is taken for one.
void *__tsan_memcpy(void *to, const void *from, size_t n) {
    const void *pc = __builtin_return_address(0);
    const uint32_t alignment = n == 4 || n == 8 || n == 16 ? n : 1;
    emu::announce(from, n, alignment, false, pc), emu::announce(to, n, alignment, true, pc);
    return memcpy(to, from, n);
}
void *__tsan_memset(void *to, int x, size_t n) {
    emu::announce(to, n, 1, true, __builtin_return_address(0));
    return memset(to, x, n);
}
[[gnu::alias("__tsan_memcpy")]] void *__wrap_memcpy(void *, const void *, size_t);
[[gnu::alias("__tsan_memset")]] void *__wrap_memset(void *, int, size_t);
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void __tsan_vptr_update(void *, void *) {}
void __tsan_vptr_read(void *) {}
}
