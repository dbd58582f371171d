"""The machine that a kernel table makes: exact rows, interpolation, spread, and what is missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from impl.errors import ConfigError
from impl.models import catalogue
from impl.optimizers.base import create
from impl.projection import hardware, kernel_needs, kernel_table, measured
from impl.projection.hardware import Group
from impl.projection.kernel_table import Table
from impl.projection.machine import Block, Roofline
from impl.projection.measured import Measured, load_machine
from impl.projection.uncertain import Range
from tests.unit.test_kernel_table import UNMEASURED, row

BLOCK = Block(catalogue.load("qwen3-small").arch, "layer", 1, 2, 128, "float32")
MUON, ADAMW = create("muon"), create("adamw")


def table(*rows: kernel_table.Row) -> Table:
    return Table(tuple(rows), "t.csv")


def sized(kernel: str, key: str, times: dict[int, float], processes: int = 2) -> list[kernel_table.Row]:
    return [
        row(kernel=kernel, key=key, size=size, seconds=t, q25=t * 0.9, q75=t * 1.2, processes=processes)
        for size, t in times.items()
    ]


def test_exact_rows_and_their_evidence() -> None:
    key = kernel_table.block_key(BLOCK)
    update = kernel_table.update_key(MUON, (8, 4))[0]
    rows = [row(kernel="forward", key=key, size=0), row(kernel="backward", key=key, size=0, seconds=3e-3)]
    machine = Measured(table(*rows, row(kernel="update", key=update, size=0, seconds=1.5e-3)), 2)
    assert machine.forward(BLOCK).seconds[0] == pytest.approx(2e-3)
    assert machine.backward(BLOCK).seconds[0] == pytest.approx(3e-3)
    assert machine.update(MUON, (8, 4)).seconds[0] == pytest.approx(1.5e-3)
    assert machine.forward(BLOCK).evidence == {"measured: Some CPU, 2 cores, n=9, t.csv": 1.0}
    assert machine.shared
    assert machine.name == "local"
    assert machine.memory_bytes is None


def test_the_number_of_busy_processes_counts() -> None:
    """A time that was measured alone says nothing about a machine whose cores are shared."""
    update = kernel_table.update_key(MUON, (768, 256))[0]
    machine = Measured(table(row(kernel="update", key=update, size=0, processes=1)), 2)
    message = "no measurement of update muon 768x256 with 2 processes: run `python -m impl kernels --out FILE "
    with pytest.raises(ConfigError, match=message):
        machine.update(MUON, (768, 256))
    assert machine.on(1).update(MUON, (768, 256)).seconds[0] == pytest.approx(2e-3)


def test_quartiles_become_the_range_of_ninety_percent() -> None:
    update = kernel_table.update_key(MUON, (8, 4))[0]
    machine = Measured(table(row(kernel="update", key=update, size=0)), 2)
    logs = np.log(machine.update(MUON, (8, 4)).seconds)
    low, nominal, high = (np.log(x) for x in (1e-3, 2e-3, 4e-3))
    wider = 1.6448536 / 0.6744898
    found = Range.of_quartiles(1e-3, 2e-3, 4e-3)
    assert np.log([found.low, found.high]) == pytest.approx(
        [nominal + wider * (low - nominal), nominal + wider * (high - nominal)]
    )
    assert found.nominal == 2e-3
    assert logs[0] == pytest.approx(nominal)
    assert 0.3 < np.mean((logs[1:] > low) & (logs[1:] < high)) < 0.75, "half of the draws lie between the quartiles"


def test_sizes_are_interpolated_exactly_at_what_was_measured() -> None:
    machine = Measured(table(*sized("apply", "float32", {100: 1e-3, 1600: 4e-3, 6400: 16e-3})), 2)
    for size, seconds in ((100, 1e-3), (1600, 4e-3), (6400, 16e-3)):
        assert machine.apply(size, "float32").seconds[0] == pytest.approx(seconds, rel=1e-12)
    assert machine.apply(400, "float32").seconds[0] == pytest.approx(2e-3), "the middle of a power law"
    assert machine.apply(3200, "float32").seconds[0] == pytest.approx(8e-3)
    assert machine.apply(25600, "float32").seconds[0] == pytest.approx(64e-3), "four times as much, in proportion"
    for size, end in ((25600, 6400), (25, 100)):
        (evidence,) = machine.apply(size, "float32").evidence
        assert evidence.endswith(f"t.csv (extrapolated from size {end})")
    for size in (100, 6400):
        assert "(" not in next(iter(machine.apply(size, "float32").evidence)), "measured at this very size"
    alone = Measured(table(*sized("apply", "float32", {100: 1e-3})), 2)
    assert next(iter(alone.apply(200, "float32").evidence)).endswith("(extrapolated from size 100)")
    assert machine.apply(25, "float32").seconds[0] == pytest.approx(0.5e-3)
    assert machine.apply(0, "float32").seconds[0] == 0
    assert next(iter(machine.apply(400, "float32").evidence)).endswith("(between sizes)")
    for size in (24, 25601):
        with pytest.raises(ConfigError, match=f"apply {size} float32 with 2 processes"):
            machine.apply(size, "float32")
    with pytest.raises(ConfigError, match="bfloat16"):
        machine.apply(100, "bfloat16")


@pytest.mark.parametrize(("times", "above"), [({100: 4e-3, 200: 1e-3}, 1e-3), ({100: 1e-3, 200: 9e-3}, 36e-3)])
def test_beyond_the_ends_noise_does_not_run_away(times: dict[int, float], above: float) -> None:
    """Two noisy neighbours may fall, or rise faster than their sizes: neither is taken for a law."""
    machine = Measured(table(*sized("norm", "float32", times)), 2)
    assert machine.norm(800).seconds[0] == pytest.approx(above)


def test_elementwise_updates_are_interpolated_and_matrices_never() -> None:
    key = kernel_table.update_key(ADAMW, (64,))[0]
    machine = Measured(table(*sized("update", key, {64: 1e-3, 256: 4e-3})), 2)
    assert machine.update(ADAMW, (16, 8)).seconds[0] == pytest.approx(2e-3)
    update = kernel_table.update_key(MUON, (8, 4))[0]
    machine = Measured(table(row(kernel="update", key=update, size=0)), 2)
    with pytest.raises(ConfigError, match="update muon 4x8"):
        machine.update(MUON, (4, 8))


def test_the_exact_norm_has_rows_of_its_own() -> None:
    rows = [*sized("norm", "float32", {100: 1e-3}), *sized("norm-exact", "float32", {100: 7e-3})]
    machine = Measured(table(*rows), 2)
    assert machine.norm(100).seconds[0] == pytest.approx(1e-3)
    assert machine.norm(100, exact=True).seconds[0] == pytest.approx(7e-3)


def test_collectives_by_ranks_size_and_evenness() -> None:
    even = sized("reduce-scatter", kernel_table.collective_key(2), {1000: 1e-3, 4000: 4e-3})
    rooted = sized("reduce-scatter", kernel_table.collective_key(2, even=False), {1000: 3e-3})
    machine = Measured(table(*even, *rooted), 2)
    assert machine.collective("reduce-scatter", [1000, 1000], Group(2)).seconds[0] == pytest.approx(2e-3)
    assert machine.collective("reduce-scatter", [300, 700], Group(2, 2)).seconds[0] == pytest.approx(3e-3)
    assert machine.collective("reduce-scatter", [1000], Group(1)).seconds[0] == 0
    assert machine.collective("all-reduce", [0], Group(2)).seconds[0] == 0
    with pytest.raises(ConfigError, match="reduce-scatter 4 ranks"):
        machine.collective("reduce-scatter", [500] * 4, Group(4))


def test_what_is_missing_names_a_command_that_measures_it(tmp_path: Path) -> None:
    """``impl kernels --model`` measures neither blocks nor collectives; the file is named with its folder."""
    path = tmp_path / "deep" / "t.csv"
    table(*sized("norm", "float32", {100: 1e-3}, processes=1)).write(path)
    machine = load_machine("local", path, 2)
    assert isinstance(machine, Measured)
    both = [lambda: machine.update(MUON, (8, 4)), lambda: machine.norm(9), lambda: machine.copy(9.0)]
    both.append(lambda: machine.apply(9, "bfloat16"))
    runs = [lambda: machine.forward(BLOCK), lambda: machine.backward(BLOCK), lambda: machine.apply(9, "float32")]
    runs.append(lambda: machine.collective("all-reduce", [100.0], Group(2)))
    for ask in both:
        with pytest.raises(ConfigError, match=f"kernels --out {path} --processes 2 --model MODEL .*--experiment"):
            ask()
    for ask in runs:
        with pytest.raises(ConfigError, match=f"kernels --out {path} --experiment") as caught:
            ask()
        assert "--model" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"forward attention .*use another --recompute") as caught:
        machine.attention(BLOCK)
    assert "impl kernels" not in str(caught.value), "which no command measures"


def test_the_advice_is_true_of_what_the_commands_measure() -> None:
    config = catalogue.load("qwen3-tiny")
    cases = kernel_needs.of_model(config, ["muon"], tp=1).cases()
    names = {kernel for case in cases for kernel, _, _ in case.names()}
    assert {*measured.ALONE, "apply"} <= names
    assert not names & {"forward", "backward", "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "send"}
    assert {key for case in cases for kernel, key, _ in case.names() if kernel == "apply"} == {"bfloat16"}


def test_a_roofline_answers_what_the_table_lacks() -> None:
    described = Roofline(hardware.load("h100x8"))
    update = kernel_table.update_key(MUON, (8, 4))[0]
    rows = [row(kernel="update", key=update, size=0, processes=1, backend="cuda", device="NVIDIA H100 80GB HBM3")]
    machine = Measured(table(*rows, row(key="x", **UNMEASURED)), 1, described)
    assert machine.update(MUON, (8, 4)).seconds[0] == pytest.approx(2e-3)
    assert machine.update(MUON, (4, 8)).evidence == described.update(MUON, (4, 8)).evidence
    assert machine.norm(10**6).evidence == described.norm(10**6).evidence
    assert machine.forward(BLOCK).evidence == described.forward(BLOCK).evidence
    collective = ("all-gather", [1e6] * 8, Group(8))
    assert machine.collective(*collective).evidence == described.collective(*collective).evidence
    assert (machine.name, machine.memory_bytes, machine.shared) == ("h100x8", described.memory_bytes, False)


def test_load_machine(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    table(*sized("norm", "float32", {100: 1e-3})).write(path)
    assert load_machine("local", path, 2).norm(100).seconds[0] == pytest.approx(1e-3)
    assert isinstance(load_machine("h100x8", None), Roofline)
    with pytest.raises(ConfigError, match="with 4 processes"):
        load_machine(None, path, 4).norm(100)
    with pytest.raises(ConfigError, match=r"Some CPU, 2 cores, which is no NVIDIA H100"):
        load_machine("h100x8", path)
    for nothing in (None, "local"):
        with pytest.raises(ConfigError, match="impl kernels"):
            load_machine(nothing, None)
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        load_machine("h10x8", None)
    cuda = {"backend": "cuda", "device": "NVIDIA H100 80GB HBM3", "processes": 1}
    table(row(**cuda)).write(path)
    machine = load_machine("h100x8", path, 8)
    assert machine.norm(100).seconds[0] == pytest.approx(2e-3), "a GPU has a rank of its own"
    table(row(**UNMEASURED)).write(path)
    with pytest.raises(ConfigError, match="holds no measured time"):
        load_machine("local", path)


def test_the_spread_carries_over_to_sizes_in_between() -> None:
    machine = Measured(table(*sized("apply", "float32", {100: 1e-3, 400: 4e-3})), 2)
    assert machine.apply(200, "float32").seconds[1:].std() > 0
    assert machine.apply(200, "float32").seconds == pytest.approx(machine.apply(200, "float32").seconds)
    assert measured.REACH == 4
