"""A check from both sides: it takes right answers and refuses each of the wrong ones we keep."""

from collections.abc import Callable, Sequence
from typing import Any

Answer = Callable[..., Any]


def two_sided(
    check: Answer, right: Answer | Sequence[Answer], *wrong: Any, seeds: Sequence[int] = range(4)
) -> None:
    """Try every answer under every seed."""
    for seed in seeds:
        for answer in [right] if callable(right) else right:
            result = check(answer, seed=seed)
            assert result.passed, result
        for number, answer in enumerate(wrong):
            assert not check(answer, seed=seed).passed, f"wrong answer {number}, seed {seed}"
