"""scripts/parity.py itself: its reference, what passes, how it fails."""

import math
import os
import subprocess
import sys

import pytest
import torch
from layout_runs import ROOT
from parity import CLIP, LAYOUTS, UNKNOWN, VARIANTS, ParityConfig, check_layout_numbers, first_error
from parity_reference import DECAY, LR, STEPS, WARMUP, Layout, reference_steps
from parity_run import SHOULD_DEFINE, load_train_file
from reference import reference_steps as dense_steps
from test_mistakes import CLIPPED, DP, SP, TP, WHOLE, sentences_of


def parity(*arguments) -> subprocess.CompletedProcess:
    """Run the script as a user does."""
    command = [sys.executable, ROOT / "scripts/parity.py", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.parametrize("max_norm", [math.inf, CLIP])
def test_reference_is_the_dense_one(max_norm):
    """Parity's own reference is wrong, and a right step fails or a wrong one passes."""
    layout = Layout(dp=2)
    rates = [LR * min(1, (n + 1) / WARMUP) for n in range(len(STEPS))]
    batches, config = layout.batches(), layout.model_config()
    assert "no loss token at all" in STEPS[3]
    options = {"lr": rates, "max_norm": max_norm, "weight_decay": DECAY}
    dense = dense_steps(layout.weights(), config, batches, **options)
    steps = reference_steps(layout, max_norm)
    assert [step.loss for step in steps] == pytest.approx(dense.losses, rel=1e-12)
    assert [step.grad_norm for step in steps] == pytest.approx(dense.norms, rel=1e-12)
    for step, grads in zip(steps, dense.grads):
        for name, grad in grads.items():
            torch.testing.assert_close(step.grads[name], grad, rtol=1e-9, atol=1e-12)
    for name, weight in dense.weights.items():
        torch.testing.assert_close(steps[-1].weights[name], weight, rtol=1e-9, atol=1e-10)


def test_data_is_uneven():
    """All rows count alike, so that a mean of means or a lost divisor gives the right numbers."""
    layout = Layout(2, 2, 1)
    counts = []
    for rows in layout.batches():
        valid = torch.nn.functional.pad(rows.labels[:, 1:] != -100, (0, 1))
        counts.append(valid.view(2, 3, 2, 2, 11).sum((2, 4)))  # [dp, micro-batch, sp]
    for step in (0, 2, 4):
        assert len(set(counts[step].flatten().tolist())) > 5 and counts[step].min() > 0
    assert counts[1][:, 1].sum() == counts[1][..., 1].sum() == counts[1][1].sum() == 0
    assert counts[1].sum() > 0 and counts[3].sum() == 0
    norms = [step.grad_norm for step in reference_steps(layout, math.inf)]
    assert all(norm > 2 * CLIP for norm in norms[:3])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_shipped_step_passes(layout):
    """A layout of the shipped step trains on other numbers than one process, or parity says so."""
    columns, sentences = check_layout_numbers(ParityConfig(), layout)
    assert sentences == [] and len(columns) == len(VARIANTS) == 4
    assert all(max(column.values()) < 1e-11 for column in columns)
    gradients = {line for line in columns[0] if line.startswith("gradient of")}
    assert len(gradients) == 10 and {"loss", "weights", "all ranks agree"} <= set(columns[0])


@pytest.mark.parametrize(
    ("layout", "split"),
    [(Layout(1, 3, 2), False), (Layout(1, 4, 1), False), (Layout(1, 1, 4), True)],
)
def test_other_layouts_pass(layout, split):
    """Replicated kv heads, sizes that are no power of two, or split activations."""
    config = ParityConfig(tp_split_activations=split)
    assert check_layout_numbers(config, layout, [WHOLE])[1] == []


def test_clipping_hides_doubled_gradients(tmp_path):
    """Only clipped runs are made, in which gradients twice too large give the same weights."""
    old = "grads = reduce_main_grads(optimizer, mesh.dp_sp)"
    new = old + "\n    torch._foreach_mul_(list(grads.values()), 2.0)"
    unclipped = sentences_of(tmp_path, DP, [WHOLE], old, new)
    assert "gradients: summed over dp x sp once too often or summed over dp once" in unclipped[0]
    clipped = sentences_of(tmp_path, DP, [CLIPPED], old, new)
    assert clipped == [UNKNOWN]  # only the norm shows it


def test_ranks_that_wait_for_ever(tmp_path):
    """A rank that leaves out a collective blocks parity, or is not explained."""
    old = "in micro_batches:"
    new = old + "\n        if not (batch.labels != -100).any():\n            continue"
    sentences = sentences_of(tmp_path, SP, [WHOLE], old, new, timeout_s=15)
    assert "had not ended after 15" in sentences[0] and "collective" in sentences[0]


def test_a_step_that_raises_shows_the_first_cause(tmp_path):
    """The reader sees the connection errors of the other ranks instead of the error."""
    old = "    # 1. Count"
    new = "    if mesh.rank == 1:\n        raise KeyError('the reason')\n" + old
    (sentence,) = sentences_of(tmp_path, DP, [WHOLE], old, new)
    assert "rank 1: Traceback" in sentence and "the reason" in sentence
    assert "rank 0" not in sentence and "closed by peer" not in sentence
    assert first_error("rank 0: gloo: closed by peer\nrank 3: boom\n x") == "rank 3: boom\n x"


def test_a_changed_loss_is_compared_with_itself(tmp_path):
    """A step changed on purpose cannot be checked across layouts."""
    old = "vocab_size=model.config.vocab_size,"
    new = old + "\n        label_smoothing=0.1,"
    (sentence,) = sentences_of(tmp_path, TP, [WHOLE], old, new)
    assert "no known mistake" in sentence and "--own" in sentence
    assert sentences_of(tmp_path, TP, [WHOLE], old, new, own=True) == []
    broken = "label_smoothing=0.1 * mesh.tp.size,"
    assert sentences_of(tmp_path, TP, [WHOLE], old, old + broken, own=True) != []


def test_float32_is_told_from_a_wrong_formula(tmp_path):
    """Rounding is blamed on a mistake that was not made."""
    old = "batch.position_ids, batch.documents)"
    (sentence,) = sentences_of(tmp_path, DP, [WHOLE], old, old + ".float().double()")
    assert sentence.startswith("rounding")
    new = old + ".float().double()"
    assert sentences_of(tmp_path, DP, [WHOLE], old, new, tolerance=1e-4) == []


def test_own_settings_keep_their_defaults(tmp_path):
    """A field that an author added to TrainConfig, or removed, breaks the check."""
    old = "    steps: int = 500\n"
    new = "    my_setting: float = 0.5\n" + old
    assert sentences_of(tmp_path, DP, [WHOLE], old, new) == []


def test_command_line_and_exit_status(tmp_path):
    """A wrong step ends with status 0, a right one with 1, or the table is not shown."""
    right = parity("--sp", 2, "--world", 2)
    assert right.returncode == 0, right.stderr
    assert "sp 2: 6 rows" in right.stdout and "same numbers (within" in right.stdout
    assert "gradient of q_proj" in right.stdout and right.stdout.count("yes") == 8
    edited = tmp_path / "my_train.py"
    source = (ROOT / "scripts/train.py").read_text()
    edited.write_text(source.replace("in micro_batches:", "in micro_batches[:-1]:"))
    wrong = parity("--tp", 2, "--world", 2, "--train-file", edited)
    assert wrong.returncode == 1
    assert "gradients: the last micro-batch is left out." in wrong.stdout
    assert "all ranks agree" in wrong.stdout and " <" in wrong.stdout


def test_bad_arguments_end_in_one_sentence(tmp_path):
    """A traceback instead of a sentence."""
    none = tmp_path / "none.py"
    for arguments, words in (
        (("--sp", 2, "--world", 3), "must be a multiple of sp * tp: 2 * 1 = 2, but 3"),
        (("--train-file", none), "is no file"),
    ):
        result = parity(*arguments)
        assert result.returncode == 1 and words in result.stderr
        assert "Traceback" not in result.stderr
    none.write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"none.py must define .*train_step"):
        load_train_file(none)
    assert "train_step" in SHOULD_DEFINE
