"""From a kernel variant to a loaded cubin: NVRTC, the cache on disk, layers of precompiled cubins."""
