"""The CPU emulator: runs the kernels of kernels_cu, compiled for the CPU, one fiber a CUDA thread. See README.md."""

from .compiler import missing_compiler
from .launch import MODES, EmulatedKernel, EmulatorError, Memory, Mode

__all__ = ["MODES", "EmulatedKernel", "EmulatorError", "Memory", "Mode", "missing_compiler"]
