"""What is kept of a call, and what reaches a launch: on a pretended GPU, where launches are written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, UnsupportedError
from cupyflash.arrays import adapters as arrays
from cupyflash.launch import find, run
from cupyflash.launch import prepared as launch
from cupyflash.launch.checks import check
from cupyflash.launch.kept import Kept
from cupyflash.launch.passes import Given
from cupyflash.operands import FORWARD
from cupyflash.options import make_options
from cupyflash.plan.extents import Extents
from cupyflash.problem import Problem


class Call:
    """A prepared call that writes down what it is asked to launch."""

    def __init__(self, given: Given, problem: Problem, launched: list[Problem]) -> None:
        self.problem, self.launched = problem, launched
        self.order, self.names, self.likes, self.copied = given.order, given.made, given.likes, ()
        self.shaped = self.made = given.shapes(Extents.of(problem), problem.widths, problem.dtype, "bshd")
        self.room, self.forms, self.passing = 0, None, False

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        self.launched.append(self.problem)


class Gpu:
    """Attributes: the problems that were launched, and how many calls were prepared."""

    def __init__(self) -> None:
        self.launched: list[Problem] = []
        self.prepared = 0

    def prepare(
        self, given: Given, library: Any, keys: Any, options: Any, aligned: Any, stream: int, *, vet: Any = None
    ) -> Call:
        if vet:
            vet()
        self.prepared += 1
        return Call(given, check(given.which, given.names, library, keys, options)[0], self.launched)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """All arrays of NumPy and torch seem to lie on GPU 0."""
    found = Gpu()
    for library in (arrays.NUMPY, arrays.TORCH):
        monkeypatch.setattr(library, "signature", lambda x, of=library.signature: (*of(x)[:3], 0))
        monkeypatch.setattr(library, "look", partial(arrays.Numpy.look, library))
        monkeypatch.setattr(library, "stream", lambda device: 0)
    monkeypatch.setattr(find, "prepare", found.prepare)
    monkeypatch.setattr(launch, "calls", Kept(100))
    monkeypatch.setattr(launch, "series", Kept(100))
    return found


@pytest.fixture
def qkv() -> tuple[np.ndarray, ...]:
    return tuple(np.ones((3, 1, 9, 2, 8), np.float16))


def attention_backward(q: Any, k: Any, v: Any, **options: Any) -> Any:
    rows = np.zeros((1, 2, 9), np.float32)
    if not isinstance(q, np.ndarray):
        rows = type(k)(rows)
    return cupyflash.attention_backward(k, q, k, v, k, rows, **options)


both = pytest.mark.parametrize("function", [cupyflash.attention, attention_backward], ids=["forward", "backward"])


@both
def test_options_count_by_value(function: Callable[..., Any], gpu: Gpu, qkv: Any) -> None:
    for scale in (0.5, np.float32(0.5), np.array(0.5), np.array(0.5)):
        for window in ((4, 0), [4, 0], (np.int32(4), np.array(0)), (np.array(4), 0)):
            for causal in (True, np.True_, np.array(True), 1):
                function(*qkv, scale=scale, window=window, causal=causal)
    assert gpu.prepared == 1
    assert len(gpu.launched) == 64


def test_a_call_that_was_planned_is_not_prepared_again(gpu: Gpu, qkv: Any) -> None:
    """As JAX plans them where it traces."""
    names, signatures = ("q", "k", "v"), [arrays.NUMPY.signature(x) for x in qkv]
    find.planned(FORWARD, arrays.NUMPY, names, signatures, make_options(), run.WITH_LSE)
    cupyflash.attention(*qkv, return_lse=True)
    assert gpu.prepared == 1
    assert len(gpu.launched) == 1


@both
def test_an_option_that_changed_in_place(function: Callable[..., Any], gpu: Gpu, qkv: Any) -> None:
    scale, left = np.array(0.5), np.array(4)
    function(*qkv, scale=scale, window=(left, 0))
    scale[...], left[...] = 0.25, 2
    function(*qkv, scale=scale, window=(left, 0))
    assert [(p.scale, p.window) for p in gpu.launched] == [(0.5, (4, 0)), (0.25, (2, 0))]


@both
def test_calls_that_differ_in_softcap_alone(function: Callable[..., Any], gpu: Gpu, qkv: Any) -> None:
    changing = np.array(30.0)
    for softcap in (None, 50.0, changing, 50, np.float32(50)):
        function(*qkv, softcap=softcap)
    changing[...] = 0.5
    function(*qkv, softcap=changing)
    function(*qkv)
    assert [p.softcap for p in gpu.launched] == [None, 50.0, 30.0, 50.0, 50.0, 0.5, None]
    assert gpu.prepared == 4


@pytest.mark.needs("torch")
@both
def test_a_tensor_that_changed_in_place(function: Callable[..., Any], gpu: Gpu, qkv: Any) -> None:
    import torch

    q, k, v = (torch.from_numpy(x) for x in qkv)
    if function is attention_backward:
        rows = torch.zeros(1, 2, 9)
        function = lambda q, k, v, **options: cupyflash.attention_backward(k, q, k, v, k, rows, **options)  # noqa: E731
    scale, left = torch.tensor(0.5), torch.tensor(4)
    function(q, k, v, scale=scale, window=(left, 0))
    scale.fill_(0.25)
    left.fill_(2)
    function(q, k, v, scale=scale, window=(left, 0))
    assert [(p.scale, p.window) for p in gpu.launched] == [(0.5, (4, 0)), (0.25, (2, 0))]
    for _ in range(3):
        function(q, k, v, scale=torch.tensor(0.25), window=(torch.tensor(2), 0))
    assert gpu.prepared == 2


@both
def test_refused_also_after_the_like_of_it_ran(function: Callable[..., Any], gpu: Gpu, qkv: Any) -> None:
    function(*qkv, window=(1, 0), causal=True, scale=1.0)
    for wrong in (
        {"window": (1.0, 0)},
        {"window": (True, 0)},
        {"window": (1, False)},
        {"scale": True},
        {"causal": 1.0},
        {"softcap": True},
    ):
        with pytest.raises(ArgumentError, match=f"^{next(iter(wrong))}: expected"):
            function(*qkv, **{"window": (1, 0), "causal": True, "scale": 1.0} | wrong)
    assert len(gpu.launched) == 1


@both
def test_addresses_that_no_kernel_can_read(function: Callable[..., Any], gpu: Gpu, qkv: Any) -> None:
    q, k, v = qkv
    odd = np.frombuffer(np.zeros(q.nbytes + 1, np.uint8).data, np.float16, q.size, 1).reshape(q.shape)
    with pytest.raises(ArgumentError, match=r"^k: expected an address that is a multiple of 2, got 0x"):
        function(q, odd, v)
    assert not gpu.launched
    function(q, k, v)
    assert gpu.launched


@pytest.mark.needs("torch")
def test_empty_tensors_need_no_address(gpu: Gpu) -> None:
    import torch

    q = torch.ones(0, 9, 2, 8, dtype=torch.float16)
    assert q.data_ptr() == 0
    cupyflash.attention(q, q, q)
    cupyflash.attention_backward(q, q, q, q, q, torch.zeros(0, 2, 9))
    cupyflash.attention(q, q, q, score_mod="score * seen(k)", mod_arrays={"seen": torch.ones(9, dtype=torch.int64)})
    assert len(gpu.launched) == 3


def test_row_vectors_at_odd_addresses(gpu: Gpu, qkv: Any) -> None:
    rows = np.frombuffer(np.zeros(4 * 18 + 2, np.uint8).data, np.float32, 18, 2).reshape(1, 2, 9)
    good = np.zeros((1, 2, 9), np.float32)
    q, k, v = qkv
    for lse, dlse, name in ((rows, None, "lse"), (good, rows, "dlse"), (rows, good, "lse")):
        with pytest.raises(ArgumentError, match=f"^{name}: expected an address that is a multiple of 4, got 0x"):
            cupyflash.attention_backward(k, q, k, v, k, lse, dlse=dlse)
    assert not gpu.launched


@pytest.mark.parametrize(("name", "dtype", "offset"), [("mask", np.bool_, 1), ("bias", np.float16, 2)])
def test_elements_at_addresses_that_fit_them(name: str, dtype: Any, offset: int, gpu: Gpu, qkv: Any) -> None:
    """And no others: those of a mask are bytes, and those of a bias 16 or 32 bits."""
    memory = np.zeros(4 * 81 + 8, np.uint8).data
    function = cupyflash.attention
    function(*qkv, **{name: np.frombuffer(memory, dtype, 81, offset).reshape(9, 9)})
    assert len(gpu.launched) == 1
    with pytest.raises(ArgumentError, match=r"^bias: expected an address that is a multiple of 4, got 0x"):
        function(*qkv, bias=np.frombuffer(memory, np.float32, 81, 2).reshape(9, 9))
    assert len(gpu.launched) == 1


def test_arrays_of_mods_lie_where_they_fit(gpu: Gpu, qkv: Any) -> None:
    """At addresses that are multiples of their own 8 bytes and of no others."""
    memory = np.zeros(8 * 10, np.uint8)
    first = -memory.ctypes.data % 8
    function = partial(cupyflash.attention, *qkv, score_mod="score * seen(k)")
    function(mod_arrays={"seen": memory[first : first + 72].view(np.int64)})
    assert len(gpu.launched) == 1
    with pytest.raises(ArgumentError, match=r"^mod_array_0: expected an address that is a multiple of 8, got 0x"):
        function(mod_arrays={"seen": memory[first + 4 : first + 76].view(np.int64)})
    assert len(gpu.launched) == 1


def test_strides_between_elements() -> None:
    """Whoever reads an array where it lies counts in elements; a record's field may lie in between."""
    record = (48, 24, 12, 6)
    with pytest.raises(ArgumentError, match=r"^k: expected strides that are multiples of the 4 bytes of an element"):
        arrays.CUPY.describe("k", ((2, 2, 2, 2), record, np.dtype(np.float32), 0))
    found = arrays.CUPY.describe("k", ((2, 2, 2, 2), (-64, 32, 16, 2), np.dtype(np.float16), 0))
    assert found.strides == (-32, 16, 8, 1)
    assert arrays.CUPY.describe("k", ((2, 2, 1, 2), (64, 32, 3, 2), np.dtype(np.float16), 0)).strides[3] == 1


