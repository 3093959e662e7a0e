"""Bugs planted in the kernels by their markers, which the tests of the emulator expect it to report."""
