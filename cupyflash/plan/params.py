"""The kernels' launch parameters: NumPy dtypes that mirror `kernels_cu/attention/params*.cuh` field by field.

The generated entry units assert the sizes when they compile; `tests/kernels/test_params.py` compares the fields.
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
        ("last_section", "i4"),
        ("first_stores", "i4"),
        ("scale", "f4"),
        ("softcap", "f4"),
    ],
    align=True,
)


def _params(pointers: str, strided: str) -> np.dtype[np.void]:
    addresses = [(name, np.dtype("u8")) for name in pointers.split()]
    strides = [(f"{name}_stride", STRIDES) for name in strided.split()]
    return np.dtype([*addresses, *strides, ("problem", PROBLEM)], align=True)


TENSOR_MAP = np.dtype(("u8", 16))  # the driver's CUtensorMap: 128 bytes
FWD_PARAMS = _params("q k v o lse", "q k v o")
BWD_PARAMS = _params("q k v o dout lse dlse dq dk dv row_stats dq_accum dq_turn", "q k v o dout dq dk dv")


def _with_maps(names: str, plain: np.dtype[np.void], *more: str) -> np.dtype[np.void]:
    """A struct that begins with tensor maps, which are aligned to 64 bytes, and so is its size."""
    maps = [(f"map_{name}", TENSOR_MAP) for name in names.split()]
    fields = np.dtype([*maps, ("plain", plain), *((name, np.dtype("u8")) for name in more)], align=True)
    offsets = [fields.fields[name][1] for name in fields.names or ()] if fields.fields else []
    formats = [fields[name] for name in fields.names or ()]
    size = -(-fields.itemsize // 64) * 64
    return np.dtype({"names": list(fields.names or ()), "formats": formats, "offsets": offsets, "itemsize": size})


FWD_SM90_PARAMS = _with_maps("q k v o", FWD_PARAMS, "counter", "clocks")
BWD_SM90_PARAMS = _with_maps("q k v dout dq dk dv", BWD_PARAMS, "counter")
