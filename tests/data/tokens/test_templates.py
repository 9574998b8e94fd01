"""Which template a tokenizer uses: named, given, saved with a run; and what is refused of it."""

import copy
import json

import pytest
from outcomes import refusal

from granite_scu.config.errors import UserError
from granite_scu.config.settings import DataConfig, check_system, check_template
from granite_scu.data.sources.samples import as_document
from granite_scu.data.tokens.chat import Renderer
from granite_scu.data.tokens.templates import checksum, chosen, saved_in, with_template

TURN = [{"role": "user", "content": "hi"}]
SAYS = "{% for m in messages %}{{ m.content }}{% endfor %}"


def rendered(tokenizer, **arguments) -> str:
    return tokenizer.apply_chat_template(TURN, tokenize=False, **arguments)


@pytest.fixture
def several(tokenizer):
    found = copy.deepcopy(tokenizer)
    found.chat_template = {"default": f"D{SAYS}", "rag": f"R{SAYS}"}
    return found


def test_a_template_is_one_of_the_models_own_or_a_files(several, tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text(f"F{SAYS}")
    assert [rendered(chosen(several, name)) for name in (None, "rag", str(file))] == ["Dhi", "Rhi", "Fhi"]
    assert rendered(several) == "Dhi"  # which is left as it was


@pytest.mark.parametrize("template", [f"T{SAYS}", {"default": f"D{SAYS}", "rag": f"R{SAYS}"}], ids=["one", "several"])
@pytest.mark.parametrize("in_files", [True, False], ids=["in files", "in the settings, as earlier"])
def test_a_template_that_is_saved_is_found_again(tokenizer, tmp_path, template, in_files):
    with_template(tokenizer, template).save_pretrained(tmp_path / "run", save_jinja_files=in_files)
    assert saved_in(tmp_path / "nothing", tmp_path / "run") == template
    assert saved_in(tmp_path) is None


@pytest.mark.parametrize("kept", [3, ["text"], [{"name": "default"}], [{"name": "default", "template": 3}], "{% if"])
def test_settings_with_what_is_no_template_are_refused(tmp_path, kept):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": kept}))
    assert f"{tmp_path}/tokenizer_config.json: " in refusal(saved_in, tmp_path)


SHOWS = "\n  {% if x is defined %}\n{{ x | tojson }}\n  {% endif %}\n{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("false", False),
        ("True", True),
        ("None", None),
        ("no", False),
        ("On", True),
        ('"no"', "no"),
        ("3", 3),
        ("[1, null]", [1, None]),
        ("26 Jul", "26 Jul"),
        ("NaN", "NaN"),
        ('it\'s "so" %} 😀 \\n', 'it\'s "so" %} 😀 \\n'),
    ],
)
def test_arguments_become_the_defaults_of_the_template(tokenizer, text, value):
    plain = with_template(tokenizer, SHOWS)
    found = chosen(plain, arguments=[f"x={text}"])
    assert rendered(found) == rendered(plain, x=value)
    assert rendered(found, x="other") == rendered(plain, x="other")  # whoever renders it may still say otherwise
    assert rendered(chosen(found, arguments=["x=5"])) == rendered(plain, x=5)  # and so may the next run


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{% if x %}\n{% for m in messages %}\n{% endfor %}", "mine.jinja:3: is no Jinja template (Unexpected end"),
        (b"\n{{ x | nosuchfilter }}", "mine.jinja:2: is no Jinja template (No filter named 'nosuchfilter'"),
        (b"{% generation %}{{ x }}", "mine.jinja:1: is no Jinja template (Unexpected end"),
        (b"{% for a in b %}" * 30 + b"{% endfor %}" * 30, "mine.jinja: is too large or too deep for a Jinja template"),
        (b"\xff", "mine.jinja: is not UTF-8 text; give a Jinja template"),
        (b" \n", "mine.jinja: is empty; give a Jinja template"),
        (None, "mine.jinja: no such file, and the model has no template of that name (it has default, rag)"),
    ],
    ids=["never ends", "unknown filter", "generation never ends", "too deep", "no text", "empty", "not there"],
)
def test_a_file_that_holds_no_template_is_refused_in_a_line(several, tmp_path, content, words):
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_bytes(content)
    assert f"--chat-template {tmp_path}/{words}" in refusal(chosen, several, str(file))


