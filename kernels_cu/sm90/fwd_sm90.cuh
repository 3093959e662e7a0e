// Forward attention on Hopper with wgmma and TMA (sm_90a):
//     O = softmax(scale * Q K^T) V,   lse = ln sum exp(scale * Q K^T),   FlashAttention-2 (Dao 2023), algorithm 1, split
// into a producer and consumers as in FlashAttention-3 (Shah et al. 2024).
//
// A persistent block draws tiles of kBlockM = 64 * kGroups rows of one (batch, head). One warpgroup produces: a thread
// brings K_j and V_j into two rings of stages and draws tile numbers, a warp brings Q into a ring of its own, so that the
// next tile's operands arrive while this one is computed. Every other warpgroup consumes: it owns 64 rows, with S, P and
// O in registers, and for each key block issues S_j = Q K_j^T and O += P_{j-1} V_{j-1} together, then turns S_j into P_j
// while the products of the other warpgroups keep the tensor cores busy. The last O += P V of a tile goes together with
// the first S of the next. A warpgroup visits only the key blocks that its own rows see, and merely releases the others.
// Where keys lie in pages, K and V have a thread for each copy of a block, and of a batch the sequences of many queries alone are computed
// (pages.cuh, prefill_sm90.cuh).
//
// With a bias whose rows lie in chunks the keys of a block lie in another order, and so do the columns of S and the rows of V
// (kInterleavesKeys, key_order.cuh).
//
// Key blocks are visited from the first to the last: the first one is whole, so that its maxima are worth having, the
// diagonal comes last, and of a causal tile the warpgroups end one after the other, not all at once.
//
// Shared memory: Q ring | K ring | V ring | mbarriers | queue of work. O leaves through its Q tile.
#ifndef CUPYFLASH_FWD_SM90_CUH
#define CUPYFLASH_FWD_SM90_CUH
#include "sm90/fwd_aside_sm90.cuh"
#include "sm90/fwd_load_sm90.cuh"
#include "attention/climb.cuh"
#include "attention/dropout.cuh"
#include "attention/softmax.cuh"

// One consumer warpgroup.
template <class V>
struct FwdGroup {
    using T = typename V::Element;
    static constexpr int N = V::kBlockN, kDepth = round_up(V::kHeadDim, 16);
    using Softmax = OnlineSoftmax<16, V::kBias>;
    using Climbing = Climb<V::kBias && !V::kAlibi>;  // by ALiBi they are taken to
    using Keys = typename Either<V::kInterleavesKeys, InterleavedKeys<N>, KeysInOrder>::Type;  // of S's columns
    // Whether what is added to a block's scores is asked for while those of the block before become P: where nothing else needs
    // the registers that it waits in.
    static constexpr bool kAsksEarly = added_kind<V>() == kBiasOrMask && kWidest<V> <= 128 &&
                                       (!V::kMask || (V::kInterleavesKeys && kWidest<V> <= 64)) &&
                                       !(V::kPacked || V::kAlibi || V::kSoftcap);
    // Whether that comes before a block's P is begun, as written: narrow heads wait for it, in wide ones P hides more.
    static constexpr bool kAsksFirst = kAsksEarly && V::kInterleavesKeys && !V::kMask && kWidest<V> <= 64;

    // Whether what a block mask says of elements comes along with K, which is held until that has been read.
    static constexpr bool kCopiesBits = FwdSm90Smem<V>::Copies::kTiles > 0;
    static_assert(!V::kInterleavesKeys || !(V::kDropout || V::kPacked || (V::kBlockMask && !kCopiesBits)));
    // Whether bits then hold the bounds, too; those of a window are tested one by one, or registers spill.
    static constexpr bool kKeepsBounds = kCopiesBits && !V::kWindow;
    // Whether repairs stand aside: where tiles follow each other fast, and the call leaves registers enough.
    static constexpr bool kRepairsAside =
        kWidest<V> > 64 && !(Mask<V>::kHides || V::kBlockMask || V::kBias || V::kMods || V::kDropout);

