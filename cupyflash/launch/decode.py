"""The launches of attention over a cache on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..arrays.adapters import Signature
from ..cache.problem import CacheProblem
from ..errors import UnsupportedError
from ..gpu.device import Device


class CacheCall(Protocol):
    """A call that is ready but for the addresses of its arrays.

    Attributes:
        copied: those of q, k and v that must be contiguous and are not.
        made: (shape, dtype) of workspaces.
    """

    copied: Sequence[str]
    made: Sequence[tuple[tuple[int, ...], str]]

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Queue the append and the attention; nothing waits. Addresses in the order of names, then of `made`."""


def prepare(
    problem: CacheProblem,
    names: Sequence[str],
    signatures: Mapping[str, Signature],
    device: Device,
    *,
    aligned: bool,
    stream: int,
) -> CacheCall:
    """The call for arrays of these signatures.

    Args:
        names: the arrays given, in the order of `CACHE_ARRAYS`, then out and lse, which are contiguous.
        signatures: of the arrays given.
        aligned: whether q, k, v and the caches lie at multiples of 16 bytes.

    Raises:
        UnsupportedError: no kernels take it; the message says why.
        CompileError: NVRTC refused one.
    """
    raise UnsupportedError(
        f"k_cache: attention over a cache on {device.name} has no kernels yet; give arrays in host memory, or give the "
        "keys in use to `attention`"
    )
