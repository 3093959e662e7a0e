// Parts of a result into the result: of the teams of a block, of the blocks of a cluster, of ranges and splits.
#ifndef CUPYFLASH_PARTS_CUH
#define CUPYFLASH_PARTS_CUH
#include "decode/rows.cuh"
#include "attention/sink.cuh"

// Four neighbouring elements.
template <class T>
__device__ __forceinline__ void store4(T *to, const float (&x)[4]) {
    const ptx::u32 low = T::pack(x[0], x[1]), high = T::pack(x[2], x[3]);
    *reinterpret_cast<ptx::u64 *>(to) = low | static_cast<ptx::u64>(high) << 32;
}
__device__ __forceinline__ void store4(float *to, const float (&x)[4]) {
    *reinterpret_cast<ptx::U128 *>(to) = bits_of(x);
}
__device__ __forceinline__ void store4(Fp32 *to, const float (&x)[4]) { store4(&to->raw, x); }
// Which four columns of which row of a tile the i-th are.
template <int D>
struct Element {
    int col, row, head;
    __device__ Element(int i, int rows) : col(i % (D / 4) * 4), row(i / (D / 4) % rows), head(i / (D / 4) / rows) {}
};

// Four columns of a row of O as a sum of parts that have each their own maximum.
struct PartialSum {
    float top = -ptx::infinity(), sum = 0.f, x[4] = {};

    // kCount parts at once: maximum, sum of exponentials, columns of O.
    template <int kCount>
    __device__ void add(const float (&m)[kCount], const float (&l)[kCount], const float (&o)[kCount][4], float factor) {
        float above = top;
        #pragma unroll
        for (int i = 0; i < kCount; ++i) above = fmaxf(above, m[i]);
        const float base = finite_or_zero(above), mine = ptx::ex2((top - base) * factor);
        top = above, sum *= mine;
        #pragma unroll
        for (int c = 0; c < 4; ++c) x[c] *= mine;
        #pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float weight = ptx::ex2((m[i] - base) * factor);
            sum = fmaf(weight, l[i], sum);
            #pragma unroll
            for (int c = 0; c < 4; ++c) x[c] = fmaf(weight, o[i][c], x[c]);
        }
    }
    // The result: O and, once a row, lse. A row that saw nothing is zero. Whether all four are finite (repair_decode.cuh).
    template <class V>
    __device__ bool store(const PackedRows<V> &rows, int head, int row, int col) {
        using T = typename V::Element;
        const DecodeParams &p = rows.p;
        const auto sink = Sink<V>::of(p, rows.sequence, rows.head_q(head, row));
        float lse = fmaf(top, p.shares.unit, ptx::lg2(sum) * kLn2), by = 1.f / sum;
        if constexpr (Sink<V>::kAny) {
            lse = sink.logit;
            if (sum != 0.f) sink.join(top * p.shares.unit, sum, lse, by);  // @sink-joins-once
        }
        if (sum == 0.f) by = 0.f;
        #pragma unroll
        for (int c = 0; c < 4; ++c) x[c] *= by;
        store4(static_cast<T *>(p.o) + rows.at(p.o_stride, head, row) + col, x);
        if (p.lse && col == 0) rows.lse(head, row) = lse;
        return fabsf(x[0]) + fabsf(x[1]) + fabsf(x[2]) + fabsf(x[3]) < ptx::infinity();
    }
};

