"""The CPU emulator: runs the kernels of kernels_cu, compiled by g++, one fiber a CUDA thread. See README.md."""

from .build import missing_compiler
from .launch import MODES, EmulatedKernel, EmulatorError, Memory, Mode

__all__ = ["MODES", "EmulatedKernel", "EmulatorError", "Memory", "Mode", "missing_compiler"]