    const FwdSm90Params &p;
    const Problem &problem;
    const FwdSm90Smem<V> &smem;
    const Score<V> score;
    const int group, warp_row;  // of the block; this warp's first row of the 64
    TileQueue<V::kPacked> queue;
    RingPosition<V::kStages> ring;    // of K and V
    RingPosition<V::kQSlots> q_ring;  // every kGroups-th slot is this group's
    int leaving = -1;                 // the Q tile through which the O of the tile before is leaving

    __device__ FwdGroup(const FwdSm90Params &p, const FwdSm90Smem<V> &smem, int group)
        : p(p),
          problem(p.plain.problem),
          smem(smem),
          score(problem),
          group(group),
          warp_row(fresh_thread() / 32 % 4 * 16),
          queue(smem.queue()),
          q_ring(group) {}

    __device__ bool leads() const { return ptx::thread_index() % 128 == 0; }
    // All four warps of the group.
    __device__ void sync() const { ptx::bar_sync(kGroupBarrier + group, 128); }

    // Of K and V at a position of the ring. (K is waited for in any case.)
    __device__ void wait_v(const RingPosition<V::kStages> &at) const {
        if (!smem.kJoint) ptx::mbarrier_wait(smem.v_full(at.stage), at.phase);
    }
    __device__ void release_k(const RingPosition<V::kStages> &at) const {
        if (!smem.kJoint) arrive_warp(smem.k_empty(at.stage));
    }
    __device__ void release_v(const RingPosition<V::kStages> &at) const { arrive_warp(smem.v_empty(at.stage)); }

    // Key blocks that the tile has and these rows do not need. To be released only once they are full: an earlier
    // arrival would count for the phase before.
    __device__ void pass(int blocks) {
        #pragma unroll 1
        for (int i = 0; i < blocks; ++i, ring.next()) release_both();
    }
    __device__ void release_both() const {
        ptx::mbarrier_wait(smem.k_full(ring.stage), ring.phase);  // @passed-block-full
        release_k(ring);
        wait_v(ring);
        release_v(ring);
    }
    // Hands the Q tile that O leaves through back to the producer, once the copy has read it.
    __device__ void release_leaving() {
        if (leads() && leaving >= 0) {
            ptx::cp_async_bulk_wait_group_read<0>();      // @o-has-left
            ptx::mbarrier_arrive(smem.q_empty(leaving));  // @tile-of-o-released
        }
        leaving = -1;
    }

    // What a block mask says of S of key block j, which the stage `ring` has.
    template <bool kMasked = true>
    __device__ auto seen_of(const Mask<OneGroup<V>> &mask, const QueryWork<V> &tile, int q0, int j) const {
        using Seen = SeenBits<V, 16, N, true, V::kBlockMask && kMasked>;
        if constexpr (kCopiesBits && kMasked) {
            CopiedBits<V, 16, Keys> seen(smem.mask(ring.stage), group, warp_row);
            const int lane = fresh_lane();
            // @bounds-from-the-lane-fwd-sm90
            if (kKeepsBounds) seen.keep(mask, q0 + warp_row + lane / 4, j * N + Keys::of_lane(lane));
            return seen;
        } else return Seen(p.plain, tile.sequence, tile.head, q0 + warp_row, j * N);
    }
    template <class Seen>
    __device__ void apply_mask(const Mask<OneGroup<V>> &mask, const Seen &seen, AccTile<16, N> &S, int q0,
                               int j) const {
        const int lane = fresh_lane();
        // @mask-from-the-lane-fwd-sm90
        const auto from_here = mask.from(q0 + warp_row + lane / 4, j * N + Keys::of_lane(lane));
        S.for_each([&](int row, int col, float &s) {
            if constexpr (!kKeepsBounds) s = from_here.row_sees(row, Keys::of_column(col)) ? s : -ptx::infinity();
            // @bits-of-columns
            if constexpr (V::kBlockMask) s = seen(row, Keys::of_column(col)) ? s : -ptx::infinity();
        });
    }
    template <class Fetched>
    __device__ void apply_score(const Places<V> &head_places, const Fetched &fetched, AccTile<16, N> &S, int q0,
                                int j) const {
        const auto places = head_places.template from_lane<true, Keys>(q0 + warp_row, j * N, fetched);
        S.for_each([&](int row, int col, float &s) { s = score.value_or_nan(s, places(row, Keys::of_column(col))); });
    }

