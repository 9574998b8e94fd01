"""lm-evaluation-harness on an adapter of ours, with a task that is a file."""

import json

import pytest
import torch

from granite_scu.config.settings import TINY_MODEL
from granite_scu.model import finding, loading

pytestmark = pytest.mark.slow

QUESTIONS = [
    {"question": "def add(a, b):\n    return a", "choices": [" + b", " banana"], "answer": 0},
    {"question": "class A", "choices": [" x y z", ":"], "answer": 1},
]
TASK = """
task: snippets
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def test_it_scores_the_adapter_as_peft_does(trained, tmp_path):
    pytest.importorskip("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run, base = trained("--learning-rate", "3e-2"), finding.resolve(TINY_MODEL)
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS), encoding="utf-8")
    (tmp_path / "snippets.yaml").write_text(TASK.format(file=file), encoding="utf-8")

    tokenizer = loading.load_tokenizer(TINY_MODEL)
    plain, under = (AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32) for _ in range(2))
    models = {"base": plain, "adapter": PeftModel.from_pretrained(under, run)}

    def nats(model: torch.nn.Module, question: str, choice: str) -> float:
        ids = tokenizer(question + choice, return_tensors="pt").input_ids
        start = len(tokenizer(question).input_ids)
        with torch.no_grad():
            scores = model(input_ids=ids).logits.log_softmax(-1)[0, start - 1 : -1]
        return float(scores.gather(1, ids[0, start:, None]).sum())

    def harness(**adapter: str) -> list[float]:
        arguments = {"pretrained": base, "dtype": "float32", **adapter}
        tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
        told = simple_evaluate("hf", arguments, ["snippets"], device="cpu", task_manager=tasks, bootstrap_iters=0)
        return [answer[0] for sample in told["samples"]["snippets"] for answer in sample["filtered_resps"]]

    for name, found in (("base", harness()), ("adapter", harness(peft=str(run)))):
        expected = [nats(models[name], each["question"], choice) for each in QUESTIONS for choice in each["choices"]]
        assert found == pytest.approx(expected, abs=1e-3)
