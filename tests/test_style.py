"""Limits that keep the project readable, and the direction of its imports."""

import ast
import inspect
import io
import re
import tokenize
from pathlib import Path

import pytest

import minitrain

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "minitrain").glob("*.py"))
FILES = MODULES + sorted((ROOT / "scripts").glob("*.py")) + sorted((ROOT / "tests").glob("*.py"))

# Each may import from those before it; names in one set do not import each other, save as said.
LAYERS = [
    {"log", "device", "model", "bf16_optimizer", "corpus", "documents", "kernels", "text_plot"},
    {"mesh", "launch", "packing"},
    {"collectives", "dataset"},
    {"tensor_parallel", "ulysses", "data_sharder", "loss_reducer", "grad_reducer", "grad_clipper"},
    {"model_sharder", "lora", "memory"},
    {"checkpoint", "huggingface"},
]
RANK_CODE = {"mesh", "launch", "collectives", "device", "torch.distributed"}


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def imports(path: Path) -> set[str]:
    """Modules of minitrain, and other top packages, that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix("minitrain.") for name in found}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_and_functions_are_short(path):
    """Red when a file passes 300 lines or a function 60."""
    assert lines_of(path) <= 300
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= 60, f"{node.name} has {length} lines"


def code_lines(path: Path) -> int:
    """Lines that hold code: neither blank, nor comment, nor docstring."""
    source = path.read_text(encoding="utf-8")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docs |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING):
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docs)


def test_the_package_is_small():
    """Red when minitrain/ reaches 4,480 lines of code, or 6,830 with its documentation.

    The aim is 4,000 in all (DESIGN.md); the README says how far it is.
    """
    assert sum(map(code_lines, MODULES)) < 4480
    assert sum(map(lines_of, MODULES)) < 6830


def test_imports_go_one_way():
    """Red when a module imports one that is built on it."""
    level = {name: n for n, layer in enumerate(LAYERS) for name in layer}
    for path in MODULES:
        for name in imports(path) & level.keys():
            if path.stem in level:
                assert level[name] <= level[path.stem], f"{path.stem} imports {name}"


@pytest.mark.parametrize("name", ["model", "bf16_optimizer", "dataset", "corpus", "documents"])
def test_rank_free_modules(name):
    """Red when a module that needs no ranks imports them."""
    assert not imports(ROOT / "minitrain" / f"{name}.py") & RANK_CODE


def test_only_device_imports_accelerator_packages():
    """Red when a second file depends on torch-xla, torch-neuronx or neuronx-distributed."""
    for path in MODULES:
        packages = {name.split(".")[0] for name in imports(path)}
        if path.stem != "device":
            assert not packages & {"torch_xla", "torch_neuronx", "neuronx_distributed"}, path.name


def test_nothing_is_unpickled():
    """Red when a file could run code on loading. run_ranks pickles between its own processes."""
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        assert "torch.load" not in text and "trust_remote_code=" not in text, path.name
        assert path.stem == "launch" or "pickle" not in imports(path), path.name


@pytest.mark.parametrize("name", minitrain.__all__)
def test_public_names_are_documented(name):
    """Red when a public name has no docstring, or a class method without one."""
    thing = getattr(minitrain, name)
    assert inspect.getdoc(thing), name


def test_every_flag_is_documented():
    """Red when a field of TrainConfig has no docstring under it: --help would be silent."""
    tree = ast.parse((ROOT / "scripts/train.py").read_text(encoding="utf-8"))
    config = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "TrainConfig")
    body = config.body[1:]
    for field, text in zip(body[::2], body[1::2], strict=True):
        assert isinstance(field, ast.AnnAssign), ast.dump(field)
        assert isinstance(text, ast.Expr) and isinstance(text.value.value, str), field.target.id


def test_no_machine_paths():
    """Red when a path of somebody's machine is committed."""
    for path in [*FILES, ROOT / "README.md", ROOT / "pyproject.toml"]:
        if path.exists() and path.name != "test_style.py":
            assert not re.search(r"/(work|root|home)/", path.read_text(encoding="utf-8")), path
