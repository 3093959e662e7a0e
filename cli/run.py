"""``cupyflash run``: a script as Python runs it, with cupyflash in the place of another library."""

from __future__ import annotations

import importlib.util
import io
import os
import runpy
import sys
import types
import zipfile

import click

from .output import Exit, exit_codes

_RUNNERS = (__file__, runpy.__file__, "<frozen runpy>")  # whose frames say nothing about the script


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=exit_codes("0 done, 1 the script raised an exception, else the script's own"),
)
@click.option("--flash-attn", is_flag=True, help="import flash_attn gives cupyflash.compat.flash_attn.")
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as in python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(flash_attn: bool, is_module: bool, script: str, args: tuple[str, ...]) -> None:
    """Run SCRIPT with ARGS, in this process, on cupyflash instead of another library.

    The script runs as __main__, with its own sys.argv and its folder in front of sys.path. Options of this command
    stand before SCRIPT.
    """
    if script.startswith("-"):
        raise click.NoSuchOption(script)
    if not flash_attn:
        raise click.UsageError("say which library cupyflash stands in for: --flash-attn")
    if not is_module and not os.path.exists(script):
        raise click.BadParameter(f"no file {script!r}", param_hint="SCRIPT")
    if is_module and not _is_module(script):
        raise click.BadParameter(f"no module {script!r}", param_hint="SCRIPT")
    from cupyflash import compat

    compat.install()
    sys.argv = [script, *args]
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            script = os.path.abspath(script)
            if os.path.isfile(script) and not (script.endswith(".pyc") or zipfile.is_zipfile(script)):
                sys.path.insert(0, os.path.dirname(script))
                _run_file(script)
            else:  # with a __main__.py inside, or compiled
                runpy.run_path(script, run_name="__main__")
    except Exception as e:  # of the script, not of the command: reported as Python does, from the script on
        where = e.__traceback__
        while where is not None and where.tb_next and where.tb_frame.f_code.co_filename in _RUNNERS:
            where = where.tb_next
        if where is not None and where.tb_frame.f_code.co_filename in _RUNNERS:  # the script was not begun
            where = None
        sys.excepthook(type(e), e.with_traceback(where), where)
        if isinstance(e, ModuleNotFoundError) and (e.name or "").startswith(f"{compat.NAME}."):
            click.echo(f"cupyflash stands in for {compat.NAME} and has no {e.name}: see docs/flash_attn.md", err=True)
        raise SystemExit(Exit.FAILED) from None


def _run_file(script: str) -> None:
    """As __main__, which it stays to the end of the process: what outlives its last line (threads, atexit) finds its
    names there, as from Python."""
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    with io.open_code(script) as f:
        code = compile(f.read(), script, "exec")
    exec(code, main.__dict__)


def _is_module(name: str) -> bool:
    """Whether Python finds a module, or its package, which is not imported yet, from the working directory too."""
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.remove(os.getcwd())
