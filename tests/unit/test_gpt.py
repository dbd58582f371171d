"""The Megatron model on one rank against transformers' model with the same weights."""

import pytest
import torch

from impl.errors import ConfigError
from impl.models import catalogue, gpt, weights
from impl.models.cross_entropy import vocabulary_parallel_cross_entropy
from impl.models.hf_layout import to_hf
from tests.distributed.ranks import one_rank
from tests.models import CASES, hf_gradients, hf_loss, hf_twin, relative, tokens


@pytest.fixture(scope="module")
def group():
    with one_rank() as group:
        yield group


def build(config, group, dtype=torch.float32):
    model = gpt.build_model(config, group, dtype=dtype, device="cpu")
    weights.initialize(model, config, 0, 0, 1)
    with torch.no_grad():  # norms that are one everywhere would hide a forgotten one
        for i, p in enumerate(p for p in model.parameters() if p.ndim == 1):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)), alpha=0.1)
    return model


def twin(model, config, group, dtype=torch.float32):
    return hf_twin(config, weights.whole_parameters(model, config, group), dtype)


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case, group):
    config = CASES[case]
    model = build(config, group)
    reference = twin(model, config, group)
    ids = tokens(config)
    assert torch.equal(gpt.logits(model, ids), reference(ids).logits)

    loss = gpt.loss(model, ids)
    assert loss.item() == pytest.approx(hf_loss(reference, ids).item(), rel=1e-6)
    loss.backward()
    expected = hf_gradients(reference, ids)
    ours = {
        name: g
        for spec in config.parameters(1)
        for name, g in to_hf(config, spec, model.get_parameter(spec.name).grad).items()
    }
    assert ours.keys() == expected.keys()
    for name, grad in expected.items():
        assert relative(ours[name], grad) < 1e-6, name


def test_comparison_notices_one_swapped_head(group):
    """Control: exchanging two query heads of the same KV group must not go unseen."""
    config = CASES["qwen3-untied"]
    model = build(config, group)
    reference = twin(model, config, group)
    d = config.arch.head_dim
    qkv = model.decoder.layers[0].self_attention.linear_qkv.weight
    with torch.no_grad():
        qkv[: 2 * d] = qkv[: 2 * d].roll(d, 0)
    ids = tokens(config)
    assert not torch.allclose(gpt.logits(model, ids), reference(ids).logits, atol=1e-4)


@pytest.mark.parametrize("case", ["qwen3-untied", "llama-grouped"])
def test_bf16(case, group):
    config = CASES[case]
    model = build(config, group, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    ids = tokens(config)
    loss = gpt.loss(model, ids)
    loss.backward()
    assert loss.dtype == torch.float32
    reference = twin(model, config, group, torch.bfloat16)
    assert (gpt.logits(model, ids).float() - reference(ids).logits.float()).abs().max() < 2e-2
    assert loss.item() == pytest.approx(hf_loss(reference, ids).item(), abs=5e-3)
    assert all(torch.isfinite(p.grad).all() and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("name", catalogue.names())
def test_catalogue_is_megatrons_registration_order(name, group):
    config = catalogue.load(name)
    model = gpt.build_model(config, group, dtype=torch.bfloat16, device="meta")
    built = [(n, tuple(p.shape)) for n, p in model.named_parameters()]
    assert built == [(s.name, s.shape) for s in config.parameters(1)]


def test_another_layout_is_refused(group):
    config = CASES["qwen3-untied"]
    model = gpt.build_model(config, group, dtype=torch.float32, device="meta")
    model.output_layer.register_parameter("bias", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(RuntimeError, match="lays qwen3-tiny out otherwise"):
        gpt._check_layout(model, config, 1)


def test_attention_is_causal(group):
    config = CASES["qwen3-untied"]
    model = build(config, group)
    ids = tokens(config)
    changed = ids.clone()
    changed[:, 20] = (ids[:, 20] + 1) % config.arch.vocab_size
    before, after = gpt.logits(model, ids), gpt.logits(model, changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_padding_of_the_vocabulary_counts_for_nothing(group):
    config = CASES["qwen3-untied"]
    model, ids = build(config, group), tokens(CASES["qwen3-untied"])
    loss = gpt.loss(model, ids)
    head = model.output_layer.weight
    with torch.no_grad():
        head[config.arch.vocab_size :] = 50.0
    again = gpt.loss(model, ids)
    again.backward()
    assert head.shape[0] == 256
    assert torch.equal(loss, again)
    assert not head.grad[config.arch.vocab_size :].any()
    assert head.grad[: config.arch.vocab_size].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_against_torch(dtype, group):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(5, 7, 16, generator=generator) * 20).to(dtype).requires_grad_()
    target = torch.randint(11, (5, 7), generator=generator)
    upstream = torch.rand(5, 7, generator=generator)
    loss = vocabulary_parallel_cross_entropy(logits, target, 11, group)
    (grad,) = torch.autograd.grad(loss, logits, upstream)

    exact = logits.detach().double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact[..., :11].flatten(0, 1), target.flatten(), reduction="none")
    (exact_grad,) = torch.autograd.grad(expected, exact, upstream.flatten().double())
    assert torch.allclose(loss.flatten().double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.allclose(grad.double(), exact_grad, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-7)
    assert grad.dtype == dtype


def test_loss_gradient_against_finite_differences(group):
    config = CASES["llama-grouped"]
    model, ids = build(config, group), tokens(CASES["llama-grouped"])
    gpt.loss(model, ids).backward()
    for name in ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.self_attention.linear_qkv.weight"):
        p = model.get_parameter(name)
        step = 0.02 * p.grad / p.grad.norm()
        with torch.no_grad():
            p += step
            up = gpt.loss(model, ids)
            p -= 2 * step
            down = gpt.loss(model, ids)
            p += step
        assert ((up - down) / 0.04).item() == pytest.approx(p.grad.norm().item(), rel=2e-2)


@pytest.mark.parametrize("bad", [-1, 200, 255, 256])
def test_token_outside_the_vocabulary(bad, group):
    config = CASES["qwen3-untied"]
    ids = tokens(config)
    ids[0, 5] = bad
    with pytest.raises(ValueError, match=r"token ids must lie in 0\.\.199"):
        gpt.loss(build(config, group), ids)


def test_mask_is_not_ignored_silently(group):
    config = CASES["qwen3-untied"]
    ids = tokens(config)
    with pytest.raises(NotImplementedError, match="causal mask"):
        build(config, group)(input_ids=ids, position_ids=None, attention_mask=torch.ones(1, 1, 33, 33).bool())


def test_unfit_tensor_parallel_degree():
    class Three:
        def size(self):
            return 3

    with pytest.raises(ConfigError, match="TP=3 does not divide"):
        gpt.build_model(CASES["qwen3-untied"], Three(), dtype=torch.float32, device="meta")
