"""The embedded model's tokenizer, and the model with an adapter that changes what it says."""

import pytest
import torch

from granite_scu.config.settings import TINY_MODEL, BaseConfig, LoraConfig
from granite_scu.model import adapters, loading


@pytest.fixture(scope="session")
def tokenizer():
    return loading.load_tokenizer(TINY_MODEL)


@pytest.fixture(scope="session")
def model():
    """The embedded model with an adapter on every linear layer, in evaluation mode."""
    torch.manual_seed(0)
    model = adapters.attach(loading.load_model(BaseConfig(TINY_MODEL), torch.float32), LoraConfig(rank=2))
    for update in adapters.low_rank_updates(model).values():
        torch.nn.init.normal_(update.b, std=0.2)
    return model.eval()
