"""Scenario: the system under experiment. Arrivals, service, servers, information, two policies.

Time is measured in mean service times of a server of rate 1, unless a trace brings its own unit.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from qdq import validation
from qdq.policies import Policy, PowerOfD, policy_from_dict

DISCIPLINES = ("fcfs", "processor_sharing")

# A kernel keeps a server's number in 24 bits.
MOST_SERVERS = 1 << 24


class _Part:
    """Arrivals and service laws: written to and read from dictionaries alike."""

    def to_dict(self) -> dict[str, Any]:
        """Return the part as a JSON-native dictionary."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                values[name] = value.tolist()
        return {"type": type(self).__name__} | values


class _Trace(_Part):
    """Parts that hold an array: equal when the arrays are."""

    def __repr__(self) -> str:
        ((name, values),) = ((f.name, getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]
        ends = f"{values[0]:g} ... {values[-1]:g}" if values.size > 1 else f"{values[0]:g}"
        return f"{type(self).__name__}({name}=[{ends}], {values.size} in all)"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(type(self))


# --------------------------------------------------------------------------------------------------
# - Arrivals
# --------------------------------------------------------------------------------------------------
# -


@dataclass(frozen=True)
class Poisson(_Part):
    """Poisson arrivals at a constant rate.

    Parameters
    ----------
    rate : float
        Arrival rate per server, tasks per unit time, > 0. The whole system gets n_servers times as
        many.
    """

    rate: float

    def __post_init__(self) -> None:
        rate = validation.number("rate", self.rate, "an arrival rate per server > 0", above=0.0)
        object.__setattr__(self, "rate", rate)

    def mean_rate(self, n_servers: int) -> float:
        """Return the long-run arrival rate per server."""
        return self.rate

    def rate_at(self, time: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the arrival rate per server at each time."""
        return np.full(np.shape(time), self.rate)


@dataclass(frozen=True)
class Periodic(_Part):
    """Poisson arrivals at the periodic rate ``rate * (1 + amplitude * sin(2 pi t / period))``.

    Parameters
    ----------
    rate : float
        Mean arrival rate per server, tasks per unit time, > 0.
    amplitude : float
        Relative amplitude, in [0, 1].
    period : float
        Length of a cycle, in time units, > 0. Time 0, where the log begins, is phase 0.
    """

    rate: float
    amplitude: float
    period: float

    def __post_init__(self) -> None:
        for name, value in (
            (
                "rate",
                validation.number("rate", self.rate, "an arrival rate per server > 0", above=0.0),
            ),
            (
                "amplitude",
                validation.number(
                    "amplitude", self.amplitude, "in [0, 1]", at_least=0.0, at_most=1.0
                ),
            ),
            ("period", validation.number("period", self.period, "a time > 0", above=0.0)),
        ):
            object.__setattr__(self, name, value)

    def mean_rate(self, n_servers: int) -> float:
        """Return the long-run arrival rate per server."""
        return self.rate

    def rate_at(self, time: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the arrival rate per server at each time."""
        return self.rate * (
            1.0 + self.amplitude * np.sin(2.0 * np.pi * np.asarray(time) / self.period)
        )


@dataclass(frozen=True, eq=False, repr=False)
class ArrivalTrace(_Trace):
    """Arrivals at given times. The system starts empty: a trace has no warm-up.

    Parameters
    ----------
    times : sequence of float, shape (n,)
        Arrival times of the whole system, non-decreasing, at least two, not all equal.
    """

    times: Sequence[float] | NDArray[np.float64]

    def __post_init__(self) -> None:
        right = "a sequence of at least two non-decreasing times, not all equal"
        times = validation.vector("times", self.times, right)
        if times.size < 2 or times[-1] == times[0]:
            raise ValueError(
                f"times has {times.size} entries, first {times[0]}: it must be {right}"
            )
        falls = np.flatnonzero(np.diff(times) < 0)
        if falls.size:
            at = int(falls[0]) + 1
            raise ValueError(
                f"times[{at}]={times[at]} is before times[{at - 1}]: it must be {right}"
            )
        object.__setattr__(self, "times", times)

    def mean_rate(self, n_servers: int) -> float:
        """Return arrivals per unit time over the trace, per server."""
        times = np.asarray(self.times)
        return (times.size - 1) / float(times[-1] - times[0]) / n_servers


# --------------------------------------------------------------------------------------------------
# - Service requirements
# --------------------------------------------------------------------------------------------------
# -


@dataclass(frozen=True)
class Exponential(_Part):
    """Exponential service requirements of mean 1."""

    kind: ClassVar[str] = "EXPONENTIAL"
    mean: ClassVar[float] = 1.0
    scv: ClassVar[float] = 1.0
    kernel_parameters: ClassVar[tuple[float, float]] = (0.0, 0.0)


@dataclass(frozen=True)
class Deterministic(_Part):
    """Service requirements that are all equal to 1."""

    kind: ClassVar[str] = "DETERMINISTIC"
    mean: ClassVar[float] = 1.0
    scv: ClassVar[float] = 0.0
    kernel_parameters: ClassVar[tuple[float, float]] = (0.0, 0.0)


@dataclass(frozen=True)
class Pareto(_Part):
    """Pareto service requirements of type I, scaled to mean 1: P(R > x) = (scale / x) ** shape.

    The scale, which is also the smallest requirement, is (shape - 1) / shape.

    Parameters
    ----------
    shape : float
        Tail index, > 1. The variance is infinite for shape <= 2.
    """

    kind: ClassVar[str] = "PARETO"
    mean: ClassVar[float] = 1.0
    shape: float

    def __post_init__(self) -> None:
        right = "a tail index > 1 (the mean is infinite otherwise)"
        object.__setattr__(self, "shape", validation.number("shape", self.shape, right, above=1.0))

    @property
    def scv(self) -> float:
        """Squared coefficient of variation, infinite for shape <= 2."""
        if self.shape <= 2.0:
            return math.inf
        return 1.0 / (self.shape * (self.shape - 2.0))

    @property
    def kernel_parameters(self) -> tuple[float, float]:
        """Scale and exponent of the inversion ``scale * u ** exponent``."""
        return ((self.shape - 1.0) / self.shape, -1.0 / self.shape)


@dataclass(frozen=True)
class LogNormal(_Part):
    """Lognormal service requirements of mean 1.

    Parameters
    ----------
    cv : float
        Coefficient of variation (standard deviation over mean), > 0 and at most 1e6.
    """

    kind: ClassVar[str] = "LOGNORMAL"
    mean: ClassVar[float] = 1.0
    cv: float

    def __post_init__(self) -> None:
        right = "a coefficient of variation > 0 and at most 1e6"
        cv = validation.number("cv", self.cv, right, above=0.0, at_most=1e6)
        object.__setattr__(self, "cv", cv)

    @property
    def scv(self) -> float:
        """Squared coefficient of variation."""
        return self.cv**2

    @property
    def kernel_parameters(self) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm."""
        variance = math.log1p(self.cv**2)
        return (-0.5 * variance, math.sqrt(variance))


@dataclass(frozen=True, eq=False, repr=False)
class ServiceTrace(_Trace):
    """Given service requirements, one per logged task in order of arrival, not scaled.

    Tasks of a warm-up draw theirs from the trace at random, and so do, with processor sharing,
    tasks that arrive after its end.

    Parameters
    ----------
    requirements : sequence of float, shape (n,)
        Requirements, each >= 0, with a mean > 0.
    """

    kind: ClassVar[str] = "SERVICE_TRACE"
    kernel_parameters: ClassVar[tuple[float, float]] = (0.0, 0.0)
    requirements: Sequence[float] | NDArray[np.float64]

    def __post_init__(self) -> None:
        right = "a sequence of requirements >= 0 with a mean > 0"
        requirements = validation.vector("requirements", self.requirements, right)
        bad = np.flatnonzero(requirements < 0)
        if bad.size:
            raise ValueError(
                f"requirements[{bad[0]}]={requirements[bad[0]]} is negative: it must be {right}"
            )
        if not requirements.any():
            raise ValueError(f"requirements are all zero: it must be {right}")
        object.__setattr__(self, "requirements", requirements)

    @property
    def mean(self) -> float:
        """Mean requirement."""
        return float(np.mean(self.requirements))

    @property
    def scv(self) -> float:
        """Squared coefficient of variation."""
        return float(np.var(self.requirements)) / self.mean**2


Arrivals = Poisson | Periodic | ArrivalTrace
Service = Exponential | Deterministic | Pareto | LogNormal | ServiceTrace

_PARTS: dict[str, type[_Part]] = {
    cls.__name__: cls
    for cls in (
        Poisson,
        Periodic,
        ArrivalTrace,
        Exponential,
        Deterministic,
        Pareto,
        LogNormal,
        ServiceTrace,
    )
}


def _part_from_dict(spec: dict[str, Any]) -> Any:
    values = dict(spec)
    name = values.pop("type", None)
    if name not in _PARTS:
        raise validation.refuse("type", name, "one of " + ", ".join(sorted(_PARTS)))
    return _PARTS[name](**values)


# --------------------------------------------------------------------------------------------------
# - The whole system
# --------------------------------------------------------------------------------------------------
# -


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A system of parallel servers, and the two policies whose difference is asked for.

    Parameters
    ----------
    n_servers : int, default 20
        Number of servers, from 1 to 2^24.
    arrivals : Poisson, Periodic or ArrivalTrace, default Poisson(0.8)
        Arrival process; rates are per server.
    service : Exponential, Deterministic, Pareto, LogNormal or ServiceTrace, default Exponential()
        Law of the service requirements, of mean 1 except for a trace.
    service_rates : float or sequence of float, shape (n_servers,), default 1.0
        Speed of each server, > 0; a requirement takes requirement / rate time units.
    discipline : {"fcfs", "processor_sharing"}, default "fcfs"
        How a server treats the tasks it has: first come, first served; or all at once, each of q
        tasks at 1/q of the server's speed, so that none waits. The same seed draws the same
        arrivals, requirements, arms and candidates under both.
    information_delay : float, default 0.0
        At time t the dispatcher sees the servers as they were at t - information_delay, >= 0.
    dispatch_delay : float, default 0.0
        A task reaches its server this long after its arrival, >= 0. Its response time counts from
        the arrival.
    counts_own_dispatches : bool, default False
        Whether the dispatcher adds the tasks it has sent and does not yet see to what it sees.
    control, treatment : Policy, default PowerOfD(2), PowerOfD(3)
        The two routing policies.
    allow_unstable : bool, default False
        Whether a system whose queues grow without bound is allowed; a warm-up must then be given.

    Raises
    ------
    TypeError, ValueError
        If an argument is out of its range, a policy samples more servers than there are, or the
        system is unstable under either policy.
    """

    n_servers: int = 20
    arrivals: Arrivals = Poisson(0.8)
    service: Service = Exponential()
    service_rates: float | Sequence[float] = 1.0
    discipline: str = "fcfs"
    information_delay: float = 0.0
    dispatch_delay: float = 0.0
    counts_own_dispatches: bool = False
    control: Policy = field(default_factory=lambda: PowerOfD(2))
    treatment: Policy = field(default_factory=lambda: PowerOfD(3))
    allow_unstable: bool = False

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put(
            "n_servers",
            validation.integer(
                "n_servers",
                self.n_servers,
                f"an integer from 1 to {MOST_SERVERS}",
                at_least=1,
                at_most=MOST_SERVERS,
            ),
        )
        for name, kinds in (("arrivals", Arrivals), ("service", Service)):
            if not isinstance(getattr(self, name), kinds):
                names = ", ".join(cls.__name__ for cls in kinds.__args__)
                raise TypeError(
                    f"{name}={getattr(self, name)!r} is not allowed: {name} must be one of {names}"
                )
        put("service_rates", self._checked_rates())
        if self.discipline not in DISCIPLINES:
            right = "one of " + ", ".join(map(repr, DISCIPLINES))
            raise validation.refuse("discipline", self.discipline, right)
        for name in ("information_delay", "dispatch_delay"):
            put(name, validation.number(name, getattr(self, name), "a time >= 0", at_least=0.0))
        put(
            "counts_own_dispatches",
            validation.boolean("counts_own_dispatches", self.counts_own_dispatches),
        )
        put("allow_unstable", validation.boolean("allow_unstable", self.allow_unstable))
        for name in ("control", "treatment"):
            policy = getattr(self, name)
            if type(policy) is Policy or not isinstance(policy, Policy):
                raise TypeError(
                    f"{name}={policy!r} is not a policy: {name} must be one, such as PowerOfD(2)"
                )
            if policy.min_servers > self.n_servers:
                raise ValueError(
                    f"{name}={policy!r} samples more servers than n_servers={self.n_servers}: "
                    f"d must be at most {self.n_servers}"
                )
        loads = {name: self._load_under(getattr(self, name)) for name in ("control", "treatment")}
        object.__setattr__(self, "_load", max(loads.values()))
        for name, load in loads.items():
            if load >= 1.0 and not self.allow_unstable:
                raise ValueError(
                    f"the system is unstable under {name}={getattr(self, name)!r}: its load is "
                    f"{load:.4g} and "
                    "must be below 1 (or set allow_unstable=True and give warm_up)"
                )

    def _checked_rates(self) -> float | tuple[float, ...]:
        right = f"a rate > 0, or {self.n_servers} of them"
        if np.ndim(self.service_rates) == 0:
            return validation.number("service_rates", self.service_rates, right, above=0.0)
        rates = validation.vector("service_rates", self.service_rates, right)
        if rates.size != self.n_servers:
            raise ValueError(f"service_rates has {rates.size} entries: it must be {right}")
        slow = np.flatnonzero(rates <= 0)
        if slow.size:
            raise ValueError(
                f"service_rates[{slow[0]}]={rates[slow[0]]} is not > 0: it must be {right}"
            )
        return tuple(rates.tolist())

    def _load_under(self, policy: Policy) -> float:
        return policy.load(self.rates / self.service.mean, self.total_arrival_rate)

    @property
    def rates(self) -> NDArray[np.float64]:
        """Service rate of each server, shape (n_servers,)."""
        return np.broadcast_to(
            np.asarray(self.service_rates, dtype=np.float64), self.n_servers
        ).copy()

    @property
    def total_arrival_rate(self) -> float:
        """Long-run arrival rate of the whole system, tasks per unit time."""
        return self.n_servers * self.arrivals.mean_rate(self.n_servers)

    @property
    def load(self) -> float:
        """Largest ratio of demand to capacity in the stability conditions of the two policies."""
        return self._load  # type: ignore[attr-defined, no-any-return]

    @property
    def mean_service_time(self) -> float:
        """Mean requirement over the mean service rate, in time units."""
        return self.service.mean / float(np.mean(self.rates))

    @property
    def default_horizon(self) -> int:
        """Horizon of the truncated estimators, in tasks: floor(30 * n_servers * mean rate)."""
        return max(1, math.floor(30.0 * self.total_arrival_rate + 1e-9))

    @property
    def default_warm_up(self) -> float:
        """Time simulated before the log begins, from an empty system.

        In mean service times, with c = (1 + scv) / 2 of the service law where that is finite and
        above 1, else 1: if both policies choose among two or more servers, 20 / (1 - load) or
        5 c / (n_servers (1 - sqrt(load))^2), whichever is more (the total relaxes no faster than in
        one fast server, which matters for few servers or a load close to 1); otherwise
        5 c / (1 - sqrt(load))^2. At least a cycle of a periodic rate; none for an arrival trace.

        Raises
        ------
        ValueError
            If the system is unstable: no warm-up would do.
        """
        if isinstance(self.arrivals, ArrivalTrace):
            return 0.0
        if self.load >= 1.0:
            raise ValueError(
                f"warm_up=None is not allowed at load {self.load:.4g}: an unstable system has no "
                "steady state, so warm_up must be given as a time >= 0"
            )
        spread = (1.0 + self.service.scv) / 2.0
        alone = 5.0 * (max(1.0, spread) if math.isfinite(spread) else 1.0)
        alone /= (1.0 - math.sqrt(self.load)) ** 2
        if self.control.forgets_fast and self.treatment.forgets_fast:
            services = max(20.0 / (1.0 - self.load), alone / self.n_servers)
        else:
            services = alone
        warm_up = services * self.mean_service_time
        return (
            max(warm_up, self.arrivals.period) if isinstance(self.arrivals, Periodic) else warm_up
        )

    def replace(self, **changes: Any) -> Scenario:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the scenario as a JSON-native dictionary.

        Raises
        ------
        TypeError
            If a policy is a UserPolicy.
        """
        result: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if hasattr(value, "to_dict"):
                value = value.to_dict()
            result[f.name] = list(value) if isinstance(value, tuple) else value
        return result

    @classmethod
    def from_dict(cls, spec: dict[str, Any]) -> Scenario:
        """Return the scenario that `to_dict` wrote."""
        values = dict(spec)
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise validation.refuse("scenario field", unknown[0], "one of the fields of Scenario")
        for name, read in (
            ("arrivals", _part_from_dict),
            ("service", _part_from_dict),
            ("control", policy_from_dict),
            ("treatment", policy_from_dict),
        ):
            if name in values:
                values[name] = read(values[name])
        return cls(**values)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{f.name}</th><td>{html.escape(repr(getattr(self, f.name)))}</td></tr>"
            for f in fields(self)
        )
        return f"<table><caption>Scenario</caption>{rows}</table>"
