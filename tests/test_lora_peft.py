"""Adapter files against peft, the scripts around them, and a real model."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import CPU, lively_weights, tiny_config, tiny_model
from layout_runs import ROOT, train  # also finds scripts/
from safetensors.torch import load_file, save_file
from test_lora import lively_lora

from minitrain.adapter_files import base_of, is_adapter, load_adapter, save_adapter
from minitrain.bf16_optimizer import BF16Optimizer
from minitrain.data_sharder import shard_batch
from minitrain.huggingface import load_model, save_model
from minitrain.launch import run_ranks
from minitrain.lora import LoRAConfig, add_lora, lora_parameters
from minitrain.mesh import Mesh, init_mesh
from minitrain.setup import check_settings

CONFIG = tiny_config(qkv_bias=True, tie_embeddings=True)
LORA = LoRAConfig(rank=3, alpha=5.0, rslora=True, targets=("q_proj", "k_proj", "o_proj", "up_proj"))
IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A base model's directory."""
    path = tmp_path_factory.mktemp("files") / "base"
    model, spec = tiny_model(CONFIG, lively_weights(CONFIG), dtype=torch.float32)
    save_model(path, model, CONFIG, spec, Mesh(), dtype=torch.float32)
    return path


def save_from_ranks(base: Path, path: Path, lora: LoRAConfig, tp: int) -> torch.Tensor:
    """Write an adapter with lively factors; returns the adapted model's logits."""
    mesh = init_mesh(1, tp) if tp > 1 else Mesh()
    model, spec = load_model(base, mesh, CPU, torch.float32)
    add_lora(model, lora, mesh, spec)
    lively_lora(model, spec, mesh)
    save_adapter(path, model, lora, spec, mesh, base)
    with torch.no_grad():
        return model(IDS, torch.arange(9).expand(2, 9))


@pytest.fixture(scope="module")
def adapter(base) -> Path:
    save_from_ranks(base, base.parent / "adapter", LORA, 1)
    return base.parent / "adapter"


def adapted_logits(base: Path, adapter: Path, tp: int = 1) -> torch.Tensor:
    mesh = init_mesh(1, tp) if tp > 1 else Mesh()
    model, spec = load_model(base, mesh, CPU, torch.float32)
    load_adapter(adapter, model, mesh, spec)
    with torch.no_grad():
        logits = model(IDS, torch.arange(9).expand(2, 9))
    return logits


def same(got: torch.Tensor, want: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


@pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs peft")
def test_peft_loads_our_adapter(base, adapter):
    """Red when a name, a shape, the scale or the dtype in our files is not peft's."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        before = plain(IDS).logits
        theirs = PeftModel.from_pretrained(plain, adapter)(IDS).logits
    same(theirs, adapted_logits(base, adapter))
    assert (theirs - before).abs().max() > 0.1


@pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs peft")
@pytest.mark.parametrize("rslora", [False, True])
def test_we_load_pefts_adapter(base, tmp_path, rslora):
    """Red when what peft writes by itself, with fields of its own, is refused or misread."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = LoraConfig(
        r=4, lora_alpha=6, use_rslora=rslora, target_modules="all-linear", init_lora_weights=False
    )
    torch.manual_seed(0)
    model = get_peft_model(plain, settings)
    model.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        same(adapted_logits(base, tmp_path / "theirs"), model(IDS).logits)


