import json

from benchmarks import data


def test_the_text_has_the_size_asked_for_and_no_document_twice(tmp_path):
    documents = list(data.texts(0.3))
    assert 300_000 <= sum(len(text.encode()) for text in documents) < 320_000
    assert len(set(documents)) == len(documents)
    data.write(tmp_path / "text.jsonl", 0.3)
    lines = (tmp_path / "text.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == documents
    data.write(tmp_path / "chats.jsonl", 0.3, chats=True)
    chats = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    assert [chat["prompt"] + chat["completion"] for chat in chats] == documents


def test_all_sides_of_tokenisation_are_timed(tmp_path):
    data.write(tmp_path / "text.jsonl", 0.1)
    found = data.tokenisation(tmp_path / "text.jsonl", 0.1, repeats=1)
    for what in ("encode", "prepare"):
        assert found[f"{what}_ratio"] == found[f"{what}_s"] / found["tokenizers_s"] > 0
