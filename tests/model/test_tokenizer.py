"""A tokenizer that does not work is refused, whatever the library does at it."""

import json
import shutil

import pytest
from outcomes import refusal

from granite_scu.config.errors import UserError
from granite_scu.model import finding, loading
from granite_scu.model.loading import read_tokenizer


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(finding.resolve("tiny-granite-h"), tmp_path / "model")


def change(file, *keys, value):
    content = json.loads(file.read_text(encoding="utf-8"))
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    file.write_text(json.dumps(content), encoding="utf-8")


def test_one_that_works_is_the_librarys(folder):
    text = "Na\u00efve: f(x) \u2264 3"
    assert read_tokenizer(str(folder))(text) == loading.load_tokenizer("tiny-granite-h")(text)


def test_a_saved_one_is_what_transformers_4_reads_and_the_same(folder, tmp_path):
    before = read_tokenizer(str(folder))
    loading.save_tokenizer(before, tmp_path / "saved")
    settings = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not settings.keys() & {"extra_special_tokens", "backend", "is_local", "local_files_only"}
    after = read_tokenizer(str(tmp_path / "saved"))
    assert after.backend_tokenizer.to_str() == before.backend_tokenizer.to_str()
    assert (after.chat_template, after.all_special_tokens) == (before.chat_template, before.all_special_tokens)


TEN = {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 10}


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("model", "vocab", "e"), 2**31 + 5, "its tokenizer.json cannot be used"),
        (("model", "vocab", "e"), 2**30, "it has a token of the number 1073741824"),
        (("model", "vocab", "x" * 20_000), 8000, "it has a token of 20,000 characters"),
        (
            ("normalizer",),
            {"type": "Replace", "pattern": {"String": ""}, "content": "xx"},
            "its tokenizer.json cannot be used",
        ),
        (("normalizer",), {"type": "Sequence", "normalizers": [TEN] * 3}, "tokens of 57 characters"),
        (("model", "dropout"), 7.5, "its tokenizer.json cannot be used"),
    ],
)
def test_contents_at_which_the_library_ends_or_takes_long_are_refused(folder, keys, value, words, capfd):
    change(folder / "tokenizer.json", *keys, value=value)
    begins = f"--model {folder}: cannot be loaded: its "
    assert words in refusal(loading.load_tokenizer, str(folder), begins=begins)
    assert capfd.readouterr().err == ""


def test_a_folder_without_a_tokenizer_says_what_to_copy(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(UserError, match=r"no tokenizer; copy tokenizer\.json"):
        loading.load_tokenizer(str(folder))


@pytest.mark.parametrize(("key", "value"), [("eos_token", [7]), ("chat_template", [7]), ("extra_special_tokens", 3)])
def test_settings_that_are_no_texts_are_refused(folder, key, value):
    (folder / "chat_template.jinja").unlink()
    change(folder / "tokenizer_config.json", key, value=value)
    with pytest.raises(UserError, match="its files are damaged, incomplete or not for transformers"):
        loading.load_tokenizer(str(folder))
