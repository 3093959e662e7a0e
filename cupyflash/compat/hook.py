"""``import flash_attn`` gives `cupyflash.compat.flash_attn`, in this process and until it is taken back.

A finder in front of Python's own answers for the name. Of a flash-attn that is installed, the modules that ours lacks
are still found (``flash_attn.ops``, ``flash_attn.cute``), and no others. The finder answers for the metadata too, since
many who look for flash-attn ask ``importlib.metadata`` for its version.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module, metadata, util
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

# The last release whose interface this is. Plain: a local part, as in 2.8.3+cupyflash, counts as newer than 2.8.3 where
# versions are compared, and is no integer where they are split at the dots.
FLASH_ATTN_VERSION = "2.8.3"
NAME = "flash_attn"


class _Alias(Loader):
    """Puts the module of ours in the place of the one that is being imported."""

    def __init__(self, ours: str) -> None:
        self.ours = ours

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make one, which `exec_module` replaces: ours keeps its own name and spec."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(self.ours)


class _Distribution(metadata.Distribution):
    """What ``importlib.metadata`` says of flash-attn meanwhile."""

    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {FLASH_ATTN_VERSION}\n"
            "Summary: cupyflash.compat.flash_attn, which stands in for it\n",
            "top_level.txt": f"{NAME}\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _Finder:
    """Answers for flash_attn, its submodules and its metadata, and for nothing else.

    Attributes:
        theirs: the folders of the one that is installed, or none.
    """

    theirs: tuple[str, ...] = ()

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if not _is_lent(name):
            return None
        ours = f"{__package__}.{name}"
        try:
            found = util.find_spec(ours)
        except ModuleNotFoundError:  # ours lacks what it would lie in
            found = None
        if found is None:
            within = name.split(".")[1:-1]
            return PathFinder.find_spec(name, [str(Path(folder, *within)) for folder in cls.theirs])
        return util.spec_from_loader(name, _Alias(ours), is_package=found.submodule_search_locations is not None)

    @staticmethod
    def find_distributions(context: Any = None) -> Iterable[metadata.Distribution]:
        name = getattr(context, "name", None)
        is_asked = name is None or re.sub(r"[-_.]+", "-", name).lower() == "flash-attn"
        return [_Distribution()] if is_asked else []


class Installed:
    """That the name is lent: take it back with `remove`, or use it in a ``with`` statement."""

    _lenders: tuple[Installed, ...] = ()  # those not removed yet
    _hidden: dict[str, ModuleType]  # the modules of that name before the first of them

    def __init__(self) -> None:
        if not Installed._lenders:
            Installed._hidden = _taken_out()
            if Installed._hidden:
                warnings.warn(
                    "flash_attn was imported before cupyflash.compat.install(): modules that hold its functions keep "
                    "them; install first",
                    UserWarning,
                    stacklevel=3,
                )
            found = util.find_spec(NAME)
            _Finder.theirs = tuple((found and found.submodule_search_locations) or ())
            sys.meta_path.insert(0, _Finder)
        Installed._lenders += (self,)

    def remove(self) -> None:
        """Give the name back. Who has imported from it keeps what it has. A second call does nothing."""
        if self not in Installed._lenders:
            return
        Installed._lenders = tuple(x for x in Installed._lenders if x is not self)
        if not Installed._lenders:
            sys.meta_path.remove(_Finder)
            _taken_out()
            sys.modules.update(Installed._hidden)

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def install() -> Installed:
    """Let ``import flash_attn`` give `cupyflash.compat.flash_attn` in this process, beside an installed one or not.

    Call it before anything that looks for flash_attn is imported: transformers, for one, looks once. Processes started
    by fork have it too, those started by spawn call it themselves.

    Returns:
        `Installed`: ``install()`` for good, ``with install():`` for a while.

    Example:
        >>> with install():
        ...     import flash_attn
        >>> flash_attn.__name__
        'cupyflash.compat.flash_attn'
    """
    return Installed()


def _is_lent(name: str) -> bool:
    return name == NAME or name.startswith(f"{NAME}.")


def _taken_out() -> dict[str, ModuleType]:
    """The modules of that name, taken out of `sys.modules`."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if _is_lent(name)}
