"""``granite-scu generate``: what base model and adapter make of the same prompt, side by side, as it comes."""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from granite_scu import hardware
from granite_scu.cli.request_parser import make_console, quiet
from granite_scu.config.settings import SEED
from granite_scu.errors import UserError
from granite_scu.model import loading
from granite_scu.model import saved_adapter as saved
from granite_scu.model.loading import WEIGHT_DTYPES

LEAST_WIDTH = 80
"""Columns of a terminal from which on two texts are readable beside one another."""


@dataclass(frozen=True)
class Sampling:
    """How a text is gone on with.

    Attributes:
        max_new_tokens: length of the continuation, unless the model ends it.
        temperature: of the softmax that tokens are drawn from; 0 takes the likeliest, always.
        top_p: draw from the likeliest tokens that have this probability together; null from all.
        seed: of the draws; each model starts from it.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float | None = None
    seed: int = SEED

    def __post_init__(self) -> None:
        def check(valid: bool, flag: str, value: object, rule: str) -> None:
            if not valid:
                raise UserError(f"{flag} {value}: {rule}")

        check(self.max_new_tokens >= 1, "--max-new-tokens", self.max_new_tokens, "must be at least 1")
        warm = 0 <= self.temperature < math.inf
        check(warm, "--temperature", self.temperature, "must be 0 (no draws) or positive, and finite")
        check(self.top_p is None or 0 < self.top_p <= 1, "--top-p", self.top_p, "must be in (0, 1]")
        drawn = self.top_p is None or self.temperature > 0
        check(drawn, "--top-p", self.top_p, "does nothing at --temperature 0, which draws nothing; raise it")
        check(0 <= self.seed < 2**63, "--seed", self.seed, "must be a whole number from 0 on")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    parser.add_argument("run", metavar="RUN", help="run folder, its best/ or a checkpoint of it, or any LoRA adapter")
    parser.add_argument("--prompt", metavar="TEXT", help="text to go on with (default: standard input)")
    parser.add_argument("--prompt-file", metavar="FILE", help="file that holds the text")
    parser.add_argument("--chat", action="store_true", help="put the text into the model's chat template")
    parser.add_argument("--max-new-tokens", type=int, default=Sampling.max_new_tokens, metavar="N",
                        help="tokens to add at most (default: %(default)s)")  # fmt: skip
    parser.add_argument("--temperature", type=float, default=Sampling.temperature, metavar="T",
                        help="of the draws; 0 takes the likeliest token (default: %(default)s)")  # fmt: skip
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens that have this "
                        "probability together (default: from all)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=Sampling.seed, metavar="N", help="of the draws, the same for both "
                        "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--model", metavar="NAME", help="base model (default: the one that the adapter names)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")


def run(options: argparse.Namespace) -> int:
    """Carry the command out; returns the exit code."""
    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p, options.seed)
    prompt = read_prompt(options.prompt, options.prompt_file)
    adapter = saved.find(options.run)
    base = saved.base_of(adapter, options.model)
    adapter.layers(base.name)  # proves that it fits
    tokenizer = loading.load_tokenizer(base.name)
    inputs = tokenized(tokenizer, prompt, options.chat)
    check_length(inputs, sampling, loading.load_model_config(base.name), base.name)
    device = loading.device_named(options.device)
    console = make_console()
    quiet(make_console(stderr=True))  # only texts go to stdout
    dtype = WEIGHT_DTYPES[hardware.resolve_precision(None, hardware.detect(device.type))]
    frozen = loading.load_model(base, dtype, device=device).to(device)
    model = peft.PeftModel.from_pretrained(frozen, adapter.folder).eval()

    def of_base(sink: Callable[[str], None]) -> None:
        with model.disable_adapter():
            stream(model.get_base_model(), tokenizer, inputs, sampling, sink)

    def of_adapter(sink: Callable[[str], None]) -> None:
        stream(model.get_base_model(), tokenizer, inputs, sampling, sink)

    texts = {f"base: {base.name}": of_base, f"adapter: {options.run}": of_adapter}
    show = beside if console.is_terminal and console.width >= LEAST_WIDTH else one_after_another
    show(texts, console)
    return 0


def read_prompt(text: str | None, file: str | None) -> str:
    """The prompt, from whichever of the three places it was given in.

    Raises:
        UserError: none, two, an empty one, or a file that cannot be read.
    """
    if text is not None and file is not None:
        raise UserError("--prompt and --prompt-file exclude each other; give one of them")
    if text is None and file is None and sys.stdin.isatty():
        raise UserError("--prompt: give the text to go on with, --prompt-file, or text on standard input")
    flag = "--prompt" if text is not None else f"--prompt-file {file}" if file is not None else "standard input"
    try:
        if file is not None:
            text = Path(file).expanduser().read_text(encoding="utf-8")
        elif text is None:
            text = sys.stdin.buffer.read().decode()
        text.encode()  # bytes of the command line that are no UTF-8 are found out only here
    except OSError as error:
        raise UserError(f"{flag}: cannot be read ({error.strerror})") from error
    except UnicodeError as error:
        raise UserError(f"{flag}: is not UTF-8 text") from error
    if not text.strip():
        raise UserError(f"{flag}: the text is empty")
    return text.removesuffix("\n") if file is not None or flag == "standard input" else text


def tokenized(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool) -> dict[str, torch.Tensor]:
    """``input_ids`` and ``attention_mask`` of a prompt, (1, time) each.

    Raises:
        UserError: a chat with a model that has no template for one.
    """
    if not chat:
        return dict(tokenizer(prompt, return_tensors="pt"))
    if not tokenizer.chat_template:
        raise UserError("--chat: the model's tokenizer has no chat template; leave it out")
    turn = [{"role": "user", "content": prompt}]
    return dict(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True, return_tensors="pt"))


def check_length(inputs: dict[str, torch.Tensor], sampling: Sampling, config: Any, name: str) -> None:
    """Refuse more tokens than the model has positions for. Raises UserError."""
    length, most = inputs["input_ids"].shape[1], getattr(config, "max_position_embeddings", None)
    if most and length + sampling.max_new_tokens > most:
        raise UserError(
            f"--max-new-tokens {sampling.max_new_tokens}: with a prompt of {length:,} tokens more than the "
            f"{most:,} that {name} can read; shorten either"
        )


class _Pieces(TextStreamer):
    """Hands on the new text in pieces, without prompt and special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sink: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.sink = sink

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.sink(text)


def stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, torch.Tensor],
    sampling: Sampling,
    sink: Callable[[str], None],
) -> torch.Tensor:
    """Go on with a prompt, and hand each piece of text to ``sink`` as it comes.

    Returns:
        Prompt and continuation, (1, time).
    """
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p or 1.0, "top_k": 0}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    torch.manual_seed(sampling.seed)
    return model.generate(
        **{name: tensor.to(model.device) for name, tensor in inputs.items()},
        max_new_tokens=sampling.max_new_tokens,
        do_sample=sampling.temperature > 0,
        **(drawn if sampling.temperature > 0 else {}),
        pad_token_id=pad,
        streamer=_Pieces(tokenizer, sink),
    )


Texts = dict[str, Callable[[Callable[[str], None]], None]]
"""What writes each text, by its heading: it is given where the pieces go."""


def beside(texts: Texts, console: Console) -> None:
    """Show texts in columns of a terminal; while they grow only what fits, in the end the whole."""
    grown = dict.fromkeys(texts, "")

    def columns() -> Table:
        table = Table(*(Column(Text(heading), ratio=1) for heading in grown), expand=True)
        table.add_row(*map(Text, grown.values()))
        return table

    with Live(console=console, auto_refresh=False, transient=True) as live:
        for heading, write in texts.items():

            def sink(piece: str, heading: str = heading) -> None:
                grown[heading] += piece
                live.update(columns(), refresh=True)

            write(sink)
    console.print(columns())


def one_after_another(texts: Texts, console: Console) -> None:
    """Write texts as they come, below their headings: into a file or pipe, or where columns would be too narrow."""
    for number, (heading, write) in enumerate(texts.items()):
        print(f"{chr(10) if number else ''}{heading}", flush=True)
        write(lambda piece: print(piece, end="", flush=True))
        print()
