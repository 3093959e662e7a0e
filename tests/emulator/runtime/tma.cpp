// The bulk engine: TMA and 1-D bulk copies. An operation is queued at issue and performed at the latest legal moment, at
// once, or at any time in between; until then its destination in shared memory is poisoned.
#include <math.h>

#include "launch.h"
#include "mbarrier.h"
#include "race.h"
#include "swizzle.h"

namespace emu {

constexpr u32 kMagic = 0x544d4150;

// Lies where a CUtensorMap lies on the device: 128 bytes, passed by value.
struct TensorMap {
    u64 base, strides[4];  // bytes, of dimensions 1..4
    u32 sizes[5], box[5];
    u16 element_bytes, swizzle;
    u32 dims, magic;
};
static_assert(sizeof(TensorMap) <= 128);

static const char *const kNames[] = {"TMA load",   "TMA store",   "TMA reduce",           "bulk load",
                                     "bulk store", "bulk reduce", "bulk copy to the peer"};
static bool fills_smem(int kind) { return kind == kEmuLoad || kind == kEmuLoad1d || kind == kEmuToPeer; }
static bool has_map(int kind) { return kind <= kEmuReduce; }

// f(shared address, global pointer or null if outside of the tensor, bytes) for each 16 bytes of the box, or for each
// element where the tensor ends in between. Stores and reductions write such 16 bytes whole, as an H200 does.
template <class F>
static void for_each_piece(const BulkOp &op, F f) {
    const TensorMap &m = *op.map;
    const u32 row_bytes = m.box[0] * m.element_bytes;
    u32 linear = 0, i[5] = {};
    for (i[4] = 0; i[4] < m.box[4]; ++i[4])
        for (i[3] = 0; i[3] < m.box[3]; ++i[3])
            for (i[2] = 0; i[2] < m.box[2]; ++i[2])
                for (i[1] = 0; i[1] < m.box[1]; ++i[1]) {
                    bool inside = true;
                    int64_t offset = 0;
                    for (int d = 1; d < 5; ++d) {
                        const int64_t x = int64_t{op.coordinates[d]} + i[d];
                        inside &= x >= 0 && x < m.sizes[d];
                        offset += x * static_cast<int64_t>(m.strides[d - 1]);
                    }
                    for (u32 byte = 0; byte < row_bytes; byte += 16, linear += 16) {
                        const u32 addr = swizzled(op.smem + linear, m.swizzle);
                        const int e = m.element_bytes;
                        const int64_t first = int64_t{op.coordinates[0]} + byte / e, end = first + 16 / e;
                        char *const row = reinterpret_cast<char *>(m.base) + offset;
                        if (!inside || end <= 0 || first >= m.sizes[0]) f(addr, nullptr, 16);
                        else if (first >= 0 && (end <= m.sizes[0] || op.kind != kEmuLoad)) f(addr, row + first * e, 16);
                        else
                            for (int k = 0; k < 16 / e; ++k)
                                f(addr + k * e,
                                  first + k >= 0 && first + k < m.sizes[0] ? row + (first + k) * e : nullptr, e);
                    }
                }
}

static void add_f32(char *to, const u8 *from, u32 bytes) {
    for (u32 i = 0; i < bytes; i += 4) {
        float x, y;
        memcpy(&x, to + i, 4);
        memcpy(&y, from + i, 4);
        x += y;
        memcpy(to + i, &x, 4);
    }
}

static void perform(Cluster &cluster, BulkOp &op) {
    op.done = true;
    ++stats.async_ops;
    const u32 target = op.kind == kEmuToPeer ? op.peer : op.smem;
    if (fills_smem(op.kind) && !cluster.ctas[target >> kCtaShift].live)
        fail("%s of %s: the block whose shared memory it fills has exited", kNames[op.kind], text(op.site).c_str());
    u32 bytes = op.bytes;
    switch (op.kind) {
        case kEmuLoad:
            bytes = 0;
            for_each_piece(op, [&](u32 addr, const char *global, u32 n) {
                if (global) memcpy(cluster.smem(addr), global, n);
                else memset(cluster.smem(addr), 0, n);
                bytes += n;  // what lies outside of the tensor counts too
            });
            break;
        case kEmuStore:
        case kEmuReduce:
            for_each_piece(op, [&](u32 addr, char *global, u32 n) {
                if (!global) return;
                if (op.kind == kEmuStore) memcpy(global, cluster.smem(addr), n);
                else add_f32(global, cluster.smem(addr), n);
            });
            break;
        case kEmuLoad1d:
            memcpy(cluster.smem(op.smem), op.global, bytes);
            break;
        case kEmuStore1d:
            memcpy(op.global, cluster.smem(op.smem), bytes);
            break;
        case kEmuReduce1d:
            add_f32(op.global, cluster.smem(op.smem), bytes);
            break;
        case kEmuToPeer:
            memcpy(cluster.smem(op.peer), cluster.smem(op.smem), bytes);
            break;
    }
    if (fills_smem(op.kind)) complete_tx(cluster, op, bytes);
}

bool complete_one_bulk() {
    std::vector<std::pair<Cluster *, BulkOp *>> pending;
    for (auto &c : clusters)
        for (BulkOp &op : c->bulk)
            if (!op.done) pending.emplace_back(c.get(), &op);
    if (pending.empty()) return false;
    auto &[cluster, op] = pending[random_below(static_cast<u32>(pending.size()))];
    perform(*cluster, *op);
    return true;
}

// Shared by all kinds: clocks, race checks at issue, poison, queue. target: where shared memory is written.
static void issue(BulkOp op, u32 target, Site site) {
    Fiber &f = *current;
    Cluster &cluster = *f.cluster;
    Clocks &clocks = cluster.clocks;
    const bool fills = fills_smem(op.kind);
    op.issuer = &f;
    op.site = site;
    if (fills) {
        checked_smem(op.bar, 8, 8, kNames[op.kind], site);
        MBarrier &m = find_mbarrier(op.bar, kNames[op.kind], site);
        op.component = clocks.mbarrier_component(m.number);
        op.clock = ++m.copies;
        if (config.race) {
            const Access &init = cluster.shadow->cell(op.bar).write;
            if (init.component >= 0 && init.clock > clocks.proxy_of(f.index)[init.component])
                report_race("fence.mbarrier_init is missing between an mbarrier's initialisation and a copy",
                            "shared memory + " + std::to_string(op.bar & (kCtaSpan - 1)), clocks.name(f.index),
                            clocks.name(init.component), site, init.site);
            clocks.cause_of(f.index)[f.index] = clocks.now(f.index);
            op.cause.assign(clocks.cause_of(f.index), clocks.cause_of(f.index) + clocks.threads);
        }
    } else {
        op.component = clocks.bulk_component(f.warp->index);
        op.clock = ++f.warp->bulk_clock;
    }
    const auto touch_smem = [&](u32 addr, u32 n, bool write) {
        shared_access_async(f, addr, n, write, op.component, op.clock, site);
        if (write && config.poison) memset(cluster.smem(addr), 0xff, n);
    };
    const int global_kind = fills                                              ? kGlobalRead
                            : op.kind == kEmuReduce || op.kind == kEmuReduce1d ? kGlobalAtomic
                                                                               : kGlobalWrite;
    const auto touch_global = [&](const void *p, u32 n) {
        global_access_async(f, p, n, global_kind, op.component, op.clock, kNames[op.kind], site);
    };
    if (has_map(op.kind)) {
        for_each_piece(op, [&](u32 addr, const char *global, u32 n) {
            if (fills || global) touch_smem(addr, n, fills);
            if (global) touch_global(global, n);
        });
    } else {
        if (op.kind != kEmuLoad1d) touch_smem(op.smem, op.bytes, false);
        if (fills) touch_smem(target, op.bytes, true);
        if (op.kind != kEmuToPeer) touch_global(op.global, op.bytes);
    }
    cluster.bulk.push_back(std::move(op));
    if (!fills) f.bulk.push_back(static_cast<int>(cluster.bulk.size()) - 1);
    if (config.completion == kEarly) perform(cluster, cluster.bulk.back());
}

}  // namespace emu

