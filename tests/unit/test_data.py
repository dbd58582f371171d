import itertools
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from impl.errors import ConfigError
from impl.harness import data, text_data
from impl.harness.spec import DataSpec
from impl.harness.stream_data import is_heldout

WORDS = [f"word{i}" for i in range(40)]
DOCUMENTS = [" ".join(WORDS[(7 * i + j * j) % 40] for j in range(3 + i % 9)) + f" {i}" for i in range(400)]


def opened(spec: DataSpec, **changes):
    settings = {"sequence": 12, "batch": 8, "dp_rank": 0, "dp": 1, "seed": 0, "vocabulary": 512}
    return data.open_stream(spec, **(settings | changes))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    """A word-level tokenizer with numbers, saved as a local folder."""
    words = ["<unk>", "<eos>", *WORDS, *map(str, range(400))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    return str(folder)


def write_jsonl(folder: Path, files: int) -> Path:
    folder.mkdir()
    for f in range(files):
        rows = DOCUMENTS[f * len(DOCUMENTS) // files : (f + 1) * len(DOCUMENTS) // files]
        (folder / f"{f}.jsonl").write_text("".join(json.dumps({"id": 0, "text": t}) + "\n" for t in rows))
    return folder


def write_parquet(folder: Path, files: int) -> Path:
    folder.mkdir()
    for f in range(files):
        rows = DOCUMENTS[f * len(DOCUMENTS) // files : (f + 1) * len(DOCUMENTS) // files]
        pyarrow.parquet.write_table(pyarrow.table({"text": rows}), folder / f"{f}.parquet", row_group_size=50)
    return folder


WRITERS = {"jsonl": write_jsonl, "parquet": write_parquet}


def test_embedded_text_is_ascii_and_its_heldout_tenth_is_never_trained_on():
    text = text_data.embedded_text()
    assert len(text) == 2**20
    assert text.isascii()
    stream = opened(DataSpec(), vocabulary=256, batch=64, sequence=48)
    train, rest = text[: -(len(text) // 10)], text[-(len(text) // 10) :]
    for row in stream.batch(1):
        assert bytes(row.tolist()) in train
    heldout = [bytes(row.tolist()) for row in stream.heldout()]
    assert len(heldout) == 64
    assert all(row in rest for row in heldout)
    places = sorted(rest.index(row) for row in heldout)
    assert all(b - a >= 49 for a, b in itertools.pairwise(places))
    assert places[-1] > 0.95 * len(rest)


def test_changed_embedded_text_is_refused(monkeypatch):
    monkeypatch.setattr(text_data, "EMBEDDED_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match="was changed"):
        text_data.embedded_text()


def test_text_gives_the_same_global_batch_under_every_dp():
    whole = opened(DataSpec(), seed=3)
    for dp in (2, 4, 8):
        parts = [opened(DataSpec(), seed=3, dp=dp, dp_rank=r) for r in range(dp)]
        for step in (1, 2, 17):
            assert torch.equal(torch.cat([p.batch(step) for p in parts]), whole.batch(step))
            assert torch.equal(parts[-1].heldout(), whole.heldout())
    assert not torch.equal(whole.batch(1), whole.batch(2))
    assert not torch.equal(whole.batch(1), opened(DataSpec(), seed=4).batch(1))
    assert torch.equal(whole.heldout(), opened(DataSpec(), seed=4).heldout())


def test_text_batches_do_not_change_between_releases():
    rows = opened(DataSpec(), sequence=16, batch=2).batch(1).tolist()
    assert [bytes(row) for row in rows] == [b"   raise ValueErr", b"lause with its po"]


def test_local_text_folder_with_a_tokenizer_joins_files_by_the_end_token(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("word1 word2 " * 300)
    (tmp_path / "b.txt").write_text("word3 " * 300)
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    spec = DataSpec(source=str(tmp_path), tokenizer=tokenizer, heldout_sequences=4)
    stream = opened(spec, batch=64)
    ids = {w: i + 2 for i, w in enumerate(WORDS)}
    seen = set(torch.cat([stream.batch(s) for s in range(1, 9)]).flatten().tolist())
    assert seen == {1, ids["word1"], ids["word2"], ids["word3"]}
    assert set(stream.heldout().flatten().tolist()) == {ids["word3"]}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(("files", "dp"), [(1, 1), (1, 3), (4, 2), (3, 2)])
def test_union_over_dp_ranks_is_the_whole_without_overlap(tmp_path, tokenizer, kind, files, dp):
    folder = WRITERS[kind](tmp_path / "a [b] 'c'", files)
    spec = DataSpec(source=str(folder), tokenizer=tokenizer, heldout_sequences=8)
    numbers = {i + 42: i for i in range(400)}
    seen: list[int] = []
    for rank in range(dp):
        stream = opened(spec, dp=dp, dp_rank=rank, batch=dp)
        mine: list[int] = []
        step = 0
        while len(mine) == len(set(mine)):  # until the first document comes again
            step += 1
            mine += [numbers[t] for t in stream.batch(step).flatten().tolist() if t in numbers]
        mine = mine[: next(i for i, n in enumerate(mine) if n in mine[:i])]
        seen += mine
    training = [i for i, text in enumerate(DOCUMENTS) if not is_heldout(text.encode())]
    assert sorted(seen) == training
    assert 320 < len(training) < 390


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("stop", [0, 1, 5, 30, 41])
def test_resumed_stream_continues_bit_by_bit(tmp_path, tokenizer, kind, stop):
    folder = WRITERS[kind](tmp_path / "data", 2)
    spec = DataSpec(source=str(folder), tokenizer=tokenizer, heldout_sequences=8)

    def stream():
        return opened(spec, dp=2, dp_rank=1, batch=8)

    straight = stream()
    expected = [straight.batch(s) for s in range(1, 46)]  # more than an epoch of 200 documents
    first = stream()
    for step in range(1, stop + 1):
        first.batch(step)
    state = json.loads(json.dumps(first.state_dict()))
    second = stream()
    second.load_state_dict(state)
    assert second.state_dict() == state
    for step in range(stop + 1, 46):
        assert torch.equal(second.batch(step), expected[step - 1])
    assert straight.state_dict()["places"]["1"]["epoch"] >= 1


@pytest.mark.parametrize("kind", WRITERS)
def test_a_stream_that_is_resumed_at_every_step_continues_bit_by_bit(tmp_path, tokenizer, kind):
    """Most batches come from what was left over, so no document is read between one state and the next."""
    folder = WRITERS[kind](tmp_path / "data", 2)
    spec = DataSpec(source=str(folder), tokenizer=tokenizer, heldout_sequences=8)
    straight, resumed = (opened(spec, sequence=2, batch=1) for _ in range(2))
    for step in range(1, 13):
        assert torch.equal(resumed.batch(step), straight.batch(step))
        state = json.loads(json.dumps(resumed.state_dict()))
        resumed = opened(spec, sequence=2, batch=1)
        resumed.load_state_dict(state)


def test_packing_keeps_every_token_in_order(tmp_path, tokenizer):
    folder = write_jsonl(tmp_path / "data", 1)
    stream = opened(DataSpec(source=str(folder), tokenizer=tokenizer, heldout_sequences=8), batch=2)
    got = torch.cat([stream.batch(s).flatten() for s in range(1, 21)]).tolist()
    vocabulary = {w: i for i, w in enumerate(["<unk>", "<eos>", *WORDS, *map(str, range(400))])}
    expected = [
        token
        for text in DOCUMENTS
        if not is_heldout(text.encode())
        for token in [*(vocabulary[w] for w in text.split()), 1]
    ]
    assert got == expected[: len(got)]


def test_a_stream_must_be_read_in_order(tmp_path):
    folder = write_jsonl(tmp_path / "data", 1)
    stream = opened(DataSpec(source=str(folder), heldout_sequences=8))
    stream.batch(1)
    with pytest.raises(ValueError, match="step 2 is next, not 3"):
        stream.batch(3)


def test_bytes_of_jsonl_are_separated_by_nul(tmp_path):
    folder = write_jsonl(tmp_path / "data", 1)
    stream = opened(DataSpec(source=str(folder), heldout_sequences=8))
    text = bytes(torch.cat([stream.batch(s).flatten() for s in range(1, 5)]).tolist()).decode()
    documents = [t for t in DOCUMENTS if not is_heldout(t.encode())]
    assert text.split("\0")[:3] == documents[:3]


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Hugging Face libraries offline, with an empty cache of datasets in the returned folder."""
    import datasets
    import huggingface_hub.constants

    cache = tmp_path / "hub-cache"
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    return cache


def test_hub_name_is_read_from_the_offline_cache(offline, tokenizer):
    """The layout is that of a dataset which ``load_dataset`` has downloaded before."""
    from datasets import Dataset, DatasetInfo, SplitDict, SplitInfo
    from datasets.arrow_writer import ArrowWriter

    folder = offline / "org___tiny" / "default" / "0.0.0" / "0123abcd"
    folder.mkdir(parents=True)
    table = Dataset.from_dict({"text": DOCUMENTS})
    with ArrowWriter(path=str(folder / "tiny-train.arrow"), features=table.features) as writer:
        for row in table:
            writer.write(row)
        writer.finalize()
    split = SplitInfo("train", num_examples=len(table), num_bytes=1, dataset_name="tiny")
    splits = SplitDict({"train": split}, dataset_name="tiny")
    names = {"builder_name": "parquet", "dataset_name": "tiny", "config_name": "default", "version": "0.0.0"}
    DatasetInfo(features=table.features, splits=splits, **names).write_to_directory(str(folder))

    spec = DataSpec(source="org/tiny", tokenizer=tokenizer, heldout_sequences=8)
    stream = opened(spec, dp=2, dp_rank=1)
    expected = [stream.batch(s) for s in (1, 2, 3)]
    again = opened(spec, dp=2, dp_rank=1)
    again.batch(1)
    resumed = opened(spec, dp=2, dp_rank=1)
    resumed.load_state_dict(again.state_dict())
    assert torch.equal(resumed.batch(2), expected[1])
    assert torch.equal(resumed.batch(3), expected[2])
    with pytest.raises(ConfigError, match="cannot open data source 'org/other'"):
        opened(DataSpec(source="org/other"))


def bad(tmp_path: Path, tokenizer: str) -> dict[str, tuple[DataSpec, str]]:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("some words " * 20)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 3000)
    (tmp_path / "broken.parquet").write_bytes(b"no parquet at all")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "number.jsonl").write_text('{"text": 3, "body": "a"}\n')
    (tmp_path / "field.jsonl").write_text('{"body": "a"}\n')
    (tmp_path / "few.jsonl").write_text('{"text": "a"}\n')
    mixed = write_jsonl(tmp_path / "mixed", 1)
    (mixed / "a.txt").write_text("a")
    at = lambda name, **more: DataSpec(source=str(tmp_path / name), **more)  # noqa: E731
    return {
        "missing path": (at("nothing.txt"), "does not exist"),
        "missing relative path": (DataSpec(source="./nothing"), "does not exist"),
        "unknown hub name": (DataSpec(source="nobody/nothing"), "cannot open data source 'nobody/nothing'"),
        "no name at all": (DataSpec(source="what is this?"), "does not exist"),
        "empty folder": (at("empty"), "has no files that end in .txt"),
        "empty file": (at("empty.txt"), "is empty"),
        "short file": (at("short.txt"), "is too short: 220 tokens"),
        "not UTF-8": (at("latin.txt", tokenizer=tokenizer), "is not UTF-8 text"),
        "broken parquet": (at("broken.parquet"), "broken.parquet"),
        "broken jsonl": (at("broken.jsonl"), "broken.jsonl"),
        "empty jsonl": (at("empty.jsonl"), "empty.jsonl"),
        "no text field": (at("field.jsonl"), "set data.text_field to one of 'body'"),
        "field is no text": (at("number.jsonl"), "has no text in 'text'"),
        "too few documents": (at("few.jsonl"), "is too short: the held-out tenth of its 1 documents"),
        "mixed kinds": (at("mixed"), "mixes text and json files"),
        "split of a local file": (at("few.jsonl", split="test"), "data.split and data.subset do not apply"),
        "missing tokenizer": (DataSpec(tokenizer=str(tmp_path / "tok")), "cannot load tokenizer"),
        "folder without tokenizer": (DataSpec(tokenizer=str(tmp_path / "empty")), "cannot load tokenizer"),
        "large tokenizer": (DataSpec(tokenizer=tokenizer), "442 tokens but the model's vocabulary is 256"),
    }


BAD = [
    "missing path",
    "missing relative path",
    "unknown hub name",
    "no name at all",
    "empty folder",
    "empty file",
    "short file",
    "not UTF-8",
    "broken parquet",
    "broken jsonl",
    "empty jsonl",
    "no text field",
    "field is no text",
    "too few documents",
    "mixed kinds",
    "split of a local file",
    "missing tokenizer",
    "folder without tokenizer",
    "large tokenizer",
]


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_one_clear_line(tmp_path, tokenizer, offline, case):
    cases = bad(tmp_path, tokenizer)
    assert set(cases) == set(BAD)
    spec, message = cases[case]
    vocabulary = 256 if case == "large tokenizer" else 512
    with pytest.raises(ConfigError) as raised:
        data.check(spec, sequence=12, batch=8, dp=2, vocabulary=vocabulary)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_tokenizer_with_code_is_not_executed(tmp_path):
    """A tokenizer folder that brings its own class must be refused, not run."""
    marker = tmp_path / "executed"
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}))
    with pytest.raises(ConfigError, match="cannot load tokenizer"):
        data.check(DataSpec(tokenizer=str(folder)), sequence=12, batch=8, dp=1, vocabulary=256)
    assert not marker.exists()
