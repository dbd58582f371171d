"""Parity with implementations that others wrote: torch.optim, and pytorch-optimizer (a dependency of the tests alone).

Everything runs in float64, where two right implementations agree to rounding and anything looser is a difference in
definition.  Where a library computes in another precision inside, it is made to use float64 (see :class:`Wide`); where
its order of operations is another, the test aligns it and says how.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from pytorch_optimizer.optimizer import shampoo as shampoo_module
from pytorch_optimizer.optimizer import soap as soap_module
from pytorch_optimizer.optimizer.utils.graft import LayerWiseGrafting
from pytorch_optimizer.optimizer.utils.partition import PreConditionerType
from pytorch_optimizer.optimizer.utils.preconditioner import PreConditioner
from torch import Tensor, nn

from impl.optimizers.base import Optimizer, State, create

CPU, F64 = torch.device("cpu"), torch.float64
SHAPES = [(6, 6), (5, 8), (8, 5), (12, 7)]
EXACT = 1e-9


class Wide:
    """A module ``torch`` for one library module, in which fp32 means float64."""

    def __getattr__(self, name: str) -> Any:
        return F64 if name == "float32" else getattr(torch, name)


def widen(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    for module in modules:
        monkeypatch.setattr(module, "torch", Wide())


def gradients(shape: tuple[int, int], count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(k, k, generator=generator, dtype=F64) + torch.eye(k, dtype=F64) for k in shape)
    noise = [torch.randn(shape, generator=generator, dtype=F64) * (1 + i % 3) for i in range(count)]
    return [left @ x @ right / (shape[0] * shape[1]) ** 0.5 for x in noise]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


class Ours:
    """A parameter stepped as the engine does it: ``p <- (1 - lr wd) p - lr update``."""

    def __init__(self, optimizer: Optimizer, start: Tensor, lr: float, weight_decay: float) -> None:
        self.optimizer, self.p, self.lr, self.weight_decay = optimizer, start.clone(), lr, weight_decay
        self.state: State = optimizer.init_state(tuple(start.shape), CPU, F64)
        self.steps = 0

    def step(self, grad: Tensor) -> None:
        self.steps += 1
        update = self.optimizer.update(grad.clone(), self.state, self.steps)
        self.p.mul_(1 - self.lr * self.weight_decay).sub_(update, alpha=self.lr)


class Theirs:
    """A parameter stepped by a ``torch.optim.Optimizer``."""

    def __init__(self, kind: Any, start: Tensor, **settings: Any) -> None:
        self.parameter = nn.Parameter(start.clone())
        self.optimizer = kind([self.parameter], **settings)

    @property
    def p(self) -> Tensor:
        return self.parameter.detach()

    @property
    def state(self) -> dict[str, Any]:
        return self.optimizer.state[self.parameter]

    def step(self, grad: Tensor) -> None:
        self.parameter.grad = grad.clone()
        self.optimizer.step()


def start(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(99), dtype=F64)


def worst(ours: Ours, theirs: Theirs, grads: list[Tensor]) -> float:
    """The largest relative difference of the way that the parameter has gone, over all steps."""
    error, first = 0.0, theirs.p.clone()
    for grad in grads:
        ours.step(grad)
        theirs.step(grad)
        error = max(error, distance(ours.p - first, theirs.p - first)) if (theirs.p - first).any() else error
    return error


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("settings", [{}, {"betas": (0.8, 0.999), "eps": 1e-3}])
def test_adamw_of_torch(settings: dict[str, Any], weight_decay: float) -> None:
    begin, lr = start((5, 8)), 0.05
    ours = Ours(create("adamw", settings), begin, lr, weight_decay)
    theirs = Theirs(torch.optim.AdamW, begin, lr=lr, weight_decay=weight_decay, **{"betas": (0.9, 0.95), **settings})
    assert worst(ours, theirs, gradients((5, 8), 25)) < EXACT


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("settings", [{}, {"betas": (0.8, 0.99), "eps": 1e-3, "momentum_decay": 0.1}])
def test_nadam_of_torch(settings: dict[str, Any], weight_decay: float) -> None:
    """Theirs with decoupled decay; its own beta1 is 0.9, that of asynchronous Nesterov 0.99.

    1e-6 instead of rounding: torch keeps the product of mu in fp32 whatever the parameter's precision.
    """
    begin, lr = start((5, 8)), 0.05
    ours = Ours(create("nadam", settings), begin, lr, weight_decay)
    same = {"betas": (0.99, 0.999), **settings}
    theirs = Theirs(
        torch.optim.NAdam, begin, lr=lr, weight_decay=weight_decay, decoupled_weight_decay=True, foreach=False, **same
    )
    assert worst(ours, theirs, gradients((5, 8), 25)) < 1e-6


@pytest.mark.parametrize("shape", [*SHAPES, (1, 5), (5, 1)])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("scale", "theirs_scale"), [("match-rms", "match_rms_adamw"), ("original", "original")])
def test_muon_of_torch(
    shape: tuple[int, int], nesterov: bool, scale: str, theirs_scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theirs always iterates in bf16; here its cast is taken away, so that nothing is left but the definition.

    Theirs divides by ``max(norm, 1e-7)``, ours by the norm: equal for any gradient above it.
    """
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    begin, lr, weight_decay = start(shape), 0.05, 0.1
    settings = {"nesterov": nesterov, "momentum": 0.9}
    ours = Ours(create("muon", {**settings, "scale": scale, "ns_dtype": "float64"}), begin, lr, weight_decay)
    theirs = Theirs(torch.optim.Muon, begin, lr=lr, weight_decay=weight_decay, adjust_lr_fn=theirs_scale, **settings)
    assert worst(ours, theirs, gradients(shape, 8)) < EXACT


