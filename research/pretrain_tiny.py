#!/usr/bin/env python3
"""Make a small Granite from nothing: the embedded model, or another base.

    python research/pretrain_tiny.py --output-dir granite_scu/model/assets/tiny-granite-h
    python research/pretrain_tiny.py --architecture dense --text FILE... --output-dir DIR
    python research/pretrain_tiny.py --architecture quarter --text FILE... --with-source --device cuda --minutes 10 \
        --batch-size 64 --length 1024 --output-dir DIR

Trains a byte-level BPE tokenizer and a model of one of four architectures, each with tied embeddings and all four of
Granite's multipliers different from one:

    hybrid       Granite-4.0-H's block structure (Mamba-2 and attention, no experts, no positional encoding)
    wide-hybrid  the same structure, a third wider, with fewer layers, wider heads and a smaller MLP
    dense        Granite's: attention with rotary positions in each layer
    quarter      Granite-4.0-H-1B's layout, a quarter as wide and as deep: 24 M parameters

on the standard library's source (``pretraining_source``; a fifth of the packages is held out and only scored), on
the documents of ``--text`` (a tenth of them held out), or on both. The defaults make the embedded model in about 45
minutes on two CPU cores.
"""

import argparse
import copy
import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    GraniteMoeHybridConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from granite_scu.data.sources.corpora import held_out_source, is_held_out, library_source
from granite_scu.data.sources.documents import Document
from granite_scu.data.sources.read import load
from granite_scu.model.mamba2 import mamba

VOCABULARY = 4096
HELD_OUT_ONE_IN = 10  # documents of --text
SPECIAL_TOKENS = (
    "<|end_of_text|>",
    "<|pad|>",
    "<|unk|>",
    "<|start_of_role|>",
    "<|end_of_role|>",
    "<|tool_call|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
)
# The split of cl100k, which Granite 4's tokenizer uses too: it keeps runs of indentation whole.
WORD_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Granite's format; the generation block lets transformers return a mask of the assistant's tokens.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- generation %}{{- message['content'] + '<|end_of_text|>' }}{%- endgeneration %}{{- '\\n' }}"
    "{%- else %}{{- message['content'] + '<|end_of_text|>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
)


def train_tokenizer(documents: list[Document], entries: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of so many entries with Granite's special tokens and chat template."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|end_of_text|>",
        eos_token="<|end_of_text|>",
        unk_token="<|unk|>",
        pad_token="<|pad|>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=131072,
    )


def hybrid_config(**sizes) -> GraniteMoeHybridConfig:
    """Granite-4.0-H's blocks, small; ``sizes`` over those of the embedded model."""
    embedded = {
        "hidden_size": 192,
        "num_hidden_layers": 6,
        "layer_types": ["mamba", "mamba", "attention", "mamba", "attention", "mamba"],
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "shared_intermediate_size": 384,
        "mamba_n_heads": 12,
        "mamba_d_head": 32,
        "mamba_d_state": 64,
    }
    return GraniteMoeHybridConfig(
        **(embedded | sizes),
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_chunk_size=256,
        time_step_limit=(0.0, 1e6),  # Granite's is (0, inf), which JSON cannot say
        position_embedding_type=None,
        embedding_multiplier=6.0,
        logits_scaling=2.0,
        residual_multiplier=0.4,
        attention_multiplier=0.125,
    )


def wide_hybrid_config() -> GraniteMoeHybridConfig:
    """Of another width, depth and head size than the embedded model, and under 8 MB in bf16."""
    return hybrid_config(
        hidden_size=256,
        num_hidden_layers=4,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        num_attention_heads=8,
        num_key_value_heads=2,
        mamba_n_heads=8,
        mamba_d_head=64,
    )


def quarter_hybrid_config() -> GraniteMoeHybridConfig:
    """Granite-4.0-H-1B's layers, each width and their number divided by four; its head and state sizes.

    Of ten layers the sixth has attention, as there. Attention has heads of 64 in the place of 128.
    """
    return hybrid_config(
        hidden_size=384,
        num_hidden_layers=10,
        layer_types=["attention" if layer == 5 else "mamba" for layer in range(10)],
        num_attention_heads=6,
        num_key_value_heads=2,
        shared_intermediate_size=1024,
        mamba_n_heads=12,
        mamba_d_head=64,
        mamba_d_state=128,
    )


