"""Memory of a rank: exact where shapes decide it, autograd's own count where a formula does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from impl.canzona.strategies import PlanOptions
from impl.harness.planning import Planned, plan_workload, workload
from impl.models import catalogue, gpt, weights
from impl.projection import hardware, memory
from impl.projection.machine import Roofline
from impl.projection.workload import Workload
from tests.distributed.ranks import one_rank
from tests.models import variant
from tests.unit.fake_machines import Altered

BIG, TINY = catalogue.load("qwen3-32b"), catalogue.load("qwen3-tiny", layers=3)
POINT = PlanOptions(bucket_elements=400_000_000)


def planned(strategy: str, dp: int, tp: int, config: catalogue.ModelConfig = TINY, **options: Any) -> Planned:
    chosen = PlanOptions(**({"bucket_elements": 9_000, "fallback": False} | options))
    return plan_workload(workload(config, "muon", tp, options=chosen), strategy, dp, chosen)


@pytest.fixture(scope="module")
def published() -> dict[str, Planned]:
    return {name: plan_workload(workload(BIG, "muon", 8, options=POINT), name, 32, POINT) for name in ("sc", "canzona")}


def test_parameters_and_gradients_are_the_flat_buffers() -> None:
    made = planned("canzona", 4, 2)
    found = memory.needed(made.plan, made.costs, TINY, Workload(sequence=16, batch=4))
    elements = sum(family.buckets[-1].end for family in made.plan.families)
    assert found.parts["parameters"] == 2 * elements
    assert found.parts["gradients"] == 4 * elements
    in_fp32 = memory.needed(made.plan, made.costs, TINY, Workload(sequence=16, batch=4, dtype="float32"))
    assert in_fp32.parts["parameters"] == 4 * elements
    assert in_fp32.parts["masters"] == 0, "fp32 parameters are their own masters"
    assert found.parts["masters"] > 0


@pytest.mark.parametrize("strategy", ["sc", "asc", "canzona", "nv-layerwise"])
def test_all_ranks_together_hold_each_master_and_state_as_often_as_owners_and_hosts(strategy: str) -> None:
    dp, tp = 4, 2
    made = planned(strategy, dp, tp)
    masters, state = memory.owned_bytes(made.plan, made.costs)
    matrices = [(p, c) for p, c in zip(made.plan.parameters, made.costs, strict=True) if c.atomic]
    rest = [p for p, c in zip(made.plan.parameters, made.costs, strict=True) if not c.atomic]
    owners = dp if strategy == "sc" else 1
    hosts = tp if strategy in ("sc", "nv-layerwise") else 1
    moments = sum(c.state_bytes(p.shape) for p, c in matrices) * owners * hosts
    local = sum(p.local_numel(tp) for p in rest) * tp * owners
    assert masters.sum() >= 4 * (sum(p.numel for p, _ in matrices) * owners + local)
    assert masters.sum() < 4 * (sum(p.numel for p, _ in matrices) * owners + local) * 1.1, "gaps are small"
    assert state.sum() - 2 * (masters.sum() - 4 * sum(p.numel for p, _ in matrices) * owners) == moments
    sharded = memory.owned_bytes(made.plan, made.costs, tp_update="blockwise")[1]
    assert sharded.sum() - state.sum() == moments / hosts - moments if hosts > 1 else sharded.sum() == state.sum()


def test_the_published_point(published: dict[str, Planned]) -> None:
    work = Workload()
    needs = {name: memory.needed(made.plan, made.costs, BIG, work) for name, made in published.items()}
    machine = Roofline(hardware.load("h100x256"))
    assert memory.fits(needs["canzona"], machine) is None
    line = memory.fits(needs["sc"], machine)
    assert line == f"needs {needs['sc'].total / 1e9:.1f} GB on rank dp 0 tp 0, the card has 85.0 GB"
    matrices = sum(p.numel for p in BIG.parameters(8) if "layers" in p.name and len(p.shape) == 2)
    assert needs["sc"].parts["state"] >= 4 * matrices > 124e9, "the momentum of every matrix on every rank"
    assert memory.fits(needs["sc"], Altered(machine)) is None, "a machine whose memory is not known refuses nothing"


def test_the_total_is_what_is_held_at_once(published: dict[str, Planned]) -> None:
    made = published["canzona"]
    found = memory.needed(made.plan, made.costs, BIG, Workload())
    held = sum(found.parts[name] for name in memory.STATIC)
    assert found.total == pytest.approx(held + found.parts["activations"] + found.parts["logits"], abs=8)
    less = memory.needed(made.plan, made.costs, BIG, Workload(batch=32, sequence=16, recompute="full"))
    assert less.total == pytest.approx(
        sum(less.parts[name] for name in memory.STATIC) + less.parts["micro_groups"], abs=8
    )
    assert set(found.parts) == set(found.evidence) == {*memory.STATIC, *sum(memory.MOMENTS, ())}


def test_the_rank_that_needs_most_is_named() -> None:
    made = planned("asc", 4, 2)
    work = Workload(sequence=1, batch=4)
    found = memory.needed(made.plan, made.costs, TINY, work)
    masters, state = memory.owned_bytes(made.plan, made.costs)
    assert found.parts["masters"] == masters[found.rank]
    assert found.parts["state"] == state[found.rank]
    assert (masters + state).max() <= masters[found.rank] + state[found.rank] + found.parts["micro_groups"]


def test_a_smaller_capacity_needs_smaller_exchange_buffers() -> None:
    work = Workload(sequence=1, batch=2)
    sizes = []
    for capacity in (2_000, 20_000, 2_000_000):
        made = planned("canzona", 2, 2, capacity_bytes=capacity)
        sizes.append(memory.needed(made.plan, made.costs, TINY, work).parts["micro_groups"])
    assert sizes[0] < sizes[1] < sizes[2]
    made = planned("canzona", 2, 2, capacity_bytes=2_000_000)
    (only,) = made.plan.micro_groups[memory.needed(made.plan, made.costs, TINY, work).rank[0]]
    whole = [0, 0]
    for p, host in zip(only.parameters, only.hosts, strict=True):
        whole[host] += made.plan.parameters[p].numel
    # whole gradients, updates, updates packed, and shards of the returned ones
    assert sizes[2] == 4 * (3 * max(whole) + sum(whole) // 2)


def test_padded_collectives_stage_their_largest_bucket() -> None:
    made, work = planned("canzona", 4, 2), Workload(sequence=1, batch=4)
    rooted, padded = (memory.needed(made.plan, made.costs, TINY, work, uneven=u) for u in ("rooted", "padded"))
    assert rooted.parts["staged"] == 0
    longest = [4 * max(b - a for a, b in pairwise(x.cuts)) for f in made.plan.families if f.atomic for x in f.buckets]
    assert padded.parts["staged"] == 4 * max(longest)
    even = planned("nv-layerwise", 4, 2)
    found = memory.needed(even.plan, even.costs, TINY, work, uneven="padded")
    assert found.parts["staged"] == 0, "equal segments need no copy"


def saved_bytes(config: catalogue.ModelConfig, rows: int, sequence: int, dtype: torch.dtype, **recompute: bool) -> int:
    """Return the bytes of what autograd saves in a forward, each storage once, parameters and loss left out."""
    with one_rank() as group:
        model = gpt.build_model(config, group, dtype=dtype, device="cpu")
        weights.initialize(model, config, 0, 0, 1)
        for on in recompute.values():
            gpt.recompute_attention(model, on)
        known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in known:
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        tokens = torch.randint(0, config.arch.vocab_size, (rows, sequence + 1))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = gpt.loss(model, tokens)
        total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
        del loss
        return total


def layer_bytes(config: catalogue.ModelConfig, rows: int, sequence: int, dtype: torch.dtype, **more: bool) -> float:
    """Return the bytes that one more layer makes autograd save."""
    two = config.model_copy(update={"transformers": config.arch.model_copy(update={"num_hidden_layers": 2})})
    three = config.model_copy(update={"transformers": config.arch.model_copy(update={"num_hidden_layers": 3})})
    return saved_bytes(three, rows, sequence, dtype, **more) - saved_bytes(two, rows, sequence, dtype, **more)


def predicted(config: catalogue.ModelConfig, work: Workload) -> float:
    layers = [config.arch.model_copy(update={"num_hidden_layers": n}) for n in (2, 3)]
    both = [config.model_copy(update={"transformers": arch}) for arch in layers]
    few, more = (memory.activation_bytes(one, work, 1, 1) for one in both)
    return more - few


def of_cpu_kernels(config: catalogue.ModelConfig, rows: int, sequence: int) -> int:
    """Return what a CPU keeps of a layer in fp32 that a GPU does not: its norms are composites, each of which keeps its
    input divided by the root mean square too; and the four tables of cosines and sines of the rotations.
    """
    a = config.arch
    heads = (a.num_attention_heads + a.num_key_value_heads) * a.head_dim if a.qk_norm else 0
    return 4 * rows * sequence * (2 * a.hidden_size + heads) + 4 * 4 * sequence * a.head_dim


@pytest.mark.parametrize("name", ["qwen3-tiny", "llama-tiny"])
@pytest.mark.parametrize("fields", [{}, {"num_attention_heads": 8, "num_key_value_heads": 2}])
def test_the_formula_is_what_autograd_saves(name: str, fields: dict[str, int]) -> None:
    """Autograd's own count of the engine's model, one layer more against one less."""
    config = variant(name, hidden_size=64, intermediate_size=160, head_dim=16, **fields)
    work = Workload(sequence=32, batch=2, dtype="float32")
    got = layer_bytes(config, 2, 32, torch.float32)
    assert got == predicted(config, work) + of_cpu_kernels(config, 2, 32)
    wider = variant(name, hidden_size=64, intermediate_size=161, head_dim=16, **fields)
    assert got != predicted(wider, work) + of_cpu_kernels(config, 2, 32), "negative control"


def cases() -> Iterator[tuple[Workload, Workload]]:
    base = Workload(sequence=64, batch=4)
    yield base, base.model_copy(update={"sequence": 128})
    yield base, base.model_copy(update={"dtype": "float32"})
    yield base.model_copy(update={"recompute": "full"}), base.model_copy(update={"recompute": "selective-attention"})
    yield base.model_copy(update={"recompute": "selective-attention"}), base
    yield base, base.model_copy(update={"sequence_parallel": False})
    yield base.model_copy(update={"microbatches": 2}), base


@pytest.mark.parametrize("pair", list(cases()))
def test_activations_grow_with_what_is_kept(pair: tuple[Workload, Workload]) -> None:
    less, more = (memory.activation_bytes(BIG, work, 2, 8) for work in pair)
    assert less < more


def test_activations_by_hand() -> None:
    """One layer of Qwen3-32B for one token on eight ranks: h 5120, q 8192, k 1024, f 25600, 64 heads."""
    one = BIG.model_copy(update={"transformers": BIG.arch.model_copy(update={"num_hidden_layers": 1})})
    work = Workload(sequence=1, batch=1)
    layer = 2 * (4 * 5120 / 8 + (4 * 8192 + 3 * 1024 + 5 * 25600) / 8) + 4 * (2 / 8 + (64 + 8) / 8 + 64 / 8)
    assert memory.activation_bytes(one, work, 1, 8) == layer + 2 * 2 * 5120 / 8
    assert memory.logit_bytes(one, work, 1, 8) == 10 * 152_576 / 8, "the vocabulary is padded to a multiple of 128 x 8"


def test_a_machine_that_is_just_large_enough_fits() -> None:
    made = planned("canzona", 2, 2)
    found = memory.needed(made.plan, made.costs, TINY, Workload(sequence=16, batch=2))
    room = Altered(Roofline(hardware.load("h100x4")), memory_bytes=found.total)
    assert memory.fits(found, room) is None
    assert memory.fits(found, dataclasses.replace(room, memory_bytes=found.total - 1)) is not None
    assert np.isfinite(found.total)