    // What it adds and reads ahead.
    __device__ auto fetch(const Places<V> &head_places, int q0, int j) const {
        return head_places.template fetch<true, 16, N, Keys>(q0 + warp_row, j * N);
    }

    __device__ QueryWork<V> next_tile() { return {unpack_tile<V::kPacked>(p.plain, queue.next()), p.plain}; }
    __device__ Mask<OneGroup<V>> mask_of(const QueryWork<V> &tile) const { return {tile.sequence, problem}; }
    // This group's rows of a tile, if there are any, and its blocks [first, end).
    __device__ int rows_of(const QueryWork<V> &tile) const { return tile.q0 + 64 * group; }
    __device__ bool has_rows(const QueryWork<V> &tile) const {
        return tile.exists() && rows_of(tile) < tile.sequence.seqlen_q;
    }
    __device__ int end_of(const QueryWork<V> &tile) const {
        if constexpr (V::kBlockMask) return tile.end;
        return min(max(mask_of(tile).end_key_block(rows_of(tile)), tile.first + 1), tile.end);
    }
    __device__ int first_of(const QueryWork<V> &tile) const {
        if constexpr (V::kBlockMask) return tile.first;
        return V::kWindow ? min(max(mask_of(tile).first_key_block(rows_of(tile)), tile.first), end_of(tile) - 1) : 0;
    }

    // A parity tells a phase of q_full only from the next one. Where two groups take turns with a slot, the other has to
    // be done with it first.
    __device__ void wait_q() const {
        // @other-group-done-with-q
        if (smem.kSlots % smem.kGroups) ptx::mbarrier_wait(smem.q_empty(q_ring.stage), q_ring.phase ^ 1);
        ptx::mbarrier_wait(smem.q_full(q_ring.stage), q_ring.phase);  // @q-full
    }
    // The key blocks of a list, from the second on. Those of which these rows see nothing are passed, but for one of so many in
    // a row (kPassedInARow): V of the block before is held, since it has not been used.
    template <class Ask, class Step>
    __device__ void visit_list(const QueryWork<V> &tile, int &passed, const Climbing &climb, Ask ask, Step step) {
        #pragma unroll 1
        for (int j = tile.first + 1; j < tile.end; ++j) {
            const ListedBlock listed = tile.at(j);
            const int next = kAsksEarly && j + 1 < tile.end ? tile.key_block(j + 1) : -1;
            if (listed.sight(group) == kHidden && passed < smem.kPassedInARow) {  // @hidden-block-passed-fwd
                ring.next(), ++passed;
                release_both();
                ask(next);  // @bias-behind-a-hidden-block
                continue;
            }
            if (listed.sight(group) != kWhole) step(listed.block(), Bool<true>{}, Bool<false>{}, next);
            else if (climb.on())
                step(listed.block(), Bool<false>{}, Bool<Climbing::kAny>{}, next);  // @listed-while-scores-climb
            else step(listed.block(), Bool<false>{}, Bool<false>{}, next);
            passed = 0;
        }
    }

