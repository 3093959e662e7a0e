// The gradient of a bias on Hopper (sm_90a): dS, summed over the dimensions along which the bias is broadcast (bias_visits.cuh).
//     S = Q K^T,  P = exp(S - lse),  dP = dO V^T,  dS = P * (dP - delta).
//
// A persistent block draws tiles of kBlockM = 128 queries and kBlockN keys of the result, visits all that each stands for, and
// writes the sum once. Two warpgroups consume: each owns 64 rows, with the sum in registers, and forms dS of 64 keys at a time,
// while the products of the other keep the tensor cores busy. In the third warpgroup one thread draws tiles and produces Q and
// K, then dO and V of each visit, through one ring of stages that hold such pairs, and runs ahead into the tiles to come.
//
// Shared memory: ring of pairs | a row of fp32 sums a consumer warp | queue of tiles | mbarriers.
#ifndef CUPYFLASH_BWD_DBIAS_SM90_CUH
#define CUPYFLASH_BWD_DBIAS_SM90_CUH
#include "attention/score_gradient.cuh"
#include "attention/bias_visits.cuh"
#include "attention/params_sm90.cuh"
#include "attention/work_sm90.cuh"
#include "tile/tile_sm90.cuh"

template <class V>
struct DBiasSmem {
    using T = typename V::Element;
    static constexpr int N = V::kBlockN, D = round_up(V::kHeadDim, 16), kDimV = round_up(V::kHeadDimV, 16);
    static constexpr int kStages = V::kStages;
    static constexpr int kGroups = V::kBlockM / 64, kWarps = 4 * kGroups;
    // The first pair of a visit, Q (of a group) and K; or the second, dO and V.
    template <bool kSecond, int kRows>
    using TileOf = SwizzledTile<T, kRows, kSecond ? kDimV : D>;
    static constexpr int kRowsBytes = larger(TileOf<false, 64>::kBytes, TileOf<true, 64>::kBytes);
    static constexpr int kKeysBytes = larger(TileOf<false, N>::kBytes, TileOf<true, N>::kBytes);
    static constexpr int kStageBytes = kGroups * kRowsBytes + kKeysBytes;
    using Queue = WorkQueue<1>;
    static constexpr int kSums = kStages * kStageBytes, kQueue = kSums + 4 * N * kWarps;
    static constexpr int kBars = kQueue + Queue::kBytes, kQueueBars = kBars + 8 * 2 * kStages;
    static_assert(kQueueBars + 8 * Queue::kBarriers == V::kSmemBytes);
    ptx::u32 base;

    template <bool kSecond>
    __device__ TileOf<kSecond, 64> rows(int stage, int group) const {
        return {base + stage * kStageBytes + group * kRowsBytes};
    }
    template <bool kSecond>
    __device__ TileOf<kSecond, N> keys(int stage) const {
        return {base + stage * kStageBytes + kGroups * kRowsBytes};
    }
    __device__ ptx::u32 sums() const { return base + kSums; }
    __device__ ptx::u32 full(int stage) const { return base + kBars + 8 * stage; }
    __device__ ptx::u32 empty(int stage) const { return full(kStages + stage); }
    // Of the numbers of tiles; -1: there are no more.
    __device__ Queue queue() const { return {base + kQueueBars, base + kQueue}; }

    __device__ void init() const {  // by one thread
        #pragma unroll 1
        for (int i = 0; i < kStages; ++i) {
            ptx::mbarrier_init(full(i), kGroups + 1);
            ptx::mbarrier_init(empty(i), kWarps);
        }
        Queue::init(base + kQueueBars, kWarps);
        ptx::fence_mbarrier_init();
    }
};

// Q and K, dO and V of every visit, by one thread.
template <class V>
__device__ __forceinline__ void bwd_dbias_load(const BwdSm90Params &p, const DBiasSmem<V> &smem) {
    const Problem &problem = p.plain.problem;
    RingPosition<V::kStages> ring;
    TileNumbers numbers(p.counter);
    auto queue = smem.queue();
    const int count = BiasVisits<V>::count(p.plain);
    #pragma unroll 1
    for (;;) {
        const int index = numbers.number < count ? numbers.number : -1;
        queue.publish({{{static_cast<ptx::u32>(index)}}});
        if (index < 0) return numbers.finish();
        numbers.draw();  // while this one is loaded
        const BiasVisits<V> visits(p.plain, index);
        typename BiasVisits<V>::Visit at;
        #pragma unroll 1
        for (bool exists = visits.begin(at); exists; exists = visits.advance(at)) {
            const auto sequence = visits.sequence_of(at.batch);
            const int head_k = at.head / (problem.heads_q / problem.heads_k);  // @head-of-k-dbias-sm90
            const auto load = [&](auto second, const ptx::TensorMap &of_rows, const ptx::TensorMap &of_keys) {
                constexpr bool kSecond = decltype(second)::value;
                ptx::mbarrier_wait(smem.empty(ring.stage), ring.phase ^ 1);  // @pair-free-dbias
                const ptx::u32 full = smem.full(ring.stage);
                #pragma unroll
                for (int group = 0; group < smem.kGroups; ++group)
                    smem.template rows<kSecond>(ring.stage, group)
                        .load(of_rows, full, sequence.row_q + at.m * V::kBlockM + 64 * group, at.head, sequence.batch(),
                              ptx::kEvictNormal);
                smem.template keys<kSecond>(ring.stage)
                    .load(of_keys, full, sequence.row_k + at.n * V::kBlockN, head_k, sequence.batch(),
                          ptx::kEvictNormal);
                ring.next();
            };
            load(Bool<false>{}, p.map_q, p.map_k);
            load(Bool<true>{}, p.map_dout, p.map_v);
        }
    }
}

