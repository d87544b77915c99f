"""scripts/sample.py, run as a user runs it, against transformers on the same files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minitrain.corpus import Tokenizer, train_tokenizer
from minitrain.generate import generate
from minitrain.huggingface import load_model
from minitrain.mesh import Mesh

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "sample.py"


def save_tiny(directory: Path) -> None:
    """A Hugging Face directory with a byte-level tokenizer and a chat template."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["some text to learn from"], 257)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.4,
        eos_token_id=tokenizer.eos_id,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save(directory)
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    (directory / "chat_template.jinja").write_text(f"{template}[assistant]")


def sample(*arguments, **settings) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, timeout=120, env=environment, **settings)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path)
    return path


def test_script_prints_what_transformers_generates(directory):
    """Red when the script's prompt, stop tokens or text differ from transformers' on its files."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    ids = tokenizer("def f(", return_tensors="pt")
    whole = model.generate(**ids, do_sample=False, max_new_tokens=30)[0]
    result = sample(directory, "--prompt", "def f(", "--max-new-tokens", 30)
    assert result.returncode == 0, result.stderr.decode()
    expected = tokenizer.decode(whole, skip_special_tokens=True) + "\n"
    assert result.stdout.decode() == expected
    stdin = sample(directory, "--prompt", "-", "--max-new-tokens", 30, input=b"def f(")
    assert stdin.stdout == result.stdout


def test_script_draws_and_chats(directory):
    """Red when --seed has no effect, or --chat leaves the template out or prints the question."""
    draw = ("--temperature", 1.0, "--top-p", 0.9, "--max-new-tokens", 20)
    texts = [
        sample(directory, "--prompt", "def f(", *draw, "--seed", seed).stdout for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    answer = sample(directory, "--prompt", "Why?", "--chat", "--max-new-tokens", 20)
    assert answer.returncode == 0, answer.stderr.decode()
    tokenizer = Tokenizer.load(directory)
    rendered = f"[user]Why?{tokenizer.eos_token}[assistant]"
    same = sample(directory, "--prompt", rendered, "--max-new-tokens", 20)
    assert same.stdout.decode() == rendered + answer.stdout.decode()


def test_script_says_what_is_wrong(directory, tmp_path):
    """Red when a mistake gives a traceback or exit status 0, or a too long text passes unsaid."""
    for arguments, words in [
        ((tmp_path, "--prompt", "a"), "tokenizer.json"),
        ((directory, "--prompt", ""), "at least one token"),
        ((directory, "--prompt", "a", "--top-p", 2), "--top-p"),
    ]:
        result = sample(*arguments)
        assert result.returncode == 1
        assert words in result.stderr.decode()
        assert "Traceback" not in result.stderr.decode()
    result = sample(directory, "--prompt", "ab", "--max-new-tokens", 63)
    assert "2 and 63 new tokens are 65" in result.stderr.decode()


def test_stop_tokens_come_from_all_files(directory):
    """Red when a chat model's second end token (generation_config.json) does not end the text."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        from sample import stop_ids
    finally:
        sys.path.remove(str(SCRIPT.parent))
    tokenizer = Tokenizer.load(directory)
    assert stop_ids(directory, tokenizer) == [tokenizer.eos_id]
    ids = generate(
        load_model(directory, Mesh(), torch.device("cpu"), torch.float32)[0],
        tokenizer.encode("def f("),
        20,
    )
    path = directory / "generation_config.json"
    old = path.read_text()
    path.write_text(json.dumps({"eos_token_id": [ids[5], tokenizer.eos_id]}))
    try:
        assert stop_ids(directory, tokenizer) == sorted([ids[5], tokenizer.eos_id])
        result = sample(directory, "--prompt", "def f(", "--max-new-tokens", 20)
        until = tokenizer.decode(ids[: ids.index(ids[5])])
        assert result.stdout.decode() == f"def f({until}\n"
    finally:
        path.write_text(old)
