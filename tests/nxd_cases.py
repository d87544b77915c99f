"""neuronx-distributed's layers, loss and clipping beside ours: one process of a world of two.

python tests/nxd_cases.py STORE RANK      with MINITRAIN_NXD_SRC naming the src/ of a checkout

Prints what was measured as JSON. Its licence is Amazon's own: it is called here, never copied.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import types

import torch
import torch.distributed as dist
import torch.nn.functional as F

WORLD, VOCAB = 2, 16
ABSENT = ["torch_neuronx", "neuronxcc", "libneuronxla", "nki", "nkilib"]


class Anything:
    """Stands for every name of the compiler packages that neuronx-distributed imports."""

    def __init__(self, name: str):
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        decorates = len(args) == 1 and isinstance(args[0], types.FunctionType) and not kwargs
        return args[0] if decorates else self

    def __getitem__(self, key):
        return self

    def __or__(self, other):
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases):
        return (object,)

    def __iter__(self):
        return iter(())


class StubModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{self.__name__}.{name}")


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages that only a Trainium machine has."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = StubModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        module.get_platform_target = lambda: "trn1"
        module.SUPPORTED_TYPES = ["trn1"]
        module.REDUCE_SUM, module.REDUCE_MAX, module.REDUCE_MIN = "sum", "max", "min"
        module.REDUCE_MUL, module.REDUCE_AND, module.REDUCE_OR = "mul", "and", "or"
        module.__version__ = "0.0"


def import_nxd():
    """Import neuronx-distributed's parallel layers for the CPU, without its package's own start."""
    sys.path.insert(0, os.environ["MINITRAIN_NXD_SRC"])
    os.environ["NXD_CPU_MODE"] = "1"
    if importlib.util.find_spec("torch_xla"):
        import torch_xla
        import torch_xla.core.xla_model
        import torch_xla.runtime  # noqa: F401
    else:
        ABSENT.append("torch_xla")
    sys.meta_path.insert(0, Stubs())
    spec = importlib.util.find_spec("neuronx_distributed")
    package = types.ModuleType("neuronx_distributed")
    package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
    sys.modules["neuronx_distributed"] = package
    from neuronx_distributed.parallel_layers import grads, layers, parallel_cross_entropy
    from neuronx_distributed.parallel_layers import parallel_state as state

    return state, layers, parallel_cross_entropy, grads


def losses(parallel_cross_entropy, mesh, labels, smoothing: float = 0.0) -> dict:
    """Loss of each token and gradient of the logits: theirs, ours, and torch's."""
    from minitrain.collectives import all_gather
    from minitrain.loss_reducer import cross_entropy_sum

    logits = torch.randn(10, VOCAB, generator=torch.Generator().manual_seed(0))
    share = logits.chunk(WORLD, -1)[mesh.tp.rank]
    whole = logits.clone().requires_grad_()
    want = F.cross_entropy(whole, labels, reduction="none", label_smoothing=smoothing)
    want.sum().backward()
    theirs, ours = (share.clone().requires_grad_() for _ in range(2))
    # Times 1.0: it overwrites the logits it is given.
    their_loss = parallel_cross_entropy(theirs[None] * 1.0, labels[None], smoothing)[0]
    their_loss.sum().backward()
    our_loss = cross_entropy_sum(ours, labels, mesh.tp, label_smoothing=smoothing)
    our_loss.backward()
    grads = [all_gather(x.grad, mesh.tp, 1) for x in (theirs, ours)]
    masked = labels == -100
    return {
        "their_loss": off(their_loss.detach()[~masked], want.detach()[~masked]),
        "their_grad": off(grads[0][~masked], whole.grad[~masked]),
        "our_loss": off(our_loss.detach(), want.detach().sum()),
        "our_grad": off(grads[1], whole.grad),
        "their_masked_loss": their_loss.detach()[masked].abs().tolist(),
        "their_masked_grad": grads[0][masked].abs().sum(-1).tolist(),
        "our_masked_grad": grads[1][masked].abs().sum(-1).tolist(),
    }


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-9)).item()


def mlp_and_clip(layers, grads, mesh) -> dict:
    """Column, SiLU, row, an embedding and the norm of their gradients: theirs against ours."""
    from torch import nn

    from minitrain.grad_clipper import clip_grad_norm_
    from minitrain.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
    )

    torch.manual_seed(1)
    up, down, table = nn.Linear(8, 12), nn.Linear(12, 8, bias=False), nn.Embedding(VOCAB, 8)
    norm = nn.Parameter(torch.ones(8))
    ours = [
        VocabParallelEmbedding(table, mesh.tp),
        ColumnParallelLinear(up, mesh.tp),
        RowParallelLinear(down, mesh.tp),
    ]
    theirs = [
        layers.ParallelEmbedding(VOCAB, 8),
        layers.ColumnParallelLinear(8, 12, gather_output=False),
        layers.RowParallelLinear(12, 8, bias=False, input_is_parallel=True),
    ]
    for mine, other in zip(ours, theirs):
        other.load_state_dict(mine.state_dict(), strict=False)
    ids = torch.randint(0, VOCAB, (3, 5))
    outputs, params = [], []
    for embedding, column, row in (ours, theirs):
        outputs.append(row(F.silu(column(embedding(ids)))))
        (outputs[-1] ** 2).sum().backward()
        params.append([p for m in (embedding, column, row) for p in m.parameters()])
    found = {"output": off(outputs[1].detach(), outputs[0].detach())}
    found["grads"] = max(off(b.grad, a.grad) for a, b in zip(*params))
    norm.grad = torch.full((8,), 0.5)
    clipped = {str(i): p.grad.clone() for i, p in enumerate(params[0])} | {"n": norm.grad.clone()}
    spec = {"0": 0, "1": 0, "2": 0, "3": 1, "n": None}
    our_norm = clip_grad_norm_(clipped, spec, mesh, 1.0)
    their_norm = grads.clip_grad_norm([*params[1], norm], max_norm=1.0)
    found["norm"] = off(their_norm.view(1), our_norm)
    found["clipped"] = off(params[1][1].grad, clipped["1"])
    return found


def main(store: str, rank: int) -> None:
    state, layers, parallel_cross_entropy, grads = import_nxd()
    from minitrain.mesh import init_mesh

    dist.init_process_group("gloo", rank=rank, world_size=WORLD, store=dist.FileStore(store, WORLD))
    groups = state.initialize_model_parallel(tensor_model_parallel_size=WORLD, mesh_only=True)
    state.initialize_model_parallel(tensor_model_parallel_size=WORLD)
    mesh = init_mesh(tp=WORLD)
    labels = torch.randint(0, VOCAB, (10,), generator=torch.Generator().manual_seed(2))
    masked = labels.clone()
    masked[:3] = -100
    found = {
        "tp_groups": [list(group) for group in groups.tp_groups],
        "plain": losses(parallel_cross_entropy, mesh, labels),
        "masked": losses(parallel_cross_entropy, mesh, masked),
        "smoothed": losses(parallel_cross_entropy, mesh, labels, 0.1),
        "layers": mlp_and_clip(layers, grads, mesh),
    }
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]))
