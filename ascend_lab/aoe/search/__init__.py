"""Search methods: each proposes points of a space, learns their costs, then proposes more points.

Every search is a function or a callable object with one signature: it takes (space, random
generator, points to try first) and yields batches of points; the driver (`aoe.drive`) sends their
costs back.

- `points`: searches that go from complete points to complete points: random order, iterated local
  search, simulated annealing, a genetic algorithm
- `prefixes`: searches that decide one decision after another: branch and bound, Monte-Carlo tree
  search
- `surrogate`: the model of costs that guides the genetic algorithm and the tree search

Searches that are objects remember their latest run, so that it can be drawn: the genetic algorithm
its generations, tree search its tree.
"""

from dataclasses import replace
from difflib import get_close_matches

# fmt: off
# isort: off
from ascend_lab.aoe.drive import Search
from ascend_lab.aoe.search.points import (
    Annealing, Birth, Genetic, IteratedLocal, exhaustive, random_order,
)
from ascend_lab.aoe.search.prefixes import BranchAndBound, Mcts, Node, tree_of
from ascend_lab.aoe.search.surrogate import Surrogate
from ascend_lab.errors import InputError
# fmt: on
# isort: on

__all__ = [
    "ALIASES",
    "SEARCHES",
    "Annealing",
    "Birth",
    "BranchAndBound",
    "Genetic",
    "IteratedLocal",
    "Mcts",
    "Node",
    "Surrogate",
    "exhaustive",
    "paced",
    "random_order",
    "search_named",
    "tree_of",
]

SEARCHES: dict[str, Search] = {
    "exhaustive": exhaustive,
    "random": random_order,
    "annealing": Annealing(),
    "genetic": Genetic(),
    "iterated-local": IteratedLocal(),
    "mcts": Mcts(),
    "branch-and-bound": BranchAndBound(),
}
"""Searches by name. Branch and bound has no lower bound here, so that it tries the whole space."""
ALIASES = {
    "sa": "annealing",
    "simulated-annealing": "annealing",
    "ga": "genetic",
    "genetic-algorithm": "genetic",
    "ils": "iterated-local",
    "iterated-local-search": "iterated-local",
    "bnb": "branch-and-bound",
}
"""Abbreviations and other common names of the searches."""


def search_named(name: str) -> Search:
    """Return the search with this name or alias; raise `InputError` for unknown names."""
    # "Simulated Annealing", "simulated_annealing" and "sa" name the same search.
    spelled = name.strip().lower().replace("_", "-").replace(" ", "-")
    search_name = ALIASES.get(spelled, spelled)
    if search_name not in SEARCHES:
        suggestions = get_close_matches(search_name, [*SEARCHES, *ALIASES], 1)
        remedy = f"did you mean {suggestions[0]}?" if suggestions else "give one of them"
        raise InputError(f"a search among {', '.join(SEARCHES)}", repr(name), remedy)
    return SEARCHES[search_name]


def paced(search: Search, budget: int) -> Search:
    """Return the search; the cooling schedule of annealing is set to the length of the budget."""
    return replace(search, length=budget) if isinstance(search, Annealing) else search
