"""What a run lacks, on simulated machines and with a simulated hub."""

import json
from functools import cache
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from devices import A100, CPU, RTX_4090, T4, V100, gpu
from references import granite
from safetensors.torch import load_file, save_file

from granite_scu.cli import requirements
from granite_scu.cli.main import main
from granite_scu.cli.requirements import AS_A_WHOLE, Check, can_start, check_requirements, print_requirements
from granite_scu.config.request import Request
from granite_scu.config.settings import TINY_MODEL, LoraConfig
from granite_scu.model.flops import measure
from granite_scu.model.mamba2.mamba import TORCH, Kernels
from granite_scu.training.resume import Resume

EMBEDDED = {"base.name": TINY_MODEL, "data.path": "stdlib-docs", "control.target_s": 0.02}


@cache
def wanted(accelerator: str, **settings) -> Request:
    """A run on the embedded model and text, but for settings whose dots are underscores twice."""
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    return Request.from_dotted(EMBEDDED | {"trainer.accelerator": accelerator} | dotted)


DOWNLOADED = {"base__name": "ibm-granite/granite-4.0-h-1b", "data__path": None}
ON_CPU, ON_GPU = wanted("cpu"), wanted("cuda")
FLASH = {"base__attention": "flash_attention_2", "data__isolate_documents": False}


@pytest.fixture(autouse=True)
def nothing_to_try(monkeypatch):
    """As where no compiled kernels are installed: those that are here would be tried, for seconds."""
    monkeypatch.setattr(requirements.kernels, "installed", lambda request="auto": {})


@pytest.fixture
def hub(monkeypatch):
    """An empty hub cache, and a hub that answers as it is told; returns the calls made to it."""
    calls = []

    def install(error: Exception | None = None, offline: bool = False):
        def answer(self, repository, *, timeout):
            calls.append((repository, timeout))
            if error is not None:
                raise error

        monkeypatch.setattr(requirements.constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", answer)
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", answer)
        monkeypatch.setattr(requirements, "_is_cached", lambda repository, file, kind="model": False)
        return calls

    return install


def found(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


def test_a_run_on_the_cpu_with_embedded_model_and_text_starts_anywhere(machine, hub, tmp_path):
    machine(CPU, driver=None, build=None)
    calls = hub(error=OSError("unreachable"))
    checks = check_requirements(wanted("cpu", run__output_dir=str(tmp_path)))
    assert can_start(checks)
    assert calls == [], "a run that downloads nothing asks nobody"


def test_a_run_on_a_gpu_starts_there(machine):
    machine(A100)
    checks = check_requirements(ON_GPU)
    assert can_start(checks)
    assert found(checks, "CUDA device").found == "2 x NVIDIA A100-SXM4-80GB"
    assert found(checks, "NVIDIA driver").found == "580.65.06 (CUDA 13)"
    assert found(checks, "compute capability").found == "8.0"
    assert found(checks, "GPU memory").found == "79.0 GiB"
    assert found(checks, "precision").meaning == "the run trains in bf16"


@pytest.mark.parametrize(
    ("driver", "build", "name", "remedy"),
    [
        (None, None, "NVIDIA driver", "sudo ubuntu-drivers install"),
        (None, None, "CUDA device", "--accelerator cpu"),
        (13, None, "CUDA device", "pip install --force-reinstall torch=="),
        (12, "13.0", "NVIDIA driver", "update the driver"),
    ],
)
def test_a_missing_gpu_is_traced_to_its_cause(machine, driver, build, name, remedy):
    machine(CPU, driver=driver, build=build)
    check = found(check_requirements(ON_GPU), name)
    assert check.blocks and remedy in check.remedy


def test_a_device_without_nvml_is_a_device(machine):
    machine(A100, driver=None)
    checks = check_requirements(ON_GPU)
    assert can_start(checks) and found(checks, "NVIDIA driver").ok is None


@pytest.mark.parametrize(
    ("device", "build"), [(V100, "cu126"), (gpu("A future GPU", 288.0, (13, 0)), "cu130")], ids=["older", "newer"]
)
def test_a_gpu_that_this_torch_has_no_kernels_for_needs_another_build(machine, device, build):
    machine(device)
    check = found(check_requirements(ON_GPU), "compute capability")
    assert check.blocks and check.remedy.endswith(f"/whl/{build}")


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((8, 9), ["sm_80", "sm_90"], True),  # a minor version runs its predecessors' kernels
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((12, 0), ["sm_90", "compute_90"], True),  # PTX is compiled for what came later
        ((7, 5), ["sm_80", "compute_80"], False),
        ((9, 0), ["sm_90a"], False),
    ],
)
def test_which_build_runs_on_which_gpu(capability, architectures, runs):
    assert requirements._has_kernels(capability, architectures) is runs


