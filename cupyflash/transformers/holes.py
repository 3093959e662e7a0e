"""Padding masks that are not one range of keys a sequence: found without waiting for the GPU.

On the CPU a look tells, and such a mask is answered. On a GPU the answer would have to be waited for, at each forward,
though such masks are rare (a prompt padded on the right that goes on, a prefix before padding on the left). There the
kernel that makes the ranges leaves its verdict in host memory: the attention calls and masks that come next look there,
without waiting, and raise an error; at exit it is waited for. From then on, or from the start with
``register(check_masks=True)``, masks are looked at before they are used.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import warnings

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..torch.followed import assert_later

_MESSAGE = (
    "attention_mask: a mask of this forward or an earlier one hides keys between others, and what was computed with it "
    "is wrong: throw it away and repeat it. From now on masks are looked at before they are used, which waits for the "
    "GPU at each forward; call cupyflash.transformers.register(check_masks=True) to have that from the start"
)

_are_masks_checked = False
_told = ctypes.c_int(0)  # not 0: a verdict is bad. Where GPUs may write, once they were asked
_asked: set[int] = set()  # the GPUs that were


def check_masks(always: bool) -> None:
    """Whether masks on a GPU are looked at before they are used."""
    global _are_masks_checked
    _are_masks_checked = always


def are_checked() -> bool:
    return _are_masks_checked


def found_in(padding: Tensor) -> bool:
    """Whether a row of (batch, keys) of bool is more than one range; compiled, that is an error of the device."""
    if torch.compiler.is_compiling():
        assert_later(~_are_there(padding), "attention_mask: expected one range of keys that count in each row")
        return False
    return padding.numel() > 0 and bool(_are_there(padding))


def _are_there(padding: Tensor) -> Tensor:
    """A bool on the device: whether in some row keys begin to count more than once."""
    changes = padding.diff(dim=1).sum(1)  # two begin and end what counts between others, or what does not
    return (changes + padding[:, 0] > 2).any()


@functools.cache
def _host_word() -> Tensor:
    """One that GPUs can write."""
    global _told
    word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    _told = ctypes.c_int.from_address(word.data_ptr())
    return word


def verdict_of(ordinal: int) -> int:
    """Where a kernel on this GPU leaves a 1 if it finds one: an address that it can write."""
    _asked.add(ordinal)
    return _host_word().data_ptr()


def look() -> None:
    """Hear of the verdicts that have come.

    Raises:
        UnsupportedError: one is bad.
    """
    if not torch.compiler.is_compiling() and _told.value:
        _told.value = 0
        check_masks(True)
        raise UnsupportedError(_MESSAGE)


@atexit.register
def _look_at_exit() -> None:
    """Wait for what is left, so that the last forward is not left out."""
    for ordinal in _asked:
        torch.cuda.synchronize(ordinal)
    if _told.value:
        warnings.warn(_MESSAGE, UserWarning, stacklevel=1)
