"""Documents that share a block and do not see one another: in attention, in convolutions and in the scan's state."""

from typing import Any

import torch
from torch import Tensor, nn

from granite_scu.model.mamba2.conv import runs_of
from granite_scu.model.mamba2.mamba import HYBRID, layers_of
from granite_scu.model.mamba2.tiling import kind_of


def isolating(model: nn.Module, documents: Tensor | None) -> dict[str, Tensor | dict[str, Tensor | None]]:
    """Arguments of the model's forward pass under which each document is computed as if it stood alone.

    Attention layers get positions that begin at zero in each document, from which transformers makes the mask; its
    hybrid model passes them on to no mask, so that the mask itself is given there, and the documents' numbers for the
    Mamba-2 layers (``mamba.mix``). Its own Mamba code would refuse them without compiled kernels.

    Args:
        model: a transformers causal language model (not wrapped by PEFT).
        documents: (batch, time) numbers of documents, each document in one run; None where blocks are seen as wholes.
    """
    if documents is None:
        return {}
    runs = runs_of(documents)
    time = torch.arange(runs.shape[1], device=runs.device).expand_as(runs)
    begins = torch.nn.functional.pad(runs[:, 1:] != runs[:, :-1], (1, 0), value=True)
    positions = time - torch.where(begins, time, 0).cummax(1).values
    if model.config.model_type != HYBRID:
        return {"position_ids": positions}
    masks = {"full_attention": _mask(runs, model), "linear_attention": None}
    return {"position_ids": positions, "attention_mask": masks, "seq_idx": runs}


def can_isolate(model: nn.Module, attention: str) -> bool:
    """Whether ``isolating`` is known to work: not through recurrent layers of other models, nor in flash-attention."""
    is_recurrent = bool(layers_of(model)) or any(hasattr(module, "A_log") for module in model.modules())
    return attention != "flash_attention_2" and (model.config.model_type == HYBRID or not is_recurrent)


def _mask(runs: Tensor, model: nn.Module) -> Tensor:
    """(batch, 1, time, time): what each token sees, as booleans or as what is added to scores.

    Eager attention adds. So do SDPA's kernels on a GPU, which would make a tensor of the booleans in every layer and
    keep it for the backward pass; one made here serves them all.
    """
    seen: Any = (runs.unsqueeze(2) == runs.unsqueeze(1)).tril().unsqueeze(1)
    if model.config._attn_implementation != "eager" and kind_of(runs.device) == "cpu":
        return seen
    dtype = next(model.parameters()).dtype
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
