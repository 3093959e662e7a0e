"""The house rules that can be read off the sources: who imports whom, where hardware is named, how long files get.

Adding a module is one line in a table below. A rule that stands in the way is changed here, in the same commit, with
its reason in the commit message.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.probing import probes

ROOT = Path(__file__).resolve().parents[2]

# ---- Tables ----

# A module or folder of the package imports only from layers further down. `cli`, `emulator` and `compat` are whole.
PYTHON_LAYERS = (
    ("__main__",),
    ("cli",),
    ("emulator",),
    ("__init__",),
    ("transformers",),
    ("compat",),
    ("kvcache", "pages", "partials", "varlen"),
    ("ahead", "api", "raw"),
    ("masks",),
    ("mask_arrays",),
    ("seeds",),
    ("torch", "jax"),
    ("gradients",),
    ("launch",),
    ("compile", "cpu"),
    ("check", "plan"),
    ("cache",),
    ("sequences",),
    ("problem",),
    ("bias", "block_mask"),
    ("mask_tiles",),
    ("options",),
    ("scales", "mods"),
    ("arrays", "gpu"),
    ("operands",),
    ("operand",),
    ("dropout",),
    ("errors", "version"),
)
# In a folder of the package a module imports only from those further to the right.
PYTHON_ORDER = {
    "arrays": "repeated libraries readable placed vetting adapters tensors signature torch_private imported",
    "cache": "pool tables lengths checks shapes values writes arrays problem",
    "check": "cache_reference cache_cases cache_case cache_inputs cache_stored accuracy noise reference mods "
    "arithmetic comparison cases cases_combined cases_bias cases_masks cases_mods cases_sequences cases_widths case "
    "inputs features bias case_masks case_mods case_packed case_bias case_inputs",
    "compile": "jit cache upkeep layer cubin nvrtc",
    "cpu": "call cache quantized attention forward chunk added modified sink dropping features products tiles workers",
    "gpu": "dependent forms tensormap device driver",
    "jax": "flax sdpa op trees cached explicit parts call seeds sharding ffi structs buffers",
    "launch": "key_ranges cached cached_checks last_cached attending prefill constants decode block growing run find "
    "where staging pieces on_cpu seeds clocks cached_params prepare last series made alignment prepared filled checks "
    "brought packed passes template counters kept variables",
    "mods": "given trace held symbols description places learned evaluate parse functions expression",
    "plan": "shipped_cache shipped key_ranges decode prefill families sm90 sm80 forward_sm80 turing tiles_fp32 family "
    "extents first_shares sections decode_stored decode_fp32 decode_elements decode_shares splits lists numbers "
    "decode_kernels learned shares kernels_sm90 tiles_sm90 tiles_sm80 kernels params_decode params variant "
    "spec mod_tiles",
    "torch": "programs flash aten sdpa flops cached autograd recorded casting seeds sharding batching ops inductor "
    "arguments masks vetting followed",
    "transformers": "registration attention steps fallback masks models launched holes packing patterns ranges call",
}
# Modules that are kept to some.
PYTHON_PRIVATE = {
    "compile.cache": {"cli", "emulator", "compile.jit"},
    "compile.cubin": {"compile.cache", "compile.layer", "compile.upkeep"},
    "compile.layer": {"compile.cache", "cli", "compile.jit"},
    "compile.nvrtc": {"cli", "compile.jit"},
    "compile.upkeep": {"compile.cache", "cli"},
    "plan.sm80": {"plan.families"},  # the plan's one door
    "plan.sm90": {"plan.families"},
}
# Who may import what is not in the standard library. NumPy and ml_dtypes are everybody's.
OUTSIDE = {
    "click": {"cli"},
    "cupy": {"arrays", "cli", "compile.jit", "gpu.device", "launch"},
    "filelock": {"compile.cache", "emulator"},
    "jax": {"cli", "jax"},
    "matplotlib": {"cli"},
    "ml_dtypes": None,
    "numpy": None,
    "platformdirs": {"compile.cache"},
    "pytest": {"emulator"},
    "rich": {"cli"},
    "torch": {"arrays", "cli", "compat", "torch", "transformers"},
    "transformers": {"transformers"},
}

# The same for headers, by their folders and, within one, by patterns of their names without suffix.
CUDA_LAYERS = (("any", "decode", "sm80", "sm90"), ("attention",), ("tile",), ("hw",))
CUDA_ORDER = {
    "any": "bwd_* fwd_parts mask_tiles key_lists query_lists key_ranges params_ranges",
    "attention": "repair_* score_gradient repair dq_visits dq_accum visible_sm90 visits bias_visits shares "
    "climb softmax row_maxima sink dropout kept philox score slopes places modified tile_mask bias_copies bias added "
    "addends mods mod_arrays mod_places prefill_sm90 work_sm90 packed_sm90 tile_list mask_copies sights lists "
    "key_parts pages blocks mask schedule sequence params_sm90 params",
    "decode": "append dequantize decode_sm* decode_combine decode load_* cursor seen_units merge warp_decode "
    "warp_stored warp_float warp_of_tile repair_decode row_limits row_places parts edges_stored "
    "copies_stored scales rows shares tiles products_stored products_float queries fragments "
    "fragments_stored column_softmax slices stored value_unit cached params_decode",
    "hw": "ptx_sm90 ptx",
    "sm80": "fwd_* bwd_sm80 bwd_wide_sm80 bwd_load_sm80",
    "sm90": "fwd_sm90 fwd_aside_sm90 fwd_load_sm90 bwd_sm90 bwd_d* bwd_wide_sm90 bwd_load_sm90",
    "tile": "pipeline_sm90 tile_sm90 epilogue gemm operands sums shared_rows float_rows tile element fp32 "
    "elementary halves key_order sizes",
}
# What only ptx*.cuh may spell, because the CPU build swaps those files for its own.
HARDWARE = re.compile(
    r"\b(asm|threadIdx|blockIdx|blockDim|gridDim|warpSize|__shared__|__constant__|__sync\w+|__shfl\w+|__ballot\w+"
    r"|__(?:any|all|activemask|reduce_\w+)_sync|__cvta\w+|__ldg\w*|__ldcg|__uint_as_float|__float_as_uint|atomic[A-Z]\w+)\b"
)

# What says where sequences lie and how long they are, and who reads it: pages.cuh, to say the same of a cache.
LENGTHS = re.compile(r"\bp\.(cu_seqlens_[qk]|seqused_k|kv_range|block_table)\b")
READ_LENGTHS = {"kernels_cu/attention/sequence.cuh", "kernels_cu/attention/pages.cuh"}

# Lines at which to stop and think (in headers without comments and empty lines); the first pattern that fits counts.
LINES = (
    ("kernels_cu/hw/*.cuh", 350),  # one wrapper an instruction
    ("kernels_cu/sm90/*.cuh", 350),
    ("kernels_cu/sm80/*.cuh", 200),
    ("kernels_cu/*.cuh", 150),
    ("cupyflash/*.py", 250),
    ("cli/*.py", 250),
    ("tools/*.py", 250),
    ("tests/emulator/*.py", 250),
)
FUNCTION_LINES = 40  # without signature and docstring
# Stopped, thought, and left long: path (or path::function) -> lines it may have. The reason stands beside it.
LONG: dict[str, int] = {
    "cupyflash/problem.py::make_problem": 45,  # a line a field
    "kernels_cu/sm80/bwd_sm80.cuh": 242,  # visits of bounds and of lists, results, of two widths, a copied bias, turns
    "kernels_cu/sm90/fwd_sm90.cuh": 402,  # O as a whole and in parts, lists and what they ask ahead, scores that climb
    "kernels_cu/decode/warp_decode.cuh": 163,  # what is read ahead of scores
    "cupyflash/api.py": 300,  # each argument stands in two signatures and a docstring
}

ENVIRONMENT = {"CUPYFLASH_BACKEND", "CUPYFLASH_CACHE_DIR", "CUPYFLASH_DEBUG", "CUPYFLASH_FAMILY"}

# ---- Python ----

FOLDERS = {"cupyflash": "cupyflash", "cli": "cupyflash.cli", "tests/emulator": "cupyflash.emulator"}  # as installed
PYTHON_FILES = sorted({path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.py")})
TOOL_FILES = sorted(ROOT.glob("tools/*.py"))
CUDA_FILES = sorted(ROOT.glob("kernels_cu/**/*.cuh"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> list[str]:
    """The parts of a file's dotted name once installed."""
    name = path.relative_to(ROOT).with_suffix("").as_posix()
    folder = next(folder for folder in FOLDERS if name.startswith(f"{folder}/"))
    return [*FOLDERS[folder].split("."), *name[len(folder) + 1 :].split("/")]


