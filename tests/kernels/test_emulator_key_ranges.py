"""Ranges of keys from padding masks, on the CPU under the race detector, beside what NumPy finds in the masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from cupyflash.plan.key_ranges import KEY_RANGE_PARAMS, KEY_RANGES
from cupyflash.plan.params import UNBOUNDED
from tests.emulator import MODES, EmulatorError
from tests.emulator.attention import kernel_of, small_device
from tests.emulator.launch import Memory
from tests.emulator.require import require_compiler
from tests.planted.mutants import Bug
from tests.planted.mutants_masks import KEY_RANGES as BUGS

require_compiler()

# (keys, what `rows` makes of them, how many are in use, the place of one query, its window)
CASES: dict[str, tuple[int, tuple[Any, ...], int, int | None, tuple[int | None, int | None]]] = {
    "left": (300, ((0, 300), (70, 300), (299, 300)), 300, None, (None, None)),
    "right": (300, ((0, 1), (0, 299), (0, 32), (0, 33)), 300, None, (None, None)),
    "none": (40, ((0, 0), (3, 3), (0, 40)), 40, None, (None, None)),
    "used": (300, ((0, 300), (200, 300), (10, 120)), 123, None, (None, None)),
    "window": (300, ((0, 300), (90, 300), (200, 300), (0, 95)), 151, 150, (40, 0)),
    "both sides": (300, ((0, 300), (120, 300), (0, 145)), 300, 150, (20, 30)),
    "long": (9000, ((4500, 9000), (0, 8191), (8999, 9000)), 9000, None, (None, None)),
    "holes": (300, ((0, 300), (20, 31, 40, 300)), 300, None, (None, None)),
    "holes far apart": (5000, ((0, 1, 4999, 5000),), 5000, None, (None, None)),
}


def rows(keys: int, edges: tuple[tuple[int, ...], ...]) -> Any:
    """A mask whose rows begin and end to count at these keys."""
    found = np.zeros((len(edges), keys), bool)
    for row, pairs in zip(found, edges, strict=True):
        for start, end in zip(pairs[::2], pairs[1::2], strict=True):
            row[start:end] = True
    return found


def launched(
    mask: Any,
    batch: int,
    used: int,
    place: int | None,
    window: tuple[int | None, int | None],
    mode: str = "race",
    is_on_device: bool = False,
    headers: Mapping[str, str] | None = None,
) -> tuple[Any, bool]:
    """The ranges, and whether a row was found broken; without a mask nothing is padding."""
    params = np.zeros((), KEY_RANGE_PARAMS)
    with Memory() as memory:
        params["ranges"], ranges = memory.output("ranges", (batch, 2), np.int32)
        params["broken"], broken = memory.output("broken", (1,), np.int32)
        broken[0] = 0
        if mask is not None:
            params["shown"], params["shown_stride"] = memory.input("shown", mask), mask.strides[0]
        if is_on_device:
            params["first_at"] = memory.input("first_at", np.array([place], np.int64))
        params["first"] = -7 if is_on_device or place is None else place
        params["keys"], params["used"] = used if mask is None else mask.shape[1], used
        params["left"], params["right"] = (UNBOUNDED if n is None else n for n in window)
        kernel = kernel_of(KEY_RANGES, small_device("sm_80"), headers)
        kernel(batch, KEY_RANGES.threads, KEY_RANGES.smem_bytes, [params], MODES[mode])
        return ranges.copy(), bool(broken[0])


def seen(mask: Any, used: int, place: int | None, window: tuple[int | None, int | None]) -> Any:
    """Which keys count, each by itself."""
    j = np.arange(mask.shape[1])
    left, right = window
    at = place or 0
    near = (j >= at - left if left is not None else j >= 0) & (j <= at + right if right is not None else j >= 0)
    return mask & near & (j < used)


def check(name: str, **more: Any) -> None:
    keys, edges, used, place, window = CASES[name]
    mask = rows(keys, edges)
    whole = np.zeros((len(edges), keys + 13), np.uint8)  # rows of a longer mask, at any address; any byte but 0 counts
    whole[:, 5 : 5 + keys] = np.where(mask, np.random.default_rng(0).integers(1, 256, mask.shape), 0)
    found, is_broken = launched(whole[:, 5 : 5 + keys], len(edges), used, place, window, **more)
    assert is_broken == name.startswith("holes")
    j = np.arange(keys)
    for row, edge, (start, end) in zip(seen(mask, used, place, window), edges, found, strict=True):
        if len(edge) == 2:
            np.testing.assert_array_equal((start <= j) & (j < end), row)
        assert 0 <= start <= end <= used


@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, is_on_device: bool) -> None:
    check(name, is_on_device=is_on_device and CASES[name][3] is not None)


@pytest.mark.parametrize("mode", ["any", "starve", "lanes"])
def test_results_do_not_depend_on_the_schedule(mode: str) -> None:
    check("window", mode=mode)


@pytest.mark.parametrize("place", [None, 30])
def test_without_a_mask_all_keys_in_use_count(place: int | None) -> None:
    window = (None, None) if place is None else (10, 0)
    found, is_broken = launched(None, 3, 50, place, window, is_on_device=place is not None)
    assert found.tolist() == [[0, 50] if place is None else [20, 31]] * 3
    assert not is_broken


def test_random_masks(seed: int) -> None:
    """Of one range in each row, and those that have more, which are told."""
    rng = np.random.default_rng(seed)
    for _ in range(5):
        keys, batch = int(rng.integers(1, 2500)), int(rng.integers(1, 4))
        edges = np.sort(rng.integers(0, keys + 1, (batch, 4)))
        mask = rows(keys, tuple(map(tuple, edges)))
        is_broken = (np.diff(mask, axis=1, prepend=False, append=False).sum(1) > 2).any()
        used = int(rng.integers(1, keys + 1))
        found, told = launched(mask, batch, used, None, (None, None))
        assert told == is_broken
        if not told:
            j = np.arange(keys)
            of_ranges = (found[:, :1] <= j) & (j < found[:, 1:])
            np.testing.assert_array_equal(of_ranges, seen(mask, used, None, (None, None)))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_planted_bug_is_found(bug: Bug) -> None:
    with pytest.raises((EmulatorError, AssertionError), match=bug.finds or None):
        check(bug.case, headers=bug.headers())
