// wgmma.mma_async: each warp computes its own 16 of the 64 rows. Queued at issue, performed at wgmma.wait_group; the
// accumulators hold kNotYet in between.
#include "mbarrier.h"
#include "race.h"
#include "swizzle.h"

namespace emu {

constexpr int kMaxN = 256;
constexpr float kNotYet = 5.f;  // not NaN: the kernels compute rows that are not finite again, and nobody would notice

struct WgmmaArgs {
    float *d;
    const u32 *a;
    u64 desc_a, desc_b;
    int n, type;
    bool accumulate, a_mn_major, b_mn_major;
};

struct WgmmaOp {
    WgmmaArgs args;  // of lane 0; the same in all but d and a
    Site site;
    bool done, saved;
    struct Lane {
        float *d;
        const u32 *a_registers;
        u32 a[4];
        float d_before[kMaxN / 2];
    } lanes[32];
};

static std::vector<std::unique_ptr<WgmmaOp>> unused;  // room for operations to come

static WgmmaOp *make_op(const WgmmaArgs &args, Site site) {
    if (unused.empty()) unused.push_back(std::make_unique<WgmmaOp>());
    WgmmaOp *op = unused.back().release();
    unused.pop_back();
    op->args = args;
    op->site = site;
    op->done = op->saved = false;
    return op;
}

static void drop(WgmmaOp *op) { unused.emplace_back(op); }

Cluster::Cluster(Clocks &clocks) : clocks(clocks) {}
Cluster::~Cluster() {
    for (Warp &w : warps) {  // what a failed launch has left in flight
        for (WgmmaOp *op : w.wgmma.open) drop(op);
        for (auto &g : w.wgmma.groups)
            for (WgmmaOp *op : g) drop(op);
    }
}

// Matrix descriptor (PTX ISA 9.7.15.5.1.2): start, leading and stride byte offsets in units of 16 bytes, swizzle mode.
struct Descriptor {
    u32 start, leading, stride;
    int swizzle;

    explicit Descriptor(u64 d)
        : start(static_cast<u32>(d & 0x3fff) << 4),
          leading(static_cast<u32>(d >> 16 & 0x3fff) << 4),
          stride(static_cast<u32>(d >> 32 & 0x3fff) << 4),
          swizzle((4 - static_cast<int>(d >> 62)) % 4) {
        if (d >> 49 & 7)
            fail("wgmma: a matrix descriptor with a base offset; tiles must start where their swizzle does");
    }

