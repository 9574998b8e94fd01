"""The training sides of the benchmarks: a run of ours, with or without SCU, and Hugging Face's Trainer with PEFT.

All train the same adapters, from the same start, on the same blocks of the embedded text in the same order, with the
same AdamW, cosine schedule, clipping and precision. Base weights are held in the compute dtype (bf16 under bf16
autocast), adapters in fp32, which is what both libraries do by default.
"""

import json
import statistics
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.gate import Gate
from benchmarks.measure import require_positive, usable
from granite_scu.cli.argument_parser import Parser
from granite_scu.config.errors import UserError
from granite_scu.config.settings import IGNORED, TINY_MODEL, DataConfig

MODELS = ("embedded", "cut", "whole", "dense", "dense-cut")
"""The embedded model; of random weights ten blocks of Granite-4.0-H-1B, all forty, a dense Granite, and its three."""

CORPUS = "stdlib-docs"
SEED = 42
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        model: one of ``MODELS``, or a folder.
        precision: fp32 or bf16.
        batch: sequences in a step.
        length: tokens in a sequence.
        block: micro-batches between two gates.
        name: of the model for both libraries: embedded, or a folder.
        chats: trained on in place of the embedded text, and then a turn is one pass over all of them: with ours packed
            into blocks, theirs padded in as many batches, TRL's packed.
        text: tokens of all chats.
    """

    model: str
    precision: str
    batch: int
    length: int
    block: int = 1
    name: str = TINY_MODEL
    chats: str = ""
    text: int = 0

    @property
    def tokens(self) -> int:
        """Of an optimizer step, or of all chats."""
        return self.text or self.batch * self.length

    def __str__(self) -> str:
        return f"{Path(self.model).name} {self.precision} {self.batch} x {self.length}" + " of chats" * bool(self.chats)


def granite_1b(model: str) -> Any:
    """Granite-4.0-H-1B's published configuration, cut to ten blocks or whole; or of a dense Granite of 1.6 billion
    all or three layers."""
    from transformers import GraniteConfig

    from granite_scu.model import loading

    config = loading.default_config()
    if model == "dense-cut":
        config.num_hidden_layers = 3
    if model.startswith("dense"):
        same = ("vocab_size", "num_hidden_layers", "num_key_value_heads", "tie_word_embeddings", "embedding_multiplier",
                "logits_scaling", "residual_multiplier", "attention_multiplier", "pad_token_id", "bos_token_id",
                "eos_token_id")  # fmt: skip
        wide = {"hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": config.shared_intermediate_size}
        return GraniteConfig(**{name: getattr(config, name) for name in same}, **wide)
    if model == "cut":
        config.num_hidden_layers, config.layer_types = 10, config.layer_types[:10]
    return config


@contextmanager
def model_folder(model: str, device: str = "cpu") -> Iterator[str]:
    """The name of the model for both libraries; random weights are saved in a folder that goes away."""
    if model == "embedded" or model not in MODELS:
        yield TINY_MODEL if model in MODELS else model
        return
    with tempfile.TemporaryDirectory() as folder:
        save_random(model, folder, device)
        yield folder


def save_random(model: str, folder: str, device: str = "cpu") -> None:
    """Write a model of random weights, in bf16, and a tokenizer that fits.

    Args:
        model: of ``MODELS``.
        folder: where.
        device: that draws the weights; all of them take a CPU half a minute.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from granite_scu.model import loading

    torch.manual_seed(SEED)
    logging.disable_progress_bar()
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(granite_1b(model), dtype=torch.bfloat16)
    made.save_pretrained(folder)
    del made
    if device == "cuda":
        torch.cuda.empty_cache()  # the sides have processes of their own
    loading.load_tokenizer(TINY_MODEL).save_pretrained(folder)


def with_models(cases: list[Case], device: str) -> Iterator[Case]:
    """Each case while its model is there; one of random weights is made once for neighbouring cases."""
    for model, group in groupby(cases, key=lambda case: case.model):
        with model_folder(model, device) as name:
            for case in group:
                yield replace(case, name=name)


def ready(cases: list[Case], device: str, chats: int | None) -> Iterator[Case]:
    """Each case while its model and, where they are asked for, its chats are there."""
    for case in with_models(cases, device):
        with of_chats(case, chats) if chats else nullcontext(case) as whole:
            yield whole


def frozen_weights(model: str) -> int:
    """Parameters of the base model; a tied output head counts once."""
    from transformers import AutoModelForCausalLM

    from granite_scu.model import loading

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(loading.load_model_config(model)).num_parameters()


