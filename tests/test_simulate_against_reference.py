"""The simulator against an independent event-by-event simulation, for every feature of a scenario.

Pathwise: the reference gets the draws of a log (arrivals, requirements, arms, candidates, uniforms) and must
come to the same servers, choices, queue lengths, numbers in system and departures. In law: the reference
draws everything itself from numpy's generator, and mean response times agree in both arms.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence

import numpy as np
import pytest
from numba import njit
from reference_sim import Draws, draw_tasks, simulate_reference

import qdq
