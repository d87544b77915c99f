"""config.json <-> ModelConfig: what each field means, in both spellings, and what is refused."""

from dataclasses import replace

import pytest
import transformers
from conftest import tiny_config

from minitrain.families import FAMILIES, config_fields, parse_config

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# What ModelConfig calls transformers' attributes, for comparing defaults.
ATTRIBUTES = {
    "num_kv_heads": "num_key_value_heads",
    "max_position": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}


def parse(model_type="llama", **fields):
    return parse_config({"model_type": model_type} | SIZES | fields, "dir/config.json")


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_missing_fields_have_transformers_defaults(model_type):
    """A field left out of config.json gets another value here than in transformers."""
    extra = {"sliding_window": None} if model_type == "mistral" else {}
    ours = parse(model_type, **extra)
    theirs = transformers.AutoConfig.for_model(model_type, **SIZES)
    for name, attribute in ATTRIBUTES.items():
        assert getattr(ours, name) == getattr(theirs, attribute), name
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
    if model_type == "granite":
        assert ours.attention_scale == theirs.attention_multiplier
    if model_type == "smollm3":
        assert ours.rope_layers == tuple(map(bool, theirs.no_rope_layers))


def test_both_spellings_are_one_model():
    """The old spelling (rope_theta, rope_scaling, torch_dtype) or the new one is not read."""
    old = parse(rope_theta=5e5, rope_scaling=LLAMA3, torch_dtype="bfloat16")
    oldest = parse(rope_theta=5e5, rope_scaling={"type": "llama3"} | LLAMA3)
    new = parse(rope_parameters=LLAMA3 | {"rope_theta": 5e5}, dtype="bfloat16")
    assert old == oldest == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling == {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position": 64,
    }
    linear = parse(rope_scaling={"type": "linear", "factor": 2})
    assert linear == parse(rope_parameters={"rope_type": "linear", "factor": 2.0})
    assert linear.rope_scaling == {"type": "linear", "factor": 2.0}
    plain = {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 1.0}
    assert parse(rope_parameters=plain) == parse(rope_theta=3e4, rope_scaling=None)


def test_real_configs_are_read():
    """A harmless field of a published config is refused, or its meaning is lost."""
    smollm2 = parse(
        bos_token_id=1,
        eos_token_id=[2, 3],
        is_llama_config=True,
        rope_interleaved=False,
        pretraining_tp=1,
        attention_dropout=0.0,
        _name_or_path="somewhere",
        use_cache=True,
        initializer_range=0.04,
        transformers_version="4.42.3",
        architectures=["LlamaForCausalLM"],
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    )
    assert smollm2 == parse()
    window = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
    qwen = parse("qwen2", layer_types=["full_attention"] * 4, num_key_value_heads=2, **window)
    assert qwen.qkv_bias and not qwen.o_bias and not qwen.qk_norm
    smollm3 = parse("smollm3", no_rope_layers=[1, 1, 0, 1, 0, 0], pretraining_tp=2)
    assert smollm3.rope_layers == (True, True, False, True)
    assert parse("mistral", sliding_window=64, max_position_embeddings=64).max_position == 64
    multipliers = {"attention_multiplier": 0.1, "embedding_multiplier": 12, "logits_scaling": 8}
    granite = parse("granite", residual_multiplier=0.2, attention_bias=True, **multipliers)
    assert granite.attention_scale == 0.1 and granite.embedding_multiplier == 12
    assert granite.logits_divisor == 8 and granite.residual_multiplier == 0.2
    assert granite.qkv_bias and granite.o_bias


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"model_type": "gpt2"}, "model of llama, .*model_type 'gpt2'"),
        ({"model_type": None}, "model of llama, .*model_type None"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "without own code, but .*'x.Y'"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "a causal language model.*LlamaForSequenceClassification",
        ),
        ({"hidden_size": None}, "whole numbers .*'hidden_size': None"),
        ({"vocab_size": "61"}, "whole numbers .*'vocab_size': '61'"),
        ({"hidden_size": 30}, "head_dim unless hidden_size is a multiple .*'hidden_size': 30"),
        ({"hidden_act": "gelu"}, "dir/config.json has hidden_act = 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = .*bits"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"model_type": "qwen2", "attention_bias": True}, "attention_bias = True"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding_window = 64"),
        ({"model_type": "mistral"}, "sliding_window = 4096 and max_position_embeddings = 131072"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 512},
            "sliding_window = 512",
        ),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope scaling must be .* 'dynamic' with",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope scaling must be .* 'yarn' with",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' with {}"),
        ({"rope_scaling": {**LLAMA3, "beta": 1}}, "'llama3' with .*'beta': 1"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "'default' with {'full_attention'",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 1]}, "has 2 for 4 layers"),
    ],
)
def test_fields_that_change_the_model_are_refused(fields, words):
    """A field that changes the model is ignored, and the model trained is another one."""
    with pytest.raises(ValueError, match=words):
        parse(**{"model_type": "llama"} | fields)


MODELS = {
    "llama": tiny_config(),
    "llama biases": tiny_config(qkv_bias=True, o_bias=True, mlp_bias=True),
    "llama3": tiny_config(
        rope_scaling={
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position": 64,
        }
    ),
    "linear": tiny_config(rope_scaling={"type": "linear", "factor": 2.0}, tie_embeddings=True),
    "qwen2": tiny_config(qkv_bias=True),
    "qwen3": tiny_config(qk_norm=True, head_dim=16),
    "smollm3": tiny_config(rope_layers=(True, False), tie_embeddings=True),
    "granite": tiny_config(
        attention_scale=0.1, embedding_multiplier=3.0, residual_multiplier=0.5, logits_divisor=2.0
    ),
}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_is_written_is_read_back(name):
    """A model that began here is saved as another model."""
    config = MODELS[name]
    fields = config_fields(config)
    assert fields["model_type"] == (name if name in FAMILIES else "llama")
    again = parse_config(fields, "config.json")
    assert again == replace(config, attention_scale=again.attention_scale)
    assert again.attention_scale in (config.attention_scale, config.head_dim**-0.5)


def test_a_model_of_no_family_is_refused():
    """A mixture that no transformers class computes is saved under a name that drops a part."""
    mixture = tiny_config(qk_norm=True, embedding_multiplier=2.0)
    with pytest.raises(ValueError, match=r"no model family of llama.* can express"):
        config_fields(mixture)
    with pytest.raises(ValueError, match="no model family of llama can express"):
        config_fields(tiny_config(qk_norm=True), "llama")