    // A tile without rows of this group.
    __device__ void skip(const QueryWork<V> &tile) {
        pass(tile.end - tile.first);
        wait_q();
        release_leaving();
        sync();  // all warps have seen this phase of q_full before it can end @q-full-seen-by-all
        if (leads()) ptx::mbarrier_arrive(smem.q_empty(q_ring.stage));
        q_ring.next(smem.kGroups);
    }
    // Issues S = Q K^T of a tile's first block.
    __device__ void begin(const QueryWork<V> &tile, AccTile<16, N> &S) {
        if constexpr (V::kWindow && !V::kBlockMask)
            pass(first_of(tile) - tile.first);  // @blocks-before-window-passed-fwd
        wait_q();
        ptx::mbarrier_wait(smem.k_full(ring.stage), ring.phase);
        issue_nt<T, kDepth>(S, smem.q(q_ring.stage), smem.k(ring.stage));
    }

    __device__ void run() {
        AccTile<16, N> S;
        for (QueryWork<V> tile = next_tile(); tile.exists();) {
            if (has_rows(tile)) {
                begin(tile, S);
                ptx::wgmma_wait_group<0>();
                arrived(S);
                while (compute(tile, S)) {}
            } else {
                skip(tile);
                tile = next_tile();
            }
        }
        release_leaving();  // shared memory must outlive the store @memory-outlives-o
    }

