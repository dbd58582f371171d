"""Slow twins of the optimizers: one matrix, whole, in any dtype, by the papers' formulas and nothing else.

A twin is written from its source, not from :mod:`impl.optimizers`: it shares the settings and nothing that computes.
``update(grad)`` gives what ``p <- p - lr * update`` subtracts; ``load(state)`` takes over a state of the optimizer
under test, ``state()`` returns the twin's in the same names, so that both can be compared.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

State = Mapping[str, Tensor]


class Twin(ABC):
    """The update rule of one tensor ``shape`` with ``hyper``, the settings of the optimizer of that name."""

    def __init__(self, hyper: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.hyper, self.shape, self.dtype = hyper, shape, dtype
        self.t = 0  # steps done

    @abstractmethod
    def update(self, grad: Tensor) -> Tensor: ...

    @abstractmethod
    def load(self, state: State, t: int) -> None:
        """Take over a state of the fast optimizer after ``t`` steps."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]: ...

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*(shape or self.shape), dtype=self.dtype)


class AdamWTwin(Twin):
    """Loshchilov and Hutter, 2019, Algorithm 2: both moments corrected for their zero start; eps outside the root."""

    def __init__(self, hyper: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(hyper, shape, dtype)
        self.m, self.v = self.zeros(), self.zeros()

    def update(self, grad: Tensor) -> Tensor:
        self.t += 1
        beta1, beta2 = self.hyper.betas
        self.m = beta1 * self.m + (1 - beta1) * grad
        self.v = beta2 * self.v + (1 - beta2) * grad**2
        return (self.m / (1 - beta1**self.t)) / ((self.v / (1 - beta2**self.t)) ** 0.5 + self.hyper.eps)

    def load(self, state: State, t: int) -> None:
        self.m, self.v, self.t = state["first"].to(self.dtype), state["second"].to(self.dtype), t

    def state(self) -> dict[str, Tensor]:
        return {"first": self.m, "second": self.v}


class NAdamTwin(AdamWTwin):
    """Dozat, 2016, with the schedule ``mu_t = b1 (1 - 0.5 * 0.96^(t psi))`` of PyTorch's documentation."""

    def mu(self, t: int) -> float:
        return self.hyper.betas[0] * (1 - 0.5 * 0.96 ** (t * self.hyper.momentum_decay))

    def update(self, grad: Tensor) -> Tensor:
        self.t += 1
        beta1, beta2 = self.hyper.betas
        self.m = beta1 * self.m + (1 - beta1) * grad
        self.v = beta2 * self.v + (1 - beta2) * grad**2
        so_far = math.prod(self.mu(i) for i in range(1, self.t + 1))
        next_mu = self.mu(self.t + 1)
        ahead = next_mu * self.m / (1 - so_far * next_mu) + (1 - self.mu(self.t)) * grad / (1 - so_far)
        return ahead / ((self.v / (1 - beta2**self.t)) ** 0.5 + self.hyper.eps)


# Written from Keller Jordan's post (simple), NVIDIA Emerging-Optimizers (quintic, aol), the reference code of the Polar
# Express (polar-express: its table over 1.01^1, 1.01^3, 1.01^5, as rounded there) and Megatron-Canzona (qwen-express).
NEWTON_SCHULZ: dict[str, list[tuple[float, float, float]]] = {
    "simple": [(3.4445, -4.7750, 2.0315)],
    "quintic": [
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012),
    ],
    "polar-express": [
        (8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250), (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585), (1.8564, -1.2132, 0.3568), (1.8750, -1.25, 0.375),
    ],
    "aol": [(4.0098, -7.0585, 2.4635), (3.4585, -5.5479, 2.5959), (2.7573, -3.2939, 1.4254), (2.7215, -3.0494, 1.3169)],
    "qwen-express": [
        (8.3865, -24.3696, 17.7251), (4.1414, -3.0173, 0.5524), (3.9226, -2.8672, 0.5357), (3.2540, -2.3922, 0.4827),
        (2.2512, -1.5963, 0.3960), (1.8700, -1.2279, 0.3582), (1.8564, -1.2132, 0.3568), (1.8750, -1.25, 0.375),
    ],
}  # fmt: skip


