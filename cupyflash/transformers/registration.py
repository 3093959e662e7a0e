"""Makes a name known to transformers, and the models that are asked for it take it.

To transformers each name with "flash" in it is flash-attn's or a kernel's from its hub: models look for its functions,
and some replace it by a kernel of their choice; masks by chunks are refused. Before 4.54 any name will do, and a model
with attention of its own fails with it. The functions that transformers keeps to itself and that are wrapped for all
that are wrapped here and nowhere else.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

import transformers
from transformers import AttentionInterface, PreTrainedModel

from ..errors import ArgumentError
from . import holes, models
from .attention import HAS_MASK_FUNCTIONS, attention

NAME = "cupyflash"
_names: set[str] = set()


def register(name: str = NAME, *, check_masks: bool = False) -> None:
    """Make ``attn_implementation="cupyflash"`` known to transformers, for models that are loaded or set to it later.

    Padding on the left or right becomes a range of keys for each sequence, which the GPU reads: nothing is gathered,
    and nothing waits. What cupyflash does not take goes to transformers' own functions, and a warning says why, once a
    reason. Calling it again does no harm.

    Args:
        name: what to call it, another one if that is taken.
        check_masks: look at each padding mask on a GPU before it is used, which waits for the GPU once a forward, so
            that one that is no range of keys in each row (with keys that do not count between others) is answered.
            Else such a mask is found after the fact, and an error says so.

    Raises:
        ArgumentError: the name is one of transformers' own.

    Example:
        >>> import cupyflash.transformers
        >>> cupyflash.transformers.register()
        >>> # model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="cupyflash", dtype="bfloat16")
    """
    if not isinstance(name, str) or not name or name.startswith("paged|"):
        raise ArgumentError(f"name: expected a word, got {name!r}")
    if name in {"eager", *AttentionInterface()} - _names:
        raise ArgumentError(f'name: expected one that transformers does not use, got "{name}"')
    holes.check_masks(check_masks)
    _wrap_checks()
    _names.add(name)
    AttentionInterface.register(name, attention)
    if HAS_MASK_FUNCTIONS:
        _register_masks(name)


def _register_masks(name: str) -> None:
    from transformers import AttentionMaskInterface, masking_utils

    from .masks import mask, mask_of_positions

    _wrap_masks(masking_utils)
    by_positions = "cache_position" in inspect.signature(masking_utils.sdpa_mask).parameters
    AttentionMaskInterface.register(name, mask_of_positions if by_positions else mask)


_IS_FLASH = "is_flash_attention_requested"
_CHECK = "_check_and_adjust_attn_implementation"
_OLD_CHECK = "_autoset_attn_implementation"  # before 4.54
_ORIGINAL = "_without_cupyflash"  # an attribute of what wraps: what was there before


def _wrap_checks() -> None:
    if hasattr(PreTrainedModel, _CHECK):
        _wrap_check()
    elif hasattr(PreTrainedModel, _OLD_CHECK):
        _wrap_old_check()
    else:
        warnings.warn(
            f'transformers {transformers.__version__} has no {_CHECK}: should models refuse a name with "flash" in it, '
            'call cupyflash.transformers.register("cupy_fa") and use that name',
            UserWarning,
            stacklevel=3,
        )


def _wrap_check() -> None:
    """Models take the name as it is: they neither look for flash-attn's functions nor put another kernel there."""
    own = getattr(PreTrainedModel, _CHECK)
    if hasattr(own, _ORIGINAL):
        return

    @functools.wraps(own)
    def check(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if attn_implementation not in _names:
            return own(self, attn_implementation, *args, **kwargs)
        if not models.takes_functions(type(self)):
            return own(self, None, *args, **kwargs)
        models.look_at(type(self), self.config)
        return attn_implementation

    setattr(check, _ORIGINAL, own)
    setattr(PreTrainedModel, _CHECK, check)


def _wrap_old_check() -> None:
    """Models with attention of their own, which would look for a class by the name, are given their default."""
    own = getattr(PreTrainedModel, _OLD_CHECK)
    if hasattr(own, _ORIGINAL):
        return

    @functools.wraps(own)
    def check(cls: type[Any], config: Any, *args: Any, **kwargs: Any) -> Any:
        if config._attn_implementation in _names:
            if models.takes_functions(cls):
                models.look_at(cls, config)
            else:
                config._attn_implementation = None
        return own.__func__(cls, config, *args, **kwargs)

    setattr(check, _ORIGINAL, own)
    setattr(PreTrainedModel, _OLD_CHECK, classmethod(check))


def _wrap_masks(masking_utils: Any) -> None:
    """Masks by chunks (Llama 4) are made: they are added to the scores."""
    own = getattr(masking_utils, _IS_FLASH, None)
    if own is None or hasattr(own, _ORIGINAL):
        return

    @functools.wraps(own)
    def is_flash(config: Any = None, *args: Any, **kwargs: Any) -> Any:
        return getattr(config, "_attn_implementation", None) not in _names and own(config, *args, **kwargs)

    setattr(is_flash, _ORIGINAL, own)
    setattr(masking_utils, _IS_FLASH, is_flash)
