"""Which chat template a tokenizer uses: its own, a file's, or the one that was saved with a run.

A template is a program in Jinja. It runs in transformers' sandbox wherever it came from.
"""

import hashlib
import json
from collections.abc import Sequence
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from granite_scu.config.errors import UserError
from granite_scu.config.settings import DataConfig
from granite_scu.config.untrusted_input import parse_json
from granite_scu.data.sources.documents import SYSTEM_ROLES
from granite_scu.data.tokens.chat import Renderer
from granite_scu.data.tokens.special_tokens import SpecialTokens
from granite_scu.storage.run_folder import NAMED_TEMPLATES, read_if_there

FLAG, ARGUMENTS_FLAG, SYSTEM_FLAG = "--chat-template", "--chat-template-args", "--system"

FILE = "chat_template.jinja"
"""Where ``save_pretrained`` writes a template."""

SETTINGS = "tokenizer_config.json"
"""Where older versions of it write them."""

_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
"""What a template has from whoever renders a chat, and so no argument; neither are the special tokens."""

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "null": None, "none": None}
"""Values that are no texts, however they are capitalised: a template would take the text "no" for a yes."""

Template = str | dict[str, str]
"""One template, or several by name, as transformers has them."""


def chosen(
    tokenizer: PreTrainedTokenizerBase,
    template: str | None = None,
    arguments: Sequence[str] | None = None,
    system: str = "",
) -> PreTrainedTokenizerBase:
    """The tokenizer with the template that is asked for.

    Args:
        tokenizer: of the model.
        template: a file, or the name of one of the tokenizer's own templates; None takes its own.
        arguments: ``name=value`` each. They become the template's defaults, so that they are saved with it.
        system: prompt of chats that bring none; it becomes part of the template too.

    Raises:
        UserError: neither a file nor a name, a template that is no Jinja, an argument that the template does not know,
            or a system prompt that it has no place for.
    """
    own = tokenizer.chat_template
    found = own if template is None else _found(template, own)
    if arguments:
        if not found:
            raise UserError(f"{ARGUMENTS_FLAG} {arguments[0]}: the model has no chat template; give one by {FLAG} FILE")
        found = _each(found, lambda text: _with_defaults(text, _values(arguments, found)))
    if not system:
        return with_template(tokenizer, found)
    if not found:
        raise UserError(f"{SYSTEM_FLAG}: the model has no chat template to put it into; give one by {FLAG} FILE")
    asked = with_template(tokenizer, _each(found, lambda text: _with_system(text, system)))
    _check_system(tokenizer, asked, system)
    return asked


def with_template(tokenizer: PreTrainedTokenizerBase, template: Template | None) -> PreTrainedTokenizerBase:
    """The same tokenizer with another template; None leaves its own."""
    if template is None or template == tokenizer.chat_template:
        return tokenizer
    other = copy(tokenizer)
    other.chat_template = template
    return other


def of_data(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> PreTrainedTokenizerBase:
    """The tokenizer with the template that the settings of a run ask for. Raises UserError as ``chosen``."""
    return chosen(tokenizer, config.chat_template, config.chat_template_args, config.system)


def saved_in(*folders: Path) -> Template | None:
    """The template that ``save_pretrained`` has left in the first of the folders that has one; None where none has.

    Raises:
        UserError: it cannot be read, or is no Jinja.
    """
    for folder in folders:
        files = {"default": folder / FILE} if (folder / FILE).is_file() else {}
        files |= {path.stem: path for path in sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))}
        found = {name: _read(path, str(path)) for name, path in files.items()}
        if found := found or _in_settings(folder / SETTINGS):
            return found["default"] if found.keys() == {"default"} else found
    return None


