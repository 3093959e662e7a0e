"""Kernels as the machine runs them."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path


def nvdisasm() -> str:
    """The disassembler of NVIDIA's package."""
    files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    return str(next(f for f in files if f.name == "nvdisasm").locate())


def opcodes(cubin: bytes, folder: Path) -> list[str]:
    """Every instruction's opcode, without predicates and operands."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    done = subprocess.run([nvdisasm(), "-c", str(path)], capture_output=True, text=True, check=True)
    found = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", done.stdout, re.MULTILINE)
    assert found, done.stderr
    return found
