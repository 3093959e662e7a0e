"""At home in PyTorch: what `cupyflash.attention` does with tensors, by operators that torch's own tools see through.

`cupyflash.attention` and `attention_varlen` come here by themselves where they are given tensors.
"""

from . import autograd as autograd  # which completes the operators, before anybody can call one
