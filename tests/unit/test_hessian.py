"""The Hessian of single matrices: estimates against exact ones, the command, its record, and what tables make of it."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from impl.__main__ import main
from impl.harness import hessian_run
from impl.harness.hessian_run import Place, bases_of, block_gradient
from impl.harness.hessian_spec import load
from impl.harness.hessian_table import table
from impl.models import catalogue, gpt, weights
from impl.optimizers import eigenbasis
from impl.rotation import hessian
from paper_figures import hessian as rendered
from tests.distributed.ranks import one_rank
from tests.unit.test_figures import overlaps, texts

SHAPE = (4, 5)
SIZE = 20
SAMPLES = 4000
TINY = """
title: Hessian of single matrices
base: {model: qwen3-tiny, method: basis-rotation, layers: 1, steps: 2, batch: 2, sequence: 8, eval_every: 0}
tiers:
  ci:
    layers: [0]
    probes: {sequences: 1, cauchy: 5, normal: 3, iterations: 3}
"""
PUBLISHED = pd.DataFrame(
    [
        ["R8", "norm", "GPT", None, "unrotated", 0.5436, 0.1228, None, "published", "notes"],
        ["R17", "scale", "GPT", None, "MLP", None, None, "10 to 100 times", "published", "article"],
    ],
    columns=["id", "quantity", "model", "gpus", "baseline_system", "baseline_value", "value", "unit", "kind", "source"],
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def toy():
    """A Hessian whose eigenvectors are ``u_i v_j^T``: its eigenvalues ``[m, n]`` of both signs, U, V, and itself."""
    draw = generator(1)
    left, right = (hessian.random_orthogonal(n, draw) for n in SHAPE)
    spectrum = torch.randn(SHAPE, dtype=torch.float64, generator=draw).exp()
    spectrum[1] *= -1
    vectors = torch.kron(left, right)
    return spectrum, left, right, vectors @ torch.diag(spectrum.flatten()) @ vectors.mT


def times(matrix: torch.Tensor) -> hessian.Product:
    """Multiply by a dense Hessian."""
    return lambda probe: (matrix @ probe.flatten()).view(SHAPE)


def entry_sum(product: hessian.Product, samples: int = SAMPLES) -> float:
    return hessian.entry_sum(product, SHAPE, samples, generator()).value


def test_cauchy_probes_find_the_sum_of_entries(toy):
    *_, dense = toy
    measured = hessian.entry_sum(times(dense), SHAPE, SAMPLES, generator())
    exact = float(dense.abs().sum())
    assert measured.value == pytest.approx(exact, rel=0.1)
    assert abs(measured.value - exact) < 4 * measured.error
    assert 0 < measured.error < 0.1 * exact
    assert hessian.entry_sum(times(dense), SHAPE, SAMPLES, generator()) == measured


def test_its_own_basis_leaves_the_eigenvalues_and_a_random_one_does_not(toy):
    spectrum, left, right, dense = toy
    before = entry_sum(times(dense))
    after = entry_sum(hessian.rotated(times(dense), left, right))
    assert after == pytest.approx(float(spectrum.abs().sum()), rel=0.1)
    assert after < 0.5 * before
    other = [hessian.random_orthogonal(n, generator(7)) for n in SHAPE]
    turn = torch.kron(*other)
    found = entry_sum(hessian.rotated(times(dense), *other))
    assert found == pytest.approx(float((turn.mT @ dense @ turn).abs().sum()), rel=0.1)
    assert found > 0.8 * before
    # the bases the wrong way round are just another basis
    assert entry_sum(hessian.rotated(times(dense), left.mT, right.mT)) > 1.5 * after
    one_side = entry_sum(hessian.rotated(times(dense), None, right))
    assert after < one_side


def test_rotation_is_the_optimizers(toy):
    _, left, right, _ = toy
    seen = []
    probe = torch.randn(SHAPE, dtype=torch.float64, generator=generator())
    turned = hessian.rotated(lambda z: seen.append(z) or z, left, right)(probe)
    parts = eigenbasis.blocks(SHAPE, (0, 1), 100)
    bases = [left[None], right[None]]
    torch.testing.assert_close(seen[0], eigenbasis.rotate(probe[None], parts, bases, back=True)[0])
    torch.testing.assert_close(turned, probe)  # there and back


def test_differences_of_gradients_are_the_hessian():
    draw = generator(3)
    a = torch.randn(SIZE, SIZE, dtype=torch.float64, generator=draw)
    at = torch.randn(SHAPE, dtype=torch.float64, generator=draw)

    def value(w: torch.Tensor) -> torch.Tensor:
        return (a @ w.flatten()).tanh().square().sum()

    def gradient(w: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(value)(w)

    exact = torch.func.hessian(value)(at).reshape(SIZE, SIZE)
    probe = torch.empty(SHAPE, dtype=torch.float64).cauchy_(generator=draw)
    for scale in (1.0, 1e8, 1e-8):
        found = hessian.difference_product(gradient, at)(scale * probe)
        torch.testing.assert_close(found, scale * times(exact)(probe), rtol=1e-4, atol=1e-5 * float(found.abs().max()))
    assert hessian.step_error(gradient, at, generator()) < 1e-4
    assert hessian.step_error(gradient, at, generator(), step=1.0) > 0.1  # a step too long is seen
    assert float(hessian.difference_product(gradient, at)(torch.zeros(SHAPE)).norm()) == 0.0
    with pytest.raises(ValueError, match="float64"):
        hessian.difference_product(gradient, at.float())


def test_frobenius_norm_and_the_ends_of_the_normalised_value(toy):
    *_, dense = toy
    norm = hessian.frobenius_norm(times(dense), SHAPE, SAMPLES, generator())
    assert norm.value == pytest.approx(float(dense.norm()), rel=0.05)
    for matrix, expected in ((torch.ones(SIZE, SIZE), 1.0), (-3 * torch.eye(SIZE), 1 / math.sqrt(SIZE))):
        matrix = matrix.double()
        share = hessian.normalised(entry_sum(times(matrix)), float(matrix.norm()), SIZE)
        assert share == pytest.approx(expected, rel=0.1)
    assert math.isnan(hessian.normalised(0.0, 0.0, SIZE))


def test_largest_eigenvalue_keeps_its_sign(toy):
    *_, dense = toy
    shifted = dense - 20 * torch.eye(SIZE)  # all of the spectrum moves, the largest magnitude is negative
    exact = torch.linalg.eigvalsh(shifted)
    found = hessian.largest_eigenvalue(times(shifted), SHAPE, 2000, generator())
    assert found.residual <= 1e-3
    assert found.value == pytest.approx(float(exact[0]), rel=1e-2)
    assert hessian.largest_eigenvalue(times(0 * dense), SHAPE, 5, generator()) == hessian.Eigenvalue(0.0, 0.0)
    one = hessian.largest_eigenvalue(times(dense), SHAPE, 1, generator())
    assert one.residual > 0.1  # stopped too early, which the residual says


def test_random_bases_are_orthogonal():
    q = hessian.random_orthogonal(30, generator())
    torch.testing.assert_close(q.mT @ q, torch.eye(30, dtype=torch.float64))
    assert not torch.equal(q, hessian.random_orthogonal(30, generator(1)))


def test_bases_come_from_the_engines_state():
    state = {"state/a.b/basis.left.2": torch.full((1, 1), 3.0), "state/a.b/basis.left.0": torch.full((2, 2), 2.0)}
    state |= {"state/a.b/basis.left.10": torch.full((1, 1), 4.0), "state/a/basis.right.0": torch.eye(2)}
    left, right = bases_of(state, "a.b")
    assert right is None
    assert left is not None
    assert left.diagonal().tolist() == [2.0, 2.0, 3.0, 4.0]


def test_products_with_the_models_hessian_are_autograds():
    config = catalogue.load("qwen3-tiny", 1)
    tokens = torch.randint(256, (2, 9), generator=generator())
    with one_rank() as group:
        model = gpt.build_model(config, group, dtype=torch.float64, device="cpu")
        weights.initialize(model, config, 0, 0, 1)
        plain = gpt.loss(model, tokens)  # fp32 from the logits on
        assert hessian_run.loss(model, tokens).item() == pytest.approx(plain.item(), rel=1e-6)
        model.requires_grad_(False)
        for role in hessian_run.ROLES:
            name = Place(0, role).name
            parameter = dict(model.named_parameters())[name]
            at = parameter.detach().clone()
            probe = torch.randn(at.shape, dtype=torch.float64, generator=generator(2))
            found = hessian.difference_product(block_gradient(model, name, tokens), at)(probe)
            with torch.no_grad():
                parameter.copy_(at)
            parameter.requires_grad_(True)
            with sdpa_kernel(SDPBackend.MATH):  # the one that can be differentiated twice
                (first,) = torch.autograd.grad(hessian_run.loss(model, tokens), parameter, create_graph=True)
                (exact,) = torch.autograd.grad((first * probe).sum(), parameter)
            parameter.requires_grad_(False)
            assert float((found - exact).norm() / exact.norm()) < 1e-6


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The folder of a run of the smallest experiment, and the experiment's file."""
    folder = tmp_path_factory.mktemp("hessian")
    config = folder / "hessian.yaml"
    config.write_text(TINY)
    assert main(["hessian", "--config", str(config), "--tier", "ci", "--out", str(folder)]) == 0
    return folder, config


