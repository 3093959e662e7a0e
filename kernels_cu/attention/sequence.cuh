// Sequences: which rows of the arrays belong together, and where they lie. Nothing else reads lengths.
//
//     dense    every sequence of the batch has seqlen_q queries and seqlen_k keys, and lies one batch stride behind the one
//              before.
//     packed   (V::kPacked) the sequences lie one behind the other: of q number b has rows [cu_seqlens_q[b],
//              cu_seqlens_q[b + 1]), of k and v those of cu_seqlens_k, of which the first seqused_k[b] count where that is
//              given. Problem's batch is the number of sequences, its seqlen_q and seqlen_k are the totals. Rows behind the
//              last sequence are one more, in which no query sees a key: their results are then written too.
//
// Either way kv_range, where it is given, leaves of the keys that count those from kv_range[b][0] to kv_range[b][1], counted
// from the sequence's own key 0. Where masks are aligned does not change.
//
// Packed tiles need no more than the totals to be counted: those of kRows rows of sequence b are numbered from
// cu_seqlens[b] / kRows + b on. That leaves room for all, since ceil(length / kRows) is at most the difference of two such
// numbers, with a gap here and there that holds no rows. The same numbers place what a padded array holds of a sequence.
//
// Whatever the lengths on the device say, rows stay within the totals: what is out of range is clamped.
#ifndef CUPYFLASH_SEQUENCE_CUH
#define CUPYFLASH_SEQUENCE_CUH
#include "attention/params.cuh"
#include "hw/ptx.cuh"
#include "tile/sizes.cuh"

// Element offset of row 0 of one head.
__device__ __forceinline__ long long head_offset(const Strides &s, int batch, int head) {
    return batch * s.batch + head * s.head;  // @batches-lie-apart
}

// One sequence of the batch.
template <bool kPacked>
struct Sequence {
    int index;               // in the batch
    int seqlen_q, seqlen_k;  // its queries, and the keys that count
    int row_q, row_k;        // packed: its first rows in the arrays
    int rows_k;              // its keys, also those that do not count

    template <class Params>
    __device__ static Sequence of(const Params &p, int index) {
        const Problem &problem = p.problem;
        if constexpr (!kPacked) {
            return {index, problem.seqlen_q, problem.seqlen_k, 0, 0, problem.seqlen_k};
        } else {
            return between(p, index, start_q(p, index), start_q(p, index + 1), start_k(p, index),
                           start_k(p, index + 1));
        }
    }

    // Of its head: where query 0 and key 0 lie, in elements.
    __device__ long long q_offset(const Strides &s, int head) const { return offset(s, head, row_q); }
    __device__ long long k_offset(const Strides &s, int head) const { return offset(s, head, row_k); }
    // As TMA counts: the index in the arrays' batch dimension (rows start at row_q and row_k).
    __device__ int batch() const { return kPacked ? 0 : index; }  // @packed-is-one-batch
    // Of query 0 in lse, [batch, heads_q, seqlen_q] or [heads_q, total_q].
    __device__ long long lse_row(const Problem &p, int head_q) const {
        if constexpr (kPacked) return static_cast<long long>(head_q) * p.seqlen_q + row_q;  // @lse-of-its-rows
        else return static_cast<long long>(index * p.heads_q + head_q) * p.seqlen_q;        // @lse-of-its-sequence
    }
    // The number of the query tile of kRows rows that begins with query 0, in padded arrays.
    template <int kRows>
    __device__ long long query_tile(const Problem &p, int head_q) const {
        if constexpr (kPacked)  // @query-tiles-of-its-sequence
            return static_cast<long long>(head_q) * blocks<kRows>(p, p.seqlen_q) + first_tile<kRows>(row_q, index);
        else return static_cast<long long>(index * p.heads_q + head_q) * ceil_div(p.seqlen_q, kRows);
    }

    // Packed: the number of the tile that begins with the first row of sequence b.
    template <int kRows>
    __device__ static int first_tile(int row, int b) {
        return row / kRows + b;
    }
    // How many tiles of kRows rows one head has at most: `rows` queries or keys of a sequence, or in all if packed.
    template <int kRows>
    __device__ static int blocks(const Problem &p, int rows) {
        return kPacked ? rows / kRows + p.batch + 1 : ceil_div(rows, kRows);  // @tiles-of-rows-outside
    }
    // How many sequences have tiles of their own.
    __device__ static int count(const Problem &p) { return kPacked ? 1 : p.batch; }

