"""Bases that follow a side of a matrix: directions without signal, QR in pieces, singular vectors."""

from __future__ import annotations

import pytest
import torch

from impl.optimizers import eigenbasis
from tests.unit.matrix_cases import bases, clone, rotation, run


def test_directions_without_momentum_stay(monkeypatch):
    """The 1st source: columns that span what the momentum lacks stay, but for their order, between refreshes."""
    flat = [torch.outer(torch.arange(1.0, 10.0), torch.tensor([1.0, -2.0, 3.0, 1.0]))] * 6

    def least_overlap():
        optimizer = rotation(source="1st", period=1)
        _, state = run(optimizer, flat[:5])
        before = bases(clone(state))["basis.left.0"]
        optimizer.update(flat[5], state, 6)
        return float((before.T @ bases(state)["basis.left.0"]).abs().amax(0).min())

    assert least_overlap() > 0.99
    monkeypatch.setattr(eigenbasis, "RIDGE", 0.0)
    assert least_overlap() < 0.9, "negative control"


@pytest.mark.parametrize(("shape", "rows"), [((50, 7), 10), ((50, 7), 50), ((53, 7), 8), ((2, 40, 5), 9), ((7, 7), 4)])
def test_tsqr_is_qr_up_to_signs(shape, rows):
    tall = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    q, r = eigenbasis.tsqr(tall, rows)
    expected = torch.linalg.qr(tall.double())
    torch.testing.assert_close(q @ r, tall, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(q.mT @ q, torch.eye(shape[-1]).expand(*shape[:-2], -1, -1), rtol=0, atol=3e-6)
    assert torch.equal(r, r.triu())
    torch.testing.assert_close(q.abs().double(), expected.Q.abs(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(r.abs().double(), expected.R.abs(), rtol=1e-4, atol=1e-5)


def test_tsqr_refuses_a_wide_matrix():
    with pytest.raises(ValueError, match="at least as many rows"):
        eigenbasis.tsqr(torch.zeros(3, 4), 2)


def test_a_wide_matrix_has_all_left_singular_vectors(monkeypatch):
    monkeypatch.setattr(eigenbasis, "TSQR_ROWS", 12)
    wide = torch.randn(2, 5, 60, generator=torch.Generator().manual_seed(4))
    u = eigenbasis.left_singular_vectors(wide)
    diagonal = u.mT @ (wide @ wide.mT) @ u
    torch.testing.assert_close(diagonal, torch.diag_embed(torch.linalg.svdvals(wide) ** 2), rtol=1e-3, atol=1e-3)
