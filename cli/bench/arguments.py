"""What can be known of `bench`'s arguments before minutes of timing."""

from __future__ import annotations

from pathlib import Path

import click

from cupyflash.problem import MAX_SEQLEN


def check_plot(path: Path | None) -> None:
    """Can the picture be drawn?"""
    if path is None:
        return
    if path.suffix not in (".png", ".svg"):
        raise click.BadParameter(f"{path} ends neither in .png nor in .svg", param_hint="--plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise click.BadParameter("matplotlib is missing: pip install 'cupyflash[plot]'", param_hint="--plot") from None


def check_lengths(seqlens: tuple[int, ...]) -> None:
    """Are these lengths of sequences?"""
    for n in seqlens:
        if not 1 <= n <= MAX_SEQLEN:
            raise click.BadParameter(f"expected lengths from 1 to {MAX_SEQLEN}, got {n}", param_hint="--seqlens")


def check_writable(option: str, path: Path | None) -> None:
    """Can the file be written? One that is there stays as it is."""
    if path is None:
        return
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as e:
        raise click.BadParameter(f"{path} cannot be written: {e.strerror}", param_hint=option) from None
