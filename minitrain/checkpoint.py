"""The state of training as a checkpoint that any layout can go on from.

Saved are the float32 masters, the optimizer's state for each, the number of updates and of steps,
and the device's random state; not the model, which is the masters rounded, nor what is frozen.
Every rank of dp x sp writes its part of each tensor, whether the optimizer is sharded or not; ranks
along tp write their shares, and what they all have is written by the first.

The batch of a step is a function of (seed, step): the step is the position in the data.
"""

from __future__ import annotations

import json
from collections import defaultdict
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from minitrain.agreement import host_axis, together
from minitrain.bf16_optimizer import BF16Optimizer
from minitrain.checkpoint_files import (
    Piece,
    PieceFile,
    damaged,
    fsync,
    overlaps,
    read_manifest,
    write_manifest,
    write_pieces,
)
from minitrain.grad_reducer import gather_params
from minitrain.log import progress
from minitrain.mesh import Mesh, ShardSpec
from minitrain.model_sharder import share_slices

SCALAR = Piece.whole(())


def load_checkpoint(path: Path, optimizer: BF16Optimizer, shard_spec: ShardSpec, mesh: Mesh) -> int:
    """Put a checkpoint of any layout into a fresh optimizer and its model, on every rank.

    A rank reads what it needs, block by block, and verifies all that it reads.

    Returns        steps made
    Communicates   words over all ranks; all-gather over dp_sp of the model when sharded
    Raises         ValueError on every rank when a file is missing, damaged, or of another model
    """
    with together(host_axis(mesh.device)):
        step = _load(Path(path), optimizer, shard_spec, mesh)
    with torch.no_grad():
        if optimizer.num_shards == 1:
            for name, param in optimizer.params.items():
                param.copy_(optimizer.masters[name])
        gather_params(optimizer, mesh.dp_sp)
    return step


def state_pieces(
    optimizer: BF16Optimizer, spec: ShardSpec, mesh: Mesh
) -> dict[str, tuple[Tensor, Piece]]:
    """What this rank saves: name -> flat tensor on the device, and which piece it is."""
    pieces = {}
    for name, master in optimizer.masters.items():
        held = _piece(name, optimizer, spec, mesh, optimizer.num_shards, optimizer.shard_rank)
        saved = _piece(name, optimizer, spec, mesh, mesh.dp_sp.size, mesh.dp_sp.rank)
        part = slice(saved.begin - held.begin, saved.end - held.begin)
        repeated = spec[name] is None and mesh.tp.rank > 0
        for key, tensor in {"master": master, **optimizer.optimizer.state.get(master, {})}.items():
            if isinstance(tensor, Tensor) and tensor.shape == master.shape:
                if saved.begin < saved.end and not repeated:
                    pieces[f"{key}/{name}"] = tensor.detach().reshape(-1)[part], saved
            elif isinstance(tensor, Tensor) and tensor.numel() == 1:
                if mesh.rank == 0:
                    pieces[f"{key}/{name}"] = tensor.detach().reshape(1), SCALAR
            elif tensor is not None:
                raise ValueError(
                    "an optimizer's state must be tensors of the parameter's shape, or of one "
                    f"element, to be saved, but {key} of {name} is {type(tensor).__name__} "
                    f"{list(getattr(tensor, 'shape', []))}. Choose another optimizer."
                )
    others = {"updates": optimizer.updates} if mesh.rank == 0 else {}
    others[f"random_state/{mesh.rank}"] = mesh.device.random_state()
    return pieces | {name: (flat, Piece.whole(flat.shape)) for name, flat in others.items()}


def pieces_on_host(
    optimizer: BF16Optimizer, spec: ShardSpec, mesh: Mesh, buffers: dict[str, Tensor]
) -> dict[str, tuple[Tensor, Piece]]:
    """Copies of state_pieces on the host; waits for the device.

    buffers    name -> host tensor, filled here and used again: new memory is what costs most
    """
    pieces = state_pieces(optimizer, spec, mesh)
    for name, (tensor, _) in pieces.items():
        if name not in buffers or buffers[name].shape != tensor.shape:
            pinned = tensor.device.type == "cuda"
            buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        buffers[name].copy_(tensor, non_blocking=True)
    mesh.device.wait()
    return {name: (buffers[name], piece) for name, (_, piece) in pieces.items()}


def write_rank(part: Path, rank: int, tensors: dict[str, tuple[Tensor, Piece]]) -> None:
    """Write this rank's file into the directory part, and beside it what the manifest needs."""
    part.mkdir(parents=True, exist_ok=True)
    file = part / f"rank-{rank:05d}.safetensors"
    try:
        entry = write_pieces(file, tensors)
        file.with_suffix(".json").write_text(json.dumps(entry))
    except OSError:
        file.unlink(missing_ok=True)  # makes room on a full disk
        raise


