"""From a problem and a device to launches: families, tiles, variants, grids, workspaces. Nothing here needs a GPU."""
