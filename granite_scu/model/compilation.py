"""torch.compile of a decoder, layer by layer.

One graph of the whole decoder takes minutes to compile, for its layers are unrolled in it. Layers of a kind share the
graph that is compiled for the first of them, so that Granite's take two, however many they are: a Mamba-2 layer and an
attention layer. The norm behind them is a third.

And modes that a model is in for a while: not compiled, evaluation, without dropout.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch._dynamo.config
import torch._functorch.config
import torch._inductor
import transformers
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from granite_scu.config.errors import UserError
from granite_scu.config.settings import Recomputed

MODES = {
    "default": "default",
    "reduce-overhead": "reduce-overhead",
    # Autotuned without CUDA graphs: the second run of one overwrites the gradients that the first has left, and a step
    # accumulates them (pytorch/pytorch#169545).
    "max-autotune": "max-autotune-no-cudagraphs",
}
"""``--compile-mode`` as torch.compile takes it."""

OPTIONS = {"realize_reads_threshold": 32, "realize_opcount_threshold": 400, "realize_acc_reads_threshold": 32}
"""Of Inductor: what is made of many numbers, or by many operations, is computed again where it is used. The scan's
decays are (time, chunk) for each head; written and read again they would be a quarter of what a layer moves."""


PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm", *(
    f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")
), "_scaled_dot_product_flash_attention_for_cpu")  # fmt: skip
KERNELS = ("granite_scu", "flash_attn")
IN_4_BITS = "bitsandbytes::gemm_4bit"
"""Operators of PyTorch, namespaces of others', and one of such a namespace, whose results selective recomputation
keeps. The rest of bitsandbytes' makes weights of 4 bits, which are larger than what they are multiplied with."""


def options_of(mode: str) -> dict[str, Any]:
    """What torch.compile is given for a layer, of a mode of ``MODES``."""
    return torch._inductor.list_mode_options(MODES[mode]) | OPTIONS


def decoder_layers(model: nn.Module) -> nn.ModuleList | None:
    """The decoder's layers; None where they cannot be told."""
    count = model.config.num_hidden_layers
    return next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count), None)


def compiled_parts(model: nn.Module) -> list[nn.Module]:
    """The decoder's layers and the norm behind them; or the decoder, where its layers cannot be told apart."""
    layers, norm = decoder_layers(model), getattr(model.base_model, "norm", None)
    if layers is None:
        return [model.base_model]
    return [*layers, norm] if isinstance(norm, nn.Module) else [*layers]


def compile_decoder(model: PreTrainedModel, **how: Any) -> None:
    """Have the parts of a model's decoder compiled, each when it is first called.

    Args:
        model: whose layers it is done to.
        how: arguments of torch.compile.
    """
    # A first layer whose input wants no gradient would take a graph of its own. Nobody reads this gradient, which is
    # 0.3 % of a step's operations; that graph would be a third of the time to trace and lower them all.
    if decoder_layers(model) is not None:
        model.enable_input_require_grads()
    # Else the end of a long chain of operators is kept for the backward pass, and never computed again. Of a Mamba-2
    # layer that is the gate in fp32: 100 MB for 8 x 1024 tokens. For the whole process, as a graph is made later on.
    if hasattr(torch._functorch.config, "ban_recompute_long_fusible_chains"):
        torch._functorch.config.ban_recompute_long_fusible_chains = False
    # Else a layer with more than 1 MB of adapters is cut into several graphs, for DDP to send gradients sooner.
    torch._dynamo.config.optimize_ddp = False
    for part in compiled_parts(model):
        part.compile(**how)


def is_product(operator: Any) -> bool:
    """Whether an operator is dear: a matrix product, attention, or a kernel of a Mamba-2 layer."""
    full = getattr(operator, "_name", "").partition(".")[0]
    namespace, _, name = full.partition("::")
    return namespace in KERNELS or full == IN_4_BITS or (namespace == "aten" and name in PRODUCTS)


def can_keep_products() -> bool:
    """Whether transformers recomputes inside of a compiled layer, where the compiler sees it; before 5.23 around it."""
    return "__call__" not in vars(GradientCheckpointingLayer)


def check_selective(compiled: bool) -> None:
    """Refuse selective recomputation where layers are not compiled, or transformers is too old. Raises UserError."""
    flag = "--gradient-checkpointing selective"
    if not compiled:
        raise UserError(f"{flag}: layers are not compiled here; give --torch-compile, or on")
    if not can_keep_products():
        version = f"transformers {transformers.__version__} is too old for it"
        raise UserError(f"{flag}: {version}; pip install 'transformers>=5.23', or give on")


def recompute_activations(model: PreTrainedModel, how: Recomputed) -> None:
    """Have activations computed again in the backward pass, by layer: all, or, ``selective``, all but products.

    Selective is for a compiled model. Operator by operator, a product and what an adapter adds to it are both kept.

    Args:
        model: whose layers it is done to.
        how: ``selective`` or True; with False nothing is done.
    """
    context = {}
    if how == "selective":
        context = {"context_fn": _all_but_products}
        # It warns of operators that overwrite a product, once for all models; no layer has one, as its gradient shows.
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: "context_fn" not in str(record.msg))
    if how:
        model.gradient_checkpointing_enable({"use_reentrant": False, **context})


def _all_but_products() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_product(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def not_compiled() -> AbstractContextManager:
    """Run what is compiled as it is. Validation differs from training in grad mode and in the size of its last batch,
    and each would be compiled again, for minutes, to save seconds."""
    return torch.compiler.set_stance("force_eager")


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Without dropout and compilation inside, and back in the mode it was in outside."""
    training = model.training
    model.eval()
    try:
        with not_compiled():
            yield
    finally:
        model.train(training)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """The model's dropout off for as long as the context lasts, that without a layer too, of which a module or the
    configuration has the share: as ``attention_dropout``, in OPT as ``dropout``, in Falcon as ``hidden_dropout``."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Dropout) and layer.training]
    owners = [*model.modules(), getattr(model, "config", None)]
    shares = [(owner, name, share) for owner in owners for name, share in getattr(owner, "__dict__", {}).items()
              if name.endswith("dropout") and isinstance(share, float) and share]  # fmt: skip
    for layer in layers:
        layer.eval()
    for owner, name, _ in shares:
        setattr(owner, name, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.train()
        for owner, name, share in shares:
            setattr(owner, name, share)
