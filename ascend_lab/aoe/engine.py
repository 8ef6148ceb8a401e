"""The whole loop: a model, a chip and jobs in; a tuned network and its report out.

Job 1 slices the graph for L2, job 2 tunes operators; with both, slices come first, because the
shapes of operators are only final after slicing.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ascend_lab.aoe.bank import Knowledge, Outcome
from ascend_lab.aoe.network import Chosen, NetworkResult, tune_network
from ascend_lab.aoe.settings import Progress, Settings, jobs_of
from ascend_lab.aoe.slices import slice_network
from ascend_lab.aoe.subgraph import SubgraphResult, network_bound
from ascend_lab.aoe.subgraph import compiled as compiled_slices
from ascend_lab.aoe.workers import Workers, workers_of
from ascend_lab.chip import Chip, load_chip
from ascend_lab.graph import Compiled, Graph, simulate_graph
from ascend_lab.graph.pipeline import finish_stages, front_stages


@dataclass(frozen=True, slots=True)
class Tuning:
    """A tuned network: what each job found, and the times before and after (model results).

    `bound_s`: no slicing and no schedule is faster. `outcomes`: what became of the bank's entry for
    the slicing. `warnings` are the bank's.
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
) -> Tuning:
    """Tune a graph for a chip and return what was found; Ctrl-C keeps what was found so far.

    `job`: "1" subgraph, "2" operator, "1,2" both. `bank`: the custom bank's file; without one
    results are not stored, but the built-in bank is used. `executor`: serial, processes:N, or
    dask:ADDRESS. Raises as `compile_stages`, and `InputError` for unknown jobs or executors.
    """
    jobs = jobs_of(job)
    chip = load_chip(chip) if isinstance(chip, str) else chip
    with ExitStack() as own:  # what is opened here is closed here
        workers = executor
        if not isinstance(workers, Workers):
            workers = own.enter_context(workers_of(workers))
        knowledge = bank
        if not isinstance(knowledge, Knowledge):
            knowledge = own.enter_context(Knowledge(knowledge))
        run = _Run(chip, jobs, settings or Settings(), knowledge, workers, wanted, progress)
        return run.tune(graph, dtype)


@dataclass(frozen=True, slots=True)
class _Run:
    """Everything but the graph."""

    chip: Chip
    jobs: tuple[str, ...]
    settings: Settings
    knowledge: Knowledge
    workers: Workers
    wanted: Chosen | None
    progress: Progress | None

    def tune(self, graph: Graph, dtype: str) -> Tuning:
        """Run the jobs."""
        started, chip = time.monotonic(), self.chip
        settings, knowledge = self.settings, self.knowledge
        front = front_stages(graph, chip, dtype=dtype)
        baseline = finish_stages(front, chip).compiled
        baseline_s = simulate_graph(baseline).time_s
        compiled, sliced, operators, outcome = baseline, None, None, None
        if "1" in self.jobs:
            sliced, outcome = slice_network(front, chip, settings, knowledge, self.progress)
            if sliced.plan.regions:
                graph, compiled = sliced.graph, compiled_slices(sliced.graph, chip)
        if "2" in self.jobs and not (sliced and sliced.interrupted):
            operators = tune_network(
                compiled,
                settings,
                knowledge,
                workers=self.workers,
                wanted=self.wanted,
                progress=self.progress,
            )
            compiled = operators.compiled
        result_s = simulate_graph(compiled).time_s
        return Tuning(
            graph,
            compiled,
            self.jobs,
            sliced,
            operators,
            baseline_s,
            result_s,
            network_bound(front.rewritten, chip) if result_s else 0.0,
            time.monotonic() - started,
            (outcome,) if outcome else (),
            tuple(knowledge.warnings),
        )
