"""The verb `ascend-lab strategy`: strategies for a problem of the ASPLOS 2025 contest."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ascend_lab.cli_common import add_json, check_limit, check_seed, emit
from ascend_lab.errors import InputError
from ascend_lab.limits import decimal, whole

if TYPE_CHECKING:
    from ascend_lab.parallel.strategy import Problem, Solution

METHODS = ("auto", "exact", "heuristic")


def add_strategy(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser("strategy", help="choose one strategy per operator, within memory")
    verb.add_argument(
        "file", metavar="PROBLEM.json[.gz]", help="a problem in the ASPLOS 2025 IOPDDL format"
    )
    verb.add_argument("--time-limit", type=decimal, metavar="S", help="seconds (until proven)")
    verb.add_argument(
        "--method", default="auto", help="auto (default), exact (needs SciPy) or heuristic"
    )
    verb.add_argument("--seed", type=whole, default=0, help="seed of the heuristic (0)")
    add_json(verb)
    verb.set_defaults(run=_strategy)


def _strategy(arguments: argparse.Namespace) -> int:
    _check_strategy(arguments)
    from ascend_lab.parallel.strategy import read_problem, solve

    problem = read_problem(arguments.file)
    found = solve(problem, arguments.time_limit, arguments.method, arguments.seed)
    emit(arguments.json, found.as_dict(), _lines(problem, found))
    return 0


def _lines(problem: Problem, found: Solution) -> list[str]:
    """Return the answer for a person to read; the strategies themselves only in JSON."""
    limit = problem.usage_limit
    share = f" = {found.peak_usage / limit:.1%} of the limit {limit:,}" if limit else ""
    verdict = "optimal, proven" if found.proven else f"at most {found.gap:.2%} above the optimum"
    rows = [
        f"{problem.name or 'problem'}: {len(problem.nodes)} nodes, {len(problem.edges)} edges",
        f"  cost         {found.cost:,}: {verdict} ({found.method})",
        f"  lower bound  {found.lower_bound:,}",
        f"  peak usage   {found.peak_usage:,}{share}",
    ]
    if len(found.strategies) <= 40:
        rows.append(f"  strategies   {list(found.strategies)}")
    return rows


def _check_strategy(arguments: argparse.Namespace) -> None:
    """Refuse numbers and words that mean nothing."""
    check_limit(arguments.time_limit)
    check_seed(arguments.seed)
    if arguments.method not in METHODS:
        raise InputError(f"--method among {', '.join(METHODS)}", repr(arguments.method))
