"""Attention over a cache of keys and values: what a call is and what its arrays are, without framework and GPU."""
