"""LoRA adapters: where they go, and their factors as `description_length` wants them."""

import copy
import difflib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora import layer as lora_layers
from peft.tuners.lora.layer import LoraVariant, ParamWrapper
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from granite_scu.config.errors import UserError
from granite_scu.config.settings import BaseConfig, LoraConfig, listed
from granite_scu.config.untrusted_input import parse_json
from granite_scu.model import experts
from granite_scu.model.adapter_files import check_config, factor_names, is_of_experts, modules_of
from granite_scu.model.description_length import LowRankUpdate
from granite_scu.model.loading import READ_PAST, load_model
from granite_scu.model.mamba2 import norm
from granite_scu.model.mamba2.tiling import kind_of, product
from granite_scu.storage.run_folder import ADAPTER_CONFIG, WEIGHTS

try:
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers as _to_stacks
except ImportError:  # PEFT 0.18 adapts what it is told
    _to_stacks = None

log = logging.getLogger(__name__)

ADAPTER = "default"

Switch: TypeAlias = Callable[[], AbstractContextManager]
"""Makes the context in which a model is the base or one of its adapters."""


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer that an adapter can sit on, by its full name: all but the output head.

    4-bit layers count: bitsandbytes derives them from ``nn.Linear``. A mixture's router does not, which may be derived
    from it and return scores and choices; nor does DeepSeek V4's product in groups, nor Zamba2's lists of pairs, of
    which a layer runs one and passes the others by.
    """
    head = model.get_output_embeddings()
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    others = {n for n, m in layers.items() if type(m).__name__.endswith("GroupedLinear") or "_adapter_list." in n}
    return {n: m for n, m in layers.items() if n not in others and "router" not in n.split(".")[-2:]}


KINDS = {"attention": ("attn", "attention"), "mamba": ("mamba", "mixer", "ssm"), "mlp": ("mlp", "moe", "feed_forward")}
"""Kinds of layers that may be named together, and what the modules are called that hold them."""


WITHOUT_OUT_PROJ = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Types of models in which PEFT refuses an adapter of ``out_proj``, as the library's kernels would pass it over."""


EXPERTS_BEFORE = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""What an expert's matrices were called before they lay in stacks; PEFT refuses one of a pair without the other."""


def targeted(model: nn.Module, config: LoraConfig) -> dict[str, nn.Module]:
    """The linear layers that are to be adapted, by their full names.

    Raises:
        UserError: a target that the model has not, or that PEFT refuses in it, or no linear layer at all.
    """
    layers = linear_layers(model)
    left_out = _left_out(model)
    layers = {name: layer for name, layer in layers.items() if name.rpartition(".")[2] not in left_out}
    if not layers:
        raise UserError(f"--model: a {model.config.model_type} model has no linear layer for an adapter; take another")
    if config.targets is None:
        return layers
    chosen: set[str] = set()
    for target in listed(config.targets):
        found = {name for name in layers if target in ("all", name, name.rpartition(".")[2], _kind(name))}
        if not found:
            names = sorted({name.rpartition(".")[2] for name in layers})
            kinds = sorted({kind for name in layers if (kind := _kind(name))})
            close = difflib.get_close_matches(target, [*names, *kinds], 1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UserError(
                f"--lora-targets {target}: no linear layer that can have an adapter is called so; {hint}there are "
                f"{', '.join(kinds)} and all, and the layers {', '.join(names)}"
            )
        chosen |= found
    return {name: layer for name, layer in layers.items() if name in chosen}


def _left_out(model: nn.Module) -> set[str]:
    """The layers, by the last parts of their names, that PEFT does not adapt as it is told, or transformers reads past.

    In many mixtures it takes the names of dense layers and shared experts for those of all experts, as transformers
    called these before 5.0, and adapts the stacks in their place.
    """
    names = {name.rpartition(".")[2] for name in linear_layers(model)}
    kind = model.config.model_type
    left_out = names & {*READ_PAST.get(kind, ()), *(("out_proj",) if kind in WITHOUT_OUT_PROJ else ())}
    if _to_stacks is None or not experts.number(model.config):
        return left_out
    config = peft.LoraConfig(target_modules=names | {*EXPERTS_BEFORE})
    _to_stacks(config, model, None)
    return left_out | (names - set(config.target_modules))


def _kind(layer: str) -> str:
    """Of ``KINDS``, by the innermost module that tells; empty where none does."""
    for part in reversed(layer.lower().split(".")[:-1]):
        for kind, words in KINDS.items():
            if any(word in part for word in words):
                return kind
    return ""


def _target_modules(model: nn.Module, config: LoraConfig) -> list[str]:
    """What PEFT is to adapt: the last parts of the names, which others read, where these mean no other module."""
    chosen = targeted(model, config)
    short = {name.rpartition(".")[2] for name in chosen}
    # Of all modules, as PEFT takes any: in an nn.Sequential a linear layer is called 0, as the first decoder layer is.
    meant = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in short}
    return sorted(short if meant == chosen.keys() else chosen)


