"""Model directories: transformers' logits on every layout, what is saved, and every bad file."""

import json
import math
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from minitrain import huggingface
from minitrain.collectives import all_gather
from minitrain.huggingface import (
    has_weights,
    inspect_model,
    load_model,
    read_config,
    resolve_model,
    save_model,
)
from minitrain.launch import run_ranks
from minitrain.mesh import Mesh, init_mesh
from minitrain.tensor_files import plan_files
from tests.conftest import CPU, close, lively_weights, tiny_config, tiny_model

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


@pytest.fixture
def plain(tmp_path):
    """A small untied model's directory, to be damaged."""
    config = tiny_config()
    model, spec = tiny_model(config, lively_weights(config), dtype=torch.float32)
    tokenizer = SimpleNamespace(
        save=lambda directory: (directory / "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": {"a": 0, "b": 63}}, "added_tokens": []})
        )
    )
    options = {"dtype": torch.float32, "tokenizer": tokenizer, "max_shard_bytes": 30_000}
    save_model(tmp_path / "plain", model, config, spec, Mesh(), **options)
    return tmp_path / "plain"


def edit(file: Path, change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def edit_tensors(directory: Path, change) -> None:
    """Join the files into one, with other tensors."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (directory / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def rename_all(tensors):
    for name in list(tensors):
        tensors[f"base.{name}"] = tensors.pop(name)


INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00004.safetensors"
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
DAMAGES = {
    "config missing": (
        lambda d: (d / "config.json").unlink(),
        "must have config.json, but .*plain",
    ),
    "config no JSON": (lambda d: (d / "config.json").write_text("{"), "config.json must be JSON"),
    "tensor missing": (
        lambda d: edit_tensors(d, lambda t: t.pop(NORM)),
        "21 tensors, but of them model.norm.weight is missing in .*plain, and no tensor is there",
    ),
    "head missing": (
        lambda d: edit_tensors(d, lambda t: t.pop("lm_head.weight")),
        "lm_head.weight is missing.*set tie_word_embeddings to true",
    ),
    "tensor extra": (
        lambda d: edit_tensors(d, lambda t: t.update({"score.weight": torch.ones(2)})),
        "score.weight is there but not of this model",
    ),
    "other names": (
        lambda d: edit_tensors(d, rename_all),
        r"21 tensors \(.*, \.\.\.\) are missing",
    ),
    "shape": (
        lambda d: edit_tensors(d, lambda t: t.update({NORM: torch.ones(31)})),
        r"model.norm.weight must have shape \[32\] .* it has \[31\]",
    ),
    "quantised": (
        lambda d: edit_tensors(d, lambda t: t.update({NORM: torch.ones(32, dtype=torch.int8)})),
        "model.norm.weight in .*model.safetensors is I8",
    ),
    "two heads": (
        lambda d: edit(d / "config.json", lambda c: c.update(tie_word_embeddings=True)),
        "in a tied model lm_head.weight must equal .*tie_word_embeddings to false",
    ),
    "truncated": (
        lambda d: (d / FIRST).write_bytes((d / FIRST).read_bytes()[:-5]),
        f"{FIRST} is cut off: .* ends at byte .*but the file has",
    ),
    "header cut": (
        lambda d: (d / FIRST).write_bytes((d / FIRST).read_bytes()[:50]),
        f"{FIRST} must be a safetensors file.* 50 bytes",
    ),
    "not safetensors": (lambda d: (d / FIRST).write_bytes(b"<html>no</html>"), "header cannot be"),
    "file missing": (lambda d: (d / FIRST).unlink(), f"{INDEX} names the file {FIRST}, but"),
    "file outside": (
        lambda d: edit(d / INDEX, lambda i: i["weight_map"].update({NORM: "../x.safetensors"})),
        "must name .safetensors files beside it, but names '../x.safetensors'",
    ),
    "index broken": (lambda d: (d / INDEX).write_text("[]"), f"{INDEX} must be a JSON object"),
    "no weight map": (lambda d: (d / INDEX).write_text("{}"), f"{INDEX} must have a weight_map"),
    "no weights": (
        lambda d: [file.unlink() for file in d.glob("model*")],
        "weights must be in model.safetensors or .*has neither",
    ),
    "pickled": (
        lambda d: [shutil.move(file, d / "pytorch_model.bin") for file in d.glob("model*")],
        "has only pytorch_model.bin, a pickle, which can run any code",
    ),
    "tokenizer": (
        lambda d: edit(d / "tokenizer.json", lambda t: t["model"]["vocab"].update(c=64)),
        "tokenizer.json has 64, vocab_size is 64",
    ),
    "added token": (
        lambda d: edit(d / "tokenizer.json", lambda t: t["added_tokens"].append({"id": 70})),
        "tokenizer.json has 70, vocab_size is 64",
    ),
    "no tokenizer": (
        lambda d: (d / "tokenizer.json").write_text("{}"),
        "tokenizer.json must be a tokenizer",
    ),
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_damaged_directories_are_named_errors(plain, monkeypatch, damage):
    """A wrong file is loaded, or the error comes after memory was made, or names nothing."""
    inspect_model(plain)
    monkeypatch.setattr(huggingface, "fill_weights", lambda *a: pytest.fail("memory was made"))
    change, words = DAMAGES[damage]
    change(plain)
    with pytest.raises(ValueError, match=words):
        load_model(plain, Mesh(), CPU, torch.float32)


def test_harmless_extras_are_tolerated(plain):
    """An old rotary table, or a second copy of a tied head, keeps a good model from loading."""

    def change(tensors):
        tensors["lm_head.weight"] = tensors[EMBEDDING].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    edit_tensors(plain, change)
    edit(plain / "config.json", lambda c: c.update(tie_word_embeddings=True))
    model, _ = load_model(plain, Mesh(), CPU, torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_layout_is_checked_before_reading(plain):
    """A layout that cannot split the model ends in a hang or a torch error."""
    mesh = Mesh(tp=SimpleNamespace(size=3, rank=0))
    with pytest.raises(ValueError, match=r"query heads must be a multiple of sp \* tp: 4 heads"):
        load_model(plain, mesh, CPU, torch.float32)


def test_random_weights_come_from_a_config():
    """A preset, or a directory without weights, cannot be trained from scratch."""
    one, _ = load_model(tiny_config(), Mesh(), CPU, torch.float32, seed=1)
    two, _ = load_model(tiny_config(), Mesh(), CPU, torch.float32, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))


def test_names_are_directories_or_hub_ids(tmp_path, monkeypatch):
    """A name that is no directory ends in a traceback instead of how to get the model."""
    assert resolve_model(str(tmp_path)) == tmp_path and not has_weights(tmp_path)
    with pytest.raises(
        ValueError, match=r"there is no directory ./nowhere/at/all\. Check the path"
    ):
        resolve_model("./nowhere/at/all")
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install huggingface_hub.*hf download a/b"):
        resolve_model("a/b")

    def refuse(name, allow_patterns):
        raise OSError("404 Not Found\nmore")

    hub = SimpleNamespace(snapshot_download=refuse)
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", hub)
    with pytest.raises(ValueError, match=r"the hub says: 404 Not Found Run `hf download a/b"):
        resolve_model("a/b")
    hub.snapshot_download = lambda name, allow_patterns: tmp_path / name
    assert resolve_model("a/b") == tmp_path / "a/b"


def load_and_save(source: Path, out: Path, **options):
    model, spec = load_model(source, Mesh(), CPU, torch.float32)
    options = {"dtype": torch.bfloat16, "source_dir": source} | options
    save_model(out, model, options.pop("config", model.config), spec, Mesh(), **options)


def test_the_rest_of_a_directory_is_carried_over(plain, tmp_path):
    """Tokenizer or generation settings change or vanish, or config.json loses a field."""
    (plain / "generation_config.json").write_text('{"temperature": 0.6}  ')
    (plain / "chat_template.jinja").write_text("{{ messages }}")
    (plain / "README.md").write_text("no model file")
    edit(plain / "config.json", lambda c: c.update(unsloth_version="1", eos_token_id=[1, 2]))
    load_and_save(plain, tmp_path / "deep" / "out")
    for name in ("generation_config.json", "chat_template.jinja", "tokenizer.json"):
        assert (tmp_path / "deep/out" / name).read_bytes() == (plain / name).read_bytes()
    assert not (tmp_path / "deep/out/README.md").exists()
    old, new = (json.loads((d / "config.json").read_text()) for d in (plain, tmp_path / "deep/out"))
    assert new == old | {"torch_dtype": "bfloat16"}
    saved = load_file(tmp_path / "deep/out/model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in saved.values())


def test_what_changed_is_written_into_the_old_config(plain, tmp_path):
    """An untied or rescaled model is saved with the config.json of the one it was made from."""
    edit(plain / "config.json", lambda c: c.update(rope_parameters={"rope_theta": 3e4}))
    config = replace(read_config(plain), max_position=4096, rope_theta=7e4)
    load_and_save(plain, tmp_path / "out", config=config)
    assert read_config(tmp_path / "out") == config


def test_an_older_directory_is_replaced_whole(plain, tmp_path):
    """Files of an older save stay beside the new ones, or somebody's own files are deleted."""
    out = tmp_path / "out"
    (tmp_path / ".out.part").mkdir()  # left by a save that was killed
    load_and_save(plain, out, max_shard_bytes=30_000)
    load_and_save(plain, out)
    assert sorted(f.name for f in out.iterdir()) == [
        *("config.json", "model.safetensors", "tokenizer.json")
    ]
    assert sorted(f.name for f in tmp_path.iterdir()) == ["out", "plain"]
    (out / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match=r"out could not be written: it exists and holds notes.txt"):
        load_and_save(plain, out)
    assert (out / "notes.txt").exists() and inspect_model(out)


def fail_on_rank_0(source: Path, out: Path, kind: str) -> str:
    import resource
    import signal

    mesh = init_mesh(tp=2)
    model, spec = load_model(source, mesh, CPU, torch.float32)
    if kind == "full":
        huggingface.shutil.disk_usage = lambda path: SimpleNamespace(free=1000)
    elif mesh.rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        save_model(out, model, model.config, spec, mesh, dtype=torch.float32)
    except OSError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", ["full", "fills up"])
def test_a_full_disk_ends_every_rank(plain, tmp_path, kind):
    """Rank 0 fails alone and the others hang, or half a directory stays behind."""
    messages = run_ranks(fail_on_rank_0, 4, plain, tmp_path / "out", kind)
    tensors = [t for file in plain.glob("*.safetensors") for t in load_file(file).values()]
    size = 4 * sum(tensor.numel() for tensor in tensors)
    words = f"needs {size:,} bytes, and 1,000 are free" if kind == "full" else "File too large"
    assert words in messages[0] and "Nothing was left behind" in messages[0]
    assert all("rank 0's message says why" in message for message in messages[1:])
    assert [file.name for file in tmp_path.iterdir()] == ["plain"]


def test_models_with_adapters_are_not_saved_silently(plain, tmp_path):
    """A model whose weights are elsewhere (adapters) is saved without them."""
    model, spec = load_model(plain, Mesh(), CPU, torch.float32)
    state = dict(model.named_parameters())
    state.pop(NORM)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is not there\. Merge adapters"):
        save_model(tmp_path / "o", state, model.config, spec, Mesh(), dtype=torch.float32)


def test_files_are_filled_up_to_the_limit():
    """A tensor larger than the limit is lost or splits a file, or names are not transformers'."""
    shapes = {"a": (10,), "b": (10,), "c": (100,), "d": (1,)}
    files = plan_files(shapes, torch.float32, 80)
    assert [list(group) for group in files.values()] == [["a", "b"], ["c"], ["d"]]
    assert list(files)[1] == "model-00002-of-00003.safetensors"
    assert list(plan_files(shapes, torch.float32, 484)) == ["model.safetensors"]


def test_a_huge_header_length_is_no_memory_error(tmp_path):
    """A file whose first bytes claim a header of exabytes makes the loader ask for them."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**63 - 1) + b"{}")
    with pytest.raises(ValueError, match="header cannot be read; it has 10 bytes"):
        inspect_model(tmp_path)
