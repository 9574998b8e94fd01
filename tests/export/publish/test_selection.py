"""What is refused before anything leaves the machine, and what a stranger gets to see of what does leave."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import ModelCard
from outcomes import refusal
from safetensors import numpy as safetensors

from granite_scu.export.publish import selection

REPO = "ada/adapter"


def change(file: Path, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | values), encoding="utf-8")


def change_base(run: Path, name: str) -> None:
    change(run / "adapter_config.json", base_model_name_or_path=name)
    training = json.loads((run / "training_config.json").read_text(encoding="utf-8"))
    change(run / "training_config.json", base=training["base"] | {"name": name})


def change_tensors(run: Path, edit) -> None:
    file = run / "adapter_model.safetensors"
    tensors = safetensors.load_file(file)
    edit(tensors, sorted(tensors))
    safetensors.save_file(tensors, file)


def refused(run: Path, **options) -> str:
    return refusal(selection.prepare, run, REPO, **options)


# The list


def test_only_listed_files_are_published_and_the_rest_is_named(run):
    (run / "notes.txt").write_text("mine", encoding="utf-8")
    (run / "final").mkdir()
    (run / "final" / "adapter_model.safetensors").write_bytes((run / "adapter_model.safetensors").read_bytes())
    found = selection.prepare(run, REPO)
    assert set(found.files) <= set(selection.PUBLISHED)
    assert {"config.yaml", "training_config.json", "checkpoint-4", "final", "logs", "notes.txt"} <= set(found.left_out)
    assert next(iter(found.files)) == "README.md"


def test_chat_templates_by_name_are_published(run):
    (run / "additional_chat_templates").mkdir()
    (run / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}", encoding="utf-8")
    found = selection.prepare(run, REPO)
    assert found.files["additional_chat_templates/tool_use.jinja"] == b"{{ messages }}"
    assert "additional_chat_templates" not in found.left_out


def test_nothing_published_names_this_machine(run):
    home = [str(Path.home())] * (Path.home() != Path("/"))  # a user without a home has that
    for name, content in selection.prepare(run, REPO).files.items():
        for place in (str(run.parent), *home, str(Path(__file__).parents[3])):
            assert place.encode() not in content, name


def test_preparing_leaves_the_folder_as_it_was(run):
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}
    selection.prepare(run, REPO)
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}


# The folder


def write(name, content):
    return lambda run: (run / name).write_bytes(content)


def in_place_of(name, old, new):
    return lambda run: (run / name).write_bytes((run / name).read_bytes().replace(old, new, 1))


def linked_outside(run):
    shutil.move(run / "tokenizer_config.json", run.parent)
    os.symlink(run.parent / "tokenizer_config.json", run / "tokenizer_config.json")


def in_metadata(secret):
    def spoil(run):
        file = run / "adapter_model.safetensors"
        safetensors.save_file(safetensors.load_file(file), file, metadata={"note": secret})

    return spoil


SECRETS = {
    "a Hugging Face token": "hf_" + "a1B2" * 9,
    "an AWS access key": "AKIA" + "ABCD" * 4,
    "a private key": "-----BEGIN OPENSSH PRIVATE KEY-----",
    "a GitHub token": "ghp_" + "a1B2" * 9,
    "a secret (gitlab-pat)": "glpat-" + "a1B2" * 5,
    "a secret (pypi-upload-token)": "pypi-AgEIcHlwaS5vcmc" + "a1B2" * 15,
    "a secret (slack-webhook-url)": "https://hooks.slack.com/services/" + "T1B2" * 11,
    "a secret (jwt)": f"ey{'J1' * 9}.ey{'J1' * 20}.{'a1B2' * 8}",
    "a Slack token": "xoxb-" + "1234567890-" * 2 + "a1B2" * 6,
    "a Docker token": "dckr_pat_" + "a1B2" * 7,
    "a wandb key": "WANDB_API_KEY=" + "a1b2" * 10,
    "an AWS secret key": "aws_secret_access_key = " + "a1B/" * 10,
    "an Azure key": "AccountName=a;AccountKey=" + "a1B/" * 21 + "a1==",
    "a password in a URL": "postgresql://ada:pass-word@db.example.org/runs",
}
PATHS = ("/home/ada/secret/run", "~/runs/mine", "C:\\Users\\ada\\run", "written to /mnt/a/b")
SPOILT = [
    *((lambda run, name=name: (run / name).unlink(), f"{name} is missing") for name in selection.REQUIRED),
    *((write(n, b"\x80\x04."), f"{n}: may be a pickle") for n in ("adapter_model.bin", "state.CKPT", "all.pkl")),
    *(
        (write(n, b"x"), f"{n}: looks like a secret by its name")
        for n in (".env", ".env.local", "hf_token.txt", "id_rsa", "server.pem", "my-secrets.json")
    ),
    *(
        (lambda run, s=s: change(run / "tokenizer_config.json", note=s), f"tokenizer_config.json:1: looks like {kind}")
        for kind, s in SECRETS.items()
    ),
    *(
        (in_place_of(name, old, escaped), f"{name}:{line}: looks like a Hugging Face token")
        for name, old, line, escaped in (
            ("tokenizer_config.json", b"{", 1, b'{"note": "\\u0068f_' + b"a1B2" * 9 + b'",'),
            ("tokenizer_config.json", b"{", 1, b'{"\\u0068\\u0066_' + b"a1B2" * 9 + b'": 1,'),
            ("chat_template.jinja", b"{", 1, b"{# \\x68f_" + b"a1B2" * 9 + b" #}{"),
        )
    ),
    (in_metadata(SECRETS["a Hugging Face token"]), "adapter_model.safetensors:1: looks like a Hugging Face token"),
    *(
        (
            lambda run, p=p: change(run / "scu_config.json", note={"from": [p]}),
            "scu_config.json: note.from[0] names",
        )
        for p in PATHS
    ),
    (linked_outside, "link to a file outside the run folder"),
    *(
        (write(name, content), name)
        for name in ("adapter_config.json", "scu_metrics.json", "tokenizer_config.json")
        for content in (b"{", b"[]", b"\xff\xfe")
    ),
    (lambda run: change(run / "adapter_config.json", peft_type="IA3"), "does not describe a LoRA adapter"),
    (
        lambda run: change(run / "adapter_config.json", base_model_name_or_path="ibm-granite/granite-4.0-h-1b"),
        "the run trained on tiny-granite-h",
    ),
]


@pytest.mark.parametrize(("spoil", "words"), SPOILT)
def test_a_spoilt_folder_is_refused_and_no_secret_repeated(run, spoil, words):
    spoil(run)
    said = refused(run)
    assert words in said
    assert not any(secret in said for secret in SECRETS.values())


def test_pictures_are_drawn_from_the_history_whatever_the_folder_has(run, drawn):
    drawn.clear()
    before = {name: (run / name).read_bytes() for name in selection.PICTURES}
    (run / "control.svg").write_bytes(before["control.svg"].replace(b"</svg>", b"<script>alert(1)</script></svg>"))
    (run / "control.png").unlink()
    files = selection.prepare(run, REPO).files
    assert {name: files[name] for name in before} == before


def test_a_secret_of_the_environment_is_found_by_its_value(run, monkeypatch):
    change(run / "scu_config.json", note="the word is correct-horse-battery")
    monkeypatch.setenv("TOKENIZER_NAME", "correct-horse-battery")  # which is no secret, whatever its letters
    selection.prepare(run, REPO)
    monkeypatch.setenv("MY_COMPANYS_PASSWORD", "correct-horse-battery")
    said = refused(run)
    assert "scu_config.json:1: looks like the value of the environment's MY_COMPANYS_PASSWORD" in said
    assert "correct-horse" not in said


def test_a_pipe_in_the_folder_is_not_waited_for(run):
    (run / "chat_template.jinja").unlink(missing_ok=True)
    os.mkfifo(run / "chat_template.jinja")
    assert "chat_template.jinja: is neither a file nor a folder" in refused(run)


def test_what_is_no_run_folder(run, tmp_path):
    assert "no such folder" in refused(tmp_path / "nowhere")
    assert "not a run folder" in refused(run / "checkpoint-4")
    assert "no such folder" in refused(run / "README.md")


def test_a_tokenizer_without_a_limit_is_published(run):
    """transformers writes int(1e30) as its length, as for most tokenizers."""
    from transformers import AutoTokenizer
    from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

    tokenizer = AutoTokenizer.from_pretrained(run)
    tokenizer.model_max_length = VERY_LARGE_INTEGER
    tokenizer.save_pretrained(run)
    published = json.loads(selection.prepare(run, REPO).files["tokenizer_config.json"])
    assert published["model_max_length"] == VERY_LARGE_INTEGER


# The adapter


def test_the_adapter_is_counted(run):
    tensors = safetensors.load_file(run / "adapter_model.safetensors")
    counts = selection.prepare(run, REPO).counts
    assert counts == {"layers": len(tensors) // 2, "parameters": sum(tensor.size for tensor in tensors.values())}


def test_numbers_of_8_bits_or_not_finite_in_bfloat16_are_refused(run):
    import torch
    from safetensors.torch import load_file, save_file

    file = run / "adapter_model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    selection.prepare(run, REPO)
    next(iter(tensors.values()))[0, 0] = torch.inf
    save_file(tensors, file)
    assert "is not finite" in refused(run)
    for of_8_bits in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        save_file({name: tensor.abs().to(of_8_bits) for name, tensor in tensors.items()}, file)
        assert "adapter_model.safetensors: " in refused(run)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t, names: t.pop(names[0]), "lacks lora_A"),
        (lambda t, names: t.update({names[0]: t[names[0]][:-1]}), "adapter_config.json says rank"),
        (lambda t, names: t.update({names[1]: t[names[1]].T.copy()}), "adapter_config.json says rank"),
        (lambda t, names: t.update({"model.embed_tokens.weight": np.ones((2, 2))}), "is not a factor of a layer"),
        (lambda t, names: t.update({names[0]: t[names[0]].astype(np.int8)}), "holds torch.int8, no floating point"),
        (lambda t, names: t.update({n: 0 * t[n] for n in names if "lora_B" in n}), "every lora_B is zero"),
        (lambda t, names: t.clear(), "holds no tensor"),
        (lambda t, names: t[names[0]].fill(np.nan), "is not finite"),
        (lambda t, names: t[names[0]].fill(np.inf), "is not finite"),
    ],
)
def test_tensors_that_do_not_fit_the_configuration_are_refused(run, edit, words):
    change_tensors(run, edit)
    assert words in refused(run)


def test_the_rank_pattern_counts(run):
    tensors = safetensors.load_file(run / "adapter_model.safetensors")
    one = next(name for name in sorted(tensors) if "in_proj.lora_A" in name)
    module = one.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
    rank = tensors[one].shape[0]
    change(run / "adapter_config.json", rank_pattern={module: rank // 2})
    assert f"{module} has lora_A" in refused(run)

    def halve(tensors, names):
        other = one.replace("lora_A", "lora_B")
        tensors[one], tensors[other] = tensors[one][: rank // 2].copy(), tensors[other][:, : rank // 2].copy()

    change_tensors(run, halve)
    selection.prepare(run, REPO)


def test_an_unnamed_target_is_refused(run):
    config = json.loads((run / "adapter_config.json").read_text(encoding="utf-8"))
    change(run / "adapter_config.json", target_modules=[t for t in config["target_modules"] if t != "in_proj"])
    assert "in_proj" in refused(run) and "is not a factor of a layer that adapter_config.json names" in refused(run)


def test_torn_weights_are_refused(run):
    file = run / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "not a whole safetensors file" in refused(run)


# The base model and the licence


@pytest.mark.parametrize(
    "base", ["/home/ada/models/granite", "./granite", "~/granite", "granite-local", "of-the-folder/it-was-started-in"]
)
def test_a_local_base_needs_its_name_on_the_hub(run, base, tmp_path):
    (tmp_path / "of-the-folder" / "it-was-started-in").mkdir(parents=True)
    change(run / "training_config.json", working_folder="..")
    change_base(run, base)
    assert refused(run).startswith("--base-model-id: needed")
    found = selection.prepare(run, REPO, base_id="ibm-granite/granite-4.0-h-1b")
    assert found.base == "ibm-granite/granite-4.0-h-1b"
    assert json.loads(found.files["adapter_config.json"])["base_model_name_or_path"] == found.base
    assert ModelCard(found.card).data.base_model == found.base
    assert all(base.encode() not in content for content in found.files.values())


def test_a_base_on_the_hub_takes_no_other_name(run):
    change_base(run, "ibm-granite/granite-4.0-h-1b")
    assert "leave the flag out" in refused(run, base_id="ibm-granite/granite-4.0-h-350m")


def test_the_licence_of_a_strange_base_must_be_chosen(run):
    change_base(run, "somebody/strange-7b")
    assert refused(run).startswith("--license: needed")
    found = selection.prepare(run, REPO, licence="mit")
    assert ModelCard(found.card).data.license == "mit"
    assert "The base model `somebody/strange-7b`: its own terms apply" in found.card


# The card


def test_the_adapter_that_training_started_from_is_on_the_card_without_its_path(run):
    training = json.loads((run / "training_config.json").read_text(encoding="utf-8"))
    card = selection.prepare(run, REPO).card
    assert "| adapter |" not in card and "| starts from |" not in card
    start = {"adapter": "mine/best", "sha256": "0123"}
    change(run / "training_config.json", lora=training["lora"] | {"adapter": "/home/ada/mine/best"}, start=start)
    card = selection.prepare(run, REPO).card
    assert "| starts from | mine/best (SHA-256 0123) |" in card and "ada/mine" not in card


def evaluated(run: Path, **changes) -> dict:
    def model(name, adapter, bits):
        scores = {"bits_per_token": bits, "bits_per_byte": bits / 3, "perplexity": 2**bits}
        return {"name": name, "adapter": adapter, "base": "tiny-granite-h", **scores}

    content = {
        "schema": 1,
        "data": "/home/ada/held out.txt",
        "documents": 7,
        "tokens": 1234,
        "bytes": 5678,
        "units": "documents",
        "max_length": 128,
        "stride": 64,
        "models": [
            model("base", None, 5.5),
            model("best", str(run / "best"), 5.1),
            model("run", f"runs/{run.name}", 5.0),
        ],
        "pairs": [
            {"a": "base", "b": "best", **interval(-0.4, -0.45, -0.3), "verdict": "better"},
            {"a": "base", "b": "run", **interval(-0.5, -0.56, -0.41), "verdict": "better"},
        ],
    } | changes
    (run / "eval_bpt.json").write_text(json.dumps(content), encoding="utf-8")
    return content


def interval(middle: float, low: float, high: float) -> dict:
    return {"difference_bits_per_token": middle, "low": low, "high": high, "confidence": 0.95}


def test_the_interval_of_the_evaluation_is_on_the_card(run):
    evaluated(run)
    found = selection.prepare(run, REPO)
    results = {(r.dataset_name, r.metric_type): r for r in ModelCard(found.card).data.eval_results}
    difference = results["held out.txt", "bits_per_token_difference"]
    assert difference.metric_value == -0.5
    assert difference.metric_args == {"low": -0.56, "high": -0.41, "confidence": 0.95}
    assert "95 % interval -0.5600 to -0.4100" in difference.metric_name
    assert results["held out.txt", "bits_per_token"].metric_value == 5.0
    rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", found.card, re.MULTILINE))
    assert rows["with the adapter, bits per token"] == "5.0000"
    assert rows["difference in bits per token, adapter minus base"] == "-0.5000, 95 % interval -0.5600 to -0.4100"
    assert (
        "7 documents, 1,234 tokens, in windows of 128 tokens" in found.card and "no interval is given" not in found.card
    )
    assert not any("no interval" in note for note in found.notes)
    assert "/home/ada" not in found.card


def test_an_evaluation_from_inside_the_folder_is_its_own(run):
    """Somebody who stood in the run folder named it by a dot."""
    *others, mine = evaluated(run)["models"]
    evaluated(run, models=[*others, mine | {"adapter": "."}])
    assert "| with the adapter, bits per token | 5.0000 |" in selection.prepare(run, REPO).card


def test_an_evaluation_is_known_by_the_weights_whatever_the_folder_is_called_now(run):
    *others, mine = evaluated(run)["models"]
    digest = hashlib.sha256((run / "adapter_model.safetensors").read_bytes()).hexdigest()
    evaluated(run, models=[*others, mine | {"adapter": "runs/old", "name": "run", "adapter_sha256": digest}])
    renamed = run.rename(run.with_name("another"))
    assert "| with the adapter, bits per token | 5.0000 |" in selection.prepare(renamed, REPO).card
    evaluated(renamed, models=[*others, mine | {"adapter": str(renamed), "adapter_sha256": "0" * 64}])
    change(renamed / "scu_config.json", note=SECRETS["a secret (jwt)"])
    said = refused(renamed)  # and a secret is told of at once
    assert "does not compare the adapter of another" in said and "a secret (jwt)" in said


def test_too_few_documents_give_no_interval(run):
    nothing = {"a": "base", "b": "run", **interval(-0.5, None, None), "verdict": "no difference shown"}
    evaluated(run, pairs=[nothing], units=None)
    card = selection.prepare(run, REPO).card
    difference = next(r for r in ModelCard(card).data.eval_results if r.metric_type == "bits_per_token_difference")
    assert difference.metric_value == -0.5 and not difference.metric_args
    assert "| -0.5000, too few documents for an interval |" in card and "too narrow" not in card


@pytest.mark.parametrize("changes", [{"pairs": []}, {"models": []}, {"models": None}])
def test_an_evaluation_of_something_else_is_refused(run, changes):
    evaluated(run, **changes)
    assert "does not compare the adapter of run with its base" in refused(run)


def test_what_was_not_evaluated_and_what_is_no_better_is_noted(run):
    metrics = json.loads((run / "scu_metrics.json").read_text(encoding="utf-8"))
    change(run / "scu_metrics.json", adapter_test_bpt=metrics["base_test_bpt"] + 1)
    notes = " ".join(selection.prepare(run, REPO).notes)
    assert "no better than its base" in notes and "no interval" in notes
    assert "tiny-granite-h is not on the hub" in notes


@pytest.mark.parametrize("value", [[1], "x", {"a": 1}])
def test_numbers_of_another_kind_are_told_by_the_folder(run, value):
    change(run / "scu_metrics.json", adapter_test_bpt=value)
    assert f"{run}: its JSON files are not as a run has written them (" in refused(run)
