"""Seeds of dropout, as NumPy and CuPy arrays of the table's form: words of 32 bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import options
from ..arrays.adapters import NUMPY, Native
from ..arrays.vetting import vet_type
from ..dropout import missing_seed, vet_seed, words_of
from ..errors import ArgumentError


def words(library: Native, seed: Any, like: Any, draw: bool) -> Any:
    """The words of a seed, on the device of `like`. None: one from NumPy's global generator, where `draw` allows that.

    Raises:
        ArgumentError: it is no seed, or none where one is needed.
    """
    if seed is None and not draw:
        raise missing_seed()
    if not hasattr(type(seed), "dtype"):
        drawn = int.from_bytes(np.random.bytes(8), "little") if seed is None else seed  # noqa: NPY002 (as seeded by users)
        found = words_of(options.whole("dropout_seed", drawn))
        if library is NUMPY:
            return found
        on_device = library.empty((2,), "int32", like)
        with on_device.device:
            on_device.set(found)
        return on_device
    vet_type("dropout_seed", type(seed), np.ndarray, ())
    if isinstance(seed, np.generic):
        return words(library, options.whole("dropout_seed", seed), like, draw)
    if not library.owns(seed):
        raise ArgumentError(f"dropout_seed: expected an integer or an array of {library.name}, got {type(seed)}")
    vet_seed(seed.shape, str(seed.dtype))
    found = library.contiguous(seed).reshape(-1).view(np.int32)
    return found if found.size == 2 else found.reshape(2, 2)
