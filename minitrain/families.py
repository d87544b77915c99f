"""config.json <-> ModelConfig: which model families there are, and what each of their fields means.

A field that could change the model and is not understood is an error, never ignored. A new family
is one entry in FAMILIES, when CausalLM can compute it.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, NamedTuple

from minitrain.model import ModelConfig

FIELDS = {  # config.json -> ModelConfig, where the value means the same
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "attention_bias": "o_bias",  # and qkv_bias
    "mlp_bias": "mlp_bias",
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "logits_divisor",
}
SIZES = list(FIELDS)[:5]
HARMLESS = {  # fields that never change what a forward pass in training computes
    *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
    *("use_cache", "initializer_range", "tokenizer_class", "is_llama_config", "_name_or_path"),
    *("transformers.js_config", "unsloth_fixed", "unsloth_version", "id2label", "label2id"),
    *("_attn_implementation_autoset", "_commit_hash", "return_dict"),
}
# Values, beside false, 0 and empty ones, with which other fields change nothing.
NEUTRAL = {"partial_rotary_factor": (1,), "pretraining_tp": (1,), "hidden_act": ("silu", "swish")}
LLAMA3 = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
ROPE_TYPES = {"default": [], "linear": ["factor"], "llama3": LLAMA3}
ROPE_NAMES = {"rope_type": "type", "original_max_position_embeddings": "original_max_position"}


class Family(NamedTuple):
    """What a family adds to the fields that all have."""

    architecture: str  # the class in transformers
    fields: set[str]  # further ones that are understood, or that the class does not read
    defaults: dict[str, Any]  # transformers', of fields that config.json leaves out
    fixed: dict[str, Any]  # ModelConfig's, whatever config.json says


COMMON = {*list(FIELDS)[:10], "rope_theta", "rope_scaling", "rope_parameters"}
BIASES = {"attention_bias", "mlp_bias"}
WINDOW = {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
SMOLLM3_FIELDS = BIASES | WINDOW | {"no_rope_layers", "no_rope_layer_interval", "pretraining_tp"}
PLAIN = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
GRANITE = PLAIN | {"attention_multiplier": 1.0}
MISTRAL = PLAIN | {"num_key_value_heads": 8, "max_position_embeddings": 131072}
MISTRAL |= {"use_sliding_window": True, "sliding_window": 4096}
QWEN = PLAIN | {"num_key_value_heads": 32, "max_position_embeddings": 32768}
QWEN3 = QWEN | {"head_dim": 128}
SMOLLM3 = QWEN | {"num_key_value_heads": 4, "tie_word_embeddings": True}
SMOLLM3 |= {"rope_theta": 2e6, "no_rope_layer_interval": 4}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", BIASES, PLAIN, {}),
    "mistral": Family("MistralForCausalLM", {"sliding_window", "layer_types"}, MISTRAL, {}),
    "qwen2": Family("Qwen2ForCausalLM", WINDOW, QWEN, {"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", WINDOW | {"attention_bias"}, QWEN3, {"qk_norm": True}),
    "smollm3": Family("SmolLM3ForCausalLM", SMOLLM3_FIELDS, SMOLLM3, {}),
    "granite": Family("GraniteForCausalLM", {*list(FIELDS)[10:]}, GRANITE, {}),
}


def parse_config(raw: dict, file: str) -> ModelConfig:
    """Translate the fields of a config.json, in the spelling of old or new transformers.

    file      named in errors

    Raises    ValueError for another family, and for missing or further fields of the model
    """
    family = FAMILIES.get(raw.get("model_type"))
    code = raw.get("auto_map") or raw.get("architectures") or None
    if family is None or code not in (None, [family.architecture]):
        raise ValueError(
            f"a model must be a causal language model of {', '.join(FAMILIES)}, without own code, "
            f"but {file} has model_type {raw.get('model_type')!r} and {code}. Convert it to one of "
            "these, or extend minitrain/families.py."
        )
    understood = COMMON | family.fields
    for name, value in raw.items():
        neutral = value in (None, False, [], {}, "") or value in NEUTRAL.get(name, ())
        if not neutral and name not in understood | HARMLESS:
            raise ValueError(
                f"every field of a config that can change the model must be understood, but {file} "
                f"has {name} = {value!r:.100}. If the model does not depend on it, remove it from "
                "the file; otherwise this model cannot be trained here."
            )
    fields = family.defaults | {name: raw[name] for name in raw if name in understood}
    config = {FIELDS[n]: v for n, v in fields.items() if n in FIELDS and v is not None}
    sizes = {name: fields.get(name) for name in SIZES}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    whole = all(isinstance(size, int) for size in sizes.values())
    if not whole or ("head_dim" not in config and hidden % heads):
        raise ValueError(
            "a config must give whole numbers for its sizes, and head_dim unless hidden_size is a "
            f"multiple of num_attention_heads, but {file} has {sizes}. Copy it again from where "
            "the model comes from."
        )
    _refuse_window(fields, file)
    config = {"num_kv_heads": heads, "head_dim": hidden // heads} | config
    config["qkv_bias"] = config.get("o_bias", False)
    config["rope_layers"] = _rope_layers(fields, config["num_layers"], file)
    config["rope_theta"], config["rope_scaling"] = _rope(fields, file)
    return ModelConfig(**config | family.fixed)


def config_fields(config: ModelConfig, model_type: str | None = None) -> dict[str, Any]:
    """The fields of a config.json that describes this model, in the spelling all versions read.

    model_type   None: the first family that can express the model

    Raises       ValueError when no family can
    """
    full = _canonical(config)
    values = {theirs: getattr(full, ours) for theirs, ours in FIELDS.items()}
    values |= {"rope_theta": config.rope_theta, "rope_scaling": None, "sliding_window": None}
    if config.rope_scaling:
        names = {ours: theirs for theirs, ours in ROPE_NAMES.items()}
        values["rope_scaling"] = {names.get(k, k): v for k, v in config.rope_scaling.items()}
    values["no_rope_layers"] = [int(use) for use in full.rope_layers]
    families = [model_type] if model_type else list(FAMILIES)
    for name in families:
        family = FAMILIES[name]
        fields = {"architectures": [family.architecture], "model_type": name, "hidden_act": "silu"}
        fields |= {key: v for key, v in values.items() if key in COMMON | family.fields}
        if _canonical(parse_config(fields, "config.json")) == full:
            return fields
    raise ValueError(
        f"no model family of {', '.join(families)} can express this model, so that transformers "
        f"could not load it: {asdict(config)}. Change these."
    )


def _canonical(config: ModelConfig) -> ModelConfig:
    """The same model with defaults written out, for comparing."""
    layers = config.rope_layers or (True,) * config.num_layers
    scale = config.attention_scale or config.head_dim**-0.5
    return replace(config, attention_scale=scale, rope_layers=tuple(layers))


def _refuse_window(fields: dict, file: str) -> None:
    """Attention in a sliding window is full attention only when no sequence is longer."""
    window, longest = fields.get("sliding_window"), fields["max_position_embeddings"]
    window = window if fields.get("use_sliding_window") else None
    kinds = {*(fields.get("layer_types") or []), "full_attention"}
    if len(kinds) > 1 if window is None else window < longest:
        raise ValueError(
            f"attention must see the whole sequence, but {file} has layers of {sorted(kinds)}, "
            f"sliding_window = {window} and max_position_embeddings = {longest}. If no row is "
            "longer than the window, set sliding_window to null in the file."
        )


def _rope(fields: dict, file: str) -> tuple[float, dict | None]:
    """The base and the scaling of the rotary embedding, from either spelling."""
    rope = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or fields.get("rope_theta") or 10000.0
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope = {key: value for key, value in rope.items() if value not in NEUTRAL.get(key, ())}
    if kind not in ROPE_TYPES or set(rope) != set(ROPE_TYPES[kind]):
        raise ValueError(
            f"rope scaling must be one of {ROPE_TYPES}, but {file} has {kind!r} with {rope}. "
            "Correct it, or leave it out if no row is longer than the original context."
        )
    scaling = {ROPE_NAMES.get(key, key): value for key, value in rope.items()}
    return float(theta), {"type": kind} | scaling if rope else None


def _rope_layers(fields: dict, num_layers: int, file: str) -> tuple[bool, ...] | None:
    layers = fields.get("no_rope_layers")  # in spite of the name, 1 is a layer with rope
    if layers is None:
        interval = fields.get("no_rope_layer_interval")
        layers = [(layer + 1) % interval if interval else 1 for layer in range(num_layers)]
    if len(layers) < num_layers:
        raise ValueError(
            f"no_rope_layers must have an entry for each layer, but {file} has {len(layers)} for "
            f"{num_layers} layers. Correct one of them."
        )
    return None if all(layers[:num_layers]) else tuple(map(bool, layers[:num_layers]))
