"""Of the covering set, problems with a bias or a mask."""

from __future__ import annotations

import dataclasses

from .spec import Spec

# Along which dimensions a bias has elements of its own, and how.
FORMS = (
    "bhqk", "hqk fp32", "qk hides", "bhqk turned", "bk", "bhqk fp32 shifted", "k fp32 hides", "bhq", "hqk", "bqk whole",
    "h", "qk fp32 turned", "-", "bhqk hides",
)  # fmt: skip


MASKS = ("bqk bool", "hqk bool", "bk bool", "qk bool turned", "bhqk bool shifted")


def masked(spec: Spec, number: int) -> Spec:
    """A problem with a mask, beside a bias if it has one."""
    beside = f"{spec.bias} + " if spec.bias else ""
    return dataclasses.replace(spec, bias=beside + MASKS[number % len(MASKS)], sk=_even(spec, number))


def biased(spec: Spec, number: int) -> Spec:
    """A problem with a bias."""
    return dataclasses.replace(spec, bias=FORMS[number % len(FORMS)], sk=_even(spec, number))


def _even(spec: Spec, number: int) -> int:
    """How many keys: every second time an even number, so that two neighbours may be read together."""
    return spec.sk + spec.sk % 2 if number % 2 == 0 else spec.sk
