"""``impl optimizers``: what it says of every optimizer is what the optimizer does."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import pytest
import torch
from pydantic import Field

from impl.__main__ import main
from impl.cli.optimizers import descriptions, type_text
from impl.harness import optimizer_files
from impl.optimizers.base import HyperParameters, create, registry


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["optimizers", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_every_optimizer_with_settings_state_and_cost(capsys):
    found = listed(capsys)
    assert set(found) == set(registry())
    for name, entry in found.items():
        optimizer, cls = create(name), registry()[name]
        assert entry["display_name"] == optimizer_files.read()[name].display_name
        assert entry["kind"] == ("atomic" if cls.atomic else "elementwise")
        assert entry["scale_invariant"] == cls.scale_invariant
        assert entry["cost_formula"] == cls.cost_formula
        settings = {h["name"]: h["default"] for h in entry["hyper_parameters"]}
        assert settings == cls.Hyper().model_dump(mode="json")
        assert all(h["type"] for h in entry["hyper_parameters"])
        assert set(entry["shapes"]) == {"4096x1024", "1024x4096", "2048x2048"}
        for text, costs in entry["shapes"].items():
            rows, columns = map(int, text.split("x"))
            assert costs["flops"] == optimizer.flops((rows, columns)) > 0
            assert costs["state_bytes"] == optimizer.state_bytes((rows, columns))
            assert costs["state_bytes"] == sum(tensor["bytes"] for tensor in costs["state"].values())


@pytest.mark.parametrize("name", registry())
def test_state_is_that_of_the_optimizer(capsys, name):
    costs = listed(capsys, name, "--shape", "6x4", "3x5")[name]["shapes"]
    for shape in ((6, 4), (3, 5)):
        state = create(name).init_state(shape, torch.device("cpu"))
        shown = costs[f"{shape[0]}x{shape[1]}"]["state"]
        assert {k: (v["shape"], v["dtype"]) for k, v in shown.items()} == {
            k: (list(t.shape), str(t.dtype).removeprefix("torch.")) for k, t in state.items()
        }


def test_the_list_for_people_names_settings_state_and_cost(capsys):
    assert main(["optimizers", "muon", "--shape", "4096x1024"]) == 0
    text = capsys.readouterr().out
    for part in ("muon (Muon): atomic, scale-invariant", "momentum 4096x1024", "16 MiB", "96.64 G", "float >= 0, < 1"):
        assert part in text
    assert registry()["muon"].cost_formula in text
    assert "soap" not in text


@pytest.mark.parametrize("shape", ["4096", "4096x", "0x4", "4x-1", "axb", "2x3x4", ""])
def test_a_bad_shape_is_one_line(capsys, shape):
    assert main(["optimizers", f"--shape={shape}"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line == f"error: --shape {shape!r}: write rows x columns of a matrix, for example 4096x1024"


def test_an_unknown_optimizer_names_the_nearest(capsys):
    assert main(["optimizers", "mun"]) == 2
    assert "did you mean 'muon'" in capsys.readouterr().err


class Example(HyperParameters):
    """Settings.

    alpha: the first
        one; beta, gamma: of two things.  delta: see alpha: it is the same.
    """

    alpha: float = 1.0
    beta: int = 2
    gamma: int = 3
    delta: int = 4
    described: int = Field(default=5, description="its own words")


class Derived(Example):
    """More settings.

    alpha: another text.
    """


def test_descriptions_come_from_the_docstring_of_the_nearest_class():
    assert descriptions(Example) == {
        "alpha": "the first one",
        "beta": "of two things",
        "gamma": "of two things",
        "delta": "see alpha: it is the same",
    }
    assert descriptions(Derived)["alpha"] == "another text"
    assert descriptions(Derived)["beta"] == "of two things"


@pytest.mark.parametrize(
    ("annotation", "limits", "text"),
    [
        (float, (), "float"),
        (Annotated[float, Field(ge=0.0, lt=1.0)], (), "float >= 0, < 1"),
        (int | None, (), "int or null"),
        (Annotated[float, Field(gt=0)] | None, (), "float > 0 or null"),
        (Literal["a", "b"], (), "a | b"),
        (tuple[Annotated[float, Field(le=2.5)], Annotated[float, Field(le=2.5)]], (), "[float <= 2.5 each]"),
        (tuple[float, int], (), "[float, int]"),
        (bool, (), "bool"),
    ],
)
def test_types_for_people(annotation, limits, text):
    assert type_text(annotation, limits) == text
