"""The page's way to launch a compiled kernel by CuPy's RawModule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def test_the_page_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "raw_kernels.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "raw_kernels.md", "exec"), {})
