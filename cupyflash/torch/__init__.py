"""At home in PyTorch: what `cupyflash.attention` does with tensors, by operators that torch's own tools see through.

`cupyflash.attention` and `attention_varlen` come here by themselves where they are given tensors.
"""

from . import autograd as autograd  # which completes the operators, before anybody can call one
from . import cached as cached
from . import flops as flops
from .flash import activate as activate
from .flash import restore as restore
from .sdpa import scaled_dot_product_attention as scaled_dot_product_attention

__all__ = ["activate", "restore", "scaled_dot_product_attention"]
