"""How long a training step takes on this CPU, found by taking one with few layers of the model's own size.

Products of different shapes reach different rates, and between them is what no product is: a step of the model itself
has both in its own mixture. Layers of a kind take the same time, so that few stand for all, as in ``model.memory``; so
do few tokens, where they are enough for products to be as fast as they get, and a part of the vocabulary.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from granite_scu.model import loading, loss, memory
from granite_scu.model.compilation import decoder_layers
from granite_scu.model.mamba2.mamba import HYBRID
from granite_scu.storage.kept import code_versions, kept

WORK, FEWEST_TOKENS = 4e9, 256
"""Weights times tokens of the measured step, a quarter of a second on a slow core; and tokens that it has at least."""

ROWS = 4096
"""Of the vocabulary, in the measured step."""

TAKES = 3
"""Timed steps, of which the middle one counts."""

BUSY = 1.5
"""Seconds that pass for one that is computed, from which on a machine is too busy for its pace to be kept."""


@dataclass(frozen=True)
class Pace:
    """Seconds that a token takes.

    Attributes:
        step: forward and backward.
        forward: forward alone, as in validation.
    """

    step: float
    forward: float


def on_cpu(config: PretrainedConfig, setting: memory.Setting, machine: Sequence[Any]) -> Pace:
    """The pace of training, measured once for a machine, a model and a setting.

    Args:
        config: the base model's.
        setting: how it is trained.
        machine: what is known of it, as JSON has it: its processor's name and the number of threads.
    """
    key = [code_versions(), list(machine), config.to_json_string(), repr(setting)]
    begun: list[float] = []

    def find() -> dict[str, float]:
        begun.extend((time.perf_counter(), time.thread_time()))
        return asdict(measure(config, setting))

    def undisturbed() -> bool:
        """Threads that wait for one another on a busy machine turn, and that counts as theirs."""
        return time.perf_counter() - begun[0] < BUSY * (time.thread_time() - begun[1])

    return kept("paces.json", key, find, lambda found: Pace(**found), undisturbed)


def measure(config: PretrainedConfig, setting: memory.Setting) -> Pace:
    """The same as ``on_cpu``, neither looked up nor kept."""
    if setting.base.gradient_checkpointing == "selective":  # which is for compiled layers, and takes 5 % longer
        setting = replace(setting, base=replace(setting.base, gradient_checkpointing=False))
    rows, config = config.vocab_size, copy.deepcopy(config)
    config.vocab_size, config.pad_token_id = min(rows, ROWS), None
    attention = loading.choose_attention(config, "auto", "eager" if setting.base.attention == "eager" else "sdpa")
    with torch.device("meta"):
        attention = loading.attention_on(loading.CPU, config, attention)
        model = AutoModelForCausalLM.from_config(config, dtype=setting.dtype, attn_implementation=attention)
        chosen, left_out = memory.cut(model)
        layers = list(decoder_layers(model) or [])
        weights = sum(p.numel() for p in model.parameters())
        tokens = int(max(FEWEST_TOKENS, WORK / weights))
        length = min(setting.block_size, tokens)
        batch_size = min(setting.batch_size, max(1, tokens // length))
        adapted = memory.as_trained(model, setting)
    model = adapted.to_empty(device="cpu").get_base_model()
    with torch.no_grad():
        for tensor in [*adapted.parameters(), *adapted.buffers()]:
            tensor.fill_(0.01)  # neither infinite nor so small that sums take longer
    model.tie_weights()
    times = [_take_step(model, layers, setting, batch_size, length) for _ in range(1 + TAKES)][1:]
    forward, both, of_layers = sorted(times)[TAKES // 2]
    repeats = [1 + left_out[kind] / chosen.count(kind) for kind in chosen]
    return whole(forward, both, of_layers, repeats, rows / config.vocab_size, batch_size * length)


def whole(
    forward: float, both: float, of_layers: Sequence[float], repeats: Sequence[float], of_rows: float, tokens: int
) -> Pace:
    """The pace of a whole model by that of a part.

    Args:
        forward: seconds of the part's forward pass.
        both: seconds of its forward and backward pass.
        of_layers: seconds of each of its layers, forward.
        repeats: how many layers of the whole each stands for.
        of_rows: how many times its vocabulary the whole has; what is no layer is mostly the head.
        tokens: that were passed.

    >>> whole(2.0, 6.0, [1.0, 0.5], [3, 1], of_rows=4, tokens=10)
    Pace(step=1.65, forward=0.55)
    """
    rest = forward - sum(of_layers)
    seconds = rest * of_rows + sum(n * each for n, each in zip(repeats, of_layers, strict=True))
    return Pace(step=seconds * both / forward / tokens, forward=seconds / tokens)


def _take_step(
    model: nn.Module, layers: list[nn.Module], setting: memory.Setting, batch_size: int, length: int
) -> tuple[float, float, list[float]]:
    """Seconds of the forward pass, of both, and of each layer's forward pass.

    Of those that this thread computes: what it waits for others on a busy machine is no property of the model.
    """
    ids = torch.arange(batch_size * length).view(batch_size, length) % model.config.vocab_size
    documents = torch.zeros_like(ids) if setting.isolated and model.config.model_type == HYBRID else None
    begun, ended = {}, {}
    hooks = [
        hook
        for layer in layers
        for hook in (
            layer.register_forward_pre_hook(lambda layer, _: begun.setdefault(layer, time.thread_time()) and None),
            layer.register_forward_hook(lambda layer, *_: ended.setdefault(layer, time.thread_time()) and None),
        )
    ]
    with torch.random.fork_rng(devices=[]):
        start = time.thread_time()
        with torch.autocast("cpu", setting.dtype, enabled=setting.dtype != torch.float32):
            nats = loss.summed_nats(model, ids, ids, documents, loss.chunk_on("cpu"))
        middle = time.thread_time()
        nats.backward()
        end = time.thread_time()
    for hook in hooks:
        hook.remove()
    return middle - start, end - start, [ended[layer] - begun[layer] for layer in layers]
