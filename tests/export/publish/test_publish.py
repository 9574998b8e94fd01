"""Publishing a run with the real huggingface_hub client over HTTP: what arrives, what goes wrong, what a rerun does."""

import time

import pytest
from loopback import CUT, TOKEN, Repo

from granite_scu.export.publish import selection

REPO = "ada/adapter"
SECRETS = (TOKEN, "permission-to-write")


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The seconds that the client would have waited, and does not."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


def one_line(err: str) -> str:
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err


def test_a_run_arrives_in_one_commit(push, hub, run):
    code, out, err = push()
    assert (code, err) == (0, ""), out + err
    repo = hub.repos[REPO]
    there = repo.branches["main"]
    expected = {"README.md", *selection.REQUIRED, *selection.PICTURES, "chat_template.jinja", ".gitattributes"}
    assert set(there) == expected
    assert len(repo.commits) == 1 and not repo.private
    for name in expected - {"README.md", ".gitattributes"}:
        assert there[name] == (run / name).read_bytes(), name
    assert f'adapter = "{REPO}"' in there["README.md"].decode()
    assert out.rstrip().endswith(f"public: {hub.url}/{REPO}")


def test_publishing_again_uploads_nothing(push, hub):
    push()
    hub.requests.clear()
    code, out, _ = push()
    assert code == 0
    assert "hub: Skipping upload for 'README.md' as the file has not changed." in out
    assert "hub: No files have been modified since last commit." in out
    assert not {"PUT store", "POST commit"} & set(hub.requests)
    assert len(hub.repos[REPO].commits) == 1


def test_only_what_changed_is_uploaded(push, hub, run):
    push()
    hub.requests.clear()
    history = (run / "scu_history.json").read_text(encoding="utf-8")
    (run / "scu_history.json").write_text(history + "\n", encoding="utf-8")
    code, out, _ = push()
    assert code == 0 and "Skipping upload for 'scu_history.json'" not in out
    assert hub.repos[REPO].commits[-1]["files"] == 1
    assert hub.count("PUT store") == 0


def test_templates_of_a_former_publication_are_removed_and_other_files_are_not(push, hub, run):
    former = {"chat_template.jinja": b"{{ 1 }}", "additional_chat_templates/rag.jinja": b"{{ 2 }}"}
    hub.repos[REPO] = Repo(private=True)
    hub.repos[REPO].branches["main"] |= former | {"chat_template.jinja.md": b"by hand"}
    (run / "chat_template.jinja").unlink()
    assert push()[0] == 0
    there = hub.repos[REPO].branches["main"]
    assert not former.keys() & there.keys() and there["chat_template.jinja.md"] == b"by hand" and "README.md" in there


def test_a_private_repository_needs_no_confirmation(push, hub):
    code, out, _ = push("--private", yes=False)
    assert code == 0 and hub.repos[REPO].private
    assert f"private: {hub.url}/{REPO}" in out


def test_a_public_repository_is_not_taken_for_a_private_one(push, hub):
    hub.repos[REPO] = Repo(private=False)
    code, _, err = push("--private")
    assert code == 2 and "--private" in one_line(err) and "is public already" in err
    assert not hub.repos[REPO].commits


def test_an_existing_private_repository_stays_private(push, hub):
    hub.repos[REPO] = Repo(private=True)
    code, out, _ = push()
    assert code == 0 and hub.repos[REPO].private and "private: " in out


def test_a_revision_is_a_branch(push, hub):
    code, out, _ = push("--revision", "v2")
    assert code == 0
    branches = hub.repos[REPO].branches
    assert set(branches["main"]) == {".gitattributes"} and "README.md" in branches["v2"]
    assert 'PeftModel.from_pretrained(base, adapter, revision="v2")' in branches["v2"]["README.md"].decode()
    assert f"{hub.url}/{REPO}/tree/v2" in out
    assert push("--revision", "v2")[0] == 0 and len(hub.repos[REPO].commits) == 1


