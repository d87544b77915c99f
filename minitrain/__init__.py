"""minitrain: the building blocks of a training loop for causal language models.

Put together in scripts/train.py. Each block is a module of its own; the names below are the public
ones, importable from here.
"""

from minitrain.bf16_optimizer import BF16Optimizer
from minitrain.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    copy_to,
    reduce_from,
    reduce_scatter,
)
from minitrain.data_sharder import Batch, shard_batch
from minitrain.device import Device, pick_device
from minitrain.grad_clipper import clip_grad_norm_
from minitrain.grad_reducer import gather_params, reduce_gradients_, reduce_main_grads
from minitrain.huggingface import load_model, save_model
from minitrain.launch import init_distributed, run_ranks
from minitrain.loss_reducer import count_tokens, cross_entropy_sum, head_cross_entropy_sum
from minitrain.mesh import Axis, Mesh, ShardSpec, init_mesh
from minitrain.model import CausalLM, ModelConfig
from minitrain.model_sharder import gather_state_dict, shard_model
from minitrain.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from minitrain.ulysses import ulysses_attention

__all__ = [
    "Axis",
    "BF16Optimizer",
    "Batch",
    "CausalLM",
    "ColumnParallelLinear",
    "Device",
    "Mesh",
    "ModelConfig",
    "RowParallelLinear",
    "ShardSpec",
    "VocabParallelEmbedding",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "clip_grad_norm_",
    "copy_to",
    "count_tokens",
    "cross_entropy_sum",
    "gather_params",
    "gather_state_dict",
    "head_cross_entropy_sum",
    "init_distributed",
    "init_mesh",
    "load_model",
    "pick_device",
    "reduce_from",
    "reduce_gradients_",
    "reduce_main_grads",
    "reduce_scatter",
    "run_ranks",
    "save_model",
    "shard_batch",
    "shard_model",
    "ulysses_attention",
]