def bound_seconds(case: Case) -> float:
    """What a CPU's fastest matrix products of a step take by themselves: base and adapters of every layer, forward and
    backward, and the output head. No attention, nothing between them."""
    from transformers import AutoModelForCausalLM

    from granite_scu.config.settings import LoraConfig
    from granite_scu.model import adapters, loading
    from granite_scu.model.mamba2.tiling import product

    with torch.device("meta"):
        config = loading.load_model_config(case.name)
        shapes = Counter(adapters.shapes(AutoModelForCausalLM.from_config(config), LoraConfig()))
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32

    def seconds(rows: int, inner: int, columns: int) -> float:
        left, right = torch.ones(rows, inner, dtype=dtype), torch.ones(columns, inner, dtype=dtype).mT
        times = []
        for _ in range(6):
            begun = time.thread_time()
            product(left, right)
            times.append(time.thread_time() - begun)
        return statistics.median(times[1:])

    tokens, total = case.tokens, 0.0
    shapes[config.vocab_size, config.hidden_size, 0] = 1  # the head has no adapter
    for (out, into, rank), count in shapes.items():
        products = [(tokens, into, out), (tokens, out, into)]
        if rank:
            products += [(tokens, into, rank), (tokens, rank, out), (tokens, out, rank), (tokens, rank, into)]
            products += [(rank, tokens, into), (out, tokens, rank)]
        total += count * sum(seconds(*each) for each in products)
    return total


@contextmanager
def of_chats(case: Case, count: int) -> Iterator[Case]:
    """The case with so many chats to train on: paragraphs of the embedded text, short and long ones, as answers."""
    from granite_scu.data.sources.corpora import stdlib_docs

    paragraphs = (part for document in stdlib_docs() for part in document.text.split("\n\n"))
    answers = [part for part in paragraphs if 20 <= len(part) <= 1200]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "chats.jsonl")
        with path.open("w", encoding="utf-8") as file:
            for answer in answers[:: len(answers) // count][:count]:
                said = (("user", f"Go on: {answer[:20]}"), ("assistant", answer))
                file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in said]}) + "\n")
        case = replace(case, chats=str(path))
        data = _data(case)
        yield replace(case, block=-(-len(data.train) // case.batch), text=int(data.lengths[data.epoch].sum()))


def largest_difference(ours: list[float], theirs: list[float]) -> float | None:
    """Between the losses of a step, relative to theirs; None where a side has none."""
    pairs = list(zip(ours, theirs, strict=False))  # a side that failed has fewer
    return max((abs(one - other) / other for one, other in pairs), default=None)


def reset_adapters(model: torch.nn.Module) -> None:
    """The same adapters for every side, in the library's distribution; drawn on the CPU, for every device."""
    from granite_scu.model import adapters

    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for _, update in sorted(adapters.low_rank_updates(model).items()):
            drawn = torch.nn.init.kaiming_uniform_(torch.empty(update.a.shape), a=5**0.5, generator=generator)
            update.a.copy_(drawn)
            update.b.zero_()


def warm_up(model: torch.nn.Module, device: str, precision: str) -> None:
    """A forward and backward pass over eight tokens, so that code and weights are in memory before it is measured.

    Nothing is compiled for it: for another shape the layers would then be compiled for shapes of any size.
    """
    tokens = torch.arange(8, device=device)[None]
    with (
        torch.compiler.set_stance("force_eager"),
        torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"),
    ):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)


class Losses:
    """Losses of the steps since the last gate, in nats a token; read only when the gate has stopped its clock."""

    def __init__(self) -> None:
        self._pending: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        self._pending.append(loss)

    def report(self) -> dict[str, list[float]]:
        losses, self._pending = [float(loss) for loss in self._pending], []
        return {"losses": losses}


def run_ours(gate: Gate, case: Case, steps: int, flags: tuple[str, ...], plain: bool) -> None:
    """A run of granite-scu as a user starts it, gated.

    Args:
        gate: waited at before every block of steps.
        case: what is trained.
        steps: optimizer steps of the run, at the least those that are gated.
        flags: further flags of the training script.
        plain: train without the callback that measures and steers S.
    """
    console = quiet_console()
    from granite_scu.training.recipe import prepare, train

    with tempfile.TemporaryDirectory() as folder:
        request = make_request(gate.device, case, steps, flags, folder)
        request = replace(request, trainer=replace(request.trainer, callbacks=[_gated_callback(gate, case, plain)]))
        train(prepare(request, console))


def quiet_console() -> Any:
    """Where nothing shows; the libraries' chatter is turned off with it, on both sides."""
    import lightning  # noqa: F401  before its log is made quiet, which its import undoes
    from rich.console import Console
    from transformers.utils import logging

    from granite_scu.cli.console import quiet

    console = Console(quiet=True)
    quiet(console)
    logging.disable_progress_bar()
    return console


def make_request(device: str, case: Case, steps: int, flags: tuple[str, ...], folder: str) -> Any:
    from granite_scu.cli.script_flags import translate

    given = {
        "model": case.name, "data-dir": case.chats or CORPUS, "output-dir": folder, "accelerator": device,
        "block-size": case.length, "batch-size": case.batch, "gradient-accumulation-steps": 1,
        "max-steps": steps, "eval-steps": steps, "save-steps": steps,
        "warmup-steps": 0, "learning-rate": LEARNING_RATE, "seed": SEED, "precision": case.precision,
        "target-s": 0.02,
    }  # fmt: skip
    layers, _ = translate([*(f"--{name}={value}" for name, value in given.items()), *flags])
    return layers.request()


def _gated_callback(gate: Gate, case: Case, plain: bool) -> Any:
    import lightning as L

    from granite_scu.model.plant import LOSS_UNIT
    from granite_scu.training.callbacks.shannon_control import ShannonControl

    losses = Losses()

    class Gated(L.Callback):
        """The last callback: what it waits before is the whole of a step, the other callbacks' work among it."""

        def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
            if plain:
                trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, ShannonControl)]

        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            reset_adapters(module.model)
            warm_up(module.model, gate.device, case.precision)

        def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: dict, index: int) -> None:
            if index % case.block == 0:
                gate.wait(losses.report)

        def on_train_batch_end(
            self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: dict, index: int
        ) -> None:
            losses.add(outputs["loss"] * LOSS_UNIT / (batch["labels"] != IGNORED).sum())

    return Gated()


