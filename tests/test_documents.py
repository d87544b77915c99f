"""Files to documents: every row form, and every kind of bad line, with its number."""

import json
from pathlib import Path

import pytest

from minitrain import documents
from minitrain.corpus import train_tokenizer
from minitrain.dataset import open_dataset

DATA = Path(__file__).parent / "data"


class Letters:
    """A tokenizer whose ids are the letters' code points, and 0 the eos."""

    eos_id, pad_id = 0, 0

    def encode_batch(self, texts):
        return [list(map(ord, text)) for text in texts]

    def encode_with_offsets(self, texts):
        return [(list(map(ord, text)), [(i, i + 1) for i in range(len(text))]) for text in texts]


class Chat:
    """A chat encoder that remembers what it was asked for."""

    def __init__(self):
        self.seen = []

    def encode_batch(self, conversations):
        self.seen += conversations
        return [([1, 2, 3], [-100, 2, 3])] * len(conversations)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [path]


class TestReading:
    def test_prompt_and_completion(self, tmp_path):
        """Red when the prompt is learnt, the completion's end is not, or the eos is forgotten."""
        rows = [{"prompt": "ab", "completion": "cd"}, {"prompt": "ab", "completion": ""}]
        dataset = open_dataset(
            write(tmp_path / "a.jsonl", rows), Letters(), 5, pack=False, shuffle=False
        )
        assert dataset.rows([0, 1]).labels.tolist() == [
            [-100, -100, 99, 100, 0],
            [-100, -100, 0, -100, -100],
        ]

    def test_lines_end_at_newlines_only(self):
        """Red when U+2028 and its like cut a row in two, or text is altered while read."""
        chat = Chat()
        lines = (DATA / "nasty.jsonl").read_bytes().split(b"\n")[:-1]
        dataset = open_dataset([DATA / "nasty.jsonl"], None, 8, chat=chat)
        assert chat.seen == [json.loads(line)["messages"] for line in lines]
        assert len(chat.seen) == len(json.loads((DATA / "nasty.cases.json").read_text()))
        assert "33 documents" in dataset.summary

    def test_bom_crlf_and_blank_lines(self):
        """Red when a byte order mark, CRLF or blank lines are taken for rows."""
        chat = Chat()
        open_dataset([DATA / "crlf_bom_blank.jsonl"], None, 8, chat=chat)
        assert [messages[1]["content"][:3] for messages in chat.seen] == ["Yes", "Two", "No."]

    def test_plain_text_is_read_as_it_is(self, tmp_path):
        """Red when a .txt file's line ends are translated or its byte order mark is learnt."""
        (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\n")
        rows = open_dataset([tmp_path / "a.txt"], Letters(), 8).rows([0])
        assert rows.input_ids[0, :6].tolist() == [97, 13, 10, 98, 10, 0]

    def test_a_large_text_is_read_in_parts(self, tmp_path, monkeypatch):
        """Red when a part is lost, ends inside a token or a character, or ends the document."""
        text = "Été: x\n\n  indented\nand on\tand on \nno. \n\n\nYes?\r\nNo\n" * 300
        (tmp_path / "a.txt").write_bytes(text.encode())
        tokenizer = train_tokenizer([text], 300)
        whole = tokenizer.encode(text)
        monkeypatch.setattr(documents, "PART_BYTES", 40)
        found = documents.read_documents([tmp_path / "a.txt"], tokenizer)
        assert found.tokens.tolist() == [*whole, tokenizer.eos_id]
        assert found.lengths.tolist() == [len(whole) + 1] and found.all_text
        rows = list(documents.read_rows(tmp_path / "a.txt"))
        assert len(rows) > 100 and {row.form for row in rows[:-1]} == {"part"}
        read = sum(row.size for row in rows[:7])
        assert list(documents.read_rows(tmp_path / "a.txt", read)) == rows[7:]
        assert "".join(documents.sample_texts([tmp_path / "a.txt"], read)) == "".join(
            row.value for row in rows[:7]
        )

    def test_padding_stays_in_the_vocabulary(self, tmp_path):
        """Red when a pad token that the model has no embedding for is looked up."""
        tokenizer = Letters()
        tokenizer.pad_id = 500
        paths = write(tmp_path / "a.jsonl", [{"text": "a"}])
        assert open_dataset(paths, tokenizer, 4, vocab_size=200).rows([0]).input_ids.max() == 97


BAD_LINES = [
    (b'{"text": 5}', "text must be a string, but found 5"),
    (b'{"text": null}', "text must be a string, but found null"),
    (b'{"text": "\\ud800"}', r"without half a surrogate pair, but found .\\ud800"),
    (b'{"prompt": "x"}', r'keys of a row .*, but found ."prompt"'),
    (b'{"conversations": []}', "not ShareGPT's conversations"),
    (b'{"completion": "x"}', "prompt must be a string, but found null"),
    (b'{"prompt": ["x"], "completion": "x"}', "prompt must be a string, but found ."),
    (b'{"messages": []}', r"messages must be a list .*, but found \[\]"),
    (b'{"messages": ["user"]}', r"message 1 must be an object, but found .user"),
    (b'{"messages": [{"role": ["user"], "content": "x"}]}', r'but found \["user"\]'),
    (b'{"input_ids": []}', r"at least one whole number, but found \[\]"),
    (b'{"input_ids": "abc"}', "whole number, but found .abc"),
    (b'{"input_ids": [1, 2.0]}', r"whole number, but found \[1, 2.0\]"),
    (b'{"input_ids": [1, true]}', r"whole number, but found \[1, true\]"),
    (b'{"input_ids": [1, 99]}', r"ids from 0 to 98, but found \[99\]"),
    (b'{"input_ids": [1, -100]}', r"ids from 0 to 98, but found \[-100\]"),
    (b'{"input_ids": [1, 1' + b"0" * 40 + b"]}", r"ids from 0 to 98, but found \[1000"),
    (b'{"input_ids": [1, 2], "labels": [1]}', "found .2 input_ids, 1 labels"),
    (b'{"input_ids": [1, 2], "labels": [1, -1]}', r"or -100 for no loss\), but found \[-1\]"),
    (b'{"input_ids": [1, 2], "labels": [1, 99]}', r"but found \[99\]"),
    (b"[" * 100000, "on one line"),
    (b"9" * 5000, "must be"),
    (b'"text"', "must be an object, .*but found .text"),
    (b'{"text": "x"} {"text": "y"}', "UTF-8: Extra data"),
    (b'{"text": "\xff"}', "0xff in position 10"),
    (b"{}", r"keys of a row .*, but found \[\]"),
]


class TestBadInput:
    @pytest.mark.parametrize(("line", "reason"), BAD_LINES, ids=range(len(BAD_LINES)))
    def test_bad_rows(self, tmp_path, line, reason):
        """Red when a wrong row is trained on, or named with a wrong line, or crashes the reader."""
        path = tmp_path / "a.jsonl"
        path.write_bytes(b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}')
        with pytest.raises(ValueError, match=rf"a\.jsonl:3: .*{reason}.*--on-bad-row skip"):
            open_dataset([path], Letters(), 8, vocab_size=99)
        dataset = open_dataset(
            [path], Letters(), 8, vocab_size=99, on_bad_row="skip", shuffle=False
        )
        assert dataset.rows([0]).input_ids[0, :4].tolist() == [97, 0, 98, 0]
        assert f"1 bad row skipped, the first: {path}:3: " in dataset.summary

    def test_every_line_of_the_bad_file(self, tmp_path):
        """Red when one of the bad rows that users have is accepted, or a good one is not."""
        lines = (DATA / "bad.jsonl").read_bytes().removesuffix(b"\n").split(b"\n")
        cases = json.loads((DATA / "bad.cases.json").read_text())
        for number, reason in cases.items():
            path = tmp_path / f"{number}.jsonl"
            good = lines[0] + b"\n"
            path.write_bytes(good * (int(number) - 1) + lines[int(number) - 1] + b"\n")
            if reason is None:
                open_dataset([path], None, 8, chat=Chat())
            else:
                with pytest.raises(ValueError, match=rf"{number}\.jsonl:{number}: "):
                    open_dataset([path], None, 8, chat=Chat())
        with pytest.raises(ValueError, match=r"bad\.jsonl:2: "):
            open_dataset([DATA / "bad.jsonl"], None, 8, chat=Chat())
        chat = Chat()
        summary = open_dataset([DATA / "bad.jsonl"], None, 8, chat=chat, on_bad_row="skip").summary
        assert "12 bad rows skipped" in summary
        assert [messages[0]["content"] for messages in chat.seen] == ["good one", "good two"]

    @pytest.mark.parametrize(
        ("name", "content", "reason"),
        [
            ("a.jsonl", b"", "empty or blank"),
            ("a.jsonl", b"\n \r\n\t\n", "empty or blank"),
            ("a.txt", b" \n", "empty or blank"),
            ("a.txt", b"one\ntwo\xff\n", r"a\.txt:2: text must be UTF-8: .* byte 0xff"),
            ("a.csv", b"x", "must end in .txt, .jsonl .* ends in '.csv'"),
            ("a.jsonl", None, "does not exist"),
            ("a.bin", b"", "needs a header"),
        ],
    )
    def test_bad_files(self, tmp_path, name, content, reason):
        """Red when a file without a row, unreadable or missing is passed over in silence."""
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            open_dataset([tmp_path / name], Letters(), 8)

    def test_settings(self, tmp_path):
        """Red when missing files or a missing tokenizer end in a traceback."""
        paths = write(tmp_path / "a.jsonl", [{"text": "a"}])
        for settings, reason in (
            ({"paths": []}, "no row left to learn from in no file"),
            ({"paths": [tmp_path]}, "is not a file"),
            ({"tokenizer": None}, r"a\.jsonl:1: text needs a tokenizer with an eos token"),
        ):
            arguments = {"paths": paths, "tokenizer": Letters(), "seq_len": 8} | settings
            with pytest.raises(ValueError, match=reason):
                open_dataset(**arguments)
        rows = [{"messages": [{"role": "user", "content": "x"}]}]
        with pytest.raises(ValueError, match=r"b\.jsonl:1: .* chat template"):
            open_dataset(write(tmp_path / "b.jsonl", rows), Letters(), 8)

    def test_a_row_that_the_template_refuses_is_a_bad_row(self, tmp_path):
        """Red when a template's own complaint ends the run without file and line."""

        class Refuses:
            def encode_batch(self, conversations):
                return [ValueError("roles must alternate")]

        paths = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "x"}]}])
        with pytest.raises(ValueError, match=r"a\.jsonl:1: .*roles must alternate"):
            open_dataset(paths, None, 8, chat=Refuses())