def test_the_command_leaves_a_record_and_a_tidy_table(measured):
    folder, config = measured
    (manifest,) = folder.rglob("manifest.json")
    data = json.loads(manifest.read_text())
    assert data["status"] == "done"
    assert data["kind"] == "measured"
    assert data["config_digest"] == load(config, "ci").digest
    frame = pd.read_parquet(folder / "hessian.parquet")
    assert len(frame) == 4 * 10
    assert set(frame["kind"]) == {"measured"}
    assert set(frame["status"]) == {"done"}
    assert frame["value"].notna().all()
    assert frame.query("quantity == 'step_error'")["value"].max() < 1e-4
    sums = frame.query("quantity == 'entry_sum'").pivot_table(index="matrix", columns="basis", values="value")
    assert (sums["before"] != sums["after"]).all()
    assert (sums["random"] != sums["after"]).all()
    assert len(pd.read_csv(folder / "hessian.csv")) == len(frame)


def test_an_interrupted_run_goes_on_and_a_finished_one_is_left_alone(measured, monkeypatch, capsys):
    folder, config = measured
    words = ["hessian", "--config", str(config), "--tier", "ci", "--out", str(folder)]
    (metrics,) = folder.rglob("metrics.jsonl")
    whole = metrics.read_text()
    assert main(words) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert metrics.read_text() == whole
    lines = whole.splitlines(keepends=True)
    metrics.write_text("".join(lines[:-1]) + lines[-1][:40])  # killed while it wrote the last matrix
    (metrics.parent / "manifest.json").unlink()
    asked = []
    measure = hessian_run.measure
    monkeypatch.setattr(hessian_run, "measure", lambda *args: asked.append(args[-1]) or measure(*args))
    assert main(words) == 0
    assert asked == ["0 decoder.layers.0.mlp.linear_fc2.weight"]
    assert metrics.read_text() == whole  # the same numbers to the last digit


