"""Arrays of NumPy, of JAX, and of whoever speaks DLPack: read as they are meant, or refused by the argument's name."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, UnsupportedError
from cupyflash.arrays import libraries
from tests.producer import Producer

pytestmark = pytest.mark.usefixtures("on_the_cpu")

ARGUMENTS = ("q", "k", "v", "out", "dout", "lse", "dlse")
Named = dict[str, Any]


@pytest.fixture
def named(rng: np.random.Generator) -> Named:
    """All arrays of a backward."""
    q, k, v, dout = rng.standard_normal((4, 2, 7, 2, 8)).astype(np.float32)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    dlse = rng.standard_normal(lse.shape).astype(np.float32)
    return {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse, "dlse": dlse}


def forward(named: Named) -> Any:
    return cupyflash.attention(*(named[name] for name in "qkv"))


def refused(argument: str, named: Named) -> None:
    """Both functions name the argument."""
    with pytest.raises((ArgumentError, UnsupportedError), match=rf"^{argument}: "):
        cupyflash.attention_backward(**named)
    if argument in "qkv":
        with pytest.raises((ArgumentError, UnsupportedError), match=rf"^{argument}: "):
            forward(named)


# ---- NumPy ----


class Plain(np.ndarray):
    """A subclass that adds a name only."""


class Units(np.ndarray):
    """As astropy's are: what is computed with it has a unit."""

    def __array_ufunc__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("units do not fit")


class Functions(np.ndarray):
    def __array_function__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("functions do not fit")


class Broken(np.ndarray):
    @property
    def strides(self) -> Any:
        raise OSError("the file was closed")


class Everything:
    """Answers to every attribute."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: Everything()


def field(x: np.ndarray, *others: tuple[str, str]) -> np.ndarray:
    """x as a field of records, which need not lie at multiples of its elements' size."""
    records = np.zeros(x.shape, [*others, ("x", x.dtype)])
    records["x"] = x
    return records["x"]


def row_field(x: np.ndarray) -> np.ndarray:
    """The same with whole rows as fields, behind one byte."""
    records = np.zeros(x.shape[:-1], [("other", "i1"), ("x", x.dtype, x.shape[-1:])])
    records["x"] = x
    return records["x"]


def unaligned(x: np.ndarray) -> np.ndarray:
    found = np.frombuffer(np.zeros(x.nbytes + 1, np.uint8).data, x.dtype, x.size, 1).reshape(x.shape)
    found[...] = x
    return found


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def mapped(x: np.ndarray) -> np.ndarray:
    with tempfile.TemporaryFile() as f:
        found = np.memmap(f, x.dtype, "w+", shape=x.shape)
        found[...] = x
        return found


READ: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "backwards in batch": lambda x: x[::-1].copy()[::-1],
    "backwards in seqlen": lambda x: x[:, ::-1].copy()[:, ::-1],
    "backwards in heads": lambda x: x[:, :, ::-1].copy()[:, :, ::-1] if x.ndim == 4 else x[..., ::-1].copy()[..., ::-1],
    "rows of records": row_field,
    "records": lambda x: field(x, ("other", "i2")),
    "unaligned": unaligned,
    "read-only": read_only,
    "memmap": mapped,
    "subclass": lambda x: x.view(Plain),
    "recarray": lambda x: x.view(np.recarray),
    "dtype with metadata": lambda x: x.view(np.dtype(x.dtype, metadata={"a": 1})),
}
STRANGE: dict[str, Callable[[np.ndarray], Any]] = {
    "masked": lambda x: np.ma.array(x, mask=x > 0),
    "masked without a mask": lambda x: np.ma.array(x),
    "matrix": lambda x: np.asmatrix(x.reshape(-1, x.shape[-1])),
    "units": lambda x: x.view(Units),
    "functions": lambda x: x.view(Functions),
    "mock": lambda x: MagicMock(spec=x),
    "any mock": lambda x: MagicMock(),
    "everything": lambda x: Everything(),
    "class": lambda x: np.ndarray,
    "list": lambda x: x.tolist(),
    "number": lambda x: 1.0,
    "scalar": lambda x: np.float32(1),
    "0-d": lambda x: np.array(1, np.float32),
    "False": lambda x: False,
    "bytes": lambda x: x.tobytes(),
    "memoryview": memoryview,
    "ShapeDtype": lambda x: x.__array_interface__,
    "one dimension less": lambda x: x[0],
    "one dimension more": lambda x: x[None],
    "other byte order": lambda x: x.astype(x.dtype.newbyteorder()),
    "longdouble": lambda x: x.astype(np.longdouble),
    "object": lambda x: x.astype(object),
    "complex": lambda x: x.astype(np.complex64),
    "integers": lambda x: x.astype(np.int32),
    "bool": lambda x: x > 0,
    "text": lambda x: np.zeros(x.shape, "U0"),
    "times": lambda x: np.zeros(x.shape, "m8[s]"),
    "records": lambda x: np.zeros(x.shape, [("a", "f4"), ("b", "i2")]),
    "float8": lambda x: x.astype(ml_dtypes.float8_e4m3fn),
    "other precision": lambda x: x.astype(np.float16),
    "batch of one": lambda x: x[:1],
}
STRIDED = {
    "every second element": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "backwards in head_dim": lambda x: x[..., ::-1].copy()[..., ::-1],
    "one element repeated": lambda x: np.broadcast_to(x[..., :1], x.shape),
    "Fortran order": np.asfortranarray,
    "records, two elements apart": lambda x: field(x, ("other", "f4")),
}


