"""notebooks/: each is executed as a reader would, in a kernel of its own."""

import ast
import inspect
import json
import re
from pathlib import Path

import pytest
from layout_runs import ROOT, train

import minitrain

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 240  # two cores; busy machines take longer
NEEDS_MODEL = "07_lora.ipynb"


def cells(path: Path, kind: str) -> list[dict]:
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def code(path: Path) -> ast.Module:
    return ast.parse("\n".join(map(source, cells(path, "code"))))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    """Red when a cell raises: a block has changed its signature or its numbers."""
    nbformat, nbclient = map(pytest.importorskip, ("nbformat", "nbclient"))
    pytest.importorskip("matplotlib")
    if path.name == NEEDS_MODEL and not (ROOT / "models/smollm2/model.safetensors").is_file():
        pytest.skip("models/smollm2 is not there: run scripts/get_smollm2.py")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=SECONDS, resources=where).execute()


def test_there_are_nine():
    """Red when a notebook is missing."""
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{n:02}" for n in range(1, 10)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_form(path):
    """Red when a notebook does not open with a question or end with an assert, was stored without
    its outputs or with an error, is too large, or needs the network.
    """
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < 200_000
    assert "?" in source(json.loads(text)["cells"][0])
    last = ast.parse(source(cells(path, "code")[-1])).body[-1]
    assert any(isinstance(node, ast.Assert) for node in ast.walk(last))
    outputs = [output for cell in cells(path, "code") for output in cell["outputs"]]
    assert all(cell["execution_count"] for cell in cells(path, "code"))
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}  # no warnings
    assert not re.search(r"https?://|/(work|root|home)/", text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_imports_and_never_redefines(path):
    """Red when a notebook has its own copy of a block, or imports none."""
    tree = code(path)
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert any(module.split(".")[0] == "minitrain" or module == "parity" for module in modules)
    defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    public = {name for name, thing in inspect.getmembers(train) if callable(thing)}
    assert not defined & (public | set(minitrain.__all__))


def test_the_notebook_that_needs_a_model_says_so(tmp_path, monkeypatch):
    """Red when notebook 7, without the model, ends in a traceback instead of what to do."""
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    first = source(cells(ROOT / "notebooks" / NEEDS_MODEL, "code")[0])
    with pytest.raises(SystemExit, match=r"run `python scripts/get_smollm2.py`"):
        exec(compile(first, NEEDS_MODEL, "exec"), {})
