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

    main_grads    name -> sum of its gradients so far, in the parameter's shape if unsharded, else
                  [num_shards, piece], padded with zeros. Made by the first gradient of a step and
                  gone after the update, so that it does not exist beside the activations of the
                  first forward; on devices that compile it stays, for one program a micro-batch
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
        self.dtype = torch.promote_types(first.dtype, torch.float32)
        self.updates = torch.zeros(1, dtype=torch.int32, device=first.device)
        self.keeps_main_grads = first.device.type not in ("cpu", "cuda")
        self.masters = {}
        for name, param in self.params.items():
            master = self._piece_of(param).to(first.device, self.dtype, copy=True)
            master = master.view_as(param) if num_shards == 1 else master
            self.masters[name] = master.requires_grad_()
        self.main_grads: dict[str, Tensor] = {}
        if self.keeps_main_grads:
            self.main_grads = {name: self.take_main_grad(name) for name in self.params}
        self.grads = self.main_grads if num_shards == 1 else {}
        matrices = [m for name, m in self.masters.items() if self.params[name].ndim > 1]
        others = [m for name, m in self.masters.items() if self.params[name].ndim <= 1]
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = make_optimizer([group for group in groups if group["params"]])
        self.reduction = None

    def _piece_of(self, param: nn.Parameter) -> Tensor:
        """This shard's piece of a flattened parameter, filled up with zeros."""
        # On the host: on a compiling device each rank's slice would be another program.
        flat, size = param.detach().cpu().reshape(-1), -(-param.numel() // self.num_shards)
        flat = flat[self.shard_rank * size : (self.shard_rank + 1) * size]
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
            grad, param.grad = param.grad, None
            if self.num_shards > 1:
                pad = self.num_shards * self.masters[name].numel() - grad.numel()
                grad = torch.nn.functional.pad(grad.reshape(-1), (0, pad))
                grad = grad.view(self.num_shards, -1)
            if name in self.main_grads:
                self.main_grads[name].add_(grad)
            else:
                self.main_grads[name] = grad.to(self.dtype)

    def take_main_grad(self, name: str) -> Tensor:
        """A parameter's entry of main_grads, taken out; zeros when it got no gradient."""
        if name in self.main_grads:
            return self.main_grads.pop(name)
        shape = self.num_shards, self.masters[name].numel()
        shape = self.params[name].shape if self.num_shards == 1 else shape
        return torch.zeros(shape, dtype=self.dtype, device=self.updates.device)

    @torch.no_grad()
    def step(self, lr: float | Tensor, skip: Tensor | None = None) -> None:
        """Update the masters with .grads, round them into the model, and drop the main gradients.

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
        for name, master in self.masters.items():
            master.grad = self.grads.get(name)
        if skip is None:
            self.optimizer.step()
            self.updates += 1
        else:
            self._step_unless(skip)
            self.updates += (~skip).to(torch.int32)
        if self.num_shards == 1:
            torch._foreach_copy_(list(self.params.values()), list(self.masters.values()))
        for master in self.masters.values():
            master.grad = None
        if self.keeps_main_grads:
            torch._foreach_zero_(list(self.main_grads.values()))
        else:
            self.main_grads.clear()
        if self.num_shards > 1:
            self.grads.clear()

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
