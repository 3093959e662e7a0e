"""Unusual arguments on a GPU: read as they are meant, or refused by name before anything is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, UnsupportedError
from cupyflash.gpu import device
from tests.gpu_arrays import on_gpu, to_numpy
from tests.producer import Producer

pytestmark = pytest.mark.gpu
SHAPE = (2, 37, 3, 40)
ARGUMENTS = ("q", "k", "v", "out", "dout", "lse", "dlse")
Named = dict[str, Any]


@pytest.fixture
def arrays(rng: np.random.Generator) -> Named:
    """All arrays of a backward, in NumPy."""
    q, k, v, dout = rng.standard_normal((4, *SHAPE)).astype(np.float16)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    dlse = rng.standard_normal(lse.shape).astype(np.float32)
    return {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse, "dlse": dlse}


@pytest.fixture
def one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernels whatever the strides."""
    monkeypatch.setenv("CUPYFLASH_FAMILY", "sm80")


def results(named: Named) -> list[np.ndarray]:
    out, lse = cupyflash.attention(named["q"], named["k"], named["v"], return_lse=True)
    grads = cupyflash.attention_backward(**named, deterministic=True)
    return [to_numpy(x) for x in (out, lse, *grads)]


def same(found: list[np.ndarray], want: list[np.ndarray]) -> None:
    for x, y in zip(found, want, strict=True):
        np.testing.assert_array_equal(x, y)


def refused(argument: str, named: Named) -> None:
    with pytest.raises((ArgumentError, UnsupportedError), match=rf"^{argument}: "):
        cupyflash.attention_backward(**named)
    if argument in "qkv":
        with pytest.raises((ArgumentError, UnsupportedError), match=rf"^{argument}: "):
            cupyflash.attention(*(named[name] for name in "qkv"))


# ---- Options ----


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_scalars_on_the_gpu(library: str, arrays: Named) -> None:
    """They are waited for, and what they hold at the call counts."""
    module = pytest.importorskip(library)
    q, k, v = (on_gpu(arrays[name], library) for name in "qkv")
    make: Callable[[Any], Any] = module.asarray if library == "cupy" else lambda x: module.tensor(x, device="cuda")
    scale, left, causal = make(0.25), make(9), make(True)
    for value, bound in ((0.25, 9), (0.5, 4)):
        scale[...], left[...] = value, bound
        found = cupyflash.attention(q, k, v, scale=scale, window=(left, None), causal=causal)
        want = cupyflash.attention(q, k, v, scale=value, window=(bound, None), causal=True)
        np.testing.assert_array_equal(to_numpy(found), to_numpy(want))
    for wrong in ({"scale": make([0.5])}, {"causal": make(1.0)}, {"window": (make(4.0), 0)}):
        with pytest.raises(ArgumentError, match=f"^{next(iter(wrong))}: expected"):
            cupyflash.attention(q, k, v, **wrong)


@pytest.mark.needs("torch")
def test_a_scalar_on_the_gpu_does_not_end_a_capture(arrays: Named) -> None:
    import torch

    q, k, v = (on_gpu(arrays[name], "torch") for name in "qkv")
    want, scale = cupyflash.attention(q, k, v, scale=0.5), torch.tensor(0.5, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ArgumentError, match=r"^scale: .* being captured in a CUDA graph"):
            cupyflash.attention(q, k, v, scale=scale)
        out = cupyflash.attention(q, k, v, scale=0.5)
    graph.replay()
    assert torch.equal(out, want)


def test_a_cupy_scalar_does_not_end_a_capture(arrays: Named) -> None:
    import cupy

    q, k, v = (on_gpu(arrays[name], "cupy") for name in "qkv")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        want, scale = cupyflash.attention(q, k, v, scale=0.5), cupy.asarray(0.5)
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        try:
            with pytest.raises(ArgumentError, match=r"^scale: .* being captured in a CUDA graph"):
                cupyflash.attention(q, k, v, scale=scale)
            out = cupyflash.attention(q, k, v, scale=0.5)
        finally:
            graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    np.testing.assert_array_equal(out.get(), want.get())


# ---- CuPy ----


@pytest.mark.usefixtures("one_family")
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_cupy_arrays_that_run_backwards(argument: str, axis: int, arrays: Named) -> None:
    named = {name: on_gpu(x, "cupy") for name, x in arrays.items()}
    want = results(named)
    flip = tuple(slice(None, None, -1) if i == axis else slice(None) for i in range(named[argument].ndim))
    named[argument] = named[argument][flip].copy()[flip]
    assert min(named[argument].strides) < 0
    same(results(named), want)


