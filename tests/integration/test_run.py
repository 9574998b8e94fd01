"""A run from its flags to its folder, and everything that can be done with that folder."""

import csv
import json
import math
import re
import shutil
from importlib.resources import files
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest
import torch
import yaml
from outcomes import done, refused_line
from peft import PeftModel
from rounding import OF_EMBEDDED, assert_moved_alike, rounding
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from granite_scu.cli import main as command
from granite_scu.cli.console import PIPE_WIDTH
from granite_scu.config.settings import DataConfig
from granite_scu.data.datamodule import TextDataModule
from granite_scu.storage import manifest
from granite_scu.viz.run_folder import read_run

ROOT = Path(__file__).parents[2]
EMBEDDED = str(files("granite_scu.model") / "assets" / "tiny-granite-h")

STEPS, EVERY, SAVED = 22, 4, 11
FLAGS = ("--test-run", "--precision", "fp32", "--batch-size", 4, "--max-steps", STEPS, "--control-every", EVERY)
FLAGS += ("--save-steps", SAVED, "--eval-steps", 10, "--eval-iters", 4, "--block-size", 64)
FLAGS += ("--learning-rate", 2e-3, "--warmup-steps", 4, "--data-dir", "topics.jsonl")

RECORD = {
    *("step", "tokens", "data_bpt", "param_bpt", "s", "s_ema", "s_target", "error", "lambda", "p_term", "i_term"),
    *("saturated", "held", "lr", "grad_norm", "tokens_per_s", "samples_per_s", "mfu", "gpu_memory_gb"),
}
TIMES = {"tokens_per_s", "samples_per_s", "mfu", "peak_tflops", "train_time_s", "wall_time_s"}


@pytest.fixture(scope="module")
def run(script, topics, tmp_path_factory) -> SimpleNamespace:
    """The run that most of these tests look at: 22 steps of the embedded model, saved half-way, 11 being no tick.

    It is started as a user does. What follows from it starts in this process, which is faster.
    """
    folder = tmp_path_factory.mktemp("run") / "out"
    shutil.copy(topics, ".")
    done = script(*FLAGS, "--samples", 1, "--output-dir", folder)
    assert (done.returncode, done.stderr) == (0, "")
    return SimpleNamespace(folder=folder, out=done.stdout)


def read_json(path: Path):
    def refuse(word: str):
        raise ValueError(f"{path}: {word} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def history(folder: Path) -> list[dict]:
    return read_json(folder / "scu_history.json")


def ticks(path: Path) -> list[dict]:
    """The rows of a CSV log that a tick wrote."""
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["scu/s"]]


def untimed(record: dict) -> dict:
    return {name: value for name, value in record.items() if name not in TIMES}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def adapters(*folders: Path) -> list[dict]:
    return [load_file(folder / "adapter_model.safetensors") for folder in folders]


def assert_same_adapter(one: Path, other: Path):
    """To the bit."""
    first, second = adapters(one, other)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def leaves(value, path=()):
    """Every (path, value) at the ends of nested dicts and lists."""
    if isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(entry, (*path, key))
    else:
        yield path, value


# What it says


def test_what_the_mamba_layers_run_in_is_said_and_the_course_is_logged_too(run):
    log = (run.folder / "logs" / "training.log").read_text(encoding="utf-8")
    for said in (run.out, log):
        assert said.count("Mamba-2 layers run in PyTorch") == said.count("Ctrl-C      saves, and the same command") == 1
    assert "step 12/22  loss" in log and "validation" in log
    words = [line.split(" INFO ")[-1] for line in log.splitlines()]
    assert words[0] == "reading the text topics.jsonl", "said before there was a folder"