def shapes(model: nn.Module, config: LoraConfig) -> list[tuple[int, int, int]]:
    """(out, in, rank) of each matrix that ``attach`` would adapt.

    Raises:
        UserError: a target, or experts, that the model has not.
    """
    rank = config.resolved().rank
    linear = [(layer.out_features, layer.in_features, rank) for layer in targeted(model, config).values()]
    return linear + (expert_shapes(model, rank) if config.experts else [])


def expert_shapes(model: nn.Module, rank: int) -> list[tuple[int, int, int]]:
    """(out, in, rank) of each expert's matrix. Raises UserError where there are no experts."""
    return [(*stack.shape[1:], rank) for stack in experts.require(model).values() for _ in range(len(stack))]


def attach(model: nn.Module, config: LoraConfig) -> peft.PeftModel:
    """Put an adapter on each targeted layer of a frozen model: B = 0, A drawn from torch's generator.

    Raises:
        UserError: a target name that no layer has, or experts that are not there.
    """
    targets = _target_modules(model, config)
    if left_out := _left_out(model):
        _say_what_is_left_out(model.config.model_type, ", ".join(sorted(left_out)))
    lora = peft.LoraConfig(
        r=config.resolved().rank,
        lora_alpha=config.resolved().alpha,
        use_rslora=config.rslora,
        lora_dropout=config.dropout,
        target_modules=targets,
        # As PEFT looks for stacks of experts in every layer, such as experts.down_proj.
        target_parameters=sorted({".".join(name.split(".")[-2:]) for name in experts.require(model)})
        if config.experts
        else None,
        bias="none",
        task_type="CAUSAL_LM",
    )
    return _with_our_products(peft.get_peft_model(model, lora, adapter_name=ADAPTER))


@cache
def _say_what_is_left_out(kind: str, names: str) -> None:
    log.warning(
        "--model: no adapter on %s, which PEFT or transformers skips in %s models; the other layers get one",
        names,
        kind,
    )


def read_config(folder: Path) -> peft.PeftConfig:
    """PEFT's configuration of a saved adapter from anywhere, with the names of its layers in place of a pattern.

    To match a stranger's pattern could take for ever, and the file of the weights has the names.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, OSError: the configuration is damaged, or would be dear.
        SafetensorError: the weights are.
    """
    written = parse_json((folder / ADAPTER_CONFIG).read_bytes())
    check_config(written)
    config = peft.PeftConfig.from_pretrained(str(folder))
    if isinstance(getattr(config, "target_modules", None), str):
        with safe_open(folder / WEIGHTS, "pt") as file:
            config.target_modules = {name for name in modules_of(file.keys()) if not is_of_experts(name, written)}
    return config