def run_theirs(gate: Gate, case: Case, steps: int) -> None:
    """Hugging Face's Trainer on a PEFT model, gated. The arguments are those of ``run_ours``."""
    quiet_console()
    import transformers

    adapted = _adapted(case).to(gate.device)
    warm_up(adapted, gate.device, case.precision)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            **_arguments(folder, gate.device, case, steps),
            lr_scheduler_type="cosine",
            weight_decay=0.0,
            adam_beta2=0.999,
            max_grad_norm=1.0,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,  # shift_labels would be one
            dataloader_pin_memory=gate.device == "cuda",
        )
        listening, callback = _gated_trainer(transformers.Trainer, gate, case)
        rows, collate = _rows(case, steps), {"data_collator": _padded} if case.chats else {}
        if case.chats:
            arguments.per_device_train_batch_size = -(-len(rows) // case.block)
        trainer = listening(adapted, arguments, train_dataset=rows, callbacks=[callback], **collate)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


def run_trl(gate: Gate, case: Case, steps: int) -> None:
    """TRL's SFTTrainer as it comes, gated: at its defaults, which recompute activations; on the same blocks of text."""
    quiet_console()
    import transformers
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    from granite_scu.model import finding

    with tempfile.TemporaryDirectory() as folder:
        # The coefficient: TRL 1.16 balances the experts of every Granite hybrid, also of one that has none, and fails.
        arguments = SFTConfig(
            **_arguments(folder, gate.device, case, steps),
            max_length=case.length,
            packing=bool(case.chats),
            router_aux_loss_coef=0.0,
        )
        listening, callback = _gated_trainer(SFTTrainer, gate, case)
        trainer = listening(
            str(finding.resolve(case.name)),
            arguments,
            train_dataset=Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in _rows(case, steps)]),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[callback],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