@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("name", READ)
def test_unusual_numpy_arrays_are_read(name: str, argument: str, named: Named) -> None:
    want, want_grads = forward(named), cupyflash.attention_backward(**named)
    named[argument] = READ[name](named[argument])
    for x, same in zip((forward(named), *cupyflash.attention_backward(**named)), (want, *want_grads), strict=True):
        assert type(x) is np.ndarray
        np.testing.assert_array_equal(x, same)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("name", STRANGE)
def test_strange_arrays_are_refused_by_name(name: str, argument: str, named: Named) -> None:
    named[argument] = STRANGE[name](named[argument])
    if name in ("other precision", "batch of one") and argument == "q":  # then q is right and k is not
        argument = "k"
    refused(argument, named)


@pytest.mark.parametrize("argument", ARGUMENTS[:5])
@pytest.mark.parametrize("name", STRIDED)
def test_strides_along_head_dim_are_refused(name: str, argument: str, named: Named) -> None:
    named[argument] = STRIDED[name](named[argument])
    refused(argument, named)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_none_is_no_array(argument: str, named: Named) -> None:
    named[argument] = None
    if argument == "dlse":
        cupyflash.attention_backward(**named)
    else:
        refused(argument, named)


def test_an_array_that_fails_to_tell_its_shape(named: Named) -> None:
    named["q"] = named["q"].view(Broken)
    with pytest.raises(ArgumentError, match=r"^q, k, v: .* the file was closed"):
        forward(named)


class Interrupted(np.ndarray):
    """While its strides are looked at, what `raised` holds comes from elsewhere."""

    raised: Exception

    @property
    def strides(self) -> Any:
        raise self.raised


class InterruptedProducer(Producer):
    """The same of one that speaks DLPack alone, and of one that is a number."""

    raised: Exception
    shape = ()

    def __dlpack_device__(self) -> Any:
        raise self.raised

    item = __dlpack_device__


class InterruptedShape:
    raised: Exception

    @property
    def shape(self) -> Any:
        raise self.raised


class InterruptedRows(np.ndarray):
    """The first time that its shape is looked at."""

    left: list[Exception]

    @property
    def shape(self) -> Any:
        if self.left:
            raise self.left.pop()
        return np.ndarray.shape.__get__(self)


LOOKED_AT: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "an array": lambda x, strange, *_: cupyflash.attention(strange, x, x),
    "an array of a cache": lambda x, strange, *_: cupyflash.attention_with_cache(x, strange, x, cache_seqlens=0),
    "a packed array": lambda x, *_: cupyflash.attention_varlen(
        x[0].view(InterruptedRows), x[0], x[0], np.int32([0, 7])
    ),
    "an array of DLPack": lambda x, _, producer, __: cupyflash.attention(*[producer] * 3),
    "a number": lambda x, _, producer, __: cupyflash.attention(x, x, x, scale=producer),
    "a number's shape": lambda x, _, __, shape: cupyflash.attention(x, x, x, scale=shape),
    "a number in a mod": lambda x, _, producer, __: cupyflash.attention(
        x, x, x, score_mod=lambda score, b, h, q, k: score * producer
    ),
}


