"""What the examples share: where to run, timing in turns, and results as a table or as JSON."""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import torch
import transformers
from rich.console import Console
from rich.table import Table

device_option = click.option(
    "--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True, help="cuda, cuda:1 or cpu."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the results as JSON, and nothing else.")
IMPLEMENTATIONS = ("eager", "sdpa", "cupyflash")


def start(device: str) -> tuple[torch.device, torch.dtype]:
    """The device, ready, and the dtype for it: bf16 on a GPU (fp16 before Ampere), fp32 on the CPU, where cupyflash
    computes too."""
    import cupyflash.transformers

    if torch.device(device).type == "cpu":
        os.environ["CUPYFLASH_BACKEND"] = "cpu"  # else sdpa would be asked, which is faster there
    cupyflash.transformers.register()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    if torch.device(device).type == "cpu":
        return torch.device(device), torch.float32
    has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.device(device), torch.bfloat16 if has_bf16 else torch.float16


def in_turns(model: Any, call: Callable[[], Any], device: torch.device, rounds: int) -> dict[str, float]:
    """Median seconds of a call of the model with each implementation, in a new random order each round; a round before
    warms up, and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
    for _ in range(rounds + 1):
        for name in random.sample(IMPLEMENTATIONS, len(IMPLEMENTATIONS)):
            model.set_attn_implementation(name)
            _wait(device)
            begin = time.perf_counter()
            call()
            _wait(device)
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """What a call takes of the GPU's memory beyond what is there before; None on the CPU, where nobody counts."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    _wait(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def milliseconds(x: float) -> str:
    return f"{1000 * x:.2f} ms"


def mebibytes(x: int | None) -> str:
    return "not counted" if x is None else f"{x / 2**20:.0f} MiB"


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table."""
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def show_json(results: Mapping[str, Any]) -> None:
    click.echo(json.dumps(results, indent=2))
