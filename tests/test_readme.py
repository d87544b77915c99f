"""README.md says what is so: its code, its list of files, its length, and every command in it.

python tests/test_readme.py prints the blocks that it must contain.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHORT = "--steps 2 --batch-size 4 --micro-batch-size 4 --seq-len 64 --device cpu"
MAIN = f"{SHORT} --eval-data held_out.txt"  # instead of 110,000 held-out tokens
CHAT = [("user", "What is 2 + 2?"), ("assistant", "4, which is 2 more than 2.")]

# Command -> how it is run, in this order, in one directory: itself (None), a shorter form, or the
# file in which it is run. SHORT and MAIN make runs short.
COMMANDS = {
    "pip install -e . && python scripts/train.py": (
        f"python scripts/train.py {MAIN} --save-every 1"
    ),
    'pip install -e ".[test]" && pytest': ".ci/run",
    "python scripts/train.py": "tests/test_readme.py",  # the first of these, without pip
    "python scripts/bench.py": (
        "python scripts/bench.py --rounds 1 --steps 1 --batch-size 4 --seq-len 64"
    ),
    "python scripts/train.py --help": None,
    "python scripts/get_smollm2.py": "python scripts/get_smollm2.py --help",
    "python scripts/train.py --model models/smollm2 --data my_chat.jsonl --eval-data my_test.jsonl"
    " --lora-rank 8 --out runs/lora": f"{{}} {SHORT}",
    "python scripts/merge_lora.py runs/lora/final runs/merged": None,
    'python scripts/sample.py runs/merged --chat --prompt "What is 2 + 2?"': (
        "{} --max-new-tokens 8"
    ),
    "torchrun --nproc_per_node 4 scripts/train.py --sp 2 --tp 2 --out runs/four": f"{{}} {MAIN}",
    "python scripts/train.py --out runs/default --resume": f"{{}} {MAIN} --save-every 1",
    "python scripts/plot.py runs/default --out curves.png": None,
    "python scripts/parity.py --sp 2 --tp 2 --train-file my_train.py": None,
    "python scripts/plan.py --model DIR --devices 64 --memory-gb 96 --seq-len 131072": (
        "python scripts/plan.py --model models/smollm2 --devices 64 --memory-gb 96 --seq-len 4096"
    ),
    "python scripts/doctor.py --device auto": "python scripts/doctor.py --device cpu",
    "HOST=node-a bash scripts/launch/two_machines.sh --tp 8": "tests/test_launch_files.py",
}


def train_step_source() -> str:
    """scripts/train.py's train_step, as text."""
    text = (ROOT / "scripts/train.py").read_text(encoding="utf-8")
    steps = [node for node in ast.parse(text).body if getattr(node, "name", "") == "train_step"]
    return ast.get_source_segment(text, steps[0]) + "\n"


def file_tree() -> str:
    """All files of the folders that a reader meets, wrapped."""
    lines = []
    for folder in ("minitrain", "scripts", "scripts/launch", "notebooks"):
        names = [p.name for p in (ROOT / folder).iterdir() if p.is_file() and p.name[0] != "."]
        head = f"{folder}/"
        options = {"width": 120, "break_on_hyphens": False, "break_long_words": False}
        indents = {"initial_indent": f"{head:17}", "subsequent_indent": " " * 17}
        lines.append(textwrap.fill("  ".join(sorted(names)), **options, **indents))
    return "\n".join(lines) + "\n"


def commands_in(text: str) -> set[str]:
    """Command lines of code blocks without a language, and commands in running text."""
    found = re.findall(r"`((?:python|torchrun|bash|pip) [^`]+)`", text)
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        if language:
            continue
        found += re.findall(r"^(?:pip|python|torchrun|bash|[A-Z]+=\S+) .*", block, re.MULTILINE)
    return {" ".join(re.sub(r"\s+# .*", "", command).split()) for command in found}


def make_chat_model(directory: Path) -> None:
    """A tiny model directory with a chat template, in the place of the real one."""
    transformers = pytest.importorskip("transformers")
    from minitrain.corpus import train_tokenizer

    tokenizer = train_tokenizer([text for _, text in CHAT], 300)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos_id, **sizes, **heads
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save(directory)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (directory / "chat_template.jinja").write_text(template)


def test_train_step_is_the_real_one():
    """Red when the step shown is not scripts/train.py's. `python tests/test_readme.py` prints
    it.
    """
    assert f"```python\n{train_step_source()}```\n" in README


def test_files_are_all_listed():
    """Red when a file is not in the list, or one that is gone is."""
    assert f"```\n{file_tree()}```\n" in README


def test_length():
    """Red when the README is longer than a reader's patience."""
    lines = README.splitlines()
    assert len(lines) <= 300
    assert max(len(line) for line in lines if line[:1] != "|") <= 130


def test_links_lead_somewhere():
    """Red when a link's file or an image is not there."""
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_every_command_is_run_somewhere():
    """Red when a command is in the README that no test runs, or only in the table."""
    assert commands_in(README) == set(COMMANDS)
    for how in COMMANDS.values():
        if how and how.endswith((".py", "/run")) and " " not in how:
            assert (ROOT / how).is_file(), how


def test_commands_work_in_order(tmp_path):
    """Red when a command of the README fails for someone who follows it from top to bottom."""
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    shutil.copy(ROOT / "scripts/train.py", tmp_path / "my_train.py")
    make_chat_model(tmp_path / "models/smollm2")
    row = {"messages": [{"role": role, "content": content} for role, content in CHAT]}
    for name in ("my_chat.jsonl", "my_test.jsonl"):
        (tmp_path / name).write_text((json.dumps(row) + "\n") * 8)
    (tmp_path / "held_out.txt").write_text("def f(x):\n    return x\n" * 20)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    said = {}
    for command, how in COMMANDS.items():
        line = (how or command).format(command)
        if not line.startswith(("python", "torchrun")):
            continue
        if "--resume" in command:  # as if it had been killed before its last checkpoint
            shutil.rmtree(tmp_path / "runs/default/checkpoints/step-00000002")
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        result = subprocess.run(line, shell=True, timeout=300, **options)
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
        said[command] = result.stdout
    first = next(iter(said.values()))
    assert (tmp_path / "curves.png").exists()
    for words in ("trained: tiny, 2 steps", "final weights: runs/default/final", "next: python"):
        assert words in first
    lora = next(text for command, text in said.items() if "--lora-rank" in command)
    assert "next: python scripts/merge_lora.py runs/lora/final" in lora
    assert any("going on after step 1" in text for text in said.values())


if __name__ == "__main__":
    print(f"```python\n{train_step_source()}```\n\n```\n{file_tree()}```")
