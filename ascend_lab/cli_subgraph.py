"""The verb `ascend-lab subgraph`: a schedule for a problem of the MLSys 2026 contest."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ascend_lab.cli_common import add_json, check_limit, check_seed, emit, refuse_idle
from ascend_lab.errors import InputError
from ascend_lab.limits import count, decimal, whole

if TYPE_CHECKING:
    from ascend_lab.aoe.contest import Solution

MOST_ROWS = 40


def add_subgraph(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser("subgraph", help="cut a graph into subgraphs that run from fast memory")
    verb.add_argument("file", metavar="PROBLEM.json", help="a problem in the MLSys 2026 format")
    verb.add_argument("--time-limit", type=decimal, default=10.0, metavar="S", help="seconds (10)")
    verb.add_argument(
        "--evaluations", type=count, metavar="N", help="price N subgraphs, whatever time it takes"
    )
    verb.add_argument("--seed", type=whole, default=0, help="seed of the search (0)")
    add_json(verb)
    verb.set_defaults(run=_subgraph)


def _subgraph(arguments: argparse.Namespace) -> int:
    _check_subgraph(arguments)
    from ascend_lab.aoe.contest import read_problem, solve

    problem = read_problem(arguments.file)
    seconds = arguments.time_limit if arguments.evaluations is None else None
    found = solve(problem, seconds, arguments.evaluations, arguments.seed)
    emit(arguments.json, found.as_dict(), _table(found, len(problem.operations)))
    return 0


def _table(found: Solution, operations: int) -> list[str]:
    """Return the schedule for a person to read, the first rows of it when it is long."""
    rows = ["subgraph   operations       w      h      k  retained        latency"]
    for number, (step, latency) in enumerate(zip(found.steps, found.latencies, strict=True)):
        if number == MOST_ROWS:
            rows.append(f"... and {len(found.steps) - MOST_ROWS} more")
            break
        w, h, k = step.granularity
        count = len(step.operations)
        kept = len(step.retain)
        rows.append(f"{number:8} {count:12} {w:7} {h:6} {k:6} {kept:9} {latency:14.1f}")
    best = "optimal for the tiles weighed" if found.proven else "best found"
    rows += [
        f"{operations} operations in {len(found.steps)} subgraphs: {best}",
        f"  cost            {found.cost:16.1f}",
        f"  lower bound     {found.lower_bound:16.1f}   cost / bound {found.ratio:.4f}",
        f"  unfused, found  {found.unfused:16.1f}",
        f"  unfused, ideal  {found.floor:16.1f}   every tensor of an operation moved once",
    ]
    return rows


def _check_subgraph(arguments: argparse.Namespace) -> None:
    """Refuse numbers that mean nothing."""
    check_limit(arguments.time_limit)
    check_seed(arguments.seed)
    if arguments.evaluations is not None:
        refuse_idle(arguments, "without --evaluations", "--time-limit")
        if arguments.evaluations < 0:
            raise InputError("--evaluations of at least 0", str(arguments.evaluations))