@pytest.mark.parametrize("argument", ARGUMENTS[:5])
def test_cupy_strides_between_elements_are_refused(argument: str, arrays: Named) -> None:
    import cupy

    named = {name: on_gpu(x, "cupy") for name, x in arrays.items()}
    memory = cupy.zeros(4 * named[argument].nbytes, np.uint8)
    _, seqlen, heads, head_dim = SHAPE
    row = 2 * head_dim + 1
    strides = (row * heads * seqlen, row * heads, row, 2)
    named[argument] = cupy.ndarray(SHAPE, np.float16, memptr=memory.data, strides=strides)
    refused(argument, named)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_cupy_addresses_between_elements_are_refused(argument: str, arrays: Named) -> None:
    import cupy

    named = {name: on_gpu(x, "cupy") for name, x in arrays.items()}
    results(named)  # a call of this shape is ready
    x = named[argument]
    memory = cupy.zeros(x.nbytes + 2, np.uint8)
    named[argument] = cupy.ndarray(x.shape, x.dtype, memptr=memory.data + x.itemsize // 2)
    refused(argument, named)


def test_cupy_subclasses(arrays: Named) -> None:
    import cupy

    class Plain(cupy.ndarray):  # type: ignore[misc]
        pass

    class Units(cupy.ndarray):  # type: ignore[misc]
        def __array_ufunc__(self, *args: Any, **kwargs: Any) -> Any:
            raise TypeError

    q, k, v = (on_gpu(arrays[name], "cupy") for name in "qkv")
    found = cupyflash.attention(q.view(type=Plain), k, v)
    assert type(found) is cupy.ndarray
    np.testing.assert_array_equal(found.get(), cupyflash.attention(q, k, v).get())
    with pytest.raises(ArgumentError, match=r"^k: expected a plain array"):
        cupyflash.attention(q, k.view(type=Units), v)


# ---- NumPy and DLPack ----


@pytest.mark.usefixtures("one_family", "numpy_on_gpu")
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_numpy_arrays_that_lie_oddly(argument: str, arrays: Named) -> None:
    """They are copied to the GPU element by element, wherever those lie."""
    want, x = results(arrays), arrays[argument]
    records = np.zeros(x.shape[:-1], [("other", "i1"), ("x", x.dtype, x.shape[-1:])])
    records["x"] = x
    same(results(arrays | {argument: records["x"]}), want)
    same(results(arrays | {argument: x[:, ::-1].copy()[:, ::-1]}), want)


@pytest.mark.parametrize("ordinal", [0, 1])
def test_dlpack_arrays_of_any_gpu(ordinal: int, arrays: Named) -> None:
    """Results lie on the arrays' GPU and are ready, whichever GPU is current."""
    import cupy

    if ordinal >= device.count():
        pytest.skip("needs two GPUs")
    with cupy.cuda.Device(ordinal):
        named = {name: cupy.asarray(x) for name, x in arrays.items()}
        want = results(named)
    found = results({name: Producer(x) for name, x in named.items()})
    same(found, want)
    assert cupyflash.attention(*(Producer(named[n]) for n in "qkv")).device.id == ordinal


# ---- torch ----


def strange(name: str) -> Callable[[Any], Any]:
    import torch

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, x: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device, strides=x.stride())

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    def fake(x: Any) -> Any:
        from torch._subclasses.fake_tensor import FakeTensorMode

        return FakeTensorMode().from_tensor(x)

    def freed(x: Any) -> Any:
        x = x.clone()
        x.untyped_storage().resize_(0)
        return x

    kinds = {
        "wrapper": Wrapper,
        "fake": fake,
        "freed": freed,
        "meta": lambda x: x.to("meta"),
        "host": lambda x: x.cpu(),
        "sparse": lambda x: x.to_sparse(),
        "nested": lambda x: torch.nested.nested_tensor([x[0], x[0]]),
        "jagged": lambda x: torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged),
        "functional": torch._to_functional_tensor,
        "negative": torch._neg_view,
        "zero": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device),
    }
    return kinds[name]


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    "name",
    ["wrapper", "fake", "freed", "meta", "host", "sparse", "nested", "jagged", "functional", "negative", "zero"],
)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_strange_tensors_are_refused_by_name(argument: str, name: str, arrays: Named) -> None:
    """Also where a call of the same shape is ready; and the GPU is unharmed."""
    named = {n: on_gpu(x, "torch") for n, x in arrays.items()}
    want = results(named)
    wrong = "k" if (argument, name) == ("q", "host") else argument
    refused(wrong, named | {argument: strange(name)(named[argument])})
    same(results(named), want)


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_derivatives_and_tracers_that_are_not_supported(arrays: Named) -> None:
    import torch

    q, k, v = (on_gpu(arrays[name], "torch") for name in "qkv")
    cupyflash.attention(q, k, v)
    f = lambda x: cupyflash.attention(x, k, v).float().sum()  # noqa: E731
    calls: list[Callable[[], Any]] = [
        lambda: torch.autograd.functional.hessian(f, q),
        lambda: torch.autograd.functional.hvp(f, q, q),
        lambda: torch.func.jvp(f, (q,), (q,)),
        lambda: torch.jit.trace(f, q),
        lambda: cupyflash.attention(q, k, v, scale=torch.nn.Parameter(torch.tensor(0.5, device="cuda"))),
    ]
    for call in calls:
        with pytest.raises(UnsupportedError):
            call()
    leaf = q.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    torch.testing.assert_close(g, torch.autograd.grad(f(leaf), leaf)[0])
    for inputs in ({}, {"inputs": [leaf]}):
        with pytest.raises(UnsupportedError, match="second derivatives are not supported"):
            (g.float().pow(2).sum() + leaf.float().sum()).backward(retain_graph=True, **inputs)


# ---- warmup ----


def test_warmup_takes_one_or_several() -> None:
    one = cupyflash.warmup(dtypes="bf16", head_dims=64, causal=True, devices=0, backward=False)
    assert one == cupyflash.warmup(dtypes=["bf16"], head_dims=[64], causal=[True], devices=[0], backward=False)
    assert len(one) == 1
    for wrong in (-1, device.count(), [0, 99]):
        with pytest.raises(ArgumentError, match=r"^devices: expected ordinals from 0 to "):
            cupyflash.warmup(devices=wrong)
