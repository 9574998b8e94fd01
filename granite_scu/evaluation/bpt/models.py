"""Load what is scored: the base once with all its adapters, whole models one after the other."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import peft
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from granite_scu.config.settings import BaseConfig
from granite_scu.data.sources.documents import Document
from granite_scu.errors import UserError
from granite_scu.evaluation.bpt.passes import Switch
from granite_scu.evaluation.bpt.subjects import Subject
from granite_scu.hardware.machine import Machine
from granite_scu.model import loading
from granite_scu.model.adapters import leave_casting_to_autocast
from granite_scu.model.loading import WEIGHT_DTYPES

SAMPLE = 200_000
"""Characters of the texts on which tokenizers are compared."""


def load_tokenizer(base: str, subjects: Sequence[Subject], texts: Sequence[Document]) -> PreTrainedTokenizerBase:
    """The tokenizer of the base, which is everybody's.

    Args:
        base: the base model, or the first of whole models.
        subjects: where one has a tokenizer of its own, it must make the same tokens.
        texts: on which that is tried.

    Raises:
        UserError: a tokenizer differs, so that bits per token could not be compared.
    """
    tokenizer = loading.load_tokenizer(base)
    sample, left = [], SAMPLE
    for document in texts:
        sample.append(document.text[:left])
        left -= len(sample[-1])
        if left <= 0:
            break
    expected = _tokens(tokenizer, sample)
    for subject in subjects:
        own = _own_tokenizer(subject) if subject.given != base else None
        if own and _tokens(own, sample) != expected:
            raise UserError(
                f"{subject.given}: its tokenizer makes other tokens than that of {base}, so bits per token cannot be "
                "compared; score it alone and compare bits per byte"
            )
    return tokenizer


def _own_tokenizer(subject: Subject) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies in a model's or adapter's folder; None where an adapter has none."""
    if subject.kind == "model":
        return loading.load_tokenizer(subject.given)
    if not (subject.path / "tokenizer_config.json").is_file():
        return None
    try:
        return AutoTokenizer.from_pretrained(subject.path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{subject.given}: its tokenizer cannot be read ({error})") from error


def _tokens(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> tuple:
    beginning = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return beginning, tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def load_with_adapters(
    base: BaseConfig, name: str, adapters: Sequence[Subject], machine: Machine
) -> tuple[nn.Module, dict[str, Switch]]:
    """The base model with every adapter on it.

    Args:
        base: the model and how it is held.
        name: of the base in results.
        adapters: of this base.
        machine: device, precision and kernels.

    Returns:
        The transformers model, which forward passes go through, and for each name that it is scored as the context in
        which it is that.

    Raises:
        UserError: an adapter does not fit the base, or its file is broken.
    """
    config, device = replace(base, kernels=machine.kernels), machine.torch_device
    plain = loading.load_model(config, WEIGHT_DTYPES[machine.precision], machine.attention, device).to(device).eval()
    if not adapters:
        return plain, {name: nullcontext}
    model = _with_adapters(plain, adapters, base.name, device)
    if machine.precision != "32-true":
        leave_casting_to_autocast(model)
    model.eval()
    active = {adapter.name: partial(_scored_as, model, _key(number)) for number, adapter in enumerate(adapters)}
    return plain, {name: partial(_scored_as, model, None), **active}


def _with_adapters(plain: nn.Module, adapters: Sequence[Subject], base: str, device: torch.device) -> peft.PeftModel:
    model: peft.PeftModel | None = None
    for number, adapter in enumerate(adapters):
        try:
            config = peft.PeftConfig.from_pretrained(str(adapter.path))
            if config.is_prompt_learning or config.is_adaption_prompt:
                raise UserError(
                    f"{adapter.given}: is a {config.peft_type.value} adapter, and only LoRA's kin is scored"
                )
            config.inference_mode = True
            model = model or peft.PeftModel(plain, config, adapter_name=_key(number))
            found = model.load_adapter(adapter.path, adapter_name=_key(number), torch_device=str(device))
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            reason = str(error).strip().splitlines()[0][:200]
            raise UserError(f"{adapter.given}: its adapter does not fit {base} ({reason})") from error
        except SafetensorError as error:
            raise UserError(f"{adapter.given}: its weights cannot be read ({error}); the file is damaged") from error
        lacking = [*found.missing_keys, *found.unexpected_keys]
        if lacking:
            raise UserError(f"{adapter.given}: its adapter does not fit {base}, which differs in {lacking[0]}")
    assert model is not None
    return model


def _key(number: int) -> str:
    """What PEFT calls an adapter. It looks for the name inside of the names of weights, so none may hold another."""
    return f"scored_{number:04d}"


@contextmanager
def _scored_as(model: peft.PeftModel, adapter: str | None) -> Iterator[None]:
    """Have the model be the base with this adapter, or without any.

    ``model.disable_adapter`` would look over every weight of every adapter first: longer than the switch.
    """
    if adapter is not None:
        model.base_model.set_adapter(adapter, inference_mode=True)
        yield
        return
    model.base_model.disable_adapter_layers()
    try:
        yield
    finally:
        model.base_model.enable_adapter_layers()