def test_the_console_shows_the_course_and_the_result(run):
    assert re.search(r"^length +22 steps: ", run.out, re.MULTILINE)
    phases = ("reading the text topics.jsonl", "loading the model tiny-granite-h", "training ", "scoring the adapter")
    places = [run.out.index(f"\n{phase}") if number else 0 for number, phase in enumerate(phases)]
    assert run.out.startswith(phases[0]) and places == sorted(places)
    assert re.search(r"^step 12/22  loss.*  about \d+ seconds? left *$", run.out, re.MULTILINE)
    assert re.search(r"^step 12/22  loss \d\.\d+ bits/token  S \d\.\d+% \(S\* 2\.00%\)  lambda ", run.out, re.MULTILINE)
    assert re.search(r"^step 10  validation \d\.\d{4} bits/token *$", run.out, re.MULTILINE)
    assert f"{read_json(run.folder / 'scu_metrics.json')['adapter_test_bpt']:.4f} bits/token" in run.out
    assert str(run.folder) in run.out


# The folder


def test_the_folder_is_complete(run):
    expected = [
        *("adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("scu_config.json", "scu_metrics.json", "scu_history.json", "training_config.json", "config.yaml"),
        *("logs/training.log", "logs/csv/metrics.csv", "control.png", "report.html", "README.md"),
        *(f"checkpoint-{step}/{name}" for step in (11, 22) for name in ("state.ckpt", "adapter_model.safetensors")),
    ]
    missing = [name for name in expected if not (run.folder / name).is_file()]
    assert not missing
    assert not (run.folder / "best").exists()  # it was there while the run trained, and now lies at the top
    assert list(run.folder.glob("logs/tensorboard/events.out.tfevents.*"))
    leftovers = [path for path in run.folder.rglob("*") if path.name.endswith(".tmp") or path.suffix == ".jsonl"]
    assert not leftovers


def test_json_is_strict_and_the_numbers_are_finite(run):
    for path in run.folder.rglob("*.json"):
        read_json(path)
    metrics = read_json(run.folder / "scu_metrics.json")
    for name in ("base_test_bpt", "adapter_test_bpt", "final_val_bpt", "best_val_bpt", "train_bpt", "tokens_per_s"):
        assert 0 < metrics[name] < math.inf
    assert metrics["steps"] == STEPS
    assert metrics["skipped_steps"] == 0


def test_no_path_of_this_machine_is_left_but_the_output_folder(run):
    for path in [*run.folder.rglob("*.json"), *run.folder.rglob("*.yaml")]:
        if path.name == "tokenizer.json":  # its vocabulary may well hold strings that look like paths
            continue
        for place, value in leaves(yaml.safe_load(path.read_text(encoding="utf-8"))):
            if isinstance(value, str) and PurePosixPath(value).is_absolute():
                assert place == ("run", "output_dir"), f"{path.name}: {place} is {value}"
    read_by_people = [run.folder / name for name in ("README.md", "report.html")]
    for path in [*run.folder.rglob("*.json"), *run.folder.rglob("*.yaml"), *read_by_people]:
        text = path.read_text(encoding="utf-8").replace(str(run.folder), "")
        home = [str(Path.home())] * (Path.home() != Path("/"))  # a user without a home has that
        for machine in (str(ROOT), EMBEDDED, *home, str(run.folder.parent)):
            assert machine not in text, path


def test_the_history_has_a_record_of_every_tick_and_of_the_last_step(run):
    records = history(run.folder)
    assert [record["step"] for record in records] == [*range(EVERY, STEPS + 1, EVERY), STEPS]
    for record in records:
        assert record.keys() >= RECORD
        assert record["s"] == pytest.approx(record["param_bpt"] / (record["data_bpt"] + record["param_bpt"]))
        assert record["s_target"] == 0.02
        assert record["lambda"] > 0
    tokens = [record["tokens"] for record in records]
    assert tokens == sorted(set(tokens))
    assert records[0]["s"] < records[-1]["s"]


def test_the_loggers_have_the_same_records(run):
    records, rows = history(run.folder), ticks(run.folder / "logs" / "csv" / "metrics.csv")
    assert [int(row["step"]) for row in rows] == [record["step"] for record in records]
    assert [float(row["scu/lambda"]) for row in rows] == pytest.approx([record["lambda"] for record in records])

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.folder / "logs" / "tensorboard"))
    events.Reload()
    assert {"scu/s", "scu/lambda", "scu/data_bpt", "val_bpt"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("scu/lambda")] == [record["step"] for record in records]


