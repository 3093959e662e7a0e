"""flash-attn 2.8's names, arguments, layouts and return values on cupyflash; see docs/flash_attn.md.

Import it as ``cupyflash.compat.flash_attn``, or under the name ``flash_attn`` after `cupyflash.compat.install`.
"""

from __future__ import annotations

from .. import FLASH_ATTN_VERSION
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = FLASH_ATTN_VERSION  # of the interface: others compare it

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
