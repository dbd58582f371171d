"""Drawing, hashing, reading and writing whole weights on one rank."""

import hashlib
import json
import math
import shutil
import struct

import pytest
import safetensors.torch
import torch
import transformers

from impl.errors import ConfigError
from impl.models import catalogue, gpt, weights
from impl.models.hf_checkpoint import INDEX, SINGLE
from impl.models.hf_layout import from_hf, hf_shapes, to_hf
from tests.distributed.ranks import one_rank
from tests.models import CASES, tokens

CONFIG = CASES["qwen3-tied"]  # padded vocabulary, grouped queries


@pytest.fixture(scope="module")
def group():
    with one_rank() as group:
        yield group


def build(config, group, seed=0, dtype=torch.float32):
    model = gpt.build_model(config, group, dtype=dtype, device="cpu")
    weights.initialize(model, config, seed, 0, 1)
    return model


def whole(model, config, group):
    return [(s, w.clone()) for s, w in weights.whole_parameters(model, config, group)]


def hf_state(model, config, group):
    return {n: t for s, w in whole(model, config, group) for n, t in to_hf(config, s, w).items()}


def digest(model, config, group):
    return weights.params_digest(config, weights.whole_parameters(model, config, group))


def slow_digest(state):
    """definitions.md word by word, one number at a time."""
    h = hashlib.sha256()
    for name in sorted(state, key=lambda n: n.encode("ascii")):
        h.update(name.encode() + str(tuple(state[name].shape)).encode())
        for value in state[name].float().flatten().tolist():
            h.update(struct.pack("<f", value))
    return h.hexdigest()


# --- layout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_layout_is_a_bijection(case):
    config = CASES[case]
    for spec in config.parameters(2):
        tensors = {n: torch.rand(shape) for n, shape in hf_shapes(config, spec).items()}
        fused = from_hf(config, spec, tensors)
        assert fused.shape == spec.shape
        back = to_hf(config, spec, fused)
        assert back.keys() == tensors.keys()
        assert all(torch.equal(back[n], tensors[n]) for n in tensors)


# --- initialisation ---------------------------------------------------------------------------------------------------


def test_initial_distributions(group):
    config = catalogue.load("qwen3-small", layers=2)
    state = hf_state(build(config, group), config, group)
    residual = config.init.residual_output / math.sqrt(2 * 2)
    for name, tensor in state.items():
        if tensor.ndim == 1:
            assert (tensor == 1).all(), name
            continue
        expected = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else config.init.linear
        assert tensor.std().item() == pytest.approx(expected, rel=0.03), name
        assert abs(tensor.mean().item()) < 0.05 * expected


def test_tiny_models_start_from_the_stated_deviations(group):
    config = catalogue.load("qwen3-tiny")
    state = hf_state(build(config, group), config, group)
    for name, expected in {
        "model.embed_tokens.weight": 0.5,
        "lm_head.weight": 0.06,
        "model.layers.3.mlp.up_proj.weight": 0.06,
        "model.layers.3.mlp.down_proj.weight": 0.06 / 4,
        "model.layers.3.self_attn.o_proj.weight": 0.06 / 4,
    }.items():
        assert state[name].std().item() == pytest.approx(expected, rel=0.06), name


def test_each_tensor_has_its_own_stream(group):
    """A tensor depends on the seed and its name only, not on the depth of the model; no two tensors are alike."""
    short, long = (catalogue.load("qwen3-tiny", layers=n) for n in (1, 2))
    a, b = (hf_state(build(c, group), c, group) for c in (short, long))
    same = [n for n in a if "o_proj" not in n and "down_proj" not in n]  # these are scaled by depth
    assert all(torch.equal(a[n], b[n]) for n in same)
    starts = {tuple((t.flatten()[:4] / t.std()).tolist()) for t in b.values() if t.ndim == 2}
    assert len(starts) == sum(t.ndim == 2 for t in b.values())
    other = hf_state(build(short, group, seed=1), short, group)
    assert not any(torch.equal(a[n], other[n]) for n in a if a[n].ndim == 2)


