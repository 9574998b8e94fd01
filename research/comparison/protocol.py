"""What is compared: tasks, arms, seeds and the order in which the runs are done. Data, no work; imports no torch.

A cell is one place in the protocol: a task, an arm, a seed. What its run is set to may depend on the results of other
runs (a tuned learning rate, lambda's average under PI), so it is worked out by ``plan`` when those are there.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

Derivation = Literal[
    "", "pi-start", "pi-mean", "pi-replay", "cascade-mean", "cascade-replay", "auto-mean", "auto-replay"
]
Adapter = Literal["final", "best"]


@dataclass(frozen=True)
class Task:
    """Text to learn from and how long.

    Attributes:
        name: names the folder of its runs.
        corpus: an embedded corpus, or one that ``research/fetch_texts.py`` fetches.
        train_tokens: of it; None takes the whole training split.
        steps: optimizer steps of 1024 tokens; None means one pass over the training text.
        then: the corpus that replaces it half-way, the same amount of it. Validation and test are on that one: a shift
            stands for text whose character changes while a model learns from it, and what counts is what comes.
        settings: dotted configuration keys in which its runs differ from ``TRAINING`` or from the family's learning
            rate.
        held_out: blocks of validation text, the first ones, which are of a document or two; None takes
            ``VALIDATION_TOKENS``, spread over all of it.
    """

    name: str
    corpus: str
    train_tokens: int | None
    steps: int | None
    then: str | None = None
    settings: dict[str, float | str] = field(default_factory=dict, hash=False)
    held_out: int | None = None

    @property
    def scored_on(self) -> str:
        """The corpus that validation and test texts come from."""
        return self.then or self.corpus


@dataclass(frozen=True)
class Arm:
    """One way to set lambda.

    Attributes:
        name: of the arm; several settings share it.
        setting: which of its settings, as ``S*=0.3``; empty where there is one.
        settings: dotted configuration keys and their values.
        family: arms of a family train with one learning rate, tuned on its representative (``Protocol.tuned``).
        adapter: the one that counts: at the end of the run, or the best validated.
        derive: what its settings take from PI, the cascade or the default: the lambda that it starts from, lambda's
            time average in the same task and seed, or lambda(t) of another seed.
        at_chosen: takes the setpoint that was chosen on the selection task.
    """

    name: str
    setting: str = ""
    settings: dict[str, float | str] = field(default_factory=dict, hash=False)
    family: str = ""
    adapter: Adapter = "final"
    derive: Derivation = ""
    at_chosen: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} {self.setting}".strip()


@dataclass(frozen=True, eq=False)
class Protocol:
    """A comparison.

    Attributes:
        name: for the reader.
        tasks, arms, seeds: their product is what is run.
        rates: peak learning rates tried for each family on each task's first seed; a single one is taken untried.
        tuned: the arm that stands for its family while the learning rate is tuned, by validation of its adapter.
        headline: names of the arms that go first.
        swept_pi: PI at the setpoints that S* is chosen from.
        first_seeds: seeds that are done for all arms before the others begin. S* is chosen on these alone, so that it
            does not change when more seeds arrive.
        selection_task: where S* is chosen, by validation; None where no arm takes a chosen one, and nothing is claimed.
        unseen: names of the tasks that had no part in choosing S* or in forming a law.
        formed_on_all: names of the arms that no task is unseen by.
        judged: the arm of which was written down before the first run what counts as success; empty where none was.
    """

    name: str
    tasks: tuple[Task, ...]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    first_seeds: int
    tuned: dict[str, Arm] = field(default_factory=dict)
    headline: tuple[str, ...] = ()
    swept_pi: tuple[Arm, ...] = ()
    selection_task: str | None = None
    unseen: tuple[str, ...] = ()
    formed_on_all: tuple[str, ...] = ()
    judged: str = ""

    def task(self, name: str) -> Task:
        return next(task for task in self.tasks if task.name == name)

    @property
    def selection(self) -> Task:
        """Where S* is chosen."""
        assert self.selection_task is not None, "an arm takes a setpoint, and nowhere is one chosen"
        return self.task(self.selection_task)


LAMBDAS = (0.01, 0.03, 0.1, 0.3, 1.0)
SETPOINTS = (0.1, 0.2, 0.3, 0.45, 0.6, 0.75)
TRAINING = {
    "base.name": "tiny-granite-h",
    "data.block_size": 128,
    "data.batch_size": 8,
    "lora.rank": 16,
    "lora.alpha": 32.0,
    "optimizer.schedule": "cosine",
    "optimizer.warmup_steps": 10,
    "prior.sigma": 0.02,
    "control.every": 4,
    "trainer.accelerator": "cpu",
    "trainer.accumulate_grad_batches": 1,
}
"""What all runs share. Settings that are neither here nor an arm's are the product's defaults."""

PRECISION = "bf16-mixed"
"""That of the published runs: the product's own choice on a CPU that has it, and there 1.5 times as fast as fp32 with
one thread. Runs in another one are other runs, and are compared among themselves."""

EVAL_STEPS = 25
VALIDATION_TOKENS = 8_192
"""A validation's size: of a larger split, blocks spread evenly over it."""
TEST_TOKENS = 65_536
"""The same of the test text. No embedded corpus has as much."""

FAMILY = "regularised"
"""The family of every arm that has one lambda: what differs between them is lambda and nothing else."""


def _each(
    name: str, setting: str, controller: str, key: str, values: tuple[float, ...], family: str = FAMILY, **more: Any
) -> tuple[Arm, ...]:
    """An arm's settings, one for each value of a configuration key; ``setting`` is the format of their names."""
    return tuple(
        Arm(name, setting.format(value), {"control.controller": controller, key: value, **more}, family)
        for value in values
    )


def _constants(values: tuple[float, ...]) -> tuple[tuple[Arm, ...], tuple[Arm, ...]]:
    """One lambda from the first step to the last, and the same runs judged by their best validated adapter: the rival
    that uses validation text as much as it can."""
    fixed = _each("fixed", "λ={:g}", "fixed", "control.lambda_init", values)
    return fixed, _stopped(*fixed)


def _stopped(*arms: Arm) -> tuple[Arm, ...]:
    """The same runs, judged by their best validated adapter."""
    return tuple(replace(arm, name=f"{arm.name}-stopped", adapter="best") for arm in arms)


def _at_chosen(controller: str, **more: Any) -> Arm:
    """The setpoint is the chosen one, so the settings hold none yet."""
    return Arm(controller, "", {"control.controller": controller}, FAMILY, at_chosen=True, **more)


NONE = Arm("none", "", {"control.controller": "none"}, "none")
NONE_AT_RATE = Arm("none-same-rate", "", {"control.controller": "none"}, FAMILY)
"""Without lambda at the learning rate of the arms that have one: the end of the curve that their sweep draws."""
STOPPED = Arm("early-stopping", "", {"control.controller": "none"}, "stopped", adapter="best")
FIXED, FIXED_STOPPED = _constants(LAMBDAS)
PI = _at_chosen("pi")
PI_SWEPT = _each("pi-swept", "S*={:g}", "pi", "control.target_s", SETPOINTS)
DECAY = _each("weight-decay", "{:g}", "none", "optimizer.weight_decay", (0.1, 1.0, 3.0, 10.0, 30.0, 100.0), "decay")
SCHEDULES = tuple(
    Arm(
        name,
        f"λ={start:g} to {start / 100:g}",
        {"control.controller": name, "control.lambda_init": start, "control.lambda_end": start / 100},
        FAMILY,
    )
    for name in ("linear", "cosine")
    for start in (0.03, 0.1, 0.3, 1.0)
)
CPR = _each("cpr", "warm-up {}", "cpr", "control.cpr_warmup", (2, 3, 6, 12, 25), "cpr")
FACTORS = _each(
    "fixed-on-factors",
    "λ={:g}",
    "fixed",
    "control.lambda_init",
    (0.003, 0.01, 0.03, 0.1, 0.3),
    "factors",
    **{"control.measure": "factors"},
)
"""A constant lambda that acts on A and B, as the first Shannon Control Unit's was meant to, and not on the update."""
KL = _each("kl", "KL*={:g}", "kl", "control.target_kl", (0.25, 0.5, 1.0))
ISOLATING = (
    Arm("fixed-at-mean", "", {"control.controller": "fixed"}, FAMILY, derive="pi-mean"),
    Arm("replay", "", {"control.controller": "replay"}, FAMILY, derive="pi-replay"),
    Arm("fixed-at-cascade-mean", "", {"control.controller": "fixed"}, FAMILY, derive="cascade-mean"),
    Arm("replay-of-cascade", "", {"control.controller": "replay"}, FAMILY, derive="cascade-replay"),
    _at_chosen("projection"),
)
"""What tells feedback from what it brings about."""
AUTO = Arm("pi-auto", "", {"control.controller": "pi", "control.target_s": "auto"}, FAMILY)
"""The default of that time: the setpoint is found during the run."""
CASCADE = Arm("cascade", "", {"control.controller": "cascade", "run.eval_steps": 10}, FAMILY)
OTHER_LAWS = (
    _at_chosen("p", derive="pi-start"),
    _at_chosen("i", derive="pi-start"),
    Arm(
        "original",
        "",
        {"control.controller": "original", "control.lambda_min": 1e-4, "control.lambda_max": 2.0},  # as published
        FAMILY,
        at_chosen=True,
    ),
)

SMALL, MEDIUM, LARGE, STEPS = 12_288, 40_960, 204_800, 200
TASKS = (
    Task("docs-small", "stdlib-docs", SMALL, STEPS),
    Task("source-small", "stdlib-source", SMALL, STEPS),
    Task("package-small", "package-docs", SMALL, STEPS),
    Task("docs-medium", "stdlib-docs", MEDIUM, STEPS),
    Task("source-medium", "stdlib-source", MEDIUM, STEPS),
    Task("package-medium", "package-docs", MEDIUM, STEPS),
    Task("source-once", "stdlib-source", LARGE, None),
    Task("package-once", "package-docs", LARGE, None),
    Task("docs-to-source", "stdlib-docs", SMALL, STEPS, then="stdlib-source"),
)

FULL = Protocol(
    name="full",
    tasks=TASKS,
    arms=(
        *(NONE, STOPPED, *FIXED, *FIXED_STOPPED, PI, AUTO, CASCADE, *_stopped(AUTO, CASCADE)),
        *(NONE_AT_RATE, *ISOLATING),
        *(*PI_SWEPT, *OTHER_LAWS, *SCHEDULES, *DECAY, *CPR, *FACTORS, *KL),
    ),
    seeds=(0, 1, 2, 3, 4),
    rates=(1e-3, 2e-3, 4e-3),
    tuned={"none": NONE, "stopped": STOPPED, FAMILY: FIXED[2], "decay": DECAY[3], "cpr": CPR[2], "factors": FACTORS[2]},
    headline=("none", "early-stopping", "fixed", "fixed-stopped", "pi", "pi-auto", "pi-auto-stopped", "cascade"),
    swept_pi=PI_SWEPT,
    first_seeds=3,
    selection_task="docs-small",
    unseen=("source-small", "docs-medium", "package-medium", "source-once"),
    formed_on_all=("pi-auto", "pi-auto-stopped"),
)

VARIATIONS: dict[str, dict[str, float | str]] = {
    "rank 2": {"lora.rank": 2, "lora.alpha": 4.0},
    "rank 64": {"lora.rank": 64, "lora.alpha": 128.0},
    "rate 1e-3": {"optimizer.learning_rate": 1e-3},
    "sigma 0.08": {"prior.sigma": 0.08},
}
"""What a user's run may have otherwise: the rank at the same scaling, a rate a quarter of the tuned one, the prior."""

