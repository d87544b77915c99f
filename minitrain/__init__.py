"""minitrain: the building blocks of a training loop for causal language models.

Put together in scripts/train.py. Each block is a module of its own; the public names are here.
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
from minitrain.grad_reducer import (
    gather_params,
    reduce_gradients_,
    reduce_main_grads,
    start_reduction,
)
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

__all__ = ["Axis", "Device", "Mesh", "ShardSpec", "init_distributed", "init_mesh", "pick_device"]
__all__ += ["all_gather", "all_reduce", "all_to_all", "copy_to", "reduce_from", "reduce_scatter"]
__all__ += ["CausalLM", "ModelConfig", "load_model", "run_ranks", "save_model"]
__all__ += ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"]
__all__ += ["gather_state_dict", "shard_model", "ulysses_attention"]
__all__ += ["Batch", "count_tokens", "cross_entropy_sum", "head_cross_entropy_sum", "shard_batch"]
__all__ += ["BF16Optimizer", "clip_grad_norm_", "gather_params", "reduce_gradients_"]
__all__ += ["reduce_main_grads", "start_reduction"]
