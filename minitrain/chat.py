"""Conversations to tokens, by the model's own chat template, with loss on what the assistant says.

The conversation is rendered whole and tokenized once, since a header tokenized apart from its
content can come out as other tokens than the model sees when it is used. What is learnt is found
by character: a token counts when it lies wholly in an assistant's content and its end token.

Three kinds of string that no row can contain (they hold random digits) carry the bookkeeping
through the template: marks around what is learnt, guards for control tokens that a message merely
spells out, and names for the control tokens that the template itself writes.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from pathlib import Path

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minitrain.documents import IGNORE
from minitrain.tensor_files import read_json

RENDER_SECONDS = 10.0  # limit for one conversation; a template is a program that others wrote
TODAY = datetime(2024, 7, 26)  # for strftime_now; a run resumed tomorrow must see the same tokens
TRIMS = (str, str.strip, str.lstrip, str.rstrip)  # what templates do to a content
GENERATION = re.compile(r"\{%[-+]?\s*generation\b")


class ChatTemplate:
    """Turn messages into token ids and labels; made by ChatTemplate.load.

    template      Jinja source
    tokenizer     corpus.Tokenizer
    token_names   what the template may insert: bos_token, eos_token, ...
    """

    def __init__(self, template: str, tokenizer, token_names: dict[str, str]):
        self.definition = repr((template, sorted(token_names.items()), TODAY))
        nonce = str(secrets.randbelow(10**18))  # no letters, whose case a template may change
        self.open, self.close = f"<{nonce}(>", f"<{nonce})>"
        added = json.loads(tokenizer.definition)["added_tokens"]
        special = [token["content"] for token in added if token["special"]]
        names = {text: f"<{nonce}#{n}>" for n, text in enumerate(special)}
        guards = {text: f"<{nonce}={n}>" for n, text in enumerate(special)}
        self._guard_text = _replacer(guards)
        self._name = _replacer(names | {guard: text for text, guard in guards.items()})
        ends = {token["content"] for token in added} | {token_names.get("eos_token", "")}
        self._end = re.compile(f"{re.escape(self.close)}( ?{_any_of(ends - {''})})")
        self._marks = re.compile(f"({_any_of([self.open, self.close])})")
        self._backend = _renamed_backend(tokenizer, names)
        self._has_generation = bool(GENERATION.search(template))
        self._deadline, self._token_names = 0.0, token_names
        extensions = [_Generation, loopcontrols]
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        # jinja2's own filter would escape <, > and & for HTML
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals |= {"raise_exception": _raise, "strftime_now": TODAY.strftime}
        environment.globals["_tick"] = self._tick
        environment.globals["_learn"] = lambda caller: f"{self.open}{caller()}{self.close}"
        self._template = environment.from_string(template)

    @classmethod
    def load(cls, directory: Path, tokenizer) -> ChatTemplate:
        """Read the template and the names of the control tokens from a model's directory.

        Raises    ValueError when there is no template or it is no Jinja
        """
        template, names = _read(Path(directory))
        if template is None:
            raise ValueError(
                f"rows of messages need a chat template, but {directory} has none. Copy "
                "chat_template.jinja (or tokenizer_config.json with a chat_template) from a chat "
                "model with the same tokenizer, or use rows of prompt and completion."
            )
        try:
            return cls(template, tokenizer, names)
        except jinja2.TemplateSyntaxError as error:
            where = f"the chat template of {directory} must be Jinja, but line {error.lineno}"
            raise ValueError(f"{where} is not: {error.message}.") from None

    def encode(self, messages: list[dict]) -> tuple[list[int], list[int]]:
        """Tokenize a whole conversation.

        messages   [{"role", "content", ...}, ...]; further keys are handed to the template

        Returns    ids, and labels: the id where it is learnt, else -100; not shifted
        Raises     ValueError when the template refuses the messages, takes longer than
                   RENDER_SECONDS, or does not let the assistant's content be found
        """
        (result,) = self.encode_batch([messages])
        if isinstance(result, ValueError):
            raise result
        return result

    def encode_batch(self, conversations: list[list[dict]]) -> list[tuple | ValueError]:
        """Tokenize conversations on all cores: what encode returns or raises, for each."""
        results = []
        for messages in conversations:
            try:
                results.append(self._unmark(self._name(self._mark(self._guard(messages)))))
            except ValueError as error:
                results.append(error)
        texts = [result[0] for result in results if isinstance(result, tuple)]
        encodings = iter(self._backend.encode_batch(texts, add_special_tokens=False))
        return [r if isinstance(r, ValueError) else _learnt(next(encodings), r[1]) for r in results]

    def prompt(self, messages: list[dict]) -> list[int]:
        """Tokenize a conversation up to where the assistant is to answer."""
        marked = self._render(self._guard(messages), add_generation_prompt=True)
        text, _ = self._unmark(self._name(marked))
        return self._backend.encode(text, add_special_tokens=False).ids

    def _mark(self, messages: list[dict]) -> str:
        """Render, with open and close around what is learnt."""
        plain = self._render(messages)
        if self._has_generation:
            return plain
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        for trim in TRIMS:
            wrapped = list(messages)
            for n in turns:
                content = f"{self.open}{trim(messages[n]['content'])}{self.close}"
                wrapped[n] = messages[n] | {"content": content}
            marked = self._render(wrapped)
            text, spans = self._unmark(marked)
            if text == plain and len(spans) == len(turns):
                break
        else:
            raise ValueError(
                "the chat template changes the assistant's content, so that what is to be learnt "
                "cannot be found; put {% generation %} and {% endgeneration %} around it"
            )
        # " yes" is one token where a template puts a space before the content
        marked = marked.replace(f" {self.open}", f"{self.open} ")
        marked, ended = self._end.subn(rf"\1{self.close}", marked)
        if ended != len(turns):
            raise ValueError(
                "the chat template must end each assistant's content with a control token, or the "
                f"model never learns to stop, but only {ended} of {len(turns)} have one; add "
                "{{ eos_token }} to it"
            )
        return marked

    def _unmark(self, marked: str) -> tuple[str, list[tuple[int, int]]]:
        """Take the marks out; where they were, as (begin, end) in the text without them."""
        text, spans, begin = "", [], None
        for piece in self._marks.split(marked):
            if piece == self.open:
                begin = len(text)
            elif piece != self.close:
                text += piece
            elif begin is not None:
                spans.append((begin, len(text)))
                begin = None
        return text, spans

    def _guard(self, value):
        """Replace control tokens spelled out anywhere in the messages."""
        if isinstance(value, str):
            return self._guard_text(value)
        if isinstance(value, list):
            return [self._guard(item) for item in value]
        if isinstance(value, dict):
            return {key: self._guard(item) for key, item in value.items()}
        return value

    def _render(self, messages: list[dict], add_generation_prompt: bool = False) -> str:
        self._deadline = time.monotonic() + RENDER_SECONDS
        known = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(**known, tools=None, documents=None, **self._token_names)
        except Exception as error:  # whatever a template does wrong with these messages
            raise ValueError(str(error).rstrip(".") or type(error).__name__) from None

    def _tick(self) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"it takes longer than {RENDER_SECONDS:g} s")


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which every turn of a loop, and every call of a macro, looks at the clock."""

    def _parse(self, source, name, filename):
        tree = super()._parse(source, name, filename)
        for node in list(tree.find_all((nodes.For, nodes.Macro))):
            tick = nodes.Call(nodes.Name("_tick", "load"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return tree.set_environment(self)


class _Generation(Extension):
    """The block {% generation %} ... {% endgeneration %} around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.Call(nodes.Name("_learn", "load"), [], [], None, None)
        return nodes.CallBlock(call, [], [], body, lineno=line)


def has_chat_template(directory: Path) -> bool:
    """Whether a model's directory has a chat template."""
    return _read(Path(directory))[0] is not None


def _read(directory: Path) -> tuple[str | None, dict[str, str]]:
    """The template's source, or None, and the control tokens that it may name."""
    settings = {}
    for path in (directory / "special_tokens_map.json", directory / "tokenizer_config.json"):
        settings |= read_json(path) if path.is_file() else {}
    template, own_file = settings.get("chat_template"), directory / "chat_template.jinja"
    if own_file.is_file():
        template = own_file.read_text(encoding="utf-8")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        if "default" not in named:
            rule = "a list of chat templates must have one named default"
            raise ValueError(f"{rule}, but {directory} has only {', '.join(named) or 'none'}.")
        template = named["default"]
    names = {k: v.get("content") if isinstance(v, dict) else v for k, v in settings.items()}
    return template, {k: v for k, v in names.items() if k.endswith("_token") and isinstance(v, str)}


def _learnt(encoding: tokenizers.Encoding, spans: list[tuple[int, int]]) -> tuple[list, list]:
    """The ids, and labels: the id of a token that lies wholly within a span, else -100."""
    labels, current = [], 0  # the first span that does not end before the token
    for token, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
        while current < len(spans) and spans[current][1] < end:
            current += 1
        labels.append(token if current < len(spans) and begin >= spans[current][0] else IGNORE)
    return encoding.ids, labels


def _renamed_backend(tokenizer, names: dict[str, str]) -> tokenizers.Tokenizer:
    """The tokenizer with other names for control tokens; the spelled-out ones are plain text."""
    parts = json.loads(tokenizer.definition)
    parts |= {"post_processor": None, "truncation": None, "padding": None}
    for token in parts["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = parts["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): n for text, n in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), *rest] for text, *rest in model["vocab"]]
    if model.get("unk_token"):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    backend = tokenizers.Tokenizer.from_str(json.dumps(parts))
    for text, name in names.items():
        same = backend.token_to_id(name) == tokenizer.backend.token_to_id(text)
        assert same, f"control token {text} got another id"
    return backend


def _any_of(texts: Iterable[str]) -> str:
    """A pattern for one of the texts, the longest that fits; none fits an empty set."""
    texts = sorted(texts, key=len, reverse=True)
    return f"(?:{'|'.join(map(re.escape, texts))})" if texts else "(?!)"


def _replacer(replacements: dict[str, str]) -> Callable[[str], str]:
    """A function that replaces many strings at once: nothing put in is replaced again."""
    pattern = re.compile(_any_of(replacements))
    return lambda text: pattern.sub(lambda match: replacements[match.group()], text)


def _raise(message: str):
    raise jinja2.TemplateError(message)
