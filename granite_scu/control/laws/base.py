"""What every controller is: a frozen configuration with a pure function from a measurement to lambda."""

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol, TypeVar, cast

StateT = TypeVar("StateT")


class Sensor(Protocol):
    """What a law measures beside S at each tick. One that is also a ``lightning.Callback`` hears of the run's events.

    Every process calls the same in the same order, and is told the same to the bit.
    """

    def read(self, plant: Any) -> Mapping[str, float]:
        """The figures of a tick, by the names that its record has them by; NaN where one cannot be measured. Nothing
        where there is nothing new."""

    def state(self) -> dict[str, Any]:
        """What a resumed run reads on from; also by way of JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Read on from there."""


@dataclass(frozen=True)
class Measurement:
    """What a tick has seen, reduced over ranks.

    Attributes:
        s: S = ParamBPT / (DataBPT + ParamBPT), a ratio. Raw: 0 before anything is learned, nan or inf after a failure.
        data_bpt: loss, in bits per supervised token since the last tick.
        param_bpt: description length of the adapter's update, in bits per token.
        layers: the same of each adapted matrix, in the order of the layers; they add up to ``param_bpt``.
        step: optimizer steps done.
        progress: the share of the run's optimizer steps that is done, 0 to 1.
        lr_sum: the learning rates of all applied steps so far, summed. Adam moves a weight by about the learning rate a
            step, whatever the gradient, so this is about how far one can have come. Not in units of the peak, which a
            resumed run may change: what was measured under the old one would then no longer compare.
        sensed: what the law's own ``Sensor`` reads.
    """

    s: float
    data_bpt: float
    param_bpt: float
    layers: tuple[float, ...] = ()
    step: int = 0
    progress: float = 0.0
    lr_sum: float = 0.0
    sensed: Mapping[str, float] = field(default_factory=dict)

    @property
    def log_s(self) -> float | None:
        """ln S, or None where it does not exist: S is zero, negative or not finite."""
        return math.log(self.s) if 0 < self.s < math.inf else None


@dataclass(frozen=True)
class Output:
    """What a tick has decided, and why. Every float is finite; None stands for undefined.

    Attributes:
        lam: lambda, nats of objective per nat of ParamNPT.
        smoothed: exp of the filtered ln S; None before the first valid measurement.
        error: ln(smoothed / setpoint), signed and not clipped; None without either.
        p_term: proportional part of ln lambda; None where the law has none.
        i_term: integral part of ln lambda; None where the law has none.
        saturated: lambda rests on a bound.
        held: the measurement was unusable, so this repeats the output before it; a law that uses no measurement goes
            on, and only what is logged of S is repeated.
        in_deadband: the error was too small to integrate.
        layers: lambda of each adapted matrix, where the law tells them apart; ``lam`` is then their mean.
        param_bound: the most bits per token that the adapter may take; it is scaled down onto that after every
            optimizer step. None binds nothing.
        setpoint: S* of this tick, where it is not the controller's own throughout; None: it is.
    """

    lam: float
    smoothed: float | None = None
    error: float | None = None
    p_term: float | None = None
    i_term: float | None = None
    saturated: bool = False
    held: bool = False
    in_deadband: bool = False
    layers: tuple[float, ...] | None = None
    param_bound: float | None = None
    setpoint: float | None = None


class Controller(Protocol[StateT]):
    """A frozen dataclass: its fields are the configuration, and nothing in it changes.

    A class may also have ``sensor()``, which makes its ``Sensor``; ``refuses``, by flag, such as ``--actuator
    decoupled``, why it does not go together with it; and ``in_a_run_of(ticks, validations)``, the law of a run of that
    length under Lightning, which raises ValueError where it is too short.

    What changes is the state, a frozen dataclass of floats, ints, bools, tuples and None (or of such dataclasses).
    ``as_stored`` of its ``dataclasses.asdict`` goes into JSON or a checkpoint, and ``restored`` undoes that.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def setpoint(self) -> float | None:
        """S*, a ratio in (0, 1); None where there is nothing to track."""

    @property
    def lambda_start(self) -> float:
        """Lambda before the first tick."""

    def init(self) -> StateT:
        """The state before the first tick."""

    def update(self, state: StateT, measurement: Measurement) -> tuple[StateT, Output]:
        """One tick. Pure: equal arguments give equal results, on every rank."""


STORED_AS = {"lam": "lambda", "lams": "lambdas", "lr_sum": "travel"}
"""Fields that have other names in checkpoints and in ``scu_config.json``."""


def as_stored(values: Mapping[str, Any]) -> dict[str, Any]:
    """What ``dataclasses.asdict`` made of a state, under the names that files have."""
    return {
        STORED_AS.get(name, name): as_stored(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
    }


def restored(state: StateT, mapping: Mapping[str, Any]) -> StateT:
    """The state that ``as_stored`` has a ``mapping`` of, also by way of JSON, which has no tuples.

    Args:
        state: the controller's state before the first tick. It says which parts are dataclasses, and is what a part
            has that did not exist yet when ``mapping`` was written.
        mapping: the state to go back to.
    """
    found = {
        name: restored(getattr(state, name), value) if isinstance(value, Mapping) else _as_tuples(value)
        for name, value in by_field(type(cast(Any, state)), mapping).items()
    }
    return cast(StateT, replace(cast(Any, state), **found))


def by_field(kind: type, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """What ``as_stored`` made of a dataclass of that kind, under the names of its fields again."""
    own = {field.name for field in fields(kind)}
    called = {stored: name for name, stored in STORED_AS.items()}
    return {name if name in own else called.get(name, name): value for name, value in mapping.items()}


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def require(valid: bool, remedy: str) -> None:
    """Raise ValueError with ``remedy`` unless ``valid``."""
    if not valid:
        raise ValueError(remedy)


def require_setpoint(setpoint: float | None) -> None:
    """Raise ValueError unless ``setpoint`` is a ratio that S can have, or None."""
    valid = setpoint is None or 0 < setpoint < 1
    require(valid, f"setpoint {setpoint}: S* is a ratio, it must lie between 0 and 1")


def check(law: Controller[Any], *positive: str) -> None:
    """Refuse settings out of range: those that laws have in common, and the ``positive`` ones.

    Raises:
        ValueError: names the setting, its value and its range.
    """
    given = {field.name: getattr(law, field.name) for field in fields(law)}
    require_setpoint(given.get("setpoint"))
    for name in ("ema_alpha", "data_alpha"):
        weight = given.get(name, 1.0)
        require(0 < weight <= 1, f"{name} {weight}: must be in (0, 1]")
    for name in positive:
        require(0 < given[name] < math.inf, f"{name} {given[name]}: must be positive and finite")
    deadband = given.get("deadband", 0.0)
    require(0 <= deadband < math.inf, f"deadband {deadband}: must be finite and not negative")
    if "lambda_min" not in given:
        return
    low, high = given["lambda_min"], given["lambda_max"]
    bounds = f"must lie in [lambda_min, lambda_max] = [{low}, {high}], and both bounds be positive and finite"
    for name in ("lambda_min", "lambda_init", "lambda_end"):
        lam = low if given.get(name) is None else given[name]
        require(0 < low <= lam <= high < math.inf, f"{name} {lam}: {bounds}")


def clip(value: float, low: float, high: float) -> float:
    """``value``, or the bound that it lies beyond."""
    return min(max(value, low), high)


def bounded_exp(exponent: float, low: float, high: float) -> tuple[float, bool]:
    """Lambda of that logarithm within [low, high], and whether it rests on one of them.

    Clipped before the exponential, which would overflow, and after it, as exp(ln high) can exceed high by a rounding.
    """
    bottom, top = math.log(low), math.log(high)
    return clip(math.exp(clip(exponent, bottom, top)), low, high), not bottom < exponent < top