def dense_config() -> GraniteConfig:
    """Granite without Mamba: grouped-query attention with rotary positions and an MLP in each layer."""
    return GraniteConfig(
        hidden_size=224,
        num_hidden_layers=5,
        num_attention_heads=7,
        num_key_value_heads=1,
        intermediate_size=640,
        embedding_multiplier=6.0,
        logits_scaling=2.0,
        residual_multiplier=0.4,
        attention_multiplier=0.125,
    )


ARCHITECTURES: dict[str, Callable[[], PretrainedConfig]] = {
    "hybrid": hybrid_config,
    "wide-hybrid": wide_hybrid_config,
    "dense": dense_config,
    "quarter": quarter_hybrid_config,
}
VOCABULARIES = {"quarter": 8192}


def build_model(tokenizer: PreTrainedTokenizerFast, architecture: str = "hybrid") -> PreTrainedModel:
    """A fresh model; A and dt start as in Mamba-2 (rates 1 to 16, steps 0.001 to 0.1), spread over heads."""
    config = ARCHITECTURES[architecture]()
    config.update(
        {
            "vocab_size": len(tokenizer),
            "initializer_range": 0.05,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for layer in (module for module in model.modules() if mamba.is_mamba2(module)):
        heads = layer.num_heads
        step = torch.exp(torch.empty(heads).uniform_(math.log(1e-3), math.log(1e-1)))
        with torch.no_grad():
            layer.A_log.copy_(torch.empty(heads).uniform_(1, 16).log())
            layer.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
    mamba.install(model)
    return model


def pretraining_source() -> list[Document]:
    """The standard-library source that the embedded model is pretrained on: no held-out package in it."""
    return [document for package, document in library_source() if not is_held_out(package)]


def texts(paths: list[Path], with_source: bool) -> tuple[list[Document], list[Document]]:
    """What to train on and what to hold out: of the files' documents a tenth, by a hash of the text; the library's.

    Raises:
        UserError: a file is not there, or cannot be read.
    """
    library = (pretraining_source(), held_out_source()) if with_source or not paths else ([], [])
    documents = [document for path in paths for document in load(str(path), "text")]
    held_out = [document for document in documents if int(document.digest, 16) % HELD_OUT_ONE_IN == 0]
    kept = [document for document in documents if int(document.digest, 16) % HELD_OUT_ONE_IN]
    return library[0] + kept, library[1] + held_out


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[Document]) -> list[np.ndarray]:
    """Each document's tokens, ended by the end-of-text token."""
    encoded = tokenizer([document.text for document in documents], add_special_tokens=False)["input_ids"]
    return [np.array([*ids, tokenizer.eos_token_id], dtype=np.int32) for ids in encoded]


def batches(documents: list[np.ndarray], length: int, batch: int, seed: int) -> Iterator[Tensor]:
    """(batch, length + 1) windows without end: documents reshuffled, cut anew and mixed every epoch."""
    rng = random.Random(seed)
    while True:
        order = rng.sample(documents, len(documents))
        stream = np.concatenate(order)[rng.randrange(length) :]
        count = (len(stream) - 1) // length
        starts = rng.sample(range(0, count * length, length), count)
        for i in range(0, count - batch + 1, batch):
            yield torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts[i : i + batch]])).long()


