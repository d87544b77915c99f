"""The embedded text and its tokenizer, and what a tokenizer must never do to training data."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import processors

from minitrain import corpus
from minitrain.corpus import EOS, Tokenizer, cached_tokenizer, train_tokenizer
from minitrain.dataset import open_dataset

TEXTS = ["the cat sat on the mat\n    and the hat\n\n\nfor the rat = 12\n" * 3, "naïve café 日本"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


@pytest.fixture(scope="module")
def nasty():
    lines = (Path(__file__).parent / "data" / "nasty.jsonl").read_bytes().split(b"\n")[:-1]
    return [m["content"] for line in lines for m in json.loads(line)["messages"]]


def test_every_text_comes_back(tokenizer, nasty):
    """Red when encoding normalises, adds a space, or has no token for a byte."""
    for text, ids in zip(nasty, tokenizer.encode_batch(nasty), strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text) == ids


def test_training_is_deterministic(tokenizer):
    """Red when two machines would train different tokenizers on the same text."""
    assert train_tokenizer(iter(TEXTS), 300).definition == tokenizer.definition
    assert tokenizer.vocab_size == 300 and tokenizer.eos_id == tokenizer.pad_id == 0


def test_control_tokens_in_a_text_stay_text(tokenizer, tmp_path):
    """Red when text can spell a special token, and so end a document or a turn."""
    tokenizer.save(tmp_path)
    for t in (tokenizer, Tokenizer.load(tmp_path)):
        for ids in (
            t.encode(f"a{EOS}b"),
            *t.encode_batch([EOS]),
            t.encode_with_offsets([EOS])[0][0],
        ):
            assert t.eos_id not in ids and EOS in t.decode(ids)
        assert t.backend.encode(EOS).ids == [t.eos_id]


def test_settings_of_a_tokenizer_file_do_not_reach_the_data(tokenizer):
    """Red when a file's truncation cuts documents, its padding or template adds tokens, or trimmed
    offsets move white space of the prompt into the completion."""
    other = Tokenizer(tokenizer.definition, EOS)
    other.backend.enable_truncation(4)
    other.backend.enable_padding(length=64)
    other.backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(f"{EOS} $A", special_tokens=[(EOS, 0)]),
        ]
    )
    t = Tokenizer(other.backend.to_str(), EOS)
    text = "the cat:\n\n  the hat"
    assert t.encode(text) == t.encode_batch([text])[0] == tokenizer.encode(text)
    ids, offsets = t.encode_with_offsets([text])[0]
    assert ids == tokenizer.encode(text)
    assert [text[begin:end] for begin, end in offsets] == [t.decode([i]) for i in ids]


def test_completion_begins_at_its_own_token(tokenizer, tmp_path):
    """Red when the loss mask is off by a token, or a token that straddles the border is learnt."""
    path, t = tmp_path / "a.jsonl", tokenizer
    for prompt, completion, learnt in (
        ("the cat:\n", "the hat", "the hat"),
        ("the cat", " the hat", " the hat"),
        ("日本", "日本", "日本"),
        ("the cat ", "the hat", " hat"),  # " the" straddles
        ("", "the hat", "the hat"),
    ):
        path.write_text(json.dumps({"prompt": prompt, "completion": completion}))
        rows = open_dataset([path], t, 32, vocab_size=300).rows([0])
        ids = rows.labels[rows.labels != -100].tolist()
        assert (t.decode(ids[:-1]), ids[-1]) == (learnt, t.eos_id)
        whole = t.encode(prompt + completion)
        assert rows.input_ids[0, : len(whole) + 1].tolist() == [*whole, t.eos_id]


def test_directories_name_eos_and_pad_in_several_ways(tokenizer, tmp_path):
    """Red when eos is missed where older or base models say it, or a bad file is a traceback."""
    with pytest.raises(ValueError, match=r"needs a file tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read as a tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer.definition)
    assert Tokenizer.load(tmp_path).eos_id is None
    (tmp_path / "config.json").write_text('{"eos_token_id": [0, 7]}')
    assert Tokenizer.load(tmp_path).eos_token == EOS
    settings = {"eos_token": {"content": "a"}, "pad_token": "b"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    t = Tokenizer.load(tmp_path)
    assert [t.decode([t.eos_id]), t.decode([t.pad_id])] == ["a", "b"]
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="must be a JSON object"):
        Tokenizer.load(tmp_path)


def test_transformers_reads_what_is_saved(tokenizer, nasty, tmp_path):
    """Red when AutoTokenizer takes the directory for another tokenizer, or finds no eos."""
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == tokenizer.eos_id and theirs.pad_token_id == tokenizer.pad_id
    for text in (text for text in nasty if "<|" not in text):
        assert theirs(text)["input_ids"] == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text)) == text


def test_held_out_files_are_never_trained_on():
    """Red when a held-out file is in the training part, tests come along, or the order varies."""
    train, heldout = corpus.stdlib_documents()
    names, out = [name for name, _ in train], [name for name, _ in heldout]
    assert not set(names) & set(out) and names == sorted(names, key=lambda n: n.split("/"))
    assert not {text for _, text in train} & {text for _, text in heldout}
    sizes = [sum(len(text) for _, text in part) for part in (train, heldout)]
    assert 0.03 < sizes[1] / sum(sizes) < 0.07
    assert sum(sizes) > 5e6
    assert not {"test", "tests", "site-packages", "encodings"} & {
        p for n in names for p in n.split("/")
    }


def test_chat_rows_come_from_their_own_part(monkeypatch):
    """Red when held-out docstrings are learnt as answers, or questions repeat an answer."""
    parts = corpus.stdlib_documents()
    files = [f for f in parts[0] if f[0].startswith(("asyncio", "email", "random", "queue"))]
    repeated = ("copy_of_random.py", dict(parts[1])["random.py"])  # answers that both parts have
    monkeypatch.setattr(corpus, "stdlib_documents", lambda: ([*files, repeated], parts[1]))
    train, heldout = corpus.stdlib_chat_rows()
    answers = [[row["messages"][1]["content"] for row in rows] for rows in (train, heldout)]
    assert len(train) > 100 and len(heldout) > 50
    assert any("random" in row["messages"][0]["content"] for row in train)
    assert len(set(answers[0])) == len(answers[0])
    assert {len(row["messages"]) for row in train} == {2}
    assert not set(answers[0]) & set(answers[1])


class TestCache:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        """A corpus of two short files, so that the tests take no time."""
        files = (
            [("a.py", '"""What this module is for, in words, at some length."""\n' * 2)],
            [("b.py", "x = 1")],
        )
        monkeypatch.setattr(corpus, "stdlib_documents", lambda: files)

    @pytest.mark.parametrize("name", corpus.BUILTIN)
    def test_files_are_made_once(self, tmp_path, monkeypatch, name):
        """Red when the built-in rows are no rows, mix the two parts, or are made again."""
        paths = corpus.builtin_data(name, tmp_path)
        rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
        if name == "stdlib":
            assert rows[1] == [{"text": "x = 1"}]
        else:
            assert (
                rows[0][0]["messages"][1]["content"]
                == "What this module is for, in words, at some length."
            )
            assert rows[1] == []
        monkeypatch.setattr(corpus, "stdlib_documents", None)
        assert corpus.builtin_data(name, tmp_path) == paths

    def test_the_tokenizer_is_of_the_text(self, tmp_path, monkeypatch):
        """Red when a tokenizer is trained again on the same text, or outlives a change of it."""
        t = cached_tokenizer(iter(TEXTS), tmp_path, 280)
        assert t.definition == train_tokenizer(TEXTS, 280).definition and t.eos_id == 0
        assert cached_tokenizer(TEXTS[:1], tmp_path, 280).definition != t.definition
        monkeypatch.setattr(corpus, "train_tokenizer", None)
        assert cached_tokenizer(TEXTS, tmp_path, 280).definition == t.definition

    def test_several_processes_at_once(self, tmp_path):
        """Red when ranks that make the cache together destroy or half read each other's files."""
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: cached_tokenizer(TEXTS, tmp_path, 280), range(8)))
        assert len({t.definition for t in found}) == 1
        assert len(list(tmp_path.iterdir())) == 1

    def test_an_interrupted_cache_is_not_taken_for_whole(self, tmp_path, monkeypatch):
        """Red when a run killed while it makes the cache leaves a file that the next uses."""
        with monkeypatch.context() as patch:
            patch.setattr(corpus.Path, "replace", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                cached_tokenizer(TEXTS, tmp_path, 280)
        assert list(tmp_path.iterdir()) == []


def test_an_interpreter_without_sources_is_told(monkeypatch, tmp_path):
    """Red when an empty corpus is trained on instead of naming the fix."""
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="Pass text files with --data"):
        corpus.stdlib_documents()
