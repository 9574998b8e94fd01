"""The one LoRA adapter of any PEFT model, or a line that says why S cannot be measured of it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from granite_scu.model.description_length import LowRankUpdate

WRAPPED = "base_model.model."


class Adapter:
    """The factors of a model's active adapter, which share the model's storage.

    Args:
        model: a PEFT model, or a transformers model with an adapter of its own.

    Raises:
        ValueError: the model has no adapter, one whose Delta W is not s B A, more than one that is active, none that is
            trained, layers that share one or lie on several devices, or trains something besides.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = _layers(model)
        _check_trained(model, self._layers.values())
        _check_apart(self._layers)
        _check_together(self.factors)
        self.origin: list[Tensor] | None = None

    def check_scaled(self) -> None:
        """Raise ValueError where A and B cannot be multiplied by what is hardly less than 1 after each step."""
        if not all(factor.requires_grad and factor.dtype.itemsize >= 4 for factor in self.factors):
            raise ValueError(
                'actuator="decoupled": scales A and B in fp32, and of this adapter some are frozen or narrower, where '
                'rounding takes the change; use actuator="loss", or an adapter in fp32'
            )

    def start_here(self) -> None:
        """Training begins now. Where the adapter is not zero, S measures how far training moves it from here."""
        # PEFT begins with B = 0 on linear layers, and with A = 0 on embeddings.
        if any(bool(update.a.any()) and bool(update.b.any()) for update in self._layers.values()):
            self.origin = [factor.detach().clone() for factor in self.factors]

    def start_from(self, factors: Mapping[str, Tensor]) -> None:
        """Training began from these factors, by the ``factor_names``."""
        values = [factors[name] for name in self.factor_names]
        self.origin = [value.to(factor) for value, factor in zip(values, self.factors, strict=True)]

    @property
    def factors(self) -> list[Tensor]:
        """A and B of every adapted layer, in the order of the layers."""
        return [factor for update in self._layers.values() for factor in (update.a, update.b)]

    @property
    def factor_names(self) -> list[str]:
        """A name for each of the factors."""
        return [f"{layer}.{factor}" for layer in self._layers for factor in ("A", "B")]

    def updates(self) -> list[LowRankUpdate]:
        """The layers' updates as they are now, in fp32."""
        kept = self.origin
        origins = [None] * len(self._layers) if kept is None else zip(kept[::2], kept[1::2], strict=True)
        return [
            replace(u, a=u.a.float(), b=u.b.float(), origin=origin and (origin[0].float(), origin[1].float()))
            for u, origin in zip(self._layers.values(), origins, strict=True)
        ]


def _layers(model: nn.Module) -> dict[str, LowRankUpdate]:
    """Every adapted layer's update, by the layer's name in the base model."""
    tuned = {name.removeprefix(WRAPPED): m for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
    if not tuned:
        raise ValueError(
            "the model has no LoRA layer, and S is measured of one; give get_peft_model(model, LoraConfig(...)), or "
            "SFTTrainer its peft_config"
        )
    active = sorted({name for layer in tuned.values() for name in layer.active_adapters})
    if len(active) > 1:
        raise ValueError(
            f"{len(active)} adapters are active ({', '.join(active)}), and the description of one is measured; choose "
            f"it with model.set_adapter({active[0]!r})"
        )
    [adapter] = active
    found = {name: update for name, layer in tuned.items() if (update := _update(name, layer, adapter)) is not None}
    if not found:
        raise ValueError(f"no layer has the active adapter {adapter!r}; choose another with model.set_adapter(...)")
    return found


def _update(name: str, layer: BaseTunerLayer, adapter: str) -> LowRankUpdate | None:
    """The update of one layer; None where the adapter leaves it out."""
    if layer.disable_adapters or layer.merged:
        state = "merged into the layer" if layer.merged else "switched off"
        raise ValueError(f"{name}: the adapter is {state}, so that training would not act; undo that before training")
    family = type(layer).__module__.removeprefix("peft.tuners.").partition(".")[0]
    kind = f"kind {family} {type(layer).__name__}"
    if isinstance(layer, LoraLayer):
        if adapter in layer.lora_variant:
            kind = f"LoRA variant {type(layer.lora_variant[adapter]).__name__.partition('Variant')[0]}"
        elif adapter in layer.lora_embedding_A:
            a, b = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
            return LowRankUpdate(a, b, layer.scaling[adapter])
        elif adapter not in layer.lora_A:
            return None
        elif isinstance(layer.lora_A[adapter], nn.Linear):
            a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            experts = layer.num_experts if isinstance(layer, ParamWrapper) else 0
            return LowRankUpdate(a, b, layer.scaling[adapter], experts=experts)
    raise ValueError(
        f"{name}: an adapter of the {kind} adds something else than Delta W = s B A; train a plain LoRA adapter on "
        "linear layers and embeddings"
    )


def _check_apart(layers: Mapping[str, LowRankUpdate]) -> None:
    """Refuse layers that share their factors: ParamBPT would count the bits of one update twice."""
    owners: dict[int, str] = {}
    for layer, update in layers.items():
        for factor in (update.a, update.b):
            place = factor.data_ptr()
            if place and owners.setdefault(place, layer) != layer:
                raise ValueError(
                    f"ShannonCallback: {owners[place]} and {layer} share one adapter, as PEFT's ensure_weight_tying "
                    "makes it, and its bits would be counted twice; leave one of the two layers out"
                )


def _check_together(factors: Iterable[Tensor]) -> None:
    """Refuse factors on several devices, over which nothing here sums."""
    if len(devices := sorted({str(factor.device) for factor in factors})) > 1:
        raise ValueError(
            f'ShannonCallback: the adapter lies on {", ".join(devices)}, as device_map="auto" spreads a model; put the '
            'whole on one with device_map={"": 0}, or train with DDP (torchrun)'
        )


def _check_trained(model: nn.Module, updates: Iterable[LowRankUpdate]) -> None:
    """Refuse an adapter that is frozen, and a model that trains more than its factors."""
    updates = list(updates)
    if not any(update.b.requires_grad for update in updates):
        raise ValueError("the adapter is frozen; load it with PeftModel.from_pretrained(..., is_trainable=True)")
    factors = {id(factor) for update in updates for factor in (update.a, update.b)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in factors:
            raise ValueError(
                f"{name.removeprefix(WRAPPED)} is trained beside the adapter, and ParamBPT would not count it; leave "
                "modules_to_save, bias, lora_bias and trainable_token_indices out of the LoraConfig"
            )
