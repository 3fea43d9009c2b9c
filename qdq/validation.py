"""Checks of arguments: a refusal names the argument, its value and what would be right."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray


def refuse(name: str, value: object, right: str) -> ValueError:
    """Return the ValueError that says which argument is wrong and what would be right."""
    return ValueError(f"{name}={value!r} is not allowed: {name} must be {right}")


def number(
    name: str,
    value: Any,
    right: str,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
) -> float:
    """Return `value` as a finite float inside the bounds, else raise TypeError or ValueError."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} is not a number: {name} must be {right}")
    result = float(value)
    inside = above < result < below and at_least <= result <= at_most
    if not (math.isfinite(result) and inside):
        raise refuse(name, value, right)
    return result


def integer(name: str, value: Any, right: str, *, at_least: int, at_most: int | None = None) -> int:
    """Return `value` as an int inside the bounds, else raise TypeError or ValueError.

    A float with an integral value (``1e6``) is taken, since that is how people write large counts.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} is not an integer: {name} must be {right}")
    if not isinstance(value, Integral) and not float(value).is_integer():
        raise refuse(name, value, right)
    result: int = int(value)  # type: ignore[call-overload]
    if result < at_least or (at_most is not None and result > at_most):
        raise refuse(name, value, right)
    return result


def boolean(name: str, value: Any) -> bool:
    """Return `value` as a bool, else raise TypeError."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} is not allowed: {name} must be True or False")
    return bool(value)


def vector(name: str, value: Any, right: str) -> NDArray[np.float64]:
    """Return `value` as a read-only one-dimensional array of finite floats, else raise."""
    try:
        given = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name} is no array: it must be {right}") from error
    if given.dtype.kind not in "iuf":  # no texts, dates or truth values taken for numbers
        raise TypeError(f"{name} holds something that is not a number: it must be {right}")
    result = given.astype(np.float64)
    if result.ndim != 1 or result.size == 0:
        raise ValueError(f"{name} has shape {result.shape}: it must be {right}")
    bad = np.flatnonzero(~np.isfinite(result))
    if bad.size:
        raise ValueError(
            f"{name}[{bad[0]}]={result[bad[0]]!r} is not finite: {name} must be {right}"
        )
    result.setflags(write=False)
    return result
