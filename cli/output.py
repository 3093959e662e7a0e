"""What all commands share: exit codes, where text goes, JSON documents, progress bars, and options that are lists."""

from __future__ import annotations

import enum
import io
import json as json_module
import logging
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cupyflash import errors

WANTS_JSON = "cupyflash.cli.wants_json"  # in the meta of a context: a document is wanted, and not written yet
PIPE_WIDTH = 100  # columns of a table that goes into a file
Function = TypeVar("Function", bound=Callable[..., Any])


class Exit(enum.IntEnum):
    """Exit codes; each command's help says which it uses."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NO_GPU = 3
    UNSUPPORTED = 4
    COMPILE = 5
    TIMEOUT = 6
    ENVIRONMENT = 7
    INTERRUPTED = 130

    @classmethod
    def of(cls, error: errors.CupyflashError) -> Exit:
        """The code for an error that ends a command."""
        kinds = {
            errors.ArgumentError: cls.USAGE,
            errors.DeviceError: cls.NO_GPU,
            errors.CompileError: cls.COMPILE,
        }
        return next((code for kind, code in kinds.items() if isinstance(error, kind)), cls.UNSUPPORTED)


def explain(error: errors.CupyflashError) -> None:
    """Print an error for a person, on stderr; of a compile error the whole log."""
    if isinstance(error, errors.CompileError):
        click.echo(error.log, err=True)
    click.echo(f"error: {error}", err=True)


def human(json: bool = False) -> Console:
    """Where text for people goes: stdout, or stderr while a JSON document has stdout to itself."""
    stream = sys.stderr if json else sys.stdout
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")  # letters of a path that its encoding does not have
    console = Console(stderr=json, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def emit(document: dict[str, Any]) -> None:
    """Print the one JSON document of a command on stdout."""
    if ctx := click.get_current_context(silent=True):
        ctx.meta[WANTS_JSON] = False  # of a document that an error behind it would write
    click.echo(json_module.dumps(jsonable(document), indent=2, allow_nan=False))


def emit_error(ctx: click.Context, message: str, code: Exit) -> None:
    """The JSON document of a command that an error ended before it wrote one."""
    if ctx.meta.get(WANTS_JSON):
        emit({"command": ctx.invoked_subcommand, "error": message, "exit_code": int(code)})


def jsonable(value: Any) -> Any:
    """`value` in terms of JSON; NaN and infinities, which JSON lacks, become "nan", "inf" and "-inf"."""
    if isinstance(value, dict):
        return {str(key): jsonable(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def quiet() -> None:
    """No notices of single compilations: a command that compiles on purpose shows its own progress."""
    logging.getLogger("cupyflash").setLevel(logging.ERROR)


@contextmanager
def ended_by_terminate() -> Iterator[None]:
    """SIGTERM, as `timeout` sends it, raises KeyboardInterrupt as Ctrl-C does: long work may show what it has."""
    if threading.current_thread() is not threading.main_thread():  # which alone may ask for signals
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def progress(console: Console) -> Iterator[Progress]:
    """A progress bar below the lines of `console` while they appear; nothing where no terminal is looking."""
    bar_console = console if console.is_terminal else Console(stderr=True, markup=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shared = bar_console is console
    with Progress(
        *columns, console=bar_console, transient=True, disable=not bar_console.is_terminal, redirect_stdout=shared
    ) as bar:
        yield bar


class FiniteRange(click.FloatRange):
    """Numbers in a range, of which nan is none; nor is inf, whatever the range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        x = float(super().convert(value, param, ctx))
        if not math.isfinite(x):
            self.fail(f"{value} is not a finite number", param, ctx)
        return x


class CommaList(click.ParamType):  # type: ignore[type-arg]
    """Values separated by commas, such as ``64,128``; becomes a tuple."""

    name = "list"

    def __init__(self, item: Callable[[str], Any], choices: Sequence[Any] | None) -> None:
        self.item, self.choices = item, choices

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        try:
            items = tuple(self.item(part.strip()) for part in str(value).split(",") if part.strip())
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers separated by commas", param, ctx)
        if not items:
            self.fail(f"{value!r} holds no value", param, ctx)
        for item in items:
            if self.choices is not None and item not in self.choices:
                self.fail(f"{item!r} is not one of {', '.join(map(str, self.choices))}", param, ctx)
        return items


def list_option(
    *names: str, help: str, item: Callable[[str], Any] = str, choices: Sequence[Any] | None = None, example: str,
    default: str | None = None, required: bool = False,
) -> Callable[[Function], Function]:  # fmt: skip
    """An option that takes a comma-separated list, may be given several times, and becomes one tuple."""

    def flatten(ctx: click.Context, param: click.Parameter, value: tuple[tuple[Any, ...], ...]) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(x for part in value for x in part))

    return click.option(
        *names,
        type=CommaList(item, choices),
        multiple=True,
        callback=flatten,
        default=None if default is None else [default],
        required=required,
        metavar=example,
        help=help + (f"  [default: {default}]" if default else ""),
    )


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")


def exit_codes(text: str) -> str:
    """The epilog of a command's help."""
    return f"Exit codes: {text}; 2 wrong usage, 130 interrupted."


def counted(n: int, what: str) -> str:
    """So many of it: 1 head, 2 heads."""
    return f"{n} {what if n == 1 else {'query': 'queries'}.get(what, what + 's')}"


def gpu_name(name: str, arch: str, ordinal: int) -> str:
    """A GPU of this machine, or one that stands for its architecture."""
    return f"{name}, {arch}" if ordinal >= 0 else f"a typical GPU of {arch}"


def gib(n: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError
