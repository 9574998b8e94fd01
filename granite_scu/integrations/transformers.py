"""The control loop in transformers' ``Trainer`` and TRL's ``SFTTrainer``, for any PEFT LoRA model: one callback."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.trainer_callback import ExportableState

from granite_scu.config.errors import Diverged, UserError
from granite_scu.config.flags import in_python, plain
from granite_scu.config.request import Request
from granite_scu.config.settings import (
    DEFAULT_EVERY,
    ControlConfig,
    DriftConfig,
    OptimizerConfig,
    PriorConfig,
    check,
    check_drift,
)
from granite_scu.control.loop import ControlLoop
from granite_scu.control.units import per_cent
from granite_scu.evaluation import general_text
from granite_scu.evaluation.answers import padding_for
from granite_scu.integrations.adapter import Adapter
from granite_scu.integrations.drift import looked_into, obtain, tokens_per_step
from granite_scu.integrations.loss_meter import counted
from granite_scu.integrations.plant import TrainerPlant
from granite_scu.model.drift import MARGIN, HeldDrift, anchor_tokens, loss_in_budget, steering_tokens
from granite_scu.storage import manifest
from granite_scu.storage.atomic import adding_to
from granite_scu.storage.run_folder import GENERAL

log = logging.getLogger(__name__)

ORIGIN = "scu_origin.safetensors"
"""In ``output_dir``: the adapter that training started from, where that was not zero."""

LOGGED = ("scu/data_bpt", "scu/param_bpt", "scu/s", "scu/s_target", "scu/lambda", "scu/drift_bpt", "scu/drift")
"""What the trainer's log lines get of a tick."""

KEYS = {
    "control_every": "control.every",
    "prior_sigma": "prior.sigma",
    "n_tokens": "prior.n_tokens",
    "gradient_clip": "optimizer.gradient_clip",
    "max_drift": "drift.max_drift",
    "general_data": "drift.general_data",
    "general_tokens": "drift.general_tokens",
}
"""The dotted keys of arguments that are no field of ``ControlConfig``."""

REPLICATED = {DistributedType.NO} | {kind for kind in DistributedType if kind.name.startswith("MULTI_")}
"""Ways to train in which every process has the adapter as a whole."""


class ShannonCallback(TrainerCallback, ExportableState):
    """Steers lambda so that S holds its setpoint, while a ``Trainer`` trains a LoRA adapter.

    Every ``control_every`` optimizer steps (a tick) it measures S and moves lambda; before each step it adds
    lambda * grad ParamNPT to the gradients of A and B. The trainer's arguments must have ``max_grad_norm=0``, for the
    trainer would clip before that: the callback clips after it.

    A tick's record is in ``trainer.state.log_history``, by the names of ``scu_history.json`` after ``scu/``. The
    controller's state is in the ``trainer_state.json`` of every checkpoint, and a resumed run continues from it.

    With ``max_drift`` it holds drift at most there in the place of S, and lambda multiplies drift. Its general text is
    kept as ``general.jsonl`` in ``output_dir``; drift on what the loop never sees is logged, ``scu/drift_held_out``, at
    each evaluation and at the end. Evaluations then have ``eval_drift`` and ``eval_loss_in_budget``, the loss, or more
    than 1000 where drift is beyond the budget: with ``load_best_model_at_end=True``,
    ``metric_for_best_model="loss_in_budget"`` and ``greater_is_better=False`` the trainer keeps the best within it, or
    the nearest. Of several evaluation sets each has its own, as ``eval_NAME_loss_in_budget``.

    Args:
        target_s: the setpoint S*, a ratio in (0, 1); of laws that have one and no budget of drift.
        controller: name of the law.
        control_every: optimizer steps between ticks.
        prior_sigma: standard deviation of the Gaussian prior on each entry of Delta W.
        n_tokens: N, the tokens that the description of the adapter is spread over; None counts the supervised tokens
            of the training set.
        gradient_clip: largest gradient norm, data and penalty together; 0 does not clip.
        max_drift: the budget of drift, a share of the bits that the base needs for general text, or "5%".
        general_data: files of general text; auto lets the model write it as training begins, near
            the questions of the chats that are trained on.
        general_tokens: tokens of general text.
        **settings: other fields of ``ControlConfig``, such as kp, lambda_init, measure or actuator.

    Raises:
        ValueError: there is no such setting, or it cannot have that value, or the law is not to be had here. Before
            training begins: the model, the arguments or the checkpoint do not suit it.
    """

    def __init__(
        self,
        target_s: float | None = None,
        controller: str = ControlConfig.controller,
        control_every: int = DEFAULT_EVERY,
        *,
        prior_sigma: float = PriorConfig.sigma,
        n_tokens: int | None = PriorConfig.n_tokens,
        gradient_clip: float = OptimizerConfig.gradient_clip,
        max_drift: float | str | None = DriftConfig.max_drift,
        general_data: list[str | Path] | str | Path = DriftConfig.general_data,
        general_tokens: int = DriftConfig.general_tokens,
        **settings: Any,
    ) -> None:
        control_every = DEFAULT_EVERY if control_every is None else control_every
        given = {name: value for name, value in locals().items() if name not in ("self", "settings")}
        with _of_arguments():
            self._arguments = {name: plain(name, value) for name, value in (given | settings).items()}
            check("every" not in settings, "--every", settings.get("every"), "give --control-every")
            keys = {name: KEYS.get(name, f"control.{name}") for name in self._arguments}
            request = Request.from_dotted({keys[name]: value for name, value in self._arguments.items()})
            self._config, self._drift, self._prior = request.control_held, request.drift, request.prior
            self._gradient_clip = request.optimizer.gradient_clip
            self._law = self._config.law()
        if hasattr(self._law, "sensor"):
            raise ValueError(f"controller {controller}: measures what a callback of a Trainer cannot")
        self._loop = ControlLoop(self._law, control_every)
        self._plant: TrainerPlant | None = None
        self._held: HeldDrift | None = None
        self._origin = self._general = ""
        self._tokens_per_step = 0

    # What the trainer calls

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        train_dataloader: DataLoader,
        **kwargs: Any,
    ) -> None:
        self._stop()
        _check_arguments(args)
        _check_loss(model)
        adapter = Adapter(model)
        if self._config.actuator == "decoupled":
            adapter.check_scaled()
        saved = self._saved(state)
        n_tokens = self._prior.n_tokens or saved.get("n_tokens") or count_supervised(train_dataloader)
        if saved:
            self._check_same(saved, n_tokens)
            self._find_origin(adapter, saved["origin"], Path(args.output_dir))
        else:
            self._keep_origin(adapter, Path(args.output_dir), state.is_world_process_zero)
        law, every = self._law, self._config.every
        self._plant = plant = TrainerPlant(
            model, adapter, args, kwargs["optimizer"], self._config,
            prior_sigma=self._prior.sigma, n_tokens=n_tokens, gradient_clip=self._gradient_clip,
            total_steps=state.max_steps,
        )  # fmt: skip
        self._held = None
        if self._drift.max_drift is not None:
            self._held = self._held_drift(plant, kwargs["processing_class"], train_dataloader, args, state)
            plant.drift_gradient = self._held.gradient
        self._loop = ControlLoop(law, every, self._held and self._held.measurement)
        if saved:
            self._loop.restore(saved["loop"])
            plant.restore_counted(saved["loop"])
        self._loop.start(plant, state.global_step)
        log.info("ShannonCallback: %s, N = %s supervised tokens, lambda = %g", law, f"{n_tokens:,}", self.lam)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, optimizer: Any, **kwargs: Any
    ) -> None:
        self._loop.rate = optimizer.param_groups[0]["lr"]
        self._running.prepare_gradient(optimizer, state.global_step)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, optimizer: Any, **kwargs: Any
    ) -> None:
        self._running.finish_step(skipped=optimizer.step_was_skipped)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._loop.after_step(self._running, state.global_step) or state.global_step >= state.max_steps:
            self._tick(state)
        self._check_failure()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, logs: dict, **kwargs: Any
    ) -> None:
        """Add the newest tick to what callbacks after this one get, the progress line among them; to what is logged
        of an evaluation, drift and what the trainer can choose the best adapter by."""
        # Logged as training ends, early too, and before the trainer puts its best checkpoint back.
        if "train_runtime" in logs and self._loop.unread:
            self._tick(state)
            self._check_failure()
        if "loss" in logs:
            logs.update((name, value) for name, value in self._numbers.items() if name in LOGGED)
        # Of several sets each is evaluated by itself, as eval_NAME_loss.
        evaluated = (name for name in logs if name.endswith("_runtime") and name != "train_runtime")
        losses = [loss for name in evaluated if (loss := name.replace("_runtime", "_loss")) in logs]
        if losses and self._held:
            logged, share, budget = state.log_history[-1], self._tell_drift(state), float(self._drift.max_drift or 0)
            in_budget = {f"{loss}_in_budget": loss_in_budget(logs[loss], share, budget) for loss in losses}
            for record in (logs, logged):  # the trainer's history has a copy already
                record |= {"eval_drift": share, **in_budget}

    def _tick(self, state: TrainerState) -> None:
        self._loop.tick(self._running)
        state.log_history.append({**self._numbers, "step": state.global_step})

    def _check_failure(self) -> None:
        if self._loop.failure:
            raise Diverged(
                f"ShannonCallback: {self._loop.failure}; lower learning_rate, or leave fp16 and bf16 out to find the "
                "cause"
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if (found := self._tell_drift(state)) is not None:
            budget = float(self._drift.max_drift or 0)
            held = found <= MARGIN * budget
            log.log(logging.INFO if held else logging.WARNING, "ShannonCallback: drift is %s on general text that the "
                    "loop did not see, and max_drift %s%s", per_cent(found), per_cent(budget),
                    "" if held else "; lower the learning rate, train for more steps, or raise it")  # fmt: skip
        self._stop()

    def _tell_drift(self, state: TrainerState) -> float | None:
        """Put the share of drift on what the loop never sees into the trainer's log; None where none is held."""
        if self._held is None:
            return None
        share = self._held.held_out.read().share
        state.log_history.append({"scu/drift_held_out": share, "step": state.global_step})
        return share

    # What the trainer saves

    def state(self) -> dict[str, Any]:
        """For ``trainer_state.json``: how to make this callback again, and where the run stands."""
        if self._plant is None:
            return {"args": self._arguments, "attributes": {}}
        drift = {"drift": self._held and self._held.turns.state_dict()}
        saved = {
            **self._frozen(self._plant.n_tokens),
            "origin": self._origin,
            "general": self._general,
            "tokens_per_step": self._tokens_per_step,
            "loop": self._loop.state() | self._plant.counted() | drift,
        }
        return {"args": self._arguments, "attributes": {"saved": saved}}

    def _frozen(self, n_tokens: int) -> dict[str, Any]:
        """What S and lambda mean, which a resumed run must not change."""
        config = self._config
        return {
            "n_tokens": n_tokens,
            "prior_sigma": self._prior.sigma,
            "measure": config.measure,
            "actuator": config.actuator,
            "law": type(self._law).__name__,
            "held": "S" if self._drift.max_drift is None else "drift",
        }

    def _saved(self, state: TrainerState) -> dict[str, Any]:
        """What a checkpoint has of this callback; nothing where training begins."""
        kept = state.stateful_callbacks.get(type(self).__name__, {})
        if isinstance(kept, list):
            raise ValueError(f"ShannonCallback: {len(kept)} of them would each add a penalty; give one")
        if not state.global_step:
            return {}
        saved = kept.get("attributes", {}).get("saved")
        if saved is None:
            raise ValueError(
                f"ShannonCallback: the checkpoint of step {state.global_step} was written without it, so lambda cannot "
                "be resumed; resume from a checkpoint of a run that had it, or start a new run from its adapter"
            )
        return saved

    def _check_same(self, saved: dict[str, Any], n_tokens: int) -> None:
        for name, now in self._frozen(n_tokens).items():
            if (then := saved[name]) != now:
                raise ValueError(
                    f"ShannonCallback: {name} was {then} and is now {now}; S or lambda would mean something "
                    "else, so resume with the same"
                )

    def _keep_origin(self, adapter: Adapter, folder: Path, first_process: bool) -> None:
        """Start from the adapter as it is; what is not zero a resumed run must find again."""
        adapter.start_here()
        self._origin = ""
        if adapter.origin is not None and first_process:
            tensors = {name: factor.cpu() for name, factor in zip(adapter.factor_names, adapter.origin, strict=True)}
            with adding_to(folder) as beside:
                save_file(tensors, beside / ORIGIN)
            self._origin = manifest.sha256(folder / ORIGIN)

    def _find_origin(self, adapter: Adapter, sha256: str, folder: Path) -> None:
        self._origin = sha256
        if not sha256:
            return
        _check_file(folder / ORIGIN, sha256, "the adapter that the run started from")
        adapter.start_from(load_file(folder / ORIGIN))

    def _held_drift(
        self,
        plant: TrainerPlant,
        processing_class: Any,
        loader: DataLoader,
        args: TrainingArguments,
        state: TrainerState,
    ) -> HeldDrift:
        """Drift on general text: of a new run, or the one that the checkpoint's run has had."""
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        if tokenizer is None:
            raise ValueError("max_drift: general text takes the tokenizer; give the trainer processing_class=tokenizer")
        if args.neftune_noise_alpha:
            raise ValueError("max_drift: NEFTune's noise would count as drift; leave neftune_noise_alpha out")
        if args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError("max_drift: reentrant checkpointing lets no gradient through but the trainer's; set "
                             'gradient_checkpointing_kwargs={"use_reentrant": False}')  # fmt: skip
        saved, path = self._saved(state), Path(args.output_dir) / GENERAL
        self._tokens_per_step = saved.get("tokens_per_step") or tokens_per_step(loader, args)
        with _of_arguments():
            check_drift(self._config.every, state.max_steps)
            if saved:
                self._general = saved["general"]
                _check_file(path, self._general, "the general text that the run has had")
                text = general_text.read(path, tokenizer)
            else:
                # What another adapter makes the model write is not kept under the name of the base.
                base = "" if self._origin else getattr(plant.language_model, "name_or_path", "")
                text = obtain(self._drift, plant, tokenizer, args.seed, base, state.is_world_process_zero, loader)
                if state.is_world_process_zero:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    text.write(path, tokenizer)
                    self._general = manifest.sha256(path)
            budget, turns = float(self._drift.max_drift or 0), saved.get("loop", {}).get("drift")
            step = self._tokens_per_step
            anchor = anchor_tokens(step, args.gradient_accumulation_steps)
            sizes = anchor, steering_tokens(step * self._config.every)
            padding = padding_for(plant.language_model, tokenizer)
            return HeldDrift(plant.as_trained(), text.batches(*sizes, padding), budget, turns)

    # The rest

    @property
    def lam(self) -> float:
        """Lambda in force."""
        return self._loop.action.lam

    @property
    def _numbers(self) -> dict[str, float]:
        """The newest tick of this training, also of the checkpoint that it continues from."""
        return {f"scu/{name}": value for name, value in self._loop.latest.items() if _is_number(name, value)}

    @property
    def _running(self) -> TrainerPlant:
        assert self._plant is not None, "the trainer calls on_train_begin first"
        return self._plant

    def _stop(self) -> None:
        """Take the hook off the model. What ``state`` says stays, for a checkpoint that is written after the end."""
        if self._plant is not None:
            self._plant.meter.close()


def count_supervised(loader: DataLoader) -> int:
    """Supervised tokens of a loader's data set, each example once, whatever the batches and processes.

    Raises:
        ValueError: the data set is a stream, or has no supervised token.
    """
    if (data := looked_into(loader)) is None:
        raise ValueError("n_tokens: a stream's tokens cannot be counted beforehand; give n_tokens")
    log.info("ShannonCallback: counting the supervised tokens of %s examples; n_tokens saves that", f"{len(data):,}")
    count = sum(int(counted(loader.collate_fn([data[index]])).sum()) for index in range(len(data)))
    if not count:
        raise ValueError("n_tokens: no token of the training set is supervised; look at its labels")
    return count


def _check_file(path: Path, sha256: str, what: str) -> None:
    if not path.is_file() or manifest.sha256(path) != sha256:
        raise ValueError(f"ShannonCallback: {path}: is not {what}; resume with the output_dir that it was started with")


@contextmanager
def _of_arguments() -> Iterator[None]:
    """Refusals of the settings as those of Python's arguments, which are called like the flags."""
    try:
        yield
    except UserError as error:
        names = str(error).replace("control.every", "control_every").replace("prior.sigma", "prior_sigma")
        raise ValueError(re.sub(r"\b(control|drift|prior|optimizer)\.(?=\w)", "", in_python(names))) from None


def _check_arguments(args: TrainingArguments) -> None:
    """Refuse what would make lambda or S wrong."""
    kind = AcceleratorState().distributed_type
    for wrong, remedy in (
        (args.max_grad_norm, f"max_grad_norm={args.max_grad_norm}: the trainer would clip before lambda's gradient is "
         "added; set max_grad_norm=0, and the callback's gradient_clip clips the sum"),
        (args.label_smoothing_factor, "label_smoothing_factor: a smoothed loss is no cost of the data; set it to 0"),
        (getattr(args, "loss_type", "nll") != "nll", f"loss_type={getattr(args, 'loss_type', '')}: is no cost of the "
         'data, in bits; use SFTTrainer, with loss_type="nll"'),
        (str(args.metric_for_best_model).endswith("loss_in_budget") and args.greater_is_better,
         f"metric_for_best_model={args.metric_for_best_model}: the worst "
         "adapter would be kept; set greater_is_better=False"),
        (args.n_gpu > 1, f"{args.n_gpu} GPUs in one process (DataParallel): start with torchrun, or make one GPU "
         "visible with CUDA_VISIBLE_DEVICES"),
        (args.device.type == "mps", "mps has no fp64, in which the callback sums; set use_cpu=True"),
        (kind not in REPLICATED, f"{kind.value}: the adapter would be in parts, and its norm takes the whole; train "
         "with DDP (torchrun, without FSDP and DeepSpeed)"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(f"ShannonCallback: {remedy}")


def _check_loss(model: nn.Module) -> None:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind = getattr(base, "loss_type", None) or "ForCausalLM"  # what transformers takes for a model that names none
    if type(base).__name__.endswith(("LMHeadModel", "ForCausalLM")) and kind not in LOSS_MAPPING:
        kind = "ForCausalLM"
    if LOSS_MAPPING.get(kind) is not ForCausalLMLoss or getattr(base.config, "is_encoder_decoder", False):
        raise ValueError(
            f"ShannonCallback: {type(base).__name__} is trained on another loss than a causal language model's, and S "
            "compares bits per token; use it with an AutoModelForCausalLM"
        )


def _is_number(name: str, value: Any) -> bool:
    return name != "step" and isinstance(value, float | int) and abs(value) < float("inf")