def publish(part: Path, path: Path, step: int, mesh: Mesh, settings: dict) -> None:
    """Turn part, with every rank's file on the disk, into the checkpoint path; on one rank."""
    files = {}
    for rank in range(mesh.world_size):
        entry = part / f"rank-{rank:05d}.json"
        files[f"{entry.stem}.safetensors"] = json.loads(entry.read_text())
        entry.unlink()
    layout = {axis: getattr(mesh, axis).size for axis in ("dp", "sp", "tp")}
    write_manifest(part, {"step": step, "layout": layout, "settings": settings, "files": files})
    part.rename(path)
    fsync(path.parent)


def _load(path: Path, optimizer: BF16Optimizer, spec: ShardSpec, mesh: Mesh) -> int:
    manifest = read_manifest(path)
    files = [PieceFile(path / name, entry) for name, entry in manifest["files"].items()]
    index = defaultdict(lambda: defaultdict(list))  # parameter -> what of it -> files
    for file in files:
        for name in file.pieces:
            key, _, of = name.partition("/")
            index[of][key].append(file)
    _check_model(path, index, optimizer, spec)
    states = {}
    for name, master in progress(optimizer.masters.items(), "resuming", mesh.rank):
        held = _piece(name, optimizer, spec, mesh, optimizer.num_shards, optimizer.shard_rank)
        states[master] = {}
        for key, found in index[name].items():
            scalar = found[0].pieces[f"{key}/{name}"] == SCALAR and held != SCALAR
            like = torch.empty(()) if scalar else master
            tensor = _read(path, f"{key}/{name}", found, SCALAR if scalar else held, like)
            if key == "master":
                master.data.copy_(tensor)
            else:
                states[master][key] = tensor
    inner = optimizer.optimizer  # torch knows on which device a state is, and in which dtype
    params = [param for group in inner.param_groups for param in group["params"]]
    numbered = {number: states[param] for number, param in enumerate(params) if states[param]}
    inner.load_state_dict({"state": numbered, "param_groups": inner.state_dict()["param_groups"]})
    updates = optimizer.updates
    updates.copy_(_read(path, "updates", index[""]["updates"], Piece.whole((1,)), updates))
    if all(getattr(mesh, axis).size == size for axis, size in manifest["layout"].items()):
        name, found = f"random_state/{mesh.rank}", index[str(mesh.rank)]["random_state"]
        piece = found[0].pieces[name]
        mesh.device.set_random_state(_read(path, name, found, piece, torch.empty(piece.end)))
    for file in files:
        file.stream.close()
    return manifest["step"]


def _piece(
    name: str, optimizer: BF16Optimizer, spec: ShardSpec, mesh: Mesh, num_parts: int, number: int
) -> Piece:
    """Part number of this rank's share, without what only fills it up: the padding of a vocabulary
    is at the end of the share, and that of a shard at the end of the last ones.
    """
    share = tuple((part.start, part.stop) for part in share_slices(name, spec, mesh))
    numel = prod(stop - start for start, stop in share)
    size = -(-optimizer.params[name].numel() // num_parts)
    begin, end = (min((number + n) * size, numel) for n in (0, 1))
    return Piece(tuple(spec.shapes[name]), share, begin, end)


def _read(path: Path, name: str, files: list[PieceFile], target: Piece, like: Tensor) -> Tensor:
    """Put a piece together, on the host, in the shape of like; what fills it up is zero."""
    flat, missing = None, target.end - target.begin
    for file in files:
        for first, to, count in overlaps(file.pieces[name], target):
            part = file.read(name, first, count)
            if flat is None:
                flat = torch.zeros(like.numel(), dtype=part.dtype)
            flat[to : to + count] = part
            missing -= count
    if missing:
        raise damaged(path / "manifest.json", f"lacks {missing:,} elements of {name}")
    return torch.zeros(like.shape) if flat is None else flat.view(like.shape)


def _check_model(path: Path, index: dict, optimizer: BF16Optimizer, spec: ShardSpec) -> None:
    """Refuse a checkpoint of another model before anything is read."""
    files = {name: of["master"][0] for name, of in index.items() if "master" in of}
    there = {name: file.pieces[f"master/{name}"].shape for name, file in files.items()}
    here = {name: tuple(spec.shapes[name]) for name in optimizer.masters}
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            words = [f"of shape {list(s[name])}" if name in s else "missing" for s in (there, here)]
            raise ValueError(
                f"a checkpoint must be of the model that is trained, but {name} is {words[0]} in "
                f"{path}, and here it is {words[1]}. Pass the --model and --lora-rank it was made "
                "with, or another --out."
            )
