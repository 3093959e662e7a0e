"""The kernels' launch parameters: NumPy dtypes that mirror `kernels_cu/params*.cuh` field by field.

The generated entry units assert the sizes when they compile; `tests/test_params.py` compares names, order and offsets.
"""

from __future__ import annotations

import numpy as np

UNBOUNDED = 1 << 30  # kUnbounded: a window side without bound

STRIDES = np.dtype([("batch", "i8"), ("row", "i8"), ("head", "i8")], align=True)
PROBLEM = np.dtype(
    [
        ("batch", "i4"),
        ("seqlen_q", "i4"),
        ("seqlen_k", "i4"),
        ("heads_q", "i4"),
        ("heads_k", "i4"),
        ("window_left", "i4"),
        ("window_right", "i4"),
        ("section", "i4"),
        ("scale", "f4"),
    ],
    align=True,
)


def _params(pointers: str, strided: str) -> np.dtype[np.void]:
    addresses = [(name, np.dtype("u8")) for name in pointers.split()]
    strides = [(f"{name}_stride", STRIDES) for name in strided.split()]
    return np.dtype([*addresses, *strides, ("problem", PROBLEM)], align=True)


TENSOR_MAP = np.dtype(("u8", 16))  # the driver's CUtensorMap: 128 bytes
FWD_PARAMS = _params("q k v o lse", "q k v o")
FWD_SM90_PARAMS = np.dtype(
    [
        *((f"map_{name}", TENSOR_MAP) for name in "qkvo"),
        ("plain", FWD_PARAMS),
        ("counter", "u8"),
        ("clocks", "u8"),
    ],
    align=True,
)
BWD_PARAMS = _params("q k v o dout lse dlse dq dk dv row_stats dq_accum dq_turn", "q k v o dout dq dk dv")
