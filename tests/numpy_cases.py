"""Cases of NumPy arrays that travel to a GPU and back: all kinds of arrays and of memory."""

from __future__ import annotations

from cupyflash.check.cases import Case


def kinds(seqlen_q: int, seqlen_k: int, head_dim: int, longest: int) -> tuple[Case, ...]:
    """Of these sizes; seqlen_k is odd, and `longest` is that of packed sequences."""
    odd, even = (seqlen_q, seqlen_k, head_dim), (seqlen_q, seqlen_k + 1, head_dim)
    packed = {
        "lengths_q": (50, 0, longest), "lengths_k": (60, 10, longest), "used_k": (60, 3, longest - 1), "batch": 3,
    }  # fmt: skip
    return (
        Case("turned", "full", *odd, batch=2, layout="bhsd", memory="bhsd_storage", causal=True),
        Case("every-second", "full", *odd, memory="every_second_row"),
        Case("heads-repeat", "full", *odd, memory="broadcast_heads"),
        Case("misaligned", "full", *odd, batch=2, memory="misaligned"),
        Case("features", "full", *even, batch=2, alibi=2, sink=True, bias="hk + bqk bool", dropout_p=0.2),
        Case("bias-repeats", "full", *even, batch=2, bias="bk fp32 whole"),
        Case("block-mask", "full", *odd, mask="tiles_of_heads"),
        Case("mods", "full", *odd, mods="every"),
        Case("ranges", "full", *odd, batch=2, ranges=((3, seqlen_k - 35), (10, 11))),
        Case("packed", "full", longest + 50, longest + 70, head_dim, **packed),
        Case("no-rows", "full", 0, 93, head_dim),
        Case("no-batch", "full", 67, 93, head_dim, batch=0),
    )
