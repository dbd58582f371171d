"""The model cut over several tensor-parallel ranks against one rank and against transformers."""

import pytest
import torch
import torch.distributed as dist

from impl.models import catalogue, gpt, weights
from impl.models.hf_layout import to_hf
from tests.distributed.ranks import one_rank, run_ranks
from tests.models import CASES, hf_gradients, hf_loss, hf_twin, relative, tokens

pytestmark = pytest.mark.distributed


def _nudge_norms(model):
    with torch.no_grad():
        for i, p in enumerate(p for p in model.parameters() if p.ndim == 1):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)), alpha=0.1)


def _gradients(model, config, group, sum_partial):
    """Whole gradients by transformers' names, gathered as parameters are."""
    specs = {s.name: s for s in config.parameters(group.size())}
    for name, p in model.named_parameters():
        p.data = p.grad
        if sum_partial and specs[name].partial_over_tp:
            dist.all_reduce(p.data, group=group)
    return {
        name: g.clone()
        for spec, whole in weights.whole_parameters(model, config, group)
        for name, g in to_hf(config, spec, whole).items()
    }


def _one_case(config, group, folder):
    tp, rank = group.size(), group.rank()
    model = gpt.build_model(config, group, dtype=torch.float32, device="cpu")
    layout = [(n, tuple(p.shape)) for n, p in model.named_parameters()]
    weights.initialize(model, config, 0, rank, tp)
    initial = weights.params_digest(config, weights.whole_parameters(model, config, group))
    _nudge_norms(model)
    digest = weights.params_digest(config, weights.whole_parameters(model, config, group))

    whole = weights.whole_parameters(model, config, group)
    if rank == 0:
        weights.save_hf(folder, config, whole)
    else:
        list(whole)
    dist.barrier(group)
    fresh = gpt.build_model(config, group, dtype=torch.float32, device="cpu")
    weights.load_hf(folder, fresh, config, rank, tp)
    loaded = all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))

    ids = tokens(config)
    logits = gpt.logits(model, ids)
    loss = gpt.loss(model, ids)
    loss.backward()
    partial = {n: p.grad.clone() for n, p in model.named_parameters() if n.endswith("q_layernorm.weight")}
    return {
        "layout": layout,
        "initial": initial,
        "digest": digest,
        "loaded": loaded,
        "logits": logits,
        "loss": loss.item(),
        "gradients": _gradients(model, config, group, sum_partial=True),
        "partial": partial,
    }


def _all_cases(rank, world, folder):
    return {case: _one_case(config, dist.group.WORLD, f"{folder}/{case}") for case, config in CASES.items()}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    return folder, run_ranks(_all_cases, 2, str(folder), timeout=120)


@pytest.fixture(scope="module")
def one():
    out = {}
    with one_rank() as group:
        for case, config in CASES.items():
            model = gpt.build_model(config, group, dtype=torch.float32, device="cpu")
            weights.initialize(model, config, 0, 0, 1)
            initial = weights.params_digest(config, weights.whole_parameters(model, config, group))
            _nudge_norms(model)
            whole = list(weights.whole_parameters(model, config, group))
            out[case] = (initial, weights.params_digest(config, whole), whole)
    return out


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_transformers(case, one, two):
    config = CASES[case]
    initial, digest, whole = one[case]
    reference = hf_twin(config, whole)
    ids = tokens(config)
    expected, gradients = reference(ids).logits, hf_gradients(reference, ids)
    for rank in two[1]:
        result = rank[case]
        assert result["initial"] == initial, "fresh weights depend on TP"
        assert result["digest"] == digest
        assert (result["logits"] - expected).abs().max() < 1e-6
        assert result["loss"] == pytest.approx(hf_loss(reference, ids).item(), rel=1e-6)
        assert result["gradients"].keys() == gradients.keys()
        for name, grad in gradients.items():
            assert relative(result["gradients"][name], grad) < 1e-6, name


@pytest.mark.parametrize("case", CASES)
def test_shards_are_the_catalogues(case, two):
    config = CASES[case]
    expected = [(s.name, s.local_shape(2)) for s in config.parameters(2)]
    for rank in two[1]:
        assert rank[case]["layout"] == expected


def test_qk_norm_gradients_are_partial(two):
    """Control: without the sum over tensor-parallel ranks they are far from transformers' gradient."""
    for case in ("qwen3-tied", "qwen3-untied"):
        first, second = (r[case] for r in two[1])
        assert len(first["partial"]) == 2
        for name, part in first["partial"].items():
            whole = first["gradients"][
                name.replace("decoder.", "model.").replace("attention.q_layernorm", "attn.q_norm")
            ]
            assert relative(part, whole) > 1e-2
            assert relative(part + second["partial"][name], whole) < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_folder_written_by_two_ranks(case, one, two):
    import transformers  # here, because the ranks import this module too

    folder, ranks = two
    assert all(r[case]["loaded"] for r in ranks)
    config = CASES[case]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / case, attn_implementation="sdpa")
    ids = tokens(config)
    assert torch.equal(theirs(ids).logits, hf_twin(config, one[case][2])(ids).logits)


def _subgroups(rank, world):
    """Two TP groups of two, and one of four, in a world of four."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    config = catalogue.load("llama-tiny", layers=1)
    results = []
    for group in (pair, dist.group.WORLD):
        model = gpt.build_model(config, group, dtype=torch.float32, device="cpu")
        weights.initialize(model, config, 3, group.rank(), group.size())
        digest = weights.params_digest(config, weights.whole_parameters(model, config, group))
        loss = gpt.loss(model, tokens(config))
        loss.backward()
        results.append((digest, loss.item()))
    return results


def test_groups_inside_a_larger_world():
    """TP=4 over 256 tokens also has ranks that hold nothing but padding."""
    results = run_ranks(_subgroups, 4, timeout=120)
    assert catalogue.load("llama-tiny").padded_vocab(4) == 512
    digests, losses = zip(*(pair for rank in results for pair in rank), strict=True)
    assert len(set(digests)) == 1
    assert max(losses) - min(losses) < 1e-6
