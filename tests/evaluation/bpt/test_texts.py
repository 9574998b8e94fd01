"""Which texts are scored, and what they are called."""

import json
from dataclasses import asdict

import pytest

from granite_scu.config.errors import UserError
from granite_scu.config.settings import DataConfig
from granite_scu.data.sources.read import load
from granite_scu.evaluation.bpt import texts


@pytest.fixture
def run(tmp_path):
    """A run that validated on a file of its own, which its scores are of too."""
    for name in ("train", "checked"):
        (tmp_path / f"{name}.txt").write_text(f"The text of {name}.")
    train, checked = ([document.digest for document in load(str(tmp_path / f"{name}.txt"), "text")]
                      for name in ("train", "checked"))  # fmt: skip
    folder = tmp_path / "mine"
    folder.mkdir()
    data = DataConfig(path=[str(tmp_path / "train.txt")], validation_data=[str(tmp_path / "checked.txt")])
    (folder / "training_config.json").write_text(json.dumps({"data": asdict(data)}))
    record = {"train": train, "validation": checked, "test": checked, "shared": []}
    (folder / "documents.json").write_text(json.dumps(record))
    return folder


def test_a_text_that_chose_the_adapter_is_said_to_have(run, tmp_path):
    found = texts.held_out(run, [])
    assert found.name == "checked.txt, by which mine chose its adapter" and len(found.documents) == 1
    with pytest.raises(UserError, match="trained or validated on every document") as error:
        texts.named(str(tmp_path / "checked.txt"), "text", "utf-8", "auto", [run])
    assert "leave --data-dir out" not in str(error.value)