using namespace emu;

int emu_tensor_map_encode(void *out, int dims, int element_bytes, void *base, const u64 *sizes, const u64 *strides,
                          const u32 *box, int swizzle) {
    TensorMap m{};
    m.base = reinterpret_cast<u64>(base);
    m.dims = dims;
    m.element_bytes = static_cast<u16>(element_bytes);
    m.swizzle = static_cast<u16>(swizzle);
    m.magic = kMagic;
    if (m.base & 15 || dims < 1 || dims > 5) return 1;
    for (int i = 0; i < 5; ++i) {
        m.sizes[i] = m.box[i] = 1;
        if (i >= dims) continue;
        if (!sizes[i] || sizes[i] > 1ull << 32) return 2;
        if (!box[i] || box[i] > 256) return 3;
        m.sizes[i] = static_cast<u32>(sizes[i]);
        m.box[i] = box[i];
    }
    for (int i = 0; i + 1 < dims; ++i) {
        if (strides[i] & 15) return 4;
        m.strides[i] = strides[i];
    }
    const u32 row_bytes = box[0] * element_bytes;
    if (row_bytes & 15) return 5;
    if (swizzle != kSwizzleNone && row_bytes > swizzle_span(swizzle)) return 6;
    memset(out, 0, 128);
    memcpy(out, &m, sizeof m);
    return 0;
}