VARIED_FIXED, VARIED_STOPPED = _constants((0.003, 0.01, 0.03, 0.1, 0.3))
"""The full protocol's, moved down by one: a small adapter or a low rate wants less than either of its own ends."""


def _varied(name: str, variation: str) -> Task:
    """A task of the full protocol under other settings."""
    task = FULL.task(name)
    return replace(task, name=f"{name}-{variation.replace(' ', '-')}", settings=VARIATIONS[variation])


VARIED = Protocol(
    name="varied",
    tasks=tuple(_varied(name, variation) for variation in VARIATIONS for name in ("docs-medium", "package-medium")),
    arms=(NONE, STOPPED, *VARIED_FIXED, *VARIED_STOPPED, AUTO, CASCADE),
    seeds=(0, 1, 2),
    rates=(4e-3,),
    first_seeds=3,
)
"""Whether what needs no sweep, the default, the cascade, early stopping or one lambda, does as well where other things
are otherwise. The two texts are those that are worth the most regularising, at the rate that the full protocol tuned
for both."""

TEXT_HYBRID, TEXT_DENSE = "evidence/bases/tiny-prose-hybrid", "evidence/bases/tiny-prose-dense"
"""Bases that ``research/pretrain_tiny.py`` made, of prose that is not about Python: another hybrid, and one without
recurrent layers. Their folders, seen from ``research/``; finished runs have these names."""


def _fresh(name: str, corpus: str, tokens: int, base: str = "tiny-granite-h") -> Task:
    """A task of the fresh protocol. Validations are as frequent as the cascade wants them, for all arms."""
    steps = None if tokens == LARGE else STEPS
    return Task(name, corpus, tokens, steps, settings={"base.name": base, "run.eval_steps": 10})


PI_AT_45 = Arm("pi-at-45", "", {"control.controller": "pi", "control.target_s": 0.45}, FAMILY)
COSINES = tuple(arm for arm in SCHEDULES if arm.name == "cosine")
AUTO_MEAN = Arm("fixed-at-auto-mean", "", {"control.controller": "fixed"}, FAMILY, derive="auto-mean")
AUTO_REPLAY = Arm("replay-of-auto", "", {"control.controller": "replay"}, FAMILY, derive="auto-replay")
_FRESH_ARMS = (PI_AT_45, CASCADE, AUTO, AUTO_MEAN, AUTO_REPLAY, *COSINES)

FRESH = Protocol(
    name="fresh",
    tasks=(
        _fresh("speeches-small", "speeches", SMALL, TEXT_DENSE),
        _fresh("go-once", "go-tools", LARGE, TEXT_DENSE),
        _fresh("faq-medium", "anarchist-faq", MEDIUM, TEXT_HYBRID),
        _fresh("javascript-small", "eslint", SMALL, TEXT_HYBRID),
        _fresh("dialogues-small", "wesnoth-dialogues", SMALL),
        _fresh("jargon-medium", "jargon-file", MEDIUM),
    ),
    arms=(NONE, STOPPED, *FIXED, *FIXED_STOPPED, *_FRESH_ARMS, *_stopped(*_FRESH_ARMS)),
    seeds=(0, 1, 2, 3, 4),
    rates=(1e-3, 2e-3, 4e-3),
    tuned={"none": NONE, "stopped": STOPPED, FAMILY: FIXED[2]},
    headline=("none", "early-stopping", "fixed", "fixed-stopped", "pi-auto", "pi-auto-stopped", "cascade"),
    first_seeds=2,
    unseen=("speeches-small", "go-once", "faq-medium", "javascript-small", "dialogues-small", "jargon-medium"),
    formed_on_all=("pi-auto", "pi-auto-stopped"),
    judged="pi-auto-stopped",
)
"""Tasks and models that had no part in forming a law, until they showed what was wrong with the default's first rule.
What counted as success was written down before the first run: evidence/protocol.md."""

FRESH_AGAIN = replace(
    FRESH,
    name="fresh-again",
    tasks=(
        _fresh("questions-small", "debian-faq", SMALL, TEXT_DENSE),
        _fresh("rust-once", "rust-crates", LARGE, TEXT_DENSE),
        _fresh("handbook-medium", "handbook", MEDIUM, TEXT_HYBRID),
        _fresh("typescript-small", "rxjs", SMALL, TEXT_HYBRID),
        _fresh("quests-small", "endless-sky", SMALL),
        _fresh("manual-medium", "man-pages", MEDIUM),
    ),
    arms=(NONE, STOPPED, *FIXED, *FIXED_STOPPED, AUTO, *_stopped(AUTO)),
    unseen=("questions-small", "rust-once", "handbook-medium", "typescript-small", "quests-small", "manual-medium"),
)
"""The same question of the second rule, on text that no law had seen until then. Its own section of
evidence/protocol.md was written before the first run."""

_LOW_FIXED, _LOW_STOPPED = _constants((0.001, 0.003, 0.01, 0.03, 0.1))
"""In the rounds before, lambda = 0 was mostly the best, and 0.3 and 1 never."""
_AUTO = replace(AUTO, family="auto")
(_AUTO_STOPPED,) = _stopped(_AUTO)
"""The default, with a learning rate that is tuned for itself."""

FRESH_THIRD = replace(
    FRESH_AGAIN,
    name="fresh-third",
    tasks=(
        _fresh("answers-small", "faqs", SMALL, TEXT_DENSE),
        _fresh("cpp-once", "eigen", LARGE, TEXT_DENSE),
        _fresh("policy-medium", "policy", MEDIUM, TEXT_HYBRID),
        _fresh("lisp-small", "sbcl", SMALL, TEXT_HYBRID),
        _fresh("games-small", "two-games", SMALL),
        _fresh("dictionary-medium", "devils-dictionary", MEDIUM),
    ),
    arms=(NONE, STOPPED, *_LOW_FIXED, *_LOW_STOPPED, _AUTO, _AUTO_STOPPED),
    rates=(1e-3, 2e-3, 4e-3, 8e-3),
    tuned={"none": NONE, "stopped": STOPPED, FAMILY: _LOW_FIXED[2], "auto": _AUTO_STOPPED},
    formed_on_all=(),
    unseen=("answers-small", "cpp-once", "policy-medium", "lisp-small", "games-small", "dictionary-medium"),
)
"""The same question of the third rule, on text that no rule had seen, with lower lambdas and one more learning rate.
Its own section of evidence/protocol.md was written before the first run."""

SCARCE_STEPS, SCARCE_BLOCKS = 36, 8
"""Nine ticks; a micro-batch."""


def _scarce(name: str) -> tuple[Task, Task]:
    """A task of the full protocol in a short run, and with little held-out text."""
    task = FULL.task(name)
    short = replace(task, name=f"{name}-36-steps", steps=SCARCE_STEPS)
    return short, replace(task, name=f"{name}-8-blocks", held_out=SCARCE_BLOCKS)


SCARCE = Protocol(
    name="scarce",
    tasks=tuple(task for name in ("docs-small", "package-small", "source-medium") for task in _scarce(name)),
    arms=(NONE, STOPPED, FIXED[1], FIXED_STOPPED[1], AUTO, *_stopped(AUTO)),
    seeds=(0, 1, 2),
    rates=(4e-3,),
    first_seeds=3,
)
"""What becomes of the default in a run of nine ticks, and where its held-out text is one micro-batch of a document or
two. The tasks formed its rule."""

QUICK_TASK = Task("docs-quick", "stdlib-docs", SMALL, 104)  # the cascade takes ten validations before the last step
QUICK = Protocol(
    name="quick",
    tasks=(QUICK_TASK,),
    arms=(NONE, STOPPED, FIXED[1], FIXED[2], PI, CASCADE),
    seeds=(0, 1, 2),
    rates=(2e-3,),
    tuned={},
    headline=("none", "early-stopping", "fixed", "pi", "cascade"),
    swept_pi=PI_SWEPT[2:4],
    first_seeds=1,
    selection_task=QUICK_TASK.name,
)
