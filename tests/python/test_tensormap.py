"""Tensor maps without a driver: what one says of an array, which arrays TMA can read, where a map keeps its address."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyflash.arrays.adapters import Signature
from cupyflash.gpu import tensormap
from cupyflash.gpu.device import Device
from cupyflash.gpu.tensormap import TensorMap
from cupyflash.launch.filled import fill
from cupyflash.launch.passes import contiguous_strides, given_of
from cupyflash.operands import FORWARD
from cupyflash.plan.families import plan_call
from cupyflash.plan.params import FWD_PARAMS, FWD_SM90_PARAMS
from cupyflash.problem import make_problem

MAP = TensorMap("bf16", (128, 300, 4, 2), (1024, 256, 307200), 64)
REFUSED = 1  # CUDA_ERROR_INVALID_VALUE


class Encoder:
    """Stands in for cuTensorMapEncodeTiled: checks the arguments as the driver does, and writes a map.

    `place` puts the address into the 16 words; they are zeros but for the dtype, the sizes and the box.
    """

    def __init__(self, place: Callable[[Any, int], None]) -> None:
        self.place = place
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, to: Any, dtype: Any, rank: Any, address: Any, sizes: Any, strides: Any, box: Any, steps: Any,
        interleave: Any, swizzle: Any, promotion: Any, fill: Any,
    ) -> int:  # fmt: skip
        assert to.value % 64 == 0
        assert (len(sizes), list(steps), interleave.value, fill.value) == (rank.value, [1] * rank.value, 0, 0)
        if address.value % 16 or any(s % 16 or not 0 < s < 1 << 40 for s in strides) or any(n < 1 for n in sizes):
            return REFUSED
        words = (ctypes.c_uint64 * 16).from_address(to.value)
        words[6 : 6 + rank.value] = list(sizes)
        words[12:14] = [box[0] | box[1] << 32, dtype.value]
        self.place(words, address.value)
        self.calls.append({"dtype": dtype.value, "sizes": list(sizes), "strides": list(strides), "box": list(box),
                           "swizzle": swizzle.value})  # fmt: skip
        return 0


def whole(words: Any, address: int) -> None:
    """As drivers do it today: one word is the address."""
    words[0] = address


def scattered(words: Any, address: int) -> None:
    words[0], words[1] = address & 0xFFFFFFFF, address >> 32


def shifted(words: Any, address: int) -> None:
    words[0] = address >> 4


def twice(words: Any, address: int) -> None:
    words[0] = words[3] = address


def shared(words: Any, address: int) -> None:
    """The address and a flag in one word."""
    words[0] = address | 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any, int], None]], Encoder]:
    """Install an encoder."""

    def install(place: Callable[[Any, int], None]) -> Encoder:
        encoder = Encoder(place)
        monkeypatch.setattr(tensormap, "_encoder", lambda: encoder)
        return encoder

    return install


# ---- what a map says ----


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_both_layouts_of_the_same_memory_have_the_same_map(layout: str) -> None:
    """Sizes and strides are in the order head_dim, seqlen, heads, batch, whatever the caller's is."""
    x = np.zeros((2, 300, 4, 128), np.float16)
    y = x if layout == "bshd" else x.swapaxes(1, 2)
    found = TensorMap.of("fp16", y.shape, [s // 2 for s in y.strides], layout, 64)
    assert found == TensorMap("fp16", (128, 300, 4, 2), (x.strides[1], x.strides[2], x.strides[0]), 64)


def test_strides_of_single_elements_are_made_legal() -> None:
    """Frameworks put anything there, 0 and odd numbers included; the driver refuses those."""
    found = TensorMap.of("bf16", (1, 300, 1, 64), (7, 64, 0, 1), "bshd", 64)
    assert found.strides_bytes == (128, 16, 16)


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((2, 300, 4, 64), contiguous_strides((2, 300, 4, 64)), True),
        ((2, 300, 4, 72), contiguous_strides((2, 300, 4, 72)), True),
        ((2, 300, 4, 64), (300 * 3 * 256, 3 * 256, 64, 1), True),  # one of q, k, v packed together
        ((2, 300, 4, 64), (0, 256, 64, 1), False),  # a broadcast batch
        ((1, 300, 4, 64), (0, 256, 64, 1), True),  # of one
        ((2, 300, 4, 64), (76800, 256, 0, 1), False),  # repeated heads
        ((2, 300, 4, 64), (76801, 256, 64, 1), False),  # 2 bytes off a multiple of 16
        ((2, 300, 4, 64), (76800, 260, 64, 1), False),  # 8 bytes off
        ((2, 300, 4, 64), (76800, 264, 64, 1), True),
        ((2, 300, 4, 64), (76800, -256, 64, 1), False),
        ((2, 3, 4, 64), (1 << 39, 256, 64, 1), False),  # 2^40 bytes
        ((2, 3, 4, 64), ((1 << 39) - 8, 256, 64, 1), True),
    ],
)
def test_readable(shape: tuple[int, ...], strides: tuple[int, ...], expected: bool) -> None:
    assert tensormap.readable(shape, strides) is expected


