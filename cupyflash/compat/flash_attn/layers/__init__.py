"""The part of flash-attn's layers that stands on its own: `rotary`."""
