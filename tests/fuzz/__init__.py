"""Random and covering problems for the CPU path, the emulator and a GPU, with an oracle of their own. See README.md."""
