// Instructions that a whole warp executes together. All wrappers use the full mask.
#include "race.h"
#include "threads.h"

namespace emu {

bool join_collective(const char *op, void *arg, Site site) {
    Collective &c = current->warp->collective;
    if (!c.arrived) {
        c.op = op;
        c.site = site;
    } else if (c.op != op || c.site.line != site.line || c.site.file != site.file) {
        fail("warp divergence: %s at %s while lanes %08x of the warp are in %s at %s", op, text(site).c_str(),
             c.arrived, c.op, text(c.site).c_str());
    }
    ++stats.collectives;
    c.args[current->lane] = arg;
    c.arrived |= 1u << current->lane;
    return c.arrived == ~0u;
}

void finish_collective(bool release) {
    Warp &w = *current->warp;
    w.collective.arrived = 0;
    if (release) {
        wake_warp(w);
        preempt();
    } else {
        block_current(w.collective.op, w.collective.site, current->operand);
    }
}

// Everything that a lane did before happens before everything that any lane does next.
static void order_warp(Warp &w) {
    if (!config.race) return;
    Released all;
    for (int i = 0; i < 32; ++i) release(w.lanes[i], all);
    acquire_together({&w}, all);
}

struct Shuffle {
    u32 in, out;
    int source;
};
struct Vote {
    bool in;
    u32 out;
};
struct Matrices {
    u32 addr;
    u32 *r;
    int count;
    bool trans;
};
struct Mma {
    float *d;
    const u32 *a, *b;
    int k, type;
};

// Number of passes over the banks that reading eight 16-byte rows takes: the most rows in one group of four banks.
static int wavefronts(void *const *args, int first) {
    int rows[8] = {}, most = 0;
    for (int i = 0; i < 8; ++i) {
        const u32 addr = static_cast<Matrices *>(args[first + i])->addr;
        bool again = false;
        for (int j = 0; j < i; ++j) again |= static_cast<Matrices *>(args[first + j])->addr == addr;
        if (!again) most = std::max(most, ++rows[addr / 16 % 8]);
    }
    return most;
}

static void do_ldmatrix(void *const *args, Cluster &cluster) {
    const int count = static_cast<Matrices *>(args[0])->count;
    ++stats.ldmatrix;
    for (int m = 0; m < count; ++m) {
        u16 x[8][8];
        for (int i = 0; i < 8; ++i) memcpy(x[i], cluster.smem(static_cast<Matrices *>(args[8 * m + i])->addr), 16);
        stats.ldmatrix_wavefronts += wavefronts(args, 8 * m);
        for (int l = 0; l < 32; ++l) {
            auto &lane = *static_cast<Matrices *>(args[l]);
            const int i = l / 4, j = l % 4 * 2;
            const u16 lo = lane.trans ? x[j][i] : x[i][j], hi = lane.trans ? x[j + 1][i] : x[i][j + 1];
            lane.r[m] = lo | static_cast<u32>(hi) << 16;
        }
    }
}

static void do_stmatrix(void *const *args, Cluster &cluster) {
    const int count = static_cast<Matrices *>(args[0])->count;
    for (int m = 0; m < count; ++m) {
        u16 x[8][8];
        for (int l = 0; l < 32; ++l) {
            const auto &lane = *static_cast<Matrices *>(args[l]);
            const int i = l / 4, j = l % 4 * 2;
            (lane.trans ? x[j][i] : x[i][j]) = static_cast<u16>(lane.r[m]);
            (lane.trans ? x[j + 1][i] : x[i][j + 1]) = static_cast<u16>(lane.r[m] >> 16);
        }
        for (int i = 0; i < 8; ++i) memcpy(cluster.smem(static_cast<Matrices *>(args[8 * m + i])->addr), x[i], 16);
    }
}

// Fragments of mma.m16n8k16 and k8 (PTX ISA 9.7.14.5.8): lane = 4 g + t.
template <int kType, int k>
static void do_mma(void *const *args) {
    constexpr int kPerWord = kType == kEmuTf32 ? 1 : 2;  // elements in a register
    constexpr int kWordsA = 16 * k / 32 / kPerWord, kWordsB = 8 * k / 32 / kPerWord;
    float a[16][16];
    union {
        float at[16][8];
        Row row[16];
    } b, d;
    ++stats.matrix_ops;
    const auto element = [](u32 word, int i) {
        if (kType == kEmuTf32) return bits_to_f32(word & 0xffffe000u);
        return element_to_f32(static_cast<u16>(word >> (16 * i)), kType);
    };
    for (int l = 0; l < 32; ++l) {
        const auto &lane = *static_cast<Mma *>(args[l]);
        const int g = l / 4, t = l % 4;
        for (int w = 0; w < kWordsA; ++w)
            for (int i = 0; i < kPerWord; ++i)
                a[g + w % 2 * 8][t * kPerWord + i + w / 2 * 4 * kPerWord] = element(lane.a[w], i);
        for (int w = 0; w < kWordsB; ++w)
            for (int i = 0; i < kPerWord; ++i) b.at[t * kPerWord + i + w * 4 * kPerWord][g] = element(lane.b[w], i);
        for (int i = 0; i < 4; ++i) d.at[g + i / 2 * 8][2 * t + i % 2] = lane.d[i];
    }
    for (int row = 0; row < 16; ++row) {
        Row sum = d.row[row];
        for (int i = 0; i < k; ++i) sum += a[row][i] * b.row[i];
        d.row[row] = sum;
    }
    for (int l = 0; l < 32; ++l)
        for (int i = 0; i < 4; ++i) static_cast<Mma *>(args[l])->d[i] = d.at[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2];
}

static void do_mma(void *const *args) {
    const Mma &x = *static_cast<Mma *>(args[0]);
    const bool is_short = x.k == 8;
    if (x.type == kEmuTf32) return do_mma<kEmuTf32, 8>(args);
    if (x.type == kEmuBf16) return is_short ? do_mma<kEmuBf16, 8>(args) : do_mma<kEmuBf16, 16>(args);
    return is_short ? do_mma<kEmuF16, 8>(args) : do_mma<kEmuF16, 16>(args);
}

}  // namespace emu

