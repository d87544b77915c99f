"""Low-precision parameters trained through float32 masters, around any torch optimizer.

A bf16 weight of 1.0 cannot take a step of 1e-3: the next smaller bf16 number is 0.996. So gradients
are added up in float32, the optimizer updates float32 copies (masters), and the model gets them
rounded. With float64 parameters everything is float64. Knows nothing of ranks: to be sharded
(ZeRO-1, Rajbhandari et al. 2020) it holds part `shard_rank` of `num_shards` of every parameter, and
grad_reducer.py does the communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class BF16Optimizer:
    """Wrap a torch optimizer: accumulate_grads() after each backward, step(lr) once.

    named_params     (name, parameter) pairs; those without requires_grad are left alone
    make_optimizer   called with two param groups of masters: matrices, and the rest with
                     weight_decay 0. Masters have the parameter's shape, or are flat pieces of it
                     when sharded
    num_shards, shard_rank   this optimizer updates piece shard_rank of every parameter

    buffer        [num_shards, n] main gradients of all parameters: row r holds the pieces of shard
                  r, in order, each parameter flattened and padded with zeros to a multiple of
                  num_shards. None on devices that compile, where main_grads are no views of it: a
                  write to a view there would copy the buffer
    main_grads    name -> its main gradient in buffer, in the parameter's shape if unsharded, else
                  [num_shards, piece]
    grads         name -> what the optimizer reads: main_grads, or this shard's pieces once they
                  were reduced
    masters       name -> main parameter, like grads
    reduction     what grad_reducer.start_reduction has begun; None: nothing
    updates       int32 tensor of one element: updates made, skipped ones not counted
    """

    def __init__(
        self,
        named_params: Iterable[tuple[str, nn.Parameter]],
        make_optimizer: Callable[[list[dict]], torch.optim.Optimizer],
        num_shards: int = 1,
        shard_rank: int = 0,
    ):
        self.params = {name: p for name, p in named_params if p.requires_grad}
        self.num_shards, self.shard_rank = num_shards, shard_rank
        first = next(iter(self.params.values()))
        dtype = torch.promote_types(first.dtype, torch.float32)
        piece = {name: -(-p.numel() // num_shards) for name, p in self.params.items()}
        self.use_views = first.device.type in ("cpu", "cuda")
        self.buffer = torch.zeros(num_shards, sum(piece.values()), dtype=dtype, device=first.device)
        self.main_grads = self._cut(self.buffer, piece)
        self.shard_buffer, self.grads = self.buffer[0], self.main_grads
        if num_shards > 1:
            self.shard_buffer = torch.zeros_like(self.buffer[0])
            self.grads = self._cut(self.shard_buffer[None], piece)
        self.masters = {}
        flat = torch.zeros_like(self.shard_buffer)
        for name, master in self._cut(flat[None], piece).items():
            master.copy_(self._piece_of(name, shard_rank, piece[name]).view_as(master))
            self.masters[name] = master.requires_grad_()
            master.grad = self.grads[name]
        if not self.use_views:
            self.buffer = self.shard_buffer = None
        matrices = [m for name, m in self.masters.items() if self.params[name].ndim > 1]
        others = [m for name, m in self.masters.items() if self.params[name].ndim <= 1]
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = make_optimizer([group for group in groups if group["params"]])
        self.reduction = None
        self.updates = torch.zeros(1, dtype=torch.int32, device=first.device)

    def _cut(self, buffer: Tensor, piece: dict[str, int]) -> dict[str, Tensor]:
        """Views of a [rows, n] buffer (copies on devices that compile), shaped as main_grads."""
        views, start = {}, 0
        for name, size in piece.items():
            view = buffer[:, start : start + size].squeeze(0)
            view = view.view(self.params[name].shape) if self.num_shards == 1 else view
            views[name] = view if self.use_views else view.clone()
            start += size
        return views

    def _piece_of(self, name: str, rank: int, size: int) -> Tensor:
        """Piece `rank` of a flattened parameter, filled up with zeros."""
        # On the host: on a compiling device each rank's slice would be another program.
        flat = self.params[name].detach().cpu().reshape(-1)[rank * size : (rank + 1) * size]
        return torch.nn.functional.pad(flat, (0, size - flat.numel()))

    @torch.no_grad()
    def accumulate_grads(self, *names: str) -> None:
        """Add the model's gradients to main_grads and free them; one without adds nothing.

        names    parameters whose gradients these are; none given: all
        """
        for name in names or self.params:
            param = self.params[name]
            if param.grad is None:
                continue
            grad, main = param.grad, self.main_grads[name]
            if grad.shape != main.shape:  # sharded: [num_shards, piece]
                pad = main.numel() - grad.numel()
                grad = torch.nn.functional.pad(grad.reshape(-1), (0, pad)).view_as(main)
            main.add_(grad)
            param.grad = None

    @torch.no_grad()
    def step(self, lr: float | Tensor, skip: Tensor | None = None) -> None:
        """Update the masters with .grads, round them into the model, and zero the main gradients.

        lr     learning rate, a number or a one-element tensor
        skip   bool tensor of one element: True leaves masters, moments and counters bitwise as they
               were; decided on the device, so nothing waits. None: never

        When sharded, the model is rounded into by grad_reducer.gather_params, which communicates.
        """
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(torch.as_tensor(lr).view_as(group["lr"]))
            else:
                group["lr"] = float(lr)
        if skip is None:
            self.optimizer.step()
            self.updates += 1
        else:
            self._step_unless(skip)
            self.updates += (~skip).to(torch.int32)
        if self.num_shards == 1:
            torch._foreach_copy_(list(self.params.values()), list(self.masters.values()))
        whole = list(self.main_grads.values()) if self.buffer is None else [self.buffer]
        torch._foreach_zero_(whole)

    def _step_unless(self, skip: Tensor) -> None:
        """optimizer.step() that changes nothing when skip is True."""
        if all(group.get("fused") for group in self.optimizer.param_groups):
            self.optimizer.grad_scale, self.optimizer.found_inf = None, skip.float().squeeze()
            self.optimizer.step()
            self.optimizer.found_inf = None  # else it would decide the next plain step too
            return
        before = [t.clone() for t in self._tensors()]
        self.optimizer.step()
        # State that the optimizer has just made was all zeros before the first update.
        before += [torch.zeros_like(t) for t in self._tensors()[len(before) :]]
        for now, old in zip(self._tensors(), before):
            now.copy_(torch.where(skip.to(now.device).view([1] * now.ndim), old, now))

    def _tensors(self) -> list[Tensor]:
        """Masters first, then every tensor of the optimizer's state."""
        masters = list(self.masters.values())
        state = [t for m in masters for t in self.optimizer.state.get(m, {}).values()]
        return masters + [t for t in state if isinstance(t, Tensor)]
