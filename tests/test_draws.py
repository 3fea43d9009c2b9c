"""The counter-based generator, the elementary functions, and what is drawn with them."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from qdq import kernels
from qdq.simulate import seed_sequence, tie_uniforms

KEY = np.array([11, 22], np.uint32)
NO_TRACE = np.empty(0)
FALSE_ALARM = 1e-5


def words(purpose, first, n, part=0, key=KEY):
    out = np.empty((4, n), np.uint64)
    kernels.philox_block(key, purpose, part, first, *out)
    return out


# --- the generator --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    # The known-answer vectors that the generator's authors publish with Random123 (philox4x32-10).
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    low, high, purpose, part = counter
    # As a signed 64-bit number, less the offset that the kernel adds.
    index = ((high << 32) | low) - kernels.COUNTER_OFFSET
    index -= 2**64 if index >= 2**63 else 0
    drawn = words(purpose, index, 1, part, np.array(key, np.uint32))
    assert [int(word) for word in drawn[:, 0]] == list(expected)


def test_block_size_does_not_matter():
    whole = words(kernels.DRAW_TIMES, -3, 100)
    parts = np.concatenate([words(kernels.DRAW_TIMES, -3 + k, 7) for k in range(0, 98, 7)], axis=1)
    np.testing.assert_array_equal(parts[:, :98], whole[:, :98])


PURPOSES = [
    kernels.DRAW_TIMES,
    kernels.DRAW_ROUTE,
    kernels.DRAW_TIES,
    kernels.DRAW_ANGLE,
    kernels.DRAW_PERIOD,
]


def test_words_have_the_moments_of_uniform_ones():
    n = 200_000
    for purpose in PURPOSES:
        drawn = words(purpose, -n // 2, n)
        assert drawn.max() < 2**32
        u = (drawn + 0.5) / 2.0**32
        for power in (1, 2, 3, 4):
            mean, variance = 1 / (power + 1), 1 / (2 * power + 1) - 1 / (power + 1) ** 2
            z = (np.mean(u**power, axis=1) - mean) / math.sqrt(variance / n)
            assert 2 * stats.norm.sf(np.abs(z)).min() > FALSE_ALARM / 80
        bits = [np.count_nonzero(drawn & np.uint64(1 << k), axis=1) for k in range(32)]
        z = (np.array(bits) - n / 2) / math.sqrt(n / 4)
        assert 2 * stats.norm.sf(np.abs(z)).min() > FALSE_ALARM / 640


def test_streams_are_independent_across_replications_purposes_and_tasks():
    n = 100_000
    streams = [
        words(purpose, first, n, key=seed_sequence(seed).generate_state(2, np.uint32))[word]
        for seed in [(5, 0), (5, 1), (6, 0)]
        for purpose in PURPOSES
        for first in (0, 10_000_000)
        for word in (0, 3)
    ]
    u = np.array(streams) / 2.0**32
    pairs = np.triu_indices(len(streams), 1)
    correlation = np.corrcoef(u)[pairs]
    limit = stats.norm.isf(FALSE_ALARM / correlation.size / 2) / math.sqrt(n)
    assert np.abs(correlation).max() < limit
    # Neighbouring tasks of one stream, too.
    lagged = [np.corrcoef(row[:-1], row[1:])[0, 1] for row in u]
    assert np.abs(lagged).max() < limit
    # And not only in the mean: the highest three bits of two streams make 64 equally likely pairs.
    high = (u * 8).astype(np.uint8)
    counts = [np.bincount(8 * high[i] + high[j], minlength=64) for i, j in zip(*pairs, strict=True)]
    assert stats.chisquare(np.array(counts), axis=1).pvalue.min() > FALSE_ALARM / len(counts)


def test_a_task_is_independent_from_one_replication_to_the_next():
    n = 20_000
    keys = [seed_sequence((9, j)).generate_state(2, np.uint32) for j in range(n)]
    u = np.array([words(kernels.DRAW_TIMES, 0, 1, key=key)[0, 0] for key in keys]) / 2.0**32
    assert stats.kstest(u, "uniform").pvalue > FALSE_ALARM
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < stats.norm.isf(FALSE_ALARM / 2) / math.sqrt(n)


def test_seeds_above_32_bits_differ():
    seeds = [1, 2**32 + 1, 2**33 + 1, 2**64 + 1, (1, 1), (1, 1, 0)]
    keys = {tuple(seed_sequence(seed).generate_state(2, np.uint32)) for seed in seeds}
    assert len(keys) == len(seeds)


def test_replication_seeds_are_the_spawned_ones():
    child = np.random.SeedSequence(7).spawn(4)[3]
    np.testing.assert_array_equal(child.generate_state(2), seed_sequence((7, 3)).generate_state(2))
    np.testing.assert_array_equal(
        seed_sequence(7).generate_state(2), seed_sequence((7, 0)).generate_state(2)
    )


@pytest.mark.parametrize("seed", ["a", 1.5, -1, (), (1, -2), None, True])
def test_bad_seeds_are_refused(seed):
    with pytest.raises((TypeError, ValueError), match="seed"):
        seed_sequence(seed)


# --- elementary functions -------------------------------------------------------------------------


# 50 digits; each bound is a little above the largest error found among some 10^8 arguments, and
# `hard` holds arguments of the largest ones. The ranges are those in which the kernels ask.


def worst_error(function, exact, points):
    """Largest error, in units of the last place of the exact value (one unit at 1 is 2^-52)."""
    with mpmath.workdps(50):
        errors = []
        for x in points.tolist():
            value = exact(mpmath.mpf(x))
            unit = np.spacing(abs(float(value)))
            errors.append(abs(mpmath.mpf(float(function(x))) - value) / mpmath.mpf(float(unit)))
    return float(max(errors))


def test_log_is_within_1_unit_in_the_last_place():
    rng = np.random.default_rng(1)
    words = rng.integers(0, 2**32, (2, 8000), np.uint64)
    hard = [0.7050579620906708, 0.7059243683339417, 0.7023598329769488, 0.7051628211679627]
    points = np.concatenate(
        [
            [kernels.uniform(high, low) for high, low in words.T],
            np.ldexp(rng.uniform(1.0, 2.0, 4000), -rng.integers(1, 54, 4000)),  # long gaps
            1.0 - (2.0 * rng.integers(0, 2**20, 2000) + 1.0) * 2.0**-53,  # short ones
            rng.uniform(0.69, 0.72, 4000),
            [2.0**-53, 1.0 - 2.0**-53],
            hard,
        ]
    )
    assert worst_error(kernels.log, mpmath.log, points) < 1.0  # 0.98 was the largest
    assert kernels.log(1.0) == 0.0


def test_exp_is_within_1_2_units_in_the_last_place():
    # A Pareto asks for 0 to 37, a lognormal of cv 1e6 for -59 to 32.
    rng = np.random.default_rng(2)
    hard = [-12.822694686707948, -25.98238086650607, 3.8206246108276076, 0.3552613626304678]
    points = np.concatenate(
        [rng.uniform(-60.0, 37.0, 12_000), rng.uniform(-0.36, 0.36, 4000), hard]
    )
    assert worst_error(kernels.exp, mpmath.exp, points) < 1.2  # 1.15 was the largest
    assert kernels.exp(0.0) == 1.0


def test_sin_is_within_2_3_units_in_the_last_place():
    # A lognormal asks for 0 to 1, a periodic rate for 1/4 to 5/4, its warm-up far below 0.
    rng = np.random.default_rng(3)
    hard = [1.2347196233391042, 1.236870163111968, -262.23494329785945, -870.7372179357365]
    points = np.concatenate(
        [
            rng.uniform(0.0, 1.25, 12_000),
            rng.uniform(-1000.0, 0.0, 4000),
            2.0 ** -np.arange(2, 54),
            hard,
        ]
    )

    def sin_turns(x):
        return mpmath.sin(2 * mpmath.pi * (x - mpmath.nint(x)))

    assert worst_error(kernels.sin_turns, sin_turns, points) < 2.3  # 2.2 was the largest
    assert [kernels.sin_turns(x) for x in (0.0, 0.25, 0.5, 0.75, 1.0)] == [0.0, 1.0, 0.0, -1.0, 0.0]


def test_uniform_covers_the_open_unit_interval():
    low, high = np.uint64(0), np.uint64(2**32 - 1)
    assert kernels.uniform(low, low) == 2.0**-53
    assert kernels.uniform(high, high) == 1.0 - 2.0**-53


# --- laws -----------------------------------------------------------------------------------------


def requirements(kind, a, b, n, trace=NO_TRACE, first=0):
    drawn = words(kernels.DRAW_TIMES, first, n)
    out = np.empty(n)
    kernels.draw_requirements(kind, a, b, KEY, first, drawn[2], drawn[3], trace, out)
    return out


@pytest.mark.parametrize(
    ("kind", "parameters", "law"),
    [
        (kernels.EXPONENTIAL, (0.0, 0.0), stats.expon()),
        (kernels.PARETO, (0.6, -0.4), stats.pareto(2.5, scale=0.6)),
        (kernels.LOGNORMAL, (-0.5, 1.0), stats.lognorm(1.0, scale=math.exp(-0.5))),
    ],
)
def test_requirements_follow_their_law(kind, parameters, law):
    drawn = requirements(kind, *parameters, 400_000)
    assert stats.kstest(drawn, law.cdf).pvalue > FALSE_ALARM


@pytest.mark.long
def test_exponentials_at_ten_million_draws_and_in_the_far_tail():
    n = 10_000_000
    drawn = requirements(kernels.EXPONENTIAL, 0.0, 0.0, n)
    assert stats.kstest(drawn, "expon").pvalue > FALSE_ALARM
    for level in (8.0, 11.0, 13.0):
        expected = n * math.exp(-level)
        count = int(np.sum(drawn > level))
        assert stats.poisson.cdf(count, expected) > FALSE_ALARM
        assert stats.poisson.sf(count - 1, expected) > FALSE_ALARM


def test_service_trace_is_read_in_order_and_resampled_in_the_warm_up():
    trace = np.arange(1.0, 51.0)
    np.testing.assert_array_equal(requirements(kernels.SERVICE_TRACE, 0.0, 0.0, 50, trace), trace)
    warm = requirements(kernels.SERVICE_TRACE, 0.0, 0.0, 5000, trace, first=-5000)
    assert stats.chisquare(np.bincount(warm.astype(int), minlength=51)[1:]).pvalue > FALSE_ALARM


@pytest.mark.parametrize("amplitude", [0.0, 0.3, 1.0])
def test_periodic_times_invert_the_share_of_arrivals(amplitude):
    period = 100.0
    clock = np.random.default_rng(4).uniform(-500.0, 500.0, 2000)
    times = clock.copy()
    kernels.periodic_times(amplitude, period, times)
    back = times + amplitude * period / (2 * np.pi) * (1 - np.cos(2 * np.pi * times / period))
    np.testing.assert_allclose(back, clock, atol=1e-10)
    alone = clock[7:8].copy()  # which others are in the block does not matter
    kernels.periodic_times(amplitude, period, alone)
    assert alone[0] == times[7]


# --- candidates -----------------------------------------------------------------------------------


def candidates(depth, n, n_servers=20, first=0):
    drawn = words(kernels.DRAW_ROUTE, first, n)
    treated = np.zeros(n, np.int64)
    members = np.tile(np.arange(n_servers), (2, 1))
    out = np.empty((depth, n), np.uint64)
    sizes = np.array([n_servers, n_servers])
    kernels.draw_candidates(
        KEY, first, drawn[1], drawn[2], drawn[3], treated, sizes, members, depth, out
    )
    return out.astype(np.int64)


def test_candidates_are_distinct_and_a_deeper_list_begins_with_the_shorter():
    deep = candidates(20, 3000)
    np.testing.assert_array_equal(np.sort(deep, axis=0), np.tile(np.arange(20)[:, None], 3000))
    for depth in (1, 2, 3, 7, 12, 13):  # both ways of shuffling
        np.testing.assert_array_equal(candidates(depth, 3000), deep[:depth])


def test_every_order_of_three_candidates_is_equally_likely():
    n = 200_000
    a, b, c = candidates(3, n, n_servers=6)
    counts = np.bincount(a * 36 + b * 6 + c, minlength=216)
    distinct = [
        x * 36 + y * 6 + z
        for x in range(6)
        for y in range(6)
        for z in range(6)
        if len({x, y, z}) == 3
    ]
    assert counts[distinct].sum() == n
    assert stats.chisquare(counts[distinct]).pvalue > FALSE_ALARM


def test_candidates_are_independent_of_treatment_and_of_the_next_task():
    n = 200_000
    first, second = candidates(2, n, n_servers=5)
    treated = (words(kernels.DRAW_ROUTE, 0, n)[0] < 2**31).astype(int)
    table = np.zeros((2, 25))
    np.add.at(table, (treated, first * 5 + second), 1)
    table = table[:, table.sum(axis=0) > 0]
    assert stats.chi2_contingency(table).pvalue > FALSE_ALARM
    joint = np.bincount(first[:-1] * 5 + second[1:], minlength=25).reshape(5, 5)
    assert stats.chi2_contingency(joint).pvalue > FALSE_ALARM


def test_tie_uniforms_are_uniform():
    u = tie_uniforms(3, 100_000)
    assert stats.kstest(u, "uniform").pvalue > FALSE_ALARM
    np.testing.assert_array_equal(u[:10], tie_uniforms((3, 0), 10))
