"""Data sets of the hub: a local folder stands for one, as the datasets library allows."""

import json

import datasets
import pytest
from outcomes import refusal, refused_data

from granite_scu.config.errors import UserError
from granite_scu.config.settings import DataConfig
from granite_scu.data.blocks.splitting import divide
from granite_scu.data.sources import hub
from granite_scu.data.sources.documents import SPLITS, Document
from granite_scu.data.sources.read import in_memory, load, sources_of
from granite_scu.data.tokens.corpus import prepare


@pytest.fixture(autouse=True)
def _fresh():
    hub._load.cache_clear()
    hub._say_what_is_read.cache_clear()
    yield
    hub._load.cache_clear()


@pytest.fixture
def folder(tmp_path):
    """A data set with three splits."""
    root = tmp_path / "set"
    root.mkdir()
    for name, count in (("train", 5), ("validation", 2), ("test", 1)):
        rows = [{"id": i, "text": f"{name} {i}"} for i in range(count)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def test_a_data_set_that_comes_divided_keeps_its_splits(folder, tokenizer, tmp_path):
    config = DataConfig(f"hf:{folder}", cache_dir=str(tmp_path / "cache"))
    corpus = prepare(config, tokenizer)
    division = divide(corpus, SPLITS, "set")
    parts = division.parts
    assert division.by == "published" and [len(part) for part in parts.values()] == [5, 2, 1]
    assert corpus.names[int(parts["validation"][1])].endswith("set/validation: row 2")
    assert [document.text for document in sources_of(config)[1].read()] == ["validation 0", "validation 1"]


def test_what_it_holds_out_is_not_trained_on(folder, tokenizer, tmp_path, caplog):
    for name in ("train", "validation"):
        with (folder / f"{name}.jsonl").open("a") as rows:
            rows.write(json.dumps({"id": 9, "text": "test 0"}) + "\n")
    config = DataConfig(f"hf:{folder}", cache_dir=str(tmp_path / "cache"))
    parts = divide(prepare(config, tokenizer), SPLITS, "set").parts
    assert [len(part) for part in parts.values()] == [5, 2, 1]
    assert "validation: documents that test has too, left out: 1" in caplog.text
    assert "train: documents that validation or test have too, left out: 1" in caplog.text


def test_validation_that_is_test_is_refused(folder, tokenizer, tmp_path):
    (folder / "validation.jsonl").write_bytes((folder / "test.jsonl").read_bytes())
    config = DataConfig(f"hf:{folder}", cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError, match="every document of the validation split is one that test has too"):
        divide(prepare(config, tokenizer), SPLITS, "set")


def test_of_several_sources_the_training_split_is_read_and_those_that_are_not_are_named(folder, tmp_path, caplog):
    (tmp_path / "a.txt").write_text("mine")
    documents = [
        d for source in sources_of(DataConfig([str(tmp_path / "a.txt"), f"hf:{folder}"])) for d in source.read()
    ]
    assert [document.text for document in in_memory(documents)] == ["mine", *(f"train {i}" for i in range(5))]
    assert "of its splits train is read, and not test, validation" in caplog.text


def test_what_is_held_out_is_the_split_of_that_name(folder, caplog):
    own = {"validation_data": f"hf:{folder}", "test_data": f"hf:{folder}"}
    config = DataConfig(f"hf:{folder}", **own)
    texts = {source.split: [document.text for document in source.read()] for source in sources_of(config)}
    assert {split: (found[0], len(found)) for split, found in texts.items()} == {
        "": ("train 0", 5), "validation": ("validation 0", 2), "test": ("test 0", 1)
    }  # fmt: skip
    assert caplog.text.count("of its splits") == 1  # of what is trained on


def test_each_flag_has_its_line_where_all_name_one_data_set(tmp_path, chatting, caplog):
    caplog.set_level("INFO")
    for name in ("train", "test"):
        rows = [{"question": f"{name} {i}", "answer": "a"} for i in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[: len(name) * 4]))
    config = DataConfig(f"hf:{tmp_path}", test_data=f"hf:{tmp_path}", cache_dir=str(tmp_path / "cache"))
    prepare(config, chatting)
    said = [line.rpartition(": ")[2] for line in caplog.messages if "read as question and answer" in line]
    assert said == ["20 conversations", "16 conversations"]


