// Which keys of a tile the columns of an accumulator are whose rows are queries. A lane counts from its own first key: the keys
// of its columns lie behind it at distances that the compiler knows. With t = lane % 4 it holds the columns 8 j + 2 t + e, e < 2.
#ifndef CUPYFLASH_KEY_ORDER_CUH
#define CUPYFLASH_KEY_ORDER_CUH

// Column c is key c: a lane holds two neighbours of every eight keys.
struct KeysInOrder {
    static constexpr int kNeighbours = 2;

    __device__ static int of_lane(int lane) { return 2 * (lane % 4); }
    __device__ static int of_column(int col) { return col; }
    __device__ static int row_of(int key) { return key; }
};

// Of N columns, column i N / 4 + 2 T + e is key 8 T + 2 i + e, where i < 4 and e < 2: a lane holds eight neighbours of every 32
// keys, T = 4 j + t, and reads what is added to their scores at once. The rows of K and V lie in this order
// (SwizzledTile::load_interleaved, SmemTile::load_async), so that the products do not know of it.
template <int N>
struct InterleavedKeys {
    static_assert(N % 32 == 0);
    static constexpr int kNeighbours = 8;

    __device__ static int of_lane(int lane) { return 8 * (lane % 4); }  // @first-of-eight-keys
    // @key-of-an-interleaved-column
    __device__ static int of_column(int col) { return col % (N / 4) / 8 * 32 + col / (N / 4) * 2 + col % 8; }
    // Where a key of a block lies in a tile of K or V. @row-of-an-interleaved-key
    __device__ static int row_of(int key) { return key % 8 / 2 * (N / 4) + key / 8 * 2 + key % 2; }
};

#endif  // CUPYFLASH_KEY_ORDER_CUH