@pytest.mark.parametrize("error", [TimeoutError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("what", LOOKED_AT)
def test_what_is_not_about_an_array_goes_on_as_it_is(
    what: str, error: type[BaseException], named: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler of signals raises it, say, wherever its program is."""
    raised, q = error("enough"), named["q"]
    for kind in (Interrupted, InterruptedProducer, InterruptedShape):
        monkeypatch.setattr(kind, "raised", raised, raising=False)
    monkeypatch.setattr(InterruptedRows, "left", [raised], raising=False)
    with pytest.raises(error) as found:
        LOOKED_AT[what](q, q.view(Interrupted), InterruptedProducer(q), InterruptedShape())
    assert found.value is raised


# ---- DLPack ----


class Old(Producer):
    """Before version 1.0 of the protocol, which has no word for read-only."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return self.x.__dlpack__()


class Nowhere(Producer):
    def __dlpack_device__(self) -> Any:
        return "cpu"


class Metal(Producer):
    def __dlpack_device__(self) -> Any:
        return 8, 0


class NoCapsule(Producer):
    def __dlpack__(self, **options: Any) -> Any:
        return 5


class Fails(Producer):
    def __dlpack__(self, **options: Any) -> Any:
        raise RuntimeError


@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("name", [*(name for name in READ if "backwards" in name), "read-only", "memmap", "old"])
def test_unusual_dlpack_arrays_are_read(name: str, argument: str, named: Named) -> None:
    want, want_grads = forward(named), cupyflash.attention_backward(**named)
    made = {n: Producer(x) for n, x in named.items()}
    made[argument] = Old(named[argument]) if name == "old" else Producer(READ[name](named[argument]))
    if type(made[argument]) is Old:
        made = {n: Old(x.x) for n, x in made.items()}
    for x, same in zip((forward(made), *cupyflash.attention_backward(**made)), (want, *want_grads), strict=True):
        np.testing.assert_array_equal(x, same)


class Shaped(Producer):
    """It tells more than DLPack asks for."""

    def __init__(self, x: np.ndarray) -> None:
        super().__init__(x)
        self.shape, self.dtype = x.shape, x.dtype


@pytest.mark.parametrize("kind", [Producer, Shaped])
def test_block_masks_beside_dlpack_arrays(kind: Any, rng: np.random.Generator) -> None:
    """Without a shape, too: none was seen then, and the mask was lost."""
    q, k, v = rng.standard_normal((3, 1, 16, 2, 8)).astype(np.float32)
    mask = cupyflash.masks.from_dense(np.tri(16) > 0)
    out, lse = cupyflash.attention(q, k, v, block_mask=mask, return_lse=True)
    np.testing.assert_array_equal(cupyflash.attention(*map(kind, (q, k, v)), block_mask=mask), out)
    brought = q, q, k, v, out, lse
    want, found = (cupyflash.attention_backward(*map(f, brought), block_mask=mask) for f in (np.asarray, kind))
    for a, b in zip(found[:3], want[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    cu = np.array([0, 9, 16], np.int32)
    want, found = (
        cupyflash.attention_varlen(*map(f, (q[0], k[0], v[0], cu)), block_mask=mask) for f in (np.asarray, kind)
    )
    np.testing.assert_array_equal(found, want)
    cache = {"cache_seqlens": np.array([5], np.int32)}
    want = cupyflash.attention_with_cache(q[:, :1].copy(), k, v, **cache, block_mask=mask)
    given = [kind(x) for x in (q[:, :1].copy(), k, v)]
    found = cupyflash.attention_with_cache(*given, cache_seqlens=kind(cache["cache_seqlens"]), block_mask=mask)
    np.testing.assert_array_equal(found, want)
    with pytest.raises(ArgumentError, match=r"^block_mask: expected one of 16 queries and 16 keys"):
        cupyflash.attention(*map(kind, (q, k, v)), block_mask=cupyflash.masks.from_dense(np.ones((9, 7), bool)))


@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize(
    "make",
    [Nowhere, Metal, NoCapsule, Fails, lambda x: Old(read_only(x)), lambda x: Producer(x.astype(ml_dtypes.bfloat16)),
     lambda x: Producer(x.astype(object)), lambda x: Producer(x.astype(np.int32)), lambda x: Producer(x[0])],
    ids=["nowhere", "metal", "no-capsule", "fails", "old-read-only", "bf16", "object", "integers", "rank"],
)  # fmt: skip
def test_strange_dlpack_arrays_are_refused_by_name(make: Callable[[Any], Any], argument: str, named: Named) -> None:
    kind = type(make(named[argument]))
    made = {n: kind(x) if kind is Old else Producer(x) for n, x in named.items()}
    strange = make(named[argument])
    if kind is not Producer and kind is not Old:  # one library for all
        strange = type("Strange", (Producer,), dict(vars(kind)))(named[argument])
    refused(argument, made | {argument: strange})


@pytest.mark.needs("torch")
def test_bf16_through_dlpack_has_a_way_out(named: Named) -> None:
    import torch

    made = {name: Producer(torch.from_numpy(x).bfloat16()) for name, x in named.items()}
    with pytest.raises(ArgumentError, match=r"^q: .*bf16 is ml_dtypes\.bfloat16"):
        forward(made)
    q, k, v = (np.from_dlpack(made[n].x.view(torch.int16)).view(ml_dtypes.bfloat16) for n in "qkv")
    assert cupyflash.attention(q, k, v).dtype == ml_dtypes.bfloat16


def test_results_on_a_gpu_are_waited_for_on_their_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current stream is one of the current device, which need not be that of the arrays."""
    events: list[str] = []

    class Device:
        def __enter__(self) -> None:
            events.append("enter")

        def __exit__(self, *_: Any) -> None:
            events.append("exit")

    cupy = MagicMock()
    cupy.cuda.get_current_stream().synchronize = lambda: events.append("wait")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    result = MagicMock(device=Device())
    assert libraries.FOREIGN.give_back(result, result) is result
    assert events == ["enter", "wait", "exit"]


# ---- Mixed ----


@pytest.mark.needs("torch")
@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("others", ["torch", "dlpack"])
def test_libraries_are_not_mixed(others: str, argument: str, named: Named) -> None:
    import torch

    convert = torch.from_numpy if others == "torch" else Producer
    made = {n: x if n == argument else convert(x) for n, x in named.items()}
    wrong = "k" if argument == "q" else argument
    fix = {
        "numpy": rf"numpy\.asarray\({wrong}\)",
        "torch": rf"torch\.as_tensor\({wrong}, device=q\.device\)",
        "dlpack": "arrays of one library",
    }["numpy" if argument == "q" else others]
    with pytest.raises(ArgumentError, match=rf"^{wrong}: expected an array of \w+ like q, got one of \w+; give {fix}$"):
        cupyflash.attention_backward(**made)


# ---- JAX ----


@pytest.mark.needs("jax")
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_strange_jax_arrays_are_refused_by_name(argument: str, named: Named) -> None:
    import jax
    import jax.numpy as jnp

    def deleted(x: Any) -> Any:
        x = x + 0
        x.delete()
        return x

    def donated(x: Any) -> Any:
        x = x + 0
        jax.jit(lambda y: y + 1, donate_argnums=0)(x)
        return x

    made = {n: jnp.asarray(x) for n, x in named.items()}
    for strange in (
        deleted,
        donated,
        lambda x: jax.random.split(jax.random.key(0), x.shape),
        lambda x: x[0],
        lambda x: x.astype(jnp.int4),
        lambda x: x.astype(jnp.float8_e4m3fn),
        lambda x: x > 0,
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        lambda x: np.asarray(x) if argument != "q" else 1,
    ):
        refused(argument, made | {argument: strange(made[argument])})  # fmt: skip


TWO_DEVICES = """
import numpy as np, jax, jax.numpy as jnp, cupyflash
from cupyflash import ArgumentError, UnsupportedError
first, second = jax.devices("cpu")
data = np.random.default_rng(0).standard_normal((3, 1, 9, 2, 8)).astype(np.float32)
want = cupyflash.attention(*data)
for device in (first, second):
    q, k, v = (jax.device_put(x, device) for x in data)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    for x in (out, lse, *cupyflash.attention_backward(out, q, k, v, out, lse)):
        assert x.devices() == {device} and x.committed, x.devices()
    assert np.array_equal(out, want)
free = [jnp.asarray(x) for x in data]
out = cupyflash.attention(*free)
assert not out.committed and out.devices() == {first}
assert (out + jax.device_put(data[0], second)).devices() == {second}
with jax.default_device(second):  # JAX computes there what is committed nowhere
    out = cupyflash.attention(*free)
assert out.devices() == {second}
try:
    cupyflash.attention(jax.device_put(data[0], first), *(jax.device_put(x, second) for x in data[1:]))
except ArgumentError as e:
    assert str(e).startswith("k: expected the device of q, "), e
with jax.enable_x64(True):
    wide = [jnp.asarray(x, jnp.float64) for x in data]
out, lse = cupyflash.attention(*wide, return_lse=True)
assert (out.dtype, lse.dtype) == (np.float64, np.float64), (out.dtype, lse.dtype)
print("DONE")
"""


@pytest.mark.needs("jax")
def test_jax_results_lie_where_the_inputs_lie() -> None:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "CUPYFLASH_BACKEND": "cpu",
    }
    done = subprocess.run([sys.executable, "-c", TWO_DEVICES], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "DONE", done.stderr[-3000:]


# ---- While a library is being imported ----

RACE = """
import sys, threading, time
sys.path.insert(0, {folder!r})
sys.half = threading.Event()  # until then the import goes no further
import numpy as np, cupyflash
class Producer:
    def __init__(self, x): self.x = x
    def __dlpack__(self, **options): return self.x.__dlpack__(**options)
    def __dlpack_device__(self): return self.x.__dlpack_device__()
def load():
    try:
        __import__({module!r})
    except ZeroDivisionError:
        pass
x = np.ones((1, 5, 2, 8), np.float32)
thread = threading.Thread(target=load)
thread.start()
while {module!r} not in sys.modules:
    time.sleep(0.001)
assert not hasattr(sys.modules[{module!r}], "done")
assert cupyflash.attention(x, x, x).shape == x.shape
assert not hasattr(sys.modules[{module!r}], "done"), "NumPy arrays need not wait"
threading.Timer(0.3, sys.half.set).start()
assert cupyflash.attention(Producer(x), Producer(x), Producer(x)).shape == x.shape
try:
    cupyflash.attention([1], [2], [3])
except cupyflash.ArgumentError as e:
    print(e)
thread.join()
"""


@pytest.mark.parametrize("module", ["torch", "cupy", "jax"])
@pytest.mark.parametrize("end", ["done = True", "1 / 0"], ids=["succeeds", "fails"])
def test_a_library_that_another_thread_imports(module: str, end: str, tmp_path: Path) -> None:
    """Such a module is there and lacks its names."""
    name = {"torch": "Tensor", "cupy": "ndarray", "jax": "Array"}[module]
    (tmp_path / f"{module}.py").write_text(f"import sys\nsys.half.wait(60)\nclass {name}: pass\n{end}\n")
    code = RACE.format(folder=str(tmp_path), module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_on_cpu())
    assert "q: expected an array of" in done.stdout, done.stderr


def test_a_library_that_imports_us(tmp_path: Path) -> None:
    """One thread that calls cupyflash in the middle of an import does not wait for itself."""
    lines = (
        "import numpy as np, cupyflash",
        "x = np.ones((1, 5, 2, 8), np.float32)",
        "cupyflash.attention(x, x, x)",
        "try: cupyflash.attention([], [], [])",
        "except cupyflash.ArgumentError: print('named')",
        "class Tensor: pass",
    )
    (tmp_path / "torch.py").write_text("\n".join(lines))
    command = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torch"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, env=_on_cpu(), timeout=60)
    assert done.stdout.strip() == "named", done.stderr


def _on_cpu() -> dict[str, str]:
    return os.environ | {"CUPYFLASH_BACKEND": "cpu"}


@pytest.mark.parametrize("blocked", ["cupy", "torch", "jax"])
def test_a_library_whose_import_is_blocked(blocked: str, monkeypatch: pytest.MonkeyPatch, named: Named) -> None:
    monkeypatch.setitem(sys.modules, blocked, None)
    forward(named)
    forward({name: Producer(x) for name, x in named.items()})
    refused("q", named | {"q": [1]})
    with pytest.raises(UnsupportedError if blocked == "cupy" else ArgumentError, match=r"^q: "):
        forward({name: type("OnGpu", (Producer,), {"__dlpack_device__": lambda self: (2, 0)})(x) for name, x in
                 named.items()})  # fmt: skip
