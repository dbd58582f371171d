"""Hardware files: all of them load, links belong to the right place, and mistakes get one clear line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from impl.errors import ConfigError
from impl.projection import hardware
from impl.projection.hardware import Group


@pytest.mark.parametrize("kind", hardware.names())
def test_every_file_loads_and_is_plausible(kind: str) -> None:
    found = hardware.load(f"{kind}x16")
    assert (found.count, found.name, found.spec.id) == (16, f"{kind}x16", kind)
    device = found.spec.device
    assert device.peak_flops["bfloat16"] >= device.peak_flops["float32"] >= device.peak_flops["float64"]
    assert found.memory_bytes == device.memory_bytes > 10**10
    assert found.spec.node.bandwidth > found.spec.network.bandwidth
    for source in (device.source, found.spec.node.source, found.spec.network.source, found.spec.host.source):
        assert len(source) > 10, "every figure names its source"
    for name, assumed in found.spec.efficiency.items():
        samples = found.reached(name)
        assert samples[0] == assumed.nominal
        assert "assumption" in assumed.source
        assert f"{assumed.nominal:.2f}" in found.assumption(name)


def test_the_kinds_of_the_issue_are_there() -> None:
    assert set(hardware.names()) >= {"h100", "h200", "a100-40", "a100-80", "rtx3090"}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("h100", "for example h100x8"),
        ("h100x0", "unknown hardware 'h100x0': did you mean 'h100'"),
        ("h10x8", "did you mean 'h100'"),
        ("H100x8", "known are"),
        ("", "known are"),
        ("../h100x8", "known are"),
    ],
)
def test_wrong_names_get_one_line(name: str, part: str) -> None:
    with pytest.raises(ConfigError, match="hardware") as error:
        hardware.load(name)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def write(folder: Path, **changes: object) -> Path:
    data = yaml.safe_load((hardware.FOLDER / "h100.yaml").read_text())
    data["id"] = "mine"
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = data
        for key in parents:
            place = place[key]
        if value is None:
            del place[last]
        else:
            place[last] = value
    (folder / "mine.yaml").write_text(yaml.safe_dump(data))
    return folder


def test_a_file_in_another_folder_loads(tmp_path: Path) -> None:
    assert hardware.load("minex4", write(tmp_path)).count == 4


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"efficiency__qr": None}, "efficiency needs qr"),
        ({"efficiency__qr__low": 0.9}, "low <= nominal <= high"),
        ({"efficiency__qr__high": 1.5}, "less than or equal to 1"),
        ({"device__memory_bytes": 0}, "memory_bytes"),
        ({"device__colour": "green"}, "unknown setting of device 'colour'"),
        ({"network__bandwith": 1.0}, "did you mean 'bandwidth'"),
        ({"id": "other"}, "id must be 'mine'"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, changes: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError) as error:
        hardware.load("minex4", write(tmp_path, **changes))
    assert part in str(error.value)
    assert "mine.yaml" in str(error.value)


def test_links_inside_a_node_and_between_nodes() -> None:
    found = hardware.load("h100x256")
    inside, between = found.link(Group(8)), found.link(Group(32, 8))
    node, network = found.spec.node, found.spec.network
    assert np.allclose(inside.bandwidth, node.bandwidth * found.reached("node"))
    assert inside.latency[0] == node.latency
    assert np.allclose(between.bandwidth, network.bandwidth * found.reached("network"))
    assert between.latency[0] == network.latency
    assert "in a node" in inside.evidence
    assert "between nodes" in between.evidence
    assert found.link(Group(2, 8)).evidence == between.evidence, "two ranks a node apart are not in one node"
    assert found.link(Group(2, 7)).evidence == inside.evidence


def test_members_of_one_node_share_their_network_up_to_their_own_link() -> None:
    found = hardware.load("h100x256")
    shared = found.link(Group(64, 4))  # two members a node
    alone = found.link(Group(32, 8))
    assert np.allclose(shared.bandwidth, 2 * alone.bandwidth)
    whole = found.link(Group(256)).bandwidth
    assert (whole <= found.link(Group(8)).bandwidth + 1).all()
    assert (whole >= shared.bandwidth).all()
