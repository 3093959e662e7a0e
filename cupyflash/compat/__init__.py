"""Code written for other libraries, on cupyflash: `flash_attn` here, and `install`, which lends it that name.

Nothing of it is active by default, and torch is imported when ``flash_attn`` is.
"""

from __future__ import annotations

from .hook import FLASH_ATTN_VERSION, NAME, Installed, install

__all__ = ["FLASH_ATTN_VERSION", "NAME", "Installed", "install"]
