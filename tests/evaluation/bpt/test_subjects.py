"""What the names on the command line become in the table."""

import pytest

from granite_scu.evaluation.bpt.subjects import BASE, identify


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Makes folders that look like adapters, and goes where they lie."""
    monkeypatch.chdir(tmp_path)

    def make(*names: str) -> None:
        for name in names:
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "adapter_config.json").write_text('{"base_model_name_or_path": "tiny-granite-h"}')
            (tmp_path / name / "adapter_model.safetensors").touch()

    return make


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["mine", "runs/other"], ["mine", "other"]),
        (["one/mine", "two/mine"], ["one/mine", "two/mine"]),
        (["mine/best", "mine/checkpoint-4"], ["mine/best", "mine/checkpoint-4"]),
        (["base"], ["./base"]),
        (["base", "runs/base"], ["./base", "runs/base"]),
    ],
)
def test_names_are_short_and_never_the_base_models(place, given, names):
    place(*given)
    found = [subject.name for subject in identify(given)]
    assert found == names and BASE not in found


@pytest.mark.parametrize("given", ["small.gguf", "folder"])
def test_a_gguf_file_or_a_folder_with_one_is_a_whole_model(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for place in ("small.gguf", "folder/small.gguf"):
        (tmp_path / place).write_bytes(b"GGUF")
    assert [subject.kind for subject in identify([given])] == ["model"]
