"""Generation: the cache against no cache and transformers; draws; layouts; streamed text."""

import pytest
import torch

from minitrain.corpus import train_tokenizer
from minitrain.generate import (
    cached_attention,
    generate,
    pick_token,
    stream_text,
    stream_tokens,
    top_p_probabilities,
)
from minitrain.launch import run_ranks
from minitrain.mesh import init_mesh
from minitrain.model import CausalLM, ModelConfig, causal_attention
from minitrain.model_sharder import shard_model

PROMPT = [3, 14, 15, 9, 2, 6]


def tiny_model(dtype: torch.dtype = torch.float32, **changes) -> CausalLM:
    """Weights large enough that the likeliest tokens differ from place to place."""
    shape = {
        "vocab_size": 65,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position": 64,
    }
    model = CausalLM(ModelConfig(**(shape | changes))).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        if param.dim() > 1:
            param.data.normal_(0, 0.4, generator=generator)
    return model


def uncached_greedy(model: CausalLM, ids: list[int], count: int) -> list[int]:
    """Run the model on the whole text for each token."""
    ids = list(ids)
    for _ in range(count):
        logits = model(torch.tensor([ids]), torch.arange(len(ids))[None])
        ids.append(int(logits[0, -1].argmax()))
    return ids[-count:]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_kv_heads": 4, "tie_embeddings": True},
        {"qk_norm": True, "rope_layers": (True, False)},
    ],
)
@pytest.mark.parametrize("prompt", [PROMPT, [7]])
def test_cached_equals_uncached(changes, prompt):
    """Red when the cache loses a position, or a new token sees only the first one or is turned by
    a wrong angle.
    """
    model = tiny_model(**changes)
    expected = uncached_greedy(model, prompt, 40)
    assert len(set(expected)) > 5
    assert generate(model, prompt, 40) == expected


def test_cached_logits_equal_uncached():
    """Red when the cache is right only as far as the likeliest token shows."""
    model = tiny_model(torch.float64)
    ids, places = torch.tensor([PROMPT * 2]), torch.arange(12)[None]
    with torch.no_grad(), cached_attention(model, 12):
        parts = [model(ids[:, :5], places[:, :5])]
        parts += [model(ids[:, i : i + 1], places[:, i : i + 1]) for i in range(5, 12)]
        whole = torch.cat(parts, 1)
    torch.testing.assert_close(whole, model(ids, places), rtol=1e-12, atol=1e-12)


def test_equals_transformers():
    """Red when generation and transformers' generate disagree on the same weights."""
    transformers = pytest.importorskip("transformers")
    model = tiny_model()
    config = transformers.LlamaConfig(
        vocab_size=65,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
    )
    other = transformers.LlamaForCausalLM(config).eval()
    other.load_state_dict(model.state_dict())
    settings = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0, "eos_token_id": None}
    expected = other.generate(torch.tensor([PROMPT]), **settings)[0, len(PROMPT) :].tolist()
    assert generate(model, PROMPT, 40) == expected


def test_compiled_blocks_are_not_compiled_for_each_length():
    """Red when each token of a sample, being longer than the one before, compiles every block."""
    model, programs = tiny_model(), []
    expected = generate(model, PROMPT, 5)
    for block in model.model.layers:
        block.compile(backend=lambda graph, inputs: programs.append(graph) or graph.forward)
    assert generate(model, PROMPT, 5) == expected and not programs
    model(torch.tensor([PROMPT]), torch.arange(len(PROMPT))[None])
    assert programs


def test_model_is_left_as_it_was():
    """Red when the caching core or evaluation mode stays, also after a stop or an error."""
    model = tiny_model().train()
    stream = stream_tokens(model, PROMPT, 40)
    next(stream)
    assert model.model.layers[0].self_attn.core is not causal_attention
    stream.close()
    generate(model, PROMPT, 3)
    with pytest.raises(ValueError, match="max-new-tokens"):
        generate(model, PROMPT, 0)
    assert all(layer.self_attn.core is causal_attention for layer in model.model.layers)
    assert model.training
    assert all(param.grad is None for param in model.parameters())


def test_stops_at_eos():
    """Red when the text goes on after eos, or eos itself is returned."""
    model = tiny_model()
    whole = generate(model, PROMPT, 20)
    eos = whole[7]
    until = whole[: whole.index(eos)]
    assert generate(model, PROMPT, 20, eos_id=eos) == until
    assert generate(model, PROMPT, 20, eos_id=[64, eos]) == until


