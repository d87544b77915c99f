"""neuronx-distributed side by side with ours: equal where it is right, and where it is wrong.

Needs a checkout of aws-neuron/neuronx-distributed, its src/ named by MINITRAIN_NXD_SRC.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minitrain.attention import fixed_shape_attention
from minitrain.device import Device
from minitrain.mesh import init_mesh
from minitrain.model import causal_attention

needs_nxd = pytest.mark.skipif(
    not os.environ.get("MINITRAIN_NXD_SRC"), reason="needs MINITRAIN_NXD_SRC, a checkout's src/"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What both ranks of nxd_cases.py measured; they agree."""
    store = tmp_path_factory.mktemp("nxd") / "store"
    script = Path(__file__).parent / "nxd_cases.py"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(store), str(rank)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = []
    for rank in ranks:
        out, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors[-4000:]
        results.append(json.loads(out.splitlines()[-1]))
    return results[0]


@needs_nxd
def test_layers_and_norm_agree(found):
    """Red when our column, row and embedding layers or our norm differ from theirs."""
    assert max(found["layers"].values()) < 1e-5, found["layers"]


@needs_nxd
def test_loss_agrees_without_masks(found):
    """Red when the two losses over a split vocabulary differ where every token counts."""
    plain = found["plain"]
    assert max(plain[key] for key in ("their_loss", "their_grad", "our_loss", "our_grad")) < 1e-5


@needs_nxd
def test_their_ignored_tokens_have_a_loss_and_ours_none(found):
    """Red when -100 means something in our loss; documents that it does in theirs."""
    masked = found["masked"]
    assert min(masked["their_masked_loss"]) > 0.1
    assert min(masked["their_masked_grad"]) > 0.1
    assert masked["our_masked_grad"] == [0.0] * 3
    assert max(masked["our_loss"], masked["our_grad"]) < 1e-5


@needs_nxd
def test_their_label_smoothing_is_another_loss(found):
    """Red when our label smoothing is not torch's; documents that theirs is not."""
    smoothed = found["smoothed"]
    assert max(smoothed["our_loss"], smoothed["our_grad"]) < 1e-5
    assert smoothed["their_loss"] > 1e-3
    assert smoothed["their_grad"] > 1e-1


@needs_nxd
def test_their_ranks_are_whole(found):
    """Red when mesh_only no longer returns the groups that init_mesh reads."""
    assert [sorted(group) for group in found["tp_groups"]] == [[0, 1]]


def test_the_mesh_takes_their_order_of_ranks():
    """Red when strided groups, as theirs on Trainium 1 with tp 4, are not ours."""
    groups = [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]

    def initialize_model_parallel(tp, mesh_only):
        assert tp == 4
        assert mesh_only
        return SimpleNamespace(tp_groups=groups)

    class Trainium(Device):
        nxd = SimpleNamespace(
            parallel_layers=SimpleNamespace(
                parallel_state=SimpleNamespace(initialize_model_parallel=initialize_model_parallel)
            )
        )

        def __init__(self, number):
            self.number, self.made = number, []

        def rank(self):
            return self.number

        def world_size(self):
            return 16

        def make_group(self, all_ranks, rank):
            self.made.append(all_ranks)
            return next(ranks for ranks in all_ranks if rank in ranks)

    for rank in range(16):
        device = Trainium(rank)
        mesh = init_mesh(sp=2, tp=4, device=device)
        assert groups in device.made
        for axis in (mesh.dp, mesh.sp, mesh.tp, mesh.dp_sp):
            assert axis.group[axis.rank] == rank


def test_the_kernel_gets_what_it_asks_for():
    """Red when q, k, v reach the kernel in another layout, or rows it cannot take reach it."""
    calls = []

    def kernel(q, k, v, lnc, softmax_scale, causal):
        calls.append((tuple(q.shape), tuple(k.shape)))
        q, k, v = (x.transpose(2, 3) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=softmax_scale
        )

    flash = SimpleNamespace(flash_attn=SimpleNamespace(nki_flash_attn_func=kernel))
    attend = fixed_shape_attention(causal_attention, SimpleNamespace(kernels=flash))
    generator = torch.Generator().manual_seed(0)
    for length, documents in ((2048, None), (2047, None), (64, torch.arange(64)[None] // 24)):
        q = torch.randn(1, length, 4, 8, generator=generator)
        k, v = (torch.randn(1, length, 2, 8, generator=generator) for _ in range(2))
        want = causal_attention(q, k, v, documents, 0.3)
        torch.testing.assert_close(attend(q, k, v, documents, 0.3), want, atol=1e-5, rtol=1e-4)
    assert calls == [((1, 4, 8, 2048), (1, 4, 8, 2048))]
