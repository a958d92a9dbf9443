"""How all of the bench is timed."""

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any


def seconds(run: Callable[..., object], *args: Any) -> float:
    start = time.perf_counter()
    run(*args)
    return time.perf_counter() - start


def settled(rounds: list[float]) -> float:
    """The median; the first round warms up and does not count."""
    return median(rounds[1:])


def rotated(names: Iterable[str], turn: int) -> list[str]:
    """The same names, another one first on each turn."""
    names = list(names)
    first = turn % len(names)
    return names[first:] + names[:first]
