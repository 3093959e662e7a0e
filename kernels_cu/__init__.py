"""The CUDA sources, as package data: NVRTC compiles them from this folder."""