@torch.no_grad()
def score_saved(folder: Path, documents: list[np.ndarray], n_bytes: int, length: int, device: str) -> float:
    """Held-out bits per UTF-8 byte of the model as it lies in ``folder``, in fp32, over consecutive windows.

    Every token but the first is predicted once.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    mamba.install(model)
    stream = torch.from_numpy(np.concatenate(documents)).long().to(device)
    nats = 0.0
    for start in range(0, len(stream) - 1, 16 * length):
        ids = stream[start : start + 16 * length + 1]
        pad = -(len(ids) - 1) % length
        inputs = F.pad(ids[:-1], (0, pad)).view(-1, length)
        labels = F.pad(ids[1:], (0, pad), value=-100).view(-1, length)
        nats += summed_loss(model, inputs, labels, nullcontext()).item()
    return nats / math.log(2) / n_bytes


def summed_loss(model: nn.Module, inputs: Tensor, labels: Tensor, autocast) -> Tensor:
    """Summed cross-entropy in nats; ``labels`` are already shifted, -100 is not counted."""
    with autocast:
        logits = model(inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")


def optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embeddings, vectors and convolutions."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.dim() == 2 and "embed" not in name else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def schedule(share: float) -> float:
    """Warm up over 2 %, hold, then fall linearly over the last 40 %. A fraction of the peak rate.

    Args:
        share: of the training that is done.
    """
    return min(1.0, share / 0.02, (1 - share) / 0.4)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="hybrid")
    parser.add_argument("--text", type=Path, nargs="+", default=[], metavar="FILE",
                        help="of fetch_texts.py, to pretrain on; default: the standard library")  # fmt: skip
    parser.add_argument("--with-source", action="store_true", help="the standard library beside --text")
    parser.add_argument("--steps", type=int, default=3400, help="optimizer steps")
    parser.add_argument("--minutes", type=float, help="of training, in place of --steps; the learning rate follows")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda compiles the model")
    parser.add_argument("--go-on", action="store_true", help="from the model in --output-dir and the step its "
                        "pretraining.json names; the optimizers' moments and the data's order start anew")  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=16, help="windows a step")
    parser.add_argument("--length", type=int, default=256, help="tokens a window")
    parser.add_argument("--learning-rate", type=float, default=1.2e-2, help="peak rate of both optimizers")
    parser.add_argument("--eval-steps", type=int, default=500, help="score and save every so many steps")
    parser.add_argument(
        "--score-documents", type=int, metavar="N", help="about so many of those held out (default: all)"
    )
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="of the matrix products")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    corpus, held_out = texts(args.text, args.with_source)
    held_out = held_out[:: max(1, len(held_out) // args.score_documents)] if args.score_documents else held_out
    held_out_bytes = sum(len(document.text.encode()) for document in held_out)
    tokenizer = train_tokenizer(corpus, VOCABULARIES.get(args.architecture, VOCABULARY))
    model, first = build_model(tokenizer, args.architecture), 0
    if args.go_on:
        record = json.loads((args.output_dir / "pretraining.json").read_text())
        first = record["steps"]
        saved = AutoModelForCausalLM.from_pretrained(args.output_dir, dtype=torch.float32)
        model.load_state_dict(saved.state_dict())
    train, test = encode(tokenizer, corpus), encode(tokenizer, held_out)
    n_train = sum(map(len, train))
    print(f"{len(train)} documents, {n_train:,} tokens; held out: {len(test)} documents, {held_out_bytes:,} bytes")
    started, stream = time.perf_counter(), batches(train, args.length, args.batch_size, args.seed + first)
    for step, text in fit(model.to(args.device), stream, args, first):
        save(model, tokenizer, args.output_dir)
        score = score_saved(args.output_dir, test, held_out_bytes, args.length, args.device)
        minutes = (time.perf_counter() - started) / 60
        print(f"{text}  held out {score:.4f} bits/byte  {minutes:.1f} min", flush=True)
        write_record(model, args, score, first, step, minutes)


def fit(
    model: PreTrainedModel, stream: Iterator[Tensor], args: argparse.Namespace, first: int
) -> Iterator[tuple[int, str]]:
    """Train, and yield the steps that are done, and a line on them, where the model is to be saved; last at the end."""
    opts = optimizers(model, args.learning_rate)
    autocast = torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.precision == "bf16")
    of_batch = torch.compile(summed_loss) if args.device == "cuda" else summed_loss
    model.train()
    step, running, used, end = first, None, 0.0, args.minutes and 60 * args.minutes
    share = 0.0 if end else first / args.steps
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("pretraining", total=1.0)
        while share < 1:
            began = time.perf_counter()
            ids = next(stream).to(args.device)
            loss = of_batch(model, ids[:, :-1], ids[:, 1:], autocast) / ids[:, 1:].numel()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in opts:
                for group in opt.param_groups:
                    group["lr"] = args.learning_rate * schedule(share)
                opt.step()
                opt.zero_grad()
            bits = loss.item() / math.log(2)
            running = bits if running is None else 0.98 * running + 0.02 * bits
            step, used = step + 1, used + time.perf_counter() - began
            share = used / end if end else step / args.steps
            text = f"step {step}  {running:.3f} bits/token"
            progress.update(task, completed=share, description=text)
            if step % args.eval_steps == 0 or share >= 1:
                yield step, text


def save(model: nn.Module, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """The model in bf16, and its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_record(
    model: nn.Module, args: argparse.Namespace, score: float, first: int, step: int, minutes: float
) -> None:
    """How the saved model came about, and what it scores."""
    record = {
        "architecture": args.architecture,
        "text": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in args.text} or "standard library",
        "held_out_bits_per_byte": round(score, 4),
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": step,
        "of_steps": step if args.minutes else args.steps,
        "went_on_from_step": first,
        "tokens_per_step": args.batch_size * args.length,
        "learning_rate": args.learning_rate,
        "precision": args.precision,
        "seed": args.seed,
        "minutes": round(minutes, 1),
    }
    (args.output_dir / "pretraining.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
