"""Which features do not go together yet."""

from __future__ import annotations

from .errors import UnsupportedError


def check_together(block_mask: bool, packed: bool) -> None:
    """Refuse what is not supported, by name.

    Raises:
        UnsupportedError: some of these are given, and do not go together.
    """
    if block_mask and packed:
        raise UnsupportedError(
            "block_mask: packed sequences with a block mask are not supported yet; pad them, or use `attention` with "
            "masks.causal_document"
        )
