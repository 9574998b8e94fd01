"""A conversation with a model: its turns, and the next answer to them."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from granite_scu.config.errors import UserError
from granite_scu.config.sampling import Sampling
from granite_scu.data.tokens.special_tokens import ReadAs
from granite_scu.evaluation.generate import stream, tokenized_chat


class ConversationFull(UserError):
    """The model has no positions left for a question and its answer."""


class Conversation:
    """The turns of one conversation, within the length that the model can read.

    Args:
        tokenizer: of the model, with a chat template.
        most: tokens that the model can read; None where nothing limits it.
        name: of the model, for messages.
        control_tokens: what becomes of those in a question.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, most: int | None, name: str, control_tokens: ReadAs = "text"
    ) -> None:
        self.tokenizer, self.most, self.name, self.control_tokens = tokenizer, most, name, control_tokens
        self.turns: list[dict[str, str]] = []

    def inputs(self, question: str, new_tokens: int) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``attention_mask`` of all turns and the next question, (1, time) each.

        Raises:
            ConversationFull: with an answer of ``new_tokens`` they are longer than the model can read.
        """
        turns = [*self.turns, {"role": "user", "content": question}]
        inputs = tokenized_chat(self.tokenizer, turns, self.control_tokens)
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