void emu_tma(int kind, u32 smem, const void *map, u32 bar, const int *coordinates, int dims, u32 multicast, Site site) {
    BulkOp op{};
    op.kind = kind;
    op.map = std::make_shared<TensorMap>();
    memcpy(op.map.get(), map, sizeof(TensorMap));
    const TensorMap &m = *op.map;
    if (m.magic != kMagic) fail("%s at %s: not a tensor map", kNames[kind], text(site).c_str());
    if (static_cast<int>(m.dims) != dims)
        fail("%s at %s: %d coordinates for a tensor map of %u dimensions", kNames[kind], text(site).c_str(), dims,
             m.dims);
    for (int i = 0; i < 5; ++i) op.coordinates[i] = i < dims ? coordinates[i] : 0;
    // What an H200 answers with an illegal instruction.
    if (op.coordinates[0] * m.element_bytes % 16)
        fail("%s at %s: innermost coordinate %d is not a multiple of 16 bytes", kNames[kind], text(site).c_str(),
             op.coordinates[0]);
    for (int i = 0; i < dims; ++i)
        if (kind != kEmuLoad && op.coordinates[i] < 0)
            fail("%s at %s: coordinate %d is %d; only loads may begin before the tensor", kNames[kind],
                 text(site).c_str(), i, op.coordinates[i]);
    u32 bytes = m.box[0] * m.element_bytes;
    for (int i = 1; i < 5; ++i) bytes *= m.box[i];
    for (u32 rank = 0; rank < static_cast<u32>(config.cluster); ++rank) {
        if (multicast ? !(multicast >> rank & 1) : rank != smem >> kCtaShift) continue;
        op.smem = multicast ? (smem & (kCtaSpan - 1)) | rank << kCtaShift : smem;
        op.bar = multicast ? (bar & (kCtaSpan - 1)) | rank << kCtaShift : bar;
        checked_smem(op.smem, bytes, 128, kNames[kind], site);
        const u32 repeat = 8 * swizzle_span(m.swizzle);  // bytes after which the pattern repeats
        if (m.swizzle != kSwizzleNone && op.smem % repeat)
            fail("%s at %s: a swizzled tile at shared memory + %u, not aligned to %u bytes", kNames[kind],
                 text(site).c_str(), op.smem & (kCtaSpan - 1), repeat);
        issue(op, op.smem, site);
    }
    if (config.race) ++current->cluster->clocks.data_of(current->index)[current->index];
    preempt();
}

void emu_bulk(int kind, u32 smem, void *global, u32 bytes, u32 peer, u32 bar, Site site) {
    if (!bytes || bytes % 16) fail("%s at %s: %u bytes, not a multiple of 16", kNames[kind], text(site).c_str(), bytes);
    checked_smem(smem, bytes, 16, kNames[kind], site);
    if (kind == kEmuToPeer) checked_smem(peer, bytes, 16, kNames[kind], site);
    else if (reinterpret_cast<uintptr_t>(global) & 15)
        fail("%s at %s: global address %p is not aligned to 16 bytes", kNames[kind], text(site).c_str(), global);
    BulkOp op{};
    op.kind = kind;
    op.smem = smem;
    op.bar = bar;
    op.peer = peer;
    op.bytes = bytes;
    op.global = static_cast<char *>(global);
    issue(op, kind == kEmuToPeer ? peer : smem, site);
    if (config.race) ++current->cluster->clocks.data_of(current->index)[current->index];
    preempt();
}

void emu_bulk_commit() {
    current->bulk_groups.push_back(std::move(current->bulk));
    current->bulk.clear();
}

// read_only: the sources may be reused, but the results need not be visible. They are performed all the same.
void emu_bulk_wait(int pending, bool) {
    auto &groups = current->bulk_groups;
    Cluster &cluster = *current->cluster;
    while (static_cast<int>(groups.size()) > pending) {
        for (int i : groups.front()) {
            BulkOp &op = cluster.bulk[i];
            if (!op.done) perform(cluster, op);
            if (!config.race) continue;
            current->common = 0;
            u32 &clock = cluster.clocks.data_of(current->index)[op.component];
            clock = std::max(clock, op.clock);
        }
        groups.erase(groups.begin());
    }
}

u32 emu_mapa(u32 addr, u32 rank, Site site) {
    if (rank >= static_cast<u32>(config.cluster))
        fail("mapa at %s: rank %u in a cluster of %d", text(site).c_str(), rank, config.cluster);
    return (addr & (kCtaSpan - 1)) | rank << kCtaShift;
}
