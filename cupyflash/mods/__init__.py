"""Mods: what a user's own expression makes of each score, and which keys it hides.

A mod is given as a C++ expression or as a Python function, of score, b, h, q, k and named arrays. It is kept as text,
one line an array and an expression, which compares and hashes by what it says and is part of a kernel's source.
"""

from __future__ import annotations

from .description import Mods as Mods
from .description import read as read
from .given import bind as bind
from .symbols import where as where
