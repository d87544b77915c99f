"""Plan a run: for every layout of the devices, the memory it takes and the bytes it sends.

python scripts/plan.py --model llama-3.2-1b --devices 8 --memory-gb 24 --seq-len 32768
python scripts/plan.py --model DIR --devices 64 --memory-gb 96 --seq-len 131072

The formulas are in the docstrings of parameters, kept, working, memory and sent. Letters: P
parameters of one tp rank, R ranks of dp x sp, N tokens of a micro-batch on one rank, n those of a
tile, L layers, D model, H query heads, G kv heads, K head size, F feed-forward, V vocabulary; e
bytes of a parameter or activation, f bytes of a master (4, or 8 in float64). Small letters h, g, w,
v: H, G, F, V of one tp rank.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

import torch
import tyro

from minitrain.mesh import Axis, Mesh, check_layout, check_model
from minitrain.model import CausalLM, ModelConfig
from minitrain.model_sharder import shard_model
from minitrain.setup import DTYPES, find_model

PARTS = ("weights", "gradients", "optimizer", "activations", "working", "logits", "process")


@dataclass(frozen=True)
class PlanConfig:
    """Plan a run: for every layout of the devices, the memory it takes and the bytes it sends."""

    model: str = "tiny"
    """A preset, or a Hugging Face directory; only its config.json is read."""
    devices: int = 1
    """Processes, one a device: dp x sp x tp."""
    memory_gb: float = 80.0
    """Memory of one device, in units of 1e9 bytes."""
    seq_len: int = 4096
    """Tokens per row."""
    batch_size: int = 0
    """Rows of the global batch; 0: one for each device."""
    micro_batch_size: int = 1
    """Rows per forward and backward on one rank."""
    activation_checkpointing: Literal["none", "full", "offload"] = "full"
    """As in train.py; offload as on cuda."""
    tile_tokens: int = 1024
    """As in train.py."""
    tp_split_activations: bool = False
    """As in train.py."""
    shard_optimizer: bool = True
    """As in train.py."""
    dtype: Literal["bf16", "fp32", "fp64"] = "bf16"
    """As in train.py."""
    process_gb: float = 0.4
    """What the process takes before the model: torch and its libraries, measured on cpu. A cuda
    device's own share is not in torch's figures; 0.5 is usual."""


@dataclass(frozen=True)
class Layout:
    """One way to lay out the devices, and the sizes that follow: letters as at the top."""

    dp: int
    sp: int
    tp: int
    model: ModelConfig
    config: PlanConfig

    @property
    def R(self) -> int:
        return self.dp * self.sp

    @property
    def N(self) -> int:
        return self.config.micro_batch_size * -(-self.config.seq_len // self.sp)

    @property
    def n(self) -> int:
        return min(self.config.tile_tokens or self.N, self.N)

    @property
    def e(self) -> int:
        return DTYPES[self.config.dtype].itemsize

    @property
    def f(self) -> int:
        return max(4, self.e)

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Elements for each token: hK, gK (with copies for sp), w, and v of the head."""
        m, t = self.model, self.tp
        kv_heads = max(m.num_kv_heads // t, 1)
        kv = max(kv_heads, self.sp) if self.sp > 1 else kv_heads
        heads = m.num_heads // t
        return (
            heads * m.head_dim,
            kv * m.head_dim,
            -(-m.intermediate_size // t),
            -(-m.vocab_size // t),
        )

    @property
    def tiled(self) -> bool:
        return self.n < self.N

    @property
    def micro_batches(self) -> int:
        rows = self.config.batch_size or self.config.devices
        return rows // (self.dp * self.config.micro_batch_size)


def parameters(layout: Layout) -> int:
    """P: counted on this rank's share of the model, which is made without memory."""
    with torch.device("meta"):
        model = CausalLM(layout.model)
        shard_model(model, Mesh(tp=Axis("tp", layout.tp)))
    return sum(p.numel() for p in model.parameters())


def kept(layout: Layout, mode: str) -> int:
    """Bytes that a block's forward pass keeps for its backward pass.

    none      N e (2 D + 2 D + 2 hK + 2 gK + 3 w): inputs and outputs of both norms; q, o, k, v;
              gate, up and their product, which tiles leave out. With sp, o a second time, as it
              comes back. tp_split_activations divides the norms' inputs by tp. And N f (2 + h).
    full      N e (D + hK) + N f h: the block's input, and what its attention returned; the latter
              is not kept on devices that compile
    offload   nothing on the device, save two inputs on their way (see memory)
    """
    D, N, e = layout.model.hidden_size, layout.N, layout.e
    hK, gK, w, _ = layout.widths
    split = layout.tp if layout.config.tp_split_activations else 1
    heads = hK // layout.model.head_dim
    if mode != "none":
        return N * (e * (D // split + hK) + layout.f * heads) if mode == "full" else 0
    mlp = 0 if layout.tiled else 3 * w
    outputs = 2 * D // split + 2 * D + (3 if layout.sp > 1 else 2) * hK + 2 * gK + mlp
    return N * (e * outputs + layout.f * (2 + heads))


def working(layout: Layout) -> int:
    """Bytes of the block that is being computed, at the widest place of its backward pass.

    A checkpointed block first keeps what `kept` says for none. Beside it the larger of
    attention     N (e (3 D + 3 hK + 4 gK) + 2 f D): gradients of q, k, v, o and of the norm
    MLP           n e 6 w + 3 f w D: a tile's gate, up, product and their gradients; the weights'
                  gradients summed over tiles. Without tiles N e 3 w
    """
    D, N, n, e, f = layout.model.hidden_size, layout.N, layout.n, layout.e, layout.f
    hK, gK, w, _ = layout.widths
    again = kept(layout, "none") if layout.config.activation_checkpointing != "none" else 0
    attention = N * (e * (3 * D + 3 * hK + 4 * gK) + 2 * f * D)
    mlp = n * e * 6 * w + 3 * f * w * D if layout.tiled else N * e * 3 * w
    return again + max(attention, mlp + 2 * N * e * D)


def memory(layout: Layout, num_params: int) -> dict[str, float]:
    """Bytes of one device by part, at the peak of a step.

    weights       e P
    gradients     e P, the model's own, and f P main gradients. They come as activations go, so only
                  what exceeds activations, working and logits counts; but from the second
                  micro-batch on all of f P is beside these (on devices that compile always: not
                  counted here). With several ranks 192 MiB more, three buckets whose sums are under
                  way, and when sharded f P / R, the pieces
    optimizer     3 f P, divided by R when sharded: masters and two moments
    activations   L kept + N (e (3 D + K) + 24): hidden states at both ends, RoPE tables, ids.
                  Without checkpointing 1.5 L kept: what an allocator loses between tensors that
                  are kept and tensors that are freed, measured with glibc at 4,096 tokens
    working       see there
    logits        n v e, and n v f more under tp; the head's gradient f v D
    process       what --process-gb says
    """
    m, c, P, e, f = layout.model, layout.config, num_params, layout.e, layout.f
    v, shards = layout.widths[3], layout.R if c.shard_optimizer else 1
    mode, split = c.activation_checkpointing, layout.tp if c.tp_split_activations else 1
    ends = layout.N * (e * (3 * m.hidden_size + m.head_dim) + 24)
    on_the_way = 2 * layout.N * e * m.hidden_size // split if mode == "offload" else 0
    lost = 1.5 if mode == "none" else 1
    passing = {
        "activations": lost * m.num_layers * kept(layout, mode) + on_the_way + ends,
        "working": working(layout),
        "logits": layout.n * v * (e + (f if layout.tp > 1 else 0)) + f * v * m.hidden_size,
    }
    beside = f * P if layout.micro_batches > 1 else 0
    after = max(0, (e + f) * P - beside - sum(passing.values()))
    sums = (3 * 2**26 if layout.R > 1 else 0) + (f * P / shards if shards > 1 else 0)
    return {
        "weights": e * P,
        "gradients": beside + after + sums,
        "optimizer": 3 * f * P / shards,
        **passing,
        "process": 1e9 * c.process_gb,
    }


def sent(layout: Layout, num_params: int) -> dict[str, float]:
    """Bytes that one device sends in a step, by axis; an all-reduce sends what a reduce-scatter and
    an all-gather send.

    dp_sp   P (e + f) (R-1)/R when the optimizer is sharded, else 2 P f (R-1)/R
    sp      a layer, forward or backward: N e (2 hK + 2 gK) (sp-1)/sp: q, k, v and o
    tp      a layer, forward or backward: 2 all-reduces of N e D; one more for embedding and head

    Each micro-batch goes through a layer twice, with checkpointing three times: then the exchanges
    of attention are made again.
    """
    m, R, e, f = layout.model, layout.R, layout.e, layout.f
    hK, gK, _, _ = layout.widths
    again = layout.config.activation_checkpointing != "none"
    passes = layout.micro_batches * m.num_layers * (3 if again else 2)
    share = {size: (size - 1) / size for size in (R, layout.sp, layout.tp)}
    reduces = layout.micro_batches * (m.num_layers * (5 if again else 4) + 2)
    weights = e + f if layout.config.shard_optimizer else 2 * f
    return {
        "dp_sp": num_params * weights * share[R],
        "sp": passes * layout.N * e * 2 * (hK + gK) * share[layout.sp],
        "tp": reduces * 2 * layout.N * e * m.hidden_size * share[layout.tp],
    }


def layouts(model: ModelConfig, config: PlanConfig) -> tuple[list[Layout], dict[str, list[str]]]:
    """Every layout that the rules allow, and for the others: rule -> layouts that break it."""
    allowed, refused = [], {}
    divisors = [n for n in range(1, config.devices + 1) if config.devices % n == 0]
    for sp, tp in (
        (sp, tp) for sp in divisors for tp in divisors if config.devices % (sp * tp) == 0
    ):
        dp = check_layout(config.devices, sp, tp)
        rows = config.batch_size or config.devices
        try:
            check_model(sp, tp, model.num_heads, model.num_kv_heads, model.intermediate_size)
            if rows % (dp * config.micro_batch_size):
                raise ValueError("the batch must be a multiple of dp * micro-batch")
            allowed.append(Layout(dp, sp, tp, model, config))
        except ValueError as error:
            refused.setdefault(str(error).split(":")[0], []).append(f"{dp}x{sp}x{tp}")
    return allowed, refused


def plan(config: PlanConfig) -> str:
    """The table: layouts that fit, least communication first, then those that do not, and why."""
    for name in ("devices", "memory_gb", "seq_len", "micro_batch_size"):
        if getattr(config, name) <= 0:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be positive, not {getattr(config, name)}.")
    model, _ = find_model(config.model)
    allowed, refused = layouts(model, config)
    sizes = dict.fromkeys(sorted({layout.tp for layout in allowed}), 0)
    rows = []
    for layout in allowed:
        sizes[layout.tp] = P = sizes[layout.tp] or parameters(layout)
        parts, bytes_sent = memory(layout, P), sent(layout, P)
        rows.append((sum(parts.values()), sum(bytes_sent.values()), layout, parts, bytes_sent))
    room = config.memory_gb * 1e9
    rows.sort(key=lambda row: (row[0] > room, row[1] if row[0] <= room else row[0]))
    heads = ["dp x sp x tp", *PARTS, "total GB", "fits", "dp_sp", "sp", "tp"]
    lines = [
        f"{config.model}: {config.devices} devices of {config.memory_gb:g} GB, rows of "
        f"{config.seq_len:,} tokens, checkpointing {config.activation_checkpointing}, tiles of "
        f"{config.tile_tokens:,} tokens. GB of one device; the last three: GB it sends a step.",
        " ".join(f"{head:>12}" for head in heads),
    ]
    for total, _, layout, parts, bytes_sent in rows:
        cells = [
            f"{layout.dp} x {layout.sp} x {layout.tp}",
            *(f"{parts[p] / 1e9:.2f}" for p in PARTS),
        ]
        cells += [f"{total / 1e9:.2f}", "yes" if total <= room else "no"]
        cells += [f"{size / 1e9:.2f}" for size in bytes_sent.values()]
        lines.append(" ".join(f"{cell:>12}" for cell in cells))
    too_large = sum(row[0] > room for row in rows)
    why = [f"{too_large} need more than {config.memory_gb:g} GB"] if too_large else []
    why += [f"{rule} ({', '.join(names)})" for rule, names in refused.items()]
    return "\n".join([*lines, f"not possible: {'; '.join(why)}." if why else "all fit."])


if __name__ == "__main__":
    try:
        print(plan(tyro.cli(PlanConfig)))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