@pytest.mark.needs("torch")
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_tensors_without_their_elements_are_not_launched(warm: bool, gpu: Gpu, qkv: Any) -> None:
    """Also where a call of the same shape is ready."""
    import torch

    k = torch.from_numpy(qkv[0])
    lse = torch.zeros(1, 2, 9)
    freed, rows = k.clone(), lse.clone()
    for x in (freed, rows):
        x.untyped_storage().resize_(0)
    strange = {
        "freed": freed,
        "negative": torch._neg_view(k),
        "zero": torch._efficientzerotensor(k.shape, dtype=k.dtype),
        "functional": torch._to_functional_tensor(k),
    }
    if warm:
        cupyflash.attention(k, k, k)
        cupyflash.attention_backward(k, k, k, k, k, lse)
        gpu.launched.clear()
    refused = pytest.raises((ArgumentError, UnsupportedError), match=r"^(q|k|v|out|dout|lse): ")
    for name, x in strange.items():
        for i in range(3):
            with refused:
                cupyflash.attention(*(x if i == j else k for j in range(3)))
        for i in range(5):
            with refused:
                cupyflash.attention_backward(*(x if i == j else k for j in range(5)), lse)
        assert not gpu.launched, name
    with refused:
        cupyflash.attention_backward(k, k, k, k, k, rows)
    assert not gpu.launched