def test_a_split_is_not_held_out_where_it_is_read_for_another(folder):
    (folder / "test.jsonl").unlink()
    name = f"hf:{folder}"
    words = f"--test-data {name}: has no test split, and --data-dir reads its train split; "
    refusal(sources_of, DataConfig(name, validation_data=name, test_data=name), begins=words)
    *_, test = sources_of(DataConfig("stdlib-docs", test_data=name))
    assert next(document.text for document in test.read()) == "train 0"


def test_a_data_set_called_wikitext_with_a_column_of_its_own(tmp_path):
    root = tmp_path / "wikitext"
    root.mkdir()
    (root / "train.jsonl").write_text('{"body": "a"}\n{"body": "b"}\n')
    assert [document.text for document in load(f"hf:{root}", "body")] == ["a", "b"]
    with pytest.raises(UserError, match="row 1: no field 'text', there are: body"):
        load(f"hf:{root}", "text")


def test_one_split_is_divided_like_any_text(folder):
    for name in ("validation", "test"):
        (folder / f"{name}.jsonl").unlink()
    assert [source.split for source in sources_of(DataConfig(f"hf:{folder}"))] == [""]
    assert [document.text for document in load(f"hf:{folder}", "text")] == [f"train {i}" for i in range(5)]


def test_what_save_to_disk_wrote(tmp_path):
    rows = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    rows.save_to_disk(tmp_path / "rows")
    datasets.DatasetDict(train=rows, test=rows.select([1])).save_to_disk(tmp_path / "parts")
    assert [document.text for document in load(f"hf:{tmp_path / 'rows'}", "text")] == ["one", "two"]
    config = DataConfig("stdlib-docs", test_data=f"hf:{tmp_path / 'parts'}")
    assert [document.text for document in sources_of(config)[-1].read()] == ["two"]
    for name in ("rows", "parts"):
        assert f"give hf:{tmp_path / name}" in refused_data(str(tmp_path / name))


def test_no_such_data_set_is_one_line_that_names_what_there_is_without_the_hub(tmp_path):
    message = refused_data(f"hf:{tmp_path / 'none'}")
    assert "names neither a data set of the hub nor a folder" in message and "--data-dir stdlib-docs" in message


@pytest.mark.parametrize("kind", [ConnectionError, RuntimeError])  # offline, and where it is a script
def test_the_default_without_network_names_the_embedded_corpora(monkeypatch, kind):
    def unreachable(*name, **how):
        raise kind("Couldn't reach 'Salesforce/wikitext' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(UserError, match=r"no --data-dir, and wikitext-2 .*Couldn't reach .*--data-dir stdlib-docs or"):
        sources_of(DataConfig())


def test_wikitext_comes_in_articles_and_its_own_splits(monkeypatch):
    rows = [
        "",
        " = First = \n",
        "",
        " Text = more . \n",
        " = = Part = = \n",
        " End . \n",
        " = A = B = \n",
        " Text . \n",
    ]
    splits = {name: [{"text": row.replace("Text", name)} for row in rows] for name in hub.SPLITS}
    monkeypatch.setattr("datasets.load_dataset", lambda *name, **how: splits)
    train, *held_out = (source.read for source in sources_of(DataConfig()))
    assert list(train()) == [
        Document(
            "Salesforce/wikitext:wikitext-2-raw-v1/train/First",
            " = First = \n train = more . \n = = Part = = \n End . \n",
        ),
        Document("Salesforce/wikitext:wikitext-2-raw-v1/train/A = B", " = A = B = \n train . \n"),
    ]
    assert [split.args[1] for split in (train, *held_out)] == list(hub.SPLITS)


@pytest.mark.parametrize("name", ["", "../../x", "a/b/c", "/etc/passwd", "a/..", "~x"])
def test_what_is_neither_a_name_nor_a_folder_is_asked_of_nobody(name):
    with pytest.raises(UserError, match=f"--data-dir hf:{name}: names neither a data set of the hub nor a folder; "):
        load(f"hf:{name}", "text")


def test_a_broken_file_of_a_data_set_is_said_to_be_so(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(UserError, match="JSON parse error"):
        load(f"hf:{tmp_path}", "text")
