"""The pass over the windows against a plain loop in float64."""

import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from rounding import OF_SMALL, rounding

from granite_scu.config.settings import BaseConfig
from granite_scu.evaluation.bpt.windows import ScoringCorpus, cut, score_windows
from granite_scu.model import loading
from granite_scu.model.adapters import _Linear, _OneProduct, load_adapted

LENGTHS = [1, 5, 40, 2, 23, 16, 17]


@pytest.fixture(scope="module")
def corpus():
    generator = np.random.default_rng(0)
    sequences = [generator.integers(1, 60, length + 1).astype(np.int32) for length in LENGTHS]
    targets = [np.ones(length, bool) for length in LENGTHS]
    return ScoringCorpus("random", [str(i) for i in range(len(LENGTHS))], sequences, 2 * np.array(LENGTHS), targets)


@pytest.fixture
def model(small_granite):
    return loading.load_model(BaseConfig(small_granite), torch.float32).eval()


def scored(model, corpus, *, switches=(nullcontext,), max_length=16, stride=6, batch_size=3):
    corpus = replace(corpus, windows=cut(corpus.lengths, max_length, stride))
    return score_windows(model, list(switches), corpus, batch_size, autocast=nullcontext)


def plain_nats(model, corpus, max_length: int, stride: int) -> list[float]:
    """ScoringWindow after window, alone and unpadded, token after token in float64, by the rule and not by ``cut``."""
    found = []
    for sequence in corpus.sequences:
        predicted, length = 0, len(sequence) - 1
        while predicted < length:
            end = min(length, predicted + (stride if predicted else max_length))
            inputs = torch.from_numpy(sequence[max(0, end - max_length) : end]).long()
            with torch.no_grad():
                log_p = model(input_ids=inputs[None], use_cache=False).logits[0].double().log_softmax(-1)
            offset = max(0, end - max_length)
            found.append(-sum(log_p[t - 1 - offset, int(sequence[t])].item() for t in range(predicted + 1, end + 1)))
            predicted = end
    return found


@pytest.mark.parametrize(("max_length", "stride"), [(100, 1), (16, 16), (16, 6), (8, 1)])
def test_it_is_the_plain_loop(model, corpus, max_length, stride):
    found = scored(model, corpus, max_length=max_length, stride=stride)
    assert found[0].tolist() == pytest.approx(plain_nats(model, corpus, max_length, stride), rel=rounding(OF_SMALL))


@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
def test_it_depends_on_neither_the_batch_size_nor_the_padding(model, corpus, batch_size, monkeypatch):
    reference = scored(model, corpus)
    assert scored(model, corpus, batch_size=batch_size) == pytest.approx(reference, rel=rounding(OF_SMALL))
    monkeypatch.setattr("granite_scu.evaluation.score._MULTIPLE", 50)
    assert scored(model, corpus, batch_size=batch_size) == pytest.approx(reference, rel=rounding(OF_SMALL))


def adapter(model, tmp_path, seed: int, targets: list[str], **kind):
    """A folder with a random adapter of the model."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **kind)
    wrapped = peft.get_peft_model(model, config)
    wrapped.save_pretrained(tmp_path / f"adapter-{seed}")
    wrapped.unload()
    return tmp_path / f"adapter-{seed}"


def test_adapters_in_one_pass_score_as_each_alone(small_granite, corpus, tmp_path):
    base = loading.load_model(BaseConfig(small_granite), torch.float32).eval()
    mamba, other, head = ["in_proj", "out_proj"], ["q_proj", "input_linear"], ["o_proj", "lm_head"]
    made = ((mamba, {}), (other, {}), (head, {}), (mamba, {"lora_bias": True}), (other, {"use_dora": True}))
    folders = [adapter(base, tmp_path, seed, names, **kind) for seed, (names, kind) in enumerate(made)]
    named = {folder.name: folder for folder in folders}
    loaded, switches = load_adapted(BaseConfig(small_granite), named, torch.float32, torch.device("cpu"))
    layers = [module for module in loaded.modules() if isinstance(module, LoraLayer)]
    ours = [isinstance(kind, _OneProduct) for layer in layers for kind in layer.lora_variant.values()]
    assert ours and not all(ours) and all(isinstance(layer, _Linear) for layer in layers)
    together = scored(loaded, corpus, switches=switches)
    assert together[0] == pytest.approx(scored(base, corpus)[0], rel=rounding(OF_SMALL))
    for row, folder in enumerate(folders, start=1):
        plain = loading.load_model(BaseConfig(small_granite), torch.float32)
        alone = peft.PeftModel.from_pretrained(plain, folder).eval()
        expected = plain_nats(alone, corpus, 16, 6)  # through PEFT's own forward, an adapter on the head included
        assert together[row].tolist() == pytest.approx(expected, rel=rounding(OF_SMALL))
        assert abs(together[row].sum() - together[0].sum()) > 1e-3


def test_progress_is_told_of_every_token(model, corpus):
    told = []
    corpus = replace(corpus, windows=cut(corpus.lengths, 16, 6))
    score_windows(model, [nullcontext], corpus, 2, autocast=nullcontext, advance=told.append)
    assert sum(told) == sum(LENGTHS) and len(told) == math.ceil(len(corpus.windows) / 2)


def test_too_little_memory_says_what_to_change(model, corpus, monkeypatch):
    from granite_scu.config.errors import RunFailed

    def exhausted(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("granite_scu.evaluation.bpt.windows.token_nats", exhausted)
    with pytest.raises(RunFailed, match="3 windows of 16 tokens; set --batch-size below 3"):
        scored(model, corpus)
