"""Two processes on half a batch each do what one does on the whole of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import killing
import pytest
import torch
from rounding import OF_EMBEDDED, assert_moved_alike, rounding, turned
from safetensors.torch import load_file

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_granite_cuda.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
HALF = ("--batch-size", 2, "--multi-gpu", "--accelerator", "cpu")

# Uneven text: the last block of an epoch is padded, and documents end anywhere, so ranks see unequal token counts.
FLAGS = (
    *("--test-run", "--samples", 0, "--max-steps", 8, "--control-every", 2, "--eval-steps", 4, "--eval-iters", 100),
    *("--save-steps", 4, "--precision", "fp32", "--block-size", 64),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Documents of very different lengths."""
    from granite_scu.data.sources.corpora import stdlib_docs

    folder = tmp_path_factory.mktemp("corpus")
    for number, document in enumerate(stdlib_docs()[:30]):
        (folder / f"{number:02}.txt").write_text(document.text[: 200 + 150 * number], encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def start(corpus, tmp_path_factory):
    """Makes a run with more flags, alone or in two processes; returns its folder and what it printed."""
    where = tmp_path_factory.mktemp("runs")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(SCRIPT.parents[1])  # where the laws of research/ are found

    def run(name: str, launcher: tuple[str, ...], *argv) -> tuple[Path, subprocess.CompletedProcess]:
        flags = (*FLAGS, "--data-dir", corpus, "--output-dir", where / name, *argv)
        line = [sys.executable, *launcher, str(SCRIPT), *map(str, flags)]
        done = subprocess.run(line, capture_output=True, text=True, cwd=where, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return where / name, done

    return run


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory) -> dict[str, tuple[Path, str, str]]:
    """The same steps by one process and by two, forks of this one; their folders, and what each process printed."""
    where = tmp_path_factory.mktemp("forks")
    logs = [where / name for name in ("one.log", "first.log", "second.log")]
    # A cache each: one that waits for the other would say so.
    folders = {name: ("--output-dir", where / name, "--cache-dir", where / f"{name}-cache") for name in ("one", "two")}
    line = {name: (*FLAGS, "--data-dir", corpus, *own) for name, own in folders.items()}
    children = [killing.fork([*line["one"], "--batch-size", 4], logs[0])]
    children += killing.fork_two([*line["two"], *HALF], logs[1:])
    printed = [(killing.wait(child), log.read_text()) for child, log in zip(children, logs, strict=True)]
    assert [code for code, _ in printed] == [0, 0, 0], printed
    return {"one": (where / "one", printed[0][1], ""), "two": (where / "two", printed[1][1], printed[2][1])}


@pytest.fixture
def read(runs):
    """Reads a JSON file of both run folders."""
    return lambda name: tuple(json.loads((runs[run][0] / name).read_text(encoding="utf-8")) for run in ("one", "two"))


def test_the_adapters_agree(runs):
    one, two = (load_file(runs[name][0] / "adapter_model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert max(tensor.abs().max().item() for name, tensor in one.items() if ".lora_B." in name) > 1e-3  # it has moved
    assert_moved_alike(one, two, 8, OF_EMBEDDED)


def test_the_histories_agree(read):
    one, two = read("scu_history.json")
    assert [record["step"] for record in one] == [record["step"] for record in two] == [2, 4, 6, 8]
    assert [record["tokens"] for record in one] == [record["tokens"] for record in two]
    close = turned(8, OF_EMBEDDED)  # means and norms over numbers of which so many may differ
    for name in ("s", "s_ema", "lambda", "data_bpt", "param_bpt", "grad_norm", "data_grad_norm", "penalty_grad_norm"):
        assert [record[name] for record in one] == pytest.approx([record[name] for record in two], rel=close), name


def test_the_scores_agree(read):
    assert [config["machine"]["devices"] for config in read("training_config.json")] == [1, 2]
    one, two = read("scu_metrics.json")
    assert (one["test_tokens"], one["tokens"], one["best_val_step"]) == (
        two["test_tokens"],
        two["tokens"],
        two["best_val_step"],
    )
    for name in ("base_test_bpt", "adapter_test_bpt", "final_val_bpt", "best_val_bpt"):
        assert one[name] == pytest.approx(two[name], rel=rounding(OF_EMBEDDED)), name


@pytest.mark.slow
def test_two_processes_share_a_stream_and_go_on_in_it(start):
    """Each with two loader processes, of which either may be the next."""
    stream = (*HALF, "--stream", "--num-workers", 2)
    whole, _ = start("stream", TORCHRUN, *stream)
    resumed, _ = start("resumed-stream", TORCHRUN, *stream, "--resume-from-checkpoint", whole / "checkpoint-4")
    one, two = (load_file(folder / "adapter_model.safetensors") for folder in (whole, resumed))
    assert max(tensor.abs().max().item() for tensor in one.values()) > 1e-3
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_two_processes_end_with_the_adapter_that_validated_best(start):
    """And not one of them with the last: a process that starts from it scores it as both did."""
    worse = ("--learning-rate", 0.03, "--lr-scheduler", "constant", "--warmup-steps", 0, "--controller", "none")
    both, _ = start("worse", TORCHRUN, *HALF, *worse, "--max-steps", 12)
    one, _ = start("from-it", (), "--batch-size", 4, "--adapter", both)
    ended, began = (json.loads((folder / "scu_metrics.json").read_text()) for folder in (both, one))
    assert ended["best_val_step"] < 12 and (both / "final").is_dir()
    assert began["start_test_bpt"] == pytest.approx(ended["adapter_test_bpt"], rel=rounding(OF_EMBEDDED))


@pytest.mark.slow
def test_two_processes_with_compiled_layers_recompute_all_but_products(runs, corpus, tmp_path):
    def as_operators(rank):
        compile_with = torch.compile
        torch.compile = lambda function, **_: compile_with(function, backend="aot_eager_decomp_partition")

    line = [*FLAGS, *HALF[:2], "--torch-compile", "on", "--gradient-checkpointing", "selective"]
    line += ["--data-dir", corpus, "--output-dir", tmp_path / "selective"]
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    children = killing.fork_two(line, logs, as_operators)
    assert [killing.wait(child) for child in children] == [0, 0], "".join(log.read_text() for log in logs)
    weights = [load_file(folder / "adapter_model.safetensors") for folder in (runs["two"][0], tmp_path / "selective")]
    assert_moved_alike(*weights, 8, OF_EMBEDDED)


def test_one_process_writes_and_speaks(runs):
    """The same files, and the same lines on the console, as of a lone process."""
    (one, alone, _), (two, first, second) = runs["one"], runs["two"]
    assert names(one) == names(two)
    assert unmeasured(first) == unmeasured(alone)
    assert not second
    logs = [(folder / "logs" / "training.log").read_text().splitlines() for folder in (one, two)]
    chance = ("waiting for another process", "other processes keep")
    logged = [[line for line in log if not any(words in line for words in chance)] for log in logs]
    assert len(logged[0]) == len(logged[1])


def names(folder: Path) -> set[str]:
    """The files of a run folder; an event file's name holds the time and the process."""
    return {str(path.relative_to(folder)).split("tfevents")[0] for path in folder.rglob("*") if path.is_file()}


def unmeasured(out: str) -> list[str]:
    """The first words of each line: what is measured differs in its last digits, and so the table in its width.

    Which of two processes tokenises the text, and which waits for it, is chance.
    """
    lines = [line for line in out.splitlines() if line.lstrip("│ ")[:1].isalpha()]
    own = ("waiting for", "batch", "memory", "time ", "folder")  # of a half, and its place
    return [" ".join(line.split()[:2]) for line in lines if not line.startswith(own)]


@pytest.mark.slow
@pytest.mark.parametrize("controller", ["pi", "research.laws.kl:KL"])
def test_two_processes_go_on_from_an_adapter_as_one_does(runs, start, controller):
    """What S and the KL are measured from is the same adapter on both."""
    begin = ("--adapter", runs["one"][0], "--controller", controller)
    one, _ = start(f"{controller}1", (), "--batch-size", 4, *begin)
    two, _ = start(f"{controller}2", TORCHRUN, *HALF, *begin)
    histories = [json.loads((folder / "scu_history.json").read_text()) for folder in (one, two)]
    measured = ("s", "lambda", "data_bpt", "param_bpt", "penalty_grad_norm")
    for name in (*measured, "kl_bpt") if controller != "pi" else measured:
        found = [[record[name] for record in history] for history in histories]
        assert found[0] == pytest.approx(found[1], rel=turned(8, OF_EMBEDDED)), name
    scores = [json.loads((folder / "scu_metrics.json").read_text()) for folder in (one, two)]
    before = json.loads((runs["one"][0] / "scu_metrics.json").read_text())
    for found in scores:
        assert found["start_test_bpt"] == pytest.approx(before["adapter_test_bpt"], rel=rounding(OF_EMBEDDED))
    assert scores[0]["adapter_test_bpt"] == pytest.approx(scores[1]["adapter_test_bpt"], rel=rounding(OF_EMBEDDED))
