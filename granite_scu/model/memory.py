"""The memory that training takes, found by taking a step on tensors without contents.

Fake tensors have shapes, dtypes and autograd, and no storage, so the model itself says what its forward pass keeps and
what its backward pass takes besides; no formula has to follow it. All layers of a kind keep the same, so that few
stand for all: Granite-4.0-H-1B, on a card that is not there, takes a second or two.

What it cannot see: what a kernel takes for itself (cuBLAS: some MiB), what fragments, and the inputs that CUDA graphs
copy (``--compile-mode reduce-overhead``). Compiled layers keep a few per cent less, compiled Mamba-2 kernels no more.
"""

import copy
import logging
import math
import weakref
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, PretrainedConfig

from granite_scu.config.settings import BaseConfig, LoraConfig
from granite_scu.model import adapters, loading, loss
from granite_scu.model.compilation import decoder_layers, is_product, recompute_activations
from granite_scu.model.mamba2 import mamba
from granite_scu.model.mamba2.mamba import HYBRID
from granite_scu.model.mamba2.tiling import describing
from granite_scu.storage.kept import code_versions, kept

log = logging.getLogger(__name__)

FOUR_BIT_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in nf4 with double quantisation: a byte of scale for 64 of them, and an fp32 for 256 scales
(Dettmers et al. 2023, arXiv 2305.14314, section 3)."""

FP32 = 4


@dataclass(frozen=True)
class Setting:
    """What the memory of a training step depends on.

    Attributes:
        base: 4 bits, gradient checkpointing and attention of it count.
        lora: the adapters.
        dtype: of the frozen weights, and of autocast where it is not fp32.
        batch_size: blocks in a micro-batch.
        block_size: tokens in a block.
        device: ``cpu`` or ``cuda``.
        processes: that train together.
        isolated: whether the documents of a block are kept apart, as the hybrid's masks make them.
        sharing: processes that hold the weights of the decoder's layers together (FSDP).
    """

    base: BaseConfig
    lora: LoraConfig
    dtype: torch.dtype
    batch_size: int
    block_size: int
    device: str = "cuda"
    processes: int = 1
    isolated: bool = True
    sharing: int = 1


SIMULATED = 2**15
"""Tokens of a micro-batch up to which a step is simulated. A larger one is extrapolated: simulating a million takes
ten seconds and more."""


@dataclass(frozen=True)
class Footprint:
    """Bytes that training takes on a device.

    Attributes:
        weights: of the frozen model.
        adapters: weights, gradients and Adam's two moments of the adapters, in fp32.
        step: the most that a micro-batch takes on top: activations kept for the backward pass, logits, scratch; None
            where the model cannot be simulated.
    """

    weights: int
    adapters: int
    step: int | None

    @property
    def total(self) -> int:
        """All together that is known."""
        return self.weights + self.adapters + (self.step or 0)


def predict(config: PretrainedConfig, setting: Setting) -> Footprint:
    """What a run takes at its peak.

    Args:
        config: the base model's.
        setting: how it is trained.
    """
    # Whether activations are recomputed may be open still: then they are not.
    base = replace(setting.base, gradient_checkpointing=setting.base.gradient_checkpointing or False)
    setting = replace(setting, base=base)
    most = max(2, SIMULATED // setting.block_size)
    if setting.batch_size > most:
        return _extrapolated(config, setting, most)
    key = [code_versions(), config.to_json_string(), repr(setting)]
    found: list[Footprint] = []

    def find() -> dict[str, Any]:
        found.append(_simulate(config, setting))
        return asdict(found[0])

    # With another set of kernels it may be found after all.
    return kept("memory.json", key, find, lambda each: Footprint(**each), lambda: found[0].step is not None)


def _extrapolated(config: PretrainedConfig, setting: Setting, batch_size: int) -> Footprint:
    """Extrapolated from half of ``batch_size`` blocks and from all of them, as each block adds as much to a step."""
    half = batch_size // 2
    less, more = (predict(config, replace(setting, batch_size=size)) for size in (half, batch_size))
    if more.step is None or less.step is None:
        return more
    each = (more.step - less.step) / (batch_size - half)
    return replace(more, step=more.step + round(each * (setting.batch_size - batch_size)))


def _simulate(config: PretrainedConfig, setting: Setting) -> Footprint:
    # flash-attn keeps what SDPA's kernels keep
    attention = loading.choose_attention(config, "auto", "eager" if setting.base.attention == "eager" else "sdpa")
    config = copy.deepcopy(config)
    if setting.device == "cuda" and attention != "eager" and getattr(config, "attention_dropout", 0):
        config.attention_dropout = 0.0  # the fake CPU would keep probabilities, which a GPU's kernels do not
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=setting.dtype, attn_implementation=attention)
    layers = adapters.linear_layers(model) if setting.base.quantize_4bit else {}
    whole = loading.READ_PAST.get(config.model_type, ())
    in_4_bits = [layer for name, layer in layers.items() if name.rpartition(".")[2] not in whole]
    weights = sum(t.nbytes for t in {*model.parameters(), *model.buffers()} - {m.weight for m in in_4_bits})
    weights += math.ceil(FOUR_BIT_BYTES * sum(m.weight.numel() for m in in_4_bits))
    if setting.sharing > 1:
        of_layers = [sum(p.nbytes for p in layer.parameters()) for layer in decoder_layers(model) or [nn.Module()]]
        # Of the layers a share, and two of them whole: the one that computes, and the next.
        weights -= round(sum(of_layers) * (1 - 1 / setting.sharing)) - 2 * max(of_layers)
    gradients = FP32 * sum(rank * (out + into) for out, into, rank in adapters.shapes(model, setting.lora))
    chosen, left_out = cut(model)
    buckets = gradients if setting.processes > 1 else 0
    try:
        step, kept = _take_step(model, setting)
    except Exception as error:  # whatever the model's own code has: a kernel that wants a GPU, a number that it reads
        _say_not_predicted(config.model_type, f"{type(error).__name__}: {error}".splitlines()[0][:200])
        return Footprint(weights, 4 * gradients + buckets, None)
    step += sum(left_out[kind] * size for kind, size in dict(zip(chosen, kept, strict=True)).items())
    # After the backward pass the penalty stands beside the gradients; foreach AdamW (fp16) needs as much again.
    after = gradients * (2 if setting.dtype == torch.float16 else 1)
    return Footprint(weights, 4 * gradients + buckets, max(step, after))


@cache
def _say_not_predicted(kind: str, why: str) -> None:
    log.warning("the memory that a step takes is not predicted: a %s model cannot be simulated here (%s)", kind, why)


Kind = tuple[tuple[str, torch.Size], ...]
"""The names and shapes of a layer's parameters: layers that agree in them keep the same."""


