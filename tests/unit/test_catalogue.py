"""The catalogue against transformers' models on the meta device, published sizes and bad input."""

import subprocess
import sys

import pytest
import torch
import transformers
import yaml

from impl.errors import ConfigError
from impl.models import catalogue
from impl.models.hf_layout import hf_shapes

MODELS = catalogue.names()


def test_all_models_are_there():
    qwen3 = {f"qwen3-{size}" for size in ("1.7b", "4b", "8b", "14b", "32b", "tiny", "small")}
    assert set(MODELS) == qwen3 | {f"llama-{size}" for size in ("7b", "13b", "65b", "95m", "tiny")}


@pytest.mark.parametrize("name", MODELS)
def test_same_tensors_as_transformers(name):
    config = catalogue.load(name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config.hf_config())
    theirs = {n: tuple(p.shape) for n, p in model.named_parameters()}
    ours = {n: shape for spec in config.parameters(1) for n, shape in hf_shapes(config, spec).items()}
    assert ours == theirs
    assert config.parameter_count() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "billions"),
    # Qwen3 model cards; LLaMA, table 2
    [
        *(("qwen3-1.7b", 1.7), ("qwen3-4b", 4.0), ("qwen3-8b", 8.2), ("qwen3-14b", 14.8), ("qwen3-32b", 32.8)),
        *(("llama-7b", 6.7), ("llama-13b", 13.0)),
    ],
)
def test_published_sizes(name, billions):
    assert round(catalogue.load(name).parameter_count() / 1e9, 1) == billions


@pytest.mark.parametrize("name", MODELS)
def test_transformers_object_holds_the_fields(name):
    config = catalogue.load(name)
    hf = config.hf_config()
    assert type(hf).__name__ == config.arch.config_class
    for field, value in config.arch.fields().items():
        assert getattr(hf, field) == value, field


def test_tensor_parallel_shapes_of_32b():
    """The sizes of Canzona's published operating point: TP=8, one layer, in buffer order."""
    specs = {s.name: s for s in catalogue.load("qwen3-32b").parameters(8)}
    layer = "decoder.layers.63."
    sizes = {
        "mlp.linear_fc2.weight": ((5120, 3200), 16_384_000),
        "mlp.linear_fc1.weight": ((6400, 5120), 32_768_000),
        "self_attention.linear_qkv.weight": ((1280, 5120), 6_553_600),
        "self_attention.linear_proj.weight": ((5120, 1024), 5_242_880),
    }
    for name, (shape, numel) in sizes.items():
        assert specs[layer + name].local_shape(8) == shape
        assert specs[layer + name].local_numel(8) == numel


def test_matrices_of_a_layer_come_as_proj_qkv_fc1_fc2():
    names = [s.name.split(".")[-2] for s in catalogue.load("qwen3-tiny").parameters(1) if ".layers.3." in s.name]
    assert [n for n in names if n.startswith("linear")] == ["linear_proj", "linear_qkv", "linear_fc1", "linear_fc2"]


def test_vocabulary_padding():
    config = catalogue.load("qwen3-32b")
    assert [config.padded_vocab(tp) for tp in (1, 2, 8)] == [151936, 152064, 152576]
    assert config.parameters(8)[0].shape == (152576, 5120)
    assert catalogue.load("llama-7b").padded_vocab(1) == 32000


def test_partial_gradients_are_those_of_qk_norm():
    partial = [s.name for s in catalogue.load("qwen3-tiny", layers=1).parameters(2) if s.partial_over_tp]
    assert partial == [f"decoder.layers.0.self_attention.{x}_layernorm.weight" for x in "qk"]
    assert not any(s.partial_over_tp for s in catalogue.load("llama-tiny").parameters(2))


def test_layers_override():
    config = catalogue.load("qwen3-tiny", layers=32)
    assert config.arch.num_hidden_layers == 32
    assert sum(s.name.endswith("linear_fc1.weight") for s in config.parameters(1)) == 32
    assert len(config.hf_config().layer_types) == 32
    with pytest.raises(ConfigError, match="layers must be at least 1"):
        catalogue.load("qwen3-tiny", layers=0)


def test_planning_needs_no_torch():
    code = (
        "import sys; from impl.models import catalogue; catalogue.load('qwen3-32b').parameters(8);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_unknown_model_gets_the_nearest_name():
    with pytest.raises(ConfigError, match="unknown model 'qwen3-33b': did you mean 'qwen3-32b'"):
        catalogue.load("qwen3-33b")
    with pytest.raises(ConfigError, match="unknown model"):
        catalogue.load("../models/qwen3-tiny")


@pytest.mark.parametrize(
    ("name", "tp", "message"),
    [
        ("qwen3-14b", 3, "qwen3-14b: TP=3 does not divide 40 attention heads; use one of 1, 2, 4, 8"),
        ("qwen3-32b", 16, "qwen3-32b: TP=16 does not divide 8 KV heads; use one of 1, 2, 4, 8"),
        ("qwen3-tiny", 0, "TP=0 does not divide"),
        ("llama-7b", 64, "does not divide 32 attention heads"),
    ],
)
def test_tensor_parallel_degree_must_divide(name, tp, message):
    config = catalogue.load(name)
    for call in (config.check, config.parameters):
        with pytest.raises(ConfigError, match=message):
            call(tp)


def _with(tmp_path, edit):
    data = yaml.safe_load((catalogue.FOLDER / "qwen3-tiny.yaml").read_text())
    edit(data)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**data, "id": data.get("id", "mine")}))
    return tmp_path


def test_a_new_model_is_one_file(tmp_path):
    folder = _with(tmp_path, lambda d: d.update(id="mine") or d["transformers"].update(hidden_size=48))
    assert catalogue.names(folder) == ["mine"]
    assert catalogue.load("mine", folder=folder).parameters(1)[0].shape == (256, 48)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d["transformers"].update(hiden_size=1), "unknown setting 'hiden_size': did you mean 'hidden_size'"),
        (lambda d: d["init"].update(embeding=1), "did you mean 'embedding'"),
        (lambda d: d.update(inits=1), "did you mean 'init'"),
        (lambda d: d["transformers"]["rope_parameters"].update(factor=2), "unknown setting 'factor'"),
        (lambda d: d["transformers"]["rope_parameters"].update(rope_type="yarn"), "rope_type"),
        (lambda d: d["transformers"].update(hidden_size=0), "transformers.hidden_size"),
        (lambda d: d["transformers"].update(num_key_value_heads=3), "4 attention heads are not a multiple of 3"),
        (lambda d: d["transformers"].update(config_class="os.system"), "config_class"),
        (lambda d: d["transformers"].pop("vocab_size"), "transformers.vocab_size: Field required"),
        (lambda d: d.update(id="yours"), "id must be 'mine'"),
    ],
)
def test_bad_file(tmp_path, edit, message):
    folder = _with(tmp_path, lambda d: (d.update(id="mine"), edit(d)))
    with pytest.raises(ConfigError, match=message) as error:
        catalogue.load("mine", folder=folder)
    assert "\n" not in str(error.value)


def test_files_cannot_run_code(tmp_path):
    (tmp_path / "mine.yaml").write_text("!!python/object/apply:os.system ['false']")
    with pytest.raises(ConfigError, match="not plain YAML"):
        catalogue.load("mine", folder=tmp_path)
