"""Ends a command that hangs, with the name of what it was doing.

A kernel that never ends blocks the process that waits for it, perhaps inside C code that holds Python's lock, and a
driver may end that process. So the work is done by a child, and the parent, which never touches the GPU, only listens:
what begins, what was found, how the child ended. It can name the case, print the JSON document and give an exit code
whatever state the child is in, which a thread of the same process could not.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import click

from cupyflash.cpu.workers import BLAS_LIMITS

from .output import Exit

START = "the start: imports and the first look at the GPU"
_END_SECONDS = 10.0  # that a child which was killed, or has closed its end, gets to be gone
_POLL_SECONDS = 3600.0
_parent: Connection | None = None  # in the child


@dataclass
class Progress:
    """What the parent has heard.

    Attributes:
        step: what is being done, in words.
        facts: what the child said of it and before, by name: the newest of each name, or a list of all.
    """

    step: str = START
    facts: dict[str, Any] = field(default_factory=dict)

    def hear(self, step: str | None, facts: dict[str, Any], result: tuple[str, Any] | None) -> None:
        self.step = step or self.step
        self.facts |= facts
        if result is not None:
            self.facts.setdefault(result[0], []).append(result[1])


def tell(step: str | None = None, result: tuple[str, Any] | None = None, **facts: Any) -> None:
    """Say to the parent, if there is one, what begins now (its time starts again), or what was found."""
    if _parent is not None:
        _parent.send((step, facts, result))


def watch(arguments: list[str], timeout: float, on_end: Callable[[Progress, str, Exit], None]) -> int:
    """Run ``cupyflash <arguments>`` in a child; each step that it tells of may take `timeout` seconds. The exit code.

    Args:
        on_end: called with the progress, why in words, and the exit code, if the child hung or was ended by a signal.
    """
    context = multiprocessing.get_context("spawn")  # a fork would inherit locks and, from some libraries, threads
    ours, theirs = context.Pipe(duplex=False)
    with _interrupts_ignored(), _one_blas_thread() as added:  # and so in the child: Ctrl-C reaches both, and we end it
        child = context.Process(target=_child, args=(theirs, arguments, added), daemon=True)
        child.start()
    theirs.close()
    try:
        progress, hangs = _listen(ours, timeout)
        if not hangs:
            child.join(_END_SECONDS)
    except KeyboardInterrupt:
        _kill(child)
        raise
    code, told = child.exitcode, progress.facts.get("exit_code")
    if told is not None and code != told:  # all was done and printed, but the end itself went wrong
        _kill(child, told)
        return int(told)
    if hangs or code is None:
        on_end(progress, f"did not end within {timeout:g} s", Exit.TIMEOUT)
        _kill(child, Exit.TIMEOUT)
        return Exit.TIMEOUT
    if code < 0:
        on_end(progress, f"ended the process ({_signal_name(-code)})", Exit.FAILED)
        return Exit.FAILED
    return code


def is_watched() -> bool:
    """Whether this is the child."""
    return _parent is not None


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _one_blas_thread() -> Iterator[list[str]]:
    """Unless the user says how many; the variables that say so. BLAS's threads wait for each other by spinning: beside
    compilations on all cores, the reference took many times as long with them as with one."""
    added = [name for name in BLAS_LIMITS if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield added
    finally:
        for name in added:
            del os.environ[name]


def _listen(ours: Connection, timeout: float) -> tuple[Progress, bool]:
    """What the child says until it closes its end; whether it has been silent for `timeout` seconds instead."""
    progress, deadline = Progress(), time.monotonic() + timeout
    while _is_told(ours, deadline):
        try:
            progress.hear(*ours.recv())
        except (EOFError, OSError):
            return progress, False
        deadline = time.monotonic() + timeout
    return progress, True


def _is_told(ours: Connection, deadline: float) -> bool:
    """Whether anything comes until then, however far that is: a poll takes no more than some weeks."""
    while not ours.poll(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            return False
    return True


def _kill(child: SpawnProcess, code: int = Exit.INTERRUPTED) -> None:
    """End the child; if the driver does not let go of it, end this process without waiting any longer."""
    child.kill()
    child.join(_END_SECONDS)
    if child.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _child(theirs: Connection, arguments: list[str], added: list[str]) -> None:
    from . import main

    for name in added:  # BLAS is loaded and has read them; our own threads, which are verified too, go by them as well
        del os.environ[name]
    global _parent
    _parent = theirs
    main(arguments, prog_name="cupyflash")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Watched(click.Command):
    """A command that remembers how it was called, so that a child can be."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[__name__] = list(args)
        return super().parse_args(ctx, args)


def arguments_of(ctx: click.Context) -> list[str]:
    """The arguments of a `Watched` command."""
    found: list[str] = ctx.meta[__name__]
    return found