def test_the_picture_and_the_card(run):
    assert (run.folder / "control.png").read_bytes().startswith(b"\x89PNG")
    card = (run.folder / "README.md").read_text(encoding="utf-8")
    metrics = read_json(run.folder / "scu_metrics.json")
    (index,) = yaml.safe_load(card.split("---")[1])["model-index"]
    assert index["results"][0]["metrics"][0]["value"] == metrics["adapter_test_bpt"]
    assert "LoRA adapter for `tiny-granite-h`" in card
    for name in ("base_test_bpt", "adapter_test_bpt", "best_val_bpt"):
        assert f"{metrics[name]:.4f} bits per token" in card
    assert "control.png" in card
    report = (run.folder / "report.html").read_text(encoding="utf-8")
    assert f"held-out text costs {metrics['adapter_test_bpt']:.3f} bits per token" in report
    assert "| targets | every linear layer |" in card


def test_the_configuration_says_what_ran(run):
    config = read_json(run.folder / "training_config.json")
    assert config["plan"]["steps"] == STEPS
    assert config["machine"]["precision"] == "32-true"
    assert config["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]  # not all wheels name a build
    assert config["data_summary"]["train"]["supervised_tokens"] == config["plan"]["n_tokens"]
    controller = read_json(run.folder / "scu_config.json")
    assert controller["controller"] == "pi"
    assert controller["control_every"] == EVERY
    assert controller["n_tokens"] == config["plan"]["n_tokens"]


# The adapter


def test_plain_peft_gives_the_reported_bits_per_token(run):
    """transformers and PEFT as they come, none of our forward, loss or evaluation; only the split is ours.

    Of the documents in a block none sees another."""
    tokenizer = AutoTokenizer.from_pretrained(run.folder)
    data = TextDataModule(DataConfig(path="topics.jsonl", block_size=64, batch_size=8), seed=0, uniform_batches=True)
    data.prepare(tokenizer)
    base = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, run.folder).eval()
    nats, tokens = 0.0, 0
    with torch.no_grad():
        for batch in data.test_dataloader():
            for ids, labels, documents in zip(
                *(batch[key] for key in ("input_ids", "labels", "documents")), strict=True
            ):
                for document in documents.unique():
                    own = documents == document
                    logits = model(ids[own][None]).logits[0]
                    nats += cross_entropy(logits, labels[own], reduction="sum").item()
            tokens += int((batch["labels"] != -100).sum())
    metrics = read_json(run.folder / "scu_metrics.json")
    assert tokens == metrics["test_tokens"]
    assert nats / tokens / math.log(2) == pytest.approx(metrics["adapter_test_bpt"], rel=rounding(OF_EMBEDDED))
    assert metrics["adapter_test_bpt"] < metrics["base_test_bpt"] - 0.02  # and it has learned something


def test_param_bpt_can_be_recomputed_from_the_files(run):
    """|Delta W|^2 / (2 sigma^2 N ln 2), with Delta W multiplied out."""
    weights = load_file(run.folder / "adapter_model.safetensors")
    peft_config, scu = read_json(run.folder / "adapter_config.json"), read_json(run.folder / "scu_config.json")
    scale = peft_config["lora_alpha"] / peft_config["r"]
    downs = sorted(name for name in weights if ".lora_A." in name)
    squares = 0.0
    for name in downs:
        a, b = weights[name].double(), weights[name.replace(".lora_A.", ".lora_B.")].double()
        squares += (scale * b @ a).square().sum().item()
    assert 2 * len(downs) == len(weights) > 0
    param_bpt = squares / (2 * scu["prior_sigma"] ** 2 * scu["n_tokens"] * math.log(2))
    assert param_bpt == pytest.approx(history(run.folder)[-1]["param_bpt"], rel=1e-3)
    assert scu["measure"] == "delta"


