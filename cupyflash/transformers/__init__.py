"""At home in Hugging Face transformers: after `register()`, models take ``attn_implementation="cupyflash"``."""

from .registration import register as register

__all__ = ["register"]
