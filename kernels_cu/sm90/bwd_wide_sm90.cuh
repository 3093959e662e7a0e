// A visit of a warpgroup of bwd_sm90.cuh where head_dim is beyond 128, and that of v is not: of its 240 registers a thread dK and
// dV have up to 160. So S gives its own to dP, and P waits for it in half as many.
#ifndef CUPYFLASH_BWD_WIDE_SM90_CUH
#define CUPYFLASH_BWD_WIDE_SM90_CUH
#include "attention/dropout.cuh"
#include "attention/score.cuh"
#include "attention/slopes.cuh"
#include "attention/visible_sm90.cuh"
#include "sm90/bwd_load_sm90.cuh"

// Whether visits are such.
template <class V>
constexpr bool kWideVisits = kWidest<V> > 128;

// One query tile of g, a BwdGroup. kMasked: some elements are to be hidden.
template <bool kMasked, class V, template <class> class Group>
__device__ __forceinline__ void wide_step(Group<V> &g, const DqVisits<V> &visit, int q0, int key0) {
    using T = typename V::Element;
    constexpr int M = V::kBlockM;
    static_assert(Score<V>::kWeightIsP && !V::kBias && !Dropout<V>::kAny && !Emitted<V>::kAny && !V::kBlockMask);
    const auto ring = RingPosition<V::kStages>::of(g.i);
    const auto sQ = g.smem.q(ring.stage);
    const auto sdO = g.smem.dout(ring.stage);
    const auto of_head = Places<V>::of(g.p.plain, visit.sequence, visit.head);
    const auto places = of_head.template from_warp<false>(q0, key0, of_head.template fetch_of_warp<false, M>(q0, key0));
    const ptx::u32 stats_at = g.smem.stats(ring.stage) + 16 * (fresh_lane() % 4);

    ptx::mbarrier_wait(g.smem.q_full(ring.stage), ring.phase);  // @visit-q-full-wide
    // P, transposed: rows are keys. As fp16 times 2^14 it is off by 2^-12 of itself at the most, down to 2^-28: for dS, what bf16
    // leaves is too little.
    constexpr float kExponent = 14.f, kUnit = 1.f / 16384.f;
    FragA<Fp16, 16, M> waiting;
    {
        AccTile<16, M> P;
        issue_nt<T, Group<V>::kDepth>(P, g.smem.k().from_row(64 * g.group), sQ);  // S^T = K Q^T
        ptx::wgmma_wait_group<0>();                                               // @s-complete-wide
        arrived(P);
        #pragma unroll
        for (int j = 0; j < M / 8; ++j) {
            RowStats stats;
            stats.load(stats_at, j);
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                float &x = P.x[0][j][e];
                x = g.score.P(x, places(8 * j + e % 2, 8 * (e / 2)), stats.lse(e % 2) - kExponent);
            }
            if (j % 2) waiting.from(P, j / 2);
        }
    }
    // P is no such number: nobody stops. ptxas would issue dP before P is packed, and spill; not across a branch that asks for P.
    if (waiting.x[M / 16 - 1][0][3] == 0xffffffffu) ptx::trap();

    ptx::mbarrier_wait(g.smem.dout_full(ring.stage), ring.phase);  // @visit-do-full-wide
    AccTile<16, M> dS;
    issue_nt<T, Group<V>::kDepthV>(dS, g.smem.v().from_row(64 * g.group), sdO);  // dP^T = V dO^T
    ptx::wgmma_wait_group<0>();                                                  // @dp-complete-wide
    arrived(dS);
    VisibleQueries<V> visible;
    if constexpr (kMasked) visible = VisibleQueries<V>(g.mask, q0, key0);
    AccTile<16, M> P;
    FragA<T, 16, M> rP, rdS;
    #pragma unroll
    for (int k = 0; k < M / 16; ++k) {
        #pragma unroll
        for (int j = 2 * k; j < 2 * k + 2; ++j) {
            RowStats stats;
            stats.load(stats_at, j);
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                const ptx::u32 pair = waiting.x[k][0][j % 2 * 2 + e / 2];
                const float p_ij = kUnit * (e % 2 ? Fp16::hi(pair) : Fp16::lo(pair));  // @p-of-the-pair-wide
                float &x = dS.x[0][j][e];
                const float ds_ij = p_ij * (x - stats.delta(e % 2));
                const bool seen = !kMasked || visible(j, e);  // @what-is-seen-wide
                P.x[0][j][e] = seen ? p_ij : 0.f, x = seen ? ds_ij : 0.f;
            }
        }
        rP.from(P, k), rdS.from(dS, k);
    }
    issue_nn<T, M>(g.dK, rdS, sQ);  // dK += dS^T Q
    issue_nn<T, M>(g.dV, rP, sdO);  // dV += P^T dO
    g.hand_over(rdS);
    ptx::wgmma_wait_group<0>();  // @dk-and-dv-complete-wide
    arrived(g.dV), arrived(g.dK);
    arrive_warp(g.smem.empty(ring.stage));  // @visit-released-wide
}

#endif  // CUPYFLASH_BWD_WIDE_SM90_CUH