@pytest.mark.parametrize(
    ("route", "status", "exit_code", "words"),
    [
        ("GET whoami", 401, 2, "hf auth login"),
        ("GET whoami", 429, 1, "wait 17 s"),
        ("POST create", 403, 2, "ada/adapter on http://127.0.0.1"),
        ("GET whoami", CUT, 1, "connection to"),
        ("POST create", CUT, 1, "connection to"),
        ("POST preupload", 403, 2, "the token may not do this"),
        ("POST batch", 401, 2, "hf auth login"),
        ("PUT store", 403, 2, "the token may not do this"),
        ("POST commit", 404, 2, "check --repo-id"),
        ("POST commit", 409, 1, "somebody else changed it meanwhile"),
        ("POST commit", 500, 1, "run the same command again"),
        ("POST commit", CUT, 1, "connection to"),
    ],
)
def test_an_error_is_one_line_and_a_second_run_completes(push, hub, route, status, exit_code, words):
    hub.fail(route, status, **({"Retry_After": "17"} if status == 429 else {}))
    code, out, err = push()
    assert code == exit_code
    assert words in one_line(err)
    assert not any(secret in out + err for secret in SECRETS)
    stored = hub.count("PUT store") if route == "POST commit" else 0
    code, out, err = push()
    assert (code, err) == (0, ""), err
    assert len(hub.repos[REPO].commits) == 1
    if stored:
        assert hub.count("PUT store") == stored, "a stored file was sent again"
        for name in ("adapter_model.safetensors", "control.png"):
            assert f"hub: Content of file {name} is already present upstream - skipping upload." in out


@pytest.mark.parametrize(("route", "status"), [("POST preupload", 429), ("POST batch", CUT), ("PUT store", 500)])
def test_a_passing_trouble_is_sat_out_and_a_lasting_one_reported(push, hub, waits, route, status):
    retry = {"Retry_After": "17"} if status == 429 else {}
    hub.fail(route, status, times=40, **retry)
    code, out, err = push()
    assert code == 1 and "run the same command again" in one_line(err)
    assert "Retry 1/5" in out and len(waits) >= 5  # the client's own patience, said as it goes
    assert (18.0 in waits) == (status == 429)
    assert not any(secret in out + err for secret in SECRETS)
    hub.faults.clear()
    hub.fail(route, status, **retry)
    code, out, err = push()
    assert (code, err) == (0, "") and len(hub.repos[REPO].commits) == 1


def test_a_commit_in_between_is_not_overwritten(push, hub):
    def somebody_else():
        hub.before_commit = lambda: None
        hub.repos[REPO].commits.append({"branch": "main", "summary": "another", "files": 0})

    hub.before_commit = somebody_else
    code, _, err = push()
    assert code == 1 and "somebody else changed it meanwhile" in one_line(err)
    assert push()[0] == 0


def test_a_card_that_the_hub_refuses_is_reported_before_the_upload(push, hub):
    code, _, err = push("--license", "unheard-of")
    assert code == 2 and '400 ("license" must be one of [apache-2.0])' in one_line(err)
    assert hub.count("PUT store") == 0


def test_a_token_that_may_only_read_is_refused_at_once(push, hub):
    hub.role = "read"
    code, _, err = push()
    assert code == 2 and "may only read" in one_line(err)
    assert hub.requests == ["GET whoami"]


@pytest.mark.parametrize(
    ("endpoint", "offline", "exit_code", "words"),
    [
        ("http://127.0.0.1:9", False, 1, "127.0.0.1:9"),
        ("http://hub.example", False, 2, "not https"),
        ("http://127.0.0.1:9", True, 2, "HF_HUB_OFFLINE"),
    ],
)
def test_a_hub_that_cannot_or_must_not_be_asked(push, monkeypatch, endpoint, offline, exit_code, words):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    code, _, err = push()
    assert code == exit_code and words in one_line(err)


def test_a_traceback_holds_no_token(push, hub):
    hub.fail("POST commit", 500)
    code, out, err = push("--debug")
    assert code == 1 and "Traceback" in err and "hf_***" in err
    assert not any(secret in out + err for secret in SECRETS)
