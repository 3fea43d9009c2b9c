"""Every jitted function of qdq, and nothing else.

All kernels live in this one file, and their machine code is kept on disk under a digest of all of
it: with one file, no kernel is ever stale (see `jit`).

Rules the kernels keep: plain typed loops, arrays and scalars in, arrays and scalars out; only
``+ - * /``, ``sqrt`` and the polynomial ``log``, ``exp`` and ``sin`` below, never ``fastmath``, so
that the bits agree between processors and with the same function run uncompiled; no exception is
raised in a loop, a status code is returned instead; nothing is global and nothing is drawn from a
generator that has a state.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
import uuid
import warnings
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray


def _digest(code: CodeType) -> str:
    """Return a digest of what a module, and every function in it, does."""
    constants = [_digest(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    text = repr((code.co_code, code.co_names, code.co_varnames, constants))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_THIS_CODE = _digest(sys._getframe().f_code)


def jit(function: Callable[..., Any]) -> Any:
    """Compile a kernel when it is first called, or take its machine code from numba's cache.

    numba renews a file of its cache when the time of the source differs (its content, from 0.68
    on). Here the files have the digest of the code that runs in their names, and are never written
    twice: not the code of another version, nor that of another process with another processor, can
    be taken for it. Where numba's private attributes have changed, its own rules hold. A cache that
    can't be read or written is done without.
    """
    # error_model="numpy": a division must not branch to an exception, or the loop around it is not
    # vectorised. nogil: replications run side by side in threads.
    kernel: Any = njit(nogil=True, error_model="numpy")(function)
    with contextlib.suppress(AttributeError):  # a plain function if NUMBA_DISABLE_JIT is set
        try:
            kernel.enable_caching()
        except RuntimeError:
            warnings.warn(
                "neither qdq's folder nor the user's cache can be written, so kernels are compiled "
                "in every process: set NUMBA_CACHE_DIR to a folder that can",
                stacklevel=1,  # one place, so that it is said once
            )
            return kernel
        cache = kernel._cache
        name = f"{cache._impl.filename_base}-{_THIS_CODE}"
        cache._cache_file._source_stamp = _THIS_CODE
        cache._cache_file._index_path = os.path.join(cache.cache_path, f"{name}.nbi")
        cache._cache_file._data_name = lambda number: f"{name}.{uuid.uuid4().hex[:16]}.nbc"
        cache._guard_against_spurious_io_errors = lambda: contextlib.suppress(
            OSError, EOFError, pickle.UnpicklingError
        )
    return kernel


# --------------------------------------------------------------------------------------------------
# - Codes shared with the Python face
# --------------------------------------------------------------------------------------------------
# -

POWER_OF_D = 0
SHORTEST_EXPECTED_DELAY = 1
JOIN_SHORTEST_QUEUE = 2
LEAST_WORK_LEFT = 3
JOIN_IDLE_QUEUE = 4
ROUND_ROBIN = 5
USER_POLICY = 6

EXPONENTIAL = 0
DETERMINISTIC = 1
PARETO = 2
LOGNORMAL = 3
SERVICE_TRACE = 4

POISSON = 0
PERIODIC = 1
ARRIVAL_TRACE = 2

ASSIGN_BY_TASK = 0
ASSIGN_BY_PERIOD = 1
ASSIGN_AS_GIVEN = 2

FINISHED = 0
NEEDS_ROOM = 1
BAD_CHOICE = 2

# --------------------------------------------------------------------------------------------------
# - Random draws: a counter-based generator and elementary functions
#
# Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011) turns a key and a counter into four 32-bit words.
# The key belongs to a replication; the counter is (task, purpose, part). So any draw of any task
# can be made alone, in any order and by any thread, and two policies meet the same draws.
# --------------------------------------------------------------------------------------------------
# -

LOW32 = np.uint64(0xFFFFFFFF)
BITS32 = np.uint64(32)
PHILOX_M0 = np.uint64(0xD2511F53)
PHILOX_M1 = np.uint64(0xCD9E8D57)
PHILOX_W0 = np.uint64(0x9E3779B9)
PHILOX_W1 = np.uint64(0xBB67AE85)

# Tasks of the warm-up have negative numbers; the offset keeps counters positive.
COUNTER_OFFSET = 1 << 62

# The purposes, the third word of the counter.
DRAW_TIMES = 0  # gap between arrivals (words 0, 1) and service requirement (words 2, 3)
DRAW_ROUTE = 1  # part 0: treatment, candidates 0 to 2; part k: candidates 4k - 1 to 4k + 2
DRAW_TIES = 2  # choice among tied servers, and the u of a user's policy (words 0, 1)
DRAW_ANGLE = 3  # second uniform of a normal (words 0, 1)
DRAW_PERIOD = 4  # treatment of a switchback period (word 0)


@jit
def philox_block(key, purpose, part, first, w0, w1, w2, w3):
    """Fill w0..w3 (uint64, below 2^32) with the words of the counters first, first + 1, ..."""
    key0 = np.uint64(key[0])
    key1 = np.uint64(key[1])
    for j in range(w0.size):
        counter = np.uint64(first + j + COUNTER_OFFSET)
        c0 = counter & LOW32
        c1 = counter >> BITS32
        c2 = np.uint64(purpose)
        c3 = np.uint64(part)
        k0 = key0
        k1 = key1
        for _ in range(10):
            p0 = c0 * PHILOX_M0
            p1 = c2 * PHILOX_M1
            c0 = (p1 >> BITS32) ^ c1 ^ k0
            c1 = p1 & LOW32
            c2 = (p0 >> BITS32) ^ c3 ^ k1
            c3 = p0 & LOW32
            k0 = (k0 + PHILOX_W0) & LOW32
            k1 = (k1 + PHILOX_W1) & LOW32
        w0[j] = c0
        w1[j] = c1
        w2[j] = c2
        w3[j] = c3


ONE_BITS = np.uint64(0x3FF0000000000000)  # the bits of 1.0
SQRT_HALF_BITS = np.uint64(0x3FE6A09E667F3BCD)  # the bits of sqrt(1/2)
MANTISSA = np.uint64(0x000FFFFFFFFFFFFF)
TWO52_BITS = np.uint64(0x4330000000000000)  # the bits of 2^52: or-ing a small integer in adds it
TWO52 = 4503599627370496.0
BITS52 = np.uint64(52)
BITS12 = np.uint64(12)
BITS20 = np.uint64(20)
# log 2 in two parts; the first has 32 trailing zero bits, so its product with an exponent is exact.
LN2_HIGH = 6.93147180369123816490e-01
LN2_LOW = 1.90821492927058770002e-10
INVERSE_LN2 = 1.4426950408889634
TWO_PI = 6.283185307179586


@jit
def uniform(high, low):
    """Return (k + 1/2) / 2^52, in (0, 1), with k the upper 52 bits of two 32-bit words."""
    bits = (high << BITS20) | (low >> BITS12)
    return np.uint64(bits | ONE_BITS).view(np.float64) - (1.0 - 0.5 / TWO52)


@jit
def log(x):
    """Return the natural logarithm of a positive normal number.

    x = 2^e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)). With s = f / (2 + f), log(1 + f) is
    2 artanh(s), by its power series; s^2 is below 0.0295, so the term after the last kept is below
    1e-18 of the sum. Its first term, 2 s, is taken as f - f s, since f is exact.
    """
    shifted = np.float64(x).view(np.uint64) + (ONE_BITS - SQRT_HALF_BITS)
    e = np.uint64((shifted >> BITS52) | TWO52_BITS).view(np.float64) - (TWO52 + 1023.0)
    f = np.uint64((shifted & MANTISSA) + SQRT_HALF_BITS).view(np.float64) - 1.0
    s = f / (2.0 + f)
    z = s * s
    series = 2 / 17 + z * (2 / 19 + z * (2 / 21 + z * (2 / 23)))
    series = 2 / 9 + z * (2 / 11 + z * (2 / 13 + z * (2 / 15 + z * series)))
    series = z * (2 / 3 + z * (2 / 5 + z * (2 / 7 + z * series)))
    return e * LN2_HIGH + (f - (s * (f - series) - e * LN2_LOW))


@jit
def exp(x):
    """Return e^x for |x| < 700: x = k log 2 + r with |r| < 0.35, and the power series of e^r."""
    k = np.floor(x * INVERSE_LN2 + 0.5)
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    series = 1.0 + r * (1 / 13 + r * (1 / 182))
    series = 1.0 + r * (1 / 10 + r * (1 / 110 + r * (1 / 1320) * series))
    series = 1.0 + r * (1 / 7 + r * (1 / 56 + r * (1 / 504) * series))
    series = 1.0 + r * (1 / 4 + r * (1 / 20 + r * (1 / 120) * series))
    series = 1.0 + r * (1.0 + r * (1 / 2 + r * (1 / 6) * series))
    scale = np.uint64(np.uint64(k + 1023.0) << BITS52).view(np.float64)
    return series * scale


@jit
def sin_turns(x):
    """Return sin(2 pi x): x is brought into [-1/4, 1/4] exactly, then the power series."""
    r = x - np.floor(x + 0.5)
    if r > 0.25:
        r = 0.5 - r
    elif r < -0.25:
        r = -0.5 - r
    y = TWO_PI * r
    z = y * y
    series = 1.0 - z * (1 / 342 - z * (1 / 143640))
    series = 1.0 - z * (1 / 156 - z * (1 / 32760 - z * (1 / 8910720) * series))
    series = 1.0 - z * (1 / 42 - z * (1 / 3024 - z * (1 / 332640) * series))
    series = z * (1 / 6 - z * (1 / 120) * series)
    return y - y * series


# --------------------------------------------------------------------------------------------------
# - What is drawn for a block of tasks
# --------------------------------------------------------------------------------------------------
# -


@jit
def periodic_times(amplitude, period, time):
    """Replace times by those at which a periodic rate has brought what its mean rate does by them.

    In cycles, tau + amplitude / (2 pi) (1 - cos(2 pi tau)) = time / period, whole cycles apart: by
    Halley's steps, halving the bracket instead wherever a step would leave it (the rate may touch
    zero). All times take their steps together, and each stops at a step so small that the error it
    leaves, of its third power, is less than rounding.
    """
    n = time.size
    whole = np.empty(n)
    target = np.empty(n)
    low = np.zeros(n)
    high = np.ones(n)
    for j in range(n):
        cycles = time[j] / period
        whole[j] = np.floor(cycles)
        target[j] = cycles - whole[j]
        time[j] = target[j]
    for _ in range(100):
        moving = 0
        for j in range(n):
            tau = time[j]
            cosine = sin_turns(tau + 0.25)
            slope = 1.0 + amplitude * sin_turns(tau)
            error = tau + amplitude / TWO_PI * (1.0 - cosine) - target[j]
            below = tau if error <= 0.0 else low[j]
            above = tau if error > 0.0 else high[j]
            bend = TWO_PI * amplitude * cosine
            step = tau - error * slope / (slope * slope - 0.5 * error * bend)
            inside = (below <= step) & (step <= above)
            step = step if inside else 0.5 * (below + above)
            settled = abs(step - tau) <= 1e-15 + 1e-7 * slope * slope
            # A bracket of no width keeps the time where it is in the passes that others need.
            low[j] = step if settled else below
            high[j] = step if settled else above
            time[j] = step
            moving += not settled
        if moving == 0:
            break
    for j in range(n):
        time[j] = period * (whole[j] + time[j])


@jit
def warm_up_start(key, arrival_kind, mean_gap, amplitude, period, warm_up):
    """Return the number of arrivals in [-warm_up, 0), and the clock at the first of them.

    A Poisson process is drawn backwards from time 0, so that a longer warm-up leaves the later
    tasks, and all logged ones, with the draws that they had.
    """
    size = 1024
    w0 = np.empty(size, np.uint64)
    w1 = np.empty(size, np.uint64)
    w2 = np.empty(size, np.uint64)
    w3 = np.empty(size, np.uint64)
    limit = warm_up
    if arrival_kind == PERIODIC:
        limit -= amplitude * period / TWO_PI * (1.0 - sin_turns(-warm_up / period + 0.25))
    n = 0
    total = 0.0
    while True:
        philox_block(key, DRAW_TIMES, 0, -n - size, w0, w1, w2, w3)
        for j in range(size - 1, -1, -1):
            gap = -log(uniform(w0[j], w1[j])) * mean_gap
            if total + gap > limit:
                return n, -total
            total += gap
            n += 1


@jit
def draw_arrivals(kind, mean_gap, amplitude, period, first, clock, w0, w1, trace, base, arrival):
    """Fill `arrival` with the times, since `base`, of tasks first, first + 1, ...

    Returns the clock after them: the time that it would be if the rate were always its mean. Tasks
    of a warm-up come before their gap, the others after it, since the warm-up is drawn backwards
    from time 0.
    """
    if kind == ARRIVAL_TRACE:
        for j in range(arrival.size):
            arrival[j] = trace[first + j] - base
        return clock
    for j in range(arrival.size):
        arrival[j] = -log(uniform(w0[j], w1[j])) * mean_gap
    if first < 0:
        for j in range(arrival.size):
            gap = arrival[j]
            arrival[j] = clock
            clock = min(clock + gap, 0.0)
    else:
        for j in range(arrival.size):
            clock += arrival[j]
            arrival[j] = clock
    if kind == PERIODIC:
        periodic_times(amplitude, period, arrival)
    return clock


@jit
def draw_requirements(kind, a, b, key, first, w2, w3, trace, requirement):
    """Fill `requirement` with the service requirements of tasks first, first + 1, ..."""
    n = requirement.size
    if kind == EXPONENTIAL:
        for j in range(n):
            requirement[j] = -log(uniform(w2[j], w3[j]))
    elif kind == DETERMINISTIC:
        for j in range(n):
            requirement[j] = 1.0
    elif kind == PARETO:
        for j in range(n):
            requirement[j] = a * exp(b * log(uniform(w2[j], w3[j])))
    elif kind == LOGNORMAL:
        v0 = np.empty(n, np.uint64)
        v1 = np.empty(n, np.uint64)
        v2 = np.empty(n, np.uint64)
        v3 = np.empty(n, np.uint64)
        philox_block(key, DRAW_ANGLE, 0, first, v0, v1, v2, v3)
        for j in range(n):  # Box and Muller
            radius = np.sqrt(-2.0 * log(uniform(w2[j], w3[j])))
            requirement[j] = exp(a + b * (radius * sin_turns(uniform(v0[j], v1[j]))))
    else:
        for j in range(n):
            if first + j < 0 or first + j >= trace.size:
                requirement[j] = trace[int(uniform(w2[j], w3[j]) * trace.size)]
            else:
                requirement[j] = trace[first + j]


@jit
def draw_treated(kind, threshold, period, key, first, w0, base, arrival, given, treated):
    """Fill `treated` with 0 or 1 for tasks first, first + 1, ...; w0 are their routing words."""
    if kind == ASSIGN_BY_TASK:
        for j in range(treated.size):
            treated[j] = w0[j] < threshold
    elif kind == ASSIGN_AS_GIVEN:
        for j in range(treated.size):
            treated[j] = given[first + j]
    else:
        v0 = np.empty(1, np.uint64)
        v1 = np.empty(1, np.uint64)
        v2 = np.empty(1, np.uint64)
        v3 = np.empty(1, np.uint64)
        current = 0
        drawn = False
        for j in range(treated.size):
            index = int(np.floor((base + arrival[j]) / period))
            if not drawn or index != current:
                philox_block(key, DRAW_PERIOD, 0, index, v0, v1, v2, v3)
                current = index
                drawn = True
            treated[j] = v0[0] < threshold


@jit
def draw_ties(key, first, w0, w1, w2, w3, tie):
    """Fill `tie` with one uniform number for each of the tasks first, first + 1, ..."""
    philox_block(key, DRAW_TIES, 0, first, w0, w1, w2, w3)
    for j in range(tie.size):
        tie[j] = uniform(w0[j], w1[j])


@jit
def draw_candidates(key, first, w1, w2, w3, treated, n_members, members, depth, candidates):
    """Fill candidates[c, j] with the c-th server in the random order of task first + j, c < depth.

    The order is that of a Fisher-Yates shuffle of the arm's servers: step c swaps positions c and c
    + k_c, k_c uniform below n - c. The shuffle itself is not done; position c + k_c is traced back
    through the earlier swaps, or, where many candidates are asked for, done on one array and
    undone. A multiple of a 32-bit word picks k_c, so a probability is off by at most n / 2^32 of
    itself.
    """
    size = treated.size
    # Without a split both arms may use every server, and position and server are the same.
    split = n_members[0] < members.shape[1] or n_members[1] < members.shape[1]
    v0 = np.empty(size, np.uint64)
    v1 = np.empty(size, np.uint64)
    v2 = np.empty(size, np.uint64)
    v3 = np.empty(size, np.uint64)
    for c in range(depth):
        if c == 0:
            word = w1
        elif c == 1:
            word = w2
        elif c == 2:
            word = w3
        else:
            part = (c + 1) // 4
            place = (c + 1) % 4
            if place == 0:
                philox_block(key, DRAW_ROUTE, part, first, v0, v1, v2, v3)
                word = v0
            elif place == 1:
                word = v1
            elif place == 2:
                word = v2
            else:
                word = v3
        # Clamped at the last position: an arm with fewer servers than `depth` leaves the rest
        # unused. The masks tell the compiler that the factors have 32 bits.
        left0 = np.uint64(max(n_members[0] - c, 1)) & LOW32
        left1 = np.uint64(max(n_members[1] - c, 1)) & LOW32
        here = np.uint64(c)
        for j in range(size):
            left = left1 if treated[j] else left0
            candidates[c, j] = here + (((word[j] & LOW32) * left) >> BITS32)
    if depth <= 12:
        for c in range(depth - 1, 0, -1):
            for i in range(c - 1, -1, -1):
                earlier = np.uint64(i)
                for j in range(size):
                    x = candidates[c, j]
                    candidates[c, j] = earlier if x == candidates[i, j] else x
        if split:
            for c in range(depth):
                for j in range(size):
                    x = min(candidates[c, j], np.uint64(members.shape[1] - 1))
                    candidates[c, j] = members[treated[j], x]
    else:
        order = np.empty(members.shape[1] + depth, np.uint64)
        for i in range(order.size):
            order[i] = i
        swapped = np.empty(depth, np.uint64)
        for j in range(size):
            for c in range(depth):
                x = candidates[c, j]
                swapped[c] = x
                place = min(order[x], np.uint64(members.shape[1] - 1))
                candidates[c, j] = members[treated[j], place]
                order[x] = order[c]
            for c in range(depth):
                order[swapped[c]] = swapped[c]
                order[c] = c


@jit
def draw_block(
    system, first, clock, base, w0, w1, w2, w3, arrival, requirement, treated, candidates, tie
):
    """Draw all that chance decides about the tasks first, first + 1, ...; w0..w3 are scratch.

    Returns the clock after them, see `draw_arrivals`.
    """
    philox_block(system.key, DRAW_TIMES, 0, first, w0, w1, w2, w3)
    clock = draw_arrivals(
        system.arrival_kind,
        system.mean_gap,
        system.amplitude,
        system.period,
        first,
        clock,
        w0,
        w1,
        system.arrival_trace,
        base,
        arrival,
    )
    draw_requirements(
        system.service_kind,
        system.service_a,
        system.service_b,
        system.key,
        first,
        w2,
        w3,
        system.service_trace,
        requirement,
    )
    philox_block(system.key, DRAW_ROUTE, 0, first, w0, w1, w2, w3)
    draw_treated(
        system.assignment,
        np.uint64(system.threshold),
        system.switch_period,
        system.key,
        first,
        w0,
        base,
        arrival,
        system.treated,
        treated,
    )
    if system.candidates.size > 0:
        for c in range(system.depth):
            for j in range(treated.size):
                candidates[c, j] = system.candidates[first + j, c]
    else:
        draw_candidates(
            system.key,
            first,
            w1,
            w2,
            w3,
            treated,
            system.n_members,
            system.members,
            system.depth,
            candidates,
        )
    if system.needs_ties:
        draw_ties(system.key, first, w0, w1, w2, w3, tie)
    return clock


# A candidate as the dispatching loop wants it: server + place in the task's order * 2^24, + 2^62 if
# the task's policy does not look so far. With the tasks seen there times 2^48 added, the least of
# these numbers is the choice: fewest tasks first, then first in the order.
PLACE_BITS = np.uint64(24)
QUEUE_BITS = np.uint64(48)
SERVER = np.uint64((1 << 24) - 1)
NOT_LOOKED_AT = np.uint64(1 << 62)


@jit
def mark_candidates(depth, d0, d1, treated, candidates):
    """Turn the servers in the first `depth` rows of `candidates` into the form described above.

    Rows beyond `depth` stand for nobody.
    """
    # The whole array, though the block may be shorter: of a part of it the compiler would not know
    # that rows are contiguous.
    for c in range(candidates.shape[0]):
        place = np.uint64(c) << PLACE_BITS
        mark0 = place | (NOT_LOOKED_AT if c >= d0 else np.uint64(0))
        mark1 = place | (NOT_LOOKED_AT if c >= d1 else np.uint64(0))
        if c < depth:
            for j in range(treated.size):
                candidates[c, j] |= mark1 if treated[j] else mark0
        else:
            candidates[c, :] = NOT_LOOKED_AT


# --------------------------------------------------------------------------------------------------
# - Dispatching tasks
#
# A FCFS server needs no events: a task that joins at t starts at max(t, departure of the task
# before it) and departs a service time later (Lindley), so its departure is known when it is
# assigned. Tasks in system at time s are the departures after s. Each server keeps its 8 newest
# departures, newest first, in a line of 64 bytes, and those are counted without a branch; the rare
# older ones that are still after s wait in `overflow`, one queue a server in a shared pool.
#
# Times inside are never negative, so their bits, read as integers, are in the same order, and
# integers compare faster: `bits` is the array `lines` read so. They count from `base`, which moves
# on with the run (see `simulate`), so that they keep their precision however long it is; and they
# run `lead` ahead of the time since `base`, so that what is seen at a task's arrival is not
# negative either, in the warm-up and with a delay.
#
# Delays: a task that reaches its server b after its arrival, seen a later, is the same as one that
# joins at once, seen a + b later, and departs b later than it would. So the loop knows one delay, a
# + b.
# --------------------------------------------------------------------------------------------------
# -


class System(NamedTuple):
    """What `run` needs to know of scenario and design. Row 0 is control, row 1 treatment."""

    key: NDArray[np.uint32]  # (2,) of the replication
    arrival_kind: int
    mean_gap: float  # between arrivals to the whole system
    amplitude: float
    period: float
    arrival_trace: NDArray[np.float64]
    service_kind: int
    service_a: float
    service_b: float
    service_trace: NDArray[np.float64]
    rates: NDArray[np.float64]  # (N,)
    slowness: NDArray[np.float64]  # (N,) 1 / rates
    delay: float  # information delay + dispatch delay
    dispatch_delay: float
    counts_own_dispatches: bool
    policy: NDArray[np.int64]  # (2,) kinds
    d: NDArray[np.int64]  # (2,) candidates that each policy looks at
    n_members: NDArray[np.int64]  # (2,) servers that each arm may use
    members: NDArray[np.int64]  # (2, N) which they are, in increasing order
    depth: int  # candidates to draw for each task
    candidates: NDArray[np.int32]  # (n, depth) given, or (0, 0): draw them
    assignment: int
    threshold: int  # treated if a 32-bit word is below
    switch_period: float
    treated: NDArray[np.bool_]  # (n,) given, or (0,)
    needs_ties: bool


class State(NamedTuple):
    """The servers and what the dispatcher knows of them. `run` changes the arrays in place."""

    base: float  # the time from which all others count
    lead: float  # by how much the times inside are ahead
    clock: NDArray[np.float64]  # (1,) time since base, if the arrival rate were always its mean
    lines: NDArray[np.float64]  # (N, 8) newest departures, newest first
    overflow_count: NDArray[np.int64]  # (N,)
    overflow_head: NDArray[np.int64]  # (N,) oldest entry in the pool
    overflow_tail: NDArray[np.int64]  # (N,)
    pool: NDArray[np.float64]  # (M,) departures
    pool_next: NDArray[np.int64]  # (M,) next newer of the same server, or next free
    pool_free: NDArray[np.int64]  # (1,) first free entry, or -1
    pointer: NDArray[np.int64]  # (2,) round robin
    # Dispatches that the dispatcher does not see yet (only with a delay): a ring, whose size is a
    # power of 2, and totals by server.
    ring: NDArray[np.int64]  # (2,) entries ever popped and ever pushed
    ring_time: NDArray[np.float64]
    ring_server: NDArray[np.int64]
    ring_service: NDArray[np.float64]
    ring_departure: NDArray[np.float64]
    unseen: NDArray[np.int64]  # (N,) their number
    unseen_work: NDArray[np.float64]  # (N,) their service times
    seen_departure: NDArray[np.float64]  # (N,) departure of the newest task that is seen


class Record(NamedTuple):
    """What `run` writes, row i for task start + i. Arrays not asked for have length 0."""

    arrival: NDArray[np.float64]  # since base
    departure: NDArray[np.float64]
    treated: NDArray[np.bool_]
    server: NDArray[np.int32]
    service_time: NDArray[np.float64]
    candidates: NDArray[np.int32]  # (n, depth)
    choice: NDArray[np.int32]  # (n, 2)
    queue_lengths: NDArray[np.int32]  # (n, N)


@jit
def see_servers(
    t,
    delay,
    counts_own,
    lines,
    overflow_count,
    overflow_head,
    pool,
    pool_next,
    unseen,
    unseen_work,
    seen_departure,
    lengths,
    work,
):
    """Fill in, for every server, the tasks and the work that the dispatcher sees there at t."""
    bits = lines.view(np.uint64)
    seen_at = t - delay
    time = np.float64(seen_at).view(np.uint64)
    # As `tasks_after`, written out, since it takes half the time so.
    for s in range(np.uint64(lengths.size)):
        q = np.int64(0)
        for i in range(8):
            q += bits[s, np.uint64(i)] > time
        lengths[s] = q
        work[s] = max(lines[s, np.uint64(0)] - t, 0.0)
        if q == 8:
            left = overflow_count[s]
            entry = overflow_head[s]
            while left > 0 and pool[entry] <= seen_at:
                entry = pool_next[entry]
                left -= 1
            lengths[s] += left
    if delay > 0.0:
        for s in range(lengths.size):
            work[s] = max(seen_departure[s] - seen_at, 0.0)
            if counts_own:
                work[s] += unseen_work[s]
            else:
                lengths[s] -= unseen[s]


@jit
def least_of_all(policy, lengths, work, members, u, score):
    """Return the server of least length, idleness or work; among m tied, the floor(u m)-th."""
    for c in range(members.size):
        s = members[c]
        if policy == LEAST_WORK_LEFT:
            score[c] = work[s]
        elif policy == JOIN_IDLE_QUEUE:
            score[c] = float(min(lengths[s], 1))
        else:
            score[c] = float(lengths[s])
    least = np.inf
    for c in range(members.size):
        least = min(least, score[c])
    tied = 0
    for c in range(members.size):
        tied += score[c] == least
    n = int(u * tied)
    for c in range(members.size):
        n -= score[c] == least
        if n < 0:
            return members[c]
    return members[0]


@njit(inline="always", error_model="numpy")
def tasks_after(s, time, bits, overflow_count, overflow_head, pool, pool_next):
    """Count the departures from server s after `time`."""
    q = 0
    for i in range(8):
        q += bits[s, i] > np.float64(time).view(np.uint64)
    if q == 8:
        left = overflow_count[s]
        entry = overflow_head[s]
        while left > 0 and pool[entry] <= time:
            entry = pool_next[entry]
            left -= 1
        q += left
    return q


@jit
def dispatch_power_of_d(
    j,
    delay,
    lead,
    ahead,
    d0,
    d1,
    arrival,
    requirement,
    treated,
    candidates,
    slowness,
    lines,
    hides,
    ring,
    ring_time,
    ring_server,
    unseen,
    out_departure,
    out_server,
    out_service,
):
    """Dispatch tasks j, j + 1, ... of a block by power-of-d; return the first not dispatched.

    That is the end of the block, or a task for which lines of 8 departures are not enough: all its
    candidates have 8 tasks or more. With `hides`, where the dispatches that are not seen yet are
    taken off what is counted, it may be that one has.
    """
    departures = lines.reshape(-1)
    bits = departures.view(np.uint64)
    keeps_service = out_service.size > 0
    more = max(d0, d1) > 3
    mask = ring_time.size - 1
    popped = ring[0]
    pushed = ring[1]
    first = np.uint64(j)
    reached = np.uint64(arrival.size)
    # Unsigned indices: a signed one would be tested for counting from the end.
    for k in range(first, reached):
        t = arrival[k] + lead
        seen_at = t - delay
        if hides:
            while popped < pushed and ring_time[popped & mask] <= seen_at:
                unseen[ring_server[popped & mask]] -= 1
                popped += 1
            if pushed - popped == ring_time.size:
                reached = k
                break

        time = np.float64(seen_at).view(np.uint64)
        least = ~np.uint64(0)
        counts = np.uint64(0)
        # The first three candidates are looked at whatever the policy: no branch on a coin.
        for c in range(3):
            candidate = candidates[np.uint64(c), k]
            line = (candidate & SERVER) << np.uint64(3)
            q = np.uint64(0)
            for i in range(8):
                q += np.uint64(bits[line + np.uint64(i)] > time)
            counts |= q
            if hides:
                q -= np.uint64(unseen[candidate & SERVER])
            least = min(least, (q << QUEUE_BITS) + candidate)
        if more:
            for c in range(3, d1 if treated[k] else d0):
                candidate = candidates[np.uint64(c), k]
                line = (candidate & SERVER) << np.uint64(3)
                q = np.uint64(0)
                for i in range(8):
                    q += np.uint64(bits[line + np.uint64(i)] > time)
                counts |= q
                if hides:
                    q -= np.uint64(unseen[candidate & SERVER])
                least = min(least, (q << QUEUE_BITS) + candidate)
        chosen = least & SERVER
        line = chosen << np.uint64(3)
        if bits[line + np.uint64(7)] > time or (hides and counts >= np.uint64(8)):
            reached = k
            break

        service = requirement[k] * slowness[chosen]
        departure = max(t, departures[line]) + service
        for i in range(7, 0, -1):
            departures[line + np.uint64(i)] = departures[line + np.uint64(i - 1)]
        departures[line] = departure
        if hides:
            ring_time[pushed & mask] = t
            ring_server[pushed & mask] = chosen
            unseen[chosen] += 1
            pushed += 1
        out_departure[k] = max(departure + ahead, arrival[k])
        out_server[k] = chosen
        if keeps_service:
            out_service[k] = service
    ring[0] = popped
    ring[1] = pushed
    return np.int64(reached)


@jit
def run(system, state, record, start, stop, block, choose_control, choose_treatment):
    """Draw and dispatch the tasks start, ..., stop - 1; return (status, task reached).

    With status NEEDS_ROOM the pool or the ring is full: enlarged, the run goes on from the task
    reached. `choose_control` and `choose_treatment` are the user's compiled policies, or None.
    """
    depth = system.depth
    delay = system.delay
    counts_own = system.counts_own_dispatches
    policy0 = system.policy[0]
    policy1 = system.policy[1]
    # Policies that look at every server.
    scans0 = JOIN_SHORTEST_QUEUE <= policy0 <= JOIN_IDLE_QUEUE or policy0 == USER_POLICY
    scans1 = JOIN_SHORTEST_QUEUE <= policy1 <= JOIN_IDLE_QUEUE or policy1 == USER_POLICY
    hides = delay > 0.0 and not counts_own
    # What is not seen yet matters for queue lengths without it, and for all that look at work.
    keeps_unseen = delay > 0.0 and (hides or scans0 or scans1)
    d0 = system.d[0]
    d1 = system.d[1]
    rates = system.rates
    slowness = system.slowness
    members = system.members
    n_members = system.n_members
    n_servers = rates.size
    base = state.base
    lead = state.lead
    ahead = system.dispatch_delay - lead
    lines = state.lines
    bits = lines.view(np.uint64)
    overflow_count = state.overflow_count
    overflow_head = state.overflow_head
    overflow_tail = state.overflow_tail
    pool = state.pool
    pool_next = state.pool_next
    pool_free = state.pool_free
    unseen = state.unseen
    unseen_work = state.unseen_work
    seen_departure = state.seen_departure
    pointer = state.pointer
    ring = state.ring
    ring_time = state.ring_time
    ring_server = state.ring_server
    ring_service = state.ring_service
    ring_departure = state.ring_departure
    ring_size = ring_time.size
    ring_mask = ring_size - 1
    out_arrival = record.arrival
    out_departure = record.departure
    out_treated = record.treated
    out_server = record.server
    out_service = record.service_time
    out_candidates = record.candidates
    out_choice = record.choice
    out_lengths = record.queue_lengths
    keeps_service = out_service.size > 0
    keeps_candidates = out_candidates.size > 0
    keeps_lengths = out_lengths.size > 0
    both_choices = out_choice.size > 0
    only_power_of_d = policy0 == POWER_OF_D and policy1 == POWER_OF_D
    only_power_of_d = only_power_of_d and not keeps_lengths and not both_choices

    clock_before = 0.0
    arrival = np.empty(block)
    requirement = np.empty(block)
    treated = np.empty(block, np.int64)
    candidates = np.zeros((max(depth, 3), block), np.uint64)
    w = np.empty((4, block), np.uint64)
    tie = np.zeros(block)
    score = np.empty(n_servers)
    lengths = np.empty(n_servers, np.int64)
    work = np.empty(n_servers)

    status = FINISHED
    first = start
    while first < stop and status == FINISHED:
        m = min(block, stop - first)
        A = arrival[:m]
        R = requirement[:m]
        Z = treated[:m]
        w0 = w[0, :m]
        w1 = w[1, :m]
        w2 = w[2, :m]
        w3 = w[3, :m]
        clock_before = state.clock[0]
        clock = draw_block(
            system, first, clock_before, base, w0, w1, w2, w3, A, R, Z, candidates, tie[:m]
        )
        mark_candidates(depth, d0, d1, Z, candidates)

        i = first - start
        D = out_departure[i : i + m]
        S = out_server[i : i + m]
        T = out_service[i : i + m]
        j = np.int64(0)  # not a literal, for which the loop would be compiled once more
        while True:
            if only_power_of_d:
                j = dispatch_power_of_d(
                    j,
                    delay,
                    lead,
                    ahead,
                    d0,
                    d1,
                    A,
                    R,
                    Z,
                    candidates,
                    slowness,
                    lines,
                    hides,
                    ring,
                    ring_time,
                    ring_server,
                    unseen,
                    D,
                    S,
                    T,
                )
            if j == m:
                break
            t = A[j] + lead
            seen_at = t - delay
            if pool_free[0] < 0 or ring[1] - ring[0] == ring_size:
                status = NEEDS_ROOM
                break
            if keeps_unseen:
                while ring[0] < ring[1] and ring_time[ring[0] & ring_mask] <= seen_at:
                    entry = ring[0] & ring_mask
                    s = ring_server[entry]
                    unseen[s] -= 1
                    unseen_work[s] -= ring_service[entry]
                    if unseen[s] == 0:  # no trace of rounding: equal work must stay equal
                        unseen_work[s] = 0.0
                    seen_departure[s] = ring_departure[entry]
                    ring[0] += 1

            z = Z[j]
            chosen = 0
            if (
                keeps_lengths
                or (scans1 if z == 1 else scans0)
                or (both_choices and (scans0 or scans1))
            ):
                see_servers(
                    t,
                    delay,
                    counts_own,
                    lines,
                    overflow_count,
                    overflow_head,
                    pool,
                    pool_next,
                    unseen,
                    unseen_work,
                    seen_departure,
                    lengths,
                    work,
                )
                if keeps_lengths:
                    for s in range(n_servers):
                        out_lengths[i + j, s] = lengths[s]

            for k in range(2 if both_choices else 1):
                arm = k if both_choices else z
                policy = policy1 if arm == 1 else policy0
                choice = 0
                lowest = np.inf
                if policy == POWER_OF_D or policy == SHORTEST_EXPECTED_DELAY:
                    for c in range(d1 if arm == 1 else d0):
                        s = np.int64(candidates[c, j] & SERVER)
                        q = tasks_after(
                            s, seen_at, bits, overflow_count, overflow_head, pool, pool_next
                        )
                        if hides:
                            q -= unseen[s]
                        value = float(q)
                        if policy == SHORTEST_EXPECTED_DELAY:
                            value = (q + 1) / rates[s]  # divided, so that equals stay equal
                        if value < lowest:
                            lowest = value
                            choice = s
                elif policy == ROUND_ROBIN:
                    choice = members[arm, pointer[arm]]
                elif policy == USER_POLICY:
                    mine = np.empty(n_members[arm], np.int64)
                    for c in range(mine.size):
                        mine[c] = np.int64(candidates[c, j] & SERVER)
                    # Apart from the arm, so that None is never called.
                    if choose_control is not None:
                        if arm == 0:
                            choice = int(choose_control(lengths, work, rates, mine, tie[j]))
                    if choose_treatment is not None:
                        if arm == 1:
                            choice = int(choose_treatment(lengths, work, rates, mine, tie[j]))
                    allowed = False
                    for c in range(n_members[arm]):
                        allowed = allowed or members[arm, c] == choice
                    if not allowed:
                        status = BAD_CHOICE
                        choice = 0
                else:
                    mine = members[arm, : n_members[arm]]
                    choice = least_of_all(policy, lengths, work, mine, tie[j], score)
                if both_choices:
                    out_choice[i + j, arm] = choice
                if arm == z:
                    chosen = choice
            if status != FINISHED:
                break
            if (policy1 if z == 1 else policy0) == ROUND_ROBIN:
                pointer[z] = (pointer[z] + 1) % n_members[z]

            service = R[j] * slowness[chosen]
            departure = max(t, lines[chosen, 0]) + service
            oldest = lines[chosen, 7]
            if oldest > seen_at:
                # Into the overflow, from which the departed are taken first.
                while overflow_count[chosen] > 0 and pool[overflow_head[chosen]] <= seen_at:
                    entry = overflow_head[chosen]
                    overflow_head[chosen] = pool_next[entry]
                    overflow_count[chosen] -= 1
                    pool_next[entry] = pool_free[0]
                    pool_free[0] = entry
                entry = pool_free[0]
                pool_free[0] = pool_next[entry]
                pool[entry] = oldest
                if overflow_count[chosen] == 0:
                    overflow_head[chosen] = entry
                else:
                    pool_next[overflow_tail[chosen]] = entry
                overflow_tail[chosen] = entry
                overflow_count[chosen] += 1
            for k in range(7, 0, -1):
                lines[chosen, k] = lines[chosen, k - 1]
            lines[chosen, 0] = departure
            if keeps_unseen:
                entry = ring[1] & ring_mask
                ring_time[entry] = t
                ring_server[entry] = chosen
                ring_service[entry] = service
                ring_departure[entry] = departure
                ring[1] += 1
                unseen[chosen] += 1
                unseen_work[chosen] += service
            out_departure[i + j] = max(departure + ahead, A[j])
            out_server[i + j] = chosen
            if keeps_service:
                out_service[i + j] = service
            j += 1

        for k in range(j):
            out_arrival[i + k] = A[k]
            out_treated[i + k] = Z[k] == 1
        if keeps_candidates:
            for k in range(j):
                for c in range(depth):
                    out_candidates[i + k, c] = np.int32(candidates[c, k] & SERVER)
        first += j
        if status == FINISHED:
            state.clock[0] = clock
        elif j > 0 and system.arrival_kind != ARRIVAL_TRACE:
            # Stopped inside the block: the clock as it stands before the task reached.
            philox_block(system.key, DRAW_TIMES, 0, first - j, w0, w1, w2, w3)
            state.clock[0] = draw_arrivals(
                np.int64(POISSON),
                system.mean_gap,
                0.0,
                0.0,
                first - j,
                clock_before,
                w0,
                w1,
                system.arrival_trace,
                base,
                A[:j],
            )
    return status, first


# The same loop for scenarios with a user's policy: its type is new in every process, so nothing is
# cached.
run_with_user_policy = njit(nogil=True, error_model="numpy")(getattr(run, "py_func", run))


# --------------------------------------------------------------------------------------------------
# - Processor sharing
#
# A server with q tasks works on all of them at 1/q of its speed, so its tasks have had the same
# service since any moment at which all of them were there. Let its attained service grow at rate
# 1/q, in time units of service, and begin anew at 0 when the server has been idle: a task that
# joins at attained service v and needs service S leaves when it is v + S, whoever comes and goes
# meanwhile. So each server needs only a heap of its tasks by what it must have attained when they
# leave, and the time of the next departure,
#
#     changed + (least of the heap - attained) * q,
#
# which holds until the next joining. Departures are taken only when somebody looks at the server or
# joins it, which changes no bit of them. The work left is that of a FCFS server: what the newest
# joining left (Lindley).
#
# Delays: as above, the servers are those of the moment that the dispatcher sees, t - delay. A
# dispatched task is pending until that moment has come to its arrival, and then joins.
# --------------------------------------------------------------------------------------------------
# -


class SharingState(NamedTuple):
    """Servers that share, and their tasks. `run_sharing` changes the arrays in place."""

    base: float  # the time from which all others count
    clock: NDArray[np.float64]  # (1,) as in State
    pointer: NDArray[np.int64]  # (2,) round robin
    present: NDArray[np.int64]  # (N,) tasks that have joined and not left
    attained: NDArray[np.float64]  # (N,) at the time `changed`
    changed: NDArray[np.float64]  # (N,) last joining or departure
    leaves_at: NDArray[np.float64]  # (N,) next departure, infinite if idle
    idle_at: NDArray[np.float64]  # (N,) when all work is done that has joined
    root: NDArray[np.int64]  # (N,) entry of the heap that leaves first, or -1
    unseen: NDArray[np.int64]  # (N,) pending tasks
    unseen_work: NDArray[np.float64]  # (N,) their service times
    # Entries of tasks, in one pool. `right` also chains the free ones and the pending ones.
    task: NDArray[np.int64]  # (M,)
    server: NDArray[np.int64]  # (M,) -1 of a free entry
    joined: NDArray[np.float64]  # (M,)
    finish: NDArray[np.float64]  # (M,) attained service at the end; of a pending one its service
    left: NDArray[np.int64]  # (M,)
    right: NDArray[np.int64]  # (M,)
    free: NDArray[np.int64]  # (2,) the first free entry, and their number
    pending: NDArray[np.int64]  # (2,) oldest and newest entry, or -1
    # Response times of the tasks origin, origin + 1, ..., but for the dispatch delay.
    origin: int
    response: NDArray[np.float64]
    awaited: NDArray[np.int64]  # (1,) how many of them are still to come


# Called, these would cost more than they do, and so would counting references to their arrays,
# which functions that make no arrays can do without (`_nrt`).
_OPTIONS: Any = {"nogil": True, "error_model": "numpy", "forceinline": True, "_nrt": False}
inside_a_kernel = njit(**_OPTIONS)


@inside_a_kernel
def merge(a, b, finish, left, right):
    """Return the root of two skew heaps in one (Sleator and Tarjan 1986); -1 is an empty heap.

    The lesser root stays. The other heap is merged with its right subtree, and its subtrees change
    places; so all the way down.
    """
    if a < 0:
        return b
    if b < 0:
        return a
    if finish[b] < finish[a]:
        a, b = b, a
    root = a
    while True:
        below = right[a]
        right[a] = left[a]
        if below < 0:
            left[a] = b
            return root
        if finish[b] < finish[below]:
            below, b = b, below
        left[a] = below
        a = below


@inside_a_kernel
def next_departure(s, present, attained, changed, root, finish):
    """Time at which the next task leaves server s if none joins it before."""
    if root[s] < 0:
        return np.inf
    # Attained service may have grown a rounding error too far at a joining.
    missing = max(finish[root[s]] - attained[s], 0.0)
    return changed[s] + missing * present[s]


@inside_a_kernel
def let_leave(
    s,
    until,
    present,
    attained,
    changed,
    leaves_at,
    root,
    task,
    server,
    joined,
    finish,
    left,
    right,
    free,
    origin,
    response,
    awaited,
):
    """Let the tasks leave server s that are done by `until`."""
    while leaves_at[s] <= until:
        now = leaves_at[s]
        entry = root[s]
        k = task[entry] - origin
        if 0 <= k < response.size:
            response[k] = now - joined[entry]
            awaited[0] -= 1
        attained[s] = finish[entry]
        changed[s] = now
        present[s] -= 1
        root[s] = merge(left[entry], right[entry], finish, left, right)
        server[entry] = -1
        right[entry] = free[0]
        free[0] = entry
        free[1] += 1
        leaves_at[s] = next_departure(s, present, attained, changed, root, finish)


@inside_a_kernel
def let_join(
    until,
    present,
    attained,
    changed,
    leaves_at,
    idle_at,
    root,
    unseen,
    unseen_work,
    task,
    server,
    joined,
    finish,
    left,
    right,
    free,
    pending,
    origin,
    response,
    awaited,
):
    """Let the pending tasks that arrived by `until` join their servers, each at its arrival."""
    while pending[0] >= 0 and joined[pending[0]] <= until:
        entry = pending[0]
        pending[0] = right[entry]
        s = server[entry]
        now = joined[entry]
        service = finish[entry]
        unseen[s] -= 1
        unseen_work[s] -= service
        if unseen[s] == 0:  # no trace of rounding: equal work must stay equal
            unseen_work[s] = 0.0
        let_leave(
            s,
            now,
            present,
            attained,
            changed,
            leaves_at,
            root,
            task,
            server,
            joined,
            finish,
            left,
            right,
            free,
            origin,
            response,
            awaited,
        )
        if present[s] == 0:
            attained[s] = 0.0
        else:
            attained[s] += (now - changed[s]) / present[s]
        changed[s] = now
        present[s] += 1
        idle_at[s] = max(idle_at[s], now) + service
        finish[entry] = attained[s] + service
        left[entry] = -1
        right[entry] = -1
        root[s] = merge(root[s], entry, finish, left, right)
        leaves_at[s] = next_departure(s, present, attained, changed, root, finish)


@jit
def let_pass(until, state):
    """Let all tasks join and leave that do so by `until`."""
    let_join(
        until,
        state.present,
        state.attained,
        state.changed,
        state.leaves_at,
        state.idle_at,
        state.root,
        state.unseen,
        state.unseen_work,
        state.task,
        state.server,
        state.joined,
        state.finish,
        state.left,
        state.right,
        state.free,
        state.pending,
        state.origin,
        state.response,
        state.awaited,
    )
    for s in range(state.present.size):
        let_leave(
            s,
            until,
            state.present,
            state.attained,
            state.changed,
            state.leaves_at,
            state.root,
            state.task,
            state.server,
            state.joined,
            state.finish,
            state.left,
            state.right,
            state.free,
            state.origin,
            state.response,
            state.awaited,
        )


@jit
def run_sharing(system, state, record, start, stop, block, choose_control, choose_treatment):
    """Draw and dispatch the tasks start, ..., stop - 1; return (status, task reached).

    As `run`, but departures are not known yet: response times are written where `state` says, when
    they end. With status NEEDS_ROOM there are fewer free entries than tasks in a block.
    """
    depth = system.depth
    delay = system.delay
    counts_own = system.counts_own_dispatches
    rates = system.rates
    n_servers = rates.size
    members = system.members
    n_members = system.n_members
    present = state.present
    attained = state.attained
    changed = state.changed
    leaves_at = state.leaves_at
    idle_at = state.idle_at
    root = state.root
    unseen = state.unseen
    unseen_work = state.unseen_work
    task = state.task
    server = state.server
    joined = state.joined
    finish = state.finish
    left = state.left
    right = state.right
    free = state.free
    pending = state.pending
    origin = state.origin
    response = state.response
    awaited = state.awaited
    pointer = state.pointer
    out_arrival = record.arrival
    out_treated = record.treated
    out_server = record.server
    out_service = record.service_time
    out_candidates = record.candidates
    policies = system.policy
    looked_at = system.d
    slowness = system.slowness
    out_choice = record.choice
    out_lengths = record.queue_lengths
    keeps_service = out_service.size > 0
    keeps_candidates = out_candidates.size > 0
    keeps_lengths = out_lengths.size > 0
    both_choices = out_choice.size > 0
    # Policies that look at every server.
    scans = np.zeros(2, np.bool_)
    for arm in range(2):
        policy = policies[arm]
        scans[arm] = JOIN_SHORTEST_QUEUE <= policy <= JOIN_IDLE_QUEUE or policy == USER_POLICY

    arrival = np.empty(block)
    requirement = np.empty(block)
    treated = np.empty(block, np.int64)
    candidates = np.zeros((max(depth, 1), block), np.uint64)
    w = np.empty((4, block), np.uint64)
    tie = np.zeros(block)
    score = np.empty(n_servers)
    lengths = np.empty(n_servers, np.int64)
    work = np.empty(n_servers)

    first = start
    while first < stop:
        m = min(block, stop - first)
        if free[1] < m:
            return NEEDS_ROOM, first
        A = arrival[:m]
        R = requirement[:m]
        Z = treated[:m]
        state.clock[0] = draw_block(
            system,
            first,
            state.clock[0],
            state.base,
            w[0, :m],
            w[1, :m],
            w[2, :m],
            w[3, :m],
            A,
            R,
            Z,
            candidates,
            tie[:m],
        )
        for j in range(m):
            i = first - start + j
            t = A[j]
            z = Z[j]
            seen_at = t - delay
            let_join(
                seen_at,
                present,
                attained,
                changed,
                leaves_at,
                idle_at,
                root,
                unseen,
                unseen_work,
                task,
                server,
                joined,
                finish,
                left,
                right,
                free,
                pending,
                origin,
                response,
                awaited,
            )
            if keeps_lengths or scans[z] or (both_choices and (scans[0] or scans[1])):
                for s in range(n_servers):
                    if leaves_at[s] <= seen_at:
                        let_leave(
                            s,
                            seen_at,
                            present,
                            attained,
                            changed,
                            leaves_at,
                            root,
                            task,
                            server,
                            joined,
                            finish,
                            left,
                            right,
                            free,
                            origin,
                            response,
                            awaited,
                        )
                    lengths[s] = present[s]
                    # An idle server has no work, whatever rounding says.
                    work[s] = max(idle_at[s] - seen_at, 0.0) if present[s] > 0 else 0.0
                    if counts_own:
                        lengths[s] += unseen[s]
                        work[s] += unseen_work[s]
                if keeps_lengths:
                    for s in range(n_servers):
                        out_lengths[i, s] = lengths[s]

            chosen = 0
            for k in range(2 if both_choices else 1):
                arm = k if both_choices else z
                policy = policies[arm]
                choice = 0
                lowest = np.inf
                if policy == POWER_OF_D or policy == SHORTEST_EXPECTED_DELAY:
                    for c in range(looked_at[arm]):
                        s = np.int64(candidates[c, j])
                        if leaves_at[s] <= seen_at:
                            let_leave(
                                s,
                                seen_at,
                                present,
                                attained,
                                changed,
                                leaves_at,
                                root,
                                task,
                                server,
                                joined,
                                finish,
                                left,
                                right,
                                free,
                                origin,
                                response,
                                awaited,
                            )
                        q = present[s]
                        if counts_own:
                            q += unseen[s]
                        value = float(q)
                        if policy == SHORTEST_EXPECTED_DELAY:
                            value = (q + 1) / rates[s]  # divided, so that equals stay equal
                        if value < lowest:
                            lowest = value
                            choice = s
                elif policy == ROUND_ROBIN:
                    choice = members[arm, pointer[arm]]
                elif policy == USER_POLICY:
                    mine = np.empty(n_members[arm], np.int64)
                    for c in range(mine.size):
                        mine[c] = np.int64(candidates[c, j])
                    # Apart from the arm, so that None is never called.
                    if choose_control is not None:
                        if arm == 0:
                            choice = int(choose_control(lengths, work, rates, mine, tie[j]))
                    if choose_treatment is not None:
                        if arm == 1:
                            choice = int(choose_treatment(lengths, work, rates, mine, tie[j]))
                    allowed = False
                    for c in range(n_members[arm]):
                        allowed = allowed or members[arm, c] == choice
                    if not allowed:
                        return BAD_CHOICE, first + j
                else:
                    mine = members[arm, : n_members[arm]]
                    choice = least_of_all(policy, lengths, work, mine, tie[j], score)
                if both_choices:
                    out_choice[i, arm] = choice
                if arm == z:
                    chosen = choice
            if policies[z] == ROUND_ROBIN:
                pointer[z] = (pointer[z] + 1) % n_members[z]

            service = R[j] * slowness[chosen]
            entry = free[0]
            free[0] = right[entry]
            free[1] -= 1
            task[entry] = first + j
            server[entry] = chosen
            joined[entry] = t
            finish[entry] = service
            right[entry] = -1
            if pending[0] < 0:
                pending[0] = entry
            else:
                right[pending[1]] = entry
            pending[1] = entry
            unseen[chosen] += 1
            unseen_work[chosen] += service
            out_arrival[i] = t
            out_treated[i] = z == 1
            out_server[i] = chosen
            if keeps_service:
                out_service[i] = service
            if keeps_candidates:
                for c in range(depth):
                    out_candidates[i, c] = np.int32(candidates[c, j])
        first += m
    return FINISHED, first


run_sharing_with_user_policy = njit(nogil=True, error_model="numpy")(
    getattr(run_sharing, "py_func", run_sharing)
)


# --------------------------------------------------------------------------------------------------
# - Tasks in system and estimation: one pass over a log
# --------------------------------------------------------------------------------------------------
# -


@jit
def next_arrival(arrival, moment):
    """Index of the first arrival at or after each moment; n if there is none.

    A fine grid of buckets over the arrivals leaves few of them to be compared, one after the other
    unless a burst fills a bucket. The bucket of a time is a monotone function of it, rounding
    included, so the answer is exact.

    Parameters
    ----------
    arrival : float64 (n,), n >= 1, non-decreasing
    moment : float64 (m,), in any order

    Returns
    -------
    int64 (m,)
    """
    n = len(arrival)
    origin = arrival[0]
    last = arrival[n - 1]
    buckets = 2 * n
    # A span too small to divide by puts all arrivals into one bucket.
    per_time = buckets / (last - origin) if last - origin > 1e-200 else 0.0
    begin = np.zeros(buckets + 2, dtype=np.int32)
    for k in range(n):
        begin[np.uint64(np.int64((arrival[k] - origin) * per_time) + 1)] += np.int32(1)
    before = np.int32(0)
    for bucket in range(np.uint64(buckets + 2)):
        before += begin[bucket]
        begin[bucket] = before
    index = np.empty(len(moment), dtype=np.int64)
    for j in range(len(moment)):
        time = moment[j]
        low = np.uint64(n)
        if time <= origin:
            low = np.uint64(0)
        elif time <= last:
            bucket = np.uint64(np.int64((time - origin) * per_time))
            low = np.uint64(begin[bucket])
            high = np.uint64(begin[bucket + np.uint64(1)])
            while high - low > np.uint64(8):
                middle = (low + high) >> np.uint64(1)
                if arrival[middle] < time:
                    low = middle + np.uint64(1)
                else:
                    high = middle
            while arrival[low] < time:
                low += np.uint64(1)
        index[j] = low
    return index


@jit
def tasks_in_system(leaves_at, carried_leaves_at):
    """Tasks that each arrival finds in the system, itself not counted.

    Task j is found by the arrivals k with j < k < leaves_at[j]. A task whose time in the system is
    zero has leaves_at[j] <= j, so no later arrival finds it, however many arrive at the same
    instant.

    Parameters
    ----------
    leaves_at : int64 (n,), first arrival at or after the end of each task (`next_arrival`)
    carried_leaves_at : int64 (m,), the same for the tasks in the system before the first arrival

    Returns
    -------
    int64 (n,)
    """
    n = len(leaves_at)
    found = np.zeros(n, dtype=np.int64)
    for k in carried_leaves_at:
        if k < n:
            found[k] -= 1
    for j in range(n):
        k = leaves_at[j]
        if j < k < n:
            found[k] -= 1
    present = len(carried_leaves_at)
    for k in range(n):
        present += found[k]
        found[k] = present
        if leaves_at[k] > k:
            present += 1
    return found


@jit
def area_between_arrivals(
    before, arrival, departure, leaves_at, carried_departure, carried_leaves_at, found
):
    """Integral of the number in system from arrival k - 1 to arrival k.

    The tasks still there at arrival k fill the whole gap; those that leave inside it fill a part.
    Only positive terms are added, so nothing cancels.

    Parameters
    ----------
    before : float, the arrival before the first one; the first one itself if there is none
    arrival, departure : float64 (n,)
    leaves_at : int64 (n,), as for `tasks_in_system`
    carried_departure : float64 (m,), departures of the tasks in the system before the first arrival
    carried_leaves_at : int64 (m,)
    found : int64 (n,), what `tasks_in_system` returned

    Returns
    -------
    float64 (n,), tasks x time
    """
    n = len(arrival)
    area = np.zeros(n)
    for j in range(len(carried_departure)):
        k = carried_leaves_at[j]
        if k == 0:
            area[k] += max(carried_departure[j] - before, 0.0)
        elif k < n:
            area[k] += carried_departure[j] - arrival[k - 1]
    for j in range(n):
        k = leaves_at[j]
        if j < k < n:
            area[k] += departure[j] - arrival[k - 1]
    area[0] += found[0] * (arrival[0] - before)
    for k in range(1, n):
        area[k] += found[k] * (arrival[k] - arrival[k - 1])
    return area


@jit
def start_of_service(arrival, departure, server, delay, free):
    """Start of service of each task at FCFS servers, from the departure of the task before it.

    Parameters
    ----------
    arrival, departure : float64 (n,)
    server : int32 (n,)
    delay : float, time from arrival to joining the server
    free : float64 (N,), when each server is done with the tasks before the log; overwritten

    Returns
    -------
    float64 (n,). A start after the task's own departure shows that the server is not FCFS.
    """
    start = np.empty(len(arrival))
    for k in range(len(arrival)):
        s = server[k]
        start[k] = max(arrival[k] + delay, free[s])
        free[s] = departure[k]
    return start


@jit
def service_under_sharing(arrival, departure, server, by_departure, n_servers):
    """Service that each task got at servers which share their effort equally among their tasks.

    A server with q tasks serves each of them at the rate 1/q, so a task that is there from A to D
    gets the integral of 1/q over that time. A clock for each server adds it up, from zero whenever
    it comes out of idleness, and a task's service is what its server's clock has gained meanwhile.

    Parameters
    ----------
    arrival, departure : float64 (n,), when each task joined and left; arrivals nondecreasing
    server : int32 (n,)
    by_departure : int64 (n,), the tasks in order of departure
    n_servers : int

    Returns
    -------
    float64 (n,), times at the server's full speed
    """
    n = len(arrival)
    present = np.zeros(n_servers, np.int64)
    clock = np.zeros(n_servers)
    since = np.zeros(n_servers)
    service = np.empty(n)
    came = 0
    left = 0
    while left < n:
        leaver = by_departure[left]
        # At equal times those who come are first, so that nobody leaves before coming.
        comes = came < n and arrival[came] <= departure[leaver]
        k = came if comes else leaver
        time = arrival[k] if comes else departure[k]
        s = server[k]
        clock[s] = clock[s] + (time - since[s]) / present[s] if present[s] > 0 else 0.0
        since[s] = time
        if comes:
            service[k] = -clock[s]
            present[s] += 1
            came += 1
        else:
            service[k] += clock[s]
            present[s] -= 1
            left += 1
    return service


@jit
def add_windows(
    response, cost, arrival, treated, first, stop, horizon, by_duration, running, moments
):
    """Add the windows first, ..., stop - 1 to the moments of both truncated sums, arm by arm.

    Window i holds the response W_i + ... + W_{i+horizon-1} and the queue cost[i+1] + ... +
    cost[i+horizon], times A_{i+horizon} - A_i if `by_duration`. The sums slide: each comes from
    the window before. Deviations are taken from the very first window, whose own deviation is at
    most sqrt(windows) standard deviations of the sums, so the rounding error of a variance is at
    most about windows * 1e-16 of it.

    Parameters
    ----------
    response, cost, arrival : float64 (m,), of the newest tasks in order
    treated : bool (m,)
    first, stop : int, positions in these arrays; stop + horizon <= m, and first >= 1 unless these
        are the first windows of all
    horizon : int, >= 1
    by_duration : bool
    running : float64 (5,), changed: the two sums of the last window, those of the very first one,
        and whether there was one
    moments : float64 (2, 6), changed, a row an arm (0 control, 1 treatment): windows; sums of the
        deviations of response and of queue, of their squares, and of their products
    """
    if first >= stop:
        return
    response_sum = running[0]
    queue_sum = running[1]
    slides = running[4] > 0.0
    if not slides:
        response_sum = 0.0
        queue_sum = 0.0
        for k in range(first, first + horizon):
            response_sum += response[k]
            queue_sum += cost[k + 1]
        running[2] = response_sum
        running[3] = queue_sum
        if by_duration:
            running[3] *= arrival[first + horizon] - arrival[first]
        running[4] = 1.0
    response_origin = running[2]
    queue_origin = running[3]
    # Totals of both arms and of the treatment apart: no branch on a coin.
    n1 = 0
    x0 = y0 = xx0 = yy0 = xy0 = 0.0
    x1 = y1 = xx1 = yy1 = xy1 = 0.0
    span = np.uint64(horizon)
    one = np.uint64(1)
    # Unsigned indices: a signed one would be tested for counting from the end.
    for i in range(np.uint64(first), np.uint64(stop)):
        end = i + span
        if slides:
            response_sum += response[end - one] - response[i - one]
            queue_sum += cost[end] - cost[i]
        slides = True
        length = queue_sum
        if by_duration:
            length *= arrival[end] - arrival[i]
        x = response_sum - response_origin
        y = length - queue_origin
        z = treated[i]
        n1 += z
        mine = x if z else 0.0
        other = y if z else 0.0
        x1 += mine
        y1 += other
        xx1 += mine * x
        yy1 += other * y
        xy1 += mine * y
        mine = x - mine
        other = y - other
        x0 += mine
        y0 += other
        xx0 += mine * x
        yy0 += other * y
        xy0 += mine * y
    running[0] = response_sum
    running[1] = queue_sum
    moments[0, 0] += stop - first - n1
    moments[0, 1] += x0
    moments[0, 2] += y0
    moments[0, 3] += xx0
    moments[0, 4] += yy0
    moments[0, 5] += xy0
    moments[1, 0] += n1
    moments[1, 1] += x1
    moments[1, 2] += y1
    moments[1, 3] += xx1
    moments[1, 4] += yy1
    moments[1, 5] += xy1


@jit
def add_windows_to_blocks(
    response,
    cost,
    arrival,
    treated,
    first,
    stop,
    ahead,
    horizon,
    by_duration,
    running,
    length,
    moments,
):
    """Add the windows number first, ..., stop - 1 to the blocks that they fall into.

    Parameters
    ----------
    response, cost, arrival, treated, horizon, by_duration, running
        As for `add_windows`.
    first, stop : int, numbers of windows, counted from the very first one
    ahead : int, position of window 0 in the arrays, which may be negative
    length : int, windows to a block
    moments : float64 (B, 2, 6), changed, by block
    """
    while first < stop:
        block = first // length
        end = min((block + 1) * length, stop)
        add_windows(
            response,
            cost,
            arrival,
            treated,
            first + ahead,
            end + ahead,
            horizon,
            by_duration,
            running,
            moments[block],
        )
        first = end


@jit
def add_tasks(response, treated, first, stop, ahead, origin, length, moments):
    """Add the tasks number first, ..., stop - 1 to the moments of their responses, arm by arm.

    Parameters
    ----------
    response : float64 (m,)
    treated : bool (m,)
    first, stop : int, numbers of tasks, counted from the very first one that counts
    ahead : int, position of task 0 in the arrays, which may be negative
    origin : float, taken off each response, so that squares lose little to rounding
    length : int, tasks to a block
    moments : float64 (B, 2, 3), changed, by block, a row an arm (0 control, 1 treatment): tasks;
        sums of the deviations and of their squares
    """
    while first < stop:
        block = first // length
        end = min((block + 1) * length, stop)
        n1 = 0
        x0 = xx0 = x1 = xx1 = 0.0
        for i in range(np.uint64(first + ahead), np.uint64(end + ahead)):
            x = response[i] - origin
            z = treated[i]
            n1 += z
            mine = x if z else 0.0
            other = x - mine
            x1 += mine
            xx1 += mine * x
            x0 += other
            xx0 += other * x
        moments[block, 0, 0] += end - first - n1
        moments[block, 0, 1] += x0
        moments[block, 0, 2] += xx0
        moments[block, 1, 0] += n1
        moments[block, 1, 1] += x1
        moments[block, 1, 2] += xx1
        first = end


@jit
def close_periods(response, treated, period, kept, running, closed):
    """Go on with the periods of a switchback, and list those that have come to their end.

    A period ends when the next one begins, so the last one never does. Its tasks that are kept have
    a number and a summed response, of which the response of the very first task is taken off, so
    that squares lose little to rounding. Periods without any are passed over.

    Parameters
    ----------
    response : float64 (m,)
    treated, kept : bool (m,)
    period : int64 (m,), nondecreasing
    running : float64 (7,), changed: whether there was a task, its response, the number of the
        current period, its control tasks and their sum, its treated tasks and their sum
    closed : float64 (m, 3), changed, a row a period: arm, tasks, sum

    Returns
    -------
    (int, int): the periods listed; the first period with kept tasks of both arms, -1 if there is
        none
    """
    n = 0
    for k in range(len(response)):
        if running[0] == 0.0:
            running[0] = 1.0
            running[1] = response[k]
            running[2] = period[k]
        if period[k] != running[2]:
            if running[3] > 0.0 and running[5] > 0.0:
                return n, int(running[2])
            for arm in range(2):
                if running[3 + 2 * arm] > 0.0:
                    closed[n, 0] = arm
                    closed[n, 1] = running[3 + 2 * arm]
                    closed[n, 2] = running[4 + 2 * arm]
                    n += 1
                running[3 + 2 * arm] = 0.0
                running[4 + 2 * arm] = 0.0
            running[2] = period[k]
        if kept[k]:
            arm = int(treated[k])
            running[3 + 2 * arm] += 1.0
            running[4 + 2 * arm] += response[k] - running[1]
    return n, -1


# --------------------------------------------------------------------------------------------------
# - Queues as a log's tasks met them
# --------------------------------------------------------------------------------------------------
# -


@jit
def queues_met(
    arrival,
    departure,
    server,
    by_departure,
    first,
    join_delay,
    see_delay,
    counts_own,
    recorded,
    policy,
    rates,
    ranks,
    state,
):
    """Rebuild what each task met at its arrival, and how the server it joined ranked by two rules.

    Two counts of tasks a server walk along with the arrivals: `here`, of all that were sent there
    and have not left, and `seen`, of those that had joined and not left `see_delay` earlier. Each
    goes up when the next task in order of arrival is sent (or is seen), and down at the next
    departure; a departure waits for its own task, so that one that leaves as it comes counts for
    nothing.

    A rule looks at a number, such as the tasks at a server, and prefers the least. With the servers
    that have a larger number than the one joined, and those that have the same, the probability of
    the choice follows.

    Parameters
    ----------
    arrival, departure : float64 (n,), those of tasks in the system before the log first, with
        arrivals of minus infinity
    server : int32 (n,)
    by_departure : int64 (n,), tasks in order of departure, ties in order of arrival
    first : int, the first task of the log
    join_delay, see_delay : float, from arrival to joining; age of what the dispatcher sees
    counts_own : bool, whether tasks count as seen as soon as they are sent
    recorded : int32 (n - first, N), what was seen, or (0, N): it is rebuilt
    policy : int64 (2,), kinds of the rules; -1 for one that is not asked for
    rates : float64 (N,)
    ranks : int64 (n - first, 2, 2), changed: by rule, the servers with a larger number and those
        with the same, the one joined included
    state : float64 (n - first, 9), changed: tasks in system; servers with a task or more, and with
        two or more; sum of squared lengths; tasks at the server joined; time until each server is
        done with what it has, summed, and the squares of that; rates of the servers with a task or
        more, summed; rate times time until done, summed
    """
    n = arrival.size
    n_servers = rates.size
    here = np.zeros(n_servers, np.int64)
    seen = np.zeros(n_servers, np.int64)
    last = np.full(n_servers, -np.inf)
    number = np.empty(n_servers)
    left = 0
    sent_seen = 0
    left_seen = 0
    for i in range(n):
        s = server[i]
        t = arrival[i]
        if i >= first:
            while left < n and by_departure[left] < i and departure[by_departure[left]] <= t:
                here[server[by_departure[left]]] -= 1
                left += 1
            while sent_seen < i and (
                counts_own or arrival[sent_seen] + join_delay <= t - see_delay
            ):
                seen[server[sent_seen]] += 1
                sent_seen += 1
            while (
                left_seen < n
                and by_departure[left_seen] < sent_seen
                and departure[by_departure[left_seen]] <= t - see_delay
            ):
                seen[server[by_departure[left_seen]]] -= 1
                left_seen += 1
            row = i - first
            if recorded.shape[0] > 0:
                for r in range(n_servers):
                    seen[r] = recorded[row, r]
            busy = 0
            two = 0
            total = 0
            squares = 0
            work = 0.0
            work_squares = 0.0
            capacity = 0.0
            requirement = 0.0
            for r in range(n_servers):
                q = here[r]
                total += q
                busy += q > 0
                two += q > 1
                squares += q * q
                v = max(last[r] - t, 0.0)
                work += v
                work_squares += v * v
                capacity += rates[r] if q > 0 else 0.0
                requirement += rates[r] * v
            state[row, 0] = total
            state[row, 1] = busy
            state[row, 2] = two
            state[row, 3] = squares
            state[row, 4] = here[s]
            state[row, 5] = work
            state[row, 6] = work_squares
            state[row, 7] = capacity
            state[row, 8] = requirement
            for rule in range(2):
                kind = policy[rule]
                if kind < 0:
                    continue
                if rule == 1 and kind == policy[0]:
                    ranks[row, 1, 0] = ranks[row, 0, 0]
                    ranks[row, 1, 1] = ranks[row, 0, 1]
                    continue
                for r in range(n_servers):
                    if kind == SHORTEST_EXPECTED_DELAY:
                        number[r] = (seen[r] + 1) / rates[r]
                    elif kind == LEAST_WORK_LEFT:
                        number[r] = max(last[r] - t, 0.0)
                    elif kind == JOIN_IDLE_QUEUE:
                        number[r] = float(min(seen[r], 1))
                    else:
                        number[r] = float(seen[r])
                mine = number[s]
                larger = 0
                same = 0
                for r in range(n_servers):
                    larger += number[r] > mine
                    same += number[r] == mine
                ranks[row, rule, 0] = larger
                ranks[row, rule, 1] = same
        here[s] += 1
        last[s] = max(last[s], departure[i])
