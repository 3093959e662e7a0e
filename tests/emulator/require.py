"""Skips a test module where there is no C++ compiler; in CI that is a failure."""

from __future__ import annotations

import os

import pytest

from .compiler import missing_compiler


def require_compiler() -> None:
    """Call at the top of a test module."""
    reason = missing_compiler()
    if reason is None:
        return
    if os.environ.get("CI"):
        pytest.fail(f"CI must run the kernels on the CPU: {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)
