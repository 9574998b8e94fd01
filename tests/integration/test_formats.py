"""A text fine-tune on files of every format, and a chat fine-tune, from files to a run folder."""

import csv
import gzip
import json

import pyarrow as pa
import pyarrow.parquet
import pytest
from backports import zstd

from granite_scu.data.sources.corpora import stdlib_docs


@pytest.fixture
def texts() -> list[str]:
    return [document.text[:600] for document in stdlib_docs()[:30]]


def test_a_text_fine_tune_on_files_of_every_format(train, texts, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(texts[:4]):
        (folder / f"{number}.{('txt', 'md')[number % 2]}").write_text(text)
    (folder / "packed.txt.gz").write_bytes(gzip.compress(texts[4].encode()))
    (folder / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts[5:12]))
    with (folder / "b.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["body"], *([text] for text in texts[12:20])])
    with (folder / "c.tsv").open("w", newline="") as stream:
        csv.writer(stream, delimiter="\t").writerows([["body"], *([text] for text in texts[20:23])])
    (folder / "d.jsonl.zst").write_bytes(zstd.compress(json.dumps({"body": texts[23]}).encode()))
    pa.parquet.write_table(pa.table({"body": texts[24:30]}), folder / "e.parquet")
    run = train("--data-dir", folder, "--text-column", "body", "--block-size", "64")
    data = json.loads((run / "training_config.json").read_text())["data_summary"]
    assert sum(data[name]["documents"] for name in ("train", "validation", "test")) == 30
    assert data["split_by"] == "document"


def test_a_chat_fine_tune_packs_whole_conversations(train, texts, tmp_path):
    """In every format that can hold them."""
    folder = tmp_path / "chats"
    folder.mkdir()
    chats = [{"messages": [{"role": "user", "content": f"Explain {i}"}, {"role": "assistant", "content": text[:150]}]}
             for i, text in enumerate(texts)]  # fmt: skip
    chats.append({"messages": [{"role": "user", "content": "nobody answers this"}]})
    (folder / "a.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats[15:]))
    alpaca = [{"instruction": "Explain.", "input": f"{i}", "output": texts[i][:150]} for i in range(10, 15)]
    (folder / "d.json").write_text(json.dumps(alpaca, indent=1))
    with (folder / "b.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["messages"], *([json.dumps(chat["messages"])] for chat in chats[:5])])
    pa.parquet.write_table(pa.table({"messages": [chat["messages"] for chat in chats[5:10]]}), folder / "c.parquet")
    run = train("--data-dir", folder, "--block-size", "128")
    data = json.loads((run / "training_config.json").read_text())["data_summary"]
    assert data["unsupervised_documents"] == 1
    assert data["record_formats"] == {"messages": 26, "alpaca": 5}
    assert sum(data[name]["documents"] for name in ("train", "validation", "test")) == 30
    assert 0 < data["train"]["supervised_tokens"] < 0.9 * 128 * data["train"]["blocks"]
    assert data["train"]["utilisation"] > 0.6
