"""What a user may say about a tuning run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ascend_lab.errors import InputError

JOBS = {"1": "subgraph", "2": "operator"}
"""The published numbers of the jobs that may run together."""
ALONE = {"4": "gradient"}
"""Of those that run by themselves: this one needs a cluster."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Budgets and ways of a run.

    `budget`: unique candidates per operator. `time_limit_s`: for the whole network, shared by its
    operators in proportion to what they can still gain. `trial_limit_s`: for one candidate.
    `search`: the name of a search instead of the one that suits each operator. `repeat`: tune again
    what the bank knows. Where a cube's operator is not proven optimal, branch and bound tries
    `budget` more; with `deeper` as many as it takes, within `deeper_s` seconds an operator.
    `verify`: run every winner and compare its values with the default's. `prior`: let what the bank
    knows of vector operators steer the tree search of others.
    """

    budget: int = 200
    seed: int = 0
    time_limit_s: float | None = None
    trial_limit_s: float | None = 30.0
    early_stop: float | None = 4.0
    search: str = ""
    repeat: bool = False
    deeper: bool = False
    deeper_s: float = 10.0
    verify: bool = True
    prior: bool = False

    def __post_init__(self) -> None:
        """Raise `InputError` for numbers that make no sense."""
        if self.budget < 1:
            raise InputError("a budget of at least 1", str(self.budget), "raise it")
        limits = [self.time_limit_s, self.trial_limit_s, self.early_stop, self.deeper_s]
        if any(x is not None and x <= 0 for x in limits):
            raise InputError("limits above 0", str(limits), "raise them, or leave them out")


def jobs_of(text: str) -> tuple[str, ...]:
    """Return the jobs of a text such as "2" or "1,2", in the order they run: subgraph first."""
    given = [part.strip() for part in text.split(",")]
    if not text or any(job not in JOBS for job in given):
        names = ", ".join(f"{number} {name}" for number, name in {**JOBS, **ALONE}.items())
        remedy = "e.g. 2, or 1,2; 4 by itself: `aoe --job_type 4 --cluster NAME`, or tune_gradients"
        raise InputError(f"jobs among {names}", text or "nothing", remedy)
    return tuple(sorted(set(given)))


OVERALL = "all"
"""What progress of a whole run is called: compiling, slicing, each operator, the end."""
Progress = Callable[[str, int, int, str], None]
"""(what is tuned, done, out of, best so far as text) -> None."""
