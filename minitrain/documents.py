"""Files to documents: read .txt and .jsonl, say what is wrong with a row, mark what is learnt.

Apart from dataset.py, because it answers another question: here what a row may look like, there
how rows become batches. A new row form is a branch in `parse_row` and one in `_encode`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

IGNORE = -100  # label of a position that has no loss
ROLES = ("system", "developer", "user", "assistant", "tool")
ROW_FORMS = '{"text"}, {"messages"}, {"prompt", "completion"} or {"input_ids", "labels"}'
CHUNK_ROWS = 256  # rows handed to the tokenizer at once, so that it can use all cores


@dataclass
class Documents:
    """Hold tokenised documents, in file order.

    ids        token ids, int32, one array a document
    labels     loss labels, not shifted, -100 = no loss; None when every token counts
    all_text   every document is text that ends with the eos token: eos ids alone tell them apart
    bad_rows   one sentence for each row that was left out
    """

    ids: list[np.ndarray] = field(default_factory=list)
    labels: list[np.ndarray | None] = field(default_factory=list)
    all_text: bool = True
    bad_rows: list[str] = field(default_factory=list)


class BadRow(ValueError):
    """What is wrong with one row, without the place."""


def read_documents(
    paths: list[Path], tokenizer, *, chat=None, vocab_size=None, on_bad_row="stop"
) -> Documents:
    """Read and tokenise every row of .txt and .jsonl files.

    tokenizer    corpus.Tokenizer; None is enough for rows of input_ids
    chat         object with encode(messages) -> (ids, labels); or None without such rows
    vocab_size   ids from here on are a bad row; None: any id that fits 31 bits
    on_bad_row   "stop" raises at the first bad row; "skip" leaves them out and keeps the reasons

    Returns      the documents, in the order of files and lines
    Raises       ValueError "file:line: reason" for a bad row, and for a file without any row
    """
    documents = Documents()

    def report(where: str, reason: object):
        if on_bad_row == "stop":
            fix = "Correct the row, or pass --on-bad-row skip to leave bad rows out."
            raise ValueError(f"{where}: {reason} {fix}")
        documents.bad_rows.append(f"{where}: {reason}")

    for path in paths:
        rows = _rows(path, report)
        while chunk := list(islice(rows, CHUNK_ROWS)):
            for where, form, encoded in _encode(chunk, tokenizer, chat):
                try:
                    if isinstance(encoded, BadRow):
                        raise encoded
                    ids, labels = _check_ids(*encoded, vocab_size)
                except BadRow as error:
                    report(where, error)
                    continue
                documents.ids.append(ids)
                documents.labels.append(labels)
                documents.all_text &= form == "text"
    return documents


def check_readable(path: Path):
    """Raise ValueError when a data file is missing, unreadable or of an unknown kind."""
    if not path.exists():
        raise ValueError(
            f"data file {path} does not exist. Check --data and the working directory."
        )
    if not path.is_file():
        raise ValueError(f"data file {path} is not a file. Pass the files themselves to --data.")
    if path.suffix not in (".txt", ".jsonl", ".bin"):
        raise ValueError(
            "data files must end in .txt, .jsonl (one JSON object a line) or .bin (token ids), but "
            f"{path} ends in '{path.suffix}'. Convert or rename it."
        )
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(f"data file {path} cannot be read: {error.strerror}.") from None


def parse_row(line: bytes) -> tuple[str, object]:
    """Check one line of a .jsonl file: (form, what is to be encoded); BadRow says what is wrong."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise BadRow(f"a line must be UTF-8, but byte {error.start + 1} is 0x{byte:02x}.") from None
    except json.JSONDecodeError as error:
        what = f"{error.msg}, character {error.pos + 1}"
        raise BadRow(
            f"a row must be one JSON object on one line, but it is no JSON: {what}."
        ) from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of thousands of digits; nested too deep
        raise BadRow(f"a row must be one JSON object, but it cannot be read: {error}.") from None
    if not isinstance(row, dict):
        raise BadRow(f"a row must be a JSON object, {ROW_FORMS}, but this is {_kind(row)}.")
    if "messages" in row:
        return "messages", _check_messages(row["messages"])
    if "input_ids" in row:
        return "input_ids", _check_token_row(row["input_ids"], row.get("labels"))
    if "completion" in row:
        return "prompt", tuple(_check_text(row.get(key), key) for key in ("prompt", "completion"))
    if "text" in row:
        return "text", _check_text(row["text"], "text")
    keys = ", ".join(map(repr, list(row)[:6])) or "none"
    hint = " Rename ShareGPT's keys: messages, role, content." if "conversations" in row else ""
    raise BadRow(f"a row must be {ROW_FORMS}, but its keys are: {keys}.{hint}")


def _rows(path: Path, report) -> Iterator[tuple[str, str, object]]:
    """Yield (file:line, form, what is to be encoded); lines end at \\n, never at U+2028."""
    found = False
    with path.open("rb") as file:
        if path.suffix == ".txt":
            content = file.read().removeprefix(b"\xef\xbb\xbf")
            found = bool(content.strip())
            try:
                if found:
                    yield f"{path}:1", "text", content.decode("utf-8")
            except UnicodeDecodeError as error:
                line = content.count(b"\n", 0, error.start) + 1
                report(
                    f"{path}:{line}", f"text must be UTF-8, but holds 0x{content[error.start]:02x}."
                )
        else:
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if not line.strip():
                    continue
                found = True
                try:
                    form, value = parse_row(line)
                except BadRow as error:
                    report(f"{path}:{number}", error)
                else:
                    yield f"{path}:{number}", form, value
    if not found:
        raise ValueError(
            f"data file {path} has nothing to learn: it is empty or blank. Pass another file."
        )


