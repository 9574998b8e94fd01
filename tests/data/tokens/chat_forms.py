"""Chat templates that lay out a chat as the published ones of their families do, in words of our own."""

from typing import NamedTuple

from transformers import PreTrainedTokenizerFast


class Form(NamedTuple):
    """A family's way to write a chat.

    Attributes:
        template: in Jinja.
        special: control tokens, with ids from 258 on.
        eos: that ends a turn.
    """

    template: str
    special: tuple[str, ...]
    eos: str

    def given_to(self, tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
        """The tokenizer, changed: with this template and its tokens."""
        tokenizer.add_special_tokens({"additional_special_tokens": list(self.special)})
        tokenizer.eos_token, tokenizer.chat_template = self.eos, self.template
        return tokenizer


def _turns(*lines: str) -> str:
    return "".join(line.strip() for line in "\n".join(lines).splitlines())


_ROLES = ("<|start_of_role|>", "<|end_of_role|>")
_CHATML = ("<|im_start|>", "<|im_end|>")
_LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>")

GRANITE_3 = Form(
    _turns(
        "{%- if messages[0].role != 'system' -%}",
        "{{- '<|start_of_role|>system<|end_of_role|>Today is ' + strftime_now('%d.%m.%Y') }}",
        "{%- if thinking %}{{- ' Think first.' }}{% endif %}{{- '<|end_of_text|>\\n' }}{%- endif -%}",
        "{%- for m in messages %}{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content }}",
        "{{- '<|end_of_text|>\\n' }}{%- endfor -%}",
        "{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}",
    ),
    _ROLES,
    "<|end_of_text|>",
)
"""A system turn with the day's date where there is none, thoughts never shown."""

GRANITE_4 = Form(
    _turns(
        "{%- if tools %}{{- '<|start_of_role|>system<|end_of_role|><tools>' }}",
        "{%- for t in tools %}{{- '\\n' + t | tojson }}{% endfor %}{{- '\\n</tools><|end_of_text|>\\n' }}{% endif -%}",
        "{%- for m in messages %}",
        "{%- if m.role == 'tool' %}",
        "{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|start_of_role|>user<|end_of_role|>' }}{% endif %}",
        "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}",
        "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|end_of_text|>\\n' }}{% endif %}",
        "{%- else %}{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + (m.content or '') }}",
        "{%- for c in m.tool_calls or [] %}",
        '{{- \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}',
        "{{- c.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{% endfor %}",
        "{{- '<|end_of_text|>\\n' }}{% endif %}{%- endfor -%}",
        "{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}",
    ),
    _ROLES,
    "<|end_of_text|>",
)
"""Tools in the system turn, calls as JSON, answers of tools together in a turn of the user's."""

_LAST_QUESTION = _turns(
    "{%- set at = namespace(question=-1) %}",
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set at.question = loop.index0 %}{% endif %}{% endfor -%}",
)

_SPLIT = _turns(
    "{%- set thought = m.reasoning_content or '' %}{%- set said = m.content or '' %}",
    "{%- if not thought and '</think>' in said %}",
    "{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}",
    "{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}",
)

_CALLS = _turns(
    "{%- for c in m.tool_calls or [] %}{{- '<tool_call>' + c.function.name + ' ' }}",
    "{{- c.function.arguments | tojson }}{{- '</tool_call>' }}{% endfor %}",
)

GRANITE_42 = Form(
    _turns(
        _LAST_QUESTION,
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}",
        "{%- if m.role == 'assistant' %}",
        _SPLIT,
        "{%- if thought and loop.index0 > at.question %}{{- '<think>\\n' + thought + '\\n</think>\\n' }}{% endif %}",
        "{{- said | trim }}",
        _CALLS,
        "{%- else %}{{- m.content }}{% endif %}{{- '<|im_end|>\\n' }}{% endfor -%}",
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}",
        "{%- if enable_thinking is not defined or enable_thinking %}{{- '<think>\\n' }}{% endif %}{% endif %}",
    ),
    _CHATML,
    "<|im_end|>",
)
"""Invites a thought, and shows those alone that follow the last question."""

NEMOTRON_3 = Form(
    _turns(
        "{%- set keep = truncate_history_thinking is defined and not truncate_history_thinking %}",
        _LAST_QUESTION,
        "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\n<|im_end|>\\n' }}{% endif -%}",
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}",
        "{%- if m.role == 'assistant' %}",
        _SPLIT,
        "{%- if thought and (keep or loop.index0 > at.question) %}{{- '<think>\\n' + thought + '\\n</think>\\n' }}",
        "{%- else %}{{- '<think></think>' }}{% endif %}{{- said | trim }}",
        _CALLS,
        "{%- else %}{{- m.content }}{% endif %}{{- '<|im_end|>\\n' }}{% endfor -%}",
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}",
        "{%- if enable_thinking is not defined or enable_thinking %}{{- '<think>\\n' }}",
        "{%- else %}{{- '<think></think>' }}{% endif %}{% endif %}",
    ),
    _CHATML,
    "<|im_end|>",
)
"""A system turn always, an empty thought where none is shown, and an argument that keeps earlier ones."""

