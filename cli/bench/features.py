"""Features by name, each as it is timed alone: `bench --feature`."""

from __future__ import annotations

from typing import Any

import click

# What each sets of the options that say the same in detail.
NAMED: dict[str, dict[str, Any]] = {
    "window": {"window": 1023},
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi": True},
    "sink": {"sink": True},
    "bias": {"bias": "hqk"},
    "learned-bias": {"bias": "hqk", "learned": True},
    "mask": {"mask": "bqk"},
    "padding-mask": {"mask": "bk"},
    "padding": {"padded": "left"},
    "dropout": {"dropout": 0.1},
    "block-mask": {"block_masks": ("0.25",)},
    "mod": {"mod": "relative"},
    "mod-table": {"mod": "table"},
    "mask-mod": {"mod": "documents"},
}
# What those options are where nobody asks for them.
WITHOUT: dict[str, Any] = {
    "window": None, "softcap": None, "alibi": False, "sink": False, "bias": "", "learned": False, "mask": "",
    "padded": "", "dropout": 0.0, "block_masks": ("",), "mod": "",
}  # fmt: skip


def each(options: dict[str, Any]) -> list[dict[str, Any]]:
    """The options of each feature that is asked for; those that are given without."""
    if not options["feature"]:
        return [options]
    for name, nothing in WITHOUT.items():
        if options[name] != nothing:
            option = "--block-mask" if name == "block_masks" else f"--{name}"
            raise click.BadParameter(f"either this or {option}, which says it in detail", param_hint="--feature")
    return [options | NAMED[name] for name in options["feature"]]