// The part of a tile of which a warpgroup forms dS at a time.
template <class V>
struct GroupPart : V {
    static constexpr int kBlockM = 64, kBlockN = 64, kWarps = 4;
};

// One consumer warpgroup.
template <class V>
struct DBiasGroup : ScoreGradient<GroupPart<V>> {
    using Part = GroupPart<V>;
    using Base = ScoreGradient<Part>;
    using Base::problem, Base::row0;
    using typename Base::Acc, typename Base::T;
    using Visit = typename BiasVisits<V>::Visit;
    static constexpr int N = V::kBlockN, kParts = N / Part::kBlockN;
    static constexpr int kDepth = round_up(V::kHeadDim, 16),
                         kDepthV = round_up(V::kHeadDimV, 16);  // @depth-of-dp-dbias
    // A tile is visited along the dimensions along which the bias is broadcast, so what is added is the same at each visit. Not
    // packed, where a sequence may have less of it than the next one. @bias-is-kept
    static constexpr bool kKeepsBias = !V::kPacked && !V::kWideBias && added_kind<V>() == kBiasOrMask;

    const DBiasSmem<V> &smem;
    const int group;
    RingPosition<V::kStages> ring;

    __device__ DBiasGroup(const BwdParams &p, const DBiasSmem<V> &smem, int group)
        : Base(p, warp() % 4 * 16), smem(smem), group(group) {}

    __device__ void run() {
        auto queue = smem.queue();
        #pragma unroll 1
        for (;;) {
            const int index = static_cast<int>(queue.next().x[0].x[0]);
            if (index < 0) return;
            const BiasVisits<V> visits(this->p, index);
            AccTile<16, N> sum;
            sum.zero();
            const auto kept = kept_of(visits);
            Visit at;
            #pragma unroll 1
            for (bool exists = visits.begin(at); exists; exists = visits.advance(at))
                add(visits.sequence_of(at.batch), at, kept, sum);
            // Of both groups: none needs one of its own here.
            const auto sync = [] { ptx::bar_sync(kGroupBarrier, 32 * DBiasSmem<V>::kWarps); };
            visits.template leave<DBiasSmem<V>::kWarps>(sum, 64 * group + row0, smem.sums(), sync);
            if (visits.to.row == 0) sync();  // the sums are read, before those of the next tile @sums-read-dbias
        }
    }

  private:
    __device__ __forceinline__ auto fetch_part(const SequenceOf<V> &sequence, const Visit &at, int part) const {
        return this->fetch(sequence, at.head, at.m * V::kBlockM + 64 * group, at.n * N + Part::kBlockN * part);
    }
    template <class Fetched>
    struct OfParts {
        Fetched part[kParts];
    };
    // What is read before a tile's visits.
    __device__ __forceinline__ auto kept_of(const BiasVisits<V> &visits) const {
        if constexpr (!kKeepsBias) {
            return NotFetched{};
        } else {
            const Visit first = visits.first();
            const auto sequence = visits.sequence_of(first.batch);
            OfParts<decltype(fetch_part(sequence, first, 0))> found;
            #pragma unroll
            for (int part = 0; part < kParts; ++part) found.part[part] = fetch_part(sequence, first, part);
            return found;
        }
    }
    template <class Kept>
    __device__ __forceinline__ void add(const SequenceOf<V> &sequence, const Visit &at, const Kept &kept,
                                        AccTile<16, N> &sum) {
        const int q0 = at.m * V::kBlockM + 64 * group;
        const Mask<Part> mask(sequence, problem);
        const RingPosition<V::kStages> scores = ring;
        ring.next();
        #pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const int k0 = at.n * N + Part::kBlockN * part;
            const auto fetched = [&] {
                if constexpr (kKeepsBias) return kept.part[part];  // @bias-of-its-part
                else return fetch_part(sequence, at, part);
            }();
            Acc S, dP;
            if (part == 0) ptx::mbarrier_wait(smem.full(scores.stage), scores.phase);  // @q-and-k-here-dbias
            issue_nt<T, kDepth>(S, smem.template rows<false>(scores.stage, group),
                                smem.template keys<false>(scores.stage).from_row(Part::kBlockN * part));
            if (part == 0) ptx::mbarrier_wait(smem.full(ring.stage), ring.phase);  // @do-and-v-here-dbias
            issue_nt<T, kDepthV>(dP, smem.template rows<true>(ring.stage, group),
                                 smem.template keys<true>(ring.stage).from_row(Part::kBlockN * part));
            ptx::wgmma_wait_group<0>();  // @products-complete-dbias
            arrived(S), arrived(dP);
            if (part == kParts - 1) arrive_warp(smem.empty(scores.stage)), arrive_warp(smem.empty(ring.stage));
            this->form(sequence, mask, at.head, q0, k0, fetched, S, dP, [&](int row, int col, float, float dS) {
                sum.x[0][Part::kBlockN / 8 * part + col / 8][row / 8 * 2 + col % 2] += dS;  // @part-of-the-sum
            });
        }
        ring.next();
    }
};

template <class V>
__device__ __forceinline__ void bwd_dbias(const BwdSm90Params &p) {
    const DBiasSmem<V> smem{ptx::dynamic_smem_1024()};
    if (ptx::thread_index() == 0) smem.init();
    ptx::bar_sync();

    const int role = uniform(ptx::thread_index() / 128);
    if (role == smem.kGroups) {
        ptx::setmaxnreg_dec<V::kProducerRegisters>();
        if (ptx::thread_index() % 128 == 0) bwd_dbias_load<V>(p, smem);
    } else {
        ptx::setmaxnreg_inc<V::kConsumerRegisters>();
        DBiasGroup<V>(p.plain, smem, role).run();
    }
}

#endif  // CUPYFLASH_BWD_DBIAS_SM90_CUH
