"""Apply a plan to a plain model: replace layers, fill in weights share by share, gather them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from minitrain.attention import fixed_shape_attention, variable_length_attention
from minitrain.collectives import all_gather
from minitrain.cpu_attention import cpu_attention
from minitrain.mesh import Axis, Mesh, ShardSpec
from minitrain.model import CausalLM, ModelConfig
from minitrain.tensor_parallel import (
    ColumnParallelLinear,
    EnterRegion,
    PartialGradientNorm,
    ReplicatedHeadsLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from minitrain.ulysses import ulysses_attention

# Module name pattern -> what becomes of it. "norm" only matters when activations between blocks are
# split over tp.
LLAMA_PLAN = {
    "model.embed_tokens": "embedding",
    "*.q_proj": "column",
    "*.k_proj": "kv",
    "*.v_proj": "kv",
    "*.o_proj": "row",
    "*.gate_proj": "column",
    "*.up_proj": "column",
    "*.down_proj": "row",
    "*.enter": "enter",
    "enter": "enter",
    "lm_head": "column",
    "*.q_norm": "head_norm",
    "*.k_norm": "head_norm",
    "*layernorm": "norm",
    "model.norm": "norm",
}
SPLIT_DIM = {"embedding": 0, "column": 0, "row": 1}


def shard_model(
    model: CausalLM, mesh: Mesh, plan: dict[str, str] = LLAMA_PLAN, split_activations: bool = False
) -> ShardSpec:
    """Replace a plain model's layers, in place, by this rank's share of them.

    model               on the meta device (weights come later, share by share) or with weights,
                        which are then sliced
    plan                module name pattern -> embedding, column, kv, row, enter, head_norm or norm
    split_activations   keep activations between blocks split over tp along the sequence; saves
                        their memory at equal communication (Megatron-LM's sequence parallelism,
                        Korthikanti et al. 2022)

    Returns             ShardSpec: parameter name -> dim split over tp, or None
    """
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    dims: dict[str, int | None] = dict.fromkeys(shapes)
    for name, module in list(model.named_modules()):
        kind = next((kind for pattern, kind in plan.items() if fnmatchcase(name, pattern)), None)
        if kind is None or mesh.tp.size == 1:
            continue
        if kind == "kv":
            kind = "replicated" if model.config.num_kv_heads < mesh.tp.size else "column"
        new = _parallel_layer(module, kind, model.config, mesh.tp, split_activations)
        model.set_submodule(name, new)
        if kind in SPLIT_DIM:
            dims[f"{name}.weight"] = SPLIT_DIM[kind]
            if kind == "column" and f"{name}.bias" in dims:
                dims[f"{name}.bias"] = 0
    for module in model.modules():
        if hasattr(module, "core"):
            if mesh.device.compiles:
                module.core = fixed_shape_attention(module.core, mesh.device.nxd)
            elif mesh.device.kind == "cuda":
                module.core = variable_length_attention(module.core)
            else:
                module.core = cpu_attention
            module.core = ulysses_attention(module.core, mesh.sp)
    model.tie()
    return ShardSpec({name: dims[name] for name, _ in model.named_parameters()}, shapes)


def _parallel_layer(
    module: nn.Module, kind: str, config: ModelConfig, tp: Axis, split_activations: bool
) -> nn.Module:
    """The layer that takes module's place."""
    make = {
        "embedding": lambda: VocabParallelEmbedding(module, tp, split_activations),
        "column": lambda: ColumnParallelLinear(module, tp, input_is_copied=True),
        "replicated": lambda: ReplicatedHeadsLinear(module, tp, config.num_kv_heads),
        "row": lambda: RowParallelLinear(module, tp, split_activations),
        "enter": lambda: EnterRegion(tp, split_activations),
        "head_norm": lambda: PartialGradientNorm(module, tp),
        "norm": lambda: PartialGradientNorm(module, tp) if split_activations else module,
    }
    assert kind in make, f"unknown kind {kind!r} in the plan"
    return make[kind]()


def share_slices(name: str, spec: ShardSpec, mesh: Mesh) -> tuple[slice, ...]:
    """Where this rank's share lies in the whole tensor; may be empty in a padded vocabulary."""
    shape, dim = spec.shapes[name], spec[name]
    slices = [slice(0, size) for size in shape]
    if dim is not None:
        size = -(-shape[dim] // mesh.tp.size)
        start = min(mesh.tp.rank * size, shape[dim])
        slices[dim] = slice(start, min(start + size, shape[dim]))
    return tuple(slices)


@torch.no_grad()
def fill_weights(
    model: CausalLM,
    spec: ShardSpec,
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    read: Callable[[str, tuple[slice, ...]], Tensor],
) -> None:
    """Turn a sharded meta model into a real one, one share at a time.

    read      f(name, slices of the whole tensor) -> that part of it, any dtype, on the host;
              padding is filled with zeros
    """
    model.to(dtype).to_empty(device=device)
    model.tie()
    for name, param in model.named_parameters():
        slices = share_slices(name, spec, mesh)
        # On the host, as each rank fills another slice: on xla that would be another program.
        share = torch.zeros(param.shape, dtype=param.dtype)
        share[tuple(slice(0, s.stop - s.start) for s in slices)] = read(name, slices)
        param.copy_(share)


def random_weights(config: ModelConfig, shapes: dict[str, tuple[int, ...]], seed: int) -> Callable:
    """A reader for fill_weights, with GPT-2's initial weights (Radford et al. 2019).

    normal(0, 0.02), residual outputs scaled down by sqrt(2 layers), norms 1, biases 0; each tensor
    is drawn on the host from (seed, its name), so every layout gets the same model.
    """

    def read(name: str, slices: tuple[slice, ...]) -> Tensor:
        if len(shapes[name]) == 1:
            return torch.full(shapes[name], 0.0 if name.endswith("bias") else 1.0)[slices]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = 0.02 / (2 * config.num_layers) ** 0.5 if residual else 0.02
        return torch.empty(shapes[name]).normal_(0, std, generator=generator)[slices]

    return read


@torch.no_grad()
def whole_tensor(name: str, share: Tensor, spec: ShardSpec, mesh: Mesh) -> Tensor:
    """Join the shares of a parameter, without padding; an all-gather over tp when it is split."""
    dim = spec[name]
    if dim is None:
        return share.detach()
    return all_gather(share.detach(), mesh.tp, dim).narrow(dim, 0, spec.shapes[name][dim])


def gather_state_dict(model: nn.Module, spec: ShardSpec, mesh: Mesh) -> dict[str, Tensor]:
    """Join the ranks' shares into whole tensors, without padding, a tied head left out.

    Returns        name -> tensor on the host, equal on every rank
    Communicates   all-gather over tp of every split parameter
    """
    params = model.named_parameters()
    return {name: whole_tensor(name, p, spec, mesh).cpu().clone() for name, p in params}
