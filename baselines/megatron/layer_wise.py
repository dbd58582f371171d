"""Megatron-core's ``LayerWiseDistributedOptimizer``, freed from its CUDA-only wrappers by subclassing alone.

Megatron's code decides who owns what, keeps each rank's parameter groups, chains the optimizers and brings parameters
to the other ranks.  Replaced are ``Float16OptimizerWithFloat16Params`` and ``FP32Optimizer`` (:class:`HostOptimizer`),
and the gradient norm and clipping, which allocate on CUDA and are the caller's here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from impl.optimizers.base import State

Master = Callable[[nn.Parameter], nn.Parameter]
"""Gives the fp32 master of a model's parameter that this rank owns; for fp32 parameters it shares their memory."""
StateOf = Callable[[nn.Parameter], State]
"""Gives the optimizer state that belongs to a master."""
Update = Callable[[nn.Parameter, Tensor, State], Tensor]
"""Gives the update of a master for its gradient (both this rank's shard) and advances the state."""


class RuleOptimizer(torch.optim.Optimizer):
    """One of our update rules as a torch optimizer: ``p <- (1 - lr * weight_decay) p - lr * update(p, p.grad)``."""

    def __init__(self, parameters: Sequence[nn.Parameter], update: Update, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": 0.0, "weight_decay": weight_decay})
        self._update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter of this rank's groups; ``closure`` must be None."""
        for group in self.param_groups:
            for parameter in group["params"]:
                update = self._update(parameter, parameter.grad, self.state[parameter])
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])


class HostOptimizer(MegatronOptimizer):
    """A base optimizer on fp32 masters, made after its parameter groups were narrowed to what this rank owns."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig, master: Master, state: StateOf):
        super().__init__(optimizer, config)
        self.is_stub_optimizer = False
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for group in optimizer.param_groups:
            pairs = [(parameter, master(parameter)) for parameter in group["params"]]
            group["params"] = [m for _, m in pairs]
            for _, m in pairs:
                optimizer.state[m] = state(m)
            self._pairs += pairs

    def prepare_grads(self) -> bool:
        """Point the masters at the reduced gradients (``main_grad``, Megatron's name); nothing is ever skipped."""
        for parameter, master in self._pairs:
            master.grad = parameter.main_grad.view(master.shape)  # type: ignore[attr-defined]
        return False

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step the masters and round them into the model's parameters."""
        self.optimizer.step()
        for parameter, master in self._pairs:
            if parameter.data_ptr() != master.data_ptr():
                parameter.copy_(master)
        return True

    def step(self) -> bool:  # type: ignore[override]  # Megatron's base declares no results
        """Both of the above."""
        self.prepare_grads()
        return self.step_with_ready_grads()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of the gradients, which the caller's buffers hold and zero."""
        for _, master in self._pairs:
            master.grad = None

    def get_loss_scale(self) -> Tensor:
        """Return 1: losses are not scaled."""
        return torch.ones(1)

    @torch.no_grad()
    def reload_model_params(self, state_dict: Any = None) -> None:
        """Take the masters from the model's parameters again."""
        for parameter, master in self._pairs:
            master.copy_(parameter)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the base optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the base optimizer's."""
        self.optimizer.load_state_dict(state_dict)

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: dict[str, Any] | None = None
    ) -> Any:
        """Megatron's distributed checkpoints need CUDA: always raises NotImplementedError."""
        raise NotImplementedError("Megatron's distributed checkpoints need CUDA: save the engine's state_dict instead")


class PortableLayerWise(LayerWiseDistributedOptimizer):
    """The layer-wise optimizer over ``group``; before a step the caller has averaged and clipped the gradients."""

    def __init__(self, bases: list[torch.optim.Optimizer], group: dist.ProcessGroup) -> None:
        """Deal the parameters of ``bases`` to the ranks of ``group``; :meth:`attach` must follow."""
        self._portable = OptimizerConfig(bf16=False, fp16=False, clip_grad=0.0)  # masters are HostOptimizer's duty
        groups = ProcessGroupCollection(dp_cp=group, expt_dp=None)  # type: ignore[arg-type]  # no experts
        super().__init__(bases, self._portable, groups)  # type: ignore[arg-type]  # torch optimizers, as Megatron passes
        self._gloo = dist.get_backend(group) == "gloo"

    def attach(self, master: Master, state: StateOf) -> None:
        """Put what this rank owns on fp32 masters and give these their states."""
        self.config = self._portable
        self.chained_optimizers = [HostOptimizer(o, self.config, master, state) for o in self.chained_optimizers]

    @property
    def owned_by_rank(self) -> list[list[nn.Parameter]]:
        """The model's parameters that each DP rank owns; empty with one rank, which owns everything."""
        return self.dp_cp_params_list or []

    def step_with_ready_grads(self) -> bool:
        """Step what this rank owns.  Megatron 0.18 and later would gather here too; it is a step of its own."""
        return ChainedOptimizer.step_with_ready_grads(self)

    def step(self) -> tuple[bool, None, None]:
        """Step what this rank owns, then bring it to the others; all ranks must call."""
        self.prepare_grads()
        success = self.step_with_ready_grads()
        self.allgather_params()
        return success, None, None

    def allgather_params(self) -> None:
        """Megatron's one uneven all-gather; on gloo, which has none, Megatron's reference of a broadcast each."""
        if self._gloo:
            self.broadcast_params()
        else:
            super().allgather_params()
