"""scripts/tokenize_text.py: files of both kinds, restarts, memory, bad rows."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minitrain import documents
from minitrain.corpus import train_tokenizer
from minitrain.dataset import open_dataset, read_token_file

ROOT = Path(__file__).parent.parent
TEXT = "def f(x):\n    return x + 1\n\n\nclass A:\n    pass\nx = f(2)\ny = f(x)\n" * 200
TOKENIZER = train_tokenizer([TEXT], 300)


@pytest.fixture(scope="module")
def script():
    path = ROOT / "scripts" / "tokenize_text.py"
    spec = importlib.util.spec_from_file_location("tokenize_text", path)
    sys.modules["tokenize_text"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def place(tmp_path):
    """A directory with a tokenizer, a .txt and a .jsonl file."""
    TOKENIZER.save(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text(TEXT)
    rows = [{"text": TEXT[n : n + 99]} for n in range(300)] + [{"input_ids": [5, 6]}]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(script, place, *names, **settings):
    files = tuple(place / name for name in names)
    config = script.TokenizeConfig(files, place / "tokenizer", place / "out", **settings)
    script.main(config)


def test_token_files_hold_what_the_text_files_do(script, place):
    """Red when tokens, document ends or the header differ from what train.py makes of the text."""
    run(script, place, "a.txt", "b.jsonl")
    for name, count in (("a.txt", 1), ("b.jsonl", 301)):
        tokens, header = read_token_file(place / "out" / f"{name}.bin", 300)
        found = documents.read_documents([place / name], TOKENIZER)
        assert np.array_equal(tokens, found.tokens)
        assert header["documents"] == count and header["eos_id"] == 0
        assert header["largest_id"] == tokens.max() and header["dtype"] == "uint16"
    assert sorted(path.name for path in (place / "out").iterdir()) == [
        *("a.txt.bin", "a.txt.bin.json", "b.jsonl.bin", "b.jsonl.bin.json")
    ]
    data = open_dataset([place / "out" / "a.txt.bin"], TOKENIZER, 32, shuffle=False)
    assert TOKENIZER.decode(data.rows([0]).input_ids[0]) in TEXT


@pytest.mark.parametrize("name", ["a.txt", "b.jsonl"])
@pytest.mark.parametrize("after", [0, 1, 5, 8])
def test_it_goes_on_after_a_kill(script, place, monkeypatch, capsys, name, after):
    """Red when a restart repeats, loses or splits anything, or begins again from the start."""
    monkeypatch.setattr(documents, "PART_BYTES", 256)
    monkeypatch.setattr(script, "CHUNK_ROWS", 4)
    monkeypatch.setattr(script, "CHUNKS_PER_SAVE", 2)
    add_rows, left = script.add_rows, [after]

    def dies(out, *arguments):
        if left[0] == 0:
            out.file.write(b"half a tok")  # what a kill leaves behind the last note
            out.file.flush()
            raise KeyboardInterrupt
        left[0] -= 1
        add_rows(out, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(script, "add_rows", dies)
        with pytest.raises(KeyboardInterrupt):
            run(script, place, name)
    assert not (place / "out" / f"{name}.bin").exists()
    run(script, place, name)
    tokens, _ = read_token_file(place / "out" / f"{name}.bin")
    assert np.array_equal(tokens, documents.read_documents([place / name], TOKENIZER).tokens)
    assert ("gone on with" in capsys.readouterr().out) == (after >= 2)
    run(script, place, name)
    assert "is there already" in capsys.readouterr().out


def test_a_changed_source_is_tokenized_again(script, place):
    """Red when the tokens of an older text, or of another tokenizer, are kept."""
    run(script, place, "a.txt")
    (place / "a.txt").write_text("other text")
    run(script, place, "a.txt")
    path = place / "out" / "a.txt.bin"
    assert TOKENIZER.decode(read_token_file(path)[0][:-1]) == "other text"
    other = train_tokenizer([TEXT], 270)
    other.save(place / "tokenizer")
    run(script, place, "a.txt")
    assert other.decode(read_token_file(path)[0][:-1]) == "other text"


def test_bad_input_is_named(script, place, capsys):
    """Red when a row without a place in a token file is written, or an error names no line."""
    path = place / "c.jsonl"
    for line, reason in (
        ('{"text": 5}', r"c\.jsonl:2: text must be a string"),
        ('{"prompt": "a", "completion": "b"}', r"c\.jsonl:2: a token file has no labels"),
        ('{"messages": [{"role": "user", "content": "x"}]}', r"c\.jsonl:2: a token file has no"),
        ('{"input_ids": [1], "labels": [1]}', r"c\.jsonl:2: a token file has no labels"),
    ):
        path.write_text('{"text": "good"}\n' + line + "\n")
        with pytest.raises(ValueError, match=reason):
            run(script, place, "c.jsonl")
    run(script, place, "c.jsonl", on_bad_row="skip")
    assert ": 1 document, 5 tokens, 1 bad row skipped" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"two files are called a\.txt"):
        run(script, place, "a.txt", "a.txt")


def test_memory_does_not_grow_with_the_file(place):
    """Red when a file is held in memory: 8 MB of text may add 15 MB to what 3 MB take."""

    def peak(megabytes: int) -> int:
        (place / "big.txt").write_text(TEXT * (megabytes * 1_000_000 // len(TEXT)))
        script = ROOT / "scripts" / "tokenize_text.py"
        command = [sys.executable, script, "big.txt", "--tokenizer", "tokenizer", "--out", "out"]
        code = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
        code += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        command = [sys.executable, "-c", code, *map(str, command)]
        result = subprocess.run(command, cwd=place, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return int(result.stdout.split()[-1])

    assert peak(8) - peak(3) < 15_000
