"""train_step, evaluation and the loop as a whole, on the faults of CASES that show only there."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import lively_weights, tiny_config, uneven_rows
from layout_runs import SETTINGS, build, train
from reference import reference_steps
from token_files import write_token_file

from minitrain.data_sharder import shard_batch
from minitrain.dataset import Rows, open_dataset
from minitrain.launch import run_ranks
from minitrain.mesh import init_mesh
from minitrain.model_sharder import gather_state_dict
from minitrain.schedule import learning_rate

CONFIG = tiny_config()
WEIGHTS = lively_weights(CONFIG)
BASE = replace(SETTINGS, batch_size=4, micro_batch_size=1, steps=5)


def masked_rows(num_rows: int = 4, length: int = 12, but_row: int | None = None):
    """Rows whose labels are all masked, save those of one row."""
    rows = uneven_rows(num_rows, length)
    for row in range(num_rows):
        if row != but_row:
            rows.labels[row] = -100
    return rows


def train_on(batches: list, changes: dict, weights=WEIGHTS, before=None) -> SimpleNamespace:
    """Make a step on each global batch, on this rank; the state before and after is kept."""
    settings = replace(BASE, **changes)
    mesh = init_mesh(settings.sp, settings.tp)
    run = build(mesh, settings, CONFIG, weights)
    if before is not None:
        before(run, mesh)
    steps, states = [], []
    for rows in batches:
        micro_batches = shard_batch(rows, mesh).split(settings.micro_batch_size)
        metrics = train.train_step(
            run.model, run.optimizer, micro_batches, mesh, run.spec, settings
        )
        steps.append({name: value.item() for name, value in metrics.items()})
        state = run.optimizer.optimizer.state
        moments = [t.clone() for s in state.values() for t in s.values()]
        params = [p.detach().clone() for p in run.model.parameters()]
        masters = [m.detach().clone() for m in run.optimizer.masters.values()]
        states.append([*moments, *params, *masters, run.optimizer.updates.clone()])
    weights = gather_state_dict(run.model, run.spec, mesh)
    return SimpleNamespace(steps=steps, states=states, weights=weights)


def on_ranks(world: int, batches: list, changes: dict, **more) -> list[SimpleNamespace]:
    return run_ranks(lambda: train_on(batches, changes, **more), world, timeout_s=120)


def same_as_reference(runs: list[SimpleNamespace], batches: list, **settings) -> None:
    """Loss, norm and weights of every rank equal the dense float64 ones."""
    want = reference_steps(WEIGHTS, CONFIG, batches, lr=1e-3, **settings)
    for run in runs:
        assert [s["loss"] for s in run.steps] == pytest.approx(want.losses, rel=1e-10)
        assert [s["grad_norm"] for s in run.steps] == pytest.approx(want.norms, rel=1e-10)
        for name, weight in want.weights.items():
            torch.testing.assert_close(run.weights[name], weight, rtol=1e-9, atol=1e-11)


LAYOUTS = [(1, {}), (2, {}), (2, {"sp": 2}), (2, {"tp": 2}), (8, {"sp": 2, "tp": 2})]


@pytest.mark.parametrize(("world", "changes"), LAYOUTS)
@pytest.mark.parametrize("max_norm", [1.0, float("inf")])
def test_uneven_masks_equal_the_reference(world, changes, max_norm):
    """Red for a mean of means, or gradients off by a factor that clipping hides (cases 1, 2,
    41).
    """
    batches = [uneven_rows(), masked_rows(but_row=2), uneven_rows(length=11)]
    runs = on_ranks(world, batches, {**changes, "max_grad_norm": max_norm})
    same_as_reference(runs, batches, max_norm=max_norm)


def test_short_last_window():
    """Red when a window of 3 micro-batches is divided as one of 4 (case 6)."""
    batches = [uneven_rows(4), uneven_rows(3)]
    same_as_reference(on_ranks(1, batches, {}), batches)


def test_sequence_that_sp_does_not_divide():
    """Red when padding to sp adds loss tokens or moves positions (case 16)."""
    for length in (9, 10, 11):
        batches = [uneven_rows(length=length)]
        same_as_reference(on_ranks(4, batches, {"sp": 4}), batches)


@pytest.mark.parametrize(("world", "changes"), [(1, {}), (4, {"sp": 2}), (2, {"tp": 2})])
def test_step_without_labels_changes_nothing(world, changes):
    """Red when a step without a loss token decays weights, moves moments or counts as an update;
    the next step then differs from a run without it (case 3).
    """
    empty, full = masked_rows(), uneven_rows()
    for with_it, without in zip(
        on_ranks(world, [full, empty, full], changes), on_ranks(world, [full, full], changes)
    ):
        assert [s["skipped"] for s in with_it.steps] == [False, True, False]
        assert with_it.steps[1]["loss_tokens"] == 0 and with_it.steps[1]["loss"] == 0
        for before, after in zip(with_it.states[0], with_it.states[1]):
            assert torch.equal(before, after)
        assert with_it.steps[2] == without.steps[1]
        for a, b in zip(with_it.states[2], without.states[1]):
            assert torch.equal(a, b)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize(("world", "changes"), [(2, {}), (2, {"sp": 2}), (2, {"tp": 2})])
def test_one_bad_rank_stops_all_from_updating(value, world, changes):
    """Red when ranks decide apart whether a gradient is finite: weights then differ (case 23)."""

    def poison(run, mesh):
        if mesh.rank == world - 1:
            name = "model.layers.0.mlp.up_proj.weight"
            weight = run.model.get_parameter(name)
            weight.register_hook(lambda grad: torch.full_like(grad, value))

    for run in on_ranks(world, [uneven_rows()] * 2, changes, before=poison):
        assert [s["skipped"] for s in run.steps] == [True, True]
        assert int(run.states[-1][-1]) == 0
        for name, weight in WEIGHTS.items():
            assert torch.equal(run.weights[name], weight)


@pytest.mark.parametrize(("world", "changes"), [*LAYOUTS, (4, {"tp": 4}), (4, {"sp": 2, "tp": 2})])
def test_replicated_parameters_stay_equal(world, changes):
    """Red when norms or other replicated parameters drift apart between ranks (case 25)."""

    def five():
        settings = replace(BASE, **changes)
        mesh = init_mesh(settings.sp, settings.tp)
        run = build(mesh, settings, CONFIG, WEIGHTS)
        for step in range(5):
            rows = uneven_rows(length=12 - step)
            micro_batches = shard_batch(rows, mesh).split(1)
            train.train_step(run.model, run.optimizer, micro_batches, mesh, run.spec, settings)
        params = dict(run.model.named_parameters())
        whole = {name: p.detach() for name, p in params.items() if run.spec[name] is None}
        split = {name: p.detach() for name, p in params.items() if run.spec[name] is not None}
        return mesh.tp.rank, whole, split

    ranks = run_ranks(five, world, timeout_s=120)
    for place, whole, split in ranks[1:]:
        assert all(torch.equal(p, ranks[0][1][name]) for name, p in whole.items())
        twin = next(other for other in ranks if other[0] == place)
        assert all(torch.equal(p, twin[2][name]) for name, p in split.items())


def test_norm_is_reported_without_clipping_and_once_per_update():
    """Red when inf turns the norm off, or clipping runs once per micro-batch (case 22)."""
    batches = [uneven_rows()]
    (free,) = on_ranks(1, batches, {"max_grad_norm": float("inf")})
    (clipped,) = on_ranks(1, batches, {"max_grad_norm": 1e-3})
    assert free.steps[0]["grad_norm"] == clipped.steps[0]["grad_norm"] > 1e-3


def test_warm_up():
    """Red when accumulation, dp or skipped steps advance the schedule (case 37)."""
    settings = replace(BASE, lr=1.0, warmup_steps=10, steps=100)
    rates = [learning_rate(torch.tensor([n]), settings).item() for n in range(12)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("schedule", "at", "want"),
    [
        ("constant", 99, 1.0),
        ("cosine", 99, 0.1),
        ("cosine", 54, 0.55),
        ("wsd", 79, 1.0),
        ("wsd", 89, 0.55),
        ("wsd", 99, 0.05),
    ],
)
def test_schedules(schedule, at, want):
    """Red when a schedule ends elsewhere than it says."""
    settings = replace(BASE, lr=1.0, warmup_steps=10, steps=100, schedule=schedule)
    assert learning_rate(torch.tensor([at]), settings).item() == pytest.approx(want)


def held_out(directory):
    path = directory / "held_out.bin"
    documents = [list(range(1, 2 + n)) for n in (9, 17, 4, 11, 8)]
    write_token_file(path, documents)
    return open_dataset([path], None, 12, vocab_size=64)


@pytest.mark.parametrize(("world", "changes"), [(1, {}), (4, {"sp": 2}), (8, {"sp": 2, "tp": 2})])
def test_evaluation_counts_each_row_once(tmp_path, world, changes):
    """Red for a mean over rows or ranks, or for padding rows that count (case 11)."""
    data = held_out(tmp_path)
    rows = data.rows(range(data.num_rows))
    want = reference_steps(WEIGHTS, CONFIG, [rows], lr=0.0)

    def run():
        settings = replace(BASE, micro_batch_size=2, **changes)
        mesh = init_mesh(settings.sp, settings.tp)
        return train.evaluate(build(mesh, settings, CONFIG, WEIGHTS).model, data, mesh, settings)

    results = run_ranks(run, world, timeout_s=120)
    assert all(result == results[0] for result in results)
    assert results[0]["eval_loss"] == pytest.approx(want.losses[0], rel=1e-10)


def test_evaluation_leaves_training_alone(tmp_path):
    """Red when an evaluation draws random numbers, leaves gradients or updates anything (case
    11).
    """
    data = held_out(tmp_path)

    def with_evaluation(run, mesh):
        train.evaluate(run.model, data, mesh, BASE)

    batches = [uneven_rows(), uneven_rows(length=10)]
    plain, evaluated = train_on(batches, {}), train_on(batches, {}, before=with_evaluation)
    assert plain.steps == evaluated.steps
    assert all(torch.equal(a, b) for a, b in zip(plain.states[-1], evaluated.states[-1]))


def test_steps_and_tokens_do_not_depend_on_the_layout(tmp_path):
    """Red when a layout changes which rows make a step, or counts tokens per rank (17 to 19)."""
    path = tmp_path / "data.bin"
    documents = [list(range(1, 60))] * 9
    write_token_file(path, documents)
    data = open_dataset([path], None, 8, vocab_size=64)

    def seen(sp: int, tp: int):
        mesh = init_mesh(sp, tp)
        batches = [shard_batch(data.batch(step, 8), mesh) for step in range(12)]
        return mesh.dp.rank, mesh.sp.rank, [b.input_ids.tolist() for b in batches]

    want = [data.batch(step, 8).input_ids.tolist() for step in range(12)]
    for world, sp, tp in ((1, 1, 1), (2, 1, 2), (4, 2, 1), (8, 2, 2)):
        ranks = run_ranks(seen, world, sp, tp)
        shares = {(dp, part): batches for dp, part, batches in ranks}
        for dp, part, batches in ranks:
            assert batches == shares[dp, part]  # neighbours along tp see the same
        for step in range(12):
            rows = []
            for dp in range(world // (sp * tp)):
                slices = [shares[dp, part][step] for part in range(sp)]
                rows += [[t for part in cut for t in part] for cut in zip(*slices)]
            assert rows == want[step]


def test_rows_object_is_enough():
    """Red when shard_batch needs more of its rows than token ids."""
    rows = Rows(*(torch.arange(8).view(1, 8).numpy() for _ in range(3)), None)
    assert shard_batch(rows, init_mesh()).labels.tolist() == [[1, 2, 3, 4, 5, 6, 7, -100]]
