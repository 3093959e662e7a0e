"""What NVRTC makes of kernels, kept in golden/compiled.json: one that has not changed is not compiled again.

A kernel's key is a digest of all that its compilation depends on: the entry unit and the headers that it includes,
without comments and white space, the options, and which NVRTC. What was kept under another key is not believed, and of
the others some are compiled all the same, to be compared: which ones goes by the keys, so by the text of the kernels.
``PYTHONPATH=. python tests/kernels/test_compile.py`` writes the file, and compiles for it what it does not know.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import struct
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cupyflash.compile import jit, nvrtc
from cupyflash.compile.cache import Cubin
from cupyflash.plan.variant import Variant, kernel_sources
from tests.sass import opcodes

KEPT = Path(__file__).resolve().parent / "golden" / "compiled.json"
SAMPLE = 48  # of those that are known one in so many is compiled
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_COMMENT = re.compile(r"//.*")


@dataclass(frozen=True)
class Facts:
    """What tests ask of a kernel.

    Attributes:
        spills: "no", "producer" where no consumer of a persistent Hopper kernel does, "few" where tiles of the sm80
            family have at least `MUCH` products for each local load or store, or "yes".
        advice: what ptxas says of wgmma, by number.
        code: digest of the machine code.
    """

    registers: int
    spills: str
    advice: tuple[str, ...]
    code: str

    @classmethod
    def of(cls, v: Variant, cubin: Cubin) -> Facts:
        spills = _spills(v, cubin.data) if cubin.spill_bytes else "no"
        advice = tuple(sorted(set(re.findall(r"C75\d\d", cubin.advice))))
        return cls(cubin.registers, spills, advice, hashlib.sha256(machine_code(cubin.data)).hexdigest()[:16])

    @classmethod
    def read(cls, text: str) -> Facts:
        registers, spills, code, *advice = text.split()
        return cls(int(registers), spills, tuple(advice), code)

    def __str__(self) -> str:
        return " ".join((str(self.registers), self.spills, self.code, *self.advice))


Made = tuple[Variant, str, Facts]
MUCH = 12  # the fastest tiles have 13.5 and more (docs/performance.md, "Rows without gaps")


def _plain(text: str) -> str:
    """Without what makes no code."""
    lines = (" ".join(_COMMENT.sub("", line).split()) for line in text.splitlines())
    return "\n".join(filter(None, lines))


@functools.cache
def _header(name: str) -> str:
    return _plain(kernel_sources()[name])


@functools.cache
def _reached(name: str) -> frozenset[str]:
    """A header, and those that it includes, itself or by others."""
    found, todo = {name}, [name]
    while todo:
        new = set(_INCLUDE.findall(_header(todo.pop()))) - found
        found |= new
        todo += new
    return frozenset(found)


@functools.cache
def _digest(included: frozenset[str]) -> str:
    return hashlib.sha256("\0".join(f"{name}\0{_header(name)}" for name in sorted(included)).encode()).hexdigest()


def key(v: Variant, arch: str) -> str:
    """Of a kernel for an architecture, and of the NVRTC that is used here."""
    unit = _plain(v.source())
    included = frozenset[str]().union(*map(_reached, _INCLUDE.findall(unit)))
    arch += v.arch_suffix
    parts = unit, _digest(included), *jit._options(arch), nvrtc.find().name, nvrtc.pick().identity
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@functools.cache
def kept() -> dict[str, dict[str, str]]:
    """Architecture -> symbol -> key and facts."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def known(v: Variant, arch: str) -> Facts | None:
    """What was kept of this very kernel."""
    of, _, facts = kept().get(arch, {}).get(v.symbol, "").partition(" ")
    return Facts.read(facts) if of == key(v, arch) else None


def compiled(todo: Iterable[tuple[Variant, str]]) -> Iterator[Made]:
    """By NVRTC."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda each: (*each, Facts.of(each[0], jit.compile_kernel(*each))), todo)


def facts_of(todo: Iterable[tuple[Variant, str]]) -> list[Made]:
    """What is known, and the rest compiled; some of what is known, too.

    Raises:
        AssertionError: if NVRTC makes of one what was not kept of it.
    """
    asked = list(todo)
    found = {each: facts for each in asked if (facts := known(*each)) is not None}
    tried = [each for each in asked if each not in found or int(key(*each), 16) % SAMPLE == 0]
    for v, arch, facts in compiled(tried):
        before = found.setdefault((v, arch), facts)
        assert facts == before, f"{v.symbol}, {arch}: {KEPT.name} has {before}, NVRTC makes {facts}"
    return [(*each, found[each]) for each in asked]


def keep(made: Iterable[Made]) -> None:
    """These and no others."""
    found: dict[str, dict[str, str]] = {}
    for v, arch, facts in made:
        found.setdefault(arch, {})[v.symbol] = f"{key(v, arch)} {facts}"
    KEPT.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    kept.cache_clear()


def machine_code(cubin: bytes) -> bytes:
    """The instructions of an ELF file: its sections .text.*."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    names = cubin[sections[names_at][4] :]
    code = [cubin[s[4] : s[4] + s[5]] for s in sections if names[s[0] :].startswith(b".text.")]
    assert code
    return b"".join(code)


def _spills(v: Variant, cubin: bytes) -> str:
    """As `Facts` has it. No consumer of a persistent Hopper kernel spills where all local loads and stores, and no
    product, come behind the place where the producer's warps give registers away. There the warp that schedules packed
    tiles has 32 of them a thread, and waits for most of its time.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = opcodes(cubin, Path(folder))
    start = next((i for i, op in enumerate(found) if op.startswith("USETMAXREG.DEALLOC")), None)
    is_spill = [op.startswith(("STL", "LDL")) for op in found]
    if v.persistent and start is not None and not any(is_spill[:start]):
        return "yes" if any("GMMA" in op for op in found[start:]) else "producer"
    products = sum(op.startswith("HMMA") for op in found) if v.folder in ("sm80", "any") else 0
    return "few" if 0 < MUCH * sum(is_spill) <= products else "yes"
