"""Calls over caches that grow by concatenation, as transformers' DynamicCache does: those of each token are longer.

A call that is prepared serves the caches of the tokens that follow: how long they are, and how they lie then, is
written into its params where it was written for its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..arrays.vetting import vet_memory
from ..cache.problem import CacheProblem
from ..gpu import tensormap
from ..plan.decode_kernels import DecodeSm90
from ..plan.decode_shares import DecodePlan
from .cached_params import DECODE_MEMBERS, Batched, box_map

_CACHES = ("k_cache", "v_cache")
_KEYS = 256  # of caches that end in the same piece of so many keys the plan is that of the first one
Lies = tuple[int, tuple[int, ...], tuple[int, ...]]  # keys, and the strides of K and of V, in elements


class Room(NamedTuple):
    """How long caches are and how they lie, and their tensor maps, if there are any."""

    lies: Lies
    maps: tuple[np.ndarray, ...]


class Growing:
    """What is written into the params of a call whose caches grow.

    Attributes:
        kind: what it has in common with others.
        own: what it was prepared for; room: what its params say now.
    """

    def __init__(self, problem: CacheProblem, plan: DecodePlan, params: np.ndarray, lies: Lies) -> None:
        self.kind = replace(problem, capacity=0), plan
        self._problem, self._tile, self._params = problem, plan.variant.tile, params
        self._maps = [f"map_{DECODE_MEMBERS[name]}" for name in _CACHES] if isinstance(plan.variant, DecodeSm90) else []
        self._plain = params["plain"] if self._maps else params
        self.own = self.room = Room(lies, tuple(params[name].copy() for name in self._maps))

    @classmethod
    def of(
        cls, p: CacheProblem, plan: DecodePlan, params: np.ndarray, strides: Mapping[str, tuple[int, ...]]
    ) -> Growing | None:
        """None where more than the caches' shape would have to follow.

        Args:
            params: of the main kernel.
            strides: of the arrays.
        """
        # Rows that are appended in place, and pages, lie in caches that stay as they are.
        stays = p.seqlen_new or p.page_size is not None or not p.slots
        counts_on_it = p.by_element or p.batch_invariant or p.num_splits is not None or plan.variant.unaligned
        lies = p.capacity, strides["k_cache"], strides["v_cache"]
        return None if stays or counts_on_it else cls(p, plan, params, lies)

    def fitting(self, k: Any, v: Any) -> Room | None:
        """What to write for caches, tensors that differ from those of the call in keys and strides at most; None: they
        are another call's.

        Raises:
            ArgumentError: they reach beyond their memory.
        """
        n = k.shape[1]
        lies = n, k.stride(), v.stride()
        if lies == self.room.lies and v.shape[1] == n:
            return self.room
        is_near = v.shape[1] == n and -(-n // _KEYS) == -(-self._problem.capacity // _KEYS)
        itemsize = self._problem.itemsize
        if not is_near or not all(tensormap.readable(x.shape, x.stride(), itemsize) for x in (k, v)):
            return None
        for name, x in zip(_CACHES, (k, v), strict=True):
            vet_memory(name, x)
        maps = self._maps_of(lies)
        return None if None in maps else Room(lies, tuple(m[0] for m in maps if m))

    def _maps_of(self, lies: Lies) -> list[tuple[np.ndarray, int] | None]:
        capacity, *strides = lies
        if not self._maps:
            return []
        p = self._problem
        of_k, of_v = (box_map(p, self._tile, d, own, capacity) for d, own in zip(p.widths, strides, strict=True))
        found = tensormap.anywhere(of_k)
        return [found, found if of_v == of_k else tensormap.anywhere(of_v)]

    def write(self, room: Room) -> None:
        """Where it is not there yet; the addresses of the caches must follow."""
        if room is self.room:
            return
        capacity, *strides = room.lies
        plain = self._plain
        plain["problem"]["seqlen_k"] = plain["max_seqlen_k"] = capacity
        for name, own in zip(_CACHES, strides, strict=True):
            plain[f"{DECODE_MEMBERS[name]}_stride"] = tuple(Batched.of(own))
        for name, words in zip(self._maps, room.maps, strict=True):
            self._params[name] = words
        self.room = room