def test_a_run_that_gets_worse_leaves_the_adapter_that_validated_best(launch, call, topics, tmp_path):
    """The last one is beside it. What scores, merges or publishes the run takes the better of the two."""
    worse = ("--learning-rate", 0.03, "--lr-scheduler", "constant", "--warmup-steps", 0, "--controller", "none")
    steps = ("--max-steps", 24, "--eval-steps", 8, "--save-steps", 8, "--keep", 3, "--data-dir", topics)
    code, out, err = launch(*FLAGS, *worse, *steps, "--output-dir", tmp_path / "worse")
    assert (code, err) == (0, "")
    folder, metrics = tmp_path / "worse", read_json(tmp_path / "worse" / "scu_metrics.json")
    best = metrics["best_val_step"]
    assert best < 24 and metrics["best_val_bpt"] < metrics["final_val_bpt"]
    assert_same_adapter(folder, folder / f"checkpoint-{best}")
    assert_same_adapter(folder / "final", folder / "checkpoint-24")
    assert f"that of step {best}, which validated best" in out
    code, out, _ = call(command.main, "test", "--config", folder / "config.yaml")
    assert (code, json.loads(out)["adapter_bpt"]) == (
        0,
        pytest.approx(metrics["adapter_test_bpt"], rel=rounding(OF_EMBEDDED)),
    )


# The configuration feeds back


@pytest.mark.slow
def test_the_saved_configuration_gives_the_same_run_bit_for_bit(run, call, tmp_path):
    again = tmp_path / "again"
    code, _, err = call(command.main, "fit", "--config", run.folder / "config.yaml", "--run.output_dir", again)
    assert (code, err) == (0, "")
    assert_same_adapter(run.folder, again)
    assert [untimed(record) for record in history(again)] == [untimed(record) for record in history(run.folder)]


@pytest.mark.parametrize("split", ["test", "validate"])
def test_the_commands_that_score_the_saved_adapter(run, capfd, split):
    assert command.main([split, "--config", str(run.folder / "config.yaml")]) == 0
    printed = capfd.readouterr()
    assert printed.err.split("\n") == ["Mamba-2 layers run in PyTorch".ljust(PIPE_WIDTH), ""]
    found, metrics = json.loads(printed.out), read_json(run.folder / "scu_metrics.json")
    if split == "test":
        assert found["adapter_bpt"] == pytest.approx(metrics["adapter_test_bpt"], rel=rounding(OF_EMBEDDED))
        assert found["base_bpt"] == pytest.approx(metrics["base_test_bpt"], rel=rounding(OF_EMBEDDED))
        assert found["tokens"] == metrics["test_tokens"]
    else:
        assert found["split"] == "validation"
        assert found["adapter_bpt"] < found["base_bpt"]


def test_a_folder_without_an_adapter_cannot_be_scored(run, capfd):
    argv = ["test", "--config", str(run.folder / "config.yaml"), "--run.output_dir", "no/such/run"]
    assert command.main(argv) == 2
    printed = capfd.readouterr().err
    assert "holds no adapter_model.safetensors" in printed and printed.count("\n") == 1


def test_a_text_that_has_changed_is_not_divided_anew_to_be_scored(run, capfd, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("\n\n".join(f"Line {number} of another text." for number in range(2000)), encoding="utf-8")
    assert command.main(["test", "--config", str(run.folder / "config.yaml"), "--data.path", str(other)]) == 2
    assert "its text has changed since" in capfd.readouterr().err


# Going on


@pytest.fixture
def crashed(run, tmp_path) -> Path:
    """The run as a crash at step 17 would have left it: ticks up to 16, and half of a line."""
    folder = tmp_path / "crashed"
    shutil.copytree(run.folder, folder, ignore=shutil.ignore_patterns("control.*", "README.md", "scu_*.json"))
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / f"checkpoint-{STEPS}")
    lines = [json.dumps(record) + "\n" for record in history(run.folder) if record["step"] <= 16]
    (folder / "scu_history.jsonl").write_text("".join(lines) + lines[-1][:50])
    return folder


