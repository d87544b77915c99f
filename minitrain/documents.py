"""Files to documents: read .txt and .jsonl, say what is wrong with a row, mark what is learnt.

A new row form is a branch in `parse_row` and one in `encode_rows`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minitrain.log import progress

IGNORE = -100  # label of a position that has no loss
ROLES = ("system", "developer", "user", "assistant", "tool")
ROW_FORMS = '{"text"}, {"messages"}, {"prompt", "completion"} or {"input_ids", "labels"}'
CHUNK_ROWS = 256  # rows handed to the tokenizer at once, so that it can use all cores
PART_BYTES = 1 << 13  # a .txt file is read in parts of about this size
BOM = b"\xef\xbb\xbf"
HALF_PAIR = re.compile("[\ud800-\udfff]")  # of a surrogate pair, which no UTF-8 text can hold


@dataclass
class Documents:
    """Tokenised documents, end to end, in the order of files and lines."""

    tokens: np.ndarray  # int32
    lengths: np.ndarray  # int64, tokens of each document
    labelled: np.ndarray  # bool, whether it came with labels
    all_text: bool  # all is text that ends with eos: eos ids alone tell the documents apart
    bad_rows: list[str]  # one sentence for each row that was left out
    labels: np.ndarray | None = None  # int32, not shifted; None when no document came with any


class Row(NamedTuple):
    """A row of a .jsonl file, or a part of a .txt file."""

    where: str  # file:line
    form: str  # text, part (all but a text's last one), prompt, messages, input_ids or bad
    value: object  # what to encode; of a bad row, what is wrong
    size: int  # bytes of the file


class BadRow(ValueError):
    """What is wrong with one row, without the place."""


def read_documents(
    paths: list[Path], tokenizer, *, chat=None, vocab_size=None, on_bad_row="stop", quiet=False
) -> Documents:
    """Read and tokenise every row of .txt and .jsonl files, with a progress bar.

    tokenizer    corpus.Tokenizer; None is enough for rows of input_ids
    chat         chat.ChatTemplate; None is enough without rows of messages
    vocab_size   ids from here on are a bad row; None: any id that fits 31 bits
    on_bad_row   "stop" raises at the first bad row; "skip" leaves them out and keeps the reasons

    Raises       ValueError "file:line: reason" for a bad row
    """
    tokens, labels, lengths, labelled, bad_rows = [np.zeros(0, np.int32)], [], [], [], []
    forms, length = set(), 0
    with progress(sum(path.stat().st_size for path in paths), "tokenizing", rank=quiet) as bar:
        rows = (row for path in paths for row in read_rows(path))
        while chunk := list(islice(rows, CHUNK_ROWS)):
            for row, ids, row_labels in encode_rows(chunk, tokenizer, chat, vocab_size):
                bar.update(row.size)
                if row.form == "bad":
                    if on_bad_row == "stop":
                        fix = "Correct the row, or pass --on-bad-row skip to leave bad rows out."
                        raise ValueError(f"{row.where}: {row.value} {fix}")
                    bad_rows.append(f"{row.where}: {row.value}")
                    continue
                tokens.append(ids)
                labels.append(ids if row_labels is None else row_labels)
                length += len(ids)
                if row.form != "part":
                    lengths.append(length)
                    labelled.append(row_labels is not None)
                    forms.add(row.form)
                    length = 0
    arrays = np.concatenate(tokens), np.array(lengths, np.int64), np.array(labelled, bool)
    all_labels = np.concatenate(labels) if any(labelled) else None
    return Documents(*arrays, forms <= {"text"}, bad_rows, all_labels)


def sample_texts(paths: list[Path], num_bytes: int = 20_000_000) -> Iterator[str]:
    """Yield the texts of files' first rows, to train a tokenizer on; token files have none."""
    for path in paths:
        check_readable(path)
        for row in read_rows(path) if path.suffix != ".bin" else ():
            if row.form in ("text", "part", "prompt"):
                yield "".join(row.value)
            elif row.form == "messages":
                yield "\n".join(message["content"] for message in row.value)
            num_bytes -= row.size
            if num_bytes <= 0:
                return