    // Packed: the sequence that tile `number` of kRows rows belongs to, of Rows as schedule.cuh has them, by one warp: the last
    // one whose tiles start at or before it. Each round of 32 lanes leaves a part of 32; the last one has its edges already.
    template <class Rows, int kRows, class Params>
    __device__ static Sequence find(const Params &p, int number) {
        const Problem &problem = p.problem;
        const int lane = ptx::thread_index() % 32;
        const auto starts = [&](int edge, int b) { return first_tile<kRows>(edge, b) <= number; };
        int first = 0, count = problem.batch + 1;
        while (count > 31) {  // @last-round-has-its-edges
            const int step = ceil_div(count, 32), i = lane * step, b = first + min(i, count - 1);
            const int edge = Rows::kAreQueries ? start_q(p, b) : start_k(p, b);
            // @last-part-that-starts-before
            const int last = step * (ptx::popc(ptx::vote_ballot(i < count && starts(edge, b))) - 1);
            first += last, count = min(step, count - last);
        }
        const int b = first + min(lane, count);
        const int edge_q = start_q(p, b), edge_k = start_k(p, b);  // @edges-of-the-keys
        const bool before = lane < count && starts(Rows::kAreQueries ? edge_q : edge_k, b);
        const int last = ptx::popc(ptx::vote_ballot(before)) - 1;
        const auto at = [&](int edge, int i) { return ptx::shfl_index(edge, i); };
        return between(p, first + last, at(edge_q, last), at(edge_q, last + 1), at(edge_k, last), at(edge_k, last + 1));
    }

    // Packed: where sequence b starts and the one before it ends, in q and in k; clamped, b is at most batch + 1.
    template <class Params>
    __device__ static int start_q(const Params &p, int b) {
        return edge_of(p.cu_seqlens_q, b, p.problem.batch, p.problem.seqlen_q);
    }
    template <class Params>
    __device__ static int start_k(const Params &p, int b) {
        return edge_of(p.cu_seqlens_k, b, p.problem.batch, p.problem.seqlen_k);
    }

  private:
    template <class Edges>
    __device__ static int edge_of(Edges cu_seqlens, int b, int batch, int total) {
        // @edges-within-the-rows
        return b == 0 ? 0 : b > batch ? total : max(0, min(cu_seqlens[b], total));
    }
    template <class Params>
    __device__ static Sequence between(const Params &p, int index, int row_q, int end_q, int row_k, int end_k) {
        const int rows_k = max(0, end_k - row_k);
        int used = index < p.problem.batch ? rows_k : 0;  // @no-keys-outside
        // @keys-that-count
        if (p.seqused_k && index < p.problem.batch) used = max(0, min(used, p.seqused_k[index]));
        return {index, max(0, end_q - row_q), used, row_q, row_k, rows_k};
    }
    __device__ long long offset(const Strides &s, int head, int row) const {
        if constexpr (kPacked) return row * s.row + head * s.head;  // @rows-of-its-sequence
        else return head_offset(s, index, head);
    }
};

// With the range of keys that its queries may see, in kernels that have any.
template <bool kPacked>
struct RangedSequence : Sequence<kPacked> {
    int first_key = 0, end_key = 0;

    template <class Params>
    __device__ RangedSequence(const Sequence<kPacked> &s, const Params &p) : Sequence<kPacked>(s) {
        if (s.index >= p.problem.batch) return;  // behind the last sequence no key counts @no-range-outside
        see(p.kv_range[2 * s.index], p.kv_range[2 * s.index + 1]);
    }
    __device__ RangedSequence(const Sequence<kPacked> &s, int first, int end) : Sequence<kPacked>(s) {
        see(first, end);
    }

  private:
    __device__ void see(int from, int to) {
        const int first = max(0, from), end = min(this->seqlen_k, to);  // @range-within-the-keys
        if (first < end) first_key = first, end_key = end;              // @no-key-in-range
    }
};
template <bool kPacked, bool kRanged>
struct SequenceForm {
    using Type = Sequence<kPacked>;
};
template <bool kPacked>
struct SequenceForm<kPacked, true> {
    using Type = RangedSequence<kPacked>;
};
template <class V>
using SequenceOf = typename SequenceForm<V::kPacked, V::kKvRange>::Type;

template <class V, class Params>
__device__ __forceinline__ SequenceOf<V> with_range(const Sequence<V::kPacked> &s, const Params &p) {
    if constexpr (V::kKvRange) return {s, p};
    else return s;
}

#endif  // CUPYFLASH_SEQUENCE_CUH
