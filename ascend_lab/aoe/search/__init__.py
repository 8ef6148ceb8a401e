"""Searches with one signature: (space, rng, points to start with) -> batches of points.

Those that are objects keep what they did in the latest run, for figures: generations, trees.
"""

from dataclasses import replace
from difflib import get_close_matches

from ascend_lab.aoe.drive import Search
from ascend_lab.aoe.search.points import (
    Annealing,
    Birth,
    Genetic,
    IteratedLocal,
    Surrogate,
    exhaustive,
    random_order,
)
from ascend_lab.aoe.search.tree import BranchAndBound, Mcts, Node, tree_of
from ascend_lab.errors import InputError

SEARCHES: dict[str, Search] = {
    "exhaustive": exhaustive,
    "random": random_order,
    "annealing": Annealing(),
    "genetic": Genetic(),
    "iterated-local": IteratedLocal(),
    "mcts": Mcts(),
    "branch-and-bound": BranchAndBound(),
}
"""Searches by name; branch and bound without a bound of its own enumerates the space."""
ALIASES = {
    "sa": "annealing",
    "simulated-annealing": "annealing",
    "ga": "genetic",
    "genetic-algorithm": "genetic",
    "ils": "iterated-local",
    "iterated-local-search": "iterated-local",
    "bnb": "branch-and-bound",
}
"""Other names by which searches are known."""


def search_named(name: str) -> Search:
    """Return a search by its name or another one; raise `InputError` if there is none."""
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    plain = ALIASES.get(plain, plain)
    if plain not in SEARCHES:
        near = get_close_matches(plain, [*SEARCHES, *ALIASES], 1)
        remedy = f"did you mean {near[0]}?" if near else "give one of them"
        raise InputError(f"a search among {', '.join(SEARCHES)}", repr(name), remedy)
    return SEARCHES[plain]


def paced(search: Search, budget: int) -> Search:
    """Return the search with its schedule stretched to a budget, if it has a schedule."""
    return replace(search, length=budget) if isinstance(search, Annealing) else search


__all__ = [
    "ALIASES", "SEARCHES", "Annealing", "Birth", "BranchAndBound", "Genetic", "IteratedLocal",
    "Mcts", "Node", "Surrogate", "exhaustive", "paced", "random_order", "search_named",
    "tree_of",
]  # fmt: skip
