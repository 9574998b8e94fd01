"""The embedded model, as transformers loads it and as we do."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from granite_scu.config.settings import TINY_MODEL, BaseConfig
from granite_scu.model import finding, loading


@pytest.fixture
def library_model():
    """The embedded model in fp32, untouched by us."""
    return AutoModelForCausalLM.from_pretrained(finding.resolve(TINY_MODEL), dtype=torch.float32)


@pytest.fixture
def model():
    """The embedded model in fp32, as a run loads it."""
    return loading.load_model(BaseConfig(TINY_MODEL), torch.float32)
