"""Runs a command of cupyflash as if this GPU had no more shared memory than those of another architecture.

    python -m tools.as_gpu sm_86 bench --pass fwd,bwd --head-dim 128
    OPENBLAS_NUM_THREADS=1 python -m tools.as_gpu sm_80 verify
    OPENBLAS_NUM_THREADS=1 python -m tools.as_gpu --ptx sm_75 verify

`verify` is not watched here by a process that would see to the threads of BLAS itself (cli/watchdog.py).

Kernels are of the `sm80` family, with the tiles that fit there. They ask for more shared memory than they use, so that
a multiprocessor holds as many of their blocks as one there. All else is this GPU's: the instructions they are compiled
to, clocks, bandwidths, and how fast its tensor cores are beside the rest. What a command starts as a process of its own
has no such limit, nor has the second kernel of a call over a cache where it starts early.

With --ptx the kernels are compiled for the other architecture, to PTX, which the driver translates for this GPU. What
is checked then is what they do there, instruction by instruction; dtypes are those that they have there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import click

from cupyflash.check.cache_case import CacheCase
from cupyflash.check.cases import Case
from cupyflash.cli import main as cupyflash
from cupyflash.cli import watchdog
from cupyflash.cli.explain.work import MANY_THREADS, SMEM_UNIT
from cupyflash.cli.output import Exit, exit_codes, explain
from cupyflash.cli.verify import main as verify
from cupyflash.cli.verify.ahead import needed
from cupyflash.compile import jit, nvrtc
from cupyflash.errors import CupyflashError, UnsupportedError
from cupyflash.gpu.device import ARCHS, Device, reserved_smem
from cupyflash.launch import prepared as launch
from cupyflash.plan.kernels import round_up
from cupyflash.plan.variant import Variant, kernel_sources


def resident(smem_bytes: int, threads: int, gpu: Device) -> int:
    """How many such blocks a multiprocessor holds, whatever their registers."""
    by_smem = gpu.smem_per_sm_bytes // round_up(max(1, smem_bytes + reserved_smem(gpu.capability)), SMEM_UNIT)
    return min(by_smem, MANY_THREADS.get(gpu.capability, 1536) // threads)


def padded(smem_bytes: int, threads: int, gpu: Device, small: Device) -> int:
    """With how much shared memory a block, `gpu` holds as many as `small` does with `smem_bytes`; none stays none.

    Raises:
        UnsupportedError: if no block fits `small`.
    """
    if smem_bytes > small.smem_bytes:
        raise UnsupportedError(f"{smem_bytes} bytes of shared memory a block do not fit {small.name}")
    share = gpu.smem_per_sm_bytes // resident(smem_bytes, threads, small) // SMEM_UNIT * SMEM_UNIT
    return max(smem_bytes, min(share - reserved_smem(gpu.capability), gpu.smem_bytes)) if smem_bytes else 0


def limited(gpu: Device, arch: str, ptx: bool = False) -> Device:
    """`gpu` with the shared memory of `arch`; `ptx`: and its compute capability.

    Raises:
        UnsupportedError: if it has less.
    """
    small = Device.synthetic(arch)
    if small.smem_per_sm_bytes > gpu.smem_per_sm_bytes or (ptx and small.capability > gpu.capability):
        raise UnsupportedError(f"{gpu.name} has {'fewer instructions' if ptx else 'less shared memory'} than {arch}")
    name = f"{gpu.name} with the {'kernels' if ptx else 'shared memory'} of {arch}"
    capability = small.capability if ptx else gpu.capability
    sizes = {"smem_bytes": small.smem_bytes, "smem_per_sm_bytes": small.smem_per_sm_bytes}
    return replace(gpu, name=name, capability=capability, **sizes)


def load_ptx(variant: Variant, device: Device) -> jit.Kernel:
    """A kernel of `device`'s architecture, from PTX, on the GPU that is there."""
    import cupy

    compiler, module = nvrtc.find(), cupy.cuda.Module()
    options = jit._options(jit.target_arch(device.arch, compiler))
    module.load(compiler.compile(variant.source(), f"{variant.symbol}.cu", kernel_sources(), options, "PTX")[0])
    function = module.get_function(variant.symbol)
    return jit.Kernel(variant, function.ptr, function)


@contextlib.contextmanager
def loading_ahead(wanted: Sequence[tuple[Case | CacheCase, str]], gpu: Device) -> Iterator[None]:
    """In the place of `compiling_ahead`, whose process knows nothing of this one's limits: by threads."""
    pool = ThreadPoolExecutor(os.cpu_count())
    for variant in needed(wanted, gpu):
        pool.submit(jit.load, variant, gpu)
    try:
        yield
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def as_if(arch: str, ptx: bool = False) -> Iterator[None]:
    """What is prepared inside has the shared memory of `arch`, and is launched so wherever; `ptx`: it is compiled for
    it, too. For the whole process: one thread at a time."""
    small, of, load, launcher = Device.synthetic(arch), Device.of, load_ptx if ptx else jit._load, jit.launcher
    loaded: dict[int, tuple[int, jit.Kernel]] = {}  # shared memory to ask for; the kernel, which stays loaded

    def load_padded(variant: Variant, device: Device) -> jit.Kernel:
        from cupy.cuda import driver

        kernel = load(variant, device)
        room = padded(variant.smem_bytes, variant.threads, of(device.ordinal), small)
        if room > 0:
            driver.funcSetAttribute(kernel.function, jit._MAX_DYNAMIC_SHARED_SIZE_BYTES, room)
        loaded[kernel.function] = room, kernel
        return kernel

    def launcher_padded() -> Any:
        start = launcher()

        def start_padded(function: int, *rest: Any) -> None:  # grid and block, shared memory, and more
            start(function, *rest[:6], loaded[function][0], *rest[7:])

        return start_padded

    with (
        mock.patch.object(Device, "of", lambda ordinal: limited(of(ordinal), arch, ptx)),
        mock.patch.object(jit, "_load", load_padded),
        mock.patch.object(jit, "launcher", launcher_padded),
        mock.patch.dict(jit._kernels, clear=True),
        mock.patch.dict(os.environ, CUPYFLASH_FAMILY="sm80"),
    ):
        launch.forget()
        try:
            yield
        finally:
            launch.forget()


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "allow_interspersed_args": False},
    epilog=exit_codes("those of the command, 3 no usable GPU, 4 this GPU has less than ARCH"),
)
@click.option("--ptx", is_flag=True, help="Also compile for ARCH, which is to be older than this GPU.")
@click.argument("arch", type=click.Choice(ARCHS), metavar="ARCH")
@click.argument("arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND ...")
def main(ptx: bool, arch: str, arguments: tuple[str, ...]) -> None:
    """Run `cupyflash COMMAND ...` with the shared memory of the GPUs of ARCH, such as sm_86."""
    try:
        limited(Device.of(0), arch, ptx)
    except CupyflashError as e:
        explain(e)
        raise SystemExit(Exit.of(e)) from None
    ahead = loading_ahead if ptx else verify.compiling_ahead
    alone = mock.patch.object(watchdog, "is_watched", return_value=True)  # so that it needs no child
    with as_if(arch, ptx), mock.patch.object(verify, "compiling_ahead", ahead), alone:
        cupyflash(arguments, prog_name="cupyflash")


if __name__ == "__main__":
    main()
