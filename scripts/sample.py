"""Continue a prompt with a model from a Hugging Face directory.

python scripts/sample.py runs/default/final --prompt "import os"
python scripts/sample.py DIR --adapter runs/lora/final --prompt "What is RoPE?"
python scripts/sample.py DIR --prompt "What is RoPE?" --chat --temperature 0.7 --top-p 0.9
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro

from minitrain.adapter_files import base_of, is_adapter, load_adapter
from minitrain.chat import ChatTemplate
from minitrain.corpus import Tokenizer
from minitrain.device import pick_device
from minitrain.generate import check_sampling, stream_text, stream_tokens
from minitrain.huggingface import load_model
from minitrain.mesh import Mesh

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class SampleConfig:
    """Continue a prompt with a model from a Hugging Face directory; the text comes on stdout."""

    directory: tyro.conf.Positional[Path]
    """Directory with config.json, safetensors and tokenizer.json, such as a run's final/; or that
    of an adapter, which names its base.
    """
    prompt: str
    """Text to continue, or with --chat the user's message. "-" reads it from stdin."""
    adapter: Path | None = None
    """Directory of a LoRA adapter for the model in directory."""
    chat: bool = False
    """Put the prompt through the directory's chat template and print only the answer."""
    max_new_tokens: int = 128
    """Tokens to make at most; the text ends earlier where the model ends it (eos). At least 1."""
    temperature: float = 0.0
    """0: always the likeliest token. Above 0: draw; below 1 more of the likely, above 1 less."""
    top_p: float = 1.0
    """Draw from the fewest tokens whose probabilities add up to this; above 0, at most 1. Has no
    effect at temperature 0.
    """
    seed: int = 0
    """Fixes the draws: the same seed gives the same text. Has no effect at temperature 0."""
    dtype: Literal["bf16", "fp32", "fp64"] = "fp32"
    """Of weights and activations; bf16 takes half of fp32's memory."""
    device: str = "auto"
    """Where to compute: auto (an accelerator when there is one), or a kind of device such as cpu.
    """


def stop_ids(directory: Path, tokenizer: Tokenizer) -> list[int]:
    """The tokens that end a text: the tokenizer's eos and those of config.json and
    generation_config.json (chat models often have several).
    """
    stop = {tokenizer.eos_id}
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        eos = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        stop.update(eos if isinstance(eos, list) else [eos])
    return sorted(stop - {None})


def prompt_ids(config: SampleConfig, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The prompt as tokens; plain text starts as the tokenizer's file says (Llama's: bos)."""
    if config.chat:
        template = ChatTemplate.load(config.directory, tokenizer)
        return template.prompt([{"role": "user", "content": prompt}])
    tokenizer.backend.no_truncation()
    tokenizer.backend.no_padding()
    return tokenizer.backend.encode(prompt).ids


def main(config: SampleConfig) -> None:
    """Load, encode, and print the text as it comes."""
    if is_adapter(config.directory):
        base = base_of(config.directory)
        config = replace(config, directory=base, adapter=config.adapter or config.directory)
    prompt = sys.stdin.read() if config.prompt == "-" else config.prompt
    tokenizer = Tokenizer.load(config.directory)
    ids = prompt_ids(config, tokenizer, prompt)
    check_sampling(ids, config.max_new_tokens, config.temperature, config.top_p)
    device = pick_device(config.device)
    model, spec = load_model(config.directory, Mesh(), device.torch_device, DTYPES[config.dtype])
    if config.adapter:
        load_adapter(config.adapter, model, Mesh(), spec)
    length, limit = len(ids) + config.max_new_tokens, model.config.max_position
    if length > limit:
        print(
            f"note: the prompt's {len(ids)} and {config.max_new_tokens} new tokens are {length}, "
            f"more than the {limit} positions the model was made for. Text beyond may be poor.",
            file=sys.stderr,
        )
    new_ids = stream_tokens(
        model,
        ids,
        config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
        eos_id=stop_ids(config.directory, tokenizer),
    )
    if not config.chat:
        print(prompt, end="", flush=True)
    for text in stream_text(tokenizer.decode, ids, new_ids):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    try:
        main(tyro.cli(SampleConfig))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
