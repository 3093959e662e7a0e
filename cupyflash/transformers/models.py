"""What a model makes of a name and of masks, read off its class: not all hand masks on as they are."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

from ..torch.sdpa import tell

# Models that hand their masks on though they do not take flash-attn: each was compared with eager.
_UNREAD = {"t5", "mt5", "umt5", "llama4", "llama4_text", "layoutlm"}
_FLASH = ("_supports_flash_attn", "_supports_flash_attn_2")  # the second one before transformers 4.54
_SDPA = "_supports_sdpa"
_BY_NAME = '_attn_implementation in ("eager", "sdpa")'
_reading: set[type[Any]] = set()  # configs of models that read masks, or change them
_dropping: set[type[Any]] = set()  # those of models whose masks alone know of windows


def takes_functions(model: type[Any]) -> bool:
    """Whether attention of a model may be exchanged; if not, this is told: it has a class for each name (MPT), or is
    made for its own function alone (NLLB-MoE, whose decoder is causal by its mask and by nothing else), or chooses
    keys, and says which in their masks for two names alone (DeepSeek-V3.2)."""
    ask = getattr(model, "_can_set_attn_implementation", None)
    if not (ask() if ask else hasattr(_module_of(model), "ALL_ATTENTION_FUNCTIONS")):
        tell("cupyflash.transformers", f"{model.__name__} has attention of its own, which cannot be exchanged")
    elif not any(getattr(model, name, False) for name in (*_FLASH, _SDPA)):
        tell("cupyflash.transformers", f"{model.__name__} is made for eager attention alone")
    elif _BY_NAME in _source_of(_module_of(model)):
        tell("cupyflash.transformers", f"{model.__name__} hides keys that it does not choose from eager and sdpa alone")
    else:
        return True
    return False


def look_at(model: type[Any], config: Any) -> None:
    """Of a model that is given our attention: what it does with masks."""
    takes_any = any(getattr(model, name, False) for name in _FLASH)  # flash-attn's are of another shape than eager's
    if not takes_any and getattr(config, "model_type", None) not in _UNREAD:
        _reading.add(type(config))
    if _drops_windows(_module_of(model)):
        _dropping.add(type(config))


def wants_all(config: Any, is_window: bool) -> bool:
    """Whether a mask has to say all, as eager's do: where a model adds to it (Doge), or hands on a mask of a window and
    not the window (Qwen2-MoE)."""
    return type(config) in _reading or (is_window and type(config) in _dropping)


def _module_of(model: type[Any]) -> Any:
    return sys.modules[model.__module__]


@functools.cache
def _source_of(module: Any) -> str:
    """transformers looks there, too; "" where there is none."""
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""


def _drops_windows(module: Any) -> bool:
    text = _source_of(module)
    makes, asks = "create_sliding_window_causal_mask" in text, "ALL_ATTENTION_FUNCTIONS" in text
    return makes and asks and not re.search(r"^\s*sliding_window=", text, re.MULTILINE)