def adopt_bases(ours: Ours, theirs: Theirs) -> None:
    """Give ours the library's bases of the first covariances, whose null space is arbitrary."""
    for side, basis in zip(("left", "right"), theirs.state["Q"], strict=True):
        if len(basis):
            ours.state[f"basis.{side}.0"].copy_(basis)


SOAPS: list[dict[str, Any]] = [
    {"period": 1},
    {"period": 3, "betas": (0.9, 0.99)},
    {"period": 2, "shampoo_beta": 0.8, "max_side": 6},
]
CASES = [(shape, settings) for shape in SHAPES for settings in SOAPS if settings["period"] > 1 or shape == (6, 6)]
"""A refresh at every step comes before the covariances of a matrix that is not square have full rank."""


@pytest.mark.parametrize(("shape", "settings"), CASES)
def test_soap_of_pytorch_optimizer(
    shape: tuple[int, int], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same definition and order: an empty first step, then Adam in the old bases, then covariances and bases.

    Differences: theirs decays after the step, ours before, so there is none here; theirs does QR in fp32 (widened).
    The first bases are theirs, as some of a matrix that is not square are arbitrary.
    """
    widen(monkeypatch, soap_module)
    begin, lr = start(shape), 0.05
    ours = Ours(create("soap", {"eps": 1e-3, **settings}), begin, lr, 0.0)
    names = {"period": "precondition_frequency", "max_side": "max_precondition_dim"}
    same = {"betas": (0.95, 0.95), **{names.get(key, key): value for key, value in settings.items()}}
    theirs = Theirs(soap_module.SOAP, begin, lr=lr, weight_decay=0.0, eps=1e-3, **same)
    first, *rest = gradients(shape, 14)
    ours.step(first)
    theirs.step(first)
    assert torch.equal(ours.p, begin)
    assert torch.equal(theirs.p, begin)
    adopt_bases(ours, theirs)
    assert worst(ours, theirs, rest) < EXACT


class Ahead(soap_module.SOAP):
    """SOAP whose covariances and bases take a gradient in before the step that uses it, as basis rotation's do.

    The library updates them after a step; here they get the next gradient then, as if at the next step's number.
    """

    coming: Tensor

    def update_pre_conditioner(self, grad: Tensor, state: dict[str, Any], step: int, **settings: Any) -> None:
        first = state["Q"] is None
        super().update_pre_conditioner(grad if first else self.coming, state, step=0 if first else step + 1, **settings)


@pytest.mark.parametrize("shape", [(6, 6), (9, 9)])
@pytest.mark.parametrize("period", [1, 4])
def test_basis_rotation_is_soap_with_its_order_of_operations(
    shape: tuple[int, int], period: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bilateral rotation by the 2nd source (basis_rotation spec, section 6): no empty step, refresh before use."""
    widen(monkeypatch, soap_module)
    begin, lr, betas = start(shape), 0.05, (0.9, 0.99)
    ours = Ours(create("basis-rotation", {"eps": 1e-3, "betas": betas, "period": period}), begin, lr, 0.0)
    theirs = Theirs(Ahead, begin, lr=lr, weight_decay=0.0, eps=1e-3, betas=betas, precondition_frequency=period)
    plain = Theirs(
        soap_module.SOAP, begin, lr=lr, weight_decay=0.0, eps=1e-3, betas=betas, precondition_frequency=period
    )
    grads = gradients(shape, 14)
    theirs.step(grads[0])  # makes the bases of the first gradient and steps nowhere
    error = 0.0
    for grad, after in zip(grads, [*grads[1:], grads[0]], strict=True):
        theirs.optimizer.coming = after
        ours.step(grad)
        theirs.step(grad)
        plain.step(grad)
        error = max(error, distance(ours.p - begin, theirs.p - begin))
    assert error < EXACT
    assert distance(ours.p - begin, plain.p - begin) > 1e-2, "negative control: SOAP's own order is another"


def correction(exponent: float, refreshed: int, beta: float) -> float:
    """What our correction of the averaged statistics for their zero start makes of an update by their roots.

    Two roots to the power ``-exponent``, both from the statistics of step ``refreshed``.
    """
    return (1 - beta**refreshed) ** (2 * exponent)


def step_alone(ours: Ours, theirs: Theirs, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Both updates of one step."""
    before_ours, before_theirs = ours.p.clone(), theirs.p.clone()
    ours.step(grad)
    theirs.step(grad)
    return before_ours - ours.p, before_theirs - theirs.p


def scalable_shampoo(begin: Tensor, beta: float, period: int, **settings: Any) -> Theirs:
    """pytorch-optimizer's after Google's: learning rate 1, averages, roots by SVD, and no ridge, block or momentum."""
    return Theirs(
        shampoo_module.ScalableShampoo, begin, lr=1.0, betas=(0.0, beta), moving_average_for_momentum=True,
        start_preconditioning_step=1, preconditioning_compute_steps=period, shape_interpretation=False, block_size=0,
        nesterov=False, matrix_eps=0.0, use_svd=True, diagonal_eps=1e-300, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("period", "exponent"), [(2, 0.25), (3, 0.25), (3, 0.5)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_shampoo_of_pytorch_optimizer(
    shape: tuple[int, int], period: int, exponent: float, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theirs has its first roots at the first multiple of the period, ours at step 1 as well: compared from there on.

    Theirs averages preconditioned gradients, ours preconditions the average (so that the newest root acts on all of
    it): a wrapper averages before.  Theirs leaves the statistics' average uncorrected, which is one factor for the
    whole update.  Ours has a ridge, here far below any eigenvalue.
    """
    begin, beta = start(shape), 0.9
    settings = {"period": period, "exponent": exponent, "shampoo_beta": beta, "momentum": momentum, "ridge": 1e-15}
    ours = Ours(create("shampoo", settings), begin, 1.0, 0.0)
    override = round(1 / exponent)
    theirs = scalable_shampoo(
        begin, beta, period, graft_type=LayerWiseGrafting.NONE, inverse_exponent_override=override
    )
    average, plain = torch.zeros(shape, dtype=F64), PreConditioner.preconditioned_grad

    def averaged(self: PreConditioner, grad: Tensor) -> Tensor:
        average.mul_(momentum).add_(grad, alpha=1 - momentum)
        return plain(self, average / (1 - momentum**step))

    monkeypatch.setattr(PreConditioner, "preconditioned_grad", averaged)
    refreshed = 0
    for step, grad in enumerate(gradients(shape, 12), 1):
        update, expected = step_alone(ours, theirs, grad)
        refreshed = step if step % period == 0 else refreshed
        if refreshed * min(shape) >= max(shape):  # statistics of full rank
            assert distance(update, expected * correction(exponent, refreshed, beta)) < 1e-7, step


@pytest.mark.parametrize(("model", "graft_type"), [("sgd", LayerWiseGrafting.SGD), ("adam", LayerWiseGrafting.RMSPROP)])
def test_grafting_of_pytorch_optimizer(model: str, graft_type: int) -> None:
    """Without momentum Adam is RMSProp, but for the correction of its average; eps is as good as zero in both."""
    begin, beta, period = start((5, 8)), 0.9, 3
    settings = {"shampoo_beta": beta, "graft_beta": beta, "graft_eps": 1e-300, "momentum": 0.0, "ridge": 1e-15}
    ours = Ours(create("shampoo", {**settings, "period": period, "grafting": model}), begin, 1.0, 0.0)
    theirs = scalable_shampoo(begin, beta, period, graft_type=graft_type)
    for step, grad in enumerate(gradients((5, 8), 12), 1):
        update, expected = step_alone(ours, theirs, grad)
        if step >= period:
            factor = (1 - beta**step) ** 0.5 if model == "adam" else 1.0
            assert distance(update, expected * factor) < 1e-7, step


def test_one_sided_shampoo_of_pytorch_optimizer() -> None:
    """One preconditioned side has an exponent of a half in both; the other is beyond ``max_side`` here."""
    begin, beta, period = start((8, 5)), 0.9, 2
    settings = {"shampoo_beta": beta, "momentum": 0.0, "ridge": 1e-15, "period": period, "max_side": 6}
    ours = Ours(create("shampoo", settings), begin, 1.0, 0.0)
    theirs = scalable_shampoo(
        begin, beta, period, graft_type=LayerWiseGrafting.NONE, pre_conditioner_type=PreConditionerType.OUTPUT
    )
    refreshed = 0
    for step, grad in enumerate(gradients((8, 5), 9), 1):
        update, expected = step_alone(ours, theirs, grad)
        refreshed = step if step % period == 0 else refreshed
        if refreshed:
            assert distance(update, expected * correction(0.25, refreshed, beta)) < 1e-7, step
