"""What is measured, and that the measuring divides, repeats and uses the project's own code as it says."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from impl.__main__ import main
from impl.canzona.buffers import FamilyBuffer, runs_of
from impl.errors import ConfigError
from impl.harness import experiments, kernels_run, setup
from impl.harness.record import RunFolder, append_row
from impl.harness.step_time_spec import StepTimeSpec
from impl.models import catalogue
from impl.optimizers.base import create
from impl.optimizers.muon import Muon
from impl.projection import kernel_blocks, kernel_needs, kernel_table, kernels
from impl.projection.hardware import Group
from impl.projection.kernel_cases import (
    BlockCase,
    Case,
    CollectiveCase,
    KernelsSpec,
    LaunchCase,
    PassCase,
    ProductCase,
    UpdateCase,
)
from impl.projection.kernel_table import Table
from impl.projection.kernels import Bench
from impl.projection.machine import Block
from impl.projection.measured import Measured
from tests.distributed.ranks import one_rank, run_ranks
from tests.unit.test_kernel_table import row

FOLDER = Path(__file__).resolve().parents[2] / "experiments"
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Counted(Bench):
    """A bench whose work takes as many seconds as its clock says."""

    clock: Any = None

    def seconds(self, work: Any) -> float:
        work()
        return self.clock()


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with one_rank():
        yield


def counted(seconds: float) -> Counted:
    return Counted(CPU, 0, 1, clock=lambda: seconds)


def test_an_update_is_the_mean_of_a_period_for_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "copies", lambda _: 2)  # which a rule with a period does without
    case = UpdateCase(optimizer="soap", settings={"period": 4}, shape=(6, 4), batch=3)
    steps = iter(range(10**6))
    bench = Counted(CPU, 0, 1, clock=lambda: 3.0 * (8.0 if next(steps) % 4 == 3 else 1.0))
    samples = kernels.measure(case, bench, 1e-9)
    assert samples.shape == (kernels.FEWEST, 2)
    # a batch of 3 tensors: a clock of 3 is 1 a tensor; one of four steps takes eight times as long
    assert samples == pytest.approx(np.tile([(3 * 1.0 + 8.0) / 4, 8.0], (kernels.FEWEST, 1)))


def test_an_update_is_the_optimizers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    real = Muon.update_many

    def spy(self: Any, grads: Any, states: Any, step: int) -> Any:
        seen.append((len(grads), step))
        assert all(g.abs().sum() > 0 for g in grads)
        return real(self, grads, states, step)

    monkeypatch.setattr(Muon, "update_many", spy)
    monkeypatch.setattr(kernels, "copies", lambda _: 1)
    kernels.measure(UpdateCase(optimizer="muon", shape=(8, 4), batch=2), Bench(CPU, 0, 1), 1e-9)
    assert {count for count, _ in seen} == {2}
    assert [step for _, step in seen] == list(range(1, len(seen) + 1)), "steps rise, so states go on"


@pytest.mark.parametrize(("kind", "tp"), [("layer", 1), ("layer", 2), ("embedding", 1), ("embedding", 2), ("head", 1)])
def test_a_block_runs_the_model_and_sums_every_gradient(kind: Any, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    summed: Counter[int] = Counter()
    real = FamilyBuffer.accumulate

    def spy(self: FamilyBuffer, parameter: int) -> None:
        real(self, parameter)
        assert self.gradients.abs().sum() > 0
        summed[parameter] += 1

    monkeypatch.setattr(FamilyBuffer, "accumulate", spy)
    copies = 3 if kind == "layer" else 1
    case = BlockCase(model="qwen3-tiny", kind=kind, tp=tp, rows=2, sequence=8, dtype="float32", copies=copies)
    samples = kernels.measure(case, counted(6.0), 1e-9)
    assert samples == pytest.approx(np.full((kernels.FEWEST, 2), 6.0 / copies))
    config = catalogue.load("qwen3-tiny", copies)
    parameters = len(config.parameters(tp, kernel_blocks.part_of(case, config)))
    assert len(summed) == parameters
    assert set(summed.values()) == {1 + 1 + kernels.FEWEST} or set(summed.values()) == {1 + kernels.FEWEST}
    assert case.names()[0][1] == kernel_table.block_key(case.block)


@pytest.mark.parametrize("kernel", ["apply", "norm", "norm-exact", "copy", "copy-from-host"])
def test_passes_touch_all_of_the_data(kernel: Any) -> None:
    case = PassCase(case=kernel, size=1000, piece=300)
    assert kernels.measure(case, counted(2.0), 1e-9) == pytest.approx(np.full((kernels.FEWEST, 1), 2.0))


def test_short_work_is_repeated_and_divided() -> None:
    clock = iter([1e-4, *[0.04] * 100])  # the first call tells how short it is
    bench = Counted(CPU, 0, 1, clock=lambda: next(clock))
    samples = kernels.measure(PassCase(case="norm", size=100, piece=100), bench, 1e-9)
    assert samples == pytest.approx(np.full((kernels.FEWEST, 1), 0.04 / 20)), "2 ms / 0.1 ms"


def test_products_and_launches() -> None:
    assert (kernels.measure(ProductCase(m=4, n=6, k=8, dtype="float32"), Bench(CPU, 0, 1), 1e-9) > 0).all()
    assert kernels.measure(LaunchCase(), counted(5.0), 1e-9) == pytest.approx(0.01)


def _collectives(rank: int, world: int, cases: list[Case]) -> list[list[float]]:
    bench = Bench(CPU, rank, world)
    return [kernels.measure(case, bench, 1e-9)[:, 0].tolist() for case in cases]


@pytest.mark.distributed
def test_every_collective_runs_and_all_ranks_agree() -> None:
    kinds: list[tuple[Any, bool]] = [("all-reduce", True), ("reduce-scatter", True), ("reduce-scatter", False)]
    kinds += [("all-gather", True), ("all-gather", False), ("all-to-all", True), ("send", True)]
    cases = [CollectiveCase(kind=k, ranks=2, size=4096, even=even) for k, even in kinds]
    first, *others = run_ranks(_collectives, 4, [*cases, CollectiveCase(kind="all-reduce", ranks=4, size=64)])
    assert all(other == first for other in others), "the slowest rank counts, on every rank"
    assert all(seconds > 0 for samples in first for seconds in samples)


def laptop(*names: str) -> list[Any]:
    return [run for name in names for run in experiments.runs_of(FOLDER / f"{name}.yaml", "laptop")]


def filled(needs: kernel_needs.Needs) -> Table:
    rows = [
        row(kernel=kernel, key=key, size=size, processes=needs.processes)
        for case in needs.cases()
        for kernel, key, size in case.names()
    ]
    return Table(()).merged(rows)


def ask_everything(machine: Measured, spec: StepTimeSpec) -> int:
    """Ask for all that a projection of ``spec`` needs; return how many questions that were."""
    asked = 0
    for system in spec.systems:
        run = system.run_spec(spec.base)
        made = setup.prepare(run)
        plan = made.plan
        for kind in ("layer", "embedding", "head"):
            block = Block(made.model.arch, kind, run.tp, run.local_batch, run.sequence, run.dtype)
            machine.forward(block), machine.backward(block)
        for family in plan.families:
            rule = made.optimizers[family.optimizer]
            for rank in range(plan.dp):
                for span in runs_of(plan, family, rank):
                    size = span.end - span.start
                    machine.apply(size, run.dtype), machine.norm(size, exact=not family.atomic)
                    shapes = [(size,)] if span.parameter is None else plan.parameters[span.parameter].matrices
                    for shape in shapes:
                        machine.update(rule, shape)
                        asked += 1
            for bucket in family.buckets:
                if bucket.cuts:
                    sizes = [4.0 * (b - a) for a, b in itertools.pairwise(bucket.cuts)]
                    machine.collective("reduce-scatter", sizes, Group(plan.dp, plan.tp))
                    machine.collective("all-gather", sizes, Group(plan.dp, plan.tp))
                else:
                    machine.collective("all-reduce", [4.0 * (bucket.end - bucket.start)], Group(plan.dp, plan.tp))
                asked += 1
    return asked


def test_the_needs_of_experiments_cover_their_plans() -> None:
    runs = laptop("step_time", "generality")
    needs = kernel_needs.of_runs(runs)
    assert sorted(needs) == [2, 4]
    for run in runs:
        machine = Measured(filled(needs[run.spec.world_size]), run.spec.world_size)
        assert ask_everything(machine, run.spec) > 20
    muon = runs[0].spec
    whole = filled(needs[2])
    for kernel in ("forward", "update", "apply", "norm", "reduce-scatter", "all-reduce"):
        less = Table(tuple(r for r in whole.rows if r.kernel != kernel))
        with pytest.raises(ConfigError, match=f"no measurement of {kernel}"):
            ask_everything(Measured(less, 2), muon)


def test_pipelines_need_messages_copies_and_every_stage() -> None:
    needs = kernel_needs.of_runs(laptop("pipeline_time"))
    assert sorted(needs) == [2, 4]
    names = {name for case in needs[4].cases() for name in case.names()}
    assert {"forward", "backward", "update", "apply", "norm", "copy", "send"} <= {kernel for kernel, _, _ in names}
    layers = {case.rows for case in needs[2].cases() if isinstance(case, BlockCase) and case.kind == "layer"}
    assert layers == {16, 8}, "asynchronous ones take the batch whole, synchronous ones in as many parts as stages"
    sizes = {case.size for case in needs[2].cases() if isinstance(case, CollectiveCase) and case.kind == "send"}
    assert max(sizes) == 4 * 16 * 128 * 256


def test_equal_needs_are_measured_once() -> None:
    cases = kernel_needs.of_runs(laptop("step_time", "step_time"))[2].cases()
    names = [name for case in cases for name in case.names()]
    assert len(names) == len(set(names))
    assert len(cases) == len(kernel_needs.of_runs(laptop("step_time"))[2].cases())


def test_sizes_are_at_most_a_step_apart_and_reach_both_ends() -> None:
    grid = kernel_needs._grid({10, 55, 3000})
    assert (grid[0], grid[-1]) == (10, 3000)
    assert all(b / a <= kernel_needs.STEP * 1.01 for a, b in itertools.pairwise(grid))
    assert kernel_needs._grid({7}) == [7]


def test_full_scale_is_whole_matrices_and_shards_of_products() -> None:
    cases = kernel_needs.of_model(catalogue.load("qwen3-32b"), ["muon", "soap"], tp=8).cases()
    shapes = {case.shape for case in cases if isinstance(case, UpdateCase) and case.optimizer == "soap"}
    assert (51200, 5120) in shapes
    products = {(case.n, case.k) for case in cases if isinstance(case, ProductCase)}
    assert (6400, 5120) in products
    first = next(i for i, c in enumerate(cases) if isinstance(c, UpdateCase))
    assert cases[first].optimizer == "muon", "the order in which they were asked for"


TINY = ["--model", "qwen3-tiny", "--layers", "1", "--device", "cpu", "--sequence", "16", "--case-seconds", "0.001"]


@pytest.mark.slow
def test_the_command_fills_a_table_and_goes_on_where_it_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    out = tmp_path / "t.csv"
    monkeypatch.setattr(kernel_needs, "of_model", lambda *_, **__: small_needs())
    assert main(["kernels", *TINY, "--seconds", "1e-9", "--out", str(out)]) == 0
    left = kernel_table.read(out)
    assert {r.n for r in left.rows} == {0}
    assert "time was used up" in left.rows[0].note
    assert main(["kernels", *TINY, "--out", str(out)]) == 0
    found = kernel_table.read(out)
    assert all(r.n >= kernels.FEWEST and r.processes == 1 for r in found.rows)
    assert {r.kernel for r in found.rows} == {"launch", "norm", "update"}
    assert found.rows[0].commit
    assert "measured" in capfd.readouterr().out

    def never(*_: Any) -> Any:
        raise AssertionError("everything is there")

    monkeypatch.setattr(kernels_run, "execute", never)
    assert main(["kernels", *TINY, "--out", str(out)]) == 0
    assert "3 kernels known already" in capfd.readouterr().out
    with pytest.raises(AssertionError, match="everything is there"):
        main(["kernels", *TINY, "--fresh", "--out", str(out)])
    text = out.read_text().replace(found.device, "Another CPU")
    out.write_text(text)
    assert main(["kernels", *TINY, "--out", str(out)]) == 2
    assert "holds times of Another CPU" in capfd.readouterr().err


@pytest.mark.timeout(60)
def test_rows_are_in_the_table_while_the_job_runs_and_after_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "t.csv"
    facts = kernels_run.place("cpu", 1) | {"cores": 2, "commit": "c", "date": "d"}
    seen: list[int] = []

    def write(folder: Path, case: Case, note: str = "") -> None:
        samples = np.empty((0, 1)) if note else np.full((3, 1), 2e-3)
        rows = [dataclasses.asdict(r) for r in kernels_run._rows(case, 1, samples, note, facts)]
        append_row(RunFolder(folder).metrics, {"event": "kernel", "step": 1, "rows": rows})

    def job(target: str, spec: KernelsSpec, folder: Path, **_: Any) -> int:
        for number, case in enumerate(spec.cases[:2], start=1):
            write(folder, case)
            while not out.exists() or sum(r.n > 0 for r in kernel_table.read(out).rows) < number:
                time.sleep(0.01)  # forever, if rows came only at the end: the time limit of this test
            seen.append(number)
        write(folder, spec.cases[2], "no time")
        return 143  # as after SIGTERM

    monkeypatch.setattr(kernel_needs, "of_model", lambda *_, **__: small_needs())
    monkeypatch.setattr(kernels_run, "KEEP_S", 0.01)
    monkeypatch.setattr(kernels_run.launch, "execute", job)
    assert main(["kernels", *TINY, "--out", str(out)]) == 143
    assert seen == [1, 2]
    assert sorted(r.n for r in kernel_table.read(out).rows) == [0, 3, 3], "what was written last is kept too"


def small_needs() -> kernel_needs.Needs:
    needs = kernel_needs.Needs(1)
    needs.launch()
    needs.update(create("muon"), (8, 4), 1)
    needs.passes("norm", "float32", [1000], 100)
    return needs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say what to measure"),
        (["--model", "qwen3-tiny", "--experiment", "x.yaml"], "say what to measure"),
        (["--model", "qwen3-tni"], "did you mean 'qwen3-tiny'"),
        (["--model", "qwen3-tiny", "--optimizer", "muno"], "did you mean 'muon'"),
        (["--model", "qwen3-tiny", "--processes", "0"], "at least 1"),
        (["--model", "qwen3-tiny", "--seconds", "0"], "above 0"),
        (["--experiment", str(FOLDER / "step_time.yaml"), "--processes", "3"], "the runs have 2, 4 ranks"),
        (["--experiment", str(FOLDER / "precision.yaml")], "only step-time and pipeline"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["kernels", "--device", "cpu", "--out", str(tmp_path / "t.csv"), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "t.csv").exists()


def test_what_does_not_fit_says_so() -> None:
    case = UpdateCase(optimizer="muon", shape=(2**22, 2**22))
    spec = KernelsSpec(cases=(case,))
    samples, note = kernels_run._attempt(case, Bench(CPU, 0, 1), spec, 0.0)
    assert len(samples) == 0
    assert note.startswith("needs ")
    (found,) = kernels_run._rows(
        case, 1, samples, note, kernels_run.place("cpu", 1) | {"cores": 2, "commit": "c", "date": "d"}
    )
    assert found.n == 0
    assert math.isnan(found.seconds)


def test_settings_survive_the_way_to_the_processes() -> None:
    spec = KernelsSpec(cases=tuple(kernel_needs.of_runs(laptop("step_time"))[4].cases()), processes=4)
    assert KernelsSpec(**yaml.safe_load(yaml.safe_dump(spec.resolved()))) == spec
