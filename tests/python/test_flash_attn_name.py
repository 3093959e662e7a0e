"""The name flash_attn lent to cupyflash: by `cupyflash.compat.install`, and by ``cupyflash run``."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

from cupyflash import compat
from cupyflash.compat import hook

ROOT = Path(__file__).resolve().parents[2]

# What users of flash-attn do before they call it, transformers and others.
LOOK = """
import importlib.metadata, importlib.util
assert importlib.util.find_spec("flash_attn") is not None
assert importlib.metadata.version("flash_attn") == importlib.metadata.version("flash-attn") == "2.8.3"
assert importlib.metadata.packages_distributions()["flash_attn"][0] == "flash-attn"
import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, __version__
from flash_attn.bert_padding import index_first_axis, pad_input, rearrange, unpad_input
from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_backward
import flash_attn.layers.rotary
from flash_attn.layers.rotary import apply_rotary_emb
assert tuple(int(x) for x in __version__.split(".")) >= (2, 1, 0)
assert flash_attn.__name__ == "cupyflash.compat.flash_attn"
assert flash_attn.layers.rotary.apply_rotary_emb is apply_rotary_emb
import cupyflash.compat.flash_attn.flash_attn_interface as ours
assert flash_attn.flash_attn_interface is ours and ours._flash_attn_forward is _flash_attn_forward
"""
USE = """
import torch
q, k, v = torch.randn(3, 1, 6, 2, 8)
want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
torch.testing.assert_close(flash_attn_func(q, k, v, causal=True), want.transpose(1, 2))
"""


def python(*arguments: str, path: Path | None = None, code: int = 0) -> str:
    """What a new Python prints; `path` is importable there, in front of all else."""
    paths = f"import sys; sys.path[:0] = {[str(path)] if path else []} + [{str(ROOT)!r}]\n"
    command = (sys.executable, *(("-c", paths + textwrap.dedent(arguments[0])) if len(arguments) == 1 else arguments))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def impostor(tmp_path: Path) -> Path:
    """A folder with an installed flash-attn that is not ours."""
    package, info = tmp_path / "site" / "flash_attn", tmp_path / "site" / "flash_attn-9.9.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text('__version__ = "9.9"\nflash_attn_func = None\n')
    (package / "layers").mkdir()
    for name in ("ops.py", "bert_padding.py", "layers/__init__.py", "layers/patch_embed.py"):
        (package / name).write_text("theirs = True\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 9.9\n")
    (info / "top_level.txt").write_text("flash_attn\n")
    return tmp_path / "site"


@pytest.mark.needs("torch")
@pytest.mark.parametrize("is_installed", [False, True], ids=["alone", "beside-another"])
def test_install(is_installed: bool, impostor: Path) -> None:
    """Whoever looks for flash-attn finds ours, and what ours lacks of one that is installed; all is as before when the
    name is given back."""
    code = f"""
    import cupyflash, cupyflash.compat, importlib.metadata, importlib.util, sys
    assert "torch" not in sys.modules
    def others():
        found = importlib.util.find_spec("flash_attn")
        return found and (found.origin, importlib.metadata.version("flash-attn"))
    before = others()
    assert (before is not None) == {is_installed}
    finders = list(sys.meta_path)
    with cupyflash.compat.install() as first, cupyflash.compat.install():
        assert "torch" not in sys.modules
        assert importlib.metadata.version("numpy")
        {textwrap.indent(LOOK + USE, " " * 8).lstrip()}
        first.remove()
        first.remove()
        from flash_attn import flash_attn_func as again
        assert again is flash_attn_func
        assert importlib.util.find_spec("flash_attn.cute") is None  # as torch's compiler and others ask
        for name in ("flash_attn.ops", "flash_attn.layers.patch_embed"):
            assert (importlib.util.find_spec(name) is not None) == {is_installed}
            if {is_installed}:
                assert importlib.import_module(name).theirs
        assert not hasattr(flash_attn.layers, "theirs") and not hasattr(flash_attn.bert_padding, "theirs")
    assert sys.meta_path == finders and others() == before
    assert not [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]
    assert ours.__spec__.name == "cupyflash.compat.flash_attn.flash_attn_interface"
    if before:
        import flash_attn
        assert flash_attn.__version__ == "9.9"
    """
    python(code, path=impostor if is_installed else None)


@pytest.mark.needs("torch")
def test_another_that_was_imported_first_comes_back(impostor: Path) -> None:
    code = """
    import warnings, flash_attn, flash_attn.ops
    theirs = flash_attn
    import cupyflash.compat
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        lent = cupyflash.compat.install()
    assert len(said) == 1 and "flash_attn was imported before" in str(said[0].message), said
    assert said[0].filename == "<string>", said[0]
    import flash_attn
    assert flash_attn.flash_attn_func is not None and flash_attn is not theirs
    lent.remove()
    import flash_attn, sys
    assert flash_attn is theirs and sys.modules["flash_attn.ops"] is theirs.ops
    """
    python(code, path=impostor)


def test_nothing_is_lent_by_default() -> None:
    assert compat.hook._Finder not in sys.meta_path
    installed = {name.lower() for x in metadata.distributions() if (name := x.metadata["Name"])}
    with compat.install():
        assert metadata.version("flash-attn") == hook.FLASH_ATTN_VERSION
        assert metadata.version("numpy") != hook.FLASH_ATTN_VERSION
        now = {name.lower() for x in metadata.distributions() if (name := x.metadata["Name"])}
    assert now - {"flash-attn"} == installed - {"flash-attn"}
    assert "flash-attn" in now


@pytest.mark.needs("torch")
@pytest.mark.parametrize("example", range(3))
def test_the_page_runs(example: int) -> None:
    page = (ROOT / "docs" / "flash_attn.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 3
    exec(examples[example], {})


# ---- cupyflash run ----

RUN = ("-m", "cupyflash", "run", "--flash-attn")


@pytest.mark.needs("torch")
def test_run_a_script(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import flash_attn\n")
    script = tmp_path / "train.py"
    script.write_text(
        f"{LOOK}{USE}\nimport sys, helper\nassert helper.flash_attn is flash_attn\n"
        "if __name__ == '__main__':\n    print('with', sys.argv)\n    sys.exit(7)\n"
    )
    said = python(*RUN, str(script), "--flash-attn", "--help", "-m", "1,2", code=7)
    assert said == f"with {[str(script), '--flash-attn', '--help', '-m', '1,2']}\n"


def test_run_a_module() -> None:
    said = python(*RUN, "-m", "platform", "terse", code=0)
    assert said == python("-m", "platform", "terse")


@pytest.mark.parametrize(
    ("line", "last"),
    [
        ("raise EOFError('no more')", "EOFError: no more"),
        ("import cupyflash\nraise cupyflash.ArgumentError('q: wrong')", "cupyflash.errors.ArgumentError: q: wrong"),
        ("raise ModuleNotFoundError(name='flash_attn.ops')", "has no flash_attn.ops: see docs/flash_attn.md"),
    ],
    ids=["any", "ours", "missing"],
)
def test_exceptions_are_the_scripts(line: str, last: str, tmp_path: Path) -> None:
    """A traceback that begins in the script, and Python's exit code, whatever was raised."""
    script = tmp_path / "fails.py"
    script.write_text(f"def f():\n{textwrap.indent(line, '    ')}\nf()\n")
    lines = python(*RUN, str(script), code=1).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith(f'  File "{script}"')
    assert lines[-1].endswith(last)


def test_wrong_usage(tmp_path: Path) -> None:
    assert "say which library cupyflash stands in for: --flash-attn" in python(*RUN[:3], "x.py", code=2)
    assert "no file 'missing.py'" in python(*RUN, "missing.py", code=2)
