"""An array that speaks DLPack and nothing else."""

from __future__ import annotations

from typing import Any


class Producer:
    """An array of a library that cupyflash does not know."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()
