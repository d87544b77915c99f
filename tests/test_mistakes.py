"""Each classic mistake, made in a copy of scripts/train.py: parity sees it and names it."""

import math

import pytest
from layout_runs import ROOT  # puts scripts/ on the path
from parity import CLIP, ParityConfig, check_layout_numbers
from parity_reference import Layout
from parity_run import Variant

SOURCE = (ROOT / "scripts/train.py").read_text()
DP_SP, DP, SP, TP = Layout(2, 2, 1), Layout(dp=2), Layout(sp=2), Layout(tp=2)
ALL = Layout(2, 2, 2)
WHOLE, SHARDED = Variant(False, math.inf), Variant(True, math.inf)
CLIPPED = Variant(False, CLIP)

# An author's own way from rows to batches: its labels are put in at HERE.
OWN_DATA = """
import torch.nn.functional as F
from types import SimpleNamespace
from minitrain import data_sharder

def shard_batch(rows, mesh):
    batch = data_sharder.shard_batch(rows, mesh)
    ids, labels = torch.as_tensor(rows.input_ids), torch.as_tensor(rows.labels)
    pad = -ids.shape[1] % (mesh.sp.size * mesh.tp.size)
    def mine(x, fill):
        rows_of_dp = F.pad(x, (0, pad), value=fill).chunk(mesh.dp.size)[mesh.dp.rank]
        return rows_of_dp.chunk(mesh.sp.size, 1)[mesh.sp.rank]
    labels = HERE
    return Batch(batch.input_ids, labels, batch.position_ids, batch.documents)


def summed_loss("""
BACKWARD = "(micro_loss_sum / divisor).backward()"
COUNT = "count_tokens(micro_batches, mesh.dp_sp)\n    divisor"
REDUCE = "grads = reduce_main_grads(optimizer, mesh.dp_sp)"
CLIPPING = "clip_grad_norm_(grads, shard_spec, mesh, config.max_grad_norm, pieces=sharded)"

