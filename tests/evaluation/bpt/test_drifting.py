"""Drift of adapters that are scored, on the general text of their runs."""

import math
from contextlib import contextmanager, nullcontext

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from granite_scu.evaluation.bpt.answering import beside, drift_between
from granite_scu.evaluation.general_text import Document, batches


def test_drift_is_the_divergence_over_what_the_base_needs():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=60, **sizes)).double().eval().requires_grad_(False)
    weight = model.model.layers[0].mlp.down_proj.weight

    @contextmanager
    def adapted():
        weight.mul_(8)
        yield
        weight.div_(8)

    @contextmanager
    def alone():
        weight.div_(8)
        yield
        weight.mul_(8)

    texts = [torch.randint(0, 60, (n,)).tolist() for n in (9, 20, 5)]
    documents = [Document(tuple(text), tuple(k > 2 for k in range(len(text)))) for text in texts]
    found = drift_between(model, alone, adapted, batches(documents, 32, 0), nullcontext)

    def logs(text: list[int]) -> torch.Tensor:
        return model(torch.tensor([text])).logits[0, 2:-1].log_softmax(-1)  # tokens from the third on are predicted

    before = [logs(text) for text in texts]
    with adapted():
        after = [logs(text) for text in texts]
    kl = sum(float((p.exp() * (p - q)).sum()) for p, q in zip(before, after, strict=True))
    cost = -sum(float(p[range(len(p)), text[3:]].sum()) for p, text in zip(before, texts, strict=True))
    assert found.tokens == sum(len(text) - 3 for text in texts)
    # Logits in float64; products of fp32 nowhere.
    assert found.share == pytest.approx(kl / cost, rel=1e-6)
    assert found.bpt == pytest.approx(kl / found.tokens / math.log(2), rel=1e-6) and found.bpt > 1e-4
    # A loop that holds a budget well stays within 1.1 times that.
    told = [beside(found, budget)["within"] for budget in (found.share / 1.05, found.share / 1.2, None)]
    assert told == [True, False, None]