def test_padding_starts_at_zero(group):
    table = build(CONFIG, group).embedding.word_embeddings.weight
    assert table.shape[0] == 256
    assert not table[200:].any()
    assert table[:200].any(dim=1).all()


# --- digest -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_digest_against_slow_computation(case, group):
    config = CASES[case]
    model = build(config, group)
    assert digest(model, config, group) == slow_digest(hf_state(model, config, group))


def test_digest_of_bf16_is_that_of_its_values(group):
    model = build(CONFIG, group, dtype=torch.bfloat16)
    assert digest(model, CONFIG, group) == slow_digest(hf_state(model, CONFIG, group))


@pytest.mark.parametrize("name", ["final_layernorm", "layers.1.mlp.linear_fc1", "layers.0.self_attention.linear_qkv"])
def test_digest_sees_one_ulp(name, group):
    model = build(CONFIG, group)
    before = digest(model, CONFIG, group)
    weight = model.get_parameter(f"decoder.{name}.weight").data.view(-1)
    old = weight[5].clone()
    weight[5] = torch.nextafter(old, torch.tensor(9.0))
    assert digest(model, CONFIG, group) != before
    weight[5] = old
    assert digest(model, CONFIG, group) == before


def test_digest_ignores_padding_and_order(group):
    model = build(CONFIG, group)
    before = digest(model, CONFIG, group)
    model.embedding.word_embeddings.weight.data[200:] = 7
    assert digest(model, CONFIG, group) == before
    assert weights.params_digest(CONFIG, reversed(whole(model, CONFIG, group))) == before


def test_digest_wants_each_parameter_once(group):
    parts = whole(build(CONFIG, group), CONFIG, group)
    with pytest.raises(ValueError, match=r"model\..* is missing"):
        weights.params_digest(CONFIG, parts[:-1])
    with pytest.raises(ValueError, match="came twice"):
        weights.params_digest(CONFIG, [*parts, parts[0]])


def test_order_lets_the_digest_keep_little(group):
    """In the order of ``whole_parameters`` no more than one layer's attention is held back."""
    config = catalogue.load("qwen3-tiny")
    model = build(config, group)
    order = [n for s, _ in weights.whole_parameters(model, config, group) for n in hf_shapes(config, s)]
    due = sorted(order)
    early = peak = 0
    done = set()
    for name in order:
        done.add(name)
        early += 1
        while due and due[0] in done:
            due.pop(0)
            early -= 1
        peak = max(peak, early)
    assert peak <= 4


# --- Hugging Face folders ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [2**30, 30_000])
@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, shard_bytes, group, tmp_path):
    config, folder = CASES[case], tmp_path / "out" / "model"
    model = build(config, group)
    weights.save_hf(folder, config, weights.whole_parameters(model, config, group), shard_bytes)
    assert (folder / INDEX).exists() == (shard_bytes == 30_000)
    assert (folder / SINGLE).exists() == (shard_bytes == 2**30)
    assert not list(tmp_path.rglob("*.bin")) + list(tmp_path.rglob("*.part"))

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    assert type(theirs.config).__name__ == config.arch.config_class
    ids = tokens(config)
    assert torch.equal(theirs(ids).logits, gpt.logits(model, ids))

    fresh = build(config, group, seed=1)
    weights.load_hf(folder, fresh, config, 0, 1)
    assert digest(fresh, config, group) == digest(model, config, group)


@pytest.mark.parametrize("case", CASES)
def test_folder_written_by_transformers(case, group, tmp_path):
    config = CASES[case]
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config.hf_config(), attn_implementation="sdpa")
    theirs.save_pretrained(tmp_path / "model", max_shard_size="40KB")
    model = build(config, group)
    weights.load_hf(tmp_path / "model", model, config, 0, 1)
    ids = tokens(config)
    assert torch.equal(theirs(ids).logits, gpt.logits(model, ids))


def test_bf16_folder(group, tmp_path):
    model = build(CONFIG, group, dtype=torch.bfloat16)
    weights.save_hf(tmp_path / "m", CONFIG, weights.whole_parameters(model, CONFIG, group))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert theirs.dtype == torch.bfloat16
    fresh = build(CONFIG, group, seed=1)
    weights.load_hf(tmp_path / "m", fresh, CONFIG, 0, 1)
    assert digest(fresh, CONFIG, group) == digest(model, CONFIG, group)