def test_a_resumed_run_ends_as_if_nothing_had_happened(run, crashed, launch):
    """From a checkpoint between two ticks; without --output-dir it goes on in the checkpoint's own folder."""
    code, _, err = launch(*FLAGS, "--resume-from-checkpoint", crashed / f"checkpoint-{SAVED}")
    assert (code, err) == (0, "")
    for part in ("", f"checkpoint-{STEPS}"):
        assert_same_adapter(run.folder / part, crashed / part)
    assert not (crashed / "best").exists()
    assert [untimed(record) for record in history(crashed)] == [untimed(record) for record in history(run.folder)]
    resumed, whole = (read_json(folder / "scu_metrics.json") for folder in (crashed, run.folder))
    del whole["elsewhere"], whole["drift"]  # the other was launched with --samples 0
    assert untimed(resumed) == untimed(whole)
    first, second = (ticks(crashed / "logs" / "csv" / leg / "metrics.csv") for leg in ("", f"from-checkpoint-{SAVED}"))
    assert [row["step"] for row in first][:3] == ["4", "8", "12"]  # not lost
    assert [row["step"] for row in second] == ["12", "16", "20", "22"]


def test_a_run_that_goes_on_in_another_folder_takes_its_history_and_its_time_along(train, launch, corpus):
    """With dropout, whose random numbers go on too."""
    flags = ("--lora-dropout", 0.2, "--save-steps", 2, "--max-steps", 6, "--keep", 5)
    whole = train(*flags)
    resumed = train(*flags, "--resume-from-checkpoint", whole / "checkpoint-4")
    assert resumed != whole
    assert_same_adapter(whole, resumed)
    assert [untimed(record) for record in history(resumed)] == [untimed(record) for record in history(whole)]
    assert read_run(resumed).validations == read_run(whole).validations
    metrics = read_json(resumed / "scu_metrics.json")
    state = torch.load(whole / "checkpoint-4" / "state.ckpt", weights_only=True)
    assert metrics["train_time_s"] > state["callbacks"]["Stopwatch"]["elapsed"] > 0
    assert metrics["tokens_per_s"] == pytest.approx(metrics["tokens"] / metrics["train_time_s"])
    # Elsewhere it is a new run, which may not land on top of another.
    before = contents(whole)
    argv = ("--test-run", "--data-dir", corpus, "--resume-from-checkpoint", resumed / "checkpoint-6")
    assert "is not empty" in refused_line(launch, *argv, "--output-dir", whole)
    assert contents(whole) == before


# What a run can be asked to be


def test_what_changes_speed_or_memory_leaves_the_result_alone(train, trained):
    plain = trained()
    argv = ("--gradient-checkpointing", "--num-workers", 1, "--attn", "eager")
    other = train(*argv, "--eval-batch-size", 2, "--max-time", "00:01:00:00")
    assert_moved_alike(*adapters(plain, other), 4, OF_EMBEDDED)
    scores = [read_json(folder / "scu_metrics.json")["adapter_test_bpt"] for folder in (plain, other)]
    assert scores[0] == pytest.approx(scores[1], rel=rounding(OF_EMBEDDED))


def test_early_stopping(train, tmp_path):
    stops = ("--eval-steps", 1, "--early-stopping", 1, "--eval-iters", 1)
    folder = train("--max-steps", 30, *stops, "--learning-rate", 3, "--warmup-steps", 0)
    metrics = read_json(folder / "scu_metrics.json")
    assert metrics["steps"] < 30
    assert metrics["stopped"] == {"reason": "early_stopping", "step": metrics["steps"]}
    assert history(folder)[-1]["step"] < 30
    # A signal may have come before that validation, which then ends the run that goes on, without another step.
    (newest,) = (Path(shutil.copytree(path, tmp_path / path.name)) for path in folder.glob("checkpoint-*"))
    state = torch.load(newest / "state.ckpt", weights_only=True)
    torch.save(state | {"validation_due": True, "stopping": False}, newest / "state.ckpt")
    (newest / manifest.NAME).unlink()
    manifest.write(newest)
    resumed = train("--max-steps", 30, *stops, "--resume-from-checkpoint", newest)
    assert read_json(resumed / "scu_metrics.json")["stopped"] == metrics["stopped"]