def check_readable(path: Path):
    """Raise ValueError when a data file is missing or of an unknown kind."""
    if not path.is_file():
        raise ValueError(f"data file {path} does not exist, or is not a file. Check --data.")
    if path.suffix not in (".txt", ".jsonl", ".bin"):
        raise ValueError(
            "data files must end in .txt, .jsonl (one JSON object a line) or .bin (token ids), but "
            f"{path} ends in '{path.suffix}'. Convert or rename it."
        )


def read_rows(path: Path, begin: int = 0) -> Iterator[Row]:
    """Yield the rows of a .jsonl file, or a .txt file's parts; memory is a row's or a part's.

    begin   bytes to leave out: the size of rows that were read before
    """
    found = begin > 0
    for row in (_parts if path.suffix == ".txt" else _lines)(path, begin):
        found = True
        yield row
    if not found:
        raise ValueError(f"data file {path} has nothing to learn: it is empty or blank.")


def _lines(path: Path, begin: int) -> Iterator[Row]:
    """Lines end at \\n, never at U+2028."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            offset += len(line)
            line = line.removeprefix(BOM)
            if offset > begin and line.strip():
                try:
                    form, value = parse_row(line)
                except BadRow as error:
                    form, value = "bad", error
                yield Row(f"{path}:{number}", form, value, offset - begin)
                begin = offset


def _parts(path: Path, begin: int) -> Iterator[Row]:
    """Cut between two lines that neither end nor begin with a blank: there byte-level tokenizers
    cut too, so that the tokens are those of the whole text.
    """
    offset, number = 0, 1
    with path.open("rb") as file:
        lines = file.readlines(PART_BYTES)
        while lines:
            while (more := file.readline()) and len(lines) < PART_BYTES:
                if lines[-1][-2:-1].strip() and more[:1].strip():
                    break
                lines.append(more)
            part = b"".join(lines)
            try:
                text = part.removeprefix(BOM).decode("utf-8")
            except UnicodeDecodeError as error:
                number += part.count(b"\n", 0, error.start)
                raise ValueError(f"{path}:{number}: text must be UTF-8: {error}.") from None
            if offset >= begin and (offset > 0 or text.strip()):
                yield Row(f"{path}:{number}", "part" if more else "text", text, len(part))
            offset, number = offset + len(part), number + len(lines)
            lines = [more, *file.readlines(PART_BYTES)] if more else []


def parse_row(line: bytes) -> tuple[str, object]:
    """Check one line of a .jsonl file: (form, what is to be encoded); BadRow says what is wrong."""
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deep
        raise BadRow(f"a row must be a JSON object on one line, in UTF-8: {error}.") from None
    _check(isinstance(row, dict), f"a row must be an object, {ROW_FORMS}", row)
    if "messages" in row:
        return "messages", _check_messages(row["messages"])
    if "input_ids" in row:
        return "input_ids", _check_token_row(row["input_ids"], row.get("labels"))
    if "completion" in row:
        return "prompt", [_check_text(row.get(key), key) for key in ("prompt", "completion")]
    hint = ", not ShareGPT's conversations" if "conversations" in row else ""
    _check("text" in row, f"the keys of a row must be {ROW_FORMS}{hint}", list(row))
    return "text", _check_text(row["text"], "text")


def encode_rows(rows: list[Row], tokenizer, chat, vocab_size: int | None) -> Iterator[tuple]:
    """Yield (row, ids, labels or None) of each row, int32; a row that cannot be encoded as bad.

    The arguments are read_documents'.
    """
    texts = [row for row in rows if row.form in ("text", "part")]
    prompts, chats = ([row for row in rows if row.form == form] for form in ("prompt", "messages"))
    if (texts or prompts) and (tokenizer is None or tokenizer.eos_id is None):
        needed = "a tokenizer with an eos token, but there is none. Pass a --model directory with "
        needed += "tokenizer.json, and eos_token in tokenizer_config.json; or rows of input_ids."
        raise ValueError(f"{(texts or prompts)[0].where}: text needs {needed}")
    if chats and chat is None:
        needed = "a chat template, but the model has none. Pass a --model directory with one; or "
        needed += "rows of prompt and completion."
        raise ValueError(f"{chats[0].where}: rows of messages need {needed}")
    text_ids = iter(texts and tokenizer.encode_batch([row.value for row in texts]))
    joined = ["".join(row.value) for row in prompts]
    prompt_ids = iter(joined and tokenizer.encode_with_offsets(joined))
    chat_ids = iter(chats and chat.encode_batch([row.value for row in chats]))
    for row in rows:
        ids, labels = [], None
        try:
            if row.form in ("text", "part"):
                ids = next(text_ids) + [tokenizer.eos_id] * (row.form == "text")
            elif row.form == "prompt":  # learnt: what lies wholly behind the prompt, and the eos
                ids, offsets = next(prompt_ids)
                border, ids = len(row.value[0]), [*ids, tokenizer.eos_id]
                begins = [begin for begin, _ in offsets] + [border]
                labels = [i if begin >= border else IGNORE for i, begin in zip(ids, begins)]
            elif row.form == "messages":
                result = next(chat_ids)
                if isinstance(result, ValueError):
                    raise BadRow(f"the chat template refuses these messages: {result}.")
                ids, labels = result
            elif row.form == "input_ids":
                ids, labels = row.value
            labels = None if labels is None else _as_ids("labels", labels, vocab_size)
            yield row, _as_ids("input_ids", ids, vocab_size), labels
        except BadRow as error:
            yield row._replace(form="bad", value=error), None, None


def _check_messages(messages: object) -> list:
    is_list = isinstance(messages, list) and messages
    _check(is_list, "messages must be a list of objects with role and content", messages)
    for number, message in enumerate(messages, start=1):
        _check(isinstance(message, dict), f"message {number} must be an object", message)
        role, known = message.get("role"), ", ".join(ROLES)
        _check(role in ROLES, f"role of message {number} must be one of {known}", role)
        _check_text(message.get("content"), f"content of message {number}")
    return messages


def _check_text(text: object, name: str) -> str:
    _check(isinstance(text, str), f"{name} must be a string", text)
    half = HALF_PAIR.search(text)
    _check(not half, f"{name} must be Unicode, without half a surrogate pair", half and half[0])
    return text


def _check_token_row(ids: object, labels: object) -> tuple[list, list | None]:
    for name, values in (("input_ids", ids), ("labels", ids if labels is None else labels)):
        whole = isinstance(values, list) and values and all(type(v) is int for v in values)
        _check(whole, f"{name} must be a list of at least one whole number", values)
    num_labels = len(ids if labels is None else labels)
    found = f"{len(ids)} input_ids, {num_labels} labels"
    _check(num_labels == len(ids), "each of input_ids must have a label, not yet shifted", found)
    return ids, labels


def _as_ids(name: str, values: list, vocab_size: int | None) -> np.ndarray:
    limit, ignored = vocab_size or 2**31, IGNORE if name == "labels" else None
    wrong = [v for v in values if not 0 <= v < limit and v != ignored]
    also = " (or -100 for no loss)" if name == "labels" else ""
    _check(not wrong, f"{name} must be ids from 0 to {limit - 1}{also}", wrong[:1])
    return np.array(values, np.int32)


def _check(holds: object, rule: str, value: object) -> None:
    """Raise BadRow, with the rule and the beginning of the value, when it does not hold."""
    if not holds:
        shown = json.dumps(value)
        raise BadRow(f"{rule}, but found {shown if len(shown) <= 60 else f'{shown[:60]}...'}.")
