"""What eval asks of the machine."""

from granite_scu.config.settings import TINY_MODEL, BaseConfig
from granite_scu.evaluation.bpt.evaluate import _machine


def test_models_are_scored_uncompiled_in_the_precision_that_is_asked_for():
    here = _machine(BaseConfig(name=TINY_MODEL, compile=True), "cpu", "fp32")
    assert (here.accelerator, here.precision, here.compiled) == ("cpu", "32-true", False)