QWEN_3 = Form(
    _turns(
        _LAST_QUESTION,
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}",
        "{%- if m.role == 'assistant' %}",
        _SPLIT,
        "{%- if loop.index0 > at.question and (loop.last or thought) %}",
        "{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + said.lstrip('\\n') }}",
        "{%- else %}{{- said }}{% endif %}",
        _CALLS,
        "{%- else %}{{- m.content }}{% endif %}{{- '<|im_end|>\\n' }}{% endfor -%}",
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}",
        "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
        "{% endif %}",
    ),
    _CHATML,
    "<|im_end|>",
)
"""Has the model begin its thought itself, and shows an empty one in the last answer."""

LLAMA_3 = Form(
    _turns(
        "{%- for m in messages %}{%- if loop.first %}{{- '<|begin_of_text|>' }}{% endif %}",
        "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}",
        "{%- endfor -%}",
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    ),
    _LLAMA,
    "<|eot_id|>",
)
"""Contents without white space around them, no line end behind a turn."""

_ANSWERS = _turns(
    "{%- if m.role == 'tool' %}",
    "{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}",
    "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}",
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}",
)

HERMES = Form(
    _turns(
        "{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}",
        "{%- for t in tools %}{{- '\\n' + t | tojson }}{% endfor %}{{- '\\n</tools><|im_end|>\\n' }}{% endif -%}",
        "{%- for m in messages %}",
        _ANSWERS,
        "{%- else %}{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.content %}{{- m.content }}{% endif %}",
        "{%- for c in m.tool_calls %}{%- if c.function is defined %}{%- set c = c.function %}{% endif %}",
        '{{- \'<tool_call>\\n{"name": "\' + c.name + \'", "arguments": \' }}{{- c.arguments | tojson }}',
        "{{- '}\\n</tool_call>' }}{% endfor %}{{- '<|im_end|>\\n' }}{% endif %}{% endfor -%}",
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}",
    ),
    _CHATML,
    "<|im_end|>",
)
"""Of Hermes 2 Pro and Qwen 2.5: writes arguments as JSON whatever they are."""

QWEN_3_CALLS = Form(
    HERMES.template.replace(
        "{{- c.arguments | tojson }}",
        "{%- if c.arguments is string %}{{- c.arguments }}{%- else %}{{- c.arguments | tojson }}{% endif %}",
    ),
    _CHATML,
    "<|im_end|>",
)
"""Takes arguments as text and as an object."""

LLAMA_31 = Form(
    _turns(
        "{{- '<|begin_of_text|>' }}{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}",
        "{%- for t in tools %}{{- t | tojson }}{% endfor %}{{- '<|eot_id|>' }}{% endif -%}",
        "{%- for m in messages %}",
        "{%- if 'tool_calls' in m %}",
        "{%- if m.tool_calls | length != 1 %}{{- raise_exception('single tool-calls only') }}{% endif %}",
        "{%- set c = m.tool_calls[0].function %}",
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}",
        "{{- '{\"name\": \"' + c.name + '\", \"parameters\": ' }}{{- c.arguments | tojson }}{{- '}<|eot_id|>' }}",
        "{%- elif m.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}",
        "{{- (m.content if m.content is string else m.content | tojson) + '<|eot_id|>' }}",
        "{%- else %}",
        "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}",
        "{%- endif %}{%- endfor -%}",
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    ),
    _LLAMA,
    "<|eot_id|>",
)
"""One call a turn, and nothing said beside it."""

DEEPSEEK_3 = Form(
    _turns(
        "{%- for m in messages %}{%- if m.role == 'user' %}{{- '<U>' + m.content }}{% endif %}",
        "{%- if m.role == 'tool' %}{{- '<R>' + m.content + '</R>' }}{% endif %}",
        "{%- if m.role == 'assistant' %}{{- '<A>' + m.content }}{%- for c in m.tool_calls %}",
        "{{- '<C>' + c.function.name + '\\n' + c.function.arguments + '</C>' }}{% endfor %}",
        "{{- '<|end|>' }}{% endif %}{%- endfor -%}{%- if add_generation_prompt %}{{- '<A>' }}{% endif %}",
    ),
    ("<U>", "<A>", "<C>", "</C>", "<R>", "</R>", "<|end|>"),
    "<|end|>",
)
"""Puts texts behind one another, arguments among them."""

FORMS = {
    "granite 3": GRANITE_3,
    "granite 4": GRANITE_4,
    "granite 4.2": GRANITE_42,
    "nemotron 3": NEMOTRON_3,
    "qwen 3": QWEN_3,
    "llama 3": LLAMA_3,
}