def test_tp_writes_and_reads_the_same_files(base, adapter, tmp_path):
    """Red when a rank writes or reads another share than its own, or kv replicas are lost."""
    for tp in (2, 4):
        logits = run_ranks(save_from_ranks, tp, base, tmp_path / f"tp{tp}", LORA, tp)[0]
        expected = load_file(adapter / "adapter_model.safetensors")
        found = load_file(tmp_path / f"tp{tp}" / "adapter_model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
        again = run_ranks(adapted_logits, tp, base, adapter, tp)[0]
        assert torch.equal(again, logits)


def test_settings_survive_a_round_trip(base, adapter):
    """Red when rank, alpha, scaling or targets change between writing and reading."""
    model, spec = load_model(base, Mesh(), CPU, torch.float32)
    found = load_adapter(adapter, model, Mesh(), spec)
    assert replace(found, targets=()) == replace(LORA, targets=())
    assert set(found.targets) == set(LORA.targets)
    assert is_adapter(adapter) and not is_adapter(base)
    assert base_of(adapter) == base.resolve()


def damage(adapter: Path, path: Path, fields: dict, tensors: dict) -> Path:
    """A copy of an adapter with other fields and tensors; None takes one out."""
    shutil.copytree(adapter, path)
    settings = json.loads((path / "adapter_config.json").read_text()) | fields
    (path / "adapter_config.json").write_text(json.dumps(settings))
    found = load_file(path / "adapter_model.safetensors") | tensors
    kept = {name: tensor for name, tensor in found.items() if tensor is not None}
    save_file(kept, path / "adapter_model.safetensors")
    return path


Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
DAMAGES = {
    "dora": ({"use_dora": True}, {}, "use_dora = True"),
    "pissa": ({"init_lora_weights": "pissa"}, {}, "init_lora_weights = 'pissa'"),
    "ranks": ({"rank_pattern": {"q_proj": 4}}, {}, "rank_pattern"),
    "unknown field": ({"use_something_new": 1}, {}, "use_something_new = 1"),
    "no LoRA": ({"peft_type": "IA3"}, {}, "peft_type = 'IA3'"),
    "no rank": ({"r": None}, {}, "r and lora_alpha"),
    "other rank": ({"r": 2}, {}, r"must be \[2, 32\], but it is \[3, 32\]"),
    "other width": (
        {},
        {f"{Q0}A.weight": torch.zeros(3, 48)},
        r"another: by this model's model.layers.0.self_attn.q_proj.weight, \[32, 32\], and r 3, "
        r"lora_A must be \[3, 32\], but it is \[3, 48\]",
    ),
    "other depth": (
        {},
        {
            f"{Q0}A.weight".replace("layers.0", "layers.7"): torch.zeros(3, 32),
            f"{Q0}B.weight".replace("layers.0", "layers.7"): torch.zeros(32, 3),
        },
        "has no layer model.layers.7.self_attn.q_proj",
    ),
    "half": ({}, {f"{Q0}B.weight": None}, "q_proj.lora_A, but no lora_B"),
    "head": (
        {},
        {
            "base_model.model.lm_head.lora_A.weight": torch.zeros(3, 32),
            "base_model.model.lm_head.lora_B.weight": torch.zeros(64, 3),
        },
        "not on lm_head: a tied head and embedding are one matrix",
    ),
    "embedding": (
        {},
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(3, 64)},
        "has base_model.model.model.embed_tokens.lora_embedding_A",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_refuses_an_adapter_it_would_misread(base, adapter, tmp_path, kind):
    """Red when a field or a tensor that changes the model is passed over, or the model changed."""
    fields, tensors, words = DAMAGES[kind]
    path = damage(adapter, tmp_path / "damaged", fields, tensors)
    model, spec = load_model(base, Mesh(), CPU, torch.float32)
    with pytest.raises(ValueError, match=words):
        load_adapter(path, model, Mesh(), spec)
    assert not lora_parameters(model)


def test_names_missing_and_truncated_files(base, adapter, tmp_path):
    """Red when a missing or cut off file gives a traceback without its name."""
    model, spec = load_model(base, Mesh(), CPU, torch.float32)
    shutil.copytree(adapter, tmp_path / "copy")
    file = tmp_path / "copy" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for words in ("copy.adapter_model.safetensors ", "must have adapter_model.safetensors"):
        with pytest.raises(ValueError, match=words):
            load_adapter(tmp_path / "copy", model, Mesh(), spec)
        file.unlink(missing_ok=True)
    gone = damage(adapter, tmp_path / "gone", {"base_model_name_or_path": "/no/such"}, {})
    with pytest.raises(ValueError, match="'/no/such'"):
        base_of(gone)


def run_script(name: str, *arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_train_merge_and_go_on(base, tmp_path, capsys):
    """Red when final/ is no adapter that the other scripts find the base of, when merging changes
    the function, or when training of an adapter does not start where it ended.
    """
    rows = [{"input_ids": list(range(start, start + 20))} for start in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--data", tmp_path / "rows.jsonl", "--batch-size", 4, "--micro-batch-size", 2]
    flags += ["--seq-len", 20, "--dtype", "fp32", "--lora-rank", 4, "--lora-dropout", 0.1]
    flags += ["--eval-data", tmp_path / "rows.jsonl", "--lr", 0.01, "--warmup-steps", 0]
    first, second = tmp_path / "first", tmp_path / "second"
    for model, out in ((base, first), (first / "final", second)):
        result = run_script("train.py", "--model", model, "--out", out, "--steps", 8, *flags)
        assert result.returncode == 0, result.stderr
    found = sorted(path.name for path in (second / "final").iterdir())
    assert found == ["adapter_config.json", "adapter_model.safetensors"]

    def eval_losses(out: Path) -> list[float]:
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        return [line["eval_loss"] for line in lines if "eval_loss" in line]

    before, ended, goes_on, at_last = eval_losses(first) + eval_losses(second)
    assert before > ended > at_last
    assert goes_on == pytest.approx(ended, rel=1e-6)

    import merge_lora as merge_script

    merge_script.main(merge_script.MergeConfig(second / "final", tmp_path / "merged"))
    assert "merged: rank 4, scale 4, into" in capsys.readouterr().out
    model, _ = load_model(tmp_path / "merged", Mesh(), CPU, torch.float32)
    with torch.no_grad():
        logits = model(IDS, torch.arange(9).expand(2, 9))
    same(logits, adapted_logits(base, second / "final"), 1e-4)  # the merged weights are rounded
    with pytest.raises(ValueError, match="must not replace its base"):
        merge_script.main(merge_script.MergeConfig(second / "final", base))

    for changes, words in [
        ((), "pass --lora-rank 4 --lora-alpha 16 --lora-targets "),
        (("lora_rank", 8), "pass --lora-rank 4"),
        (("lora_rank", 4, "lora_targets", ("q_proj",)), "pass --lora-rank 4 .* k_proj"),
        (("lora_rank", 4, "lora_dropout", 1.0), "--lora-dropout from 0 to below 1"),
    ]:
        settings = dict(zip(changes[::2], changes[1::2])) | {"out": tmp_path / "new"}
        with pytest.raises(ValueError, match=words):
            check_settings(train.TrainConfig(model=str(first / "final"), **settings), 1)


def test_random_weights_get_a_base_directory(tmp_path):
    """Red when the adapter of a preset's random weights points to no base, or to another."""
    flags = ["--steps", 1, "--batch-size", 1, "--micro-batch-size", 1, "--seq-len", 16]
    flags += ["--lora-rank", 2, "--lr", 0.1, "--warmup-steps", 0, "--dtype", "fp32"]
    (tmp_path / "some.txt").write_text("import os\nimport sys\n" * 50)
    flags += ["--data", tmp_path / "some.txt"]
    result = run_script("train.py", "--out", tmp_path / "run", *flags)
    assert result.returncode == 0, result.stderr
    final = tmp_path / "run" / "final"
    assert base_of(final) == (tmp_path / "run" / "base").resolve()
    text = run_script("sample.py", final, "--prompt", "import", "--max-new-tokens", 2)
    assert text.returncode == 0 and text.stdout.startswith("import"), text.stderr


SMOLLM2 = ROOT / "models" / "smollm2"
SENTENCE = "The quick brown fox jumps over the lazy dog and then sleeps in the warm sun all day."


def overfit(tp: int, steps: int) -> float:
    """Train SmolLM2's adapters on one sentence padded to 256 tokens; the loss of the last step."""
    from minitrain.corpus import Tokenizer

    mesh = init_mesh(1, tp) if tp > 1 else Mesh()
    model, spec = load_model(SMOLLM2, mesh, CPU, torch.bfloat16)
    add_lora(model, LoRAConfig(rank=8), mesh, spec)
    ids = Tokenizer.load(SMOLLM2).encode(SENTENCE)
    padded = torch.zeros(1, 256, dtype=torch.int64)
    padded[0, : len(ids)] = torch.tensor(ids)
    labels = torch.where(torch.arange(256) < len(ids), padded, -100)
    batch = shard_batch(SimpleNamespace(input_ids=padded, labels=labels), mesh)
    config = train.TrainConfig(lr=3e-3, warmup_steps=0, schedule="constant", weight_decay=0.0)
    optimizer = BF16Optimizer(model.named_parameters(), train.adamw(config, CPU))
    for _ in range(steps):
        metrics = train.train_step(model, optimizer, [batch], mesh, spec, config)
    return metrics["loss"].item()


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="needs models/smollm2: scripts/get_smollm2.py")
@pytest.mark.skipif(not os.environ.get("MINITRAIN_SLOW"), reason="a minute: set MINITRAIN_SLOW=1")
@pytest.mark.parametrize("tp", [1, 3])
def test_real_model_learns_one_sentence(tp):
    """Red when adapters of a real model do not learn, alone or with one kv head on each rank."""
    losses = [overfit(1, 25)] if tp == 1 else run_ranks(overfit, tp, tp, 25, timeout_s=600)
    assert max(losses) < 0.1
    assert len(set(losses)) == 1
