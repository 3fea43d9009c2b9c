"""qdq: experiments on scheduling policies in queues.

A tour::

    import qdq

    scenario = qdq.Scenario(control=qdq.PowerOfD(2), treatment=qdq.PowerOfD(3))
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), n_tasks=1_000_000, seed=1)
    print(qdq.estimate(log))                     # naive, DQ and mixed DQ, with intervals
    print(qdq.true_effect(scenario))             # what they should have found
    frame = qdq.replicate(scenario, qdq.Bernoulli(0.5), n_tasks=10**9, seed=1)  # keeps no log
    study = qdq.run_study(scenario, n_tasks=100_000, n_replications=200, seed=3)
    print(study.table)                           # bias, SD, RMSE and coverage of each method
    print(qdq.plan(scenario, effect=0.1))        # how many tasks it takes to see an effect
    log = qdq.TaskLog.read("experiment.csv")     # a log from outside
    print(qdq.dq_mixed(log, horizon="coverage"))
    print(qdq.log_twin(log, qdq.PowerOfD(2), qdq.PowerOfD(3)))  # rebuilt, fitted, tested, replayed
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from typing import Any


class _Deferred(types.ModuleType):
    """A module of the package that is run when something of it is first asked for, by any thread.

    For the kernels, since importing numba takes longer than all the rest.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        self.__spec__, self.__loader__, self.__file__ = spec, spec.loader, spec.origin
        self.__package__ = spec.parent
        self.__dict__["_lock"] = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        # Python asks here for what the module does not hold, or not yet.
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        with self.__dict__["_lock"]:
            if not self.__dict__.get("_begun"):
                self.__dict__["_begun"] = True
                try:
                    self.__spec__.loader.exec_module(self)
                except BaseException:
                    self.__dict__["_begun"] = False
                    raise
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


sys.modules["qdq.kernels"] = globals()["kernels"] = _Deferred("qdq.kernels")

from qdq.designs import AllControl, AllTreatment, Bernoulli, ServerSplit, Switchback
from qdq.estimators import (
    Estimate,
    dq_mixed,
    dq_queue,
    dq_response,
    estimate,
    naive,
    server_split,
    switchback,
)
from qdq.exact import TrueEffect, true_effect
from qdq.online import OnlineEstimator
from qdq.plan import Plan, plan
from qdq.policies import (
    JoinIdleQueue,
    JoinShortestQueue,
    LeastWorkLeft,
    PowerOfD,
    RoundRobin,
    ShortestExpectedDelay,
    UserPolicy,
)
from qdq.randomisation import RandomisationTest, randomisation_test
from qdq.scenario import (
    ArrivalTrace,
    Deterministic,
    Exponential,
    LogNormal,
    Pareto,
    Periodic,
    Poisson,
    Scenario,
    ServiceTrace,
)
from qdq.score import dq_score, lstd_dq
from qdq.simulate import replay, simulate
from qdq.study import Study, replicate, run_study
from qdq.tasklog import TaskLog
from qdq.twin import LogTwin, WhatIf, log_twin, what_if

__version__ = "0.1.0"

__all__ = [
    "AllControl",
    "AllTreatment",
    "ArrivalTrace",
    "Bernoulli",
    "Deterministic",
    "Estimate",
    "Exponential",
    "JoinIdleQueue",
    "JoinShortestQueue",
    "LeastWorkLeft",
    "LogNormal",
    "LogTwin",
    "OnlineEstimator",
    "Pareto",
    "Periodic",
    "Plan",
    "Poisson",
    "PowerOfD",
    "RandomisationTest",
    "RoundRobin",
    "Scenario",
    "ServerSplit",
    "ServiceTrace",
    "ShortestExpectedDelay",
    "Study",
    "Switchback",
    "TaskLog",
    "TrueEffect",
    "UserPolicy",
    "WhatIf",
    "dq_mixed",
    "dq_queue",
    "dq_response",
    "dq_score",
    "estimate",
    "log_twin",
    "lstd_dq",
    "naive",
    "plan",
    "randomisation_test",
    "replay",
    "replicate",
    "run_study",
    "server_split",
    "simulate",
    "switchback",
    "true_effect",
    "what_if",
]
