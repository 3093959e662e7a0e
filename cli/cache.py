"""``cupyflash cache``: where compiled kernels lie, what lies there, and a way to empty it."""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from typing import Any

import click
from rich.table import Table

from cupyflash.compile import cache, upkeep
from cupyflash.errors import UnsupportedError

from .output import Exit, counted, emit, exit_codes, gib, human, json_option

precompiled_option = click.option("--precompiled", is_flag=True, help="The precompiled layer, too.")


@click.group(
    epilog=exit_codes("0 done, 4 no folder is known, as without a home folder, or it cannot be read or emptied")
)
def command() -> None:
    """Show or empty the folder of compiled kernels.

    It is CUPYFLASH_CACHE_DIR where that is set, else the platform's folder for caches. It is bounded in size; emptying
    it costs nothing but recompilation.
    """


@command.command()
@json_option
def path(as_json: bool) -> None:
    """Print the folder."""
    store = cache.default()
    if store.path is None:
        raise UnsupportedError(store.missing)
    if as_json:
        emit({"command": "cache path", "path": str(store.path)})
    else:
        click.echo(store.path)


@command.command()
@precompiled_option
@json_option
def info(precompiled: bool, as_json: bool) -> None:
    """Print the folder, its size, and what lies in it by architecture."""
    store = cache.default()
    entries, problem = store.entries(), store.problem
    layers = store.layers() if precompiled else {}
    if as_json:
        document: dict[str, Any] = {
            "command": "cache info",
            "path": None if store.path is None else str(store.path),
            "problem": problem,
            "bytes": _size(entries),
            "limit_bytes": upkeep.MAX_BYTES,
            "entries": [asdict(e) for e in entries],
        }
        if precompiled:
            document["precompiled"] = [asdict(e) for found in layers.values() for e in found]
            document["precompiled_problems"] = store.layer_problems(None)
        emit(document)
        return
    console = human()
    console.print(f"{store.path or 'none'}", soft_wrap=True)
    console.print(f"{counted(len(entries), 'kernel')}, {gib(_size(entries))} of at most {gib(upkeep.MAX_BYTES)}")
    if problem:
        console.print(f"not used: {problem}", style="yellow", soft_wrap=True)
    if entries:
        console.print(_by_arch(entries))
    if precompiled:
        found = [e for each in layers.values() for e in each]
        console.print(f"precompiled: {counted(len(found), 'kernel')}, {gib(_size(found))}")
        for reason in store.layer_problems(None):
            console.print(f"not used: {reason}", style="yellow", soft_wrap=True)
        if found:
            console.print(_by_arch(found))


def _size(entries: list[upkeep.Entry]) -> int:
    return sum(e.bytes for e in entries)


def _by_arch(entries: list[upkeep.Entry]) -> Table:
    """One row for each architecture and NVRTC version."""
    groups: dict[tuple[str, str], list[upkeep.Entry]] = defaultdict(list)
    for entry in entries:
        groups[entry.arch, entry.nvrtc].append(entry)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("architecture", "NVRTC", "kernels", "size", "compiled in", "last used"):
        table.add_column(name, justify="left" if name in ("architecture", "NVRTC") else "right")
    for (arch, nvrtc), group in sorted(groups.items()):
        used = time.strftime("%Y-%m-%d", time.localtime(max(e.modified for e in group)))
        seconds = f"{sum(e.seconds for e in group):.1f} s"
        table.add_row(arch, nvrtc, str(len(group)), gib(_size(group)), seconds, used)
    return table


@command.command()
@precompiled_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def clear(precompiled: bool, yes: bool, as_json: bool) -> None:
    """Remove all compiled kernels, and nothing else that may lie in the folder."""
    store = cache.default()
    if store.path is None:
        raise UnsupportedError(store.missing)
    entries = store.entries()
    if precompiled:
        entries += [e for found in store.layers().values() for e in found]
    if entries and not yes and sys.stdin is None:
        raise click.UsageError("there is nobody to ask; give --yes")
    if entries and not yes:
        click.confirm(
            f"Remove {counted(len(entries), 'kernel')} ({gib(_size(entries))}) from {store.path}?", abort=True, err=True
        )
    removed, errors = store.clear(precompiled=precompiled)
    if as_json:
        emit(
            {"command": "cache clear", "path": str(store.path), "removed": removed, "errors": [str(e) for e in errors]}
        )
    else:
        click.echo(f"{counted(removed, 'kernel')} removed from {store.path}")
    if os.path.exists(store.path) and store.problem:
        raise UnsupportedError(f"{store.path}: {store.problem}")
    if errors:
        click.echo(f"error: {len(errors)} files could not be removed: {errors[0]}", err=True)
        raise SystemExit(Exit.UNSUPPORTED)
