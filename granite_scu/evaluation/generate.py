"""What several models make of the same prompt, side by side or one after the other, as it comes."""

import logging
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from granite_scu.config.errors import UserError
from granite_scu.config.sampling import Sampling
from granite_scu.config.untrusted_input import printable
from granite_scu.data.blocks.packing import padding_of
from granite_scu.data.tokens.chat import Renderer
from granite_scu.data.tokens.encoding import beginning, require_known, token_ids
from granite_scu.data.tokens.special_tokens import ReadAs
from granite_scu.evaluation.answers import PLAIN, ends_of

log = logging.getLogger(__name__)

MIN_WIDTH = 80
"""Columns of a terminal from which on two texts are readable beside one another."""


def tokenized(
    tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool, special_tokens: ReadAs = "text"
) -> dict[str, torch.Tensor]:
    """``input_ids`` and ``attention_mask`` of a prompt, (1, time) each. It begins as a document that is trained on.

    Args:
        tokenizer: of the model.
        prompt: the text or question; its control tokens act unless it is a chat.
        chat: put it into the chat template.
        special_tokens: what becomes of those in a question.

    Raises:
        UserError: a chat with a model that has no template for one, or whose template refuses it.
    """
    if not chat:
        return _inputs([*beginning(tokenizer), *tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    return tokenized_chat(tokenizer, [{"role": "user", "content": prompt}], special_tokens)


def tokenized_chat(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[dict[str, str]], special_tokens: ReadAs = "text"
) -> dict[str, torch.Tensor]:
    """As ``tokenized``, of a chat that ends with a question."""
    rendered = Renderer(tokenizer, special_tokens=special_tokens).prompt(turns)
    if rendered.n_control:
        counts = rendered.n_control, rendered.first_control, special_tokens
        log.warning("--chat: control tokens in the question: %d, the first is %s; they are read as %s", *counts)
    return _inputs(token_ids(rendered.text, tokenizer, rendered.written))


def _inputs(tokens: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([tokens])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def check_length(length: int, new_tokens: int, most: int | None, name: str) -> None:
    """Refuse more tokens than ``most``, what a model can read. Raises UserError."""
    if most and length + new_tokens > most:
        raise UserError(
            f"--max-new-tokens {new_tokens}: with a prompt of {length:,} tokens more than the "
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
    """Continue a prompt, and hand each piece of text to ``sink`` as it comes.

    Returns:
        Prompt and continuation, (1, time).

    Raises:
        UserError: the prompt has a token that the model does not have.
    """
    rows, name = len(model.get_input_embeddings().weight), model.name_or_path
    require_known(inputs["input_ids"].flatten().numpy(), tokenizer, rows, name)
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p or 1.0, "top_k": 0}
    if sampling.temperature > 0:
        torch.manual_seed(sampling.seed)
    return model.generate(
        **{name: tensor.to(model.device) for name, tensor in inputs.items()},
        **PLAIN,
        eos_token_id=ends_of(model, tokenizer, []),
        max_new_tokens=sampling.max_new_tokens,
        do_sample=sampling.temperature > 0,
        **(drawn if sampling.temperature > 0 else {}),
        pad_token_id=padding_of(tokenizer, rows),
        streamer=_Pieces(tokenizer, sink),
    )


Texts = dict[str, Callable[[Callable[[str], None]], None]]
"""What writes each text, by its heading: it is given where the pieces go."""


def print_side_by_side(texts: Texts, console: Console) -> None:
    """Show texts in columns of a terminal; while they grow only what fits, in the end the whole."""
    grown = dict.fromkeys(texts, "")

    def columns() -> Table:
        table = Table(*(Column(Text(heading), ratio=1) for heading in grown), expand=True)
        table.add_row(*(Text(printable(text)) for text in grown.values()))
        return table

    with Live(console=console, auto_refresh=False, transient=True) as live:
        for heading, write in texts.items():

            def sink(piece: str, heading: str = heading) -> None:
                grown[heading] += piece
                live.update(columns(), refresh=True)

            write(sink)
    console.print(columns())


def print_in_turn(texts: Texts, console: Console) -> None:
    """Write texts as they come, below their headings: into a file or pipe, or where columns would be too narrow."""
    for number, (heading, write) in enumerate(texts.items()):
        print(f"{chr(10) if number else ''}{heading}", flush=True)
        write(lambda piece: print(printable(piece), end="", flush=True))
        print()


class ConversationFull(UserError):
    """The model has no positions left for a question and its answer."""


class Conversation:
    """The turns of one conversation, within the length that the model can read.

    Args:
        tokenizer: of the model, with a chat template.
        most: tokens that the model can read; None where nothing limits it.
        name: of the model, for messages.
        special_tokens: what becomes of those in a question.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, most: int | None, name: str, special_tokens: ReadAs = "text"
    ) -> None:
        self.tokenizer, self.most, self.name, self.special_tokens = tokenizer, most, name, special_tokens
        self.turns: list[dict[str, str]] = []

    def inputs(self, question: str, new_tokens: int) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``attention_mask`` of all turns and the next question, (1, time) each.

        Raises:
            ConversationFull: with an answer of ``new_tokens`` they are longer than the model can read.
        """
        turns = [*self.turns, {"role": "user", "content": question}]
        inputs = tokenized_chat(self.tokenizer, turns, self.special_tokens)
        length = inputs["input_ids"].shape[1]
        if self.most and length + new_tokens > self.most:
            raise ConversationFull(
                f"the conversation is full: {length:,} tokens and an answer of up to {new_tokens:,} are more than the "
                f"{self.most:,} that {self.name} can read; begin a new one with /reset, or lower --max-new-tokens"
            )
        return inputs

    def answer(self, model: PreTrainedModel, question: str, sampling: Sampling, sink: Callable[[str], None]) -> None:
        """Ask, hand the answer on in pieces as it comes, and keep both turns."""
        inputs = self.inputs(question, sampling.max_new_tokens)
        found = stream(model, self.tokenizer, inputs, sampling, sink)[0, inputs["input_ids"].shape[1] :]
        answer = self.tokenizer.decode(found, skip_special_tokens=True)
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
