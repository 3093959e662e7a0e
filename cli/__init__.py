"""The command line: ``cupyflash <command>``. Each command is a module or a folder with a `main`, loaded when run.

In this folder import the library by its full name (``from cupyflash import device``): a checker that looks at a
checkout sees this package as ``cli``, not as ``cupyflash.cli``.
"""

from __future__ import annotations

import errno
from importlib import import_module
from typing import Any

import click

from cupyflash import __version__, errors

from .output import WANTS_JSON, Exit, emit_error
from .output import explain as explain_error  # `cupyflash explain` is the module of that name

COMMANDS = {
    "verify": "Check the kernels of this machine against a float64 reference.",
    "doctor": "Look at GPUs, driver, packages and cache, and say how to fix what is wrong.",
    "bench": "Time attention, alone or against other implementations.",
    "explain": "Say what a call would do and why: kernels, launches, registers, least time.",
    "run": "Run a script with cupyflash in the place of flash-attn.",
    "compile": "Compile kernels ahead of time, GPU or not.",
    "cache": "Show or empty the folder of compiled kernels.",
}


class Commands(click.Group):
    """The commands above, each imported only when it is run: `--help` and `--version` answer at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = import_module(f"{__name__}.{name}")
        if hasattr(module, "__path__"):  # a folder, where the command needs helpers
            module = import_module(f"{module.__name__}.main")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[WANTS_JSON] = "--json" in args and args[0] != "run"  # whose script may have such an option
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as e:
            emit_error(ctx, e.format_message(), Exit.USAGE)
            raise
        except OSError as e:  # of --help and --version
            self._not_written(ctx, e)
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; what cupyflash raises on purpose becomes a message and an exit code, not a traceback."""
        try:
            return super().invoke(ctx)
        except errors.CupyflashError as e:
            explain_error(e)
            self._end(ctx, str(e), Exit.of(e))
        except click.UsageError as e:
            emit_error(ctx, e.format_message(), Exit.USAGE)
            raise
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            self._end(ctx, "interrupted", Exit.INTERRUPTED)
        except OSError as e:
            self._not_written(ctx, e)
            raise

    @staticmethod
    def _not_written(ctx: click.Context, e: OSError) -> None:
        """End where a disk is full."""
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            click.echo(f"error: {e.strerror}: not all could be written", err=True)
            ctx.exit(Exit.UNSUPPORTED)

    @staticmethod
    def _end(ctx: click.Context, message: str, code: Exit) -> None:
        emit_error(ctx, message, code)
        ctx.exit(code)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes of all commands: 0 success, 2 wrong usage, 4 not supported, 130 interrupted; others are listed "
    "in the help of the command.",
)
@click.version_option(__version__, prog_name="cupyflash")
def main() -> None:
    """Exact attention kernels that compile on your machine."""
