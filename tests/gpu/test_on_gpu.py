"""What only a GPU can show; without one every test here is skipped and says so."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from impl.canzona.clock import Clock
from impl.canzona.engine import Engine, EngineOptions
from impl.canzona.mesh import Mesh
from impl.canzona.states import StateStore
from impl.canzona.strategies import make_plan
from impl.models import catalogue, gpt, weights
from impl.optimizers.base import create
from impl.optimizers.newton_schulz import COEFFICIENT_SETS, normalize, polynomial
from impl.optimizers.routing import is_matrix
from impl.projection import kernels
from impl.projection.kernel_cases import PassCase, ProductCase, UpdateCase
from impl.projection.kernels import Bench
from impl.projection.replay import Place, Share
from tests.unit.matrix_cases import gradients

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: this machine has none that torch can use"),
    pytest.mark.timeout(100),
]
RULES = {
    "adamw": {},
    "nadam": {},
    "muon": {"ns_dtype": "float32"},
    "shampoo": {"period": 2},
    "soap": {"period": 2},
    "basis-rotation": {"period": 2},
}
TOLERANCE = 1e-3
"""Relative norm of the difference between an update in fp32 on the GPU and one in float64 on the CPU.

fp32 on a CPU stays below 1e-5 here, in the steps that count; the rest is room for other solvers.
"""
STEPS, SETTLED, SHAPE = 8, 3, (48, 32)
"""The first three steps do not count: a basis of one gradient divides components by themselves that are nothing but
rounding, so that the first update of basis rotation is off by its whole norm between any two precisions.
"""


@pytest.fixture
def device() -> torch.device:
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device("cuda", 0)


@pytest.fixture
def nccl(device: torch.device) -> Iterator[torch.device]:
    torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory(prefix="nccl-") as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield device
        finally:
            dist.destroy_process_group()


def settings_of(name: str) -> dict:
    """Return the settings of RULES that the optimizer has."""
    known = type(create(name)).Hyper.model_fields
    return {key: value for key, value in RULES[name].items() if key in known}


def pairs(name: str, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the update of every step on ``device`` in fp32, and that of the same state in float64 on the CPU.

    Each step of the twin starts from the state of the optimizer under test: small differences of a basis would grow
    from refresh to refresh, on any two machines.
    """
    rule, cpu = create(name, settings_of(name)), torch.device("cpu")
    state = rule.init_state(SHAPE, device)
    out = []
    for step, given in enumerate(gradients(SHAPE, STEPS), 1):
        twin = {key: tensor.to(cpu, torch.float64, copy=True) for key, tensor in state.items()}
        exact = rule.update(given.to(torch.float64), twin, step)
        out.append((rule.update(given.to(device), state, step).double().cpu(), exact))
    return out


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("name", sorted(RULES))
def test_an_optimizer_on_the_gpu_is_its_float64_self(name: str, device: torch.device) -> None:
    found = pairs(name, device)
    assert max(error(a, b) for a, b in found[SETTLED:]) < TOLERANCE
    last, exact = found[-1]
    assert error(last * 1.01, exact) > TOLERANCE, "the control: a wrong factor is seen"


@pytest.mark.parametrize("shape", [(64, 192), (192, 64)])
def test_batched_newton_schulz_is_that_of_one(shape: tuple[int, int], device: torch.device) -> None:
    """cuBLAS may take another kernel for a batch, so the engine batches none there; the results agree to rounding."""
    coefficients = COEFFICIENT_SETS["simple"]
    alone = [normalize(g.to(device), torch.float32) for g in gradients(shape, 4)]
    batch = polynomial(torch.stack(alone), coefficients, 5)
    for index, matrix in enumerate(alone):
        one = polynomial(matrix.clone(), coefficients, 5)
        assert error(batch[index].double().cpu(), one.double().cpu()) < 1e-4
    assert error(batch[0].double().cpu(), batch[1].double().cpu()) > 1e-2, "the control: matrices are not mixed up"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
