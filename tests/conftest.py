"""What several test files need: tiny models with known weights, batches, a group that counts."""

from dataclasses import replace
from types import SimpleNamespace

import torch
import torch._dynamo  # optimizers import it on first use: once here, not in every forked rank

from minitrain.mesh import Axis, Mesh, init_mesh
from minitrain.model import CausalLM, ModelConfig
from minitrain.model_sharder import fill_weights, shard_model

torch.set_num_threads(1)
CPU = torch.device("cpu")
ONE = Axis("one")


def tiny_config(**changes) -> ModelConfig:
    """The model of CASES: vocabulary 64, hidden 32, 2 layers, 4 query and 2 kv heads, FFN 64."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    return ModelConfig(**{**sizes, **heads, **changes})


def lively_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """float64 weights in which every part matters: norms and biases are no ones and zeros."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in CausalLM(config).named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in sorted(shapes.items()):
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        weights[name] = 1 + 0.2 * drawn if "norm" in name else 0.2 * drawn
    return weights


def tiny_model(config, weights, mesh: Mesh | None = None, dtype=torch.float64, **kwargs):
    """The model with these weights, sharded over mesh, made as a real one is: from meta, share by
    share. Returns the model and its ShardSpec.
    """
    mesh = mesh or Mesh()
    with torch.device("meta"):
        model = CausalLM(config)
    spec = shard_model(model, mesh, **kwargs)
    fill_weights(model, spec, mesh, CPU, dtype, lambda name, slices: weights[name][slices])
    return model, spec


def uneven_rows(num_rows: int = 4, length: int = 12, vocab_size: int = 64, packed: bool = False):
    """A global batch with masked prompts, a row without labels, and, packed, several documents a
    row.
    """
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, vocab_size, (num_rows, length), generator=generator)
    labels = ids.clone()
    for row in range(num_rows):
        labels[row, : 3 * row] = -100
    labels[1] = -100
    rows = SimpleNamespace(input_ids=ids, labels=labels)
    if packed:
        cuts = [(5,), (3, 4), (1, 9), (7, 8)]
        starts = torch.zeros(num_rows, length, dtype=torch.int64)
        for row in range(num_rows):
            starts[row, list(cuts[row % len(cuts)])] = 1
        rows.documents = starts.cumsum(1)
        positions = torch.arange(length).expand(num_rows, length)
        begins = torch.where(starts == 1, positions, 0).cummax(1).values
        rows.position_ids = positions - begins
    return rows


class CountingGroup:
    """A group that notes each collective it passes on: (name, bytes of the tensor given)."""

    def __init__(self, group):
        self.group, self.calls = group, []

    def __getattr__(self, name):
        value = getattr(self.group, name)
        if not callable(value):
            return value

        def counted(x, *args):
            self.calls.append((name.rstrip("_"), x.numel() * x.element_size()))
            return value(x, *args)

        return counted

    def take(self, name: str) -> int:
        """How many calls of this name since the last take; any other name is a failure."""
        names, self.calls = [call[0] for call in self.calls], []
        assert set(names) <= {name}, names
        return len(names)


def counting_mesh(sp: int = 1, tp: int = 1) -> Mesh:
    """The mesh of the running ranks with a CountingGroup on every axis larger than 1."""
    mesh = init_mesh(sp, tp)
    axes = {name: getattr(mesh, name) for name in ("dp", "sp", "tp", "dp_sp")}
    counted = {
        name: replace(axis, group=CountingGroup(axis.group))
        for name, axis in axes.items()
        if axis.size > 1
    }
    return replace(mesh, **counted)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-12) -> None:
    """Assert that got equals want within tolerance, relative to want's largest entry."""
    assert got.shape == want.shape, (got.shape, want.shape)
    worst = (got - want).abs().max().item() if got.numel() else 0.0
    scale = max(want.abs().max().item(), 1e-30) if want.numel() else 1.0
    assert worst <= tolerance * scale, f"off by {worst:.3e} where the largest entry is {scale:.3e}"