def load_adapted(
    base: BaseConfig,
    adapters: Mapping[str, Path],
    dtype: torch.dtype,
    device: torch.device,
    attention: str = "sdpa",
) -> tuple[PreTrainedModel, list[Switch]]:
    """The frozen model on the device with saved adapters on it, to be scored or generated with.

    Args:
        base: the model.
        adapters: their folders, by what errors name them. Rank and scale are those in each folder.
        dtype: of the frozen weights.
        device: that they go to.
        attention: kernel.

    Returns:
        The transformers model, which forward passes go through, in evaluation mode; and the contexts in which it is
        the base alone, and then each of the adapters.

    Raises:
        UserError: the model cannot be loaded, or an adapter does not fit it, is broken or of a kind without switch.
    """
    plain = load_model(base, dtype, attention, device).to(device)
    model: peft.PeftModel | None = None
    switches: list[Switch] = []
    for number, (label, folder) in enumerate(adapters.items()):
        key = f"scored_{number:04d}"  # PEFT looks for it inside of the names of weights: none may hold another
        try:
            config = read_config(folder)
            if config.is_prompt_learning or config.is_adaption_prompt:
                raise UserError(f"{label}: is a {config.peft_type.value} adapter, and only LoRA's kin is scored")
            config.inference_mode = True
            if model is None:
                model = peft.PeftModel(plain, config, adapter_name=key)
            else:
                model.add_adapter(key, config)
            found = model.load_adapter(folder, adapter_name=key, torch_device=str(device))
            _with_our_products(model)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = str(error).strip().splitlines()[0][:200]
            raise UserError(f"{label}: its adapter does not fit {base.name} ({reason})") from error
        except SafetensorError as error:
            raise UserError(f"{label}: its weights cannot be read ({error}); the file is damaged") from error
        if lacking := [*found.missing_keys, *found.unexpected_keys]:
            raise UserError(f"{label}: its adapter does not fit {base.name}, which differs in {lacking[0]}")
        switches.append(partial(_switched_to, model, key))
    return plain.eval(), [partial(_switched_off, model) if model else nullcontext, *switches]


@contextmanager
def _switched_to(model: peft.PeftModel, adapter: str) -> Iterator[None]:
    model.base_model.set_adapter(adapter, inference_mode=True)
    yield


@contextmanager
def _switched_off(model: peft.PeftModel) -> Iterator[None]:
    """``model.disable_adapter`` would look over every weight of every adapter first: longer than the switch."""
    model.base_model.disable_adapter_layers()
    try:
        yield
    finally:
        model.base_model.enable_adapter_layers()


def attach_saved(model: nn.Module, folder: Path, config: peft.LoraConfig, dropout: float) -> peft.PeftModel:
    """Put a saved adapter on a frozen model, to be trained on.

    Args:
        model: the base model; that the adapter fits it is known.
        folder: what PEFT has saved.
        config: the adapter's.
        dropout: probability of dropping an input of the adapter from now on; an adapter of experts has none.
    """
    config = copy.copy(config)
    config.lora_dropout = dropout
    return _with_our_products(peft.PeftModel.from_pretrained(model, folder, ADAPTER, is_trainable=True, config=config))


class _OneProduct(LoraVariant):
    """W x + B (s A) x, the sum taken inside of the product with B, and the smallest tensor scaled.

    PEFT scales the wide one and adds it apart: of what a step moves through a GPU's memory that is a tenth.
    """

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        dropout, a, b = (part[active_adapter] for part in (module.lora_dropout, module.lora_A, module.lora_B))
        inputs, outputs = dropout(x).flatten(0, -2).to(result.dtype), result.flatten(0, -2)
        factors = a.weight, b.weight, module.scaling[active_adapter]
        if torch.compiler.is_compiling() and _can_be_joined(module, dropout, result.dtype):
            # ``result`` is read no more: the compiler leaves out the product that it is.
            return _Joined.apply(inputs, module.base_layer.weight, *factors).view(result.shape)
        return _Added.apply(outputs, inputs, *factors).view(result.shape)


class _Added(torch.autograd.Function):
    """outputs + s B A inputs, (tokens, out) and (tokens, in) of one dtype; A and B in a wider one."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, inputs: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        scaled_a, b_, a_, scaled_b = _narrowed(a, b, scale, outputs.dtype)
        narrow = inputs @ scaled_a.mT
        ctx.save_for_backward(inputs, narrow, a_, scaled_b)
        ctx.dtypes = a.dtype, b.dtype
        return torch.addmm(outputs, narrow, b_.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        inputs, narrow, a, scaled_b = ctx.saved_tensors
        d_narrow = d_outputs @ scaled_b
        d_inputs = d_narrow @ a if ctx.needs_input_grad[1] else None
        d_a, d_b = map(_product, (d_narrow.mT, d_outputs.mT), (inputs, narrow), ctx.dtypes)
        return d_outputs, d_inputs, d_a, d_b, None


def _can_be_joined(module: Any, dropout: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a layer is a plain frozen product with the same inputs as its only active adapter."""
    is_alone = len(module.active_adapters) == 1 and isinstance(dropout, nn.Identity)
    return _is_plain(module.base_layer) and is_alone and module.base_layer.weight.dtype == dtype


