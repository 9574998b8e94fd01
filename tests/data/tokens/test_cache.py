"""Tokens on disk: the same as in memory, made once, taken up after an interruption, made again for another text."""

import errno
import itertools
import json
import logging
import os
import pickle
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from power import Disk

from granite_scu.config.errors import UserError
from granite_scu.config.settings import DataConfig
from granite_scu.data.sources.read import load
from granite_scu.data.tokens import cache, corpus, encoding
from granite_scu.data.tokens.corpus import prepare
from granite_scu.data.tokens.encoding import encode
from granite_scu.data.tokens.stream import Corpus, StoredArray

TEXT = "Une première ligne.\nThe second\n\n  is indented;\nthe last 😀\nline (end)\nAgain\n"
ARRAYS = ("tokens", "ends", "widths", "targets")


@pytest.fixture
def config(tmp_path) -> DataConfig:
    """Files of all kinds: a long text, short ones, empty ones, and conversations."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "long.txt").write_text(TEXT * 40)
    (folder / "short.jsonl").write_text("".join(json.dumps({"text": f"{i} {TEXT}"}) + "\n" for i in range(30)))
    (folder / "empty.jsonl").write_text('{"text": " "}\n{"text": ""}\n')
    (folder / "pairs.jsonl").write_text(json.dumps({"prompt": "hi", "completion": "yo"}) + "\n")
    return DataConfig(str(folder), cache_dir=str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch):
    monkeypatch.setattr(encoding, "CHUNK", 200)
    monkeypatch.setattr(encoding, "GROUP", 200)
    monkeypatch.setattr(cache, "SAVED_EVERY", 1)


def place(found: Corpus) -> Path:
    return found.tokens.path.parent


def same(found: Corpus, tokenizer, config: DataConfig) -> bool:
    expected = encode(load(config.path, "text"), tokenizer)
    return all(np.array_equal(getattr(found, name)[:], getattr(expected, name)) for name in ARRAYS)


def counted(monkeypatch) -> list[int]:
    """Grows by the number of characters tokenised at a time."""
    seen: list[int] = []
    tokenised = encoding._Encoder.tokenised

    def counting(self, group):
        seen.append(sum(len(piece.text) for piece in group))
        return tokenised(self, group)

    monkeypatch.setattr(encoding._Encoder, "tokenised", counting)
    return seen


def test_tokens_on_disk_are_those_in_memory(tokenizer, config, caplog):
    found = prepare(config, tokenizer)
    documents = load(config.path, "text")
    assert same(found, tokenizer, config)
    assert [f"{digest:016x}" for digest in found.digests.tolist()] == [document.digest for document in documents]
    assert found.characters.tolist() == [len(document.text) for document in documents]
    assert [found.names[i] for i in range(found.n_documents)] == [document.name for document in documents]
    assert (found.counts["empty"], found.n_conversations) == (2, 1)
    assert isinstance(found.tokens, StoredArray)
    assert "left out 2 of 34 texts, which are empty; the first is " in caplog.text


@pytest.mark.parametrize("names_first", [False, True])
def test_after_a_power_cut_at_any_time_the_tokens_are_the_same(tokenizer, config, tmp_path, monkeypatch, names_first):
    """Of a preparation that was cut short as much is taken up as was on the disk."""
    kept, left, syncs = Path(config.cache_dir), [], itertools.count(1)
    kept.mkdir()
    disk = Disk(kept)

    def cut():
        left.append(disk.after_a_cut(tmp_path / f"left{len(left)}", names_first))

    disk.watch = lambda: cut() if next(syncs) % 25 == 0 else None
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", disk.fsync)
        expected = prepare(config, tokenizer)
        cut()
    seen = counted(monkeypatch)
    for folder in (left[-1], left[len(left) // 2], left[0]):
        found = prepare(replace(config, cache_dir=str(folder)), tokenizer)
        assert not seen or folder != left[-1]
        assert all(np.array_equal(getattr(found, name)[:], getattr(expected, name)[:]) for name in ARRAYS)


def test_a_second_run_tokenises_nothing(tokenizer, config, monkeypatch):
    prepare(config, tokenizer)
    seen = counted(monkeypatch)
    found = prepare(config, tokenizer)
    assert not seen and same(found, tokenizer, config)


@pytest.mark.parametrize(
    "change",
    [
        {"loss_on": "all"},
        {"text_column": "body"},
        {"split_seed": 1},
        {"control_tokens": "tokens"},
        {"encoding": "utf-8-sig"},
        {"record_format": "text"},
    ],
    ids=str,
)
def test_other_settings_are_other_tokens(tokenizer, config, change):
    path = Path(config.path, "short.jsonl")
    path.write_text(json.dumps({"text": TEXT, "body": "x" + TEXT}) + "\n")
    config = replace(config, path=str(path))
    one, other = prepare(config, tokenizer), prepare(replace(config, **change), tokenizer)
    assert place(one) != place(other)


def test_another_tokenizer_or_template_is_other_tokens(tokenizer, chatting, config):
    found = {place(prepare(config, t)) for t in (tokenizer, chatting)}
    chatting.chat_template += "{# #}"
    assert len(found | {place(prepare(config, chatting))}) == 3


def test_a_text_that_has_changed_is_tokenised_again(tokenizer, config):
    before = place(prepare(config, tokenizer))
    Path(config.path, "long.txt").write_text("another text")
    found = prepare(config, tokenizer)
    assert place(found) != before and same(found, tokenizer, config)


def test_tokens_of_an_earlier_version_are_made_again(tokenizer, config, monkeypatch):
    before = place(prepare(config, tokenizer))
    monkeypatch.setattr(cache, "VERSION", cache.VERSION + 1)
    found = prepare(config, tokenizer)
    assert place(found) != before and same(found, tokenizer, config)


def test_the_same_files_by_another_path_are_the_same_text(tokenizer, config, monkeypatch):
    found = prepare(config, tokenizer)
    monkeypatch.chdir(Path(config.path).parent)
    name = Path(config.path).name
    for path in (name, f"./{name}/../{name}"):
        assert place(prepare(replace(config, path=path), tokenizer)) == place(found)


def test_a_text_column_that_no_record_has_is_refused(tokenizer, config):
    pairs = replace(config, path=str(Path(config.path, "pairs.jsonl")), text_column="contnet")
    with pytest.raises(UserError, match=r"--text-column contnet: no record of .*pairs.jsonl has a text in it, all are"):
        prepare(pairs, tokenizer)
    assert prepare(replace(pairs, text_column="completion"), tokenizer).n_conversations == 0


def interrupt(config, tokenizer, monkeypatch, parts: int = 20) -> Path:
    """The folder that a preparation leaves that ends after so many parts."""
    made = corpus.encoded
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "encoded", lambda *given, **more: ended(islice(made(*given, **more), parts)))
        with pytest.raises(KeyboardInterrupt):
            prepare(config, tokenizer)
    (partial,) = Path(config.cache_dir).glob("*.partial")
    return partial


def ended(parts):
    yield from parts
    raise KeyboardInterrupt


@pytest.mark.parametrize("parts", [1, 3, 11])
def test_an_interrupted_preparation_is_taken_up(tokenizer, config, monkeypatch, caplog, parts):
    interrupt(config, tokenizer, monkeypatch, parts)
    seen = counted(monkeypatch)
    with caplog.at_level(logging.INFO):
        found = prepare(config, tokenizer)
    again = sum(seen)
    assert "continuing the interrupted tokenisation of" in caplog.text
    assert same(found, tokenizer, config) and found.counts["empty"] == 2
    whole = sum(map(len, (document.text for document in load(config.path, "text"))))
    assert again < whole - 150 * parts


@pytest.mark.parametrize("name", ["tokens", "ends"])
@pytest.mark.parametrize("damage", [lambda file: os.truncate(file, file.stat().st_size // 2), Path.unlink])
def test_what_is_taken_up_holds_what_it_should(tokenizer, config, monkeypatch, caplog, name, damage):
    damage(interrupt(config, tokenizer, monkeypatch) / name)
    assert same(prepare(config, tokenizer), tokenizer, config)
    assert "is damaged; it starts again" in caplog.text


NEGATIVE = json.dumps({**{name: kind() for name, kind in cache.NOTES.items()}, "sizes": dict.fromkeys(cache.FILES, -1)})


@pytest.mark.parametrize("text", ["[]", NEGATIVE, "\udcff"])
@pytest.mark.parametrize("interrupted", [True, False])
def test_notes_that_hold_something_else_count_as_none(tokenizer, config, monkeypatch, interrupted, text):
    if interrupted:
        note = interrupt(config, tokenizer, monkeypatch) / cache.META
    else:
        note = place(prepare(config, tokenizer)) / cache.META
    note.write_text(text, errors="surrogateescape")
    assert same(prepare(config, tokenizer), tokenizer, config)


def test_damage_is_found_in_any_file_and_all_is_made_again(tokenizer, config, caplog):
    """One that was cut, one in which a byte has changed, and ids that the vocabulary has not, whatever is noted."""
    folder = place(prepare(config, tokenizer))
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    assert {path.name for path in kept} == {*cache.FILES, cache.META}
    noted = json.loads(kept[folder / cache.META])
    ids = np.frombuffer(kept[folder / "tokens"], np.int32).copy()
    ids[17] = len(tokenizer)
    noted["checksums"]["tokens"] = zlib.crc32(ids)
    damages = [{path: data[: len(data) // 2]} for path, data in kept.items()]
    damages += [{path: data[:3] + bytes([data[3] ^ 0x55]) + data[4:]} for path, data in kept.items()]
    damages += [{folder / "tokens": ids.tobytes(), folder / cache.META: json.dumps(noted).encode()}]
    for damage in damages:
        for path, data in (kept | damage).items():
            path.write_bytes(data)
        assert not cache._is_sound(folder, len(tokenizer)), list(damage)
    assert same(prepare(config, tokenizer), tokenizer, config)
    assert "are damaged, and are made again" in caplog.text
    assert folder.joinpath("tokens").read_bytes() == kept[folder / "tokens"]


def test_tokens_that_someone_else_keeps_need_only_be_read(tokenizer, config, monkeypatch):
    """On a file system that is mounted read-only, which root heeds too."""
    prepare(config, tokenizer)
    folder = Path(config.cache_dir)
    for file in folder.glob("*.lock"):
        file.unlink()
    before = sorted(folder.rglob("*"))

    def refused(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("mkdir", "write_text", "write_bytes", "touch"):
        monkeypatch.setattr(Path, name, refused)
    monkeypatch.setattr(cache, "FileLock", refused)
    assert same(prepare(config, tokenizer), tokenizer, config)
    assert sorted(folder.rglob("*")) == before


def test_tokens_that_may_not_be_read_are_not_taken_for_damaged(tokenizer, config, monkeypatch):
    prepare(config, tokenizer)
    read_bytes = Path.read_bytes

    def refused(path, *arguments, **settings):
        if path.name == cache.META:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_bytes(path, *arguments, **settings)

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(UserError, match=r"--cache-dir .*cannot be read \(.*Permission denied.*meta.json.*\); have its"):
        prepare(config, tokenizer)


def test_a_file_that_shrinks_while_it_is_read_is_refused(tokenizer, config, monkeypatch):
    """Or else half a text would be kept under the name of the whole, and trained on from then on."""
    tokenised = encoding._Encoder.tokenised

    def shrink(self, group):
        os.truncate(Path(config.path) / "short.jsonl", 0)
        return tokenised(self, group)

    with monkeypatch.context() as patch:
        patch.setattr(encoding._Encoder, "tokenised", shrink)
        with pytest.raises(UserError, match=r"--data-dir .*: changed while it was read"):
            prepare(config, tokenizer)
    assert same(prepare(config, tokenizer), tokenizer, config)


def test_of_two_runs_that_prepare_the_same_text_one_takes_what_the_other_makes(config, tokenizer, monkeypatch):
    seen = counted(monkeypatch)
    prepare(replace(config, cache_dir=f"{config.cache_dir} of one"), tokenizer)
    size = sum(seen)
    with ThreadPoolExecutor(2) as both:
        found = list(both.map(lambda _: prepare(config, tokenizer), range(2)))
    assert sum(seen) == 2 * size and all(same(each, tokenizer, config) for each in found)
    assert not list(Path(config.cache_dir).glob("*.partial"))


def test_a_cache_that_cannot_be_written_names_its_flag(tokenizer, config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--cache-dir .*file/cache: cannot be written \(.*Not a directory"):
        prepare(replace(config, cache_dir=str(tmp_path / "file" / "cache")), tokenizer)


@pytest.mark.parametrize("system", ["posix", "windows"])
def test_a_file_that_is_cut_while_it_is_used_is_told_in_words(system, tokenizer, config, monkeypatch):
    if system == "windows":
        monkeypatch.delattr(os, "preadv")
    found = prepare(config, tokenizer)
    copy = pickle.loads(pickle.dumps(found.tokens))
    os.truncate(found.tokens.path, 40)
    for tokens in (found.tokens, copy):
        assert tokens[:10].tolist() == encode(load(config.path, "text"), tokenizer).tokens[:10].tolist()
        with pytest.raises(UserError, match=r"--cache-dir .*/cache: .*/tokens was cut while the run read it; start"):
            tokens[8:12]
