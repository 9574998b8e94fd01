"""A base model in shares gives what a whole one gives, to the bit."""

import killing
import pytest
import torch

pytestmark = pytest.mark.distributed

FLAGS = (
    *("--test-run", "--samples", 0, "--precision", "fp32", "--block-size", 64, "--eval-iters", 2, "--max-steps", 2),
    *("--save-steps", 1, "--eval-steps", 1, "--control-every", 1, "--gradient-accumulation-steps", 2),
    *("--batch-size", 2),
)


def count_at_the_end(where):
    """Has each rank write down how many numbers of the frozen layers it holds, and how many there are."""

    def prepare(rank):
        from torch.distributed.tensor import DTensor

        from granite_scu.training.callbacks.final_score import FinalScore

        ended = FinalScore.on_train_end

        def counted(finish, trainer, module):
            ended(finish, trainer, module)
            layers = module.language_model.base_model.layers
            frozen = [parameter for parameter in layers.parameters() if not parameter.requires_grad]
            own = [p.to_local() if isinstance(p, DTensor) else p for p in frozen]
            torch.save([sum(p.numel() for p in each) for each in (own, frozen)], where / f"held-{rank}.pt")

        FinalScore.on_train_end = counted

    return prepare


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="plain"),
        pytest.param(("--gradient-checkpointing", "--target-s", "10%"), id="again, and holding a setpoint"),
    ],
)
def test_shares_give_the_bits_of_the_whole(tmp_path, more):
    text = killing.texts(tmp_path / "text")
    for name, flags in (("whole", ()), ("shares", ("--fsdp",))):
        line = [*FLAGS, *more, *flags, "--data-dir", text, "--output-dir", tmp_path / name]
        logs = [tmp_path / f"{name}{rank}.log" for rank in range(2)]
        children = killing.fork_two(line, logs, count_at_the_end(tmp_path))
        assert [killing.wait(child) for child in children] == [0, 0], "".join(log.read_text() for log in logs)
    one, other = (killing.outcome(tmp_path / name) for name in ("whole", "shares"))
    assert {name: one[name] == other[name] for name in one} == dict.fromkeys(one, True)
    held = [torch.load(tmp_path / f"held-{rank}.pt") for rank in range(2)]
    assert sum(own for own, _ in held) == held[0][1]
    assert all(own < 0.6 * every for own, every in held)