def _encode(chunk: list, tokenizer, chat) -> Iterator[tuple[str, str, object]]:
    """Turn rows into (file:line, form, (ids, labels or None)), or a BadRow in the last place."""
    needs_tokenizer = [where for where, form, _ in chunk if form in ("text", "prompt")]
    if needs_tokenizer and (tokenizer is None or tokenizer.eos_id is None):
        raise ValueError(
            f"{needs_tokenizer[0]}: text needs a tokenizer with an eos token, but the model "
            "directory has none. Pass one with tokenizer.json and an eos_token in "
            "tokenizer_config.json, or rows with input_ids."
        )
    texts = [value for _, form, value in chunk if form == "text"]
    prompts = ["".join(value) for _, form, value in chunk if form == "prompt"]
    text_ids = iter(tokenizer.encode_batch(texts)) if texts else iter(())
    prompt_ids = iter(tokenizer.encode_with_offsets(prompts)) if prompts else iter(())
    for where, form, value in chunk:
        if form == "text":
            yield where, form, ([*next(text_ids), tokenizer.eos_id], None)
        elif form == "prompt":
            yield (
                where,
                form,
                _completion_labels(len(value[0]), *next(prompt_ids), tokenizer.eos_id),
            )
        elif form == "messages":
            yield where, form, _encode_chat(where, value, chat)
        else:
            yield where, form, value


def _completion_labels(border: int, ids: list, offsets: list, eos_id: int) -> tuple[list, list]:
    """Label the tokens that lie wholly behind the prompt's last character, and the eos token."""
    labels = [i if start >= border else IGNORE for i, (start, _) in zip(ids, offsets, strict=True)]
    return [*ids, eos_id], [*labels, eos_id]


def _encode_chat(where: str, messages: list, chat) -> tuple[list, list] | BadRow:
    if chat is None:
        raise ValueError(
            f"{where}: rows of messages need a chat template, but the model has none. Pass --model "
            "with a directory that has one (chat_template.jinja, or chat_template in "
            "tokenizer_config.json), or use rows of prompt and completion."
        )
    try:
        return chat.encode(messages)
    except ValueError as error:  # the template refuses, e.g. "roles must alternate"
        return BadRow(f"the chat template cannot render these messages: {error}.")


def _check_messages(messages: object) -> list:
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"messages must be a list of role and content, but is {_kind(messages)}.")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise BadRow(
                f"message {number} must be an object of role and content, not {_kind(message)}."
            )
        if message.get("role") not in ROLES:
            role = json.dumps(message.get("role"))
            raise BadRow(
                f"role of message {number} must be one of {', '.join(ROLES)}, but is {role}."
            )
        _check_text(message.get("content"), f"content of message {number}")
    return messages


def _check_text(text: object, name: str) -> str:
    if not isinstance(text, str):
        raise BadRow(f"{name} must be a string, but is {_kind(text)}.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise BadRow(
            f"{name} must be Unicode text, but holds half a surrogate pair, {half}."
        ) from None
    return text


def _check_token_row(ids: object, labels: object) -> tuple[list, list | None]:
    for name, values in (("input_ids", ids), ("labels", labels)):
        if values is None and name == "labels":
            continue
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise BadRow(f"{name} must be a list of whole numbers, but is {_kind(values)}.")
    if not ids:
        raise BadRow("input_ids must hold at least one token, but is empty.")
    if labels is not None and len(ids) != len(labels):
        raise BadRow(
            "labels must be as long as input_ids, one for each and not yet shifted, but there are "
            f"{len(ids)} input_ids and {len(labels)} labels."
        )
    return ids, labels


def _check_ids(ids, labels, vocab_size: int | None) -> tuple[np.ndarray, np.ndarray | None]:
    limit = 2**31 if vocab_size is None else vocab_size
    arrays = []
    for name, values in (("input_ids", ids), ("labels", labels)):
        array = None if values is None else np.array(values, object if _huge(values) else np.int64)
        if array is not None:
            allowed = (array >= 0) & (array < limit)
            if name == "labels":
                allowed |= array == IGNORE
            if not allowed.all():
                also = " (or -100 for no loss)" if name == "labels" else ""
                first = array[~allowed][0]
                raise BadRow(f"{name} must be ids from 0 to {limit - 1}{also}, but one is {first}.")
            array = array.astype(np.int32)
        arrays.append(array)
    return arrays[0], arrays[1]


def _huge(values) -> bool:
    """Whether a number does not fit int64, so that numpy would refuse the whole list."""
    return max(values) >= 2**63 or min(values) < -(2**63)


def _kind(value: object) -> str:
    """Name a JSON value for an error: 'null', 'a string', 'a list of 3'."""
    if value is None:
        return "null or missing"
    if isinstance(value, list):
        odd = next((v for v in value if type(v) is not int), None)
        return f"a list of {len(value)}" + (f" that holds {odd!r:.40}" if odd is not None else "")
    names = {
        bool: "true or false",
        str: "a string",
        dict: "an object",
        int: "a number",
        float: "a number",
    }
    return names[type(value)]