def _is_plain(base: nn.Module) -> bool:
    return type(base) is nn.Linear and base.bias is None and not base.weight.requires_grad


class _Joined(torch.autograd.Function):
    """inputs W^T + s inputs A^T B^T, as one product where that moves less; W (out, in) frozen and of the inputs' dtype.

    An adapter's wide product reads and writes the sum once more. Copied beside the inputs and the weight, its factors
    only make the base product's inner side longer by the rank.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        scaled_a, b_, a_, scaled_b = _narrowed(a, b, scale, inputs.dtype)
        outputs, *beside = _with_low_rank(inputs, weight.mT, scaled_a.mT, b_.mT)
        ctx.save_for_backward(weight, a_, scaled_b, *beside)
        ctx.dtypes = a.dtype, b.dtype
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        weight, a, scaled_b, *beside = ctx.saved_tensors
        inputs, narrow = _apart(beside, a)
        if ctx.needs_input_grad[0]:
            d_inputs, *beside = _with_low_rank(d_outputs, weight, scaled_b, a)
            _, d_narrow = _apart(beside, scaled_b.mT)
        else:
            d_inputs, d_narrow = None, d_outputs @ scaled_b
        d_a, d_b = map(_product, (d_narrow.mT, d_outputs.mT), (inputs, narrow), ctx.dtypes)
        return d_inputs, None, d_a, d_b, None


def _with_low_rank(inputs: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> list[Tensor]:
    """inputs weight + (inputs down) up; and the inputs and (inputs down), beside one another if they are copied so.

    Kept as the one tensor that they are then, they are written there at once.
    """
    narrow = inputs @ down
    if inputs.numel() + weight.numel() < len(inputs) * weight.shape[1]:  # to copy moves less than to write and read it
        joined = torch.cat([inputs, narrow], 1)
        return [joined @ torch.cat([weight, up]), joined]
    return [torch.addmm(inputs @ weight, narrow, up), inputs, narrow]


def _apart(beside: list[Tensor], down: Tensor) -> tuple[Tensor, ...]:
    """Inputs and (inputs down), of what ``_with_low_rank`` returns of them; ``down`` (rank, inner)."""
    return tuple(beside) if len(beside) == 2 else beside[0].split([down.shape[1], down.shape[0]], 1)


def _narrowed(a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> list[Tensor]:
    """s A and B for the forward pass, A and s B for the backward one, so that no gradient is scaled."""
    if not torch.compiler.is_compiling():
        return [t.to(dtype) for t in (a * scale, b, a, b * scale)]
    both, sizes = torch.cat([a, b.mT], 1), (a.shape[1], b.shape[0])  # one kernel for all
    (a, b), (scaled_a, scaled_b) = (t.to(dtype).split(sizes, 1) for t in (both, both * scale))
    return [scaled_a, b.mT, a, scaled_b.mT]


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix product in a dtype, which a GPU sums and writes in it."""
    if left.dtype != dtype and kind_of(left.device) == "cuda":
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


