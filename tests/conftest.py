"""A model that trains in milliseconds, and what is needed to train it. Heavy imports wait for the first use."""

import logging

import pytest
from hypothesis import settings

# The same examples at every run, however slow the machine; ``pytest --hypothesis-profile search`` looks for others.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("same")

VOCABULARY = 64
POISON = 63
"""A token that occurs in poisoned micro-batches only."""


@pytest.fixture(scope="session")
def small_granite(tmp_path_factory) -> str:
    """Folder of a Granite hybrid with random weights: a Mamba-2 and an attention layer, the embedded model shrunk."""
    return _shrunk(tmp_path_factory.mktemp("small-granite"))


@pytest.fixture(scope="session")
def small_mixture(tmp_path_factory) -> str:
    """Folder of the same with experts, as Granite 4.0 H Tiny and Small have them, and with the embedded tokenizer."""
    from granite_scu.config.settings import TINY_MODEL
    from granite_scu.model.loading import load_tokenizer

    folder = tmp_path_factory.mktemp("small-mixture")
    experts = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 16, "vocab_size": 4096}
    load_tokenizer(TINY_MODEL).save_pretrained(folder)
    return _shrunk(folder, **experts)


@pytest.fixture(scope="session")
def small_and_deeper(tmp_path_factory) -> str:
    """Folder of the same with a Mamba-2 layer more, whose input is not the embedding's."""
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    return _shrunk(tmp_path_factory.mktemp("small-and-deeper"), num_hidden_layers=3, layer_types=kinds)


def _shrunk(folder, **changed) -> str:
    """Write the embedded model in a few neurons, with random weights, into a folder; returns its name."""
    import torch
    from transformers import AutoModelForCausalLM

    from granite_scu.config.settings import TINY_MODEL
    from granite_scu.model.loading import load_model_config

    config = load_model_config(TINY_MODEL)
    shrunk = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 3,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "shared_intermediate_size": 32,
        "initializer_range": 0.2,
        "dtype": "float32",
    }
    config.update(shrunk | changed)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def bf16(monkeypatch):
    """A CPU that computes in bf16, as far as it is asked; what the test does must not hang on whether it is true."""
    import torch

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True}, raising=False)


@pytest.fixture
def no_bf16(monkeypatch):
    """A CPU that does not."""
    import torch

    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)


@pytest.fixture
def make_module(small_granite):
    """Builds a module, model and adapters in place; equal arguments give equal weights."""
    import torch

    from granite_scu.config.settings import BaseConfig, LoraConfig, OptimizerConfig, PriorConfig
    from granite_scu.training.module import GraniteModule

    def make(
        cls=GraniteModule, *, base=None, lora=None, optimizer=None, sigma=0.02, n_tokens=1000, total_steps=100, **more
    ):
        torch.manual_seed(0)
        module = cls(
            BaseConfig(**({"name": small_granite} | (base or {}))),
            LoraConfig(**({"rank": 4, "alpha": 8.0} | (lora or {}))),
            OptimizerConfig(**({"warmup_steps": 0, "schedule": "constant", "gradient_clip": 0.0} | (optimizer or {}))),
            PriorConfig(sigma, n_tokens),
            total_steps,
            **more,
        )
        module.configure_model()
        return module

    return make


@pytest.fixture(scope="module")
def no_step_is_tried():
    """The runs of a module are planned by given figures."""
    from untried import no_step_tried

    with no_step_tried():
        yield


@pytest.fixture
def group_of_one():
    """This process as all those that train together."""
    import torch

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def make_batches():
    """Builds micro-batches of random tokens, of which the later ones of each have ever fewer that count."""
    import torch

    def make(count: int, seed: int = 0, rows: int = 2, time: int = 12) -> list[dict]:
        generator = torch.Generator().manual_seed(seed)
        batches = []
        for i in range(count):
            tokens = torch.randint(2, POISON, (rows, time + 1), generator=generator)
            labels = tokens[:, 1:].clone()
            labels[:, : (5 * i) % time] = -100
            batches.append({"input_ids": tokens[:, :-1], "labels": labels})
        return batches

    return make


@pytest.fixture
def poison():
    """Gives a micro-batch like another one whose loss, in that module, is NaN: so is the embedding of its token."""
    import torch

    def forget(embedding, args, vectors):
        return vectors.masked_fill((args[0] == POISON)[..., None], torch.nan)

    def poison(module, batch: dict) -> dict:
        module.language_model.get_input_embeddings().register_forward_hook(forget)
        return batch | {"input_ids": torch.full_like(batch["input_ids"], POISON)}

    return poison


@pytest.fixture
def fit(tmp_path):
    """Trains a module on micro-batches with a real Trainer on the CPU in fp32, and returns the Trainer."""
    import lightning as L
    from torch.utils.data import DataLoader

    def fit(module, batches, *, ckpt_path=None, **settings) -> L.Trainer:
        defaults = {
            "accelerator": "cpu",
            "max_epochs": None if "max_steps" in settings else 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": tmp_path,
        }
        trainer = L.Trainer(**(defaults | settings))
        trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path, weights_only=True)
        return trainer

    return fit


@pytest.fixture
def machine(monkeypatch):
    """Puts a device, or none, behind torch and NVML."""
    from types import SimpleNamespace

    import psutil
    import pynvml
    import torch

    from granite_scu.hardware import detection
    from granite_scu.hardware.detection import Device

    def install(device: Device, driver: int | None = 13, build: str | None = "13.0", gpus: tuple[str, ...] = ()):
        cuda = device.kind == "cuda"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: device.count if cuda else 0)
        major, minor = device.capability or (0, 0)
        total = round(device.memory_gb * 2**30)
        properties = SimpleNamespace(name=device.name, major=major, minor=minor, total_memory=total)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (total, total))
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
        monkeypatch.setattr(torch.version, "cuda", build)
        if not cuda:
            monkeypatch.setattr(detection, "_detect_cpu", lambda: device)
            # All of it free: what this machine has free is another figure at each run.
            free = SimpleNamespace(total=total, available=total)
            monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
            monkeypatch.setattr(detection, "LIMITS", ())

        def absent():
            raise pynvml.NVMLError_LibraryNotFound

        monkeypatch.setattr(pynvml, "nvmlInit", absent if driver is None else lambda: None)
        monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.65.06")
        monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion", lambda: 1000 * (driver or 0))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(gpus))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: gpus[handle])

    return install


@pytest.fixture(autouse=True, scope="session")
def _nothing_of_the_user(tmp_path_factory):
    """Tokens of tests are kept apart from the user's, local addresses are no proxy's, and nobody wishes for colours."""
    import matplotlib

    patch = pytest.MonkeyPatch()
    patch.setenv("MPLCONFIGDIR", matplotlib.get_cachedir())  # its list of fonts takes seconds to make
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    for name in ("NO_PROXY", "no_proxy"):
        patch.setenv(name, "127.0.0.1,localhost")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        patch.delenv(name, raising=False)
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="module")
def _no_log_of_another_file():
    """What the fixtures of a file ran has left a command's log handlers; the next file starts without any."""
    yield
    _restore_log((logging.NOTSET, True, []))


@pytest.fixture(autouse=True)
def _no_log_of_another_test():
    """No test leaves the handlers of a command's log to the next."""
    log = logging.getLogger("granite_scu")
    before = (log.level, log.propagate, list(log.handlers))
    yield
    _restore_log(before)


def _restore_log(state: tuple) -> None:
    log = logging.getLogger("granite_scu")
    log.setLevel(state[0])  # not log.level: loggers remember what they were told is enabled
    log.propagate, log.handlers[:] = state[1:]