@pytest.mark.parametrize(
    ("device", "settings", "name", "remedy"),
    [
        (T4, {"trainer__precision": "bf16-mixed"}, "precision", "--precision fp16"),
        (CPU, {"base__quantize_4bit": True}, "bitsandbytes", "pip install bitsandbytes"),
        (A100, FLASH, "flash-attn", "pip install flash-attn --no-build-isolation"),
        (A100, {"base__kernels": "cuda"}, "Mamba-2 kernels", "pip install 'granite-scu[kernels]'"),
        (CPU, {"base__kernels": "cuda"}, "Mamba-2 kernels", "use --kernels auto"),
        (CPU, {"run__multi_gpu": True}, "--multi-gpu", "leave it out"),
        (CPU, {"base__name": "absent/by/name"}, "base model", "--model absent/by/name: no such folder"),
        (CPU, {"run__output_dir": f"{__file__}/run"}, "run folder", "choose another"),
    ],
)
def test_what_the_run_would_refuse_blocks_it(machine, monkeypatch, device, settings, name, remedy):
    machine(device)
    for variable in ("WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(requirements, "version_of", lambda name: None)
    monkeypatch.setattr(requirements.machine, "find_spec", lambda name: None)
    monkeypatch.setattr(requirements.kernels, "installed", lambda request: {})
    checks = check_requirements(wanted(device.kind, **settings))
    assert [check.name for check in checks if check.blocks] == [name]
    assert remedy in found(checks, name).remedy


def test_what_is_there_serves(machine, monkeypatch):
    machine(A100)
    monkeypatch.setattr(requirements, "version_of", lambda name: "2.8.4")
    monkeypatch.setattr(requirements.machine, "find_spec", lambda name: object())
    checks = check_requirements(wanted("cuda", base__quantize_4bit=True, **FLASH))
    assert can_start(checks)
    assert found(checks, "flash-attn") == Check(
        "flash-attn", "2.8.4", True, True, "attention runs in flash_attention_2"
    )
    assert found(checks, "bitsandbytes").ok


@pytest.mark.parametrize(
    ("device", "installed", "settings", "meaning", "remedy"),
    [
        (A100, {}, {}, "the layers run in PyTorch", "pip install 'granite-scu[kernels]'"),
        (A100, {}, {"trainer__deterministic": True}, "not used: the layers run in PyTorch", ""),
        (CPU, {"fla-core": "0.6.0"}, {}, "not used: the layers run in PyTorch", ""),
    ],
)
def test_what_the_mamba_layers_would_run_in(machine, monkeypatch, device, installed, settings, meaning, remedy):
    machine(device)
    monkeypatch.setattr(requirements.kernels, "installed", lambda request: installed)
    checks = check_requirements(wanted(device.kind, **settings))
    check = found(checks, "Mamba-2 kernels")
    assert (check.meaning, check.remedy) == (meaning, remedy) and can_start(checks)
    assert check.found == ("fla-core 0.6.0" if installed else "not installed")


@pytest.mark.parametrize(
    ("right", "settings", "meaning", "starts"),
    [
        (True, {}, "the layers run in theirs, which passed their self-check", True),
        (True, {"base__kernels": "cuda"}, "the layers run in theirs, which passed their self-check", True),
        (False, {}, "fla-core 0.6.0 failed its self-check (NaN); the layers run in PyTorch", True),
        (False, {"base__kernels": "cuda"}, "fla-core 0.6.0 failed its self-check (NaN); the run is refused", False),
        (True, {"base__name": "owner/name"}, "not tried here: no Mamba-2 layers of known sizes, or no precision", True),
    ],
)
def test_installed_kernels_are_tried_at_the_models_sizes(machine, hub, monkeypatch, right, settings, meaning, starts):
    machine(A100)
    hub()
    theirs, tried = Kernels("theirs", TORCH.scan, TORCH.conv), []

    def first_correct(device, dtype, sizes, request):
        tried.append((device.type, dtype, sizes))
        return (theirs, []) if right else (TORCH, ["fla-core 0.6.0 failed its self-check (NaN)"])

    monkeypatch.setattr(requirements.kernels, "installed", lambda request: {"fla-core": "0.6.0"})
    monkeypatch.setattr(requirements.kernels, "first_correct", first_correct)
    checks = check_requirements(wanted("cuda", **settings))
    assert found(checks, "Mamba-2 kernels").meaning == meaning
    assert can_start(checks) is starts
    if "base__name" not in settings:
        ((kind, dtype, sizes),) = tried
        assert (kind, dtype, sizes.groups, sizes.conv_width) == ("cuda", torch.bfloat16, 1, 4)


def test_a_model_folder_needs_no_hub(machine, hub, tmp_path):
    machine(CPU)
    calls = hub()
    granite().save_pretrained(tmp_path)
    assert can_start(check_requirements(wanted("cpu", base__name=str(tmp_path))))
    assert calls == []
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    checks = check_requirements(wanted("cpu", base__name=str(tmp_path)))
    assert not can_start(checks) and "model.norm.weight" in found(checks, "base model").remedy


def test_the_hub_is_asked_for_what_would_be_downloaded(machine, hub):
    machine(CPU)
    calls = hub()
    checks = check_requirements(wanted("cpu", **DOWNLOADED))
    assert can_start(checks) and found(checks, "hub access").ok
    assert calls == [("ibm-granite/granite-4.0-h-1b", 2.0), ("Salesforce/wikitext", 2.0)]


def test_what_is_cached_is_not_asked_for(machine, hub, monkeypatch):
    machine(CPU)
    calls = hub(error=OSError("unreachable"))
    monkeypatch.setattr(requirements, "_is_cached", lambda repository, file, kind="model": True)
    checks = check_requirements(wanted("cpu", **DOWNLOADED))
    assert can_start(checks) and calls == []
    assert found(checks, "base model").found == "ibm-granite/granite-4.0-h-1b (in the hub cache)"


def test_a_model_is_cached_when_configuration_and_weights_are(monkeypatch, tmp_path):
    monkeypatch.setattr(requirements.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--name"
    for folder in ("refs", "snapshots/c0ffee", ".no_exist/c0ffee"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs/main").write_text("c0ffee")
    (repository / "snapshots/c0ffee/config.json").write_text("{}")
    (repository / ".no_exist/c0ffee/model.safetensors").touch()
    assert requirements._place("owner/name") == "on the hub"
    (repository / "snapshots/c0ffee/model.safetensors.index.json").write_text("{}")
    assert requirements._place("owner/name") == "in the hub cache"


@pytest.mark.parametrize(
    ("error", "offline", "says", "remedy"),
    [
        (ConnectionError("no route"), False, "does not answer (ConnectionError)", f"--model {TINY_MODEL}"),
        (None, True, "switched off by HF_HUB_OFFLINE", "unset HF_HUB_OFFLINE"),
    ],
)
def test_a_download_without_a_hub_blocks_the_run(machine, hub, error, offline, says, remedy):
    machine(CPU)
    calls = hub(error, offline)
    check = found(check_requirements(wanted("cpu", **DOWNLOADED)), "hub access")
    assert check.blocks and says in check.found and remedy in check.remedy
    assert not (offline and calls)


def test_a_run_folder_that_is_taken_blocks_the_run(machine, tmp_path):
    machine(CPU)
    (tmp_path / "training_config.json").write_text("{}")
    (tmp_path / "scu_metrics.json").write_text("{}")

    def folder(**settings) -> Check:
        return found(check_requirements(wanted("cpu", run__output_dir=str(tmp_path), **settings)), "run folder")

    assert folder().blocks and "is not empty" in folder().remedy
    assert folder(run__resume="last").blocks and "holds no checkpoint" in folder(run__resume="last").remedy
    replaced = folder(run__overwrite=True)
    assert replaced.ok and "deleted" in replaced.meaning
    (tmp_path / "mine.txt").touch()
    assert "mine.txt" in folder(run__overwrite=True).remedy


def test_a_full_disk_blocks_the_run(machine, monkeypatch, tmp_path):
    machine(CPU)
    request = wanted("cpu", run__output_dir=str(tmp_path / "new" / "run"))
    assert can_start(check_requirements(request)), "the folder is made by the run"
    monkeypatch.setattr(requirements.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    full = found(check_requirements(request), "free disk")
    assert full.blocks and f"--output-dir {request.run.output_dir}" in full.remedy
    monkeypatch.setattr(requirements.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**25))
    assert found(check_requirements(request), "free disk").meaning == "the run folder takes up to 0.012 GiB"
    kept = found(check_requirements(wanted("cpu", run__output_dir=str(tmp_path), run__keep=100)), "free disk")
    assert kept.blocks and kept.meaning == "the run folder takes up to 0.34 GiB"


def test_the_table_names_what_is_missing_and_leaves_commands_whole(capsys):
    command = "pip install " + "x" * 200
    checks = [
        Check("bitsandbytes", "not installed", False, True, "holds the base in 4 bits [bold]", command),
        Check("flash-attn", "not installed", False, False, "not used"),
        Check("CPU memory", "16.0 GiB", None, False, "if it runs out, lower --batch-size"),
    ]
    print_requirements(checks)
    printed = capsys.readouterr().out
    assert f"bitsandbytes: {command}\n" in printed
    assert "This run cannot start: bitsandbytes." in printed
    assert "[bold]" in printed, "what is found is shown as it is"
    lines = printed.splitlines()
    assert [next(line.split()[0] for line in lines if name in line) for name in ("flash-attn", "CPU memory")] == [
        "absent",
        "-",
    ]


def test_json_is_one_object_with_every_check(machine, capsys):
    machine(CPU)
    checks = check_requirements(ON_CPU)
    print_requirements(checks, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["can_start"] is True
    assert [row["name"] for row in printed["checks"]] == [check.name for check in checks]
    assert set(printed["checks"][0]) == {"name", "found", "ok", "needed", "meaning", "remedy"}


@pytest.mark.parametrize(
    ("name", "device", "starts", "remedy"),
    [("gpu_4090", RTX_4090, True, ""), ("gpu_4090", T4, True, "--hardware gpu_t4"), ("gpu_4900", T4, False, "gpu_t4")],
)
def test_the_preset_is_looked_at(machine, name, device, starts, remedy):
    machine(device)
    checks = check_requirements(ON_GPU, name)
    check = found(checks, "hardware preset")
    assert can_start(checks) is starts and check.found == name and remedy in check.remedy


@pytest.mark.parametrize(("name", "code"), [("cpu", 0), ("gpu_4900", 1), ("auto", 0)])
def test_the_answer_is_0_or_1_whatever_the_preset(machine, capsys, tmp_path, name, code):
    machine(CPU, driver=None, build=None)
    run = ["--model", TINY_MODEL, "--data-dir", "stdlib-docs", "--output-dir", str(tmp_path)]
    assert main(["train", "--check-requirements", "--json", "--hardware", name, *run]) == code
    assert json.loads(capsys.readouterr().out)["can_start"] is (code == 0)


NO_CALLBACK = "trainer: {callbacks: [{class_path: nope.Nope}]}"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--validation-data", "nothere.jsonl"], "--validation-data nothere.jsonl: no such file"),
        (["--test-data", "nothere.jsonl"], "--test-data nothere.jsonl: no such file"),
        (["--max-drift", "5%", "--general-data", "nothere.txt"], "--general-data nothere.txt: no such file"),
        (["--chat-template", "noname"], "--chat-template noname"),
        (["--config", NO_CALLBACK], "--trainer.callbacks: "),
        (["--lora-r", "20000"], "--lora-r 20000: no adapted matrix has more than"),
        (["--resume-from-checkpoint", "last", "--max-steps", "2"], "is at step 5 and the run ends at 2; raise"),
        (["--resume-from-checkpoint", "last"], "the checkpoint's adapters do not fit this model"),
    ],
)
def test_what_a_run_refuses_once_it_opens_what_is_named_it_cannot_start_with(
    machine, monkeypatch, capsys, tmp_path, flags, words
):
    machine(CPU, driver=None, build=None)
    trained = measure(TINY_MODEL, LoraConfig(), 1024).trained if "--max-steps" in flags else 1
    state = {"global_step": 5, "settings": {}, "state_dict": {"weights": torch.zeros(trained)}}
    there = Resume(tmp_path / "checkpoint-5", state, in_place=True)
    monkeypatch.setattr(requirements, "open_checkpoint", lambda folder, name: there if name else None)
    monkeypatch.setattr("granite_scu.storage.checkpoint_list.check_there", lambda folder, name: None)
    run = ["--model", TINY_MODEL, "--data-dir", "stdlib-docs", "--accelerator", "cpu", "--output-dir", str(tmp_path)]
    assert main(["train", "--check-requirements", "--json", *run, *flags]) == 1
    (check,) = (row for row in json.loads(capsys.readouterr().out)["checks"] if row["name"] == AS_A_WHOLE)
    assert words in check["remedy"]
