"""The chunked KL against the model's own logits, in float64."""

from contextlib import contextmanager

import pytest
import torch
from references import granite, llama

from granite_scu.config.settings import IGNORED
from granite_scu.model import kl_divergence as divergence
from granite_scu.model.kl_divergence import summed_kl


class Moved:
    """A model whose weights are moved, and a context in which they are not."""

    def __init__(self, build, size: float) -> None:
        self.model = build().eval()
        self.weight = self.model.get_input_embeddings().weight
        self.step = size * torch.randn(self.weight.shape)
        with torch.no_grad():
            self.weight += self.step

    @contextmanager
    def without(self):
        with torch.no_grad():
            self.weight -= self.step
            yield
            self.weight += self.step


@pytest.fixture
def ids():
    return torch.randint(2, 64, (3, 7), generator=torch.Generator().manual_seed(0))


def plain_kl(moved: Moved, ids) -> torch.Tensor:
    with torch.no_grad():
        adapted = moved.model(input_ids=ids, use_cache=False).logits.double().softmax(-1)
        with moved.without():
            base = moved.model(input_ids=ids, use_cache=False).logits.double().softmax(-1)
    return (adapted * (adapted / base).log()).sum()


# Untied, so that the head is the same on both sides, as it is under adapters.
@pytest.mark.parametrize("build", [granite, llama])
@pytest.mark.parametrize("chunk", [4, 2048])
def test_it_is_what_the_models_own_logits_say_whatever_the_chunk(build, chunk, ids, monkeypatch):
    monkeypatch.setattr(divergence, "chunk_on", lambda device: chunk)
    moved = Moved(build, size=0.1)
    assert moved.model.get_output_embeddings().weight is not moved.weight
    with torch.no_grad():
        found = summed_kl(moved.model, ids, ids, moved.without)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(plain_kl(moved, ids)), rel=1e-4)
    assert found > 0.01


@pytest.mark.parametrize("build", [granite, llama])
def test_positions_that_are_not_counted_add_nothing(build, ids):
    moved = Moved(build, size=0.1)
    first, second, none = ids.clone(), ids.clone(), torch.full_like(ids, IGNORED)
    first[:, 3:] = IGNORED
    second[:, :3] = IGNORED
    with torch.no_grad():
        whole, *parts, nothing = (summed_kl(moved.model, ids, x, moved.without) for x in (ids, first, second, none))
    assert all(part > 0.01 for part in parts) and nothing == 0
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-4)


@pytest.mark.parametrize("build", [granite, llama])
def test_a_model_that_has_not_moved_is_at_distance_zero(build, ids):
    moved = Moved(build, size=0.0)
    with torch.no_grad():
        assert summed_kl(moved.model, ids, ids, moved.without) == 0
