from dataclasses import replace

import pytest
from tracked import CELL, asked

from granite_scu.config.errors import UserError
from research.laws.original import Original
from research.tracking import command as tracking
from research.tracking import grid as tracking_grid
from research.tracking import training as tracking_training


@pytest.mark.parametrize("setting", ["lambda_min=1e-4", "lambda-min=1e-4"])
def test_every_flag_of_a_run_can_be_set(monkeypatch, setting):
    """With the bounds that it was published with the original law is as it is without any of ours."""
    requests = []

    def refuse(request, console):
        requests.append(request)
        raise InterruptedError

    monkeypatch.setattr("granite_scu.training.recipe.prepare", refuse)
    options = ["--quick", "--controller", "original", "--set", setting, "lambda_max=2", "lambda_init=1"]
    cell = tracking._cells(asked(*options))[0]
    with pytest.raises(InterruptedError):
        tracking_training.train(cell)
    control = requests[0].control
    assert control.law() == Original(setpoint=cell.setpoint)


def test_a_setting_that_a_law_refuses_itself_is_refused_in_time():
    """The configuration lets it through: the original law's own first lambda is 1."""
    with pytest.raises(UserError, match=r"--controller research\.laws\.original:Original: lambda_init 1\.0"):
        tracking_training.request_of(replace(CELL, controller="original", settings=("--lambda-max=0.1",)), "unused")


@pytest.mark.parametrize("setting", ["isolate_documents", "isolate-documents", "data.isolate_documents=true"])
def test_documents_are_kept_apart_only_where_that_is_set(setting):
    usual, apart = (tracking._cells(asked("--quick", *more))[0] for more in ((), ("--set", setting)))
    assert not tracking_training.request_of(usual, "unused").data.isolate_documents
    assert tracking_training.request_of(apart, "unused").data.isolate_documents
    assert usual.key() != apart.key()


@pytest.mark.slow
@pytest.mark.parametrize("disturbance", tracking_grid.DISTURBANCES)
def test_a_real_run_is_disturbed_at_its_middle(monkeypatch, disturbance):
    monkeypatch.setattr(tracking_training, "EVERY", 4)
    cell = replace(CELL, steps=16)
    plain = tracking_training.train(cell)
    disturbed = tracking_training.train(replace(cell, disturbance=disturbance))
    assert [record["step"] for record in disturbed] == [4, 8, 12, 16]
    assert disturbed[:2] == [{**ours, **_times(theirs)} for ours, theirs in zip(plain, disturbed, strict=False)][:2]
    changed = {"learning rate x3": "lr", "corpus switched": "data_bpt"}.get(disturbance, "s_target")
    assert disturbed[2][changed] != plain[2][changed]
    if disturbance == "learning rate x3":
        assert disturbed[2]["lr"] == pytest.approx(3 * plain[2]["lr"])


def _times(record: dict) -> dict:
    """What differs between two equal runs."""
    return {name: record[name] for name in ("tokens_per_s", "samples_per_s", "mfu")}
