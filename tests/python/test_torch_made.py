"""What a warm call on torch tensors makes, on a pretended GPU: results like forms, and one block for all workspaces."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest

import cupyflash
from cupyflash.arrays import torch_private
from cupyflash.arrays.adapters import TORCH
from cupyflash.launch import prepared as launch
from cupyflash.operands import BACKWARD, WORKSPACE
from tests.pretended_gpu import Gpu

pytestmark = [pytest.mark.needs("cupy"), pytest.mark.needs("torch")]


@pytest.fixture
def qkv() -> Any:
    """Three tensors whose rows lie apart."""
    import torch

    return torch.randn(3, 1, 4, 64, 64, dtype=torch.bfloat16).transpose(2, 3)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_results_are_new_and_contiguous(family: str, gpu: Gpu, qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first call, which makes them one by one, and in those that make them like its own."""
    import torch

    monkeypatch.setenv("CUPYFLASH_FAMILY", family)
    found = [cupyflash.attention(*qkv, return_lse=True) for _ in range(3)]
    dout = torch.randn_like(found[0][0])
    grads = [tuple(cupyflash.attention_backward(dout, *qkv, *found[0])) for _ in range(3)]
    for same in (found, grads):
        for other in same[1:]:
            for x, y in zip(same[0], other, strict=True):
                assert (y.shape, y.dtype, y.stride()) == (x.shape, x.dtype, x.stride())
                assert y.is_contiguous()
        made = [x for results in same for x in results]
        assert len({x.data_ptr() for x in made}) == len(made)
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in made)


@pytest.fixture
def like_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a torch that makes new tensors by no cheaper function."""
    monkeypatch.setattr(torch_private, "empty_strided", lambda kind: None)


@pytest.mark.usefixtures("like_tensors")
def test_forms_have_no_memory(gpu: Gpu, qkv: Any) -> None:
    """out and lse; three gradients and, of three workspaces, one block."""
    out, lse = cupyflash.attention(*qkv, return_lse=True)
    cupyflash.attention_backward(out, *qkv, out, lse)
    forward, backward = launch.calls.values()
    assert (len(backward.made), len(backward.offsets)) == (3, 3)
    for call, count in ((forward, 2), (backward, 4)):
        _, arguments, _ = call.forms
        assert len(arguments) == count
        assert all(x.untyped_storage().nbytes() == 0 and x.numel() > 0 for (x,) in arguments)


@pytest.mark.usefixtures("like_tensors")
def test_results_like_tensors_are_the_same(gpu: Gpu, qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("sm80", "sm90"):
        test_results_are_new_and_contiguous(family, gpu, qkv, monkeypatch)


def test_results_lie_on_the_gpu_of_the_call(gpu: Gpu, qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another one is current: then all are made again."""
    import torch

    current: list[int] = []

    @contextlib.contextmanager
    def device(ordinal: int) -> Iterator[None]:
        current.append(ordinal)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    for _ in range(3):
        cupyflash.attention(*qkv)
    assert not current
    (call,) = launch.calls.values()
    call.forms = *call.forms[:2], 3
    cupyflash.attention(*qkv)
    assert current == [3]


@pytest.mark.usefixtures("like_tensors")
def test_forms_need_no_memory_beside_what_is_made(gpu: Gpu, qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made before it, and each gives back what it had before there is the next one."""
    import torch

    forms, make, seen = TORCH.forms, TORCH.make, list[Any]()

    def watch(make: Any) -> Any:
        def made(*arguments: Any, **options: Any) -> Any:
            assert all(x.untyped_storage().nbytes() == 0 for x in seen)
            seen.append(make(*arguments, **options))
            return seen[-1]

        return made

    def watched_forms(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "new_empty", watch(torch.Tensor.new_empty))
            return forms(*arguments)

    def watched_make(*arguments: Any) -> Any:
        assert len(seen) == 2
        return make(*arguments)

    monkeypatch.setattr(TORCH, "forms", watched_forms)
    monkeypatch.setattr(TORCH, "make", watched_make)
    cupyflash.attention(*qkv, return_lse=True)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_workspaces_lie_apart_in_one_block(family: str, gpu: Gpu, qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At multiples of 256 bytes; in the first call, and in the next one, which makes all of it like a form."""
    monkeypatch.setenv("CUPYFLASH_FAMILY", family)
    out, lse = cupyflash.attention(*qkv, return_lse=True)
    blocks, launched = [], []
    make_like, make, run = TORCH.make_like, TORCH.make, launch.Call.__call__

    def watch_forms(forms: Any, pointers: list[int]) -> Any:
        made = make_like(forms, pointers)
        blocks.append(made[-1])
        return made

    def watch_make(*arguments: Any) -> Any:
        made = make(*arguments)
        blocks.append(made[-1])
        return made

    def watch_launch(call: launch.Call, addresses: Any, stream: int) -> None:
        launched.append(dict(zip(call.order, addresses, strict=True)))
        run(call, addresses, stream)

    monkeypatch.setattr(TORCH, "make_like", watch_forms)
    monkeypatch.setattr(TORCH, "make", watch_make)
    monkeypatch.setattr(launch.Call, "__call__", watch_launch)
    for _ in range(3):
        cupyflash.attention_backward(out, *qkv, out, lse, deterministic=True)
    call = launch.calls.values()[-1]
    names = call.order[-len(call.made) :]
    assert names == ("row_stats", "dq_accum", "dq_turn")
    for block, at in zip(blocks, launched, strict=True):
        end = block.data_ptr()
        for name, (shape, _) in zip(names, call.made, strict=True):
            assert at[name] % 256 == block.data_ptr() % 256
            assert at[name] >= end
            end = at[name] + 4 * math.prod(shape)
        assert end <= block.data_ptr() + block.nbytes


def test_elements_of_workspaces_have_four_bytes() -> None:
    """Which is what `launch.prepared` counts in."""
    assert {BACKWARD.rows[name].dtype for name in BACKWARD.names(WORKSPACE)} == {"fp32", "int32"}


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_decides_for_each_call(first: bool, gpu: Gpu, qkv: Any) -> None:
    """Whether results are its tensors, wherever forms come from."""
    import torch

    for is_on in (first, not first, first):
        with torch.inference_mode(is_on):
            assert cupyflash.attention(*qkv).is_inference() == is_on


# ---- Recorded calls ----


@pytest.mark.parametrize("want_lse", [False, True])
def test_lse_is_a_result_of_the_node_if_it_is_asked_for(want_lse: bool, gpu: Gpu, qkv: Any) -> None:
    leaves = [x.clone().requires_grad_() for x in qkv.unbind()]
    found = cupyflash.attention(*leaves, return_lse=want_lse)
    out = found[0] if want_lse else found
    gradients: list[Any] = []
    out.grad_fn.register_prehook(gradients.append)
    out.backward(out.detach())
    assert [len(x) for x in gradients] == [1 + want_lse]
    assert all(x.grad.shape == x.shape for x in leaves)
