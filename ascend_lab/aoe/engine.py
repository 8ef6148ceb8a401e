"""The whole loop: a model, a chip and jobs in; a tuned network and its report out.

Job 1 slices the graph for L2, from the bank or by search; job 2 tunes operators. With both, slices
come first, because the shapes of operators are only final after slicing.
"""

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ascend_lab.aoe.bank import BankEntry, BankKey, Knowledge, Outcome, settle
from ascend_lab.aoe.drive import OVERALL, Progress, Settings, jobs_of
from ascend_lab.aoe.network import Chosen, NetworkResult, tune_network
from ascend_lab.aoe.subgraph import SlicePlan, SubgraphResult, planned, tune_subgraph
from ascend_lab.aoe.workers import Deadline, Workers, workers_of
from ascend_lab.chip import Chip, load_chip
from ascend_lab.errors import AscendLabError
from ascend_lab.graph import Compiled, Graph, NetworkTimeline, bound_of, ledger, simulate_graph
from ascend_lab.graph.canonical import canonical
from ascend_lab.graph.compile import Front, Road, finish_stages, front_stages
from ascend_lab.graph.lower import piece_of

TAIL = 0.5
"""Share of the seconds of the first compile that is kept for the last ones, and for saving."""
SLICES = 0.9
"""Share of a limited time that slices may take before operators are tuned: they gain more."""
_LATE = "reading and compiling took the time limit of {:g} s: nothing was tuned"


@dataclass(frozen=True, slots=True)
class Tuning:
    """A tuned network: what each job found, and the times before and after (model results).

    `bound_s`: no slicing and no schedule is faster. `outcomes`: what became of the bank's entry for
    the slicing. `warnings` are the bank's. The ledgers say where the seconds before and after go.
    """

    graph: Graph
    compiled: Compiled
    jobs: tuple[str, ...]
    subgraph: SubgraphResult | None
    operators: NetworkResult | None
    baseline_s: float
    result_s: float
    bound_s: float
    spent_s: float
    outcomes: tuple[Outcome, ...] = ()
    warnings: tuple[str, ...] = ()
    ledger_before: Mapping[str, float] = field(default_factory=dict)
    ledger_after: Mapping[str, float] = field(default_factory=dict)

    @property
    def interrupted(self) -> bool:
        """Whether the user stopped it."""
        return any(job is not None and job.interrupted for job in (self.subgraph, self.operators))

    @property
    def gain(self) -> float:
        """Improvement as the published reports print it: (before - after) / after."""
        return (self.baseline_s - self.result_s) / self.result_s if self.result_s else 0.0

    @property
    def gap(self) -> float:
        """How far above the bound the result is: after / bound - 1."""
        return self.result_s / self.bound_s - 1.0 if self.bound_s else 0.0


def tune(
    graph: Graph,
    chip: Chip | str,
    job: str = "2",
    *,
    settings: Settings | None = None,
    bank: Knowledge | str | Path | None = None,
    executor: Workers | str = "serial",
    dtype: str = "fp16",
    wanted: Chosen | None = None,
    progress: Progress | None = None,
    deadline: Deadline | None = None,
) -> Tuning:
    """Tune a graph for a chip and return what was found; Ctrl-C keeps what was found so far.

    The settings' limit holds for all of it, from now on or as the `deadline` says; a compile of the
    network as it is, at least, is done.

    `job`: "1" subgraph, "2" operator, "1,2" both. `bank`: the custom bank's file; without one
    results are not stored, but the built-in bank is used. `executor`: serial, processes:N, or
    dask:ADDRESS. Raises as `compile_stages`, and `InputError` for unknown jobs or executors.
    """
    jobs, settings = jobs_of(job), settings or Settings()
    deadline = deadline or Deadline.of(settings.time_limit_s)
    chip = load_chip(chip) if isinstance(chip, str) else chip
    with ExitStack() as own:  # what is opened here is closed here
        if not isinstance(executor, Workers):
            executor = own.enter_context(workers_of(executor))
        if not isinstance(bank, Knowledge):
            bank = own.enter_context(Knowledge(bank))
        told = progress or (lambda *_: None)
        run = _Jobs(chip, jobs, settings, bank, executor, wanted, told, deadline)
        return run.tune(graph, dtype)


