"""What a plan chooses for the numbers of a call, its extents, once its kernels are known.

It is done for every call with lengths not seen before: a few microseconds of arithmetic.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..errors import UnsupportedError
from ..gpu.device import Device
from ..problem import ITEMSIZE
from .first_shares import StoredFirst
from .kernels import Convert, Slopes, round_up
from .lists import Ahead, KeyLists, block_mask_of, own_tiles
from .numbers import ByLengths as ByLengths
from .numbers import Chosen as Chosen
from .numbers import Extents as Extents
from .numbers import Numbers as Numbers
from .numbers import Workspace as Workspace
from .sections import Sections
from .shares import divide
from .spec import Spec
from .splits import in_parts
from .variant import Variant

MAX_GRID = 2**31 - 1


def blocks(n: int, size: int) -> int:
    return -(-n // size)


def _too_many(over: str, tiles: int) -> UnsupportedError:
    return UnsupportedError(f"{over}: expected at most {MAX_GRID} tiles of work, got {tiles}; split the batch")


@dataclass(frozen=True)
class Kernels:
    """The kernels of a call, in launch order, whatever its extents.

    Attributes:
        mixed_bytes: how much of the operands that are streamed (K and V; Q, dO and dQ) heads scheduled together have.
        stored_first: where dQ's accumulator need not be cleared.
    """

    variants: tuple[Variant, ...]
    spec: Spec
    device: Device
    mixed_bytes: int
    stored_first: StoredFirst

    def grid(self, variant: Variant, tiles: int) -> int:
        """How many blocks compute so many tiles."""
        return min(tiles, self.device.sm_count) if variant.persistent else tiles

    def numbers(self, extents: Extents) -> Numbers:
        """What is chosen for a call of these extents.

        Raises:
            UnsupportedError: if it has too many tiles of work.
        """
        return Numbers(*self.by_lengths(extents)(extents.seqlen_q, extents.seqlen_k))

    def by_lengths(self, extents: Extents) -> ByLengths:
        """What gives the `numbers` of extents that differ from these in seqlen_q and seqlen_k alone."""
        batch, _, _, *others = extents
        if not self.spec.backward and not self.spec.block_mask:
            return self._forward(extents)

        def numbers(seqlen_q: int, seqlen_k: int) -> Numbers:
            own = Extents(batch, seqlen_q, seqlen_k, *others)
            tiles = self._tiles(own)
            if self.spec.backward:
                return self._backward(own, tiles)
            found = Numbers(*self._forward(own)(seqlen_q, seqlen_k))
            tiles = tiles[: -len(found.tiles)] + found.tiles
            return found._replace(tiles=tiles, workspace=self._lists(own) | found.workspace)

        return numbers

    @functools.cached_property
    def _rows(self) -> list[tuple[str, int]]:
        return [(variant.over, variant.rows) for variant in self.variants]

    @functools.cached_property
    def _computing(self) -> list[Variant]:
        """All but those that make a block mask and lists: a forward's main kernel; a backward's three and those of
        features."""
        return [variant for variant in self.variants if not isinstance(variant, Ahead)]

    @functools.cached_property
    def _sections(self) -> Sections:
        spec, sm_count = self.spec, self.device.sm_count
        main, *last = self._computing[1:] if spec.backward else self._computing
        in_turn = spec.deterministic and bool(last) and isinstance(last[0], Convert)
        at_once = sm_count * main.tile.blocks_per_sm
        return Sections.of(self.mixed_bytes, sm_count, at_once, uneven=spec.uneven, in_turn=in_turn)

    @functools.cached_property
    def _pair_bytes(self) -> int:  # of a row of K and one of V, or of Q and of dO
        return (self.spec.head_dim + self.spec.width_v) * ITEMSIZE[self.spec.dtype]

    def _tiles(self, extents: Extents) -> tuple[int, ...]:
        """Tiles of work of each launch."""
        batch, seqlen_q, seqlen_k, heads_q, heads_k, _, _ = extents
        arrays, found, more = (1, [], batch + 1) if self.spec.packed else (batch, [], 0)
        for over, rows in self._rows:  # as `_blocks` has it, whose calls cost more than the rest
            if over == "q":
                tiles = (seqlen_q // rows + more if more else -(-seqlen_q // rows)) * heads_q * arrays
            elif over == "k":
                tiles = (seqlen_k // rows + more if more else -(-seqlen_k // rows)) * heads_k * arrays
            else:
                tiles = self._tiles_of_feature(over, rows, extents)
            if tiles > MAX_GRID:
                raise _too_many(over, tiles)
            found.append(tiles)
        return tuple(found)

    def _tiles_of_feature(self, over: str, rows: int, extents: Extents) -> int:
        """Those of a launch that is there for a feature."""
        if over == "mask_tiles":
            return math.prod(own_tiles(self.spec, extents))
        if over in ("key_lists", "query_lists"):
            length = extents.seqlen_q if over == "key_lists" else extents.seqlen_k
            return math.prod(self._list_owners(extents)) * self._blocks(length, rows, extents.batch)
        if over == "slopes":
            return extents.heads_q * (extents.batch if self.spec.alibi == 2 else 1)
        if over == "sinks":
            return extents.heads_q
        if over == "bias":
            return self._bias_tiles(extents)
        assert over == "elements", over
        return blocks(max(math.prod(self.spec.mod_shapes[i]) for i in self.spec.dmods), rows)

    def _bias_tiles(self, extents: Extents) -> int:
        """Tiles of a bias's gradient: one along each dimension along which it is broadcast (bwd_dbias.cuh)."""
        tile = next(variant.tile for variant in self.variants if variant.over == "bias")
        seqlen_q, seqlen_k = extents.longest(self.spec.packed)
        rows = blocks(seqlen_q, tile.block_m), blocks(seqlen_k, tile.block_n)  # type: ignore[attr-defined]
        counts = extents.batch, extents.heads_q, *rows
        assert self.spec.dbias is not None
        return math.prod(n if own else 1 for n, own in zip(counts, self.spec.dbias, strict=True))

    def _blocks(self, length: int, rows: int, batch: int) -> int:
        """Tiles of `rows` of one head of a sequence; packed, room for those of all sequences (sequence.cuh)."""
        return length // rows + batch + 1 if self.spec.packed else -(-length // rows)

    def _list_owners(self, extents: Extents) -> tuple[int, int]:
        """How many sequences and heads of q have lists of their own (blocks.cuh); packed, their tiles are counted
        together."""
        own = self.spec.block_mask - 1
        has_batch = (own % 2 or self.spec.kv_range or not extents.batch) and not self.spec.packed
        return (extents.batch if has_batch else 1), (extents.heads_q if own // 2 else 1)

    def _lists(self, extents: Extents) -> Workspace:
        """The lists of a block mask that is there, and the block mask of a mask, by name."""
        found = block_mask_of(self.spec, extents) if self.spec.mask_tiles else {}
        longest_q, longest_k = extents.longest(self.spec.packed)
        for variant in self.variants:
            if isinstance(variant, KeyLists):
                m, n = variant.tile.block_m, variant.tile.block_n
                if variant.over == "key_lists":
                    lists = self._blocks(extents.seqlen_q, m, extents.batch), 1 + blocks(longest_k, n)
                else:
                    lists = self._blocks(extents.seqlen_k, n, extents.batch), 1 + 2 * blocks(longest_q, m)
                found[variant.over] = (*self._list_owners(extents), *lists), "int32"
        return found

    def _of_one(self, n: int, extents: Extents) -> int:
        """Of what all sequences of a head have, what one has: packed, on average, since nobody here knows lengths."""
        return n // max(1, extents.batch) if self.spec.packed else n

    def _forward(self, extents: Extents) -> ByLengths:
        """Main alone, or in parts. K and V are streamed, so a group's query heads go together."""
        batch, _, _, heads_q, heads_k, _, _ = extents
        divides, rows = len(self._computing) > 1, self._computing[0].rows
        is_packed, group = self.spec.packed, heads_q // heads_k
        arrays, more, heads = (1, batch + 1, heads_k) if is_packed else (batch, 0, heads_k * batch)
        bytes_per_key, all_heads, sections = self._pair_bytes, heads_q * arrays, self._sections
        of_one = max(1, batch) if is_packed else 1  # packed, on average, since nobody here knows lengths

        def numbers(seqlen_q: int, seqlen_k: int) -> Chosen:
            blocks = seqlen_q // rows + more if more else -(-seqlen_q // rows)
            tiles = blocks * all_heads
            if tiles > MAX_GRID:
                raise _too_many("q", tiles)
            section, last = sections(seqlen_k // of_one * bytes_per_key, heads, blocks // of_one * group)
            found = section * group, last * group, False, 1
            if divides:
                own = extents._replace(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
                return in_parts(self._computing, self.device, own, tiles, *found)
            return (tiles,), {}, *found, 1

        return numbers

    def _backward(self, extents: Extents, tiles: tuple[int, ...]) -> Numbers:
        """Lists of a block mask, if there is one; delta, main, conversion of dQ; or delta, dK and dV, dQ; then the
        gradients of slopes, sinks, a bias and arrays of mods, if wanted. Q, dO and a fp32 sum of dQ are streamed.
        """
        delta, main, last, *sums = self._computing
        batch, seqlen_q, seqlen_k, heads_q, heads_k, _, _ = extents
        arrays = 1 if self.spec.packed else batch  # over how many sequences tiles are counted by themselves
        workspace, shares = self._lists(extents) if self.spec.block_mask else {}, 1
        if self.spec.grouped:
            visits = blocks(self._of_one(seqlen_q, extents), main.block_m)
            shares, tiles = divide(self.variants, self.device, self.spec, extents, visits, tiles)
            heads_k *= shares
            if shares > 1:
                for name, width in (("dk_shares", self.spec.head_dim), ("dv_shares", self.spec.width_v)):
                    workspace[name] = (arrays, heads_k, seqlen_k, width), "fp32"
        m_blocks, n_blocks = self._blocks(seqlen_q, main.block_m, batch), self._blocks(seqlen_k, main.rows, batch)
        row_bytes = (self._pair_bytes + 4 * self.spec.head_dim) * (heads_q // heads_k)
        workspace["row_stats"] = (arrays, heads_q, m_blocks * main.block_m, 2), "fp32"
        workspace |= {"key_tiles": ((n_blocks, 8), "int32")} if delta.constants.get("listed_rows") else {}
        first_stores, most_heads = 0, arrays * heads_k
        if isinstance(last, Convert):
            limit, stored, most_heads = self.stored_first
            first_stores = stored if self._of_one(seqlen_k, extents) <= limit else 0
            columns = round_up(self.spec.head_dim, 16 * last.tile.split_d)
            workspace["dq_accum"] = (arrays, heads_q, m_blocks, main.block_m * columns), "fp32"
            if self.spec.deterministic or first_stores:
                workspace["dq_turn"] = (arrays, heads_q, m_blocks), "int32"
                if self.spec.packed:
                    workspace["lengths_contradict"] = (1,), "int32"
        for variant in sums:
            if isinstance(variant, Slopes):
                rows = seqlen_k if variant.tile.over_keys else seqlen_q
                parts = self._blocks(rows, variant.rows, batch), variant.tile.parts
                workspace["dalibi_parts"] = ((arrays, heads_q, *parts), "fp32")
        for i in self.spec.dmods:
            workspace[f"dmod_sums_{i}"] = (math.prod(self.spec.mod_shapes[i]),), "fp32"
        streamed = self._of_one(seqlen_q, extents) * row_bytes
        # Without a mask, key blocks begin apart where the first one stores (dq_visits.cuh).
        apart = first_stores and not (self.spec.masked or self.spec.packed)
        least = 1 if apart else self._sections.in_turn
        sections = self._sections(streamed, arrays * heads_k, self._of_one(n_blocks, extents), least, most_heads)
        return Numbers(tiles, workspace, *sections, first_stores=first_stores, shares=shares)
