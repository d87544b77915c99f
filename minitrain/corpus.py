"""The text that is always there, and its tokenizer: the Python standard library's own sources.

No download: the running interpreter brings about 9 MB of real text along. Tests, vendored packages
and generated tables are left out, and some files are held out, never to be trained on.
"""

import ast
import hashlib
import json
import platform
import shutil
import sysconfig
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from minitrain.dataset import read_token_file, write_token_file

EOS = "<|endoftext|>"
SKIPPED_PARTS = {
    *("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"),
    *("turtledemo", "ensurepip", "lib-dynload", "_vendor"),
    *("pydoc_data", "encodings", "entities.py", "__phello__", "__phello__.foo.py"),  # generated
}
HELDOUT_PER_MILLE = 55
KINDS = {ast.FunctionDef: "function", ast.AsyncFunctionDef: "function", ast.ClassDef: "class"}
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
        parts = json.loads(definition) | {"post_processor": None, "truncation": None}
        parts["padding"] = None
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(parts))
        self._plain.encode_special_tokens = True
        self.eos_id = self._id(eos_token)
        pad_id = self._id(pad_token)
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
        encodings = self._plain.encode_batch(texts, add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, special tokens spelled out."""
        return self._plain.decode([int(i) for i in ids], skip_special_tokens=False)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read tokenizer.json, and the names of eos and pad from tokenizer_config.json.

        Without a name the eos id of config.json is taken. Raises ValueError when a file is
        missing or no tokenizer.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"a tokenizer needs a file tokenizer.json, but {directory} has none. Copy it from "
                "where the model comes from, or pass rows with input_ids."
            )
        settings = _read_json(directory / "tokenizer_config.json")
        names = [settings.get("eos_token"), settings.get("pad_token")]
        names = [name["content"] if isinstance(name, dict) else name for name in names]
        try:
            tokenizer = cls(path.read_text(encoding="utf-8"), *names)
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{path} cannot be read as a tokenizer: {error}.") from None
        if tokenizer.eos_id is None:
            eos = _read_json(directory / "config.json").get("eos_token_id")
            eos = eos[0] if isinstance(eos, list) else eos
            if isinstance(eos, int):
                return cls(tokenizer.definition, tokenizer.backend.id_to_token(eos), names[1])
        return tokenizer

    def save(self, directory: Path):
        """Write tokenizer.json and tokenizer_config.json as transformers' AutoTokenizer reads."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tokenizer.json").write_text(self.definition, encoding="utf-8")
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eos_token,
            "pad_token": self.pad_token or self.eos_token,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 10**30,  # no limit
        }
        text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """Train a byte-level BPE tokenizer; the same texts give the same one.

    vocab_size   entries, at least 257: every byte and the eos token; fewer come out of few texts
    """
    if vocab_size < 257:
        raise ValueError(f"a vocabulary must hold 256 bytes and eos, 257, but is {vocab_size}.")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
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
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            (heldout if _is_held_out(parts) else train).append(("/".join(parts), text))
    if not train or not heldout:
        raise ValueError(
            f"the embedded corpus is the Python standard library's source files, but {root} holds "
            "none. Pass text files with --data, or use an interpreter that comes with sources."
        )
    return train, heldout


def stdlib_chat_rows(heldout: bool = False) -> Iterator[dict]:
    """Yield {"messages": [question, answer]} rows made from public docstrings, each answer once.

    heldout   rows from the held-out files instead, without answers that a file to train on has too
    """
    train, held = stdlib_documents()
    seen = {answer for _, answer in _questions(train)} if heldout else set()
    for question, answer in _questions(held if heldout else train):
        if answer not in seen:
            seen.add(answer)
            turns = [("user", question), ("assistant", answer)]
            yield {"messages": [{"role": role, "content": text} for role, text in turns]}


def embedded_corpus(cache_dir: Path, vocab_size: int = 4096) -> tuple[Tokenizer, Path, Path, str]:
    """Train the tokenizer on the standard library, write the token files; or find both made.

    The cache is a directory named by a hash of texts, versions and vocab_size, and appears at
    once and whole, so that any number of processes may call this together.

    Returns   (tokenizer, token file to train on, token file held out, one line about them)
    """
    train, heldout = stdlib_documents()
    versions = ["1", platform.python_version(), tokenizers.__version__, str(vocab_size)]
    key = hashlib.sha256(json.dumps([versions, train, heldout]).encode()).hexdigest()[:16]
    final = Path(cache_dir) / f"stdlib-{key}"
    if not final.is_dir():
        part = Path(cache_dir) / f"stdlib-{key}.{uuid.uuid4().hex}.part"
        try:
            tokenizer = train_tokenizer((text for _, text in train), vocab_size)
            tokenizer.save(part)
            for name, documents in (("train", train), ("heldout", heldout)):
                write_token_file(
                    part / f"{name}.bin",
                    tokenizer.encode_batch([text for _, text in documents]),
                    dtype="uint16" if tokenizer.vocab_size <= 2**16 else "uint32",
                    tokenizer_name=f"byte-level BPE of {tokenizer.vocab_size}, stdlib-{key}",
                    eos_id=tokenizer.eos_id,
                )
            try:
                part.rename(final)
            except OSError:  # another process was first: its files are the same
                if not final.is_dir():
                    raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    paths = [final / "train.bin", final / "heldout.bin"]
    counts = [read_token_file(path)[1]["count"] for path in paths]
    sizes = [sum(len(text.encode()) for _, text in part) / 1e6 for part in (train, heldout)]
    summary = (
        f"Python {platform.python_version()}'s standard library, tests and generated tables left "
        f"out: {len(train)} files, {sizes[0]:.1f} MB, {counts[0]:,} tokens to train on; "
        f"{len(heldout)} files, {sizes[1]:.1f} MB, {counts[1]:,} tokens held out"
    )
    return Tokenizer.load(final), *paths, summary


def _is_held_out(parts: tuple[str, ...]) -> bool:
    digest = hashlib.sha256("/".join(parts).encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELDOUT_PER_MILLE


def _questions(files: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield (question, answer) of the modules, and of the public names in them."""
    for name, text in files:
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        about = (f"What is the Python module {module} about?", ast.get_docstring(tree))
        for question, answer in (about, *_questions_in(tree, module)):
            if answer and len(answer) >= MIN_ANSWER:
                yield question, answer


def _questions_in(node: ast.AST, prefix: str) -> Iterator[tuple[str, str | None]]:
    """Yield (question, docstring) of public functions and classes, those in classes too."""
    for child in ast.iter_child_nodes(node):
        kind = KINDS.get(type(child))
        if kind is None or child.name.startswith("_"):
            continue
        name = f"{prefix}.{child.name}"
        answer = ast.get_docstring(child)
        question = f"What is the Python class {name} for?"
        if answer and kind == "function":
            question = f"What does the Python function {name}({ast.unparse(child.args)}) do?"
        yield question, answer
        if kind == "class":
            yield from _questions_in(child, name)


def _read_json(path: Path) -> dict:
    """Read a JSON object that may be missing."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, but cannot be read: {error}.") from None
