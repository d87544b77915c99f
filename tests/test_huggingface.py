"""Model directories of every family: transformers' logits on every layout, and back again."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from conftest import CPU, close, lively_weights, tiny_config, tiny_model
from safetensors.torch import load_file

from minitrain.collectives import all_gather
from minitrain.huggingface import (
    load_model,
    read_config,
    save_model,
)
from minitrain.launch import run_ranks
from minitrain.mesh import init_mesh

VOCAB = 61  # no multiple of 2 or 4, so that tp pads it
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
MULTIPLIERS = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
MODELS = {  # name -> model_type, what differs from SIZES
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "linear": ("llama", {"rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}),
    "granite": ("granite", {**MULTIPLIERS, "tie_word_embeddings": True}),
}
TYPES = {"fp32": torch.float32, "fp64": torch.float64}
IDS = torch.randint(0, VOCAB, (2, 50), generator=torch.Generator().manual_seed(3))


def make_model(name: str):
    """A random transformers model in which norms, biases and every matrix matter."""
    model_type, changes = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **SIZES | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    for key, param in model.named_parameters():
        drawn = torch.randn(param.shape, generator=generator)
        param.data = 1 + 0.2 * drawn if "norm" in key else 0.2 * drawn
    return model.eval()


def frequencies(config) -> torch.Tensor:
    """Rotary frequencies by the papers' formulas, in float64."""
    rope, dim, found = config.rope_parameters, getattr(config, "head_dim", None) or 8, []
    for pair in range(dim // 2):
        f = rope["rope_theta"] ** (-2 * pair / dim)
        if rope["rope_type"] == "linear":
            f /= rope["factor"]
        elif rope["rope_type"] == "llama3":
            original, wave = rope["original_max_position_embeddings"], 2 * math.pi / f
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            smooth = min(max((original / wave - low) / (high - low), 0), 1)
            f = smooth * f + (1 - smooth) * f / rope["factor"]
        found.append(f)
    return torch.tensor(found, dtype=torch.float64)


def exact_logits(model) -> torch.Tensor:
    """transformers' logits in float64, with its float32 norms and rotary tables replaced."""
    model, inverse = model.double(), frequencies(model.config)

    def tables(x, position_ids):
        angle = position_ids[..., None].double() * inverse
        return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()

    model.model.rotary_emb.forward = tables
    for m in model.modules():
        if type(m).__name__.endswith("RMSNorm"):
            m.forward = lambda x, m=m: (
                m.weight * x * (x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon).rsqrt()
            )
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A directory of every family as transformers saves it, and its logits."""
    found = {}
    for name in MODELS:
        path, model = tmp_path_factory.mktemp("models") / name, make_model(name)
        model.save_pretrained(path)
        with torch.no_grad():
            logits = {"fp32": model(IDS).logits}
        found[name] = path, logits | {"fp64": exact_logits(model)}
    return found


def run_models(paths: dict, out: Path, tp: int) -> dict:
    """On one rank: the logits of each directory in each dtype; saves the float32 ones again."""
    mesh, positions, logits = init_mesh(tp=tp), torch.arange(IDS.shape[1]).expand_as(IDS), {}
    for name, path in paths.items():
        for dtype_name, dtype in TYPES.items():
            model, spec = load_model(path, mesh, CPU, dtype)
            with torch.no_grad():
                part = model(IDS, positions)
            logits[name, dtype_name] = all_gather(part, mesh.tp, -1)[..., :VOCAB]
            if dtype_name == "fp32":
                limit = 20_000 if tp == 4 else 10**9
                options = {"dtype": dtype, "source_dir": path, "max_shard_bytes": limit}
                save_model(out / name, model, model.config, spec, mesh, **options)
    return logits


@pytest.fixture(scope="module", params=[1, 2, 4])
def layout(request, directories, tmp_path_factory):
    tp = request.param
    paths = {name: path for name, (path, _) in directories.items()}
    out = tmp_path_factory.mktemp(f"saved-tp{tp}")
    if tp == 1:
        return out, [run_models(paths, out, 1)]
    return out, run_ranks(run_models, tp, paths, out, tp)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_logits_are_transformers(layout, directories, name):
    """A multiplier, bias, norm, rope variant or head split differs from transformers'."""
    for logits in layout[1]:
        close(logits[name, "fp32"], directories[name][1]["fp32"], 1e-5)
        close(logits[name, "fp64"], directories[name][1]["fp64"], 1e-9)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_saved_directories_load_in_transformers(layout, directories, name):
    """Saving loses a tensor, writes a tied one twice, keeps padding, or doubles kv heads."""
    path = layout[0] / name
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        close(model(IDS).logits, directories[name][1]["fp32"], 1e-6)
    saved, original = ({}, load_file(directories[name][0] / "model.safetensors"))
    for file in path.glob("*.safetensors"):
        saved |= load_file(file)
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[key], original[key]) for key in saved)
    assert read_config(path) == read_config(directories[name][0])
    if len(list(path.glob("*.safetensors"))) > 1:
        assert all(file.stat().st_size < 25_000 for file in path.glob("model-*.safetensors"))
        index = json.loads((path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 4 * sum(t.numel() for t in saved.values())


def save_padded(out: Path) -> tuple:
    mesh = init_mesh(tp=2)
    config = tiny_config(vocab_size=11, tie_embeddings=True)
    model, spec = tiny_model(config, lively_weights(config), mesh)
    if mesh.tp.rank == 1:
        with torch.no_grad():
            model.lm_head.weight[-1] = 5.0  # the row of padding
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    save_model(out, model, config, spec, mesh, dtype=torch.float32)
    return tied, model.lm_head.weight.shape[0]


def test_padding_of_the_vocabulary_is_not_exported(tmp_path):
    """CASES 10, 24, 36: the pad row reaches the file, or a tied head is untied or saved twice."""
    assert run_ranks(save_padded, 2, tmp_path / "out") == [(True, 6)] * 2
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved["model.embed_tokens.weight"].shape == (11, 32) and "lm_head.weight" not in saved
    config = tiny_config(vocab_size=11, tie_embeddings=True)
    want = lively_weights(config)["model.embed_tokens.weight"]
    assert torch.equal(saved["model.embed_tokens.weight"], want.float())
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info.values()), info
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
