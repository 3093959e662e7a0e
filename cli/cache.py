"""``cupyflash cache``: where compiled kernels lie, what lies there, and a way to empty it."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import asdict

import click
from rich.table import Table

from cupyflash import cache

from .output import emit, exit_codes, gib, human, json_option


@click.group(epilog=exit_codes("0 done"))
def command() -> None:
    """Show or empty the folder of compiled kernels.

    It is CUPYFLASH_CACHE_DIR where that is set, else the platform's folder for caches. It is bounded in size; emptying
    it costs nothing but recompilation.
    """


@command.command()
def path() -> None:
    """Print the folder."""
    click.echo(cache.default().path)


@command.command()
@json_option
def info(as_json: bool) -> None:
    """Print the folder, its size, and what lies in it by architecture."""
    store = cache.default()
    entries, problem = store.entries(), store.problem
    if as_json:
        emit(
            {
                "command": "cache info",
                "path": str(store.path),
                "problem": problem,
                "bytes": store.size_bytes(),
                "limit_bytes": cache.MAX_BYTES,
                "entries": [asdict(e) for e in entries],
            }
        )
        return
    console = human()
    console.print(f"{store.path}", soft_wrap=True)
    console.print(f"{len(entries)} kernels, {gib(store.size_bytes())} of at most {gib(cache.MAX_BYTES)}")
    if problem:
        console.print(f"not used: {problem}", style="yellow", soft_wrap=True)
    if entries:
        console.print(_by_arch(entries))


def _by_arch(entries: list[cache.Entry]) -> Table:
    """One row for each architecture and NVRTC version."""
    groups: dict[tuple[str, str], list[cache.Entry]] = defaultdict(list)
    for entry in entries:
        groups[entry.arch, entry.nvrtc].append(entry)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("architecture", "NVRTC", "kernels", "size", "compiled in", "last used"):
        table.add_column(name, justify="left" if name in ("architecture", "NVRTC") else "right")
    for (arch, nvrtc), group in sorted(groups.items()):
        used = time.strftime("%Y-%m-%d", time.localtime(max(e.modified for e in group)))
        seconds = f"{sum(e.seconds for e in group):.1f} s"
        table.add_row(arch, nvrtc, str(len(group)), gib(sum(e.bytes for e in group)), seconds, used)
    return table


@command.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(yes: bool) -> None:
    """Remove all compiled kernels; the read-only precompiled layer stays."""
    store = cache.default()
    count, size = len(store.entries()), store.size_bytes()
    if count and not yes:
        click.confirm(f"Remove {count} kernels ({gib(size)}) from {store.path}?", abort=True, err=True)
    click.echo(f"{store.clear()} kernels removed from {store.path}")