@pytest.mark.parametrize(
    "top_p, kept",
    [
        (0.05, [2]),
        (0.4, [2]),
        (0.41, [2, 0]),
        (0.7, [2, 0]),
        (0.71, [2, 0, 4]),
        (1.0, [2, 0, 4, 1, 3]),
    ],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    """Red when the token that reaches top_p is left out, one more is kept, or none is."""
    probs = torch.tensor([0.3, 0.08, 0.4, 0.02, 0.2], dtype=torch.float64)
    result = top_p_probabilities(probs, top_p)
    assert result.nonzero().flatten().tolist() == sorted(kept)
    assert torch.equal(result[kept], probs[kept])


def test_draws_follow_the_probabilities():
    """Red when temperature multiplies instead of dividing, or top-p's rest is still drawn."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    draws = [pick_token(logits, 0.5, 0.95, generator) for _ in range(4000)]
    counts = torch.bincount(torch.tensor(draws), minlength=4)
    expected = torch.tensor([0.0, 2.0, 4.0, -2.0]).softmax(0) * torch.tensor([0, 1, 1, 0])
    assert counts[0] == counts[3] == 0
    torch.testing.assert_close(counts / 4000, expected / expected.sum(), atol=0.03, rtol=0)


def test_same_seed_same_text():
    """Red when draws depend on anything but the seed, such as torch's global generator."""
    model = tiny_model()
    settings = {"temperature": 1.5, "top_p": 0.9}
    first = generate(model, PROMPT, 30, seed=5, **settings)
    torch.rand(7)
    assert generate(model, PROMPT, 30, seed=5, **settings) == first
    assert generate(model, PROMPT, 30, seed=6, **settings) != first
    state = torch.get_rng_state()
    generate(model, PROMPT, 3, seed=5, **settings)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"input_ids": []}, "at least one token"),
        ({"input_ids": [65]}, "vocabulary of 65, but one is 65"),
        ({"max_new_tokens": 0}, "at least 1, not 0"),
        ({"temperature": -0.5}, "not -0.5"),
        ({"top_p": 0.0}, "not 0.0"),
        ({"top_p": 1.1}, "not 1.1"),
    ],
)
def test_bad_settings_are_named(change, words):
    """Red when a wrong setting gives a traceback from deep inside, or text."""
    settings = {"input_ids": PROMPT, "max_new_tokens": 4} | change
    with pytest.raises(ValueError, match=words):
        generate(tiny_model(), **settings)


def _generate_on_rank(sp: int, tp: int) -> list[list[int]]:
    mesh = init_mesh(sp=sp, tp=tp)
    model = tiny_model(torch.float64)
    shard_model(model, mesh)
    draws = {"temperature": 1.5, "top_p": 0.9, "seed": 5}
    return [
        generate(model, PROMPT, 20, tp=mesh.tp),
        generate(model, PROMPT, 20, tp=mesh.tp, **draws),
    ]


@pytest.mark.parametrize("sp, tp", [(2, 1), (1, 2), (1, 4)])
def test_same_text_on_every_layout(sp, tp):
    """Red when a rank picks from its own share of the vocabulary, or padding (65 ids) is picked."""
    draws = {"temperature": 1.5, "top_p": 0.9, "seed": 5}
    model = tiny_model(torch.float64)
    expected = [generate(model, PROMPT, 20), generate(model, PROMPT, 20, **draws)]
    assert run_ranks(_generate_on_rank, sp * tp, sp, tp) == [expected] * (sp * tp)


def test_streamed_text_has_whole_characters():
    """Red when half a character is printed, or the pieces do not add up to the text."""
    tokenizer = train_tokenizer(["plain text only"], 257)
    text = "Zoë paid 3 € for 🍜, 你好"
    ids = tokenizer.encode("a prompt: " + text)
    start = len(tokenizer.encode("a prompt: "))
    pieces = list(stream_text(tokenizer.decode, ids[:start], iter(ids[start:])))
    assert "".join(pieces) == text
    assert len(pieces) == len(text)
    cut = list(stream_text(tokenizer.decode, ids[:start], iter(tokenizer.encode("ab€")[:-1])))
    assert cut == ["a", "b", "\N{REPLACEMENT CHARACTER}"]
