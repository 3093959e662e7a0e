// The functions that the twins of ptx*.cuh call. A kernel unit sees this header and nothing else of the runtime.
#ifndef EMULATOR_API_H
#define EMULATOR_API_H
#include <stddef.h>
#include <stdint.h>

// Where in the kernel sources something happens: the caller of a ptx:: wrapper.
struct EmuSite {
    const char *file;
    int line;
};

// What a CUDA thread can ask about itself. Clusters lie along x; kernels use one dimension.
struct EmuThread { int thread, block, threads, blocks, cluster_rank; };

extern "C" {
extern EmuThread *emu_self;  // the thread that is running

// Whether a bug of the headers is alive (tests/emulator/shared.py).
bool emu_planted(int number);

// Launches that overlap: waits for those in front of this one to end; lets the one behind it start.
void emu_wait_for_launches();
void emu_start_dependents();

// Shared memory. An address is (rank of the block in its cluster) << 18 | offset.
uint32_t emu_smem_base();
void emu_ld_shared(uint32_t addr, uint32_t bytes, void *out, EmuSite site);
void emu_st_shared(uint32_t addr, uint32_t bytes, const void *in, EmuSite site);

// Barriers of a block, and of a warp. threads < 0: the whole block. Returns the disjunction of `value` (kind 2).
enum { kEmuBarArrive = 0, kEmuBarSync = 1, kEmuBarRedOr = 2 };
bool emu_bar(int id, int threads, int kind, bool value, EmuSite site);
void emu_bar_warp_sync(EmuSite site);
uint32_t emu_ballot(bool p, EmuSite site);
uint32_t emu_shfl(uint32_t value, int source_lane, EmuSite site);
bool emu_elect(EmuSite site);

// Matrix fragments. count: number of 8x8 matrices. type: of the A and B elements.
enum { kEmuF16 = 0, kEmuBf16 = 1, kEmuTf32 = 2 };
void emu_ldmatrix(uint32_t *r, int count, uint32_t addr, bool trans, EmuSite site);
void emu_stmatrix(uint32_t addr, const uint32_t *r, int count, bool trans, EmuSite site);
void emu_mma(float *d, const uint32_t *a, const uint32_t *b, int k, int type, EmuSite site);

// cp.async.
void emu_cp_async(uint32_t dst, const void *src, int bytes, bool valid, EmuSite site);
void emu_cp_async_commit();
void emu_cp_async_wait(int pending);

// Global memory shared between blocks.
int emu_ld_acquire(const int *p, EmuSite site);
int emu_ld_relaxed(const int *p, EmuSite site);
void emu_st_release(int *p, int x, EmuSite site);
int emu_atomic_add_s32(int *p, int x, bool acquire_release, EmuSite site);
void emu_red_add_f32(float *p, const float *x, int count, EmuSite site);
void emu_nanosleep(EmuSite site);

// mbarrier. tx: bytes to expect besides the arrival, -1 for none.
void emu_mbarrier_init(uint32_t bar, uint32_t count, EmuSite site);
void emu_mbarrier_arrive(uint32_t bar, int64_t tx, EmuSite site);
void emu_mbarrier_wait(uint32_t bar, uint32_t parity, EmuSite site);
void emu_fence_proxy_async();

// TMA and bulk copies. Kinds 0-2 take a tensor map, 3-5 plain addresses.
enum { kEmuLoad = 0, kEmuStore = 1, kEmuReduce = 2, kEmuLoad1d = 3, kEmuStore1d = 4, kEmuReduce1d = 5, kEmuToPeer = 6 };
int emu_tensor_map_encode(void *out, int dims, int element_bytes, void *base, const uint64_t *sizes,
                          const uint64_t *strides_bytes, const uint32_t *box, int swizzle);
void emu_tma(int kind, uint32_t smem, const void *map, uint32_t bar, const int *coordinates, int dims,
             uint32_t multicast, EmuSite site);
void emu_bulk(int kind, uint32_t smem, void *global, uint32_t bytes, uint32_t peer, uint32_t bar, EmuSite site);
void emu_bulk_commit();
void emu_bulk_wait(int pending, bool read_only);

// wgmma. a: the A fragments in registers, or null.
void emu_wgmma(float *d, int n, const uint32_t *a, uint64_t desc_a, uint64_t desc_b, bool accumulate, bool a_mn_major,
               bool b_mn_major, int type, EmuSite site);
void emu_wgmma_fence(EmuSite site);
void emu_wgmma_commit(EmuSite site);
void emu_wgmma_wait(int pending, EmuSite site);
void emu_setmaxnreg(int registers, EmuSite site);

// Numbers.
float emu_f16_to_f32(uint16_t x);
uint16_t emu_f32_to_f16(float x);

// Clusters.
uint32_t emu_mapa(uint32_t addr, uint32_t rank, EmuSite site);
void emu_cluster_arrive(EmuSite site);
void emu_cluster_wait(EmuSite site);
}
#endif