# name: layout, variant, text in train.py, text that takes its place, what parity must say
MISTAKES = {
    "mean of micro-batch means": (
        DP_SP, WHOLE, BACKWARD,
        "(micro_loss_sum / (batch.labels != -100).sum().clamp(min=1)).backward()",
        "gradients: mean of means: every micro-batch",
    ),
    "averaged instead of summed": (
        DP_SP, WHOLE, REDUCE,
        REDUCE + "\n    torch._foreach_mul_(list(grads.values()), 1 / mesh.dp_sp.size)",
        "gradients: averaged over dp x sp instead of summed",
    ),
    "reduced over dp only": (
        DP_SP, WHOLE, REDUCE, "grads = reduce_main_grads(optimizer, mesh.dp)",
        "gradients: not summed over sp, only over dp",
    ),
    "not reduced": (
        DP, WHOLE, REDUCE, "grads = optimizer.grads",
        "gradients: not summed over dp",
    ),
    "loss of this rank": (
        DP_SP, WHOLE, "loss = all_reduce(loss_sum, mesh.dp_sp) / divisor\n    grads",
        "loss = loss_sum / divisor\n    grads",
        "loss: not summed over dp x sp",
    ),
    "norm of local shards": (
        TP, WHOLE, CLIPPING,
        "clip_grad_norm_(grads, shard_spec, Mesh(), config.max_grad_norm)",
        "gradient norm: norm of the local shards",
    ),
    "replicated counted tp times": (
        TP, WHOLE, CLIPPING,
        "clip_grad_norm_(grads, dict.fromkeys(grads, 0), mesh, config.max_grad_norm)",
        "gradient norm: parameters that every tp rank holds are counted tp times",
    ),
    "norm of pieces": (
        DP, SHARDED, "pieces=sharded", "pieces=False",
        "gradient norm: squares of a sharded optimizer's pieces are not summed",
    ),
    "clipped before the sum": (
        DP_SP, CLIPPED, REDUCE,
        "clip_grad_norm_(optimizer.main_grads, shard_spec, mesh, config.max_grad_norm)\n    "
        + REDUCE,
        "gradients: clipped before the sum",
    ),
    "not clipped": (
        DP, CLIPPED, "mesh, config.max_grad_norm, ", "mesh, float('inf'), ",
        "gradients are not clipped",
    ),
    "positions restart": (
        SP, WHOLE, "batch.input_ids, batch.position_ids",
        "batch.input_ids, torch.arange(batch.labels.shape[1]).expand_as(batch.labels)",
        "positions restart on each sp slice",
    ),
    "shifted after slicing": (
        SP, WHOLE, "\ndef summed_loss(",
        OWN_DATA.replace("HERE", "F.pad(mine(labels, -100)[:, 1:], (0, 1), value=-100)"),
        "labels are shifted after slicing",
    ),
    "not shifted": (
        DP, WHOLE, "\ndef summed_loss(", OWN_DATA.replace("HERE", "mine(labels, -100)"),
        "labels are not shifted",
    ),
    "shifted twice": (
        SP, WHOLE, "        batch.labels,",
        "        torch.nn.functional.pad(batch.labels[:, 1:], (0, 1), value=-100),",
        "labels are shifted twice",
    ),
    "mask ignored": (
        DP, WHOLE, "\ndef summed_loss(",
        OWN_DATA.replace(
            "HERE", "data_sharder.shard_batch(SimpleNamespace(input_ids=ids), mesh).labels"
        ),
        "masked tokens are trained on",
    ),
    "masked tokens in the divisor": (
        DP, WHOLE, COUNT,
        "count_tokens(micro_batches, mesh.dp_sp)\n    loss_tokens = all_reduce(torch.tensor("
        "[sum(b.labels.numel() for b in micro_batches)]), mesh.dp_sp)\n    divisor",
        "gradients: masked tokens are counted in the divisor",
    ),
    "count of this rank": (
        DP_SP, WHOLE, COUNT, "count_tokens(micro_batches, mesh.tp)\n    divisor",
        "gradients: mean of means: every rank divides by its own loss tokens",
    ),
    "count over dp only": (
        DP_SP, WHOLE, COUNT, "count_tokens(micro_batches, mesh.dp)\n    divisor",
        "gradients: the number of loss tokens is not summed over sp",
    ),
    "last micro-batch dropped": (
        DP, WHOLE, "in micro_batches:", "in micro_batches[:-1]:",
        "gradients: the last micro-batch is left out",
    ),
    "gradients not zeroed": (
        DP, WHOLE, "optimizer.step(lr, skipped)",
        "kept = type('Kept', (dict,), {'clear': dict.copy})(optimizer.main_grads)\n"
        "    optimizer.main_grads = optimizer.grads = kept\n    optimizer.step(lr, skipped)",
        "gradients: not zeroed",
    ),
    "a step for each micro-batch": (
        DP, WHOLE, "optimizer.accumulate_grads()",
        "optimizer.accumulate_grads()\n        optimizer.step(0.0)",
        "optimizer.step is called 4 times",
    ),
    "weight decay on norms": (
        DP, WHOLE, "torch.optim.AdamW(\n        groups",
        "torch.optim.AdamW(\n        [p for g in groups for p in g['params']]",
        "weights: weight decay is also on norms",
    ),
    "rate off by one": (
        DP, WHOLE, "learning_rate(optimizer.updates, ", "learning_rate(optimizer.updates + 1, ",
        "learning rate: that of the next update",
    ),
    "parameters not gathered": (
        DP, SHARDED, "gather_params(optimizer, mesh.dp_sp)", "pass",
        "weights: the weights did not change",
    ),
    "an update without a loss token": (
        DP, WHOLE, "optimizer.step(lr, skipped)", "optimizer.step(lr)",
        "a step without a loss token changes the weights",
    ),
    "divided by no loss token": (
        DP, WHOLE, "loss_tokens.clamp(min=1)", "loss_tokens",
        "inf or NaN (no loss token at all)",
    ),
    "mean of an empty micro-batch": (
        DP, WHOLE, BACKWARD, "(micro_loss_sum / count_tokens([batch], mesh.dp_sp)).backward()",
        "gradients: mean of means: every micro-batch",
    ),
    "documents see each other": (
        DP, WHOLE, "batch.position_ids, batch.documents", "batch.position_ids",
        "documents of a packed row see each other",
    ),
    "no sum over tp in the backward": (
        TP, WHOLE, "\n\n@dataclass(frozen=True)",
        "\nfrom minitrain import tensor_parallel\n\n"
        "tensor_parallel.copy_to = lambda x, axis: x\n\n\n@dataclass(frozen=True)",
        "gradients: not complete over tp",
    ),
}  # fmt: skip


def sentences_of(tmp_path, layout, variants, old: str, new: str, **options) -> list[str]:
    """What parity says about train.py with old replaced by new."""
    assert SOURCE.count(old) == 1, f"{SOURCE.count(old)} places in train.py read {old!r}"
    path = tmp_path / "edited_train.py"
    path.write_text(SOURCE.replace(old, new))
    config = ParityConfig(train_file=path, **options)
    return check_layout_numbers(config, layout, variants)[1]


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_seen_and_named(tmp_path, name):
    """Parity passes a wrong step, or blames something else."""
    layout, variant, old, new, words = MISTAKES[name]
    sentences = sentences_of(tmp_path, layout, [variant], old, new)
    assert any(words in sentence for sentence in sentences), sentences
