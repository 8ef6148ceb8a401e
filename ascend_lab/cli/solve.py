"""The verbs that solve an optimisation problem read from a file.

    ascend-lab plan-memory buffers.csv       addresses for buffers, low and without overlap
    ascend-lab replay space.csv.gz           a search on a space whose times were measured
    ascend-lab subgraph problem.json         a graph cut into pieces that fit into fast memory
    ascend-lab strategy problem.json.gz      a strategy for each operator, within memory
    ascend-lab gradient-plan profile.csv ... gradients joined into all-reduces

Each verb prints how far from the optimum the answer can be.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ascend_lab.cli.common import JSON, Verb, check_least, check_limit, flag, refuse_idle
from ascend_lab.cli.printing import columns, emit
from ascend_lab.errors import InputError
from ascend_lab.limits import SEEDS, count, decimal, refuse_above, whole

if TYPE_CHECKING:
    from ascend_lab.aoe.gradient import AlphaBeta, Gradient
    from ascend_lab.cluster.parallel.strategy import Problem, Solution as Strategies
    from ascend_lab.lab.contest import Solution


MAX_ROWS = 40
"""Rows printed of an answer; the JSON has all of them."""
# Help below the flags of plan-memory: the columns of its file.
BUFFERS = (
    "A row a buffer, columns in any order: id; lower and upper, the steps of its life (upper is "
    "behind the last); size in bytes. Where wanted: alignment in bytes; offset, where it must lie; "
    'gaps, times in which it needs no bytes, "6-8 11-12" (steps 6, 7 and 11), or only a part of '
    'them, "6-8@0:4" (its first four). Methods: "best of" (all rules, then '
    "CP-SAT where OR-tools is installed), greedy-by-size, greedy-by-start, greedy-by-life, "
    "best-fit, l2, exact (rules and CP-SAT; needs OR-tools). The exit code is 1 where the buffers "
    "do not fit into --capacity."
)
STRATEGY_METHODS = ("auto", "exact", "heuristic")
# Help below the flags of gradient-plan: the two types of files that it reads.
PROFILES = (
    "CSV: a row a gradient in backward order, columns name, ready_us (from the start of backward), "
    "bytes and, where wanted, dtype. Trace: torch.profiler.profile(record_shapes=True) and "
    "export_chrome_trace; read are AccumulateGrad events (Input Dims, Input type) or all-reduces "
    "(In msg nelems, dtype) of the last step. How to record one stands in book/bring_your_own.md."
)


def _check_memory(arguments: argparse.Namespace) -> None:
    """Raise `InputError` for numbers out of range and unknown names."""
    check_limit(arguments.time_limit)
    check_least(arguments, "--seed")  # NumPy's generators take no negative seed
    from ascend_lab.compiler.memory import METHODS

    if arguments.method not in METHODS:
        raise InputError(f"--method as one of {', '.join(METHODS)}", repr(arguments.method))
    # The other methods are greedy rules, which draw nothing and end in milliseconds.
    if arguments.method not in ("best of", "exact"):
        searching = 'with a --method that searches ("best of", exact)'
        refuse_idle(arguments, searching, "--time-limit", "--seed")
    check_least(arguments, "--capacity", unit=" bytes")
    # On-chip memories are read in blocks of 32 bytes: offsets there are multiples of 32.
    if not 1 <= arguments.alignment <= 2**30:
        raise InputError("--alignment from 1 to 2**30 bytes", f"{arguments.alignment}", "e.g. 512")


def _plan_memory(arguments: argparse.Namespace) -> int:
    """Give every buffer of a file an offset; exit code 1 if they do not fit into --capacity."""
    _check_memory(arguments)
    from ascend_lab.compiler.memory import plan, verify
    from ascend_lab.compiler.memory_file import read_csv

    buffers = read_csv(arguments.file)
    capacity = arguments.capacity
    solution = plan(
        buffers,
        capacity,
        arguments.method,
        arguments.time_limit,
        arguments.alignment,
        arguments.seed,
    )
    # CP-SAT is not our code: its plan is checked for overlaps before it is printed.
    verify(solution, buffers, arguments.alignment)
    # A plan may be higher than the capacity: it is printed then, and the exit code says so.
    fits = capacity is None or solution.height_bytes <= capacity
    data = {
        "height_bytes": solution.height_bytes,
        "lower_bound_bytes": solution.lower_bound_bytes,
        "capacity_bytes": capacity,
        "fits": fits,
        "gap": solution.gap,
        "optimal": solution.optimal,
        "method": solution.method,
        "offsets": dict(solution.offsets),
    }
    bound_bytes = solution.lower_bound_bytes
    lowest = "no plan is lower" if solution.optimal else "a lower plan may exist"
    lines = [
        f"{len(buffers)} buffers in {solution.height_bytes} bytes by {solution.method}: {lowest}",
        f"  no plan takes less than {bound_bytes} bytes; gap to that {solution.gap:.2%}",
    ]
    if capacity is not None:
        verdict = "packed" if fits else "NOT packed"
        lines.append(f"  {verdict} into the capacity of {capacity} bytes")
    emit(arguments.json, data, lines)
    return 0 if fits else 1


def _replay(arguments: argparse.Namespace) -> int:
    """Run a search with many seeds on recorded times, and compare its best with the optimum."""
    for name in ("--budget", "--seeds"):
        check_least(arguments, name, 1)
    # Each seed replays the whole search.
    refuse_above("--seeds", arguments.seeds, SEEDS)
    from ascend_lab.aoe.drive import replay
    from ascend_lab.aoe.search import paced, search_named
    from ascend_lab.aoe.space import read_recorded

    # Annealing cools down until the budget ends.
    search = paced(search_named(arguments.search), arguments.budget)
    space = read_recorded(arguments.file)
    result = replay(space, search, arguments.budget, range(arguments.seeds))
    data = {
        "search": arguments.search,
        "budget": arguments.budget,
        "size": space.space.size,
        "optimum": result.optimum,
        "best_per_seed": list(result.best_per_seed),
        "evaluations_per_seed": list(result.evaluations_per_seed),
        # 1.03: half of the seeds end within 3 % of the optimum
        "median_ratio": result.median_ratio,
        "within_5_percent": result.share_within(0.05),
    }
    median = f"median of {arguments.seeds} seeds {result.median_ratio:.4f} times the optimum"
    lines = [
        (
            f"{arguments.search}: {median} of {result.optimum:g} ms after "
            f"{max(result.evaluations_per_seed)} of {space.space.size} trials"
        ),
        (
            f"  {result.share_within(0.05):.0%} of seeds within 5 %, "
            f"worst {max(result.best_per_seed) / result.optimum:.4f}"
        ),
    ]
    emit(arguments.json, data, lines)
    return 0


def _subgraph(arguments: argparse.Namespace) -> int:
    """Cut a graph into subgraphs, each computed tile by tile from fast memory."""
    check_limit(arguments.time_limit)
    check_least(arguments, "--seed")
    if arguments.evaluations is not None:
        refuse_idle(arguments, "without --evaluations", "--time-limit")
        check_least(arguments, "--evaluations")
    from ascend_lab.lab.contest import read_problem, solve

    problem = read_problem(arguments.file)
    # A count of evaluations ends the search equally on every machine; a time limit does not.
    seconds = arguments.time_limit if arguments.evaluations is None else None
    solution = solve(problem, seconds, arguments.evaluations, arguments.seed)
    emit(arguments.json, solution.as_dict(), _subgraph_table(solution, len(problem.operations)))
    return 0


SUBGRAPH_COLUMNS = {
    "subgraph": ">8",
    "operations": ">12",
    "w": ">7",
    "h": ">6",
    "k": ">6",
    "retained": ">9",
    "latency": ">14.1f",
}
"""w, h, k: width and height of a tile of the result, and how many terms of its sums are loaded."""


def _subgraph_table(solution: Solution, operations: int) -> list[str]:
    """Return the schedule as lines of text; of a long one only the first rows."""
    steps = list(zip(solution.steps, solution.latencies, strict=True))
    cells = [
        (number, len(step.operations), *step.granularity, len(step.retain), latency)
        for number, (step, latency) in enumerate(steps[:MAX_ROWS])
    ]
    rows = columns(SUBGRAPH_COLUMNS, cells)
    if len(steps) > MAX_ROWS:
        # a schedule of 500 steps: 40 rows and "... and 460 more"
        rows.append(f"... and {len(steps) - MAX_ROWS} more")
    best = "optimal for the tiles weighed" if solution.proven else "best found"
    rows += [
        f"{operations} operations in {len(solution.steps)} subgraphs: {best}",
        f"  cost            {solution.cost:16.1f}",
        f"  lower bound     {solution.lower_bound:16.1f}   cost / bound {solution.ratio:.4f}",
        f"  unfused, found  {solution.unfused:16.1f}",
        f"  unfused, ideal  {solution.floor:16.1f}   every tensor of an operation moved once",
    ]
    return rows


def _strategy(arguments: argparse.Namespace) -> int:
    """Choose a strategy for every operator at the least cost, within the limit of memory."""
    check_limit(arguments.time_limit)
    check_least(arguments, "--seed")
    if arguments.method not in STRATEGY_METHODS:
        raise InputError(f"--method among {', '.join(STRATEGY_METHODS)}", repr(arguments.method))
    from ascend_lab.cluster.parallel.strategy import read_problem, solve

    problem = read_problem(arguments.file)
    solution = solve(problem, arguments.time_limit, arguments.method, arguments.seed)
    emit(arguments.json, solution.as_dict(), _strategy_lines(problem, solution))
    return 0


def _strategy_lines(problem: Problem, solution: Strategies) -> list[str]:
    """Return the answer as lines of text; only the JSON lists the strategies themselves."""
    limit = problem.usage_limit
    share = f" = {solution.peak_usage / limit:.1%} of the limit {limit:,}" if limit else ""
    verdict = (
        "optimal, proven" if solution.proven else f"at most {solution.gap:.2%} above the optimum"
    )
    rows = [
        f"{problem.name or 'problem'}: {len(problem.nodes)} nodes, {len(problem.edges)} edges",
        f"  cost         {solution.cost:,}: {verdict} ({solution.method})",
        f"  lower bound  {solution.lower_bound:,}",
        f"  peak usage   {solution.peak_usage:,}{share}",
    ]
    if len(solution.strategies) <= MAX_ROWS:
        rows.append(f"  strategies   {list(solution.strategies)}")
    return rows


def _gradient(arguments: argparse.Namespace) -> int:
    """Split gradients into all-reduces so that the last one ends as early as possible.

    An all-reduce of n bytes takes alpha + beta n: few large ones pay alpha seldom, many small ones
    start early.
    """
    from ascend_lab.aoe import gradient
    from ascend_lab.aoe.gradient import planning, readers, splits

    check_least(arguments, "--seed")
    cost = gradient.AlphaBeta(arguments.alpha_us * 1e-6, arguments.beta_us_per_byte * 1e-6)
    rows = readers.read_profile(arguments.file)
    limit = arguments.max_bytes
    plan = gradient.plan(rows, cost, arguments.max_segments, max_bytes=limit)
    # The plan as HCCL takes it, in at most 8 segments.
    forms = planning.forms_of(plan, rows, cost, max_bytes=limit)
    # An all-reduce joins adjacent rows of the table: a row waits for all rows above in its segment.
    late = splits.out_of_order(rows)
    bound_s = gradient.bound(rows, cost, max_bytes=limit)
    facts = {"gradients": len(rows), "out_of_order": late, "bound_us": bound_s * 1e6}
    data = {**plan.as_dict(), **facts, "forms": forms.as_dict()}
    text = [*gradient.plan_table(plan, rows), gradient.bound_text(bound_s)]
    if late:
        text.append(f"  {late} gradients are ready before one above them: they wait for it")
    text += gradient.forms_text(forms)
    if searched := _searched(arguments, rows, cost):
        data["scenario"], lines = searched
        text += lines
    emit(arguments.json, data, text)
    return 0


def _searched(
    arguments: argparse.Namespace, rows: Sequence[Gradient], cost: AlphaBeta
) -> tuple[dict[str, Any], list[str]] | None:
    """Return a plan under disturbances as data and lines; None if no flag asks for any.

    With several streams, noisy times, or all-reduces that slow down the backward pass, no method
    here proves an optimum: plans are tried.
    """
    from ascend_lab.aoe.gradient import Scenario, improve

    disturbances = {
        name: getattr(arguments, name) for name in ("streams", "slowdown", "noise", "seed")
    }
    scenario = Scenario(cost, **disturbances)
    # All three at their defaults: one undisturbed stream, which the plan above solves.
    if scenario == Scenario(cost, seed=arguments.seed):
        refuse_idle(arguments, "with --streams, --slowdown or --noise", "--budget", "--seed")
        return None
    names = ("max_segments", "max_bytes", "budget", "seed")
    better = improve(rows, scenario, **{name: getattr(arguments, name) for name in names})
    data = {
        "streams": scenario.streams,
        "slowdown": scenario.slowdown,
        "noise": scenario.noise,
        "segments": [list(bucket) for bucket in better.segments],
        "end_us": better.end_s * 1e6,
        "plan_end_us": better.start_s * 1e6,
        "tried": better.tried,
        # no method proves an optimum under disturbances
        "optimal": False,
    }
    text = (
        f"with {scenario.streams} streams, slowdown {scenario.slowdown:g}, noise "
        f"{scenario.noise:g}: end {better.end_s * 1e6:.3f} us in {len(better.segments)} "
        f"segments (best of {better.tried} tried); the plan above ends at "
        f"{better.start_s * 1e6:.3f} us"
    )
    return data, [
        text,
        f"  last gradients: {[last_gradient for _, last_gradient in better.segments]}",
    ]


_SEARCHES = (
    "exhaustive, random, annealing, genetic (default), iterated-local, mcts, or branch-and-bound, "
    "which has no bounds here"
)
_BEYOND = "beyond one undisturbed stream (searched, not proven)"
VERBS = (
    Verb(
        "plan-memory",
        "give buffers with lifetimes their addresses",
        _plan_memory,
        (
            flag(
                "file",
                metavar="FILE.csv",
                help="rows of id,lower,upper,size; also alignment, offset, gaps",
            ),
            flag("--capacity", type=whole, metavar="N", help="bytes there are (default: any)"),
            flag("--time-limit", type=decimal, default=60.0, metavar="S", help="seconds (60)"),
            flag("--alignment", type=whole, default=1, metavar="A", help="of offsets, bytes (1)"),
            flag("--method", default="best of", metavar="M", help='see below ("best of")'),
            flag("--seed", type=whole, default=0, help="seed of the search (0)"),
            JSON,
        ),
        {"epilog": BUFFERS},
    ),
    Verb(
        "replay",
        "run a search on a recorded tuning space",
        _replay,
        (
            flag("file", metavar="SPACE.csv.gz", help="columns of parameters, then time_ms"),
            flag("--search", default="genetic", metavar="NAME", help=_SEARCHES),
            flag("--budget", type=count, default=500, metavar="N", help="trials (500)"),
            flag("--seeds", type=count, default=30, metavar="K", help="runs: seeds 0..K-1 (30)"),
            JSON,
        ),
    ),
    Verb(
        "subgraph",
        "cut a graph into subgraphs that run from fast memory",
        _subgraph,
        (
            flag("file", metavar="PROBLEM.json", help="a problem in the MLSys 2026 format"),
            flag("--time-limit", type=decimal, default=10.0, metavar="S", help="seconds (10)"),
            flag(
                "--evaluations",
                type=count,
                metavar="N",
                help="price N subgraphs, whatever time it takes",
            ),
            flag("--seed", type=whole, default=0, help="seed of the search (0)"),
            JSON,
        ),
    ),
    Verb(
        "strategy",
        "choose one strategy per operator, within memory",
        _strategy,
        (
            flag(
                "file",
                metavar="PROBLEM.json[.gz]",
                help="a problem in the ASPLOS 2025 IOPDDL format",
            ),
            flag("--time-limit", type=decimal, metavar="S", help="seconds (until proven)"),
            flag(
                "--method", default="auto", help="auto (default), exact (needs SciPy) or heuristic"
            ),
            flag("--seed", type=whole, default=0, help="seed of the heuristic (0)"),
            JSON,
        ),
    ),
    Verb(
        "gradient-plan",
        "split gradients into all-reduces, optimally",
        _gradient,
        (
            flag(
                "file",
                metavar="PROFILE",
                help="columns name, ready_us, bytes as .csv, or a PyTorch profiler trace as .json "
                "or .json.gz",
            ),
            flag(
                "--alpha-us",
                type=decimal,
                required=True,
                metavar="T",
                help="startup of an all-reduce, in us",
            ),
            flag(
                "--beta-us-per-byte",
                type=decimal,
                required=True,
                metavar="T",
                help="time of a byte, in us",
            ),
            flag("--max-segments", type=count, metavar="K", help="at most K (HCCL takes 8)"),
            flag(
                "--max-bytes",
                type=decimal,
                metavar="N",
                help="of a segment; a larger gradient is one by itself",
            ),
            flag(
                "--streams",
                type=count,
                default=1,
                metavar="S",
                help="all-reduces at once (1)",
                group=_BEYOND,
            ),
            flag(
                "--slowdown",
                type=decimal,
                default=0.0,
                metavar="F",
                help="part by which backward is slower while one runs, e.g. 0.3",
                group=_BEYOND,
            ),
            flag(
                "--noise",
                type=decimal,
                default=0.0,
                metavar="X",
                help="standard deviation of times, relative, e.g. 0.1",
                group=_BEYOND,
            ),
            flag(
                "--budget",
                type=count,
                default=1000,
                metavar="N",
                help="splits tried (1000)",
                group=_BEYOND,
            ),
            flag("--seed", type=whole, default=0, help="of noise and search (0)", group=_BEYOND),
            JSON,
        ),
        {"epilog": PROFILES},
    ),
)
