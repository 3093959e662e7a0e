"""The table of arrays: a row more is an array more, in the structs, the addresses and what reaches a launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError
from cupyflash.arrays.adapters import NUMPY
from cupyflash.launch import checks, passes, run
from cupyflash.operands import BACKWARD, FORWARD, GRADIENT, INPUT, RESULT, TABLE, Number, Operand, Pass, Use
from cupyflash.options import Options
from cupyflash.plan.params import params_of
from cupyflash.plan.variant import Variant
from tests.pretended_gpu import Gpu
from tools.params import headers

SCORES = ("batch", "heads_q", "seqlen_q", "seqlen_k")
BIAS = Operand("added", SCORES, forward=Use(INPUT), backward=Use(INPUT), strided=True, feature="added")
SIZE = Number("head_dim", "int", "added", "a number that Problem has and the structs lack")
DBIAS = Operand("dadded", SCORES, like="added", backward=Use(GRADIENT), strided=True, feature="added")


def subclasses(kind: type[Variant]) -> list[type[Variant]]:
    return [kind, *(below for sub in kind.__subclasses__() for below in subclasses(sub))]


@pytest.fixture
def wider(monkeypatch: pytest.MonkeyPatch) -> tuple[Pass, Pass]:
    """The passes of a table with a added and its gradient, which all kernels then have in their structs."""
    table = (*TABLE, BIAS, SIZE, DBIAS)
    found = Pass("forward", table), Pass("backward", table)
    old = {kind: which for which in (FORWARD, BACKWARD) for kind in params_of(which)}
    for kind in subclasses(Variant):
        if "params" in vars(kind) and kind.params in old:
            which = next(which for dtype, which in old.items() if dtype == kind.params)
            place = params_of(which).index(kind.params)
            monkeypatch.setattr(kind, "params", params_of(found[which is BACKWARD])[place])
    for name, which in zip(("FORWARD", "BACKWARD"), found, strict=True):
        monkeypatch.setattr(run, name, which)
    return found


def arrays_of(which: Pass, *more: str) -> dict[str, np.ndarray]:
    """What a pass takes, of lengths that no two arrays share."""
    sizes = {"batch": 2, "seqlen_q": 70, "seqlen_k": 50, "heads_q": 4, "heads_k": 2, "batch + 1": 3}
    sizes |= {"head_dim": 64, "head_dim_v": 64}
    dtypes = {"": np.float16, "fp32": np.float32, "int32": np.int32}
    names = [n for n in which.names(INPUT) if n not in which.optional or n in more]
    return {n: np.zeros([sizes[d] for d in which.rows[n].dims], dtypes[which.rows[n].dtype]) for n in names}


def launched_params(gpu: Gpu) -> list[Any]:
    kinds = {variant.symbol: variant.params for variant in gpu.loaded}
    found = [np.frombuffer(params, kinds[symbol])[0] for symbol, _, params in gpu.launched]
    return [x["plain"] if "plain" in (x.dtype.names or ()) else x for x in found]


@pytest.mark.needs("cupy")
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_a_row_more_is_an_array_more(
    family: str, wider: tuple[Pass, Pass], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPYFLASH_FAMILY", family)
    for which, make in zip(wider, (run.forward, run.backward), strict=True):
        gpu.launched.clear()
        given = arrays_of(which, "added")
        given["added"] = np.zeros((2, 4, 70, 56), np.float16)[..., :50]
        made: Any = make(NUMPY, given, Options())
        order = passes.given_of(which, tuple(given)).order
        assert order.index("added") < len(given)
        assert ("dadded" in order) == (which is wider[1])
        for params in launched_params(gpu):
            assert params["added"] == NUMPY.pointer(given["added"])
            assert params["added_stride"].tolist() == (4 * 70 * 56, 56, 70 * 56)
            assert params["head_dim"] == 64
            assert params["q"] == NUMPY.pointer(given["q"])
            if which is wider[1]:
                assert params["dadded"] == NUMPY.pointer(made["dadded"])
                assert params["dadded_stride"].tolist() == (4 * 70 * 50, 50, 70 * 50)
        gpu.launched.clear()
        make(NUMPY, arrays_of(which), Options())  # the next call has none
        assert not any(params["added"] for params in launched_params(gpu))
    grads = cupyflash.Gradients.of(made)
    dq, dk, dv = grads
    assert (grads.dadded.shape, dq.shape, dk.shape) == ((2, 4, 70, 50), (2, 70, 4, 64), (2, 50, 2, 64))  # type: ignore[attr-defined]
    assert dv is grads.dv


def test_a_row_more_moves_nothing(wider: tuple[Pass, Pass]) -> None:
    """Kernels read their parameters at constant offsets: what a feature brings lies behind all that is there."""
    for which, more in zip((FORWARD, BACKWARD), wider, strict=True):
        for old, new in zip(params_of(which), params_of(more), strict=True):
            assert old.fields is not None
            assert new.fields is not None
            for name, (kind, offset, *_) in old.fields.items():
                assert new.fields[name][1] == offset, name
                assert new.fields[name][0] == kind or name == "plain"
        names = params_of(more)[0].names or ()
        tail = ["added", "added_stride", "head_dim"] + ["dadded", "dadded_stride"] * (more is wider[1])
        assert list(names[-len(tail) :]) == tail
    text = " ".join(headers(*wider)["attention/params.cuh"].split())
    assert text.count("const void *added; // [batch, heads_q, seqlen_q, seqlen_k]; null: not given") == 2
    assert "void *dadded; // like added; null: not given" in text


def test_what_a_new_array_must_be(wider: tuple[Pass, Pass]) -> None:
    good = arrays_of(wider[0], "added")
    wrong = {
        r"added: expected shape \(batch, heads_q, seqlen_q, seqlen_k\) = \(2, 4, 70, 50\), dtype fp16, on the CPU; got "
        r"\(2, 4, 70, 49\), fp16, on the CPU": good["added"][..., 1:],
        "added: expected shape .* dtype fp16, on the CPU; got .*, fp32": good["added"].astype(np.float32),
        "added: expected a stride of 1 along seqlen_k, got 2": np.zeros((2, 4, 70, 100), np.float16)[..., ::2],
    }
    for message, added in wrong.items():
        given = good | {"added": added}
        with pytest.raises(ArgumentError, match=f"^{message}"):
            checks.check(wider[0], tuple(given), NUMPY, [NUMPY.signature(x) for x in given.values()], Options())


@pytest.mark.needs("cupy")
def test_vectors_with_gaps_are_copied(gpu: Gpu) -> None:
    """What has no strides in the struct is read as contiguous."""
    given = arrays_of(BACKWARD, "dlse")
    given["dlse"] = np.zeros((2, 4, 140), np.float32)[..., ::2]
    run.backward(NUMPY, given, Options())
    for params in launched_params(gpu):
        assert params["lse"] == NUMPY.pointer(given["lse"])
        assert params["dlse"] not in (0, NUMPY.pointer(given["dlse"]))
    gpu.launched.clear()
    run.backward(NUMPY, arrays_of(BACKWARD), Options())
    assert not any(params["dlse"] for params in launched_params(gpu))


def test_the_order_in_which_arrays_are_named_does_not_matter(gpu: Gpu) -> None:
    given = arrays_of(BACKWARD, "dlse")
    for names in (list(given), list(given)[::-1]):
        gpu.launched.clear()
        grads = run.backward(NUMPY, {name: given[name] for name in names}, Options())
        for params in launched_params(gpu):
            for name, x in (given | grads).items():
                assert params[BACKWARD.rows[name].member] == NUMPY.pointer(x), name


def test_gradients_are_those_of_the_table() -> None:
    required = [name for name in BACKWARD.names(GRADIENT) if name not in BACKWARD.optional]
    assert list(cupyflash.Gradients._fields) == required
    assert FORWARD.names(RESULT)[0] == "out"


def test_packed_arrays_have_no_batch() -> None:
    rows = BACKWARD.rows
    assert rows["q"].packed == ("total_q", "heads_q", "head_dim")
    assert rows["dk"].packed == ("total_k", "heads_k", "head_dim")
    assert rows["dv"].packed == ("total_k", "heads_k", "head_dim_v")
    assert rows["lse"].packed == ("heads_q", "total_q")
    assert (rows["cu_seqlens_k"].packed, rows["seqused_k"].packed) == (("batch + 1",), ("batch",))


def test_a_feature_has_no_tensor_map() -> None:
    row = Operand("added", SCORES, forward=Use(INPUT, 64), strided=True, feature="added")
    with pytest.raises(ValueError, match=r"^added: "):
        Pass("forward", (*TABLE, row))


@pytest.mark.parametrize("optional", [False, True])
def test_a_gradient_comes_along_unless_it_is_optional(optional: bool) -> None:
    rows = (
        Operand("added", SCORES, backward=Use(INPUT), strided=True, feature="added"),
        Operand(
            "dadded", SCORES, like="added", backward=Use(GRADIENT, optional=optional), strided=True, feature="added"
        ),
    )
    which = Pass("backward", (*TABLE, *rows))
    assert which.made(("q", "k", "v")) == ("dq", "dk", "dv")
    assert which.made(("q", "k", "v", "added")) == ("dq", "dk", "dv") + ("dadded",) * (not optional)
    assert which.made(("q", "k", "v", "added"), ("dadded",)) == ("dq", "dk", "dv", "dadded")


def test_a_dimension_that_an_array_may_lack() -> None:
    row, sizes = BACKWARD.rows["alibi_slopes"], (2, 70, 50, 4, 2, 64, 3, 70, 50)
    assert row.shape(sizes) == (2, 4)
    for packed in (False, True):
        fitting = [shape for shape in ((2, 4), (4,), (2,), (1, 4), (1, 2, 4), ()) if row.fits(shape, sizes, packed)]
        assert fitting == [(2, 4), (4,)]
    assert not BACKWARD.rows["lse"].fits((4, 70), sizes)