def test_an_argument_that_the_template_does_not_know_is_refused_with_those_that_it_knows(tokenizer):
    knows = with_template(tokenizer, "{{ messages }}{{ bos_token }}{{ tools }}{% set c = a %}{{ b }}")
    with pytest.raises(UserError, match=r"--chat-template-args c=1: .* has no argument c; the template knows a, b$"):
        chosen(knows, arguments=["a=1", "c=1"])
    with pytest.raises(UserError, match="the template takes none"):
        chosen(with_template(tokenizer, SAYS), arguments=["messages=1"])
    with pytest.raises(UserError, match="the model has no chat template; give one by --chat-template FILE"):
        chosen(tokenizer, arguments=["a=1"])


PROMPTS = ["be kind", 'say "so" \\n %} {% generation %} {{ x }} {# 😀 #}\n\tin two lines\u2028', "{%- strftime_now"]
SHOWS_ROLES = "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}"


@pytest.mark.parametrize("system", PROMPTS)
def test_a_system_prompt_stands_before_chats_that_have_none_and_is_saved_with_the_template(tokenizer, tmp_path, system):
    found = chosen(with_template(tokenizer, SHOWS_ROLES), system=system)
    assert rendered(found) == f"system:{system};user:hi;"
    own = [{"role": "system", "content": "mine"}, *TURN]
    assert found.apply_chat_template(own, tokenize=False) == "system:mine;user:hi;"
    found.save_pretrained(tmp_path)
    again = with_template(tokenizer, saved_in(tmp_path))
    assert checksum(again) == checksum(found) == checksum(chosen(again, system=system)) != checksum(tokenizer)
    assert rendered(chosen(again, system="other")) == "system:other;user:hi;"


@pytest.mark.parametrize(
    ("template", "system", "words"),
    [
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + SAYS, "be kind", "refuses a"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "be kind", "has no place for a"),
        (SAYS, "be <|end_of_text|>", r"holds the control token <\|end_of_text\|>"),
        (None, "be kind", "the model has no chat template to put it into; give one by --chat-template FILE"),
    ],
)
def test_a_system_prompt_that_does_not_reach_the_model_is_refused(tokenizer, template, system, words):
    with pytest.raises(UserError, match=f"--system: .*{words}"):
        chosen(with_template(tokenizer, template), system=system)


@pytest.mark.parametrize("system", ["", " \n", "\udcff"])
def test_a_system_prompt_that_is_no_text_is_refused_without_a_tokenizer(system):
    with pytest.raises(UserError, match="--system"):
        check_system(system)


def test_what_needs_no_tokenizer_is_refused_without_one(tmp_path):
    for argument in ("enable_thinking", "=1", "a b=1", "a=", "a: 1"):
        with pytest.raises(UserError, match=r"--chat-template-args .*: must be name=value"):
            DataConfig(chat_template_args=[argument])
    with pytest.raises(UserError, match=r"--chat-template .*: no such file"):
        check_template(str(tmp_path / "none"))
    check_template("rag")


def test_a_template_of_a_stranger_stays_in_the_sandbox(tokenizer):
    breaks_out = with_template(tokenizer, "{{ messages.__class__.__mro__ }}")
    document = as_document("chats.jsonl:1", {"messages": TURN}, "text")
    with pytest.raises(UserError, match=r"chats.jsonl:1: the chat template refuses these messages \(.*unsafe"):
        Renderer(breaks_out).render(document)