@pytest.mark.needs("torch")
def test_a_gradient_without_memory_is_not_launched(gpu: Gpu, qkv: Any) -> None:
    import torch

    q = torch.from_numpy(qkv[0]).requires_grad_()
    out = cupyflash.attention(q, q, q)
    gpu.launched.clear()
    dout = torch.ones_like(q)
    dout.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match=r"^dout: a tensor of shape"):
        torch.autograd.grad(out, q, dout)
    assert not gpu.launched


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python")
def test_tracers_see_operators_where_a_call_is_ready(gpu: Gpu, qkv: Any) -> None:
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = (torch.from_numpy(x) for x in qkv)
    cupyflash.attention(q, k, v)

    def call(q: Any, k: Any, v: Any) -> Any:
        return cupyflash.attention(q, k, v)

    for pre_dispatch in (False, True):
        graph = make_fx(call, pre_dispatch=pre_dispatch)(q, k, v)
        assert "cupyflash.forward" in graph.code
        gpu.launched.clear()
        graph(q, k, v)
        assert len(gpu.launched) == 1
    torch.func.vmap(call)(*(torch.stack([x] * 5) for x in (q, k, v)))
    torch.func.grad(lambda q: call(q, k, v).sum())(q)
    assert [p.batch for p in gpu.launched[1:]] == [5, 1, 1]
    gpu.launched.clear()
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.trace"):
        torch.jit.trace(call, (q, k, v))
    assert not gpu.launched
