"""One stage of a pipeline: its part of the model, its engine, its stash and what its method does about delay.

The same object serves the simulator, where all stages live in one process, and the runtime, where each has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from impl.canzona.engine import StepInfo
from impl.canzona.mesh import Mesh
from impl.harness.spec import MOST_SKIPS
from impl.models import gpt, weights
from impl.models.catalogue import ModelConfig, Part
from impl.rotation.method import Method, contexts
from impl.rotation.schedule import Kind, Schedule
from impl.rotation.stage_parts import StageOptions, build_engine, kept_graphs, overrides
from impl.rotation.stash import Stash, Weights


class LogEntry(NamedTuple):
    """What a stage did with which version of its weights (see :class:`impl.rotation.schedule.Action`)."""

    stage: int
    kind: Kind
    number: int
    version: int


@dataclass
class Flight:
    """A microbatch between its forward and its backward.

    hidden: the input, a leaf whose gradient the backward leaves; None on the first stage.
    output: with its graph, None if the backward runs the forward again.
    weights: what the forward ran on, if the backward needs the same tensors; else the stash has them.
    predicted: whether they are no version, but what the method predicted.
    sent: the output without graph, where nothing else could give it again.
    """

    hidden: Tensor | None
    tokens: Tensor | None
    output: Tensor | None
    weights: Weights | None
    predicted: bool
    sent: Tensor | None = None


class Stage:
    """Stage ``index`` of ``schedule``, with fresh weights that do not depend on the partition.

    Call :meth:`forward`, :meth:`backward` and :meth:`update` in the order of ``schedule.actions[index]``; whatever the
    timing, the numbers are the same.  All ranks of ``mesh`` (the stage's replicas) must call.

    rate: the learning rate of the schedule for a 1-based update.  It is asked at every update, also while the pipeline
        drains, where the authors' code goes on with the last one.
    log: every action so far.
    """

    def __init__(
        self,
        config: ModelConfig,
        part: Part,
        index: int,
        schedule: Schedule,
        method: Method,
        mesh: Mesh,
        rate: Callable[[int], float],
        *,
        seed: int = 0,
        options: StageOptions | None = None,
    ) -> None:
        self.options = options or StageOptions()
        self.options.check()
        self.config, self.part, self.index, self.schedule, self.method = config, part, index, schedule, method
        self.context = contexts(schedule)[index]
        method.check(self.context)
        self.rate, self.log = rate, list[LogEntry]()
        self.model = gpt.build_model(config, mesh.tp_group, dtype=torch.float32, device=mesh.device, part=part)
        weights.initialize(self.model, config, seed, mesh.tp_rank, mesh.tp, part)
        gpt.recompute_attention(self.model, self.options.recompute == "selective-attention")
        self.engine = build_engine(self.model, method, self.context, mesh, self.options)
        self._actions = schedule.actions[index]
        self.stash = Stash(self._actions, self.engine.weights, on_cpu=self.options.stash_on_cpu)
        self.memory: list[dict[str, Any]] = [{} for _ in self.engine.weights]
        """What the method remembers, for each family."""
        self.flight: dict[int, Flight] = {}
        """The microbatches between forward and backward."""
        self._bound: Weights = self.engine.weights
        self._keeps_graph, self._outlives = kept_graphs(schedule, index, method, self.options)
        self._predicts = overrides(method, "predict")
        self._corrects = overrides(method, "correct")
        self._needs_last_step = self._predicts or overrides(method, "backward_weights")
        self._held: list[int] = []
        self._new_step = True

    @property
    def is_first(self) -> bool:
        """Whether the stage starts from tokens."""
        return self.part.embedding

    @property
    def is_last(self) -> bool:
        """Whether the stage ends in the loss."""
        return self.part.head

    @property
    def needs_tokens(self) -> bool:
        """Whether :meth:`forward` takes tokens."""
        return self.is_first or self.is_last

    @property
    def peak_stash_versions(self) -> int:
        """Most versions of the weights that existed at one time, the newest included."""
        return self.stash.peak

    @property
    def skipped_updates(self) -> int:
        """Updates without effect so far, because a gradient was not finite."""
        return self.stash.newest - self.engine.steps

    def lr(self, update: int) -> float:
        """Return the learning rate of 1-based ``update`` on this stage."""
        return self.method.lr(self.rate(update), update, self.context)

    def forward(self, number: int, hidden: Tensor | None, version: int, tokens: Tensor | None = None) -> Tensor:
        """Run the forward of microbatch ``number`` on ``version``.

        hidden: ``[s, b, h]`` from the stage before, None on the first; tokens: ``[b, s + 1]`` on the first and the
        last stage.  Returns the hidden states for the next stage, without graph; on the last stage the mean loss.
        """
        self._begin("F", number, version)
        predicted = self._predict(number, version)
        leaf = None if hidden is None else hidden.detach().requires_grad_()
        output = self.launch(number, leaf, tokens, version, predicted)
        self.stash.used(version, 1 if predicted is None else 2)  # the backward runs on the predicted weights too
        if self.schedule.mode == "no-stash-recompute":
            self.flight[number].sent = output.detach()
        return output.detach()

    def launch(
        self, number: int, hidden: Tensor | None, tokens: Tensor | None, version: int, predicted: Weights | None
    ) -> Tensor:
        """Run a forward and put its microbatch in flight; return the output, with its graph if that is kept.

        A part of :meth:`forward`, and of taking over a state (:mod:`impl.rotation.resume`).
        hidden: a leaf; predicted: the weights to run on instead of ``version``.
        """
        if predicted is None and number in self._outlives and version == self.stash.newest:
            self.stash.copy_newest()  # the live tensors will change while the graph still reads them
        use = self.stash.weights(version) if predicted is None else predicted
        keep, predicts = number in self._keeps_graph, predicted is not None
        with self.engine.clock("forward"):
            output = self._run(use, hidden, tokens, grad=keep)
        weights_kept = use if keep or predicts else None
        self.flight[number] = Flight(hidden, tokens, output if keep else None, weights_kept, predicts)
        return output

    def backward(self, number: int, grad: Tensor | None, version: int, weight: float = 1.0) -> Tensor | None:
        """Run the backward of microbatch ``number`` and add its gradient to that of the update.

        grad: of the output, None on the last stage, which starts from the loss times ``weight``, the microbatch's
        share in the update.  Returns the gradient of the stage's input, None on the first stage.
        """
        self._begin("B", number, version)
        flight = self.flight.pop(number)
        output = flight.output
        if output is None:
            use = flight.weights or self._backward_weights(version)
            with self.engine.clock("recompute"):
                output = self._run(use, flight.hidden, flight.tokens, grad=True)
        else:
            assert flight.weights is not None, "kept with every graph"
            self._bind(flight.weights)  # a graph refers to parameters, and would read what is bound to them now
        with self.engine.microbatch(last=self.schedule.ends_update(number)):
            if self.is_last:
                (output if weight == 1.0 else output * weight).backward()
            else:
                output.backward(grad)
        if not flight.predicted:
            self._held.append(version)
            if not self._corrects:
                self._release()
        return None if flight.hidden is None else flight.hidden.grad

    def update(self, number: int) -> StepInfo:
        """Apply update ``number`` (from 0) to the newest weights, with the gradients since the one before."""
        self._begin("U", number, self.stash.newest)
        self.stash.before_update()
        before = [t.clone() for t in self.engine.weights] if self._needs_last_step else []
        info = self.engine.step(self.lr(number + 1), adjust=self._correct if self._corrects else None)
        self.engine.synchronize()
        for memory, new, old in zip(self.memory, self.engine.weights, before, strict=False):
            memory["update"] = torch.sub(new, old, out=old)
        self._release()
        self.stash.after_update()
        self._new_step = True
        return info

    def keeps_graph(self, number: int) -> bool:
        """Return whether the backward of microbatch ``number`` uses the graph of its forward."""
        return number in self._keeps_graph

    def replay(self, number: int) -> Tensor:
        """Return again what :meth:`forward` returned for microbatch ``number``, whose backward is still to come."""
        flight = self.flight[number]
        if flight.sent is not None:
            return flight.sent
        if flight.output is not None:
            return flight.output.detach()
        version = next(entry.version for entry in self.log if entry.kind == "F" and entry.number == number)
        use = flight.weights or self.stash.weights(version)
        return self._run(use, flight.hidden, flight.tokens, grad=False)

    @torch.no_grad()
    def evaluate(self, hidden: Tensor | None, tokens: Tensor | None) -> Tensor:
        """Return what :meth:`forward` would, on the newest weights and without any trace."""
        return self._run(self.engine.weights, hidden, tokens, grad=False)

    def is_sound(self) -> bool:
        """Return whether all newest weights are finite and the last updates were not all skipped.

        At most :data:`~impl.harness.spec.MOST_SKIPS` in a row may be.
        """
        self.engine.synchronize()
        return self.engine.skips <= MOST_SKIPS and all(bool(t.isfinite().all()) for t in self.engine.weights)

    def bind_newest(self) -> None:
        """Let ``model`` show the newest weights, for reading them."""
        self.engine.synchronize()
        self._bind(self.engine.weights)

    def _begin(self, kind: Kind, number: int, version: int) -> None:
        if self._new_step:
            self.engine.begin_step()
            self._new_step = False
        self.log.append(LogEntry(self.index, kind, number, version))

    def _run(self, use: Weights, hidden: Tensor | None, tokens: Tensor | None, *, grad: bool) -> Tensor:
        self._bind(use)
        ids = tokens.to(self.engine.mesh.device) if tokens is not None and self.needs_tokens else None
        with torch.set_grad_enabled(grad):
            return gpt.forward_stage(self.model, hidden, ids)

    def _bind(self, use: Weights) -> None:
        if use is not self._bound:
            self.engine.bind(use)
            self._bound = use

    @torch.no_grad()
    def _predict(self, number: int, version: int) -> Weights | None:
        """Return the weights that the method predicts from ``version``, None if it changes nothing."""
        if not self._predicts:
            return None
        base, lr = self.stash.weights(version), self.lr(min(self.stash.newest + 1, self.schedule.updates))
        context = replace(self.context, staleness=self.schedule.update_of(number) - version)
        predicted = [self.method.predict(t, m, context, lr) for t, m in zip(base, self.memory, strict=True)]
        if all(p is None for p in predicted):
            return None
        return tuple(t.clone() if p is None else p for p, t in zip(predicted, base, strict=True))

    @torch.no_grad()
    def _backward_weights(self, version: int) -> Weights:
        """Return the weights that a backward without kept graph runs on."""
        use = self.stash.weights(version)
        if self.schedule.mode != "no-stash-recompute":
            return use
        own = [self.method.backward_weights(t, m, self.context) for t, m in zip(use, self.memory, strict=True)]
        return (
            use if all(p is None for p in own) else tuple(t if p is None else p for p, t in zip(own, use, strict=True))
        )

    def _correct(self) -> None:
        """Let the method change the gradients, which are final; an update of several versions counts as its last."""
        if self._held:
            stale = self.stash.weights(self._held[-1])
            for parts in zip(self.engine.gradients, self.engine.weights, stale, self.memory, strict=True):
                self.method.correct(*parts)

    def _release(self) -> None:
        """Count the backwards whose versions are not needed any more."""
        for version in self._held:
            self.stash.used(version)
        self._held.clear()