def cut(model: nn.Module) -> tuple[list[Kind], Counter[Kind]]:
    """Leave of the decoder its first layer, one of each kind and the last.

    The first is apart because nothing below it wants a gradient; the last is there because the peak is often in it.

    Returns:
        The kinds of those left, in order, and how many of each kind were taken out.
    """
    layers = decoder_layers(model)
    if layers is None:  # nothing is left out then
        return [], Counter()
    kinds = [tuple((name, p.shape) for name, p in layer.named_parameters()) for layer in layers]
    described = [each for each in ("layer_types", "layer_rope_theta") if getattr(model.config, each, None)]
    kind = type(model.config)
    if any(isinstance(getattr(kind, kind.attribute_map.get(each, each), None), property) for each in described):
        return kinds, Counter()  # what follows from other settings cannot be cut with the layers
    last = len(kinds) - 1
    between = {kind: index for index, kind in reversed(list(enumerate(kinds))) if 0 < index < last}
    chosen = sorted({0, last} | set((between | {kinds[last]: last}).values()))
    left_out = Counter(kind for index, kind in enumerate(kinds) if index not in chosen)
    for each in described:
        setattr(model.config, each, [getattr(model.config, each)[index] for index in chosen])
    model.config.num_hidden_layers = len(chosen)
    keep = [layers[index] for index in chosen]
    del layers[:]
    layers.extend(keep)
    return [kinds[index] for index in chosen], left_out


# The step.