class _Linear(lora_layers.Linear):
    """PEFT's layer, which on a CPU takes all of its products in one step of autograd.

    It is PEFT's in every other respect, and wherever an adapter is merged, has dropout, or is not alone.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight, dtype = self.base_layer.weight, x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        names = [] if self.disable_adapters else self.active_adapters
        plain = x.device.type == "cpu" and dtype == weight.dtype and not torch.compiler.is_compiling()
        if not plain or args or kwargs or self.merged or len(names) > 1 or not all(map(self._is_ours, names)):
            return super().forward(x, *args, **kwargs)
        inputs, shape = x.to(dtype).flatten(0, -2), (*x.shape[:-1], len(weight))
        if not names:
            return _WithAdapter.apply(inputs, weight, None, None, 0.0).view(shape)
        [name] = names
        factors = self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]
        return _WithAdapter.apply(inputs, weight, *factors).view(shape)

    def _is_ours(self, name: str) -> bool:
        if name not in self.lora_A:  # an adapter of other layers
            return False
        dropout = self.lora_dropout[name]
        without = isinstance(dropout, nn.Identity) or not dropout.training
        return isinstance(self.lora_variant.get(name), _OneProduct) and without and self.lora_B[name].bias is None


class _WithAdapter(torch.autograd.Function):
    """inputs W^T + s inputs A^T B^T, each sum taken inside of a product; W (out, in) frozen and of the inputs' dtype.

    Without A and B it is the base's product.
    """

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, a: Tensor | None, b: Tensor | None, scale: float) -> Tensor:
        outputs = product(inputs, weight.mT)
        ctx.scale, ctx.kept = scale, a is not None
        if a is None or b is None:
            ctx.save_for_backward(weight)
            return outputs
        ctx.dtypes, a, b = (a.dtype, b.dtype), a.to(inputs.dtype), b.to(inputs.dtype)
        narrow = product(inputs, a.mT)
        ctx.save_for_backward(weight, inputs, narrow, a, b)
        return outputs.addmm_(narrow, b.mT, alpha=scale)

    @staticmethod
    @once_differentiable
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        d_inputs = product(d_outputs, weight) if ctx.needs_input_grad[0] else None
        if not kept:
            return d_inputs, None, None, None, None
        inputs, narrow, a, b = kept
        d_narrow = product(d_outputs, b).mul_(ctx.scale)
        if d_inputs is not None:
            d_inputs.addmm_(d_narrow, a)
        d_a, d_b = product(d_narrow.mT, inputs).to(ctx.dtypes[0]), (d_outputs.mT @ narrow).to(ctx.dtypes[1])
        return d_inputs, None, d_a, d_b.mul_(ctx.scale), None


def _with_our_products(model: peft.PeftModel) -> peft.PeftModel:
    experts.install(model)
    norm.install(model)
    for module in model.modules():
        if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper):
            for name, b in module.lora_B.items():  # but what PEFT computes in another way, such as DoRA
                if name not in module.lora_variant and type(b) is nn.Linear and b.bias is None:
                    module.lora_variant[name] = _OneProduct()
        if type(module) is lora_layers.Linear and _is_plain(module.base_layer):
            module.__class__ = _Linear
    return model


def _adapted(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """The wrapped layers, each by the name that PEFT saves its factors under."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_A:
            yield name.removeprefix("base_model.model."), module


def low_rank_updates(model: nn.Module) -> dict[str, LowRankUpdate]:
    """The factors of every adapted layer, which share the model's storage.

    Their keys are the layers' names in the base model; of a stack of experts, the parameter's.
    """
    updates = {}
    for name, module in _adapted(model):
        a, b, scale = module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight, module.scaling[ADAPTER]
        if isinstance(module, ParamWrapper):
            updates[experts.name_of(name, module)] = LowRankUpdate(a, b, scale, experts=module.num_experts)
        else:
            updates[name] = LowRankUpdate(a, b, scale)
    return updates


def names_in_file(model: nn.Module) -> list[str]:
    """The names of A and B of every adapted layer in an adapter's file, in the order of ``low_rank_updates``."""
    return [factor for name, _ in _adapted(model) for factor in factor_names(name)]


def leave_casting_to_autocast(model: nn.Module) -> None:
    """Let adapters take bf16 or fp16 inputs as they are, where every forward pass runs under autocast.

    PEFT would widen an input to the dtype of the factors, for autocast to narrow it again.
    """
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False


def untrained(updates: dict[str, LowRankUpdate]) -> list[str]:
    """Layers whose B has no gradient, or one that is zero everywhere: something bypasses them.

    B and not A, because A's gradient is zero as long as B is.
    """
    return [name for name, u in updates.items() if u.b.grad is None or not bool(u.b.grad.any())]
