"""config.json <-> ModelConfig: which model families there are, and what each of their fields means.

A field that could change the model and is not understood is an error, never ignored. A new family
is one entry in FAMILIES, when CausalLM can compute it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from minitrain.model import ModelConfig


@dataclass(frozen=True)
class Family:
    """What a family adds to the fields that all have.

    architecture   the class name in config.json
    defaults       values of fields that config.json leaves out, where transformers' differ
    fields         further fields that are understood
    fixed          ModelConfig fields that the family's code decides, whatever config.json says
    harmless       fields that this family's code does not read
    """

    architecture: str
    defaults: dict[str, Any] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    fixed: dict[str, Any] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()


GRANITE_FIELDS = {  # config.json -> ModelConfig
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "logits_divisor",
}
WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
FAMILIES = {
    "llama": Family("LlamaForCausalLM", fields=("attention_bias", "mlp_bias")),
    "mistral": Family(
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        ("sliding_window", "layer_types"),
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"num_key_value_heads": 32, "max_position_embeddings": 32768},
        WINDOW,
        {"qkv_bias": True},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
        ("attention_bias", *WINDOW),
        {"qk_norm": True},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        ("attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval", *WINDOW),
        harmless=("pretraining_tp",),
    ),
    "granite": Family("GraniteForCausalLM", fields=("attention_bias", "mlp_bias", *GRANITE_FIELDS)),
}
SIZES = {  # config.json -> ModelConfig; every config.json must have them
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
COMMON = {
    *SIZES,
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act"),
    *("rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings", "model_type"),
}
# Fields that never change what a forward pass in training computes.
HARMLESS = {
    *("architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path"),
    *("use_cache", "initializer_range", "tokenizer_class", "is_llama_config", "return_dict"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
    *("transformers.js_config", "unsloth_fixed", "unsloth_version", "_commit_hash"),
    *("_attn_implementation_autoset", "id2label", "label2id"),
    *("temperature", "top_k", "top_p", "do_sample", "max_length", "num_beams"),  # of generation
    *("repetition_penalty", "length_penalty", "num_return_sequences", "typical_p"),
}
UNCHANGED = {"partial_rotary_factor": 1, "pretraining_tp": 1}  # values that change nothing
ROPE_KEYS = {"type", "rope_type", "rope_theta", "original_max_position_embeddings"}
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def parse_config(raw: dict, file: str) -> ModelConfig:
    """Translate the fields of a config.json, in the spelling of old or new transformers.

    file      named in errors

    Raises    ValueError for an unknown family, missing sizes, and fields that would change the
              model in a way CausalLM cannot compute
    """
    family = FAMILIES.get(raw.get("model_type"))
    if family is None or "auto_map" in raw:
        found = "code of its own (auto_map)" if family else f"{raw.get('model_type')!r}"
        raise ValueError(
            f"model_type must be one of {', '.join(FAMILIES)}, without code of its own, but {file} "
            f"has {found}. Convert the model to one of these, or extend minitrain/families.py."
        )
    architecture = (raw.get("architectures") or [family.architecture])[0]
    if architecture != family.architecture:
        raise ValueError(
            f"architectures must be {family.architecture} for model_type {raw['model_type']}, but "
            f"{file} has {architecture}. Only causal language models can be trained."
        )
    given = {key: value for key, value in raw.items() if value is not None}
    if missing := [name for name in SIZES if not isinstance(given.get(name), int)]:
        raise ValueError(
            f"a config must give whole numbers for {', '.join(SIZES)}, but {file} lacks "
            f"{', '.join(missing)}. Copy config.json again from where the model comes from."
        )
    _refuse_unknown(given, family, file)
    fields = {"max_position_embeddings": 2048} | family.defaults | raw  # an explicit null stays
    _refuse_window(fields, file)
    sizes = {ours: fields[theirs] for theirs, ours in SIZES.items()}
    bias = bool(fields.get("attention_bias", False))
    head_dim = fields.get("head_dim") or _default_head_dim(sizes, file)
    theta, scaling = _parse_rope(fields, file)
    multipliers = {}
    if set(GRANITE_FIELDS) <= set(family.fields):
        multipliers = {ours: float(fields.get(name, 1.0)) for name, ours in GRANITE_FIELDS.items()}
    settings = {
        "num_kv_heads": fields.get("num_key_value_heads") or sizes["num_heads"],
        "head_dim": head_dim,
        "max_position": fields["max_position_embeddings"],
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": fields.get("rms_norm_eps", 1e-6),
        "tie_embeddings": bool(fields.get("tie_word_embeddings", False)),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bool(fields.get("mlp_bias", False)),
        "rope_layers": _parse_rope_layers(fields, family, sizes["num_layers"], file),
    }
    return ModelConfig(**sizes | settings | multipliers | family.fixed)


def config_fields(config: ModelConfig, model_type: str | None = None) -> dict[str, Any]:
    """The fields of a config.json that describes this model, in the spelling all versions read.

    model_type   None: the first family that can express the model

    Raises       ValueError when no family can
    """
    for name in [model_type] if model_type else FAMILIES:
        fields = _fields_of(config, name)
        if _canonical(parse_config(fields, "config.json")) == _canonical(config):
            return fields
    raise ValueError(
        f"no model family of {', '.join([model_type] if model_type else FAMILIES)} can express "
        f"this model, so that transformers could not load it: {asdict(config)}. Change these."
    )


def _fields_of(config: ModelConfig, model_type: str) -> dict[str, Any]:
    family = FAMILIES[model_type]
    fields = {"architectures": [family.architecture], "model_type": model_type}
    fields |= {theirs: getattr(config, ours) for theirs, ours in SIZES.items()}
    scaling = config.rope_scaling and dict(config.rope_scaling)
    if scaling:
        scaling["rope_type"] = scaling.pop("type")
        if "original_max_position" in scaling:
            original = scaling.pop("original_max_position")
            scaling["original_max_position_embeddings"] = original
    fields |= {
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
    }
    full = _canonical(config)
    optional = {
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "no_rope_layers": [int(use) for use in full.rope_layers],
        "use_sliding_window": False,
        "sliding_window": None,
        **{name: getattr(full, ours) for name, ours in GRANITE_FIELDS.items()},
    }
    return fields | {key: value for key, value in optional.items() if key in family.fields}


def _refuse_unknown(given: dict, family: Family, file: str) -> None:
    known = COMMON | HARMLESS | set(family.fields) | set(family.harmless)
    for name, value in given.items():
        harmless = name in known or value in (False, [], {}, "") or UNCHANGED.get(name) == value
        if not harmless:
            raise ValueError(
                f"every field of a config that can change the model must be understood, but {file} "
                f"has {name} = {value!r:.100}. If the model does not depend on it, remove it from "
                "the file; otherwise this model cannot be trained here."
            )
    if given.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(
            f"hidden_act must be silu, but {file} has {given['hidden_act']}. This model cannot be "
            "trained here: minitrain/model.py has no other activation."
        )


def _refuse_window(fields: dict, file: str) -> None:
    """Attention in a sliding window is full attention only when no sequence is longer."""
    window, longest = fields.get("sliding_window"), fields["max_position_embeddings"]
    sliding = fields.get("use_sliding_window", fields["model_type"] == "mistral")
    if sliding and window is not None and window < longest:
        raise ValueError(
            f"attention must see the whole sequence, but {file} has sliding_window = {window} and "
            f"max_position_embeddings = {longest}. If no row is longer than {window} tokens, both "
            "are the same: set sliding_window to null in the file."
        )
    odd = sorted({kind for kind in fields.get("layer_types") or [] if kind != "full_attention"})
    if odd and not (sliding and window is not None):
        raise ValueError(
            f"layer_types must all be full_attention, but {file} has {', '.join(map(str, odd))}. "
            "This model cannot be trained here."
        )


def _parse_rope(fields: dict, file: str) -> tuple[float, dict | None]:
    """The base and the scaling of the rotary embedding, from either spelling."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(
            f"the rope type must be one of {', '.join(ROPE_TYPES)}, but {file} has {kind!r}. This "
            "model cannot be trained here as it is; without scaling it can, if rows are short."
        )
    unknown = set(rope) - ROPE_KEYS - set(ROPE_TYPES[kind])
    unknown -= {key for key in unknown if UNCHANGED.get(key) == rope[key]}
    needed = [*ROPE_TYPES[kind], *(["original_max_position_embeddings"] * (kind == "llama3"))]
    missing = [key for key in needed if rope.get(key) is None]
    if unknown or missing:
        raise ValueError(
            f"rope type {kind} takes exactly {', '.join(needed) or 'nothing'}, but in {file} "
            f"{', '.join(missing) or 'nothing'} is missing and {', '.join(unknown) or 'nothing'} "
            "unknown. Correct rope_scaling (or rope_parameters)."
        )
    theta = float(rope.get("rope_theta") or fields.get("rope_theta") or 10000.0)
    if kind == "default":
        return theta, None
    scaling = {"type": kind} | {key: float(rope[key]) for key in ROPE_TYPES[kind]}
    if kind == "llama3":
        scaling["original_max_position"] = rope["original_max_position_embeddings"]
    return theta, scaling


