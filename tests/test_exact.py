"""The exact chains against brute force and identities, the closed forms, and true_effect."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import qdq
from qdq import exact
from qdq.exact import (
    mean_field_response,
    mm1_response,
    pollaczek_khinchine,
    random_routing_response,
    refined_mean_field_response,
    small_chain,
    true_effect,
)

# Two-sided false alarm of a single comparison: 4.5 standard errors, 7e-6.
Z = 4.5
RANDOM, TWO, THREE = qdq.PowerOfD(1), qdq.PowerOfD(2), qdq.PowerOfD(3)


def system(n_servers, load, control, treatment, **changes):
    return qdq.Scenario(
        n_servers=n_servers,
        arrivals=qdq.Poisson(load),
        control=control,
        treatment=treatment,
        **changes,
    )


@pytest.fixture(scope="module")
def chain():
    return small_chain(system(2, 0.6, RANDOM, TWO))


# --------------------------------------------------------------------------------------------------
# Brute force: every state apart, dense matrices, routing by going through all orders of candidates
# --------------------------------------------------------------------------------------------------


def brute_choice(policy, lengths, rates):
    n = len(lengths)
    chosen = [0.0] * n
    orders = list(itertools.permutations(range(n)))
    for order in orders:
        if isinstance(policy, qdq.JoinIdleQueue):
            server = next((s for s in order if lengths[s] == 0), order[0])
        elif isinstance(policy, qdq.ShortestExpectedDelay):
            server = min(order[: policy.d], key=lambda s: (lengths[s] + 1) / rates[s])
        elif isinstance(policy, qdq.JoinShortestQueue):
            server = min(order, key=lambda s: lengths[s])
        else:
            server = min(order[: policy.d], key=lambda s: lengths[s])
        chosen[server] += 1.0 / len(orders)
    return chosen


def gth(generator):
    """Return the stationary law of a dense generator by elimination without subtraction."""
    a = np.array(generator)
    n = len(a)
    for k in range(n - 1, 0, -1):
        a[:k, k] /= a[k, :k].sum()
        a[:k, :k] += np.outer(a[:k, k], a[k, :k])
    law = np.ones(n)
    for k in range(1, n):
        law[k] = law[:k] @ a[:k, k]
    return law / law.sum()


class Brute:
    def __init__(self, scenario, p, longest):
        n, rates = scenario.n_servers, scenario.rates
        self.rate = scenario.total_arrival_rate
        states = list(itertools.product(range(longest + 1), repeat=n))
        index = {x: i for i, x in enumerate(states)}
        size = len(states)
        self.routing = np.zeros((2, size, size))
        self.response = np.zeros((2, size))
        departures = np.zeros((size, size))
        for x, i in index.items():
            for arm, policy in enumerate((scenario.control, scenario.treatment)):
                for s, weight in enumerate(brute_choice(policy, x, rates)):
                    fits = x[s] < longest
                    y = (*x[:s], x[s] + 1, *x[s + 1 :]) if fits else x
                    self.routing[arm, i, index[y]] += weight
                    self.response[arm, i] += weight * (x[s] + 1) / rates[s]
            for s in range(n):
                if x[s] > 0:
                    departures[i, index[(*x[:s], x[s] - 1, *x[s + 1 :])]] += rates[s]
                    departures[i, i] -= rates[s]
        one = np.eye(size)
        self.shares = np.array([1.0 - p, p])
        mixed = np.tensordot(self.shares, self.routing, 1)
        # Expected time in each state until the next arrival.
        self.until_arrival = np.linalg.inv(self.rate * one - departures)
        self.law = gth(self.rate * (mixed - one) + departures)
        self.step = np.array([j @ self.until_arrival * self.rate for j in self.routing])
        self.cost = self.shares @ self.response
        self.tasks = np.array([sum(x) for x in states], dtype=float)
        self.waiting = np.array([sum(max(k - 1, 0) for k in x) for x in states], dtype=float)

    def after_effects(self, cost, n_terms, pushed=None):
        """Return pi (P_1 - P_0) (1 + P + ... + P^(n_terms - 1)) cost, through the powers of P."""
        both = np.tensordot(self.shares, self.step, 1)
        total, column = np.zeros(len(cost)), np.array(cost)
        for _ in range(n_terms):
            total += column
            column = both @ column
        return float(self.law @ (self.step[1] - self.step[0]) @ total)

    @property
    def direct(self):
        return float(self.law @ (self.response[1] - self.response[0]))

    def time_average(self, horizon):
        """Return the effect on the integral of the tasks in system from A_i to A_{i+L}."""
        mixed = np.tensordot(self.shares, self.routing, 1)
        ahead = np.zeros(len(self.tasks))  # from just after an arrival, over the remaining gaps
        for _ in range(horizon):
            ahead = self.until_arrival @ (self.tasks + self.rate * mixed @ ahead)
        return float(self.law @ (self.routing[1] - self.routing[0]) @ ahead)

    @property
    def slope(self):
        both = np.tensordot(self.shares, self.step, 1)
        size = len(self.law)
        fundamental = np.linalg.inv(np.eye(size) - both + np.outer(np.ones(size), self.law))
        change = self.law @ (self.step[1] - self.step[0])
        return self.direct + float(change @ fundamental @ self.cost)


CASES = [
    (system(2, 0.6, RANDOM, TWO), 0.5, 9),
    (system(2, 0.7, RANDOM, qdq.ShortestExpectedDelay(2), service_rates=(2.0, 0.8)), 0.3, 9),
    (system(2, 0.4, qdq.JoinIdleQueue(), qdq.JoinShortestQueue()), 0.8, 9),
    (system(3, 0.7, TWO, THREE), 0.5, 5),
    (system(3, 0.5, qdq.JoinIdleQueue(), TWO, service_rates=(1.0, 1.7, 1.0)), 0.3, 5),
    (system(3, 0.6, qdq.ShortestExpectedDelay(2), RANDOM, service_rates=(2, 1.1, 0.7)), 0.6, 5),
]


@pytest.mark.parametrize(("scenario", "p", "longest"), CASES)
def test_chain_agrees_with_brute_force(scenario, p, longest):
    chain, brute = small_chain(scenario, p, truncation=longest), Brute(scenario, p, longest)
    # One elimination and one iteration to 1e-13 on numbers of order 1.
    same = {"rel": 1e-9, "abs": 1e-10}
    assert chain.mean_response() == pytest.approx(float(brute.law @ brute.cost), **same)
    assert chain.direct_effect() == pytest.approx(brute.direct, **same)
    assert chain.slope() == pytest.approx(brute.slope, **same)
    horizons = [1, 2, 3, 7, 20]
    rate = scenario.total_arrival_rate
    response = [brute.direct + brute.after_effects(brute.cost, L - 1) for L in horizons]
    np.testing.assert_allclose(chain.expected_dq_response(horizons), response, **_as_numpy(same))
    for queue, cost in (
        ("in_system", brute.tasks),
        ("including_self", brute.tasks + 1.0),
        ("waiting", brute.waiting),
    ):
        expected = [brute.after_effects(cost, L) / rate for L in horizons]
        value = chain.expected_dq_queue(horizons, queue=queue)
        np.testing.assert_allclose(value, expected, **_as_numpy(same), err_msg=queue)
    expected = [brute.time_average(L) for L in horizons]
    value = chain.expected_dq_queue(horizons, queue="time_average")
    np.testing.assert_allclose(value, expected, **_as_numpy(same))


def _as_numpy(tolerance):
    return {"rtol": tolerance["rel"], "atol": tolerance["abs"]}


def test_states_that_differ_by_an_exchange_of_equal_servers_are_one():
    assert small_chain(system(3, 0.5, TWO, THREE), truncation=5).n_states == math.comb(8, 3)
    rates = (1.0, 1.7, 1.0)
    mixed = small_chain(system(3, 0.5, TWO, THREE, service_rates=rates), truncation=5)
    assert mixed.n_states == 6 * math.comb(7, 2)


# --------------------------------------------------------------------------------------------------
# Known values and identities of the chain
# --------------------------------------------------------------------------------------------------


def test_known_values(chain):
    values = {
        "effect": (chain.global_effect, -0.81822),
        "naive": (chain.direct_effect(), -0.48797),
        "wDQ 10": (chain.expected_dq_response(10), -0.51132),
        "wDQ 60": (chain.expected_dq_response(60), -0.62270),
        "qDQ 10": (chain.expected_dq_queue(10), -0.42530),
        "qDQ 60": (chain.expected_dq_queue(60), -0.62182),
    }
    assert {name: round(value, 5) for name, (value, _) in values.items()} == {
        name: known for name, (_, known) in values.items()
    }


def test_horizon_of_one_is_the_naive_difference(chain):
    assert chain.expected_dq_response(1) == pytest.approx(chain.direct_effect(), rel=1e-14)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_both_dq_tend_to_the_slope(chain, p):
    # Little's law makes the limits one; at L = 1000 what remains is below 1e-9.
    slope = chain.slope(p)
    assert chain.expected_dq_response(1000, p) == pytest.approx(slope, rel=1e-9)
    assert chain.expected_dq_queue(1000, p) == pytest.approx(slope, rel=1e-8)
    # Waiting is a response less a service time of the same mean, when rates are equal.
    assert chain.expected_dq_queue(1000, p, queue="waiting") == pytest.approx(slope, rel=1e-8)


def test_slope_is_the_derivative_and_integrates_to_the_effect(chain):
    step = 1e-3
    for p in (0.1, 0.5, 0.9):
        difference = chain.mean_response(p + step) - chain.mean_response(p - step)
        # The rest is of order step^2 V''' / 6.
        assert chain.slope(p) == pytest.approx(difference / (2 * step), rel=1e-4)
    nodes, weights = np.polynomial.legendre.leggauss(12)
    integral = sum(w / 2 * chain.slope((x + 1) / 2) for x, w in zip(nodes, weights, strict=True))
    assert integral == pytest.approx(chain.global_effect, rel=1e-8)
    # The three estimands are far apart here, so that none can stand in for another.
    assert abs(chain.direct_effect() - chain.slope()) > 0.1
    assert abs(chain.global_effect - chain.slope()) > 0.1


def test_exchanging_the_arms_changes_the_signs(chain):
    other = small_chain(system(2, 0.6, TWO, RANDOM), 0.3)
    assert other.global_effect == pytest.approx(-chain.global_effect, rel=1e-9)
    assert other.direct_effect() == pytest.approx(-chain.direct_effect(0.7), rel=1e-9)
    assert other.expected_dq_queue(9) == pytest.approx(-chain.expected_dq_queue(9, 0.7), rel=1e-9)


def test_random_routing_is_a_row_of_mm1_queues(chain):
    assert chain.mean_response(0.0) == pytest.approx(mm1_response(0.6), abs=1e-8)
    rates = (0.8, 2.0)
    uneven = small_chain(system(2, 0.5, RANDOM, TWO, service_rates=rates))
    assert uneven.mean_response(0.0) == pytest.approx((1 / 0.3 + 1 / 1.5) / 2, abs=1e-8)
    # The slow server needs the longer queue, whichever place it has.
    assert uneven.truncation[0] > uneven.truncation[1]
    turned = small_chain(system(2, 0.5, RANDOM, TWO, service_rates=rates[::-1]))
    assert turned.truncation == uneven.truncation[::-1]


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_two_server_shortest_queue(load):
    shortest = small_chain(system(2, load, TWO, qdq.JoinShortestQueue()))
    assert shortest.global_effect == pytest.approx(0.0, abs=1e-10)
    value = shortest.mean_response()
    # Independently: dense elimination of the generator, then Little's law.
    brute = Brute(system(2, load, TWO, TWO), 0.5, 18)
    by_little = float(brute.law @ brute.tasks) / brute.rate
    # A queue has the tail load^(2 k), cut off here above 18.
    assert value == pytest.approx(by_little, rel=50 * load**38)
    # Two servers with one queue (Erlang's C for c = 2) are better, queues of one's own are worse.
    assert 1.0 / (1.0 - load**2) < value < mm1_response(load)


def test_truncation_error_is_what_it_says():
    for tolerance in (1e-2, 1e-4, 1e-6):
        coarse = small_chain(system(2, 0.8, RANDOM, TWO), tolerance=tolerance)
        stated = coarse.truncation_error
        assert stated <= tolerance
        if coarse.n_states > exact._FIRST_STATES:
            assert stated > tolerance / 10  # no larger than need be
        missing = mm1_response(0.8) - coarse.mean_response(0.0)
        assert missing == pytest.approx(stated * 0.8 / 2, rel=0.02)
    assert small_chain(system(2, 0.8, RANDOM, TWO), truncation=20).truncation == (20, 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrivals": qdq.Periodic(0.5, 0.2, 10.0)}, "arrivals=Periodic"),
        ({"service": qdq.Deterministic()}, r"service=Deterministic\(\)"),
        ({"information_delay": 1.0}, "information_delay=1.0"),
        ({"dispatch_delay": 0.5}, "dispatch_delay=0.5"),
        ({"control": qdq.RoundRobin()}, r"control=RoundRobin\(\)"),
        ({"treatment": qdq.LeastWorkLeft()}, r"treatment=LeastWorkLeft\(\)"),
        ({"n_servers": 9}, "n_servers=9: a small chain needs at most 8 servers"),
        ({"arrivals": qdq.Poisson(1.2), "allow_unstable": True}, "load 1.2: .* below 1"),
        ({"n_servers": 6, "arrivals": qdq.Poisson(0.95)}, "states, more than 200000; use fewer"),
    ],
)
def test_chain_refuses(changes, message):
    scenario = system(3, 0.5, RANDOM, TWO).replace(**changes)
    with pytest.raises(ValueError, match=message):
        small_chain(scenario)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.mean_response(1.5), r"propensity=1.5 .* in \[0, 1\]"),
        (lambda c: c.slope(-0.1), r"propensity=-0.1 .* in \[0, 1\]"),
        (lambda c: c.expected_dq_response(0), "horizon=0 .* >= 1"),
        (lambda c: c.expected_dq_response([]), r"horizon=\[\] .* >= 1"),
        (lambda c: c.expected_dq_queue([3, 2.5]), "horizon=2.5 .* >= 1"),
        (lambda c: c.expected_dq_queue(3, queue="length"), "queue='length' .* in_system"),
        (lambda c: small_chain(c.scenario, 2.0), r"propensity=2.0 .* in \[0, 1\]"),
        (lambda c: small_chain(c.scenario, truncation=0), "truncation=0 .* >= 1"),
        (lambda c: small_chain(c.scenario, tolerance=0.0), "tolerance=0.0 .* > 0"),
    ],
)
def test_bad_arguments_of_the_chain(chain, call, message):
    with pytest.raises(ValueError, match=message):
        call(chain)


# --------------------------------------------------------------------------------------------------
# Closed forms
# --------------------------------------------------------------------------------------------------


def test_pollaczek_khinchine():
    assert pollaczek_khinchine(0.8, qdq.Exponential()) == pytest.approx(mm1_response(0.8))
    assert pollaczek_khinchine(0.8, qdq.Deterministic()) == pytest.approx(1 + 0.8 / 0.4)
    # At rate 2, arrivals 1.6 are the same queue on half the time scale.
    assert pollaczek_khinchine(1.6, qdq.Deterministic(), 2.0) == pytest.approx(3.0 / 2.0)
    # E[S^2] = 1 + cv^2 = 5, and for Pareto(3) of scale 2/3: 3 * (2/3)^2 / (3 - 2) = 4/3.
    assert pollaczek_khinchine(0.5, qdq.LogNormal(2.0)) == pytest.approx(1 + 0.5 * 5 / 2 / 0.5)
    assert pollaczek_khinchine(0.5, qdq.Pareto(3.0)) == pytest.approx(1 + 0.5 * (4 / 3) / 2 / 0.5)
    # Requirements 1 and 3: E[S] = 2, E[S^2] = 5.
    trace = qdq.ServiceTrace([1.0, 3.0])
    assert pollaczek_khinchine(0.25, trace) == pytest.approx(2 + 0.25 * 5 / 2 / 0.5)


def test_random_routing_response_against_simulation():
    scenario = system(
        3,
        0.5,
        RANDOM,
        TWO,
        service=qdq.LogNormal(1.5),
        service_rates=(1.0, 0.8, 2.0),
        information_delay=1.0,
        dispatch_delay=0.25,
    )
    expected = 0.25 + np.mean([pollaczek_khinchine(0.5, scenario.service, r) for r in (1, 0.8, 2)])
    assert random_routing_response(scenario) == pytest.approx(float(expected), rel=1e-14)
    means = [
        qdq.simulate(scenario, qdq.AllControl(), 20_000, (4, j)).response_time.mean()
        for j in range(24)
    ]
    error = np.std(means, ddof=1) / math.sqrt(24)
    assert error < 0.02 * expected
    assert abs(np.mean(means) - expected) < Z * error


def test_mean_field_limit():
    # Terms 1, l^2, l^6, l^14, ... of d = 2 and 1, l^3, l^12, ... of d = 3.
    tail = sum(0.9 ** (2**k - 2) for k in range(1, 30))
    assert mean_field_response(0.9, 2) == pytest.approx(tail, rel=1e-14)
    assert mean_field_response(0.5, 3) == pytest.approx(1 + 0.5**3 + 0.5**12 + 0.5**39)
    assert mean_field_response(0.9, 1) == mm1_response(0.9)
    assert refined_mean_field_response(7, 0.9, 1) == mm1_response(0.9)
    assert mean_field_response(0.0, 2) == refined_mean_field_response(5, 0.0, 2) == 1.0
    many = refined_mean_field_response(10**9, 0.9, 2)
    assert many == pytest.approx(mean_field_response(0.9, 2), rel=1e-7)


@pytest.mark.parametrize("d", [2, 3])
def test_refined_mean_field_is_right_to_second_order(d):
    load = 0.5
    scaled_first, scaled_second = [], []
    for n in (4, 5, 6):
        truth = small_chain(system(n, load, qdq.PowerOfD(d), qdq.PowerOfD(d))).mean_response()
        scaled_first.append(n * (mean_field_response(load, d) - truth))
        scaled_second.append(n * n * (refined_mean_field_response(n, load, d) - truth))
    # N times the error of the limit, and N^2 times that of the refinement, tend to constants: less
    # the next order, which the last two steps give.
    slope = refined_mean_field_response(1000, load, d) - mean_field_response(load, d)
    assert 0 < abs(scaled_first[-1] + 1000 * slope) < abs(scaled_first[0] + 1000 * slope) < 0.12
    steps = np.diff(scaled_second)
    assert np.all(np.abs(steps) < 0.08 * np.abs(scaled_second[:-1]))
    assert abs(steps[1]) < abs(steps[0])
    # The constant stated in the docstring.
    stated = {2: 0.06, 3: 0.1}[d] / (1 - load) ** 2
    assert 0.6 * stated < -scaled_second[-1] < 1.2 * stated


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mm1_response(1.0), r"load=1.0 .* in \[0, 1\)"),
        (lambda: mean_field_response(1.1, 2), r"load=1.1 .* in \[0, 1\)"),
        (lambda: mean_field_response(0.5, 0), "d=0 .* >= 1"),
        (lambda: refined_mean_field_response(2, 0.5, 3), "n_servers=2 .* >= d=3"),
        (lambda: pollaczek_khinchine(1.0, qdq.Exponential()), "arrival_rate=1.0 .* below 1"),
        (lambda: pollaczek_khinchine(0.0, qdq.Exponential()), "arrival_rate=0.0 .* > 0"),
        (lambda: pollaczek_khinchine(0.5, qdq.Exponential(), 0.0), "rate=0.0 .* > 0"),
        (lambda: pollaczek_khinchine(0.5, qdq.Pareto(2.0)), "Pareto.* infinite variance"),
        (
            lambda: random_routing_response(qdq.Scenario(arrivals=qdq.Periodic(0.5, 0.1, 9.0))),
            "arrivals=Periodic.* Poisson",
        ),
    ],
)
def test_bad_arguments_of_closed_forms(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --------------------------------------------------------------------------------------------------
# true_effect
# --------------------------------------------------------------------------------------------------


def test_true_effect_is_exact_where_it_can_be(chain):
    small = true_effect(chain.scenario)
    assert (small.method, small.standard_error, small.n_tasks) == ("exact", 0.0, 0)
    assert small.value == pytest.approx(chain.global_effect, abs=1e-8)
    # One server: all policies are the same M/D/1 queue.
    alone = system(1, 0.7, RANDOM, qdq.LeastWorkLeft(), service=qdq.Deterministic())
    truth = true_effect(alone)
    assert (truth.value, truth.method) == (0.0, "exact")
    assert truth.mean_response_control == pytest.approx(1 + 0.7 / 0.6)


def test_partly_exact_effect():
    # The limit -0.7248 (0.0003) comes from an independent simulation of 20 servers.
    truth = true_effect(system(20, 0.5, RANDOM, TWO), relative_error=0.003)
    assert truth.method == "partly exact"
    assert (truth.mean_response_control, truth.standard_error_control) == (2.0, 0.0)
    assert truth.standard_error == truth.standard_error_treatment
    # The rule: 0.3 % of the effect, or 0.1 % of the control's 2.
    assert truth.standard_error <= max(0.003 * abs(truth.value), 0.002)
    assert abs(truth.value + 0.7248) < Z * math.hypot(truth.standard_error, 0.0003)


@pytest.mark.parametrize("rates", [1.0, (1.4, 1.0, 0.6)])
def test_simulated_effect_agrees_with_the_chain(rates):
    # A delay too short to matter keeps the chain from being used.
    scenario = system(3, 0.5, THREE, TWO, service_rates=rates)
    known = small_chain(scenario)
    truth = true_effect(scenario.replace(information_delay=1e-9), relative_error=0.02)
    assert truth.method == "simulation"
    assert 0.0 < truth.standard_error <= max(0.02 * truth.value, 0.001 * known.mean_response(0.0))
    assert abs(truth.value - known.global_effect) < Z * truth.standard_error
    # Far enough from what a mistaken estimator gives.
    assert abs(known.direct_effect(0.0) - known.global_effect) > 2 * truth.standard_error
    for value, error, p in (
        (truth.mean_response_control, truth.standard_error_control, 0.0),
        (truth.mean_response_treatment, truth.standard_error_treatment, 1.0),
    ):
        assert abs(value - known.mean_response(p)) < Z * error
        assert error < 0.02 * value


def test_arms_share_their_random_numbers():
    truth = true_effect(system(4, 0.8, TWO, THREE, information_delay=1e-9))
    alone = math.hypot(truth.standard_error_control, truth.standard_error_treatment)
    assert truth.standard_error < 0.8 * alone


def test_true_effect_repeats_whatever_the_threads():
    scenario = system(4, 0.3, TWO, THREE, dispatch_delay=0.1)
    one, two = (true_effect(scenario, seed=9, n_jobs=n, progress=False) for n in (1, 2))
    assert one == two
    assert true_effect(scenario, seed=10).value != one.value


def test_precision_follows_the_rule():
    scenario = system(4, 0.6, TWO, THREE, dispatch_delay=0.1)
    rough = true_effect(scenario, relative_error=0.0, absolute_error=0.01)
    fine = true_effect(scenario, relative_error=0.0, absolute_error=0.0012)
    assert rough.standard_error <= 0.01
    assert fine.standard_error <= 0.0012
    assert rough.n_replications == exact._FEWEST_REPLICATIONS < fine.n_replications
    assert fine.n_tasks > rough.n_tasks
    by_default = true_effect(scenario, relative_error=0.0)
    assert by_default.standard_error <= 0.001 * by_default.mean_response_control


def test_equal_policies_have_no_effect():
    truth = true_effect(system(9, 0.5, TWO, TWO), absolute_error=0.05)
    assert (truth.value, truth.standard_error) == (0.0, 0.0)


def test_periodic_rate_is_counted_in_whole_cycles():
    scenario = qdq.Scenario(
        n_servers=4,
        arrivals=qdq.Periodic(0.5, 0.9, 400.0),
        control=RANDOM,
        treatment=TWO,
    )
    n_tasks, end, expected = exact._replication_size(scenario)
    assert end % 400.0 == 0.0
    assert expected == pytest.approx(2.0 * end)
    assert n_tasks > expected
    # Tasks meet the average of 1 / (1 - rate(t)) over tasks, not over time, if the rate varies
    # slowly: a bound from below, since the queues lag behind; a constant rate would give 2.
    truth = true_effect(scenario, relative_error=0.02)
    assert truth.method == "simulation"
    assert truth.mean_response_control > 3.0


def test_trace_of_arrivals_is_taken_as_a_whole():
    times = np.cumsum(np.random.default_rng(5).exponential(0.5, size=3000))
    scenario = qdq.Scenario(
        n_servers=4, arrivals=qdq.ArrivalTrace(times), control=RANDOM, treatment=TWO
    )
    truth = true_effect(scenario, relative_error=0.05)
    assert truth.n_tasks == 2 * 3000 * truth.n_replications
    assert truth.method == "simulation"
    # Four servers at load 0.5: an M/M/1 queue's 2 and less than that for two choices.
    assert truth.mean_response_control == pytest.approx(2.0, abs=0.3)
    assert truth.value < -0.4


def test_controlled_means_leave_each_replication_out():
    rng = np.random.default_rng(8)
    controls = rng.standard_normal((12, 2))
    outcomes = controls @ [[1.0, 0.5], [2.0, -1.0]] + rng.standard_normal((12, 2)) + [3.0, 4.0]
    adjusted = []
    for j in range(12):
        others = np.arange(12) != j
        design = np.column_stack((np.ones(11), controls[others]))
        coefficients = np.linalg.lstsq(design, outcomes[others])[0]
        adjusted.append(outcomes[j] - controls[j] @ coefficients[1:])
    means, errors = exact._controlled_means(outcomes, controls)
    np.testing.assert_allclose(means, np.mean(adjusted, axis=0), rtol=1e-12)
    np.testing.assert_allclose(errors, np.std(adjusted, axis=0, ddof=1) / 12**0.5, rtol=1e-12)
    # Controls that do not vary explain nothing.
    means, errors = exact._controlled_means(outcomes, np.zeros((12, 2)))
    plain = outcomes.mean(axis=0), outcomes.std(axis=0, ddof=1) / math.sqrt(12)
    # What leaving one out adds to the spread of a plain mean is a factor (n - 1) / n.
    np.testing.assert_allclose(means, plain[0], rtol=1e-12)
    np.testing.assert_allclose(errors, plain[1], rtol=1e-12)


HEAVY = qdq.Pareto(1.5)


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (system(20, 0.5, RANDOM, TWO, service=HEAVY), "control=PowerOfD.* is infinite"),
        (system(20, 0.5, TWO, qdq.RoundRobin(), service=HEAVY), "treatment=RoundRobin.* infinite"),
        (system(20, 0.5, TWO, qdq.JoinIdleQueue(), service=HEAVY), "treatment=JoinIdle.* infinite"),
        # Nineteen servers cannot carry this load while the twentieth serves a huge task.
        (system(20, 0.96, TWO, THREE, service=HEAVY), "carried with some of them held up"),
        # Shape 1.4: two servers at once are held up too often, and 18 cannot carry a load of 0.94.
        (system(20, 0.94, TWO, THREE, service=qdq.Pareto(1.4)), "some of them held up"),
        (
            system(20, 1.2, TWO, THREE, allow_unstable=True),
            "load 1.2: it must be below 1",
        ),
    ],
)
def test_true_effect_refuses(scenario, message):
    with pytest.raises(ValueError, match=message):
        true_effect(scenario)


def test_heavy_tails_are_simulated_where_the_mean_is_finite():
    truth = true_effect(system(20, 0.5, TWO, THREE, service=HEAVY), absolute_error=0.05)
    assert truth.method == "simulation"
    assert truth.value < 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relative_error": -0.1}, "relative_error=-0.1 .* >= 0"),
        ({"absolute_error": math.nan}, "absolute_error=nan .* >= 0"),
        ({"relative_error": 0.0, "absolute_error": 0.0}, "never reached"),
        ({"seed": -1}, "seed=-1 .* >= 0"),
        ({"n_jobs": 0}, "n_jobs=0 .* >= 1"),
    ],
)
def test_bad_arguments_of_true_effect(changes, message):
    with pytest.raises(ValueError, match=message):
        true_effect(qdq.Scenario(), **changes)
