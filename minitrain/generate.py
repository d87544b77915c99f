"""Continue a sequence of tokens, with a key/value cache.

Shapes: B rows (here 1), S positions, s new ones, H query heads, G kv heads, K head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from minitrain.collectives import all_gather
from minitrain.mesh import Axis
from minitrain.model import CausalLM, exact_dtype, fused_attention


def generate(model: CausalLM, input_ids: list[int], max_new_tokens: int, **settings) -> list[int]:
    """Return the tokens that follow input_ids; the settings are those of stream_tokens."""
    return list(stream_tokens(model, input_ids, max_new_tokens, **settings))


@torch.no_grad()
def stream_tokens(
    model: CausalLM,
    input_ids: list[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_id: int | list[int] | None = None,
    tp: Axis = Axis("tp"),  # noqa: B008
) -> Iterator[int]:
    """Yield the tokens that follow input_ids, one by one, each as soon as it is known.

    input_ids     the prompt, at least one token
    temperature   logits are divided by it; 0: always the likeliest token
    top_p         from above 0 to 1: draw from the fewest tokens whose probabilities add up to this
    seed          fixes the draws, on every device alike
    eos_id        token, or tokens, that end the text; not yielded
    tp            the mesh's axis, for a sharded model: every rank of it calls this alike and gets
                  the same tokens. sp and dp need nothing: their ranks each do all the work

    Communicates  what the model does, and an all-gather of one position's logits over tp a token
    Raises        ValueError for settings out of range
    """
    check_sampling(input_ids, max_new_tokens, temperature, top_p)
    vocab_size, device = model.config.vocab_size, model.lm_head.weight.device
    if not 0 <= min(input_ids) <= max(input_ids) < vocab_size:
        rule = f"a prompt's ids must be from 0 to below the model's vocabulary of {vocab_size}"
        raise ValueError(f"{rule}, but one is {max(input_ids)}. Use the model's own tokenizer.")
    if getattr(model.enter, "split_sequence", False):
        raise ValueError(
            "one token cannot be split over tp along the sequence. Sample from final/."
        )
    stop = {eos_id} if isinstance(eos_id, int) else set(eos_id or ())
    generator = torch.Generator().manual_seed(seed)
    with cached_attention(model, len(input_ids) + max_new_tokens):
        new_ids, position = list(input_ids), 0
        for _ in range(max_new_tokens):
            ids_bs = torch.tensor([new_ids], device=device)
            places_bs = torch.arange(position, position + len(new_ids), device=device)[None]
            last_b1D = model.hidden(ids_bs, places_bs)[:, -1:]
            logits_b1V = all_gather(model.lm_head(last_b1D), tp, 2)
            logits_V = logits_b1V[0, 0, :vocab_size]  # without padding
            token = pick_token(logits_V, temperature, top_p, generator)
            if token in stop:
                return
            yield token
            position, new_ids = position + len(new_ids), [token]


@contextmanager
def cached_attention(model: CausalLM, max_length: int) -> Iterator[None]:
    """Within it, the model evaluates, and each call continues the rows of the call before.

    max_length   positions to make room for: 2 * G * K * max_length elements a layer and row
    """
    layers = [module for module in model.modules() if hasattr(module, "core")]
    before, was_training = [layer.core for layer in layers], model.training
    model.eval()
    try:
        for layer in layers:
            layer.core = _caching_core(max_length)
        with torch.compiler.set_stance("force_eager"):  # compiled, each length would be a program
            yield
    finally:
        model.train(was_training)
        for layer, core in zip(layers, before):
            layer.core = core


def _caching_core(max_length: int) -> Callable[..., Tensor]:
    """A `core` for one attention layer that attends to all positions it has been given so far."""
    cache: list[Tensor] = []  # k_bSGK, v_bSGK; made by the first call
    length = 0

    def core(q_bsHK, k_bsGK, v_bsGK, documents_bS: None, scale: float) -> Tensor:
        nonlocal length
        begin, length = length, length + q_bsHK.shape[1]
        for n, new in enumerate((k_bsGK, v_bsGK)):
            if begin == 0:
                cache.append(new.new_empty(new.shape[0], max_length, *new.shape[2:]))
            cache[n][:, begin:length] = new
        assert begin == 0 or length == begin + 1, "after the prompt, one token at a time"
        return fused_attention(q_bsHK, *(x[:, :length] for x in cache), scale)

    return core


def pick_token(logits_V: Tensor, temperature: float, top_p: float, generator) -> int:
    """Choose the next token: the likeliest, or drawn on the host, alike on every device."""
    if temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V.cpu().to(exact_dtype(logits_V.dtype))
    kept_V = top_p_probabilities((logits_V / temperature).softmax(0), top_p)
    return int(torch.multinomial(kept_V, 1, generator=generator))


def top_p_probabilities(probs_V: Tensor, top_p: float) -> Tensor:
    """Keep the fewest tokens, likeliest first, whose probabilities add up to top_p, and at least
    one; the others get zero. Not scaled to sum to 1 again.

    Source   nucleus sampling (Holtzman et al. 2020)
    """
    sorted_V, order_V = probs_V.sort(descending=True, stable=True)
    before_V = F.pad(sorted_V.cumsum(0)[:-1], (1, 0))  # what the likelier ones add up to
    kept_V = (before_V < top_p) | (top_p >= 1)  # the sum may reach 1 by rounding
    return torch.zeros_like(probs_V).scatter(0, order_V, sorted_V * kept_V)


def check_sampling(
    input_ids: list[int], max_new_tokens: int, temperature: float, top_p: float
) -> None:
    """Refuse settings that cannot work, with ValueError; needs no model, so can come before it."""
    for holds, rule in (
        (input_ids, "a prompt must have at least one token, but is empty"),
        (max_new_tokens >= 1, f"--max-new-tokens must be at least 1, not {max_new_tokens}"),
        (0 <= temperature < math.inf, f"--temperature must be 0 or positive, not {temperature}"),
        (0 < top_p <= 1, f"--top-p must be above 0 and at most 1, not {top_p}"),
    ):
        if not holds:
            raise ValueError(f"{rule}.")


def stream_text(
    decode: Callable[[list[int]], str], prompt_ids: list[int], new_ids: Iterator[int]
) -> Iterator[str]:
    """Yield the text of each new token as it comes, as soon as its characters are whole.

    decode       ids -> text
    prompt_ids   what came before: some tokens read differently at the start of a text
    """
    ids = list(prompt_ids)[-8:]
    shown = decode(ids)
    for token in new_ids:
        ids.append(token)
        text = decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else a character's first bytes
            yield text[len(shown) :]
            ids = ids[-8:]
            shown = decode(ids)
    if rest := decode(ids)[len(shown) :]:
        yield rest
