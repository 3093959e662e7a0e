// Where rows of k and v lie. In pages (V::kPaged; packed sequences alone) those that sequence.cuh counts are the table's: sequence
// b has page_size of them for each of its entries, one after the other, and row r of all is row r % page_size of page
// block_table[r / page_size]. Whatever the table says, nothing outside of the arrays is read.
#ifndef CUPYFLASH_PAGES_CUH
#define CUPYFLASH_PAGES_CUH
#include "attention/sequence.cuh"
#include "tile/tile.cuh"

constexpr int kMostKeys = 1 << 29;  // of any sequence

// Lengths as sequence.cuh asks for them. Of keys in pages, each sequence has its part of the table, of which seqused_k[b] were
// in use before as many were appended as lie between its edges of cu_seqlens_k.
template <class Params>
struct PagedSequences {
    struct Edges {
        int step;
        __device__ int operator[](int b) const { return b * step; }
    };
    struct Used {
        const Params &p;
        int capacity;
        __device__ operator bool() const { return true; }
        __device__ int operator[](int b) const {
            const int used = max(0, min(p.seqused_k[b], capacity));  // @used-within-the-capacity
            // Where as many are new as there are queries, those that are appended: edges within the rows of q.
            const int end = p.cu_seqlens_k == p.cu_seqlens_q ? p.problem.seqlen_q : kMostKeys;
            const auto edge = [&](int i) { return i ? max(0, min(p.cu_seqlens_k[i], end)) : 0; };  // @edges-of-new-keys
            return used + max(0, edge(b + 1) - edge(b));  // @keys-with-the-new-ones-paged
        }
    };
    const Problem &problem;
    const Schedule &schedule;
    const int *cu_seqlens_q;
    Edges cu_seqlens_k;
    Used seqused_k;

    __device__ explicit PagedSequences(const Params &p)
        : problem(p.problem),
          schedule(p.schedule),
          cu_seqlens_q(p.cu_seqlens_q),
          cu_seqlens_k{p.problem.seqlen_k / p.problem.batch},
          seqused_k{p, cu_seqlens_k.step} {}
};
template <class V, class Params>
__device__ __forceinline__ decltype(auto) sequences_of(const Params &p) {
    if constexpr (V::kPaged) return PagedSequences<Params>(p);
    else return (p);
}

// Whether a sequence is none of the forward's: one of few queries is left to attention over a cache, as are rows of no sequence.
template <class V, class Params>
__device__ __forceinline__ bool is_left_out(const Params &p, const Sequence<V::kPacked> &s) {
    if constexpr (V::kPaged)
        return s.seqlen_q < V::kLeastQueries || s.index >= p.problem.batch;  // @few-queries-left-out-sm80
    else return false;
}

struct PageRow { int page, row; };

template <class Params>
__device__ __forceinline__ PageRow page_row(const Params &p, int row) {
    const int entry = row / p.page_size;
    return {p.block_table[entry], row - entry * p.page_size};  // @page-of-the-row
}

// The rows of one head of a sequence, from column 0 on: key `key` is behind + key * step().
template <class V, bool kPaged = V::kPaged>
struct KeyRows {
    using T = typename V::Element;
    const T *behind;
    const Strides &stride;

    template <class Params>
    __device__ KeyRows(const Params &, const void *x, const Strides &stride, const Sequence<V::kPacked> &s, int head)
        : behind(static_cast<const T *>(x) + s.k_offset(stride, head)), stride(stride) {}
    __device__ const T *row(int key) const { return behind + key * stride.row; }
    __device__ const T *from_column(int col) const { return behind + col; }
    __device__ long long step() const { return stride.row; }
};
template <class V>
struct KeyRows<V, true> {
    using T = typename V::Element;
    struct Behind {
        const KeyRows &rows;
        int col;
        __device__ const T *operator+(long long key) const { return rows.row(key) + col; }
    };
    const FwdParams &p;
    const T *x;
    const Strides &stride;
    const int row0;

    __device__ KeyRows(const FwdParams &p, const void *x, const Strides &stride, const Sequence<true> &s, int head)
        : p(p), x(static_cast<const T *>(x) + head * stride.head), stride(stride), row0(s.row_k) {}
    __device__ const T *row(int key) const {
        const PageRow at = page_row(p, row0 + key);
        const int page = max(0, min(at.page, p.pages - 1));  // @page-within-the-array
        return x + page * stride.batch + at.row * stride.row;
    }
    __device__ Behind from_column(int col) const { return {*this, col}; }
    __device__ int step() const { return 1; }
};

// Rows [row0, row0 + Tile::kRows) of k or v into shared memory by cp.async, as SmemTile::load_async brings rows that lie one behind
// the other; those from n_rows on become zero. A lane looks up where 16 rows lie, which all are then told.
template <int kThreads, int kColumns, class V, class Tile>
__device__ __forceinline__ void load_pages_async(const Tile &tile, const FwdParams &p, const void *x,
                                                 const Strides &stride, const Sequence<true> &s, int head, int row0,
                                                 int n_rows) {
    using T = typename V::Element;
    constexpr int kUnit = 16, kPer = Tile::kPer, kChunks = Tile::kChunks, kLanesPerRow = next_power_of_two(kChunks);
    constexpr int kRowsPerPass = kThreads / kLanesPerRow, kPassesPerUnit = ceil_div(kUnit, kRowsPerPass);
    static_assert(Tile::kRows % kUnit == 0 && Tile::kRows / kUnit <= 32);
    static_assert(kUnit % kRowsPerPass == 0 || kRowsPerPass % kUnit == 0);
    const int unit = fresh_lane() * kUnit;
    long long own = 0;  // where the first of this lane's rows lies
    // @units-that-exist
    if (unit < Tile::kRows && row0 + unit < n_rows) {
        const PageRow at = page_row(p, s.row_k + row0 + unit);
        own = max(0, min(at.page, p.pages - 1)) * stride.batch + at.row * stride.row;  // @page-within-the-array-sm80
    }
    const ptx::u32 thread = fresh_thread();
    const int chunk = thread % kLanesPerRow, first = thread / kLanesPerRow;
    const T *const behind = static_cast<const T *>(x) + head * stride.head + first % kUnit * stride.row + kPer * chunk;
    long long of_unit = 0;
    #pragma unroll
    for (int pass = 0; pass < ceil_div(Tile::kRows, kRowsPerPass); ++pass) {
        const int row = first + pass * kRowsPerPass, in_unit = pass % kPassesPerUnit;
        if (in_unit == 0) {
            const int from = row / kUnit;  // @page-of-the-unit
            of_unit =
                static_cast<long long>(static_cast<ptx::u64>(ptx::shfl_index(static_cast<int>(own >> 32), from)) << 32 |
                                       static_cast<ptx::u32>(ptx::shfl_index(static_cast<int>(own), from)));
        }
        if (row >= Tile::kRows || chunk >= kChunks) continue;
        // @rows-of-a-page-that-exist
        ptx::cp_async_16(tile.at(row, kPer * chunk), behind + (of_unit + in_unit * kRowsPerPass * stride.row),
                         row0 + row < n_rows && kPer * chunk < kColumns);
    }
}

#endif  // CUPYFLASH_PAGES_CUH
