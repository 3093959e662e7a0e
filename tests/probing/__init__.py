"""Probes of instructions: the same kernels on a GPU and on the emulator (`tests/emulator`), which tests alone run."""