@dataclass(frozen=True, slots=True)
class _Jobs:
    """Everything but the graph."""

    chip: Chip
    jobs: tuple[str, ...]
    settings: Settings
    knowledge: Knowledge
    workers: Workers
    wanted: Chosen | None
    progress: Progress
    deadline: Deadline

    def tune(self, graph: Graph, dtype: str) -> Tuning:
        """Run the jobs."""
        started = time.monotonic()
        chip, settings, knowledge = self.chip, self.settings, self.knowledge
        front, baseline, before = self._compiled(graph, dtype)
        # what ends a run is done on the same network: it takes less than what began it
        deadline = self.deadline.keeping(TAIL * (time.monotonic() - started))
        late = (_LATE.format(settings.time_limit_s),) if deadline.over else ()
        compiled, sliced, operators, outcome = baseline, None, None, None
        if "1" in self.jobs:
            both = "2" in self.jobs and not math.isinf(deadline.end)
            own = deadline.within(SLICES * deadline.left_s) if both else deadline
            sliced, outcome = slice_network(front, chip, settings, knowledge, self.progress, own)
            if sliced.plan != SlicePlan():
                graph = sliced.graph if sliced.plan.regions else graph
                compiled = sliced.compiled
        if "2" in self.jobs and not (sliced and sliced.interrupted):
            operators = tune_network(
                compiled, settings, knowledge, workers=self.workers, wanted=self.wanted,
                progress=self.progress, deadline=deadline,
            )  # fmt: skip
            compiled = operators.compiled
        after, bound = simulate_graph(compiled), bound_of(front.rewritten, chip)
        return Tuning(
            graph, compiled, self.jobs, sliced, operators, before.time_s, after.time_s,
            bound.time_s, time.monotonic() - started, (outcome,) if outcome else (),
            (*knowledge.warnings, *late), ledger(before, bound), ledger(after, bound),
        )  # fmt: skip

    def _compiled(self, graph: Graph, dtype: str) -> tuple[Front, Compiled, NetworkTimeline]:
        """Return the network as it is and its times."""
        self.progress(OVERALL, 0, 3, "")
        self.progress("compile", 0, 3, "")
        front = front_stages(graph, self.chip, Road(dtype=dtype))
        self.progress("compile", 1, 3, "")
        baseline = finish_stages(front, self.chip).compiled
        self.progress("compile", 2, 3, "")
        times = simulate_graph(baseline)
        self.progress("compile", 3, 3, "")
        self.progress(OVERALL, 1, 3, "")
        return front, baseline, times


# -- job 1, a whole network -----------------------------------------------------------------------


def slice_network(
    front: Front,
    chip: Chip,
    settings: Settings,
    knowledge: Knowledge,
    progress: Progress,
    deadline: Deadline,
) -> tuple[SubgraphResult, Outcome | None]:
    """Return the slicing of a network, and what became of the bank: nothing if it was stopped."""
    graph = canonical(front.rewritten, chip)
    key = key_of_graph(graph, chip)
    known = None if settings.repeat else knowledge.find(key)
    if known and (plan := _from_bank(graph, chip, known[0])):
        return plan, "hit"
    try:
        found = tune_subgraph(front, chip, time_limit_s=deadline.limit_s, progress=progress)
    except KeyboardInterrupt:  # before any plan was timed
        found = replace(planned(graph, SlicePlan(), chip), interrupted=True)
    if found.interrupted:
        return found, None
    cycles = (found.before_s, found.after_s, found.bound_s)
    before, after, bound = (round(t * chip.clock_hz) for t in cycles)
    entry = BankEntry(
        key, numbered(found.plan, graph), before, min(after, before), min(bound, after), False,
        "dynamic programming, descent", settings.seed, found.tried,
    )  # fmt: skip
    return found, settle(knowledge, entry)


def key_of_graph(graph: Graph, chip: Chip) -> BankKey:
    """Return the bank's key of a network, whatever its names, however reshapes are spelled."""
    nodes = list(graph.nodes)
    for i, node in enumerate(nodes):
        if node.op == "reshape":
            shape = graph.types[node.output].shape
            nodes[i] = replace(node, attrs={**node.attrs, "shape": shape})
    return BankKey.of(chip, "graph", "network", piece_of(graph, nodes).key)


def numbered(plan: SlicePlan, graph: Graph) -> dict[str, Any]:
    """Return a plan as the bank keeps it: nodes by their place in the graph."""
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    data = plan.plain()
    rows = [row | {end: place[row[end]] for end in ("first", "last")} for row in data["regions"]]
    return data | {"regions": rows}


def named(data: Mapping[str, Any], graph: Graph) -> SlicePlan:
    """Return the plan that `numbered` wrote, for a graph with these nodes in this order."""
    names = [node.name for node in graph.nodes]
    rows = [{**r, **{end: names[r[end]] for end in ("first", "last")}} for r in data["regions"]]
    return SlicePlan.of({**data, "regions": rows})


def _from_bank(graph: Graph, chip: Chip, entry: BankEntry) -> SubgraphResult | None:
    """Return the plan of a bank, timed again; None if it is slower than the whole network now."""
    try:
        found = planned(graph, named(entry.schedule, graph), chip)
    except (AscendLabError, LookupError, TypeError):  # a plan for another graph, or none at all
        return None
    return None if found.after_s > found.before_s else found
