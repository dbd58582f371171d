"""Bucket layout against an independent slow twin, against Megatron's own code, and the 32B test vector."""

import math
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.canzona.layout import equal_cuts, lay_out, own_whole
from impl.models import catalogue
from impl.models.parameters import ParamSpec


def vectors(sizes):
    return [ParamSpec(f"p{i}", (n,)) for i, n in enumerate(sizes)]


def simulate(sizes, bucket_elements, dp):
    """The rule by marking memory cell by cell: returns ({parameter: (start, bucket)}, bucket ends)."""
    align, divisor = (64, math.lcm(dp, 128)) if dp else (1, 1)
    at, begin, bucket, where, ends = 0, 0, 0, {}, []
    for index in range(len(sizes) - 1, -1, -1):
        while at % align:
            at += 1
        where[index] = (at, bucket)
        at += sizes[index]
        if at - begin >= bucket_elements or index == 0:
            while at % divisor:
                at += 1
            ends.append(at)
            begin, bucket = at, bucket + 1
    return where, ends


def flat(buckets):
    where = {s.parameter: (s.start, k) for k, b in enumerate(buckets) for s in b.slots}
    return where, [b.end for b in buckets]


SIZES = st.lists(st.integers(1, 700), min_size=1, max_size=20)


@given(SIZES, st.integers(1, 3000), st.one_of(st.none(), st.integers(1, 8)))
@settings(deadline=None)
def test_layout_equals_a_slow_twin(sizes, bucket_elements, dp):
    parameters = vectors(sizes)
    buckets = lay_out(parameters, range(len(sizes)), 1, bucket_elements, dp)
    assert flat(buckets) == simulate(sizes, bucket_elements, dp)
    for spec, slot in ((parameters[s.parameter], s) for b in buckets for s in b.slots):
        assert slot.end - slot.start == spec.numel


def megatron_layout(sizes, bucket_elements, dp, distributed):
    """Megatron 0.16.1's own bookkeeping, which is done before it asks for a CUDA buffer and fails on a CPU."""
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("megatron.core.distributed.param_and_grad_buffer")
    ddp = pytest.importorskip("megatron.core.distributed").DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, overlap_grad_reduce=True
    )
    if torch.cuda.is_available():
        pytest.skip("on a GPU the buffer would be allocated")
    group = SimpleNamespace(size=lambda: dp, rank=lambda: 0)
    parameters = [torch.nn.Parameter(torch.empty(n, device="meta")) for n in sizes]
    buffer = module._ParamAndGradBuffer.__new__(module._ParamAndGradBuffer)
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|cuda|NVIDIA"):
        buffer.__init__(
            ddp,
            torch.float32,
            torch.float32,
            parameters,
            group,
            bucket_elements,
            {p: str(i) for i, p in enumerate(parameters)},
            1.0,
            list(range(len(sizes))),
            False,
            SimpleNamespace(tp=group, dp_cp=group),
        )
    where = {i: (buffer.param_index_map[p][0], buffer.param_index_map[p][2]) for i, p in enumerate(parameters)}
    return where, [end for _, end in buffer.bucket_indices]


@pytest.mark.parametrize("distributed", [True, False])
def test_layout_equals_megatrons(distributed):
    rng = random.Random(0)
    for _ in range(60):
        sizes = [rng.randint(1, 2000) for _ in range(rng.randint(1, 30))]
        size, dp = rng.randint(1, 5000), rng.choice([1, 2, 3, 4, 6, 8])
        buckets = lay_out(vectors(sizes), range(len(sizes)), 1, size, dp if distributed else None)
        assert flat(buckets) == megatron_layout(sizes, size, dp, distributed)


def test_qwen3_32b_vector():
    parameters = catalogue.load("qwen3-32b").parameters(8)
    members = [i for i, p in enumerate(parameters) if "linear" in p.name]
    buckets = lay_out(parameters, members, 8, 400_000_000, 32)
    assert [len(b.slots) for b in buckets] == [26, *[28] * 8, 6]
    assert [b.end - b.start for b in buckets] == [414_842_880, *[426_639_360] * 8, 72_744_960]
    assert buckets[-1].end == 3_900_702_720 == 32 * 121_896_960
    names = [parameters[s.parameter].name.split(".")[-2] for s in buckets[0].slots[:4]]
    assert names == ["linear_fc2", "linear_fc1", "linear_qkv", "linear_proj"]
    assert [s.end - s.start for s in buckets[0].slots[:4]] == [16_384_000, 32_768_000, 6_553_600, 5_242_880]


def test_empty_buffer_has_no_buckets():
    assert lay_out(vectors([3]), [], 1, 10, 2) == ()


def test_equal_cuts_and_whole_owners():
    (bucket,) = lay_out(vectors([64, 128, 64]), range(3), 1, 10_000, 4)
    assert equal_cuts(bucket, 4) == (0, 64, 128, 192, 256)
    owned = own_whole(bucket, (0, 0, 64, 64, 256))
    assert [s.owner for s in owned.slots] == [1, 3, 3]