def _parse_rope_layers(fields: dict, family: Family, num_layers: int, file: str) -> tuple | None:
    if "no_rope_layers" not in family.fields:
        return None
    layers = fields.get("no_rope_layers")  # in spite of the name, 1 is a layer with rope
    if layers is None:
        interval = fields.get("no_rope_layer_interval") or 4
        layers = [(layer + 1) % interval for layer in range(num_layers)]
    if len(layers) < num_layers:
        raise ValueError(
            f"no_rope_layers must have an entry for each layer, but {file} has {len(layers)} for "
            f"{num_layers} layers. Correct one of them."
        )
    layers = tuple(bool(use) for use in layers[:num_layers])
    return None if all(layers) else layers


def _default_head_dim(sizes: dict, file: str) -> int:
    hidden, heads = sizes["hidden_size"], sizes["num_heads"]
    if hidden % heads:
        raise ValueError(
            f"hidden_size must be a multiple of num_attention_heads where head_dim is not given, "
            f"but {file} has {hidden} and {heads}. Add head_dim."
        )
    return hidden // heads


def _canonical(config: ModelConfig) -> ModelConfig:
    """The same model with defaults written out, for comparing."""
    layers = config.rope_layers or (True,) * config.num_layers
    scale = config.attention_scale or config.head_dim**-0.5
    return replace(config, attention_scale=scale, rope_layers=tuple(layers))
