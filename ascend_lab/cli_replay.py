"""The verb `ascend-lab replay`: a search on a recorded tuning space, with the optimum beside it."""

from __future__ import annotations

import argparse
from typing import Any

from ascend_lab.cli_common import add_json, emit
from ascend_lab.errors import InputError
from ascend_lab.limits import SEEDS, count, refuse_above


def add_replay(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser("replay", help="run a search on a recorded tuning space")
    verb.add_argument("file", metavar="SPACE.csv.gz", help="columns of parameters, then time_ms")
    names = "exhaustive, random, annealing, genetic (default), iterated-local, mcts"
    known = f"{names}, or branch-and-bound, which has no bounds here"
    verb.add_argument("--search", default="genetic", metavar="NAME", help=known)
    verb.add_argument("--budget", type=count, default=500, metavar="N", help="trials (500)")
    verb.add_argument(
        "--seeds", type=count, default=30, metavar="K", help="runs: seeds 0..K-1 (30)"
    )
    add_json(verb)
    verb.set_defaults(run=_replay)


def _replay(arguments: argparse.Namespace) -> int:
    for name in ("budget", "seeds"):
        if getattr(arguments, name) < 1:
            raise InputError(f"--{name} of at least 1", str(getattr(arguments, name)))
    refuse_above("--seeds", arguments.seeds, SEEDS)
    from ascend_lab.aoe.recorded import read_recorded, replay
    from ascend_lab.aoe.search import paced, search_named

    search = paced(search_named(arguments.search), arguments.budget)
    space = read_recorded(arguments.file)
    found = replay(space, search, arguments.budget, range(arguments.seeds))
    data = {
        "search": arguments.search,
        "budget": arguments.budget,
        "size": space.space.size,
        "optimum": found.optimum,
        "best_per_seed": list(found.best_per_seed),
        "evaluations_per_seed": list(found.evaluations_per_seed),
        "median_ratio": found.median_ratio,
        "within_5_percent": found.share_within(0.05),
    }
    lines = [
        (
            f"{arguments.search}: median of {arguments.seeds} seeds {found.median_ratio:.4f} times "
            f"the optimum of {found.optimum:g} ms after {max(found.evaluations_per_seed)} of "
            f"{space.space.size} trials"
        ),
        (
            f"  {found.share_within(0.05):.0%} of seeds within 5 %, "
            f"worst {max(found.best_per_seed) / found.optimum:.4f}"
        ),
    ]
    emit(arguments.json, data, lines)
    return 0
