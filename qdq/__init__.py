"""qdq: experiments on scheduling policies in queues.

A tour in ten lines::

    import qdq

    scenario = qdq.Scenario(control=qdq.PowerOfD(2), treatment=qdq.PowerOfD(3))
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), n_tasks=1_000_000, seed=1)
    print(qdq.estimate(log))                     # naive, DQ and mixed DQ, with intervals
    print(qdq.true_effect(scenario))             # what they should have found
    study = qdq.run_study(scenario, n_tasks=100_000, n_replications=200, seed=3)
    print(study.table)                           # bias, SD, RMSE and coverage of each method
    log = qdq.TaskLog.read("experiment.csv")     # a log from outside
    print(qdq.dq_mixed(log, horizon=480))
"""

from __future__ import annotations

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
from qdq.policies import (
    JoinIdleQueue,
    JoinShortestQueue,
    LeastWorkLeft,
    PowerOfD,
    RoundRobin,
    ShortestExpectedDelay,
    UserPolicy,
)
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
from qdq.simulate import replay, simulate
from qdq.study import Study, run_study
from qdq.tasklog import TaskLog

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
    "Pareto",
    "Periodic",
    "Poisson",
    "PowerOfD",
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
    "dq_mixed",
    "dq_queue",
    "dq_response",
    "estimate",
    "naive",
    "replay",
    "run_study",
    "server_split",
    "simulate",
    "switchback",
    "true_effect",
]