def test_the_engine_trains_with_nccl(dtype: torch.dtype, offload: bool, nccl: torch.device) -> None:
    mesh, config = Mesh.create(1, 1, nccl), catalogue.load("qwen3-tiny", 2)
    model = gpt.build_model(config, mesh.tp_group, dtype=dtype, device=nccl)
    weights.initialize(model, config, 0, 0, 1)
    parameters = config.parameters(1)
    rules = {"muon": create("muon"), "adamw": create("adamw")}
    plan = make_plan("canzona", parameters, [rules["muon" if is_matrix(p) else "adamw"] for p in parameters], 1, 1)
    engine = Engine(model, plan, rules, mesh, EngineOptions(offload=offload))
    tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0)).to(nccl)
    losses = []
    for _ in range(12):
        engine.begin_step()
        with engine.clock("forward"):
            loss = gpt.loss(model, tokens)
        with engine.microbatch(last=True):
            loss.backward()
        assert not engine.step(1e-2).skipped
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5, "it learns the one batch"
    seconds = engine.clock.seconds()
    assert 0 < seconds["optimizer_step"] < seconds["iteration"]
    resting = {t.device.type for state in engine.states.values() for t in state.values()}
    assert resting == ({"cpu"} if offload else {"cuda"})


def test_offloaded_states_are_pinned_and_come_back_changed(device: torch.device) -> None:
    store = StateStore(device, offload=True)
    for name in ("a", "b", "c"):
        store.add(name, {"momentum": torch.zeros(1000, device=device)})
    assert all(t.is_pinned() for state in store.values() for t in state.values())
    visit = store.visit([["a"], ["b"], ["c"]])
    for value in (1.0, 2.0, 3.0):
        states = visit.take()
        assert states[0]["momentum"].is_cuda
        states[0]["momentum"].add_(value)
        visit.give_back(states)
    store.settle()
    assert [store[n]["momentum"].unique().tolist() for n in "abc"] == [[1.0], [2.0], [3.0]]


def test_the_clock_sees_the_devices_time_not_the_hosts(device: torch.device) -> None:
    """A kernel that was only started takes no time on the host: the events must count it."""
    clock = Clock(device)
    matrix = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    clock.reset()
    begin = time.perf_counter()
    with clock("backward"):
        for _ in range(50):
            matrix @ matrix
    host = time.perf_counter() - begin
    with clock("forward"):
        pass
    seconds = clock.seconds()
    assert seconds["backward"] > host * 0.5
    assert seconds["backward"] > 50 * 2 * 4096**3 / 1e15, "no device does a petaflop a second in fp32"
    assert seconds["forward"] < seconds["backward"] / 10


def test_kernels_are_timed_by_events(device: torch.device) -> None:
    bench = Bench(device, 0, 1)
    small, large = (ProductCase(m=n, n=n, k=n, dtype="bfloat16") for n in (256, 4096))
    times = [float(kernels.measure(case, bench, 0.05).min()) for case in (small, large)]
    assert times[1] > 2 * 4096**3 / 2e16, "no faster than any device"
    assert times[1] > 3 * times[0], "the control: 4096 times the work"
    for case in (UpdateCase(optimizer="muon", shape=(256, 128)), PassCase(case="copy-from-host", size=2**20, piece=1)):
        assert (kernels.measure(case, bench, 0.05) > 0).all()


def test_a_replayed_rank_updates_everything(device: torch.device) -> None:
    parameters = catalogue.load("qwen3-tiny", 2).parameters(2)
    rules = {"muon": create("muon"), "adamw": create("adamw")}
    plan = make_plan("canzona", parameters, [rules["muon" if is_matrix(p) else "adamw"] for p in parameters], 2, 2)
    share = Share(plan, rules, Place(1, 1), device, torch.bfloat16)
    share.draw()
    share.step()
    masters = [m for buffer in share.buffers for m in buffer.masters.values()]
    assert masters
    assert all(m.is_cuda and bool(m.isfinite().all()) and float(m.abs().sum()) > 0 for m in masters)