    // A tile, whose first S is there. Afterwards `tile` is the next one; true if its first S is there too.
    __device__ bool compute(QueryWork<V> &tile, AccTile<16, N> &S) {
        ring.stage = uniform(ring.stage), ring.phase = uniform(ring.phase);
        q_ring.stage = uniform(q_ring.stage), tile.q0 = uniform(tile.q0);
        // Blocks before `whole` or from `cut` on hide keys from some of the rows.
        const auto mask = mask_of(tile);
        const auto places = DroppingPlaces<V, FwdParams>::of(p.plain, tile.sequence, tile.head);
        const int q0 = rows_of(tile), end = end_of(tile), first = first_of(tile);
        const int whole = mask.first_full_block(q0), cut = mask.end_full_block(q0);
        const int slot = q_ring.stage;
        const auto sQ = smem.q(slot);
        const auto sO = smem.o(slot);

        AccTile<16, V::kHeadDimV> O;
        FragA<T, 16, N> P;
        Softmax softmax(score.log2_factor);
        typename Softmax::Rows rescale;
        if constexpr (!kCopiesBits) release_k(ring);  // @k-released-at-once
        auto fetched = fetch(places, q0, tile.key_block(first));
        apply_score(places, fetched, S, q0, tile.key_block(first));
        // @bias-of-the-second-block
        if (kAsksEarly && first + 1 < end) fetched = fetch(places, q0, tile.key_block(first + 1));
        if constexpr (V::kBlockMask) {
            if (tile.at(first).sight(group) != kWhole)
                apply_mask(mask, seen_of(mask, tile, q0, tile.key_block(first)), S, q0, tile.key_block(first));
            if constexpr (kCopiesBits) release_k(ring);  // @bits-of-the-first-block-read
        } else {
            if (first < whole || first >= cut)
                apply_mask(mask, seen_of(mask, tile, q0, first), S, q0, first);  // @first-block-masked
        }
        softmax.first_maximum(S);
        softmax.exponentiate(S);
        P.from(S);
        // @first-block-of-a-list-dropped
        Dropout<V>::drop(P, kept_of<V, 16, N, KeptPairs>(places, q0 + warp_row, tile.key_block(first) * N));
        release_leaving();
        // Without a mask the first product overwrites O. (With one, that spills.)
        bool started = Mask<V>::kHides || V::kBlockMask;
        if (started) O.zero();

        // One key block. kMasked: it may hide keys or follow one that did, so that a row has seen few. Its maximum counts then,
        // and where scores climb from block to block (kClimbing), as towards the diagonal by ALiBi. With a block mask most
        // blocks may be masked: once each row has seen a key there is hope, as in others.
        int passed = 0;  // with a block mask: blocks since the one before, whose V is held
        Climbing climb;
        // In a list, `next` is the block that follows, or -1.
        const auto ask = [&](int next) {
            if (kAsksEarly && next >= 0) fetched = fetch(places, q0, next);  // @bias-of-the-next-listed-block
        };
        const auto step = [&](int j, auto masked, auto climbing, int next = -1) {
            constexpr bool kMasked = decltype(masked)::value, kClimbing = decltype(climbing)::value || V::kAlibi;
            constexpr bool kHopes = kMasked && V::kBlockMask && !V::kAlibi,
                           kCareful = (kMasked && !kHopes) || kClimbing;
            constexpr bool kHopesFirst = kAsksFirst && !kCareful && !kHopes;
            RingPosition<V::kStages> before = ring;
            if constexpr (V::kBlockMask) before = ring.before(passed);
            ring.next();
            ptx::mbarrier_wait(smem.k_full(ring.stage), ring.phase);  // @k-full
            issue_nt<T, kDepth>(S, sQ, smem.k(ring.stage));           // S = Q K^T
            wait_v(before);                                           // @v-full
            // @v-of-the-block-before
            issue_nn<T, N>(O, P, smem.v(before.stage), started);  // O += P V, of the block before
            started = true;
            const auto kept = kept_of<V, 16, N, KeptPairs>(places, q0 + warp_row, j * N);
            if constexpr (!kAsksEarly) fetched = fetch(places, q0, j);
            const auto seen = seen_of<kMasked>(mask, tile, q0, j);  // read while the products run
            ptx::wgmma_wait_group<1>();                             // @s-complete
            arrived(S);
            apply_score(places, fetched, S, q0, j);
            // (Of one question for both, kernels without a list become others.)
            if (V::kBlockMask) ask(next);
            else if (kAsksEarly && j + 1 < end) fetched = fetch(places, q0, j + 1);  // @bias-of-the-next-block
            bool grows = false, good = true;
            float all;
            if constexpr (kMasked) apply_mask(mask, seen, S, q0, j);
            if constexpr (kCareful) {
                grows = softmax.raise_maximum(S, rescale);
                softmax.exponentiate(S);  // P = exp(S - m)
            }
            if constexpr (kHopesFirst) {
                // The compiler moves powers of two up to where their operands are ready, and waits up as far as it can. A shuffle
                // of m keeps the first behind what was asked for, a branch the second behind P.
                #pragma unroll
                for (float &m : softmax.m) m = ptx::shfl_index(m, fresh_lane());
                good = softmax.exponentiate_optimistically(S, all);  // @hope-checked-first
                if (good) {
                    ptx::wgmma_wait_group<0>();  // @pv-complete-first
                    arrived(O);
                    release_v(before);  // @v-released-first
                    P.from(S);
                    Dropout<V>::drop(P, kept);
                    return release_k(ring);
                }
            }
            ptx::wgmma_wait_group<0>();  // @pv-complete
            arrived(O);
            release_v(before);  // @v-released
            const bool hopes = !kCareful && (!kHopes || (!climb.on() && softmax.has_maxima()));
            if (hopes && !kHopesFirst) good = softmax.exponentiate_optimistically(S, all);  // @hope-checked
            else if (kHopes) softmax.step(S, O);
            if (!good) {
                climb.hope_failed(j);
                if (!softmax.lower(S, all, rescale)) {                            // @k-kept-until-now
                    multiply_nt<T, kDepth>(S, sQ, warp_row, smem.k(ring.stage));  // @scores-again
                    apply_score(places, fetch(places, q0, j), S, q0, j);
                    if constexpr (kHopes) apply_mask(mask, seen_of(mask, tile, q0, j), S, q0, j);  // @mask-again
                    softmax.step(S, O);  // @o-follows-scores-again
                    climb.by_far();
                } else {
                    softmax.multiply_rows(O, rescale);  // @o-follows-lowered
                }
            }
            P.from(S);
            Dropout<V>::drop(P, kept);
            release_k(ring);
            if (grows) softmax.multiply_rows(O, rescale);  // O follows m @o-follows
        };
        int j = first + 1;
        if constexpr (V::kBlockMask) {
            visit_list(tile, passed, climb, ask, step);
        } else {
            if constexpr (V::kWindow) {
                #pragma unroll 1
                for (; j < min(end, whole + 1); ++j) step(j, Bool<true>{}, Bool<false>{});
            }
            #pragma unroll 1
            for (; j < min(end, cut) && !climb.on(); ++j) step(j, Bool<false>{}, Bool<false>{});
            if constexpr (Climbing::kAny) {
                #pragma unroll 1
                for (; j < min(end, cut); ++j) step(j, Bool<false>{}, Bool<true>{});  // @while-scores-climb
            }
            #pragma unroll 1
            for (; j < end; ++j) step(j, Bool<true>{}, Bool<false>{});  // @up-to-the-last-block
        }

        const QueryWork<V> next = next_tile();
        q_ring.next(smem.kGroups);
        const RingPosition<V::kStages> behind = ring;
        if constexpr (V::kBlockMask) ring = ring.before(passed);
        wait_v(ring);
        issue_nn<T, N>(O, P, smem.v(ring.stage), started);
        const RingPosition<V::kStages> last = ring;
        if constexpr (V::kBlockMask) ring = behind;
        ring.next();

        // While that runs, and the next tile's S.
        typename Softmax::Rows inverse;
        const auto store_lse = [&] {
            typename Softmax::Rows lse;
            const auto sink = Sink<V>::of(p.plain, tile.sequence, tile.head);
            softmax.finish(score.unit, sink, lse, inverse, [&](int row, bool without_sum) {
                const int qi = q0 + warp_row + row;
                if constexpr (V::kBlockMask) {
                    const auto block_mask = BlockMask<V>::of(p.plain, tile.sequence, tile.head);
                    return without_sum && !block_mask.sees_any(qi, mask.first_key(qi), mask.end_key(qi));
                } else return mask.sees_nothing(qi);
            });
            const long long lse_row = lse_row_of<V>(p.plain, tile.sequence, tile.head, tile.part);
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int qi = q0 + warp_row + O.row(0, 2 * r);
                if (lse_of<V>(p.plain) && lane() % 4 == 0 && qi < tile.sequence.seqlen_q)
                    lse_of<V>(p.plain)[lse_row + qi] = lse[r];
            }
        };
        // Once it is done. kBegun: the next tile's S is under way.
        const auto store_o = [&](auto begun) {
            constexpr bool kBegun = decltype(begun)::value;
            arrived(O);
            release_v(last);
            softmax.multiply_rows(O, inverse);
            Dropout<V>::scale(p.plain, O);
            if constexpr (V::kSplitKeys) {
                leave_part<V>(p.plain, tile.sequence, tile.head, tile.part, q0 + warp_row, O);
                sync();  // all warps have read Q @q-read-by-all
                if (leads()) ptx::mbarrier_arrive(smem.q_empty(slot));
                return;
            }
            if (!ptx::vote_all(stage<T>(sO, warp_row, O))) {  // @o-is-finite-sm90
                if constexpr (kBegun) {                       // its registers are needed: S is formed again afterwards
                    ptx::wgmma_wait_group<0>();
                    arrived(S);
                }
                ptx::bar_warp_sync();  // the other lanes' stage() wrote parts of these rows @o-staged-by-the-warp
                // @repair-in-its-sequence-fwd-sm90
                const int sequence = tile.sequence.index, query0 = q0 + warp_row;
                if constexpr (kRepairsAside)
                    repair_aside<OneGroup<V>>(p.plain, sequence, tile.head, query0, sO, warp_row);
                else repair_output<OneGroup<V>, false, 16>(p.plain, sequence, tile.head, query0, sO, warp_row);
                if constexpr (kBegun) multiply_nt<T, kDepth>(S, smem.q(q_ring.stage), warp_row, smem.k(ring.stage));
            }
            const bool shared = V::kPacked && q0 + 64 > tile.sequence.seqlen_q;  // @o-beside-its-neighbour
            if (shared) {
                ptx::bar_warp_sync();
                write_aside<V>(p.plain, tile.sequence, tile.head, q0 + warp_row, sO, warp_row);
            }
            ptx::fence_proxy_async();  // @o-shown-to-tma
            sync();                    // @o-staged-by-the-group
            if (leads() && !shared) sO.store(p.map_o, tile.sequence.row_q + q0, tile.head, tile.sequence.batch());
            leaving = slot;
        };
        const int rest = Mask<V>::kHides ? tile.end - end : 0;  // @blocks-of-other-rows-passed
        const bool begun = smem.kPipelined && has_rows(next);
        if (begun) {
            pass(rest);
            begin(next, S);
            store_lse();
            ptx::wgmma_wait_group<1>();
            store_o(Bool<true>{});
            ptx::wgmma_wait_group<0>();
            arrived(S);
        } else {
            store_lse();
            ptx::wgmma_wait_group<0>();
            store_o(Bool<false>{});
            pass(rest);
            // @tile-of-o-free-for-q
            if (smem.kSlots == smem.kGroups) release_leaving();  // the next tile's Q is waiting for it
        }
        tile = next;
        return begun;
    }
};