using namespace emu;

void emu_bar_warp_sync(Site site) {
    collective("bar.warp.sync", nullptr, site, [](void **, Warp &w) {
        order_warp(w);
        return true;
    });
}

u32 emu_ballot(bool p, Site site) {
    Vote mine{p, 0};
    collective("vote", &mine, site, [](void **args, Warp &w) {
        u32 all = 0;
        for (int i = 0; i < 32; ++i) all |= static_cast<u32>(static_cast<Vote *>(args[i])->in) << i;
        for (int i = 0; i < 32; ++i) static_cast<Vote *>(args[i])->out = all;
        if (config.votes_order) order_warp(w);
        return true;
    });
    return mine.out;
}

u32 emu_shfl(u32 value, int source_lane, Site site) {
    Shuffle mine{value, 0, source_lane & 31};
    collective("shfl", &mine, site, [](void **args, Warp &w) {
        for (int i = 0; i < 32; ++i) {
            auto &lane = *static_cast<Shuffle *>(args[i]);
            lane.out = static_cast<Shuffle *>(args[lane.source])->in;
        }
        if (config.votes_order) order_warp(w);
        return true;
    });
    return mine.out;
}

bool emu_elect(Site site) {
    Vote mine{false, 0};
    collective("elect", &mine, site, [](void **args, Warp &) {
        // Any lane, but always the same one: the elected lane commits and waits for what it has issued.
        const int leader = config.scheduler == kInOrder ? 0 : config.seed * 7 % 32;
        static_cast<Vote *>(args[leader])->out = 1;
        return true;
    });
    return mine.out != 0;
}

void emu_ldmatrix(u32 *r, int count, u32 addr, bool trans, Site site) {
    Matrices mine{addr, r, count, trans};
    if (current->lane < 8 * count) {  // the other lanes' addresses are not used
        checked_smem(addr, 16, 16, "ldmatrix", site);
        shared_access(addr, 16, false, site);
    }
    collective("ldmatrix", &mine, site, [](void **args, Warp &w) {
        do_ldmatrix(args, *w.cluster);
        return true;
    });
}

void emu_stmatrix(u32 addr, const u32 *r, int count, bool trans, Site site) {
    Matrices mine{addr, const_cast<u32 *>(r), count, trans};
    if (current->lane < 8 * count) {
        checked_smem(addr, 16, 16, "stmatrix", site);
        shared_access(addr, 16, true, site);
    }
    collective("stmatrix", &mine, site, [](void **args, Warp &w) {
        do_stmatrix(args, *w.cluster);
        return true;
    });
}

void emu_mma(float *d, const u32 *a, const u32 *b, int k, int type, Site site) {
    Mma mine{d, a, b, k, type};
    collective("mma", &mine, site, [](void **args, Warp &) {
        do_mma(args);
        return true;
    });
}

void emu_setmaxnreg(int registers, Site site) {
    int mine = registers;
    collective("setmaxnreg", &mine, site, [](void **args, Warp &w) {
        w.max_registers = *static_cast<int *>(args[0]);
        return true;
    });
}