@pytest.fixture
def folder(group, tmp_path):
    config = CASES["qwen3-untied"]
    weights.save_hf(tmp_path / "m", config, weights.whole_parameters(build(config, group), config, group))
    return tmp_path / "m"


def _rewrite(folder, edit):
    tensors = safetensors.torch.load_file(folder / SINGLE)
    edit(tensors)
    safetensors.torch.save_file(tensors, folder / SINGLE)


def _edit_json(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


NORM, GATE = "model.layers.1.self_attn.k_norm.weight", "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda f: _rewrite(f, lambda t: t.pop(NORM)), rf"lacks the tensor {NORM}"),
        (
            lambda f: _rewrite(f, lambda t: t.update({GATE: t[GATE][:-1]})),
            rf"{GATE} has shape \(95, 48\), expected \(96",
        ),
        (lambda f: _rewrite(f, lambda t: t.update({GATE: t[GATE].T.contiguous()})), rf"{GATE} has shape"),
        (lambda f: _rewrite(f, lambda t: t.update(bias=torch.ones(3))), "the tensor bias, for which"),
        (lambda f: (f / SINGLE).write_bytes(b"no"), "cannot read .*model.safetensors"),
        (lambda f: (f / SINGLE).rename(f / "pytorch_model.bin"), "has neither model.safetensors nor"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), r"cannot read .*config\.json"),
        (lambda f: _edit_json(f / "config.json", rms_norm_eps=1e-5), "rms_norm_eps is 1e-05, but qwen3-tiny has 1e-06"),
        (lambda f: _edit_json(f / "config.json", num_hidden_layers=3, layer_types=None), "num_hidden_layers is 3"),
        (lambda f: _edit_json(f / "config.json", tie_word_embeddings=True), "tie_word_embeddings is True"),
        (lambda f: _edit_json(f / "config.json", model_type="llama"), "model_type is 'llama'"),
        (lambda f: _edit_json(f / "config.json", num_attention_heads="x"), "is not a valid Qwen3Config"),
        (
            lambda f: _edit_json(f / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
            "rope_theta is 500000.0, but",
        ),
        (lambda f: (f / INDEX).write_text("{}"), "has no weight_map"),
        (
            lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {NORM: "../m/model.safetensors"}})),
            "which is not in the folder",
        ),
        (
            lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"foreign": SINGLE}})),
            "lacks foreign, which",
        ),
    ],
)
def test_bad_folder(edit, message, folder, group):
    config = CASES["qwen3-untied"]
    edit(folder)
    model = build(config, group, seed=5)
    before = digest(model, config, group)
    with pytest.raises(ConfigError, match=message) as error:
        weights.load_hf(folder, model, config, 0, 1)
    assert "\n" not in str(error.value)
    assert digest(model, config, group) == before, "half a checkpoint was loaded"


def test_older_spellings_are_understood(folder, group):
    """transformers 4 wrote ``rope_theta`` by itself; the first LLaMA conversions kept rotary tables."""
    config = CASES["qwen3-untied"]
    path = folder / "config.json"
    data = json.loads(path.read_text())
    data["rope_theta"] = data.pop("rope_parameters")["rope_theta"]
    path.write_text(json.dumps(data))
    _rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    model = build(config, group, seed=5)
    weights.load_hf(folder, model, config, 0, 1)
    assert digest(model, config, group) == digest(build(config, group), config, group)


def test_nothing_is_overwritten(folder, group):
    config = CASES["qwen3-untied"]
    parts = whole(build(config, group), config, group)
    with pytest.raises(ConfigError, match="exists already"):
        weights.save_hf(folder, config, parts)
    shutil.rmtree(folder)
    folder.mkdir()
    (folder.parent / "m.part").mkdir()
    (folder.parent / "m.part" / "left-over").touch()
    weights.save_hf(folder, config, parts)
    assert {p.name for p in folder.iterdir()} == {SINGLE, "config.json"}