template <class V>
__device__ __forceinline__ void fwd(const FwdSm90Params &p) {
    prefetch_if_packed<V>(p.map_q, p.map_k, p.map_v);
    const FwdSm90Smem<V> smem{ptx::dynamic_smem_1024()};
    if (ptx::thread_index() == 0) smem.init();
    ptx::bar_sync();
    const ptx::i64 cycles = V::kClocks ? ptx::clock64() : 0, nanoseconds = V::kClocks ? ptx::globaltimer() : 0;

    const int role = uniform(ptx::thread_index() / 128);
    if (role == smem.kGroups) {
        ptx::setmaxnreg_dec<V::kProducerRegisters>();
        const int warp_in_group = uniform(warp() % 4);
        if constexpr (V::kPaged) {
            if (warp_in_group == 0 && lane() < smem.kKeyCopies) fwd_load_pages<V, false>(p, smem);
            if (warp_in_group == 2 && lane() < smem.kKeyCopies) fwd_load_pages<V, true>(p, smem);
        } else {
            if (warp_in_group == 0 && lane() == 0) fwd_load_kv<V>(p, smem);
        }
        if (warp_in_group == 1) fwd_load_q<V>(p, smem);
        if constexpr (FwdSm90Smem<V>::Copies::kTiles > 0)
            if (warp_in_group == 2 && lane() < FwdSm90Smem<V>::Copies::kTiles) fwd_load_bits<V>(p, smem);
        if constexpr (V::kPaged) {
            if (warp_in_group == 3) schedule_long_sequences<V>(p.plain, p.counter, smem.queue());
        } else if constexpr (V::kPacked) {
            if (warp_in_group == 3)
                schedule_tiles<V, Queries, V::kBlockM, Mask<V>::kHides>(p.plain, p.counter, smem.queue());
        }
    } else {
        ptx::setmaxnreg_inc<V::kConsumerRegisters>();
        FwdGroup<V>(p, smem, role).run();
        if (V::kClocks && ptx::thread_index() == 0) {
            p.clocks[2 * ptx::block_index()] = ptx::clock64() - cycles;
            p.clocks[2 * ptx::block_index() + 1] = ptx::globaltimer() - nanoseconds;
        }
    }
}

#endif  // CUPYFLASH_FWD_SM90_CUH
