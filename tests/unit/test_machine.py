"""Rooflines: what a block computes, and how long work takes on a data sheet."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from impl.errors import ConfigError
from impl.models import catalogue
from impl.optimizers.base import create, registry
from impl.projection import hardware
from impl.projection.hardware import Group, HardwareSpec
from impl.projection.machine import Block, Roofline

MODEL = catalogue.load("qwen3-32b")
NODE, CLUSTER = Group(8), Group(32, 8)


def block(kind: Any = "layer", tp: int = 1, rows: int = 2, sequence: int = 128, dtype: str = "bfloat16") -> Block:
    return Block(MODEL.arch, kind, tp, rows, sequence, dtype)


def roofline(name: str = "h100x256", **device: Any) -> Roofline:
    found = hardware.load(name)
    spec = found.spec.model_dump()
    spec["device"] |= device
    return Roofline(hardware.Hardware(name, HardwareSpec(**spec), found.count))


def test_a_layer_multiplies_its_matrices() -> None:
    matrices = [p for p in MODEL.parameters(1) if p.name.startswith("decoder.layers.0.") and len(p.shape) == 2]
    assert block().product_flops == 2 * 256 * sum(p.numel for p in matrices)
    assert block(tp=8).product_flops == block().product_flops / 8
    assert block("head").product_flops == 2 * 256 * MODEL.arch.hidden_size * MODEL.arch.vocab_size
    assert block("embedding").product_flops == 0


def test_attention_is_causal_and_grows_with_the_square_of_the_sequence() -> None:
    whole = 4 * 2 * 128 * 128 * MODEL.arch.num_attention_heads * MODEL.arch.head_dim  # scores and values, no mask
    assert block().attention_flops == whole / 2
    assert block(sequence=256).attention_flops == 4 * block().attention_flops
    assert block("head").attention_flops == 0


def test_elementwise_passes_scale_with_tokens_and_type() -> None:
    for kind in ("layer", "embedding", "head"):
        assert block(kind, rows=4).elementwise_bytes == 2 * block(kind).elementwise_bytes
        assert block(kind, dtype="float32").elementwise_bytes > block(kind).elementwise_bytes
        assert block(kind, tp=8).elementwise_bytes <= block(kind).elementwise_bytes


def test_sequence_parallelism_shares_norms_and_residual_sums() -> None:
    one = block(tp=8, rows=64)
    shared = dataclasses.replace(one, norm_ranks=8)
    saved = 2 * 64 * 128 * 10 * MODEL.arch.hidden_size * 7 / 8
    assert one.elementwise_bytes - shared.elementwise_bytes == pytest.approx(saved)
    assert shared.product_flops == one.product_flops
    assert roofline().forward(shared).seconds[0] < roofline().forward(one).seconds[0]


def test_a_forward_is_the_sum_of_its_limits() -> None:
    machine, one = roofline(), block(rows=64)  # large enough for kernels to outlast their launches
    device, reached = machine.hardware.spec.device, machine.hardware.reached
    peak = device.peak_flops["bfloat16"]
    expected = one.product_flops / peak / reached("product") + one.attention_flops / peak / reached("attention")
    expected += one.elementwise_bytes / device.memory_bandwidth / reached("memory")
    found = machine.forward(one)
    assert np.allclose(found.seconds, expected)
    assert sum(found.evidence.values()) == pytest.approx(1)
    assert {e.split(":")[0] for e in found.evidence} == {"roofline"}
    grads = (8 + 2) * sum(p.numel for p in MODEL.parameters(1) if "layers.0." in p.name and len(p.shape) == 2)
    back = machine.backward(one).seconds
    assert np.allclose(back, 2 * expected + grads / device.memory_bandwidth / reached("memory"))


def test_short_kernels_take_as_long_as_their_launches() -> None:
    machine, one = roofline(), block(rows=1, sequence=1)
    assert np.allclose(machine.forward(one).seconds, 25 * machine.hardware.launch)
    assert list(machine.forward(one).evidence) == ["assumption: 5 us a kernel launch"]


def test_the_embeddings_gradient_is_dense() -> None:
    machine, one = roofline(), block("embedding", rows=64)
    table = MODEL.arch.hidden_size * MODEL.arch.vocab_size
    passes = 2 * one.elementwise_bytes + (8 + 3 * 2) * table
    device, reached = machine.hardware.spec.device, machine.hardware.reached
    assert np.allclose(machine.backward(one).seconds, passes / device.memory_bandwidth / reached("memory"))
    once = (4 + 8) * table  # zero; read and scaled
    assert np.allclose(machine.gradients(one).seconds, once / device.memory_bandwidth / reached("memory"))


def test_fp32_runs_at_the_fp32_peak() -> None:
    machine = roofline()
    assert machine.forward(block(dtype="float32")).seconds[0] > 5 * machine.forward(block()).seconds[0]


@pytest.mark.parametrize("name", sorted(registry()))
def test_every_optimizer_has_an_update_time(name: str) -> None:
    machine, optimizer = roofline(), create(name)
    shape = (4096, 4096)
    found = machine.update(optimizer, shape)
    assert (found.seconds > 0).all()
    assert np.isfinite(found.seconds).all()
    assert sum(found.evidence.values()) == pytest.approx(1)
    assert machine.update(optimizer, shape) is found, "asked once for each shape"
    assert machine.update(optimizer, (4096, 8192)).seconds[0] > found.seconds[0]


def test_settings_of_an_optimizer_count() -> None:
    machine = roofline()
    few, many = (machine.update(create("muon", {"ns_steps": n}), (512, 512)) for n in (5, 8))
    assert many.seconds[0] > few.seconds[0]


def test_collectives_take_a_rings_time() -> None:
    machine = roofline()
    link = machine.hardware.link(NODE)
    whole = 8e9
    found = {kind: machine.collective(kind, [whole], NODE).seconds for kind in ("all-reduce", "send", "all-to-all")}
    assert np.allclose(found["all-reduce"], 2 * 7 / 8 * whole / link.bandwidth + 14 * link.latency)
    assert np.allclose(found["send"], whole / link.bandwidth + link.latency)
    assert np.allclose(found["all-to-all"], whole / link.bandwidth + 7 * link.latency)
    even = machine.collective("all-gather", [whole / 8] * 8, NODE).seconds
    assert np.allclose(even, 7 / 8 * whole / link.bandwidth + 7 * link.latency)
    assert np.allclose(machine.collective("reduce-scatter", [whole / 8] * 8, NODE).seconds, even)


def test_unequal_segments_are_rooted_calls_and_empty_ones_are_none() -> None:
    machine = roofline()
    link = machine.hardware.link(NODE)
    sizes = [4e9, 2e9, 2e9, 0, 0, 0, 0, 0]
    assert np.allclose(
        machine.collective("all-gather", sizes, NODE).seconds, 8e9 / link.bandwidth + 3 * 3 * link.latency
    )


def test_small_all_reduces_take_a_tree() -> None:
    machine, everyone = roofline("h100x4096"), Group(4096)
    link = machine.hardware.link(everyone)
    found = machine.collective("all-reduce", [8.0], everyone).seconds
    assert np.allclose(found, 16 / link.bandwidth + 2 * math.log2(4096) * link.latency)
    assert (found < 2 * 4095 * link.latency).all()


def test_nothing_to_move_costs_nothing() -> None:
    machine = roofline()
    for sizes, group in (([8.0], Group(1)), ([0.0], NODE), ([0.0] * 8, NODE)):
        assert machine.collective("all-gather", sizes, group).seconds.max() == 0


def test_more_bytes_and_slower_links_take_longer() -> None:
    machine = roofline()
    for kind in ("all-reduce", "all-to-all", "send"):
        times = [machine.collective(kind, [n], CLUSTER).seconds for n in (1e3, 1e6, 1e9)]
        assert (np.diff(times, axis=0) > 0).all()
        assert (machine.collective(kind, [1e9], NODE).seconds < times[2]).all()


def test_a_missing_peak_is_named() -> None:
    peaks = {"bfloat16": 1e15}
    with pytest.raises(ConfigError, match="h100: give peak_flops for float32"):
        roofline(peak_flops=peaks).forward(block(dtype="float32"))
    assert roofline(peak_flops=peaks).forward(block()).seconds[0] > 0, "negative control"


def test_core_attention_is_a_part_of_the_forward() -> None:
    machine, one = roofline(), block(rows=64)
    alone, whole = machine.attention(one), machine.forward(one)
    device = machine.hardware.spec.device
    peak = device.peak_flops["bfloat16"] * machine.hardware.reached("attention")
    assert np.allclose(alone.seconds, one.attention_flops / peak)
    assert (alone.seconds < whole.seconds).all()


def test_copies_in_memory_and_to_the_host() -> None:
    machine = roofline()
    spec, reached = machine.hardware.spec, machine.hardware.reached
    here = machine.copy(1e9, "device").seconds
    assert np.allclose(here, 2e9 / spec.device.memory_bandwidth / reached("memory"))
    away = machine.copy(1e9, "host")
    assert np.allclose(away.seconds, 1e9 / spec.host.bandwidth / reached("host") + spec.host.latency)
    assert "to the host" in next(iter(away.evidence))
    assert machine.devices_per_node == 8


def test_norm_and_apply_are_passes() -> None:
    machine = roofline()
    device, reached = machine.hardware.spec.device, machine.hardware.reached
    one_pass = 1_000 / device.memory_bandwidth / reached("memory")
    # to float64: 4 read, 8 written; squared in place: 8, 8; summed: 8
    assert np.allclose(machine.norm(1_000).seconds, 36 * one_pass)
    # a limb: product and floor 8 read, 8 written each; sum 8; product 8, 8; difference 16, 8; maximum 8
    assert np.allclose(machine.norm(1_000, exact=True).seconds, (36 + 5 * 88) * one_pass)
    assert np.allclose(machine.norm(2_000).seconds, 2 * machine.norm(1_000).seconds)
    assert machine.apply(1_000, "bfloat16").seconds[0] > machine.apply(1_000, "float32").seconds[0]