@pytest.mark.slow
def test_a_limit_on_time_ends_the_run_between_two_steps(launch, corpus, tmp_path):
    folder = tmp_path / "timed"
    flags = ("--max-steps", 100_000, "--max-time", "00:00:00:01", "--gradient-accumulation-steps", 7)
    flags += ("--batch-size", 2, "--block-size", 64, "--data-dir", corpus)
    assert launch("--test-run", *flags, "--output-dir", folder)[0] == 0
    metrics = read_json(folder / "scu_metrics.json")
    assert 1 <= metrics["steps"] < 100_000
    assert metrics["stopped"] == {"reason": "max_time", "step": metrics["steps"]}
    assert (folder / "adapter_model.safetensors").is_file()
    (newest,) = folder.glob("checkpoint-*")
    state = torch.load(newest / "state.ckpt", weights_only=True)
    assert state["micro_batches"] == 7 * state["global_step"]


def test_epochs_set_the_length(launch, corpus, tmp_path):
    facts = json.loads(done(launch, "--test-run", "--data-dir", corpus, "--num-epochs", 2, "--dry-run", "--json"))
    blocks_per_step = facts["tokens_per_step"] / facts["data"]["block_size"]
    assert facts["steps"] == math.ceil(2 * facts["data"]["train"]["blocks"] / blocks_per_step)
    out = done(launch, "--test-run", "--data-dir", corpus, "--num-epochs", 2, "--max-steps", 3, "--dry-run", "--json")
    assert json.loads(out)["steps"] == 3


# Asking


def test_a_dry_run_plans_for_a_card_that_is_not_here_and_a_run_is_refused(launch, corpus):
    flags = ("--hardware", "gpu_3080", "--model", "tiny-granite-h", "--data-dir", corpus, "--block-size", 64)
    facts = json.loads(done(launch, *flags, "--dry-run", "--json"))
    assert (facts["device"], facts["device_is_here"]) == ("NVIDIA GeForce RTX 3080", False)
    assert (facts["precision"], facts["compiled"]) == ("bf16-mixed", False)  # for so few steps
    assert facts["memory_gib_allowed"] == pytest.approx(0.9 * 9.6) and facts["time_s_estimate"] >= 0
    assert "no CUDA device" in refused_line(launch, *flags)


def test_a_dry_run_as_json(launch):
    length = ("--max-steps", 30, "--batch-size", 2, "--gradient-accumulation-steps", 3, "--block-size", 64)
    code, out, _ = launch("--test-run", "--dry-run", "--json", *length, "--output-dir", "planned")
    assert code == 0 and not Path("planned").exists()
    facts = json.loads(out)
    assert (facts["steps"], facts["tokens_per_step"], facts["tokens"]) == (30, 2 * 3 * 64, 30 * 2 * 3 * 64)
    assert facts["memory_gib_estimate"] > 0
    assert facts["time_s_estimate"] > 0
    assert facts["n_tokens"] == facts["data"]["train"]["supervised_tokens"]


def test_the_default_model_is_planned_without_a_network(launch, corpus):
    out = done(launch, "--dry-run", "--data-dir", corpus, "--block-size", 64, "--hardware", "gpu_4090")
    assert "the plan counts tokens by the tokenizer of tiny-granite-h" in " ".join(out.split())
    assert "granite-4.0-h-1b: 1,461,538,368 frozen parameters" in out


def test_mfu_on_a_cpu_is_in_the_history_and_the_summary_and_not_before_the_users_eyes(run):
    log = (run.folder / "logs" / "training.log").read_text()
    assert "mfu" not in log + run.out
    summary = read_json(run.folder / "scu_metrics.json")
    assert summary["peak_source"].startswith("measured") and summary["peak_tflops"] > 0
    assert summary["samples_per_s"] == pytest.approx(STEPS * 4 / summary["train_time_s"])
    for found in (summary, *history(run.folder)):  # None where the peak was measured beside others, and is too low
        assert found["mfu"] is None or 0 < found["mfu"] <= 1
