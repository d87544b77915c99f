"""Tokenizers, and the text that is always there: the Python standard library's own sources.

No download: the running interpreter brings about 9 MB of real text along. Tests, vendored packages
and generated tables are left out, and some files are held out, never to be trained on.
"""

import ast
import hashlib
import json
import platform
import sysconfig
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from minitrain.log import progress
from minitrain.tensor_files import read_json

EOS = "<|endoftext|>"
SKIPPED_PARTS = {
    *("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"),
    *("turtledemo", "ensurepip", "lib-dynload", "_vendor"),
    *("pydoc_data", "encodings", "entities.py", "__phello__", "__phello__.foo.py"),  # generated
}
HELDOUT_PER_MILLE = 55
BUILTIN = ("stdlib", "stdlib-chat")  # what --data may name besides files
MIN_ANSWER = 40  # characters of a docstring that answers a question


class Tokenizer:
    """Turn text into token ids and back; a tokenizer.json with its eos and padding tokens.

    Control tokens spelled out in a text become plain text, never the special tokens.

    backend      the tokenizers.Tokenizer, for what must see special tokens (chat templates)
    eos_id       id of the token that ends a document; None when the directory names none
    pad_id       id for padding: the directory's pad token, else eos, else 0
    vocab_size   largest id + 1, added tokens included
    """

    def __init__(self, definition: str, eos_token: str | None = None, pad_token: str | None = None):
        self.definition, self.eos_token, self.pad_token = definition, eos_token, pad_token
        self.backend = tokenizers.Tokenizer.from_str(definition)
        # A post-processor adds special tokens and trims white space from offsets; truncation and
        # padding are often left on in a file. None of them has a place in training data.
        unwanted = dict.fromkeys(("post_processor", "truncation", "padding"))
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(json.loads(definition) | unwanted))
        self._plain.encode_special_tokens = True
        self.eos_id = eos_token and self.backend.token_to_id(eos_token)
        pad_id = pad_token and self.backend.token_to_id(pad_token)
        self.pad_id = next((i for i in (pad_id, self.eos_id) if i is not None), 0)
        self.vocab_size = max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; no special token is added."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode texts on all cores."""
        return [e.ids for e in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_with_offsets(self, texts: list[str]) -> list[tuple[list[int], list[tuple]]]:
        """Encode texts on all cores: for each its ids, and (begin, end) of each in characters."""
        return [(e.ids, e.offsets) for e in self._plain.encode_batch(texts, False, False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, special tokens spelled out."""
        return self._plain.decode([int(i) for i in ids], skip_special_tokens=False)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read tokenizer.json, and the names of eos and pad from tokenizer_config.json.

        Without a name the eos id is config.json's. ValueError: a file is missing or no tokenizer.
        """
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"a tokenizer needs a file tokenizer.json, but {directory} has none. Copy it from "
                "where the model comes from, or pass rows with input_ids."
            )
        files = [path.with_name(f"{name}.json") for name in ("tokenizer_config", "config")]
        names, config = (read_json(file) if file.is_file() else {} for file in files)
        names = [names.get("eos_token"), names.get("pad_token")]
        eos, pad = (name["content"] if isinstance(name, dict) else name for name in names)
        try:
            tokenizer = cls(path.read_text(encoding="utf-8"), eos, pad)
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{path} cannot be read as a tokenizer: {error}.") from None
        eos_id = config.get("eos_token_id")
        if tokenizer.eos_id is None and eos_id is not None:
            eos = tokenizer.backend.id_to_token(eos_id[0] if isinstance(eos_id, list) else eos_id)
            return cls(tokenizer.definition, eos, pad)
        return tokenizer

    def save(self, directory: Path):
        """Write tokenizer.json and tokenizer_config.json as transformers' AutoTokenizer reads."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eos_token}
        settings["pad_token"] = self.pad_token or self.eos_token
        settings |= {"clean_up_tokenization_spaces": False, "model_max_length": 10**30}  # no limit
        text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
        Path(directory, "tokenizer.json").write_text(self.definition, encoding="utf-8")
        Path(directory, "tokenizer_config.json").write_text(text, encoding="utf-8")


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """Train a byte-level BPE tokenizer; the same texts give the same one.

    vocab_size   entries, at least 257: every byte and the eos token; fewer come out of few texts
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    settings = {"vocab_size": vocab_size, "special_tokens": [EOS], "show_progress": False}
    settings["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(progress(texts, "tokenizer"), trainers.BpeTrainer(**settings))
    return Tokenizer(backend.to_str(), EOS)


def stdlib_documents() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (name, text) of the standard library's .py files, sorted: to train on, and held out.

    A hash of the name decides which is held out, so that it is the same files on every machine.
    Raises ValueError for an interpreter that comes without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    train, heldout = [], []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        generated = parts[-1].startswith("_sysconfigdata") or parts[0].startswith("config-")
        if generated or SKIPPED_PARTS.intersection(parts):
            continue
        name, text = "/".join(parts), path.read_text(encoding="utf-8")
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        if text.strip():
            (heldout if number % 1000 < HELDOUT_PER_MILLE else train).append((name, text))
    if not train or not heldout:
        raise ValueError(
            f"the embedded corpus is the Python standard library's source files, but {root} holds "
            "none. Pass text files with --data, or use an interpreter that comes with sources."
        )
    return train, heldout


def builtin_data(name: str, directory: Path) -> list[Path]:
    """Write one of BUILTIN as .jsonl, or find it made: the rows to train on, and those held out."""
    names = [f"{name}-{platform.python_version()}-{part}.jsonl" for part in ("train", "heldout")]
    paths = [Path(directory) / name for name in names]
    if not all(path.exists() for path in paths):
        parts = [[{"text": text} for _, text in part] for part in stdlib_documents()]
        for path, rows in zip(paths, stdlib_chat_rows() if name == "stdlib-chat" else parts):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            write_whole(path, partial(Path.write_text, data=lines, encoding="utf-8"))
    return paths


def cached_tokenizer(texts: Iterable[str], directory: Path, vocab_size: int) -> Tokenizer:
    """Train a tokenizer, or find the one made of the same texts."""
    texts, key = list(texts), hashlib.sha256(f"{tokenizers.__version__} {vocab_size}".encode())
    for text in texts:
        key.update(text.encode())
    path = Path(directory) / f"tokenizer-{key.hexdigest()[:16]}.json"
    if not path.exists():
        definition = train_tokenizer(texts, vocab_size).definition
        write_whole(path, partial(Path.write_text, data=definition, encoding="utf-8"))
    return Tokenizer(path.read_text(encoding="utf-8"), EOS)


def stdlib_chat_rows() -> tuple[list[dict], list[dict]]:
    """Make {"messages": [question, answer]} rows of public docstrings: to train on, held out."""
    parts, seen = ([], []), set()
    for part, files in zip(parts, stdlib_documents()):
        for name, text in files:
            module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            for question, answer in _questions(ast.parse(text), module):
                if len(answer) >= MIN_ANSWER and answer not in seen:
                    seen.add(answer)
                    turns = [("user", question), ("assistant", answer)]
                    part.append({"messages": [{"role": r, "content": t} for r, t in turns]})
    return parts


def _questions(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield (question, docstring) of a module, class or function, and of the public ones in it."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        question = f"What does the Python function {name}({ast.unparse(node.args)}) do?"
        yield question, ast.get_docstring(node) or ""
        return
    kind, about = ("class", "for") if isinstance(node, ast.ClassDef) else ("module", "about")
    yield f"What is the Python {kind} {name} {about}?", ast.get_docstring(node) or ""
    for child in ast.iter_child_nodes(node):
        is_definition = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if is_definition and not child.name.startswith("_"):
            yield from _questions(child, f"{name}.{child.name}")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all; any number of processes may write the same together."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        write(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