// Elements [begin, end) of a tile's result, as far as there are so many, from parts [first, last], of which place(r) says
// where they begin, in rows. By all kThreads of a block; scratch: 24 bytes each. Whether this thread's are finite.
template <class V, int kThreads, class Place>
__device__ __forceinline__ bool combine_parts(const PackedRows<V> &rows, int first, int last, Place place, int begin,
                                              int end, ptx::u32 scratch) {
    constexpr int D = V::kHeadDimV, kAtOnce = 4;  // 64 registers for most: four blocks a multiprocessor
    const DecodeParams &p = rows.p;
    const float factor = p.shares.unit * kLog2e;
    end = min(end, V::kHeads * rows.count * (D / 4));
    // Where there are more threads than elements, several share one.
    const int count = end - begin, shares = max(1, min(kThreads / max(1, count), ceil_div(last - first + 1, 2)));
    bool finite = true;
    #pragma unroll 1
    for (int i = ptx::thread_index(); i < count * shares; i += kThreads) {
        const Element<D> e(begin + i % count, rows.count);
        PartialSum result;
        #pragma unroll 1
        for (int r0 = first + i / count; r0 <= last; r0 += kAtOnce * shares) {
            float m[kAtOnce], l[kAtOnce], o[kAtOnce][4];
            #pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const int r = r0 + j * shares;
                m[j] = -ptx::infinity(), l[j] = 0.f;
                ptx::U128 part{};
                if (r <= last) {
                    const long long from = place(r) + e.head * V::kBlockM + e.row;
                    m[j] = p.partial_ml[2 * from], l[j] = p.partial_ml[2 * from + 1];
                    part = *reinterpret_cast<const ptx::U128 *>(p.partial_o + from * D + e.col);
                }
                #pragma unroll
                for (int c = 0; c < 4; ++c) o[j][c] = ptx::uint_as_float(part.x[c]);
            }
            result.add(m, l, o, factor);
        }
        if (shares == 1) {
            finite = result.store(rows, e.head, e.row, e.col) && finite;
        } else {
            ptx::st_shared_v4_b32(scratch + 16 * i, bits_of(result.x));
            ptx::st_shared_v2_f32(scratch + 16 * kThreads + 8 * i, result.top, result.sum);
        }
    }
    if (shares == 1) return finite;
    ptx::bar_sync();  // @shares-of-an-element-are-there
    if (const int own = ptx::thread_index(); own < count) {
        PartialSum result;
        #pragma unroll 1
        for (int i = own; i < count * shares; i += count) {
            float m[1], l[1], o[1][4];
            ptx::ld_shared_v4_f32(o[0], scratch + 16 * i);
            ptx::ld_shared_v2_f32(m[0], l[0], scratch + 16 * kThreads + 8 * i);
            result.add(m, l, o, factor);
        }
        const Element<D> e(begin + own, rows.count);
        finite = result.store(rows, e.head, e.row, e.col);
    }
    return finite;
}

// Combines what the blocks of a cluster have of the same tile: leave(element) is what a block has of it.
template <class V>
struct DecodeCluster {
    static constexpr int kElementBytes = 32;  // four columns, maximum, sum
    ptx::u32 base;                            // of shared memory that is free by now

    __device__ void leave(int element, const PartialSum &part) const {
        ptx::st_shared_v4_b32(base + element * kElementBytes, bits_of(part.x));
        ptx::st_shared_v2_f32(base + element * kElementBytes + 16, part.top, part.sum);
    }
    // By all blocks and threads of the cluster: elements [begin, end) by this block. Whether this thread's are finite.
    __device__ bool combine(const PackedRows<V> &rows, int begin, int end) const {
        ptx::barrier_cluster_arrive();
        ptx::barrier_cluster_wait();  // @parts-of-the-cluster-are-there
        bool finite = true;
        #pragma unroll 1
        for (int i = begin + ptx::thread_index(); i < end; i += 32 * V::kWarps) {
            float m[V::kCluster], l[V::kCluster], o[V::kCluster][4];
            #pragma unroll
            for (int r = 0; r < V::kCluster; ++r) {
                const ptx::u32 from = ptx::mapa(base + i * kElementBytes, r);
                ptx::ld_shared_cluster_v4_f32(o[r], from);
                ptx::ld_shared_cluster_v2_f32(m[r], l[r], from + 16);
            }
            PartialSum result;
            result.add(m, l, o, rows.p.shares.unit * kLog2e);
            const Element<V::kHeadDimV> e(i, rows.count);
            finite = result.store(rows, 0, e.row, e.col) && finite;
        }
        ptx::barrier_cluster_arrive();
        ptx::barrier_cluster_wait();  // nobody leaves while others read what it has left
        return finite;
    }
};

#endif  // CUPYFLASH_PARTS_CUH
