// Shared-memory accesses, and cp.async.
#include "race.h"
#include "threads.h"

namespace emu {

u8 *checked_smem(u32 addr, u32 bytes, u32 alignment, const char *op, Site site) {
    if (addr % alignment)
        fail("%s at %s: shared memory + %u is not aligned to %u bytes", op, text(site).c_str(), addr, alignment);
    if ((addr & (kCtaSpan - 1)) + bytes > config.smem_bytes || addr >> kCtaShift >= static_cast<u32>(config.cluster))
        fail("%s at %s: shared memory [%u, %u) is outside the %u bytes of the block", op, text(site).c_str(),
             addr & (kCtaSpan - 1), (addr & (kCtaSpan - 1)) + bytes, config.smem_bytes);
    return current ? current->cluster->smem(addr) : nullptr;
}

static void perform(CpAsync &c) {
    u8 *dst = current->cluster->smem(c.dst);
    if (c.valid) memcpy(dst, c.src, c.bytes);
    else memset(dst, 0, c.bytes);
    c.done = true;
    ++stats.async_ops;
}

}  // namespace emu

using namespace emu;

u32 emu_smem_base() { return static_cast<u32>(current->cluster_rank) << kCtaShift; }

void emu_ld_shared(u32 addr, u32 bytes, void *out, Site site) {
    const u8 *p = checked_smem(addr, bytes, bytes, "ld.shared", site);
    shared_access(addr, bytes, false, site);
    memcpy(out, p, bytes);
}

void emu_st_shared(u32 addr, u32 bytes, const void *in, Site site) {
    u8 *p = checked_smem(addr, bytes, bytes, "st.shared", site);
    shared_access(addr, bytes, true, site);
    memcpy(p, in, bytes);
}

void emu_cp_async(u32 dst, const void *src, int bytes, bool valid, Site site) {
    u8 *p = checked_smem(dst, bytes, bytes, "cp.async", site);
    if (reinterpret_cast<uintptr_t>(src) % bytes)
        fail("cp.async at %s: global address %p is not aligned to %d bytes", text(site).c_str(), src, bytes);
    if (valid) global_access(src, bytes, kGlobalRead, "cp.async", site);
    shared_access(dst, bytes, true, site);
    shared_copy_pending(dst, bytes, true, site);
    CpAsync c{dst, src, bytes, valid, false, site};
    if (config.completion == kEarly || (config.completion == kAnyTime && one_in(2))) perform(c);
    else if (config.poison) memset(p, 0xff, bytes);
    current->copies.push_back(c);
}

void emu_cp_async_commit() {
    current->copy_groups.push_back(std::move(current->copies));
    current->copies = std::move(current->copies_of_before);
    current->copies.clear();
}

void emu_cp_async_wait(int pending) {
    auto &groups = current->copy_groups;
    while (static_cast<int>(groups.size()) > pending) {
        for (CpAsync &c : groups.front()) {
            if (!c.done) perform(c);
            shared_copy_pending(c.dst, c.bytes, false, c.site);
        }
        current->copies_of_before = std::move(groups.front());
        groups.erase(groups.begin());
    }
}