def _arguments(folder: str, device: str, case: Case, steps: int) -> dict[str, Any]:
    """What both of their trainers are told."""
    return {
        "output_dir": folder, "per_device_train_batch_size": case.batch, "max_steps": steps,
        "learning_rate": LEARNING_RATE, "bf16": case.precision == "bf16", "use_cpu": device == "cpu",
        "logging_steps": 10, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip


def _gated_trainer(trainer: type, gate: Gate, case: Case) -> tuple[Any, Any]:
    """A trainer of theirs that keeps its losses, and the callback that waits at the gate with them."""
    import transformers

    losses = Losses()

    class Gated(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            block = len(kwargs["train_dataloader"]) if case.chats else case.block
            if state.global_step % block == 0:
                gate.wait(losses.report)

    class Listening(trainer):  # type: ignore[misc, valid-type]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.add(loss)
            return loss

    return Listening, Gated()


def _adapted(case: Case) -> torch.nn.Module:
    """The library's model with PEFT's adapters on the layers, and of the rank, that ours has."""
    import peft
    from transformers import AutoModelForCausalLM

    from granite_scu.config.settings import LoraConfig
    from granite_scu.model import adapters, finding

    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    base = AutoModelForCausalLM.from_pretrained(finding.resolve(case.name), dtype=dtype)
    layers, lora = list(adapters.linear_layers(base)), LoraConfig().resolved()
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=layers, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, config)
    reset_adapters(adapted)
    return adapted


def _rows(case: Case, steps: int) -> list[dict[str, Tensor]]:
    """The blocks that a run of ours trains on, one by one in its order, or all chats. Labels are shifted already."""
    data = _data(case)
    batches = islice(data.train_dataloader(), case.block if case.chats else steps)
    blocks = [row for batch in batches for row in zip(batch["input_ids"], batch["labels"], _parts(batch), strict=True)]
    rows = [(ids[part], labels[part]) for ids, labels, parts in blocks for part in parts]
    if case.chats:  # the last of a block has its padding
        ends = [int((labels != IGNORED).nonzero().max()) + 1 for _, labels in rows]
        rows = [(ids[:end], labels[:end]) for (ids, labels), end in zip(rows, ends, strict=True)]
    return [{"input_ids": ids, "labels": labels, "shift_labels": labels} for ids, labels in rows]


def _parts(batch: dict[str, Tensor]) -> list[list[Tensor | slice]]:
    """Of each block its documents, where it is told; or all of it."""
    if "documents" not in batch:
        return [[slice(None)]] * len(batch["input_ids"])
    return [[numbers == number for number in numbers.unique()] for numbers in batch["documents"]]


def _data(case: Case) -> Any:
    """What a run of ours trains on."""
    from granite_scu.data.datamodule import TextDataModule
    from granite_scu.model import loading

    share = 0.0 if case.chats else None
    config = DataConfig(case.chats or CORPUS, block_size=case.length, batch_size=case.batch, held_out_share=share)
    data = TextDataModule(replace(config, isolate_documents=bool(case.chats)), SEED)
    data.prepare(loading.load_tokenizer(case.name))
    return data


def _padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of rows, each as long as the longest."""
    fill = {"input_ids": 0, "labels": IGNORED, "shift_labels": IGNORED, "attention_mask": 0}
    told = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    return {name: pad_sequence([row[name] for row in told], True, value) for name, value in fill.items()}


def add_flags(parser: Parser) -> None:
    """The flags that say what is trained."""
    parser.add_argument(
        "--model", nargs="+", help=f"{', '.join(MODELS)}, or a folder; default: embedded and cut; on CUDA whole too"
    )
    parser.add_argument(
        "--precisions",
        nargs="+",
        choices=["fp32", "bf16"],
        help="default: both for the embedded model, bf16 for the others",
    )
    parser.add_argument("--batch", type=int, help="sequences in a step (default: 8 of the embedded model, or 2)")
    parser.add_argument("--length", type=int, help="tokens in a sequence (default: 128 of the embedded model, or 512)")


def cases(options: Namespace, block: int | None) -> list[Case]:
    """What is to be trained: the embedded model in fp32 and bf16, the others in bf16.

    Args:
        options: the flags given.
        block: optimizer steps between two gates; None takes ten, and one where a step takes seconds.
    """
    require_positive(batch=options.batch, length=options.length)
    for model in set(options.model or ()) - {*MODELS}:
        if not Path(model, "config.json").is_file():
            raise UserError(f"--model {model}: neither of {', '.join(MODELS)}, nor the folder of a model")
    DataConfig(CORPUS, block_size=options.length or 128)  # refuses what is too short
    usual = ["embedded", *(["cut"] if not options.quick else []), *(["whole"] if _on_gpu(options) else [])]
    found = []
    for model in options.model or usual:
        small = model == "embedded"
        wanted = options.precisions or (["fp32", "bf16"] if small else ["bf16"])
        each = block or (1 if not small and options.device == "cpu" else 3 if options.quick else 10)
        batch, length = options.batch or (8 if small else 2), options.length or (128 if small else 512)
        found += [Case(model, precision, batch, length, each) for precision in usable(wanted, options.device)]
    return found


def _on_gpu(options: Namespace) -> bool:
    return options.device == "cuda" and not options.quick
