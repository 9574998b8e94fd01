"""General text that a base model writes: as chats, or as plain text where it knows none."""

import copy
import itertools
import logging
from contextlib import contextmanager

import pytest
import torch
from rich.console import Console
from transformers import AddedToken, LlamaConfig, LlamaForCausalLM

from granite_scu.config.errors import UserError
from granite_scu.data.tokens.templates import with_template
from granite_scu.evaluation import general_writing
from granite_scu.evaluation.general_text import Document, GeneralText
from granite_scu.evaluation.general_writing import check_template, general_text, records, write

CONSOLE = Console(quiet=True)
TOKENS = 300
BASE = {"files": {"model.safetensors": {"sha256": "0" * 64}}}


@pytest.fixture(scope="module")
def talker(tokenizer):
    """A Llama that ends a turn one time in five or so, whatever was said."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.lm_head = torch.nn.Linear(16, 4096)
    with torch.no_grad():
        model.lm_head.bias.fill_(-5.0)
        model.lm_head.bias[40:60] = 5.0
        model.lm_head.bias[tokenizer.eos_token_id] = 6.5
    return model


@contextmanager
def likely(model, **changed: float):
    """The model with other biases of the end of text (``end``), and of the words that it has but one (``words``)."""
    bias = model.lm_head.bias.detach()
    before = bias.clone()
    bias[0], bias[40:59] = changed.get("end", bias[0]), changed.get("words", 5.0)
    yield
    bias.copy_(before)


def chat_of(document, tokenizer) -> str:
    """The document's text, what is counted in guillemets."""
    groups = itertools.groupby(zip(document.counted, document.tokens, strict=True), key=lambda pair: pair[0])
    texts = ((counted, tokenizer.decode([token for _, token in some])) for counted, some in groups)
    return "".join(f"«{text}»" if counted else text for counted, text in texts)


def test_of_a_chat_what_was_drawn_is_counted_and_the_template_is_not(talker, tokenizer):
    for document in write(talker, tokenizer, TOKENS, 0, CONSOLE).documents:
        before, question, between, answer, *rest = chat_of(document, tokenizer).replace("»", "«").split("«")
        assert before == "<|start_of_role|>user<|end_of_role|>" and rest == [""]
        assert question.endswith("<|end_of_text|>") and question.removesuffix("<|end_of_text|>").strip()
        assert between == "\n<|start_of_role|>assistant<|end_of_role|>"
        assert answer.endswith("<|end_of_text|>") or len(tokenizer(answer)["input_ids"]) >= 64


def test_a_question_begins_as_one_that_is_trained_on_and_is_whole_in_a_record(talker, tokenizer):
    """Those words are given, so they are not counted. By its template a record is the document again."""
    found = write(talker, tokenizer, TOKENS, 0, CONSOLE, ["What is", "Who"]).documents
    ended = [document for document in found if document.tokens[-1] == tokenizer.eos_token_id]
    rendered = [
        tokenizer.apply_chat_template(record["messages"], tokenize=False) for record in records(ended, tokenizer)
    ]
    assert ended and rendered == [tokenizer.decode(document.tokens) + "\n" for document in ended]
    before = [chat_of(document, tokenizer).partition("«")[0].removeprefix("<|start_of_role|>user<|end_of_role|>")
              for document in found]  # fmt: skip
    assert set(before) == {"What is", "Who"}


def test_the_text_follows_its_seed_and_draws_nothing_from_anybody_else(talker, tokenizer):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = write(talker, tokenizer, TOKENS, 0, CONSOLE)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert write(talker, tokenizer, TOKENS, 0, CONSOLE) == first
    assert write(talker, tokenizer, TOKENS, 1, CONSOLE) != first
    assert TOKENS <= first.n_counted < TOKENS + 64 + 256 and len(set(first.documents)) == len(first.documents)


def test_draws_have_the_probabilities_of_the_model():
    """Of 4,000 draws the share of each token is within five standard deviations, sqrt(p (1 - p) / n)."""
    noise, wanted = general_writing.Noise(torch.Generator().manual_seed(0)), torch.zeros(600)
    wanted[[0, 255, 256, 599]] = torch.tensor([0.5, 0.15, 0.3, 0.05])  # tokens that are drawn together, or are not
    drawn = noise(torch.empty(0), wanted.log().expand(4_000, 600)).argmax(1).bincount(minlength=600) / 4_000
    assert ((drawn - wanted).abs() <= 5 * (wanted * (1 - wanted) / 4_000).sqrt()).all()


def test_what_ends_no_turn_writes_plain_text(tokenizer, talker, caplog):
    with likely(talker, end=-20.0), caplog.at_level(logging.INFO, "granite_scu"):
        found = write(talker, tokenizer, TOKENS, 0, CONSOLE)
    assert "plain text" in caplog.text
    assert {document.tokens[0] for document in found.documents} == {tokenizer.eos_token_id}
    assert {document.counted for document in found.documents} == {(False, *[True] * 64)}
    cut = Document.joined(([tokenizer.eos_token_id], False), (tokenizer("The sky is blue. It")["input_ids"], True))
    assert records([cut], tokenizer) == [{"text": "The sky is blue."}]


def test_a_turn_may_end_with_a_special_token_that_has_no_name(tokenizer):
    """The answer is whole, so its last words stay though they end no sentence."""
    other = copy.deepcopy(tokenizer)
    other.add_tokens([AddedToken("<|end_of_turn|>", special=True)], special_tokens=True)
    end = other.convert_tokens_to_ids("<|end_of_turn|>")
    assert end not in other.all_special_ids
    ended = Document.joined(([other.eos_token_id], False), ([*other("It is blue. Or so")["input_ids"], end], True))
    assert records([ended], other) == [{"text": "It is blue. Or so"}]


def test_it_is_written_once_for_a_base_and_again_for_another_length_or_a_damaged_file(
    talker, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(GeneralText, "check", lambda text, *_: text)  # of so few tokens
    written = []
    real = general_writing.write
    monkeypatch.setattr(general_writing, "write", lambda *given: written.append(given[2]) or real(*given))
    first = general_text(talker, tokenizer, TOKENS, 0, CONSOLE, BASE)
    assert general_text(talker, tokenizer, TOKENS, 0, CONSOLE, BASE) == first and written == [TOKENS]
    general_text(talker, tokenizer, 200, 0, CONSOLE, BASE)
    general_text(talker, tokenizer, TOKENS, 0, CONSOLE, {"files": {"model.safetensors": {"sha256": "1" * 64}}})
    assert written == [TOKENS, 200, TOKENS]
    for file in (tmp_path / "granite-scu").iterdir():
        file.write_text(file.read_text()[:-20])
    assert general_text(talker, tokenizer, TOKENS, 0, CONSOLE, BASE) == first and len(written) == 4
    general_text(talker, tokenizer, TOKENS, 0, CONSOLE, None)
    assert len(written) == 5, "nobody knows which weights they are"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ '[' + m.role + '] ' + m.content + '\\n' }}{% endfor %}", "no control token"),
        ("{{ raise_exception('no') }}", "--general-data auto: the chat template refuses"),
    ],
)
def test_a_template_that_ends_no_turn_is_refused(tokenizer, template, words):
    with pytest.raises(UserError, match=words):
        check_template(with_template(tokenizer, template))


def test_a_base_that_repeats_itself_is_refused_in_the_end(talker, tokenizer):
    with likely(talker, end=9.0, words=-20.0), pytest.raises(UserError, match="repeated"):
        write(talker, tokenizer, 64, 0, CONSOLE)