def test_the_driver_takes_what_is_readable(driver: Any) -> None:
    """Every combination of short and long dimensions and of legal and illegal strides; the fake is as strict."""
    driver(whole)
    for lengths in itertools.product((1, 5), repeat=3):
        for steps in itertools.product((0, 7, 64, 512), repeat=3):
            shape, strides = (*lengths, 64), (*steps, 1)
            tensor = TensorMap.of("bf16", shape, strides, "bshd", 64)
            assert (tensormap.encode(tensor, 1 << 32) is not None) == tensormap.readable(shape, strides)


# ---- the driver's maps ----


def test_encode_hands_the_array_to_the_driver(driver: Any) -> None:
    encoder = driver(whole)
    words = tensormap.encode(MAP, 0x7F0000000010)
    assert words is not None
    assert (words.shape, words.dtype, int(words[0])) == ((16,), np.uint64, 0x7F0000000010)
    strides = [1024, 256, 307200]
    assert encoder.calls == [{"dtype": 9, "sizes": [128, 300, 4, 2], "strides": strides, "box": [64, 64, 1, 1],
                              "swizzle": 3}]  # fmt: skip
    assert tensormap.encode(MAP, 0x7F0000000008) is None


@pytest.mark.parametrize(("keys", "step"), [(304, 8192), (8, 16)])
def test_four_copies_of_interleaved_rows_make_a_tile(keys: int, step: int, driver: Any) -> None:
    """Each brings two of every eight rows; the stride of eights says nothing where there is one."""
    encoder = driver(whole)
    tensor = TensorMap("bf16", (128, keys, 4, 2), (1024, 256, 307200), 96, interleaved=True)
    assert tensormap.encode(tensor, 1 << 32) is not None
    assert encoder.calls == [
        {"dtype": 9, "sizes": [128, 8, keys // 8, 4, 2], "strides": [1024, step, 256, 307200],
         "box": [64, 2, 12, 1, 1], "swizzle": 3}
    ]  # fmt: skip


@pytest.mark.parametrize("place", [scattered, shifted, twice, shared])
def test_an_address_that_is_no_single_word_is_not_understood(place: Callable[[Any, int], None], driver: Any) -> None:
    driver(place)
    assert tensormap.encode(MAP, 1 << 32) is not None
    assert tensormap.address_slot(MAP) is None


def test_the_word_of_the_address_is_found(driver: Any) -> None:
    def last(words: Any, address: int) -> None:
        words[15] = address

    driver(whole)
    assert tensormap.address_slot(MAP) == 0
    driver(last)
    assert tensormap.address_slot(MAP) == 15


def test_a_driver_that_refuses_and_none_at_all(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(whole)
    broadcast = TensorMap("bf16", (64, 300, 4, 2), (512, 0, 307200), 64)
    assert tensormap.encode(broadcast, 1 << 32) is None
    assert tensormap.address_slot(broadcast) is None
    monkeypatch.setattr(tensormap, "_encoder", lambda: None)
    assert tensormap.encode(MAP, 1 << 32) is None
    assert tensormap.address_slot(MAP) is None


# ---- the params around them ----


def filled_for(head_dim: int = 64) -> Any:
    """The params of a forward of the sm90 family."""
    signatures = [Signature((2, 300, 4, head_dim), contiguous_strides((2, 300, 4, head_dim)), "bf16", 0)] * 3
    problem = make_problem([s.shape for s in signatures], ["bf16"] * 3)
    chosen = plan_call(problem, Device.synthetic("sm_90"), family="sm90")
    return fill(given_of(FORWARD, ("q", "k", "v")), chosen, problem, signatures, "bshd")


def test_a_call_writes_its_addresses_where_the_kernel_reads_them(driver: Any) -> None:
    """Each address lands in its field, and a map gets the address that the driver would have put in."""
    encoder = driver(whole)
    filled = filled_for()
    maps = {name: filled.params[f"map_{name}"].copy() for name in "qkvo"}
    names = ("q", "k", "v", "out", "lse", "clocks", "counter", "seqused_k")
    words = np.frombuffer(bytearray(filled.params.tobytes()), np.uint64)
    for i, name in enumerate(names):
        for word in filled.words[name]:
            words[word] = 0x7F0000000000 + 256 * (i + 1)
    params, plain = words.view(FWD_SM90_PARAMS)[0], words[filled.plain_bytes // 8 :][: FWD_PARAMS.itemsize // 8]
    assert plain.view(FWD_PARAMS)[0] == params["plain"]
    for i, name in enumerate(names):
        member, address = FORWARD.rows[name].member, 0x7F0000000000 + 256 * (i + 1)
        assert (params if FORWARD.rows[name].hopper else params["plain"])[member] == address
        if member in maps:
            maps[member][0] = address
            np.testing.assert_array_equal(params[f"map_{member}"], maps[member])
    assert params["plain"]["problem"]["seqlen_q"] == 300
    assert {call["box"][1] for call in encoder.calls} == {64}


def test_maps_that_are_not_understood_give_no_params(driver: Any) -> None:
    driver(shifted)
    assert filled_for() is None