def _take_step(model: nn.Module, setting: Setting) -> tuple[int, list[int]]:
    """Train on one micro-batch.

    Returns:
        The most bytes that were in use on top of parameters and gradients, and what each layer keeps.
    """
    layers, recomputed = decoder_layers(model), setting.base.gradient_checkpointing
    # Products are kept by the count alone: operators would keep besides what a compiled layer leaves out.
    whole = replace(setting, base=replace(setting.base, gradient_checkpointing=bool(recomputed)))
    with torch.device("meta"):
        adapted = as_trained(model, whole)
    with FakeTensorMode(allow_non_fake_inputs=True), describing(setting.device):
        # Of the CPU, which autocast and the kernels know, and not of the meta device.
        base = adapted.to_empty(device="cpu").get_base_model()
        base.tie_weights()
        ids = torch.zeros(setting.batch_size, setting.block_size, dtype=torch.long)
        live = _Live(keeps_products=recomputed == "selective")
        for tensor in [*adapted.parameters(), *adapted.buffers()]:
            live.hold(tensor)
            if tensor.requires_grad:
                tensor.grad = torch.empty_like(tensor)
                live.hold(tensor.grad)
        notes = [_noted(layer, live) for layer in layers or []]
        before = live.now
        with live:
            with torch.autocast("cpu", setting.dtype, enabled=setting.dtype != torch.float32):
                documents = ids if setting.isolated and base.config.model_type == HYBRID else None
                nats = loss.summed_nats(base, ids, ids, documents, loss.chunk_on(setting.device))
            nats.backward()
    kept = [after - begin for begin, after, *_ in notes]  # a checkpointed layer runs again
    return live.peak - before + live.products, kept


def as_trained(model: nn.Module, setting: Setting) -> nn.Module:
    """The model as ``GraniteModule`` has it."""
    model.requires_grad_(False)
    if setting.base.quantize_4bit:
        for name, layer in adapters.linear_layers(model).items():
            model.set_submodule(name, _FourBit(layer))
    mamba.install(model, is_gated=lambda norm: True)
    adapted = adapters.attach(model, setting.lora).train()
    recompute_activations(model, setting.base.gradient_checkpointing or False)
    if setting.dtype != torch.float32:
        adapters.leave_casting_to_autocast(adapted)
    return adapted


class _FourBit(nn.Linear):
    """Stands for bitsandbytes' layer: makes the whole weight of its packed one for each product, and keeps neither."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, dtype=layer.weight.dtype)
        self.bias = layer.bias
        self.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = _Unpacking.apply(inputs.to(self.weight.dtype), self.weight)
        outputs = outputs if self.bias is None else outputs + self.bias
        return outputs.to(inputs.dtype).clone()  # PEFT clones the output of a 4-bit layer


class _Unpacking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return inputs @ torch.empty_like(weight).mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ torch.empty_like(ctx.weight), None


class _Live(TorchDispatchMode):
    """Counts the bytes of all storages in use.

    Args:
        keeps_products: count what selective recomputation would keep of the layers, which here keep nothing.

    Attributes:
        now: in use.
        peak: the most that were.
        products: of the results that would be kept.
    """

    def __init__(self, keeps_products: bool = False) -> None:
        super().__init__()
        self.now = self.peak = self.products = 0
        self.keeps_products, self.in_layer = keeps_products, False
        self._held: dict[int, weakref.ref] = {}

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._held:
            self._held[key] = weakref.ref(storage, lambda _: self._free(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def _free(self, key: int, size: int) -> None:
        del self._held[key]
        self.now -= size

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is torch.ops.aten._grouped_mm.default:
            result = _grouped(*args, **(kwargs or {}))
        else:
            result = operator(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self.hold(tensor)
        if self.in_layer and is_product(operator):
            summed = [t for t in args[:1] if operator is torch.ops.aten.addmm.default and t.dim() == 2]
            self.products += sum(t.nbytes for t in tree_iter(result) if isinstance(t, Tensor))
            self.products -= sum(t.nbytes for t in summed)  # a product, too, and then wanted no more
        return result


def _grouped(a: Tensor, b: Tensor, *rest: Any, **settings: Any) -> Tensor:
    """The experts' products, whose shapes torch tells in bf16 alone; it computes them in other dtypes too."""
    narrow = (t.to(torch.bfloat16) for t in (a, b))
    return torch.ops.aten._grouped_mm.default(*narrow, *rest, **settings).to(a.dtype)


def _noted(layer: nn.Module, live: _Live) -> list[int]:
    """The bytes in use as a layer's forward pass begins and as it is over, in turns."""
    notes: list[int] = []

    def note(*_: Any) -> None:
        live.in_layer = live.keeps_products and not notes  # and not where the layer runs again
        notes.append(live.now + live.products)

    layer.register_forward_pre_hook(note)
    layer.register_forward_hook(note)
    return notes