class MuonTwin(Twin):
    """Jordan et al., 2024, momentum as an average; the iteration in ``ns_dtype`` on a matrix turned to be wide."""

    def __init__(self, hyper: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(hyper, shape, dtype)
        self.m = self.zeros()

    def update(self, grad: Tensor) -> Tensor:
        self.t += 1
        beta, (rows, columns) = self.hyper.momentum, self.shape
        self.m = beta * self.m + (1 - beta) * grad
        x = beta * self.m + (1 - beta) * grad if self.hyper.nesterov else self.m
        norm = (x / x.abs().max()).square().sum().sqrt() * x.abs().max() if x.any() else x.new_ones(())
        x = (x / norm).to(getattr(torch, self.hyper.ns_dtype))
        if rows > columns:
            x = x.T
        table = NEWTON_SCHULZ[self.hyper.coefficients]
        for step in range(self.hyper.ns_steps):
            a, b, c = table[step] if step < len(table) else table[-1]
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        if rows > columns:
            x = x.T
        return x.to(self.dtype) * self.scale(rows, columns)

    def scale(self, rows: int, columns: int) -> float:
        if self.hyper.scale == "original":  # Jordan: a tall matrix only
            return max(1, rows / columns) ** 0.5
        larger = max(rows, columns) ** 0.5
        return {"match-rms": 0.2 * larger, "spectral": larger, "none": 1.0}[self.hyper.scale]

    def load(self, state: State, t: int) -> None:
        self.m, self.t = state["momentum"].to(self.dtype), t

    def state(self) -> dict[str, Tensor]:
        return {"momentum": self.m}


def swapped(order: Tensor, matrix: Tensor, axis: int) -> Tensor:
    """Rows (``axis`` 0) or columns of ``matrix`` in ``order``, one after the other."""
    out = torch.empty_like(matrix)
    for new, old in enumerate(order.tolist()):
        if axis == 0:
            out[new] = matrix[old]
        else:
            out[:, new] = matrix[:, old]
    return out


class SoapTwin(Twin):
    """Vyas et al., arXiv 2409.11321, as in the authors' code: the momentum is kept rotated and carried to a new basis.

    The first step only makes the bases.  The number of updates, not of steps, decides bias correction and refreshes.
    """

    def __init__(self, hyper: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(hyper, shape, dtype)
        self.sides = [side for side in (0, 1) if shape[side] <= hyper.max_side]
        self.factor = {side: self.zeros(shape[side], shape[side]) for side in self.sides}
        self.basis = {side: torch.eye(shape[side], dtype=dtype) for side in (0, 1)}
        self.m_rotated, self.v = self.zeros(), self.zeros()

    def rotated(self, x: Tensor) -> Tensor:
        return self.basis[0].T @ x @ self.basis[1]

    def original(self, x: Tensor) -> Tensor:
        return self.basis[0] @ x @ self.basis[1].T

    def update(self, grad: Tensor) -> Tensor:
        out = self.adam(grad) if self.t > 0 else torch.zeros_like(grad)
        m = self.original(self.m_rotated)
        beta = self.hyper.betas[1] if self.hyper.shampoo_beta is None else self.hyper.shampoo_beta
        for side in self.sides:
            x = grad if side == 0 else grad.T
            self.factor[side] = beta * self.factor[side] + (1 - beta) * (x @ x.T)
            if self.t == 0:
                values, vectors = torch.linalg.eigh(self.factor[side])
                self.basis[side] = vectors[:, values.argsort(descending=True)]
            elif self.t % self.hyper.period == 0:
                q, a = self.basis[side], self.factor[side]
                order = torch.argsort((q.T @ a @ q).diag(), descending=True, stable=True)
                self.v = swapped(order, self.v, side)
                self.basis[side] = torch.linalg.qr(a @ swapped(order, q, 1))[0]
        self.m_rotated = self.rotated(m)
        self.t += 1
        return out

    def adam(self, grad: Tensor) -> Tensor:
        (beta1, beta2), g = self.hyper.betas, self.rotated(grad)
        self.m_rotated = beta1 * self.m_rotated + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g**2
        corrected = (1 - beta2**self.t) ** 0.5 / (1 - beta1**self.t)
        return self.original(corrected * self.m_rotated / (self.v**0.5 + self.hyper.eps))

    def load(self, state: State, t: int) -> None:
        self.t, self.v = t, state["second"].to(self.dtype)
        for side, word in ((0, "left"), (1, "right")):
            if side in self.sides:
                self.basis[side] = state[f"basis.{word}.0"].to(self.dtype)
                self.factor[side] = state[f"factor.{word}.0"].to(self.dtype)
        self.m_rotated = self.rotated(state["momentum"].to(self.dtype))

    def state(self) -> dict[str, Tensor]:
        out = {"momentum": self.original(self.m_rotated), "second": self.v}
        for side in self.sides:
            word = ("left", "right")[side]
            out |= {f"basis.{word}.0": self.basis[side], f"factor.{word}.0": self.factor[side]}
        return out


class ShampooTwin(Twin):
    """Gupta, Koren and Singer, arXiv 1802.09568, ``L^(-1/4) M R^(-1/4)``, with averages as in arXiv 2309.06497.

    Averages are corrected for their zero start.  One preconditioned side has both sides' exponents.  Roots by
    eigendecomposition, whatever ``root`` says.
    """

    def __init__(self, hyper: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(hyper, shape, dtype)
        self.sides = [side for side in (0, 1) if shape[side] <= hyper.max_side]
        self.factor = {side: self.zeros(shape[side], shape[side]) for side in self.sides}
        self.root = {side: torch.eye(shape[side], dtype=dtype) for side in (0, 1)}
        self.m, self.v = self.zeros(), self.zeros()

    def update(self, grad: Tensor) -> Tensor:
        self.t += 1
        hyper = self.hyper
        self.m = hyper.momentum * self.m + (1 - hyper.momentum) * grad
        self.v = hyper.graft_beta * self.v + (1 - hyper.graft_beta) * grad**2
        for side in self.sides:
            x = grad if side == 0 else grad.T
            self.factor[side] = hyper.shampoo_beta * self.factor[side] + (1 - hyper.shampoo_beta) * (x @ x.T)
            if self.t == 1 or self.t % hyper.period == 0:
                self.root[side] = self.inverse_root(self.factor[side] / (1 - hyper.shampoo_beta**self.t))
        m = self.m / (1 - hyper.momentum**self.t)
        out = self.root[0] @ m @ self.root[1]
        if hyper.grafting == "none" or not out.any():
            return out
        model = m
        if hyper.grafting == "adam":
            model = m / ((self.v / (1 - hyper.graft_beta**self.t)) ** 0.5 + hyper.graft_eps)
        return out / out.norm() * model.norm()

    def inverse_root(self, a: Tensor) -> Tensor:
        if not a.any():
            return torch.eye(len(a), dtype=a.dtype)
        values, vectors = torch.linalg.eigh(a)
        values = values.clamp(min=0)
        power = self.hyper.exponent * (1 if len(self.sides) == 2 else 2)
        return vectors @ torch.diag((values + self.hyper.ridge * values.max()) ** -power) @ vectors.T

    def load(self, state: State, t: int) -> None:
        self.t, self.m = t, state["momentum"].to(self.dtype)
        if "second" in state:
            self.v = state["second"].to(self.dtype)
        for side in self.sides:
            word = ("left", "right")[side]
            self.factor[side] = state[f"factor.{word}.0"].to(self.dtype)
            self.root[side] = state[f"root.{word}.0"].to(self.dtype)

    def state(self) -> dict[str, Tensor]:
        out = {"momentum": self.m}
        if self.hyper.grafting == "adam":
            out["second"] = self.v
        for side in self.sides:
            word = ("left", "right")[side]
            out |= {f"factor.{word}.0": self.factor[side], f"root.{word}.0": self.root[side]}
        return out


RIDGE = 1e-3
"""Of the 1st source: share of the mean eigenvalue of ``M M^T`` that a power step adds to it."""


class RotationTwin(Twin):
    """Jung, Shin and Lee, arXiv 2602.03515, Algorithms 1 and 2; with the 1st source each side has its own order.

    A side is a list of blocks ``(start, end)``, one unless it is longer than ``max_side`` and ``beyond`` says blocks.
    ``offset`` is the optimizer's after :meth:`Optimizer.place`.
    """

    def __init__(self, hyper: Any, shape: tuple[int, ...], dtype: torch.dtype, offset: int | None = None) -> None:
        super().__init__(hyper, shape, dtype)
        self.offset = hyper.offset if offset is None else offset
        self.m, self.v = self.zeros(), self.zeros()
        self.blocks = [(axis, low, high) for axis in self.axes() for low, high in self.pieces(shape[axis])]
        self.stored: dict[tuple[int, int, int], Tensor] = {}  # bases as they are kept between steps
        self.factor = {b: self.zeros(b[2] - b[1], b[2] - b[1]) for b in self.blocks}
        self.started = False

    def axes(self) -> tuple[int, ...]:
        if self.hyper.geometry == "bilateral":
            return (0, 1)
        return (0,) if self.shape[0] < self.shape[1] else (1,)

    def pieces(self, side: int) -> list[tuple[int, int]]:
        longest = self.hyper.max_side
        if side <= longest:
            return [(0, side)]
        if self.hyper.beyond == "unrotated":
            return []
        return [(low, min(low + longest, side)) for low in range(0, side, longest)]

    def whole(self, axis: int, basis: Mapping[tuple[int, int, int], Tensor]) -> Tensor:
        """The square orthogonal matrix of a side: the blocks' bases along the diagonal, else the identity."""
        out = torch.eye(self.shape[axis], dtype=self.dtype)
        for block, q in basis.items():
            if block[0] == axis:
                out[block[1] : block[2], block[1] : block[2]] = q
        return out

    def part(self, matrix: Tensor, block: tuple[int, int, int]) -> Tensor:
        """The block's rows, or its columns laid down."""
        axis, low, high = block
        return matrix[low:high] if axis == 0 else matrix[:, low:high].T

    def update(self, grad: Tensor) -> Tensor:
        self.t += 1
        (beta1, beta2), hyper = self.hyper.betas, self.hyper
        shampoo_beta = beta2 if hyper.shampoo_beta is None else hyper.shampoo_beta
        for block in self.blocks:
            x = self.part(grad, block)
            self.factor[block] = shampoo_beta * self.factor[block] + (1 - shampoo_beta) * (x @ x.T)
        self.m = beta1 * self.m + (1 - beta1) * grad
        basis = {block: q.to(self.dtype) for block, q in self.stored.items()}
        if not self.started:
            basis = {block: self.first_basis(block) for block in self.blocks}
        elif (self.t + self.offset) % hyper.period == 0:
            basis = {block: self.turned(block, basis[block]) for block in self.blocks}
        self.started = True
        self.stored = {block: q.to(self.kept_dtype) for block, q in basis.items()}
        u, v = self.whole(0, basis), self.whole(1, basis)
        self.v = beta2 * self.v + (1 - beta2) * (u.T @ grad @ v) ** 2
        momentum, weight = self.m, 1 - beta1**self.t
        if hyper.nesterov:
            momentum, weight = beta1 * self.m + (1 - beta1) * grad, 1 - beta1 ** (self.t + 1)
        direction = (u.T @ momentum @ v) / (self.v**0.5 + hyper.eps)
        return hyper.gain * (1 - beta2**self.t) ** 0.5 / weight * (u @ direction @ v.T)

    @property
    def kept_dtype(self) -> torch.dtype:
        wanted: torch.dtype = getattr(torch, self.hyper.basis_dtype)
        return self.dtype if wanted == torch.float32 else wanted  # float32 stands for: as everything else

    def first_basis(self, block: tuple[int, int, int]) -> Tensor:
        if self.hyper.source == "1st":
            return torch.linalg.svd(self.part(self.m, block), full_matrices=True)[0]
        values, vectors = torch.linalg.eigh(self.factor[block])
        return vectors[:, values.argsort(descending=True)]

    def turned(self, block: tuple[int, int, int], q: Tensor) -> Tensor:
        """One step of orthogonal iteration in the order of estimated eigenvalues; the second moment takes it too."""
        if self.hyper.source == "2nd":
            followed = self.factor[block]
            estimate = (q.T @ followed @ q).diag()
        else:
            x = self.part(self.m, block)
            followed = x @ x.T + RIDGE * x.square().sum() / len(x) * torch.eye(len(x), dtype=self.dtype)
            estimate = (x.T @ q).square().sum(0)
        order = torch.argsort(estimate, descending=True, stable=True)
        axis, low, high = block
        here = (slice(low, high), slice(None)) if axis == 0 else (slice(None), slice(low, high))
        self.v[here] = swapped(order, self.v[here], axis)
        return torch.linalg.qr(swapped(order, followed @ q, 1))[0]

    def load(self, state: State, t: int) -> None:
        self.t, self.started = t, t > 0
        self.m, self.v = state["momentum"].to(self.dtype), state["second"].to(self.dtype)
        for block in self.blocks:
            self.stored[block] = state[f"basis.{name(block)}"].to(self.kept_dtype)
            if self.hyper.source == "2nd":
                self.factor[block] = state[f"factor.{name(block)}"].to(self.dtype)

    def state(self) -> dict[str, Tensor]:
        out = {"momentum": self.m, "second": self.v}
        for block in self.blocks:
            out[f"basis.{name(block)}"] = self.stored[block]
            if self.hyper.source == "2nd":
                out[f"factor.{name(block)}"] = self.factor[block]
        return out


def name(block: tuple[int, int, int]) -> str:
    return f"{('left', 'right')[block[0]]}.{block[1]}"


TWINS: dict[str, type[Twin]] = {
    "adamw": AdamWTwin,
    "nadam": NAdamTwin,
    "muon": MuonTwin,
    "soap": SoapTwin,
    "basis-rotation": RotationTwin,
    "shampoo": ShampooTwin,
}
