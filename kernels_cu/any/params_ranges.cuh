// Launch-time arguments of key_ranges.cuh. Made from cupyflash/plan/key_ranges.py, by
// `python -m tools.params`; the generated entry unit asserts the sizes.
#ifndef CUPYFLASH_PARAMS_RANGES_CUH
#define CUPYFLASH_PARAMS_RANGES_CUH

struct KeyRangeParams {
    const void *shown;          // [batch, keys], a byte each: 0 is padding; null: nothing is
    const long long *first_at;  // [1]: the place of the one query; null: first
    int *ranges;                // [batch, 2]
    int *broken;                // becomes 1 where keys that count have others between them
    long long shown_stride;     // from one sequence to the next
    int keys, used;             // of them; those behind do not count
    int first, left, right;     // of the window around the one query, or kUnbounded; several queries: both are
};

#endif  // CUPYFLASH_PARAMS_RANGES_CUH
