"""The contestant `copy` of `bench --decode`: a kernel that reads K and V, and what reading alone reaches thereby."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from cupyflash.compile import jit, nvrtc
from cupyflash.gpu.device import Device

from .clocks import Work
from .cycles import LIBRARIES
from .decode_arrays import arrays
from .decode_cell import COPY, DecodeCell
from .work import Bench

# 8 loads of 16 bytes in flight a thread: 128 KiB a multiprocessor. Without the 2 the compiler keeps 3 in flight.
THREADS, BLOCKS_PER_SM = 512, 2
VECTOR_BYTES = 16
# All of both arrays, once each, n vectors of K and m of V. What is read decides whether something is written, so all of
# it is read; of random numbers it practically never is.
SOURCE = """
extern "C" __global__ void __launch_bounds__(512, 2) read_both(
    const uint4 *__restrict__ k, const uint4 *__restrict__ v, unsigned long long n, unsigned long long m,
    unsigned *found) {
    const unsigned long long step = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
    unsigned sum = 0;
    for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n || i < m; i += 4 * step) {
        uint4 x[8];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned long long at = i + j * step;
            x[2 * j] = at < n ? k[at] : uint4{0, 0, 0, 0};
            x[2 * j + 1] = at < m ? v[at] : uint4{0, 0, 0, 0};
        }
        #pragma unroll
        for (int j = 0; j < 8; ++j) sum ^= x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
    }
    if (sum == 0x9e3779b9) *found = 1;
}
"""


def read_both(bench: Bench, cell: DecodeCell) -> Work:
    """A launch that reads as many bytes of K and V as the cell counts, from their beginnings on."""
    given, library = arrays(bench, cell), LIBRARIES[type(bench.clock)]
    found = bench.array(np.zeros(1, np.int32))
    both = cell.bytes_of(COPY) // VECTOR_BYTES
    of_k = both * cell.head_dim // sum(cell.widths)
    addresses = [library.pointer(x) for x in (given["k_cache"], given["v_cache"], found)]
    values = np.array([*addresses[:2], of_k, both - of_k, addresses[2]], np.uint64)
    parameters = (ctypes.c_void_p * len(values))(
        *(values.ctypes.data + values.itemsize * i for i in range(len(values)))
    )
    function, blocks = loaded()
    kept = given, found, values  # whose addresses the launch has

    def run() -> Any:
        facts = function.ptr, blocks, 1, 1, THREADS, 1, 1, 0
        jit.launcher()(*facts, library.stream(0), ctypes.addressof(parameters), 0)
        return kept

    return run


@functools.cache
def loaded() -> tuple[Any, int]:
    """The kernel on the first GPU, CuPy's function, and how many blocks fill it."""
    import cupy

    device = Device.of(0)
    with cupy.cuda.Device(0):
        module = cupy.cuda.Module()
        module.load(compiled(device.arch)[0])
        return module.get_function("read_both"), BLOCKS_PER_SM * device.sm_count


def compiled(arch: str) -> tuple[bytes, str]:
    """The cubin, and what the compiler says of it."""
    compiler = nvrtc.find()
    options = f"-arch={jit.target_arch(arch, compiler)}", "-std=c++17", "--ptxas-options=-v"
    return compiler.compile(SOURCE, "read_both.cu", {}, options)