def test_a_failure_is_one_line_and_a_record(tmp_path, monkeypatch, capsys):
    config = tmp_path / "hessian.yaml"
    config.write_text(TINY)

    def broken(*_):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(hessian_run, "measure", broken)
    assert main(["hessian", "--config", str(config), "--tier", "ci", "--out", str(tmp_path)]) == 1
    assert "RuntimeError: no such luck" in capsys.readouterr().err
    run = load(config, "ci")
    frame = table(run, tmp_path / "runs" / run.id)
    assert set(frame["status"]) == {"failed"}
    assert len(frame) == 4 * 10
    assert frame["value"].isna().all()


def test_a_training_that_diverged_is_rows_that_say_so(tmp_path):
    config = tmp_path / "hessian.yaml"
    config.write_text(TINY.replace("steps: 2", "steps: 8, lr: 1.0e+37"))
    words = ["hessian", "--config", str(config), "--tier", "ci", "--out", str(tmp_path)]
    assert main(words) == main(words) == 0
    frame = pd.read_parquet(tmp_path / "hessian.parquet")
    assert set(frame["status"]) == {"diverged"}
    assert "**diverged**: the training diverged" in rendered.table(frame, PUBLISHED)
    rendered.figure(frame, PUBLISHED)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("layers: [0]", "layers: [1]", "there is no layer 1: qwen3-tiny has layers 0 to 0"),
        ("layers: [0]", "layers: [0, 0]", "has a number twice"),
        ("layers: [0]", "layers: []", "layers"),
        ("cauchy: 5", "cauchy: 0", "cauchy"),
        ("cauchy: 5", "cauchi: 5", "tiers.ci.probes 'cauchi'"),
        ("method: basis-rotation", "method: pipedream", "pipedream has no bases to measure in: use basis-rotation"),
        ("method: basis-rotation", "method: basis-rotatoin", "did you mean 'basis-rotation'"),
        ("steps: 2", "runtime: processes", "use runtime simulator"),
        ("steps: 2", "stages: 9", "too few for 9 stages"),
        ("  ci:", "  laptop:", "has no tier 'ci'"),
    ],
)
def test_refused_in_one_line(tmp_path, capsys, old, new, says):
    config = tmp_path / "hessian.yaml"
    config.write_text(TINY.replace(old, new))
    assert main(["hessian", "--config", str(config), "--tier", "ci", "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err
    assert not (tmp_path / "out").exists()


def test_table_and_figure_say_what_was_measured(measured):
    frame = pd.read_parquet(measured[0] / "hessian.parquet")
    document = rendered.table(frame, PUBLISHED)
    for text in ("R8, direction only", "0.226", "| R17", "10 to 100", "normaliser that no text states", "1 of 1"):
        assert text in document
    figure = rendered.figure(frame, PUBLISHED)
    written = texts(figure)
    assert all(
        text in written for text in ("Measured", "normalised (1,1)-norm", "largest |eigenvalue|, nats", "rotated")
    )
    assert overlaps(figure) == []


def test_verdicts_follow_the_numbers(measured):
    frame = pd.read_parquet(measured[0] / "hessian.parquet")
    values = {"before": 8.0, "after": 2.0, "random": 9.0}
    sums = frame["quantity"] == "entry_sum"
    frame.loc[sums, "value"] = frame.loc[sums, "basis"].map(values)
    scales = frame["quantity"] == "largest_eigenvalue"
    frame.loc[scales, "value"] = frame.loc[scales, "role"].map(
        {"linear_qkv": 6.0, "linear_proj": 1.0, "linear_fc1": 0.1, "linear_fc2": 3.0}
    )
    assert rendered.ratio(frame, "after").value == 0.25
    assert rendered.lower(frame, "after") == (4, 4)
    assert rendered.lower(frame, "random") == (0, 4)
    assert rendered.scale_ratio(frame).value == 2.0


@pytest.mark.parametrize("missing", ["all", "one"])
def test_missing_numbers_are_cells_that_say_so(measured, missing):
    frame = pd.read_parquet(measured[0] / "hessian.parquet")
    gone = frame["role"] == "linear_fc1" if missing == "one" else frame["role"].notna()
    frame.loc[gone, "value"] = math.nan
    frame.loc[gone, "rows"] = pd.NA
    frame.loc[gone, "status"] = "diverged"
    assert "diverged" in rendered.main_table(frame)
    assert "diverged" in rendered.table(frame, PUBLISHED)
    figure = rendered.figure(frame, PUBLISHED)
    assert "diverged" in texts(figure)
    assert overlaps(figure) == []