def unit_of(parts: list[str]) -> str:
    """What the tables call a module, from its name's parts after the package: ``plan.spec``, ``errors``, ``cli``."""
    return ".".join(parts[:2]) if parts[0] in PYTHON_ORDER else parts[0]


def imports_of(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line and dotted name of all that a file imports, at its top, in functions and for type checkers alike."""
    package = module_of(path)[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                yield node.lineno, [*base, alias.name]


def rank(unit: str, layers: tuple[tuple[str, ...], ...], order: dict[str, str]) -> tuple[int, int]:
    """The layer of a unit, and its place in its folder; lower ones may be used."""
    folder, _, name = unit.rpartition(".")
    for index, names in enumerate(layers):
        if (folder or name) in names:
            places = order[folder].split() if folder else [name]
            found = [i for i, pattern in enumerate(places) if fnmatch(name, pattern)]
            assert found, f"{unit} has no place in its folder: add it to the table in {name_of(Path(__file__))}"
            return index, found[0]
    raise AssertionError(f"{unit} is in no layer: add it to the table in {name_of(Path(__file__))}")


def may_use(user: str, used: str, layers: tuple[tuple[str, ...], ...], order: dict[str, str]) -> bool:
    (above, place), (below, other) = rank(user, layers, order), rank(used, layers, order)
    is_folder = user.rpartition(".")[0] == used.rpartition(".")[0] != ""
    return user == used or above < below or (is_folder and above == below and place < other)


@pytest.mark.parametrize("path", PYTHON_FILES, ids=name_of)
def test_python_layers(path: Path) -> None:
    if path.name == "__init__.py" and path.parent.name in PYTHON_ORDER:
        own = {("cupyflash", path.parent.name)}
        others = {tuple(found[1][:2]) for found in imports_of(path) if found[1][0] == "cupyflash"} - own
        assert not others, "a folder's own file imports nothing of the package but what is in the folder"
        return
    user = unit_of(module_of(path)[1:])
    rank(user, PYTHON_LAYERS, PYTHON_ORDER)
    units = {unit_of(module_of(file)[1:]) for file in PYTHON_FILES}
    wrong = []
    for line, (top, *rest) in imports_of(path):
        if top == "cupyflash":
            used = next((u for u in (".".join(rest[:2]), *rest[:1]) if u in units), "__init__")
            allowed = may_use(user, used, PYTHON_LAYERS, PYTHON_ORDER) and (
                used == user or user in PYTHON_PRIVATE.get(used, {user})
            )
        else:
            used = top
            users = OUTSIDE.get(top, ())
            allowed = (
                top in sys.stdlib_module_names or users is None or not {user, user.split(".")[0]}.isdisjoint(users)
            )
        if not allowed:
            wrong.append(f"{name_of(path)}:{line}: {user} may not import {used}")
    assert not wrong, "\n".join(wrong)


def test_the_tables_name_what_is_there() -> None:
    """No layer, place or permission outlives what it was for."""
    units = {unit_of(module_of(file)[1:]) for file in PYTHON_FILES}
    headers = {(path.parent.name, path.stem) for path in CUDA_FILES}
    missing = {name for names in PYTHON_LAYERS for name in names} - {unit.partition(".")[0] for unit in units}
    missing |= {f"{folder}.{name}" for folder, names in PYTHON_ORDER.items() for name in names.split()} - units
    missing |= {name for names in CUDA_LAYERS for name in names} - {folder for folder, _ in headers}
    for folder, patterns in CUDA_ORDER.items():
        found = {next(x for x in patterns.split() if fnmatch(name, x)) for where, name in headers if where == folder}
        missing |= {f"{folder}/{pattern}" for pattern in {*patterns.split()} - found}
    missing |= {name for name in LONG if not (ROOT / name.partition("::")[0]).exists()}
    assert not missing
    uses: set[tuple[str, str]] = set()
    for path in PYTHON_FILES:
        user = unit_of(module_of(path)[1:])
        for _, (top, *rest) in imports_of(path):
            used = next((u for u in (".".join(rest[:2]), *rest[:1]) if u in units), "") if top == "cupyflash" else top
            uses |= {(user, used), (user.partition(".")[0], used)}
    given = [*PYTHON_PRIVATE.items(), *OUTSIDE.items()]
    unused = [(user, used) for used, users in given for user in users or () if (user, used) not in uses]
    assert not unused


def test_import_is_light() -> None:
    """No array library, and nothing of the command line, is loaded before the user asks for it."""
    integrations = {"torch", "jax", "transformers", "compat", "cli", "emulator", "__main__"}
    units = {unit_of(module_of(file)[1:]) for file in PYTHON_FILES}
    modules = sorted(unit for unit in units if unit.split(".")[0] not in integrations)
    code = (
        "import sys, importlib\n"
        f"for name in {modules}: importlib.import_module('cupyflash' if name == '__init__' else 'cupyflash.' + name)\n"
        "outside = {'cupy', 'torch', 'jax', 'transformers', 'matplotlib', 'scipy', 'click', 'rich'}\n"
        "print(*sorted(outside & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip(), f"loaded at import: {done.stdout}"


def test_environment_variables() -> None:
    """Every variable is one of those that the documentation names."""
    read = {name for file in PYTHON_FILES for name in re.findall(r"\bCUPYFLASH_[A-Z_]+\b", file.read_text())}
    assert read <= ENVIRONMENT


# ---- CUDA ----


def code_of(path: Path) -> str:
    """A header without comments and without the text of its strings; lines keep their numbers."""
    text = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), path.read_text(), flags=re.DOTALL)
    text = re.sub(r'(#include )"([^"\n]*)"', r"\1<<\2>>", text)
    return re.sub(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"', "", text)


@pytest.mark.parametrize("path", CUDA_FILES, ids=name_of)
def test_cuda_layers(path: Path) -> None:
    user = f"{path.parent.name}.{path.stem}"
    rank(user, CUDA_LAYERS, CUDA_ORDER)
    includes = re.findall(r"^\s*#\s*include\s*(.*?)\s*$", code_of(path), flags=re.MULTILINE)
    wrong = []
    for include in includes:
        header = re.fullmatch(r"<<(\w+)/(\w+)\.cuh>>", include)
        if not header:
            wrong.append(f"{include}: only headers of kernels_cu, in quotes and with their folder, are included")
        elif not may_use(user, f"{header[1]}.{header[2]}", CUDA_LAYERS, CUDA_ORDER):
            wrong.append(f"{user} may not include {header[1]}.{header[2]}")
    assert not wrong, "\n".join(wrong)


def test_one_header_reads_lengths() -> None:
    """Of attention without a cache; over one, decode/ has another."""
    read = {name_of(path) for path in CUDA_FILES if path.parent.name != "decode" and LENGTHS.search(code_of(path))}
    assert read == READ_LENGTHS


@pytest.mark.parametrize("path", [file for file in CUDA_FILES if not file.stem.startswith("ptx")], ids=name_of)
def test_hardware_is_named_in_ptx_only(path: Path) -> None:
    guard = f"CUPYFLASH_{path.stem.upper()}_CUH"
    wrong = []
    for number, line in enumerate(code_of(path).splitlines(), 1):
        if found := HARDWARE.search(line):
            wrong.append(f"{name_of(path)}:{number}: {found[0]}")
        directive = re.match(r"\s*#\s*(?!include|pragma unroll)(.*)", line)
        if directive and directive[1].split() not in (["ifndef", guard], ["define", guard], ["endif"]):
            wrong.append(f"{name_of(path)}:{number}: #{directive[1]}")
    assert not wrong, "\n".join(wrong)


def test_every_instruction_is_used() -> None:
    """A wrapper that no kernel uses stands in tests/emulator/kernels/ptx_more.cuh, where only the probes use it."""
    wrappers = probes.instructions("\n".join(code_of(file) for file in CUDA_FILES if file.parent.name == "hw"))
    kernels = "\n".join(code_of(file) for file in CUDA_FILES if file.parent.name != "hw")
    assert {"st_shared_b32", "tma_load_4d", "wgmma_bf16"} <= wrappers
    assert not wrappers - set(re.findall(r"\bptx::(\w+)", kernels))


# ---- Sizes ----


@pytest.mark.parametrize("path", [*PYTHON_FILES, *TOOL_FILES, *CUDA_FILES], ids=name_of)
def test_file_length(path: Path) -> None:
    name = name_of(path)
    limit = LONG.get(name) or next(limit for pattern, limit in LINES if fnmatch(name, pattern))
    lines = len(path.read_text().splitlines())
    if path.suffix == ".cuh":
        lines = sum(bool(line.strip()) for line in code_of(path).splitlines())
    assert lines <= limit, f"{name} has {lines} lines, the limit is {limit}: split it, or add it to LONG with a reason"


@pytest.mark.parametrize("path", [*PYTHON_FILES, *TOOL_FILES], ids=name_of)
def test_function_length(path: Path) -> None:
    long = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            if lines > LONG.get(f"{name_of(path)}::{node.name}", FUNCTION_LINES):
                long.append(f"{name_of(path)}:{node.lineno}: {node.name} has {lines} lines")
    assert not long, "\n".join(long)


def test_long_list_is_current() -> None:
    """An exception that is no longer needed goes."""
    for name in LONG:
        path, _, function = name.partition("::")
        assert (ROOT / path).is_file(), f"{path} is listed in LONG and gone"
        assert not function or f"def {function}(" in (ROOT / path).read_text(), f"{name} is listed in LONG and gone"