def checksum(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of its template, 16 hexadecimal digits; "none" where it has none."""
    template = tokenizer.chat_template
    return hashlib.sha256(json.dumps(template).encode()).hexdigest()[:16] if template else "none"


def _found(template: str, own: Template | None) -> str:
    names = own if isinstance(own, dict) else {}
    if template in names:
        return names[template]
    path = Path(template).expanduser()
    if not path.is_file():
        known = f" (it has {', '.join(names)})" if names else ""
        raise UserError(
            f"{FLAG} {template}: no such file, and the model has no template of that name{known}; name a file that "
            "holds a chat template"
        )
    return _read(path, f"{FLAG} {template}")


def _in_settings(file: Path) -> dict[str, str]:
    """The templates in a tokenizer's settings by name: one text there, or a list of texts with names."""
    kept = read_if_there(file).get("chat_template") or []
    try:
        texts = {"default": kept} if isinstance(kept, str) else {each["name"]: each["template"] for each in kept}
        return {name: _checked(text, f"{file}: chat_template {name}") for name, text in texts.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"{file}: its chat_template is neither a text nor a list of named texts; copy it again"
        ) from error


def _read(path: Path, label: str) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{label}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{label}: is not UTF-8 text; give a Jinja template") from error
    return _checked(text, label)


def _checked(text: str, label: str) -> str:
    if not text.strip():
        raise UserError(f"{label}: is empty; give a Jinja template")
    try:
        _environment().compile(text)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{label}:{error.lineno}: is no Jinja template ({error.message}); correct it") from error
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:  # what Python does not compile
        raise UserError(f"{label}: is too large or too deep for a Jinja template ({error}); shorten it") from error
    return text


class _Generation(jinja2.ext.Extension):
    """The tag around what the assistant says, which is transformers' own."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def _environment() -> jinja2.Environment:
    """What reads a template as transformers does. Nothing is rendered here."""
    return ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        optimized=False,  # which would compute what is constant, however large
    )


def _each(template: Template, change: Any) -> Template:
    return {name: change(text) for name, text in template.items()} if isinstance(template, dict) else change(template)


def _values(arguments: Sequence[str], template: Template) -> dict[str, Any]:
    """The arguments by name. Raises UserError for one that no template of these knows."""
    texts = template.values() if isinstance(template, dict) else [template]
    known = sorted({name for text in texts for name in _arguments_of(text)})
    found = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in known:
            words = f"the template knows {', '.join(known)}" if known else "the template takes none"
            raise UserError(f"{ARGUMENTS_FLAG} {argument}: the chat template has no argument {name}; {words}")
        found[name] = _value(value)
    return found


def _arguments_of(template: str) -> set[str]:
    """What a template reads and nobody else gives it.

    A name that it gives a value itself is one only where it asks whether somebody else has.
    """
    tree = _environment().parse(template)
    names, tests = tree.find_all(jinja2.nodes.Name), tree.find_all(jinja2.nodes.Test)
    own = {name.name for name in names if name.ctx == "store"}
    asked = {test.node.name for test in tests if test.name == "defined" and isinstance(test.node, jinja2.nodes.Name)}
    read = jinja2.meta.find_undeclared_variables(tree) - _GIVEN - _environment().globals.keys() - (own - asked)
    return {name for name in read if not name.endswith("_token")}


def _value(text: str) -> Any:
    """true, 3, "text" or [1, 2] as JSON has them, yes, off and None as YAML and Python; anything else is a text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return parse_json(text, parse_constant=str)
    except ValueError:
        return text


def _with_defaults(template: str, values: dict[str, Any]) -> str:
    """The template with defaults of its arguments, which whoever renders it may still override.

    On a line of their own, whose end Jinja drops, so that the template's first line is a first line still.
    """
    tags = (f"{{%- set {name} = {name} if {name} is defined else {value!r} %}}" for name, value in values.items())
    return f"{''.join(tags)}\n{template}"


def _with_system(template: str, system: str) -> str:
    """The template with a system turn before chats that begin without one, on a line of its own as defaults are.

    The text stands there as JSON has it, which Jinja reads alike, and holds no tag that somebody might look for.
    """
    text = json.dumps(system, ensure_ascii=False).replace("{%", "{\\u0025")
    line = (
        f"{{%- if not messages or messages[0]['role'] not in {list(SYSTEM_ROLES)} %}}"
        f"{{%- set messages = [{{'role': 'system', 'content': {text}}}] + messages %}}{{%- endif %}}\n"
    )
    return template if template.startswith(line) else line + template


def _check_system(tokenizer: PreTrainedTokenizerBase, asked: PreTrainedTokenizerBase, system: str) -> None:
    """Refuse a system prompt that acts as a control token, or that the template does not show."""
    if token := SpecialTokens(tokenizer).first_in(system):
        raise UserError(f"{SYSTEM_FLAG}: holds the control token {token}, which would act as one; take it out")
    remedy = f"put it into the user's first message, or choose another template with {FLAG}"
    question = [{"role": "user", "content": "?"}]
    try:
        text = Renderer(asked).prompt(question).text
    except UserError as error:
        Renderer(tokenizer).prompt(question)  # its own refusal where it takes no question at all
        raise UserError(f"{SYSTEM_FLAG}: the chat template refuses a system turn; {remedy}") from error
    if system.strip() not in text:
        raise UserError(f"{SYSTEM_FLAG}: the chat template has no place for a system turn; {remedy}")
