"""Experimental designs: which task is routed by which policy, and when."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdq import validation
from qdq.scenario import Scenario


@dataclass(frozen=True)
class Design:
    """What all designs share. Use one of the subclasses."""

    def to_dict(self) -> dict[str, Any]:
        """Return the design as a JSON-native dictionary."""
        return {"type": type(self).__name__} | {f.name: getattr(self, f.name) for f in fields(self)}


def _check_propensity(value: float) -> float:
    return validation.number(
        "propensity", value, "a probability strictly between 0 and 1", above=0.0, below=1.0
    )


@dataclass(frozen=True)
class Bernoulli(Design):
    """Each task is treated with the same probability, independently.

    Parameters
    ----------
    propensity : float, default 0.5
        Probability of treatment, strictly between 0 and 1. It is applied to a 32-bit draw, so it is
        exact to within 2.4e-10.
    """

    propensity: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "propensity", _check_propensity(self.propensity))


@dataclass(frozen=True)
class Switchback(Design):
    """All tasks of a period of time are routed by one policy, drawn afresh for each period.

    Parameters
    ----------
    period : float
        Length of a period, in time units, > 0. Periods are counted from time 0, where the log
        begins.
    propensity : float, default 0.5
        Probability that a period is treated, strictly between 0 and 1.
    """

    period: float
    propensity: float = 0.5

    def __post_init__(self) -> None:
        period = validation.number("period", self.period, "a time > 0", above=0.0)
        object.__setattr__(self, "period", period)
        object.__setattr__(self, "propensity", _check_propensity(self.propensity))


@dataclass(frozen=True)
class ServerSplit(Design):
    """Each arm has servers of its own; a task goes to an arm in proportion to the arm's capacity.

    The servers are drawn at random, stratified by service rate.

    Parameters
    ----------
    share : float, default 0.5
        Share of the servers that treatment gets, strictly between 0 and 1; rounded to whole
        servers, with at least as many servers in each arm as either policy samples.
    """

    share: float = 0.5

    def __post_init__(self) -> None:
        share = validation.number(
            "share",
            self.share,
            "a share of the servers strictly between 0 and 1",
            above=0.0,
            below=1.0,
        )
        object.__setattr__(self, "share", share)

    def treated_servers(
        self, scenario: Scenario, stream: np.random.SeedSequence
    ) -> NDArray[np.bool_]:
        """Draw which servers treatment gets.

        The servers are put in order of their rates, those of equal rate at random, and treatment
        takes every 1/share-th of them from a random start: so each stretch of rates is shared
        alike.

        Parameters
        ----------
        scenario : Scenario
            The system to split.
        stream : numpy.random.SeedSequence
            Source of the draw.

        Returns
        -------
        ndarray of bool, shape (n_servers,)

        Raises
        ------
        ValueError
            If there are too few servers for both arms.
        """
        n = scenario.n_servers
        fewest = max(scenario.control.min_servers, scenario.treatment.min_servers)
        if n < 2 * fewest:
            raise ValueError(
                f"n_servers={n} is too few for {self!r}: each arm needs at least {fewest} servers "
                f"of its own"
            )
        count = self._count(scenario)
        draw = np.random.Generator(np.random.Philox(stream))
        order = np.lexsort((draw.random(n), scenario.rates))
        # Multiples of n, so that the count is exact whatever the start.
        steps = (np.arange(n + 1) * count + draw.integers(n)) // n
        treated = np.zeros(n, dtype=np.bool_)
        treated[order[np.diff(steps) > 0]] = True
        return treated

    def _count(self, scenario: Scenario) -> int:
        """Return how many servers treatment gets."""
        n = scenario.n_servers
        fewest = max(scenario.control.min_servers, scenario.treatment.min_servers)
        return min(max(round(self.share * n), fewest), n - fewest)

    def equal_groups(self, scenario: Scenario) -> bool:
        """Whether both arms get the same servers, in number and in rates, whatever the draw."""
        equal_rates = bool(np.ptp(scenario.rates) == 0.0)
        return equal_rates and 2 * self._count(scenario) == scenario.n_servers

    def check_stable(self, scenario: Scenario, treated_servers: NDArray[np.bool_]) -> None:
        """Refuse a split in which the demand on one of the two groups exceeds what it can serve.

        Raises
        ------
        ValueError
            If a group is unstable and the scenario does not allow that.
        """
        if scenario.allow_unstable:
            return
        rates = scenario.rates / scenario.service.mean
        for name, policy, mine in (
            ("control", scenario.control, ~treated_servers),
            ("treatment", scenario.treatment, treated_servers),
        ):
            share = float(np.sum(rates[mine]) / np.sum(rates))
            load = policy.load(rates[mine], scenario.total_arrival_rate * share)
            if load >= 1.0:
                raise ValueError(
                    f"{self!r} leaves {name} with {int(mine.sum())} servers at load {load:.4g}: it "
                    f"must be "
                    "below 1 (or set allow_unstable=True and give warm_up)"
                )


@dataclass(frozen=True)
class AllControl(Design):
    """Every task is routed by control."""


@dataclass(frozen=True)
class AllTreatment(Design):
    """Every task is routed by treatment."""


_BY_NAME: dict[str, type[Design]] = {
    cls.__name__: cls for cls in (Bernoulli, Switchback, ServerSplit, AllControl, AllTreatment)
}


def design_from_dict(spec: dict[str, Any]) -> Design:
    """Return the design that `Design.to_dict` wrote.

    Raises
    ------
    ValueError
        If the type is not the name of a design.
    """
    values = dict(spec)
    name = values.pop("type", None)
    if name not in _BY_NAME:
        raise validation.refuse("type", name, "one of " + ", ".join(sorted(_BY_NAME)))
    return _BY_NAME[name](**values)