    // Where element (row, k) lies, k < 16 and elements of 16 bits. MN-major: rows are contiguous, else k is.
    u32 address(int row, int k, bool mn_major) const {
        const u32 span = swizzle_span(swizzle), elements = span / 2;
        u32 a = start;
        if (!mn_major) a += row / 8 * stride + row % 8 * span + (swizzle ? k * 2 : k / 8 * leading + k % 8 * 2);
        else if (swizzle) a += row % elements * 2 + row / elements * leading + k % 8 * span + k / 8 * stride;
        else a += row % 8 * 2 + row / 8 * stride + k % 8 * 16 + k / 8 * leading;
        return swizzled(a, swizzle);
    }
};

// f(address, row, k) for every 16 contiguous bytes of an operand; rows counts from row0.
template <class F>
static void for_each_chunk(const Descriptor &d, int row0, int rows, bool mn_major, F f) {
    for (int row = 0; row < rows; row += mn_major ? 8 : 1)
        for (int k = 0; k < 16; k += mn_major ? 1 : 8) f(d.address(row0 + row, k, mn_major), row, k);
}

static u32 cta_base(const Warp &w) { return static_cast<u32>(w.lanes[0].cluster_rank) << kCtaShift; }

using Eight = u16 __attribute__((vector_size(16)));  // elements of an operand that lie together

static Row to_f32(Eight x, int type) {
    Row y;
    if (type == kEmuBf16) {
        using Bits = u32 __attribute__((vector_size(32)));
        const Bits bits = __builtin_convertvector(x, Bits) << 16;
        memcpy(&y, &bits, sizeof y);
    } else {
        for (int i = 0; i < 8; ++i) y[i] = f16_to_f32(x[i]);
    }
    return y;
}

// The elements of the lower (upper) halves of a and b in turns.
#ifdef __clang__
static Eight low(Eight a, Eight b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
static Eight high(Eight a, Eight b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
#else
static Eight low(Eight a, Eight b) { return __builtin_shuffle(a, b, Eight{0, 8, 1, 9, 2, 10, 3, 11}); }
static Eight high(Eight a, Eight b) { return __builtin_shuffle(a, b, Eight{4, 12, 5, 13, 6, 14, 7, 15}); }
#endif

static void transpose(Eight (&x)[8]) {
    for (int round = 0; round < 3; ++round) {
        Eight y[8];
        for (int i = 0; i < 4; ++i) {
            y[2 * i] = low(x[i], x[i + 4]);
            y[2 * i + 1] = high(x[i], x[i + 4]);
        }
        memcpy(x, y, sizeof x);
    }
}

// Rows row0 ... of an operand: to[row][k], or with kByK to[k][row].
template <bool kByK, int kColumns>
static void load_operand(Warp &w, u64 descriptor, int row0, int rows, bool mn_major, int type,
                         float (&to)[16][kColumns]) {
    const Descriptor d(descriptor);
    for (int row = 0; row < rows; row += 8)
        for (int k = 0; k < 16; k += 8) {
            Eight x[8];
            for (int i = 0; i < 8; ++i) {
                const u32 addr = d.address(row0 + row + (mn_major ? 0 : i), k + (mn_major ? i : 0), mn_major);
                memcpy(&x[i], w.cluster->smem(cta_base(w) + addr), 16);
            }
            if (mn_major != kByK) transpose(x);
            for (int i = 0; i < 8; ++i) {
                const Row y = to_f32(x[i], type);
                memcpy(kByK ? &to[k + i][row] : &to[row + i][k], &y, sizeof y);
            }
        }
}

// Accumulators as two of a row at a time: f(of the tile, of lane l, which of its pairs).
template <class F>
static void for_each_pair(float (&d)[16][kMaxN], int n, F f) {
    for (int l = 0; l < 32; ++l)
        for (int i = 0; i < n / 4; ++i) f(&d[l / 4 + i % 2 * 8][i / 2 * 8 + l % 4 * 2], l, 2 * i);
}

static void perform(Warp &w, WgmmaOp &op) {
    alignas(32) static float a[16][16], b[16][kMaxN], d[16][kMaxN];
    const WgmmaArgs &x = op.args;
    op.done = true;
    ++stats.async_ops;
    ++stats.matrix_ops;
    if (x.a) {
        for (int l = 0; l < 32; ++l) {
            const auto &lane = op.lanes[l];
            if (memcmp(lane.a, lane.a_registers, 16))
                fail("wgmma of %s: the A registers of lane %d changed before it was complete", text(op.site).c_str(),
                     l);
            for (int i = 0; i < 8; ++i)
                a[l / 4 + i / 2 % 2 * 8][l % 4 * 2 + i / 4 * 8 + i % 2] =
                    element_to_f32(static_cast<u16>(lane.a[i / 2] >> (16 * (i % 2))), x.type);
        }
    } else {
        load_operand<false>(w, x.desc_a, w.in_cta % 4 * 16, 16, x.a_mn_major, x.type, a);
    }
    load_operand<true>(w, x.desc_b, 0, x.n, x.b_mn_major, x.type, b);
    if (x.accumulate)
        for_each_pair(d, x.n, [&](float *of_tile, int l, int i) {
            memcpy(of_tile, (op.saved ? op.lanes[l].d_before : op.lanes[l].d) + i, 8);
        });
    else
        for (auto &row : d) std::fill(row, row + x.n, 0.f);
    for (int row = 0; row < 16; ++row)
        for (int col = 0; col < x.n; col += 8) {
            Row sum;
            memcpy(&sum, &d[row][col], sizeof sum);
            for (int k = 0; k < 16; ++k) {
                Row of_b;
                memcpy(&of_b, &b[k][col], sizeof of_b);
                sum += a[row][k] * of_b;
            }
            memcpy(&d[row][col], &sum, sizeof sum);
        }
    for_each_pair(d, x.n, [&](float *of_tile, int l, int i) { memcpy(op.lanes[l].d + i, of_tile, 8); });
}

// Whether an operation in flight already owns these accumulators: the next one then continues from its result.
static bool in_flight(const WgmmaState &s, const float *d) {
    const auto owns = [&](const WgmmaOp *op) { return op->lanes[0].d == d; };
    if (std::any_of(s.open.begin(), s.open.end(), owns)) return true;
    return std::any_of(s.groups.begin(), s.groups.end(),
                       [&](const auto &g) { return std::any_of(g.begin(), g.end(), owns); });
}

static void issue(void **args, Warp &w) {
    const WgmmaArgs first = *static_cast<WgmmaArgs *>(args[0]);
    const Site site = w.collective.site;
    if (!w.wgmma.fenced) fail("wgmma at %s: no wgmma.fence since the last wait", text(site).c_str());
    if (first.n % 8 || first.n > kMaxN) fail("wgmma at %s: n = %d", text(site).c_str(), first.n);
    WgmmaOp *op = make_op(first, site);
    for (int l = 0; l < 32; ++l) {
        const auto &x = *static_cast<WgmmaArgs *>(args[l]);
        if (x.desc_a != first.desc_a || x.desc_b != first.desc_b || x.accumulate != first.accumulate)
            fail("wgmma at %s: the descriptors differ between the lanes of a warp", text(site).c_str());
        op->lanes[l].d = x.d;
        op->lanes[l].a_registers = x.a;
        if (x.a) memcpy(op->lanes[l].a, x.a, 16);
    }
    Clocks &clocks = w.cluster->clocks;
    const u32 clock = ++w.wgmma_clock;
    const auto read = [&](u64 descriptor, int row0, int rows, bool mn_major, const char *what) {
        for_each_chunk(Descriptor(descriptor), row0, rows, mn_major, [&](u32 addr, int, int) {
            checked_smem(cta_base(w) + addr, 16, 16, what, site);
            shared_access_async(w.lanes[0], cta_base(w) + addr, 16, false, clocks.wgmma_component(w.index), clock,
                                site);
        });
    };
    read(first.desc_b, 0, first.n, first.b_mn_major, "B of wgmma");
    if (!first.a && config.whole_a) read(first.desc_a, 0, 64, first.a_mn_major, "A of wgmma");
    else if (!first.a) read(first.desc_a, w.in_cta % 4 * 16, 16, first.a_mn_major, "A of wgmma");
    if (config.poison && config.completion != kEarly && !in_flight(w.wgmma, first.d)) {
        op->saved = true;
        for (auto &lane : op->lanes) {
            memcpy(lane.d_before, lane.d, first.n / 2 * sizeof(float));
            std::fill(lane.d, lane.d + first.n / 2, kNotYet);
        }
    }
    w.wgmma.open.push_back(op);
    if (config.completion == kEarly) perform(w, *op);
}

static void wait(Warp &w, int pending) {
    WgmmaState &s = w.wgmma;
    while (static_cast<int>(s.groups.size()) > pending) {
        for (WgmmaOp *op : s.groups.front()) {
            if (!op->done) perform(w, *op);
            drop(op);
        }
        s.groups.erase(s.groups.begin());
    }
    if (s.groups.empty() && s.open.empty()) s.fenced = false;
    if (!config.race) return;
    size_t in_flight = s.open.size();
    for (const auto &g : s.groups) in_flight += g.size();
    const u32 finished = w.wgmma_clock - static_cast<u32>(in_flight);
    Clocks &clocks = w.cluster->clocks;
    for (int l = 0; l < 32; ++l) {
        w.lanes[l].common = 0;
        u32 &clock = clocks.data_of(w.lanes[l].index)[clocks.wgmma_component(w.index)];
        clock = std::max(clock, finished);
    }
}

}  // namespace emu

using namespace emu;

void emu_wgmma(float *d, int n, const u32 *a, u64 desc_a, u64 desc_b, bool accumulate, bool a_mn_major, bool b_mn_major,
               int type, Site site) {
    WgmmaArgs mine{d, a, desc_a, desc_b, n, type, accumulate, a_mn_major, b_mn_major};
    collective("wgmma", &mine, site, [](void **args, Warp &w) {
        issue(args, w);
        return true;
    });
}

void emu_wgmma_fence(Site site) {
    collective("wgmma.fence", nullptr, site, [](void **, Warp &w) { return w.wgmma.fenced = true; });
}

void emu_wgmma_commit(Site site) {
    collective("wgmma.commit_group", nullptr, site, [](void **, Warp &w) {
        w.wgmma.groups.push_back(std::move(w.wgmma.open));
        w.wgmma.open.clear();
        return true;
    });
}

void emu_wgmma_wait(int pending, Site site) {
    int mine = pending;
    collective("wgmma.wait_group", &mine, site, [](void **args, Warp &w) {
        wait(w, *static_cast<int *>(args[0]));
        return true;
    });
}
