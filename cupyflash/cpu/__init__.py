"""The same tiled algorithm in NumPy, where there is no GPU."""
