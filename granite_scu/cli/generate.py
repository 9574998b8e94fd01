"""``granite-scu generate``: what base model and adapter make of the same prompt, side by side, as it comes."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from granite_scu.cli import script_flags
from granite_scu.cli.argument_parser import path
from granite_scu.cli.console import make_console, quiet
from granite_scu.config.errors import UserError
from granite_scu.config.sampling import Sampling
from granite_scu.config.settings import DataConfig, check_system, share
from granite_scu.data.sources.files import unix
from granite_scu.model.adapter_files import require_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from granite_scu.evaluation.generate import Conversation, Texts
    from granite_scu.model.adapters import Switch

EXAMPLES = (
    'runs/mine --prompt "def add(a, b):"',
    'runs/mine --chat --prompt "What is a walrus?"',
    "runs/mine --chat",
    "runs/mine --prompt-file draft.txt --temperature 0",
)


MAX_BYTES = 10_000_000
"""Of a prompt."""

RESET = "/reset"
"""A line that begins a new conversation."""

KEPT = f"each line is a question, and what was said before is kept; {RESET} starts over"

COMMONEST = ("--prompt", "--prompt-file", "--chat", "--max-new-tokens", "--temperature", "--model")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    parser.add_argument("run", metavar="RUN", type=path, help="run folder, its final/ or a checkpoint of it, or any "
                        "LoRA adapter")  # fmt: skip
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue (default: standard input)")
    parser.add_argument("--prompt-file", metavar="FILE", help="file that holds the text")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="put the text into the model's chat template; without a "
        "prompt a conversation, in which each line of the terminal or of a pipe is a question, and what was said "
        "before is kept; a line /reset starts over",
    )
    script_flags.add_template(parser)
    parser.add_argument("--system", type=check_system, metavar="TEXT", help="system prompt of the chat (default: that "
                        "of the run)")  # fmt: skip
    parser.add_argument("--max-new-tokens", type=int, default=Sampling.max_new_tokens, metavar="N",
                        help="tokens to add at most (default: %(default)s)")  # fmt: skip
    parser.add_argument("--temperature", type=float, default=Sampling.temperature, metavar="T",
                        help="of the draws; 0 chooses the likeliest token (default: %(default)s)")  # fmt: skip
    parser.add_argument("--top-p", type=share, metavar="P", help="draw from the likeliest tokens that have this "
                        "probability together (default: from all)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=Sampling.seed, metavar="N", help="of the draws, the same for both "
                        "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--model", metavar="NAME", help="base model (default: the one that the adapter names)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")


def run(options: argparse.Namespace) -> int:
    """Carry the command out; returns the exit code."""
    require_adapter(options.run, str(options.run))
    _check_chat(options)
    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p, options.seed)
    talking = options.chat and options.prompt is None and options.prompt_file is None
    prompt = "" if talking else read_prompt(options.prompt, options.prompt_file)
    # Late: torch takes seconds, and a wrong flag is refused without it.
    from granite_scu.data.tokens import templates
    from granite_scu.evaluation import generate
    from granite_scu.hardware import detection, machine
    from granite_scu.model import base_digest, loading, saved_adapter
    from granite_scu.model.adapters import load_adapted

    adapter = saved_adapter.find(options.run)
    base = saved_adapter.base_of(adapter, options.model)
    adapter.updates(base.name)  # proves that it fits
    own = templates.saved_in(*adapter.tokenizer_places)
    tokenizer = templates.with_template(loading.load_tokenizer(base.name), own)
    tokenizer = templates.chosen(tokenizer, options.chat_template, options.chat_template_args, options.system or "")
    read_as = adapter.training.get("data", {}).get("control_tokens", DataConfig.control_tokens)
    inputs = generate.tokenized(tokenizer, prompt, options.chat, read_as)
    most = loading.max_positions(loading.load_model_config(base.name))
    generate.check_length(inputs["input_ids"].shape[1], options.max_new_tokens, most, base.name)
    device = loading.device_named(options.device)
    console = make_console()
    quiet(make_console(stderr=True))  # only texts go to stdout
    dtype = loading.WEIGHT_DTYPES[machine.resolve_precision(None, detection.detect(device.type))]
    model, switches = load_adapted(base, {adapter.label: adapter.folder}, dtype, device)
    base_digest.check(adapter.training, adapter.label, base.name, refuse=False)

    wide = console.is_terminal and console.width >= generate.MIN_WIDTH
    show = partial(generate.print_side_by_side if wide else generate.print_in_turn, console=console)
    named = dict(zip((f"base: {base.name}", f"adapter: {options.run}"), switches, strict=True))
    if talking:
        kept = {heading: generate.Conversation(tokenizer, most, base.name, read_as) for heading in named}
        _hold(kept, model, named, sampling, show)
    else:
        write = partial(generate.stream, model, tokenizer, inputs, sampling)
        show({heading: partial(_under, switch, write) for heading, switch in named.items()})
    return 0


def _check_chat(options: argparse.Namespace) -> None:
    """Refuse what says how a question is put where none is. Raises UserError."""
    script_flags.check_template(options)
    for flag in ("--chat-template", "--chat-template-args", "--system"):
        if getattr(options, flag.removeprefix("--").replace("-", "_")) and not options.chat:
            raise UserError(f"{flag}: is for a question; give --chat, or leave it out")


def _under(switch: "Switch", write: Callable[[Callable[[str], None]], object], sink: Callable[[str], None]) -> None:
    """Write with the adapter on or off."""
    with switch():
        write(sink)


def _hold(
    conversations: "dict[str, Conversation]",
    model: "PreTrainedModel",
    switches: "dict[str, Switch]",
    sampling: Sampling,
    show: "Callable[[Texts], None]",
) -> None:
    """Hold a conversation with base and adapter, which may answer differently.

    Args:
        conversations: by heading.
        model: answers.
        switches: by heading, the adapter on or off.
        sampling: of the answers.
        show: writes them.
    """

    def ask(question: str) -> None:
        for conversation in conversations.values():  # none answers where one is full
            conversation.inputs(question, sampling.max_new_tokens)
        answers = {name: partial(each.answer, model, question, sampling) for name, each in conversations.items()}
        show({name: partial(_under, switches[name], answer) for name, answer in answers.items()})

    converse(ask, reset=lambda: [conversation.turns.clear() for conversation in conversations.values()])


def read_prompt(text: str | None, file: str | None) -> str:
    """The prompt, from whichever of the three places it was given in.

    Raises:
        UserError: none, two, an empty one, or a file that cannot be read.
    """
    if text is not None and file is not None:
        raise UserError("--prompt and --prompt-file exclude each other; give one of them")
    if text is None and file is None and sys.stdin.isatty():
        raise UserError("--prompt: give the text to continue, --prompt-file, or text on standard input")
    flag = "--prompt" if text is not None else f"--prompt-file {file}" if file is not None else "standard input"
    try:
        if file is not None:
            with Path(file).expanduser().open("rb") as given:
                text = given.read(MAX_BYTES + 1).decode()
        elif text is None:
            text = sys.stdin.buffer.read(MAX_BYTES + 1).decode()
        else:
            text = os.fsencode(text).decode()  # whatever the locale made of the bytes of the command line
    except OSError as error:
        raise UserError(f"{flag}: cannot be read ({error.strerror})") from error
    except UnicodeError as error:
        raise UserError(f"{flag}: is not UTF-8 text") from error
    if len(text) > MAX_BYTES:
        raise UserError(f"{flag}: has more than {MAX_BYTES:,} characters, which no model reads; shorten it")
    if not text.strip():
        raise UserError(f"{flag}: the text is empty")
    text = unix(text)
    return text.removesuffix("\n") if file is not None or flag == "standard input" else text


def converse(ask: Callable[[str], None], reset: Callable[[], object]) -> None:
    """Ask what a terminal or pipe says, line by line.

    Args:
        ask: answers a question.
        reset: forgets what was said.

    Raises:
        UserError: a pipe without a question, with text that is not UTF-8, or with more than one conversation holds.
    """
    from granite_scu.evaluation.generate import ConversationFull  # late: torch

    typed = sys.stdin.isatty()
    for number, question in _typed() if typed else _piped():
        if question.strip() == RESET:
            reset()
            continue
        if not typed:
            print(f"> {question}", flush=True)
        try:
            ask(question)
            print()
        except ConversationFull as error:
            if not typed:
                raise UserError(f"standard input, line {number}: {error}") from error
            print(error, file=sys.stderr)


def _typed() -> Iterator[tuple[int, str]]:
    """The lines of a terminal up to an empty one."""
    print(f"{KEPT}; an empty line or Ctrl-D ends", file=sys.stderr)
    with suppress(ImportError):
        import readline  # noqa: F401 (arrow keys in ``input``)
    number = 0
    with suppress(EOFError):
        while (line := input("> ")).strip():
            number += 1
            yield number, line


def _piped() -> Iterator[tuple[int, str]]:
    """The lines of a pipe that are not empty, each with its number."""
    found = False
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            question = line.decode().rstrip("\r\n")
        except UnicodeError as error:
            raise UserError(f"standard input, line {number}: is not UTF-8 text") from error
        if question.strip():
            if not found:
                print(KEPT, file=sys.stderr, flush=True)
            found = True
            yield number, question
    if not found:
        raise UserError("standard input: the text is empty")
