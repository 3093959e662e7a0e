"""Padding masks that are not one range of keys a sequence: found without waiting for the GPU.

On the CPU a look tells, and such a mask is answered. On a GPU the answer would have to be waited for, at each forward,
though such masks are rare (a prompt padded on the right that goes on, a prefix before padding on the left). There the
verdict follows by itself: the attention calls and masks that come next look whether it is there, without waiting, and
if it is bad raise an error; at exit it is waited for. From then on, or from the start with
``register(check_masks=True)``, masks are looked at before they are used.
"""

from __future__ import annotations

import atexit
import threading
import warnings
from collections import deque
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..torch.followed import assert_later

_MESSAGE = (
    "attention_mask: a mask of this forward or an earlier one hides keys between others, and what was computed with it "
    "is wrong: throw it away and repeat it. From now on masks are looked at before they are used, which waits for the "
    "GPU at each forward; call cupyflash.transformers.register(check_masks=True) to have that from the start"
)

_lock = threading.Lock()
_verdicts: deque[tuple[Any, Tensor]] = deque()  # an event and, in host memory once it has happened, whether it is bad
_are_masks_checked = False


def check_masks(always: bool) -> None:
    """Whether masks on a GPU are looked at before they are used."""
    global _are_masks_checked
    _are_masks_checked = always


def found_in(padding: Tensor) -> bool:
    """Whether a row of (batch, keys) of bool is known to be more than one range."""
    if torch.compiler.is_compiling():
        assert_later(~_are_there(padding), "attention_mask: expected one range of keys that count in each row")
        return False
    if padding.numel() == 0:
        return False
    if padding.device.type != "cuda" or _are_masks_checked:
        return bool(_are_there(padding))
    look()
    if not torch.cuda.is_current_stream_capturing():
        _ask(_are_there(padding))
    return False


def _are_there(padding: Tensor) -> Tensor:
    """A bool on the device: whether in some row keys begin to count more than once."""
    changes = padding.diff(dim=1).sum(1)  # two begin and end what counts between others, or what does not
    return (changes + padding[:, 0] > 2).any()


def _ask(bad: Tensor) -> None:
    """Have a verdict sent to host memory."""
    verdict = torch.empty((), dtype=torch.bool, pin_memory=True)
    verdict.copy_(bad, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    with _lock:
        _verdicts.append((event, verdict))


def look() -> None:
    """Hear the verdicts that have come.

    Raises:
        UnsupportedError: one is bad.
    """
    if not torch.compiler.is_compiling() and _verdicts and _is_one_bad():
        check_masks(True)
        raise UnsupportedError(_MESSAGE)


def _is_one_bad() -> bool:
    """Whether one is bad of the verdicts that have come, which are forgotten."""
    bad = False
    with _lock:
        while _verdicts and _verdicts[0][0].query():
            bad |= bool(_verdicts.popleft()[1])
    return bad


@atexit.register
def _look_at_exit() -> None:
    """Wait for what is left, so that the last forward is not left out."""
    if _verdicts:
        _verdicts[-1][0].synchronize()
        if _is_one_bad():
            warnings.warn(_MESSAGE, UserWarning, stacklevel=1)
