"""Which features do not go together yet."""

from __future__ import annotations

from .errors import UnsupportedError


def check_together(bias: str | None, block_mask: bool, packed: bool) -> None:
    """Refuse what is not supported, by name.

    `bias`: "bias" or "mask", what is added to the scores; None without.

    Raises:
        UnsupportedError: some of these are given, and do not go together.
    """
    if bias and packed:
        raise UnsupportedError(
            f"{bias}: a {bias} of packed sequences is not supported, since each would need one of its own shape; give "
            "the sequences as a batch, padded, with kv_range"
        )
    if block_mask and packed:
        raise UnsupportedError(
            "block_mask: packed sequences with a block mask are not supported yet; pad them, or use `attention` with "
            "masks.causal_document"
        )
