"""setup.open_data: which files, tokenizer and template a run gets, and that rank 0 makes them."""

import json
from types import SimpleNamespace

import pytest
from layout_runs import train

from minitrain import corpus, dataset
from minitrain.corpus import train_tokenizer
from minitrain.model import ModelConfig
from minitrain.setup import check_settings, open_data

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|endoftext|>\n' }}"
    "{% endfor %}"
)
DOCSTRING = '"""What this module is for, in words, at some length."""\n'


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A standard library of three short files."""
    train = [("a.py", DOCSTRING + "x = 1\n" * 99), ("b.py", DOCSTRING.upper())]
    held_out = [("c.py", DOCSTRING.swapcase())]
    monkeypatch.setattr(corpus, "stdlib_documents", lambda: (train, held_out))


def opened(out, model_dir=None, barrier=lambda: None, vocab_size=300, **changes):
    settings = {"data": (), "eval_data": (), "out": out, "model": "m", "seq_len": 16, "seed": 0}
    settings |= {"pack": True, "shuffle": False, "on_bad_row": "stop"} | changes
    sizes = {"vocab_size": vocab_size, "hidden_size": 8, "intermediate_size": 8, "num_layers": 1}
    model = ModelConfig(**sizes, num_heads=1, num_kv_heads=1, head_dim=8)
    said, device = [], SimpleNamespace(barrier=barrier)
    log = SimpleNamespace(say=said.append)
    return (*open_data(SimpleNamespace(**settings), model_dir, model, device, log), said)


@pytest.fixture
def chat_model(tmp_path):
    directory = tmp_path / "model"
    train_tokenizer(["What is the Python module about?" * 9], 300).save(directory)
    (directory / "chat_template.jinja").write_text(CHATML)
    return directory


def test_other_ranks_find_what_rank_0_made(tmp_path, monkeypatch):
    """Red when every rank tokenizes or writes for itself, or reads before rank 0 is done."""
    calls = []
    first = opened(
        tmp_path, barrier=lambda: calls.append(len(list((tmp_path / "cache").iterdir())))
    )
    assert calls == [5]  # two texts, a tokenizer, two of tokens
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(dataset, "read_documents", None)
    monkeypatch.setattr(corpus, "train_tokenizer", None)
    monkeypatch.setattr(corpus, "stdlib_documents", None)
    waited = []
    second = opened(tmp_path, barrier=lambda: waited.append(True))
    assert waited == [True]
    assert [rows.summary for rows in second[1:3]] == [rows.summary for rows in first[1:3]]
    assert second[0].definition == first[0].definition


def test_a_preset_learns_its_tokenizer_from_the_users_text(tmp_path):
    """Red when the user's text is cut by a tokenizer of Python sources, or nothing says so."""
    (tmp_path / "a.txt").write_text("zyzzyva quokka " * 200)
    tokenizer, _, held_out, said = opened(tmp_path / "out", data=(tmp_path / "a.txt",))
    assert len(tokenizer.encode(" quokka")) == 1 and held_out is None
    assert said[0].startswith(f"tokenizer: byte-level BPE of {tokenizer.vocab_size} entries, train")
    (tmp_path / "b.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3]}))
    assert opened(tmp_path / "out", data=(tmp_path / "b.jsonl",))[0] is None


def test_stdlib_chat_goes_through_the_models_template(tmp_path, chat_model):
    """Red when the template is not passed on, or held-out docstrings are trained on."""
    tokenizer, rows, held_out, _ = opened(
        tmp_path, chat_model, data=(corpus.Path("stdlib-chat"),), seq_len=256
    )
    for data, answer in ((rows, DOCSTRING), (held_out, DOCSTRING.swapcase())):
        batch = data.rows(range(data.num_rows))
        text = tokenizer.decode(batch.labels[batch.labels != -100])
        assert text.startswith(answer.strip('"\n')) and text.endswith(corpus.EOS)
    with pytest.raises(ValueError, match="rows of messages need a chat template"):
        opened(tmp_path, data=(corpus.Path("stdlib-chat"),))


def test_built_in_names_work_anywhere(tmp_path):
    """Red when a file beside stdlib is not trained on, or stdlib after a file or as held-out rows
    is looked for as a file.
    """
    (tmp_path / "a.txt").write_text("zyzzyva quokka " * 20)
    own, stdlib = tmp_path / "a.txt", corpus.Path("stdlib")
    both = [opened(tmp_path / "o", data=data) for data in ((own, stdlib), (stdlib, own))]
    for tokenizer, rows, held_out, said in both:
        batch = rows.rows(range(rows.num_rows))
        text = tokenizer.decode(batch.input_ids.ravel())
        assert "quokka" in text and DOCSTRING in text and DOCSTRING.swapcase() not in text
        assert held_out.num_rows == both[0][2].num_rows and said[0].startswith("data: stdlib, made")
    tokenizer, _, held_out, said = opened(tmp_path / "o", data=(own,), eval_data=(stdlib,))
    text = tokenizer.decode(held_out.rows(range(held_out.num_rows)).input_ids.ravel())
    assert DOCSTRING.swapcase() in text and DOCSTRING not in text
    assert sum(line.startswith("data: ") for line in said) == 1


def test_a_model_directory_needs_data(tmp_path, chat_model):
    """Red when a pretrained model is trained on Python sources because --data was forgotten."""
    with pytest.raises(ValueError, match=r"needs --data: .txt, .* or stdlib or stdlib-chat"):
        opened(tmp_path, chat_model)


@pytest.mark.parametrize("field", ["data", "eval_data"])
def test_a_missing_file_is_named_before_anything_is_made(tmp_path, field):
    """Red when a wrong path ends in an errno, or only after the run directory was made."""
    config = train.TrainConfig(out=tmp_path / "run", **{field: (tmp_path / "nope.txt",)})
    with pytest.raises(ValueError, match=r"nope.txt does not exist.*Check --data"):
        check_settings(config, 1)
    assert not config.out.exists()
