"""Of the covering set, a few problems that show every value of every axis, with a bias."""

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
    """A problem with a mask, some with slopes, too."""
    sk = spec.sk + spec.sk % 2 if number % 2 == 0 else spec.sk
    return dataclasses.replace(spec, bias=MASKS[number % len(MASKS)], sk=sk, alibi=int(number % 4 == 1))


def biased(spec: Spec, number: int) -> Spec:
    """A problem with a bias: some with slopes, sinks or a softcap, too. Every second one has an even number of keys,
    so that two neighbours may be read together."""
    sk = spec.sk + spec.sk % 2 if number % 2 == 0 else spec.sk
    softcap = 1.1 if number % 4 == 1 and spec.values != "nonfinite" else None
    alibi = number % 3 if number % 5 == 0 else 0
    more = {"softcap": softcap, "alibi": alibi, "sink": number % 4 == 2}
    return dataclasses.replace(spec, bias=FORMS[number % len(FORMS)], sk=sk, **more)
