"""A slow pipeline written from the equations: the whole model, plain autograd, and lists of versions kept by hand.

Nothing of ``impl.rotation``, the engine or its buffers is used, only the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from impl.models import gpt, weights

BETAS, EPS = (0.9, 0.99), 1e-8


class Reference:
    """AdamW on a pipeline; stage k holds the parameters for which ``stage_of`` says k."""

    def __init__(self, config, group, stage_of: Callable[[str], int], stages: int, rate, *, clip=1.0, decay=0.01):
        self.config, self.group, self.stages, self.rate, self.clip, self.decay = (
            config,
            group,
            stages,
            rate,
            clip,
            decay,
        )
        self.model = gpt.build_model(config, group, dtype=torch.float32, device="cpu")
        weights.initialize(self.model, config, 0, 0, 1)
        self.parameters = dict(self.model.named_parameters())
        self.home = {name: stage_of(name) for name in self.parameters}
        self.newest = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.first = {name: torch.zeros_like(p) for name, p in self.newest.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.newest.items()}
        self.step = 0
        self.losses: list[float] = []

    def load(self, values: dict[str, Tensor]) -> None:
        for name, p in self.parameters.items():
            p.data = values[name].clone()

    def segment(
        self,
        batches: Sequence[Sequence[Tensor]],
        delay: Callable[[int], int],
        *,
        version: Callable[[int, int], int] | None = None,
        predict: bool = False,
    ) -> None:
        """Run one drained segment; ``batches[t]`` are the microbatches of update t, ``delay(k)`` that of stage k.

        version: of update t on stage k, instead of ``max(0, t - delay(k))``.  predict: add the last step delay times.
        """
        self.history, self.begun = [dict(self.newest)], self.step
        rule = version or (lambda t, k: max(0, t - delay(k)))
        for parts in batches:
            t = self.step - self.begun
            mixed = {}
            for name, k in self.home.items():
                v = rule(t, k)
                mixed[name] = self.history[v][name]
                if predict and v > 0 and delay(k):
                    last = self.history[v][name] - self.history[v - 1][name]
                    mixed[name] = mixed[name].add(last, alpha=delay(k))
            self.load(mixed)
            self.model.zero_grad()
            rows, total = sum(map(len, parts)), []
            for part in parts:
                loss = gpt.loss(self.model, part)
                share = len(part) / rows
                (loss * share if len(parts) > 1 else loss).backward()
                total.append(loss.item() * share)
            self.losses.append(math.fsum(total))
            self.adam({name: p.grad for name, p in self.parameters.items()})

    def adam(self, gradients: dict[str, Tensor]) -> None:
        self.step += 1
        lr = self.rate(self.step)
        for k in range(self.stages):
            own = [name for name, home in self.home.items() if home == k]
            norm = math.sqrt(math.fsum(x * x for name in own for x in gradients[name].double().flatten().tolist()))
            scale = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
            for name in own:
                self.newest[name] = self.adam_one(name, gradients[name] * scale, lr)
        self.history.append(dict(self.newest))

    def adam_one(self, name: str, g: Tensor, lr: float) -> Tensor:
        beta1, beta2 = BETAS
        self.first[name] = torch.lerp(self.first[name], g, 1.0 - beta1)
        self.second[name] = (self.second[name] * beta2).addcmul(g, g, value=1.0 - beta2)
        root = self.second[name].sqrt() / math.sqrt(1.0 - beta2**self.step) + EPS
        update = self.first[name] / root / (1.0 - beta1**self.step)
        return (self.newest[name] * (1.0 - lr * self.decay)).add(update, alpha=-lr)

    def digest(self) -> str:
        self.load(self.newest)
        return weights.params_digest(self.config, weights.whole_parameters(self.model, self.config, self.group))


def stage_of(counts: Sequence[int]) -> Callable[[str], int]:
    """Return the stage of a parameter's name, for so many layers on each stage."""
    where = [k for k, n in enumerate(counts) for _ in range(n)]

    def find(name: str) -> int:
        if name.startswith("embedding"):
            return 0
        if name.startswith("decoder.layers."):
            return where[int(name.split(".")[2])]
        return len(counts) - 1

    return find
