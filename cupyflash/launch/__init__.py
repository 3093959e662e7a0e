"""A call on its way to the GPU: prepared once for each spec, then filled in and handed to the driver."""
