"""A tokenizer whose tokens can be read: a byte's id is its value, then <|end_of_text|> 256 and <|pad|> 257."""

import copy

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

GRANITE = (
    "{%- for message in messages %}{%- if message.role != 'tool' %}"
    "{{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function.name }}{%- endfor %}"
    "{{- '<|end_of_text|>\n' }}{%- else %}{%- if messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|start_of_role|>user<|end_of_role|>' }}{%- endif %}{{- '<tool_response>' + message.content }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|end_of_text|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
)
"""In the manner of Granite 4's: no generation tags, a line end behind every turn, tool answers in one turn."""


@pytest.fixture
def chatting(tokenizer) -> PreTrainedTokenizerFast:
    """The same tokenizer with a chat template in the manner of Granite's, and its marks as tokens 258 and 259."""
    found = copy.deepcopy(tokenizer)
    found.add_special_tokens({"additional_special_tokens": ["<|start_of_role|>", "<|end_of_role|>"]})
    found.chat_template = GRANITE
    return found


@pytest.fixture
def written_as(tokenizer):
    """The tokenizer with the template and control tokens of a form of ``chat_forms``."""
    return lambda form: form.given_to(copy.deepcopy(tokenizer))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level without merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    vocabulary = {letter: byte for byte, letter in letters.items()} | {"<|end_of_text|>": 256, "<|pad|>": 257}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|end_of_text|>", eos_token="<|end_of_text|>", pad_token="<|pad|>"
    )
