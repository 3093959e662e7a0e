// Which keys a query sees. Causal, sliding window and the ragged ends are one rule, aligned at the bottom right:
//     query i sees key j  <=>  i + lower <= j <= i + upper  and  start_k <= j < end_k,
//     lower = seqlen_k - seqlen_q - window_left, upper = seqlen_k - seqlen_q + window_right.
// [start_k, end_k) are the keys of the sequence that count: [0, seqlen_k), or its range of them.
#ifndef CUPYFLASH_MASK_CUH
#define CUPYFLASH_MASK_CUH
#include "attention/schedule.cuh"

template <class V>
struct Mask {
    static constexpr bool kHides = V::kCausal || V::kWindow;  // whether a query may see fewer than all keys
    static_assert(V::kWindow || !V::kKvRange, "what is cut to a range of keys is a window, though one without bounds");
    static constexpr int M = V::kBlockM, N = V::kBlockN;
    int seqlen_q, start_k, end_k, lower, upper;  // start_k: kKvRange only

    __device__ Mask(const SequenceOf<V> &s, const Problem &p)
        : seqlen_q(s.seqlen_q),
          start_k(0),
          end_k(s.seqlen_k),
          lower(s.seqlen_k - s.seqlen_q - p.window_left),
          upper(s.seqlen_k - s.seqlen_q + (V::kCausal ? 0 : p.window_right)) {
        if constexpr (V::kKvRange) start_k = s.first_key, end_k = s.end_key;
    }

    // The keys that query qi sees: [first_key(qi), end_key(qi)), both non-decreasing in qi; nothing if first >= end.
    __device__ int first_key(int qi) const { return V::kWindow ? max(start(), qi + lower) : 0; }  // @first-key
    __device__ int end_key(int qi) const { return kHides ? min(end_k, qi + upper + 1) : end_k; }  // @end-key
    __device__ bool counts(int ki) const {
        // @key-in-range
        if constexpr (V::kKvRange) return static_cast<ptx::u32>(ki - start_k) < static_cast<ptx::u32>(end_k - start_k);
        else return ki < end_k;
    }
    __device__ bool sees(int qi, int ki) const {
        return counts(ki) && (!kHides || ki - qi <= upper) && (!V::kWindow || ki - qi >= lower);
    }
    // The same of a query that there is: its causal bound lies within the keys. @causal-diagonal
    __device__ bool row_sees(int qi, int ki) const { return V::kCausal ? ki - qi <= upper : sees(qi, ki); }
    // The queries that see key ki: [first_query(ki), end_query(ki)), both non-decreasing in keys that count.
    __device__ int first_query(int ki) const { return kHides ? max(0, ki - upper) : 0; }  // @first-query
    __device__ int end_query(int ki) const { return counts(ki) ? end_query_of(ki) : 0; }
    __device__ bool sees_nothing(int qi) const { return first_key(qi) >= end_key(qi); }

    // The same mask counted from query q and key k on. A lane that counts from its own first element compares
    // compile-time offsets with these four numbers.
    __device__ Mask from(int q, int k) const {
        Mask m = *this;
        m.seqlen_q -= q, m.start_k -= k, m.end_k -= k, m.lower += q - k, m.upper += q - k;
        return m;
    }

    // Whether all queries of [q0, q0 + M) see all keys of [k0, k0 + N), so that no element needs a test. @whole-block
    __device__ bool full(int q0, int k0) const { return k0 >= first_key(q0 + M - 1) && k0 + N <= end_key(q0); }

    // Key blocks as the queries [q0, q0 + M) see them, from the first to the last: hidden up to first_key_block; in part
    // up to first_full_block; in full up to end_full_block; in part up to end_key_block; hidden. Segments may be empty, and
    // where the full ones are, those in part may overlap.
    __device__ int first_key_block(int q0) const { return first_key(q0) / N; }
    // @last-key-block
    __device__ int end_key_block(int q0) const { return ceil_div(max(0, end_key(min(q0 + M, seqlen_q) - 1)), N); }

    __device__ int first_full_block(int q0) const { return ceil_div(first_key(q0 + M - 1), N); }  // @first-whole-block
    __device__ int end_full_block(int q0) const { return max(0, end_key(q0)) / N; }               // @first-cut-block

    // Backward: the half-open range of query blocks that see some key of [k0, k0 + N). May be empty.
    __device__ int first_query_block(int k0) const { return first_query(k0) / M; }
    // @last-query-block
    __device__ int end_query_block(int k0) const { return ceil_div(max(0, end_query_of(min(k0 + N, end_k) - 1)), M); }
    // Whether some key of [k0, k0 + N) counts: if not, there are no such query blocks. kAllCount: whether that holds for
    // every tile of keys.
    // @blocks-that-count
    __device__ bool some_count(int k0) const { return k0 < end_k && (!V::kKvRange || k0 + N > start_k); }
    static constexpr bool kAllCount = !V::kPacked && !V::kKvRange;

  private:
    __device__ int start() const { return V::kKvRange ? start_k : 0; }
    // Of a key that counts. @end-query
    __device__ int end_query_of(int ki) const { return V::kWindow ? min(seqlen_q, ki - lower + 1) : seqlen_q; }
};

// The 64 rows of one warpgroup of a tile, for Mask.
template <class V>
struct OneGroup : V {
    static constexpr int kBlockM = 64;
};

// The 64 keys of one warpgroup, likewise.
template <class V>
struct GroupKeys : V {
    static constexpr int kBlockN = 64;
};

#endif  // CUPYFLASH_MASK_CUH
