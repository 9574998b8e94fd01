"""What both models make of a document's beginning: what ``generate`` says of the same prompt."""

from dataclasses import replace

import numpy as np

from granite_scu.evaluation import generate as generation
from granite_scu.evaluation import samples
from granite_scu.evaluation.samples import sample

FEW = replace(samples.SAMPLING, max_new_tokens=16)


def test_each_model_says_what_it_says_when_asked_by_generate(model, tokenizer, monkeypatch):
    monkeypatch.setattr(samples, "SAMPLING", FEW)
    texts, rest = ["def read(path):\n    ", "The state of a Mamba-2 layer "], '"""Read a file."""'
    rows = [np.array(tokenizer(words)["input_ids"], np.int32) for words in (*texts, rest)]
    openings = [(row, rows[-1]) for row in rows[:-1]]
    found = sample(model.get_base_model(), tokenizer, openings, model.disable_adapter)

    def asked(text: str) -> str:
        pieces: list[str] = []
        inputs = generation.tokenized(tokenizer, text, chat=False)
        generation.stream(model.get_base_model(), tokenizer, inputs, FEW, pieces.append)
        return "".join(pieces)

    assert [each["prompt"] for each in found] == texts
    for each in found:
        with model.disable_adapter():
            assert each["base"] == asked(each["prompt"])
        assert each["adapter"] == asked(each["prompt"]) != each["base"]
        assert each["document"] == rest
