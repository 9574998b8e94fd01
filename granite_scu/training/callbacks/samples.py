"""After the score: what base model and adapter make of a few test documents, for the report."""

import logging
from dataclasses import asdict

import lightning as L
from transformers import PreTrainedTokenizerBase

from granite_scu.data.blocks.openings import openings
from granite_scu.evaluation.samples import SAMPLING, sample
from granite_scu.storage.run_folder import SAMPLES, RunFolder
from granite_scu.training.module import GraniteModule, evaluation_mode

log = logging.getLogger(__name__)


class Samples(L.Callback):
    """Writes ``samples.json``, where the test text has documents to continue. Comes after ``FinalScore``.

    One process does it, the others wait at the end of the run: none has a part in another's forward pass, as long as
    the weights are not in shares.

    Args:
        folder: the run folder.
        tokenizer: of the base model.
        count: documents that are continued.
    """

    def __init__(self, folder: RunFolder, tokenizer: PreTrainedTokenizerBase, count: int) -> None:
        self.folder, self.tokenizer, self.count = folder, tokenizer, count

    def on_train_end(self, trainer: L.Trainer, module: GraniteModule) -> None:
        if not trainer.is_global_zero:
            return
        beginnings = openings(trainer.datamodule.test, self.count)
        log.info("writing samples for the report")
        try:
            with trainer.precision_plugin.forward_context(), evaluation_mode(module.model):
                model, base = module.language_model, module.model.disable_adapter
                samples = sample(model, self.tokenizer, beginnings, base)
        except Exception as error:  # all is trained and scored, and must not be lost for two texts
            log.warning("the report has no samples: %s", " ".join(f"{type(error).__name__}: {error}".split()))
            return
        if samples:
            self.folder.write_json(SAMPLES, {**asdict(SAMPLING), "samples": [asdict(each) for each in samples]})
