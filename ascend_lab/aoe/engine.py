"""The whole loop: a model, a chip and jobs in; a tuned network and its report out.

Job 1 slices the graph for L2, job 2 tunes operators; with both, slices come first, because the
shapes of operators are only final after slicing.
"""

from __future__ import annotations

import time
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
        return (self.baseline_s - self.result_s) / self.result_s

    @property
    def gap(self) -> float:
        """How far above the bound the result is: after / bound - 1."""
        return self.result_s / self.bound_s - 1.0


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
    settings, jobs, started = settings or Settings(), jobs_of(job), time.monotonic()
    chip = load_chip(chip) if isinstance(chip, str) else chip
    knowledge = bank if isinstance(bank, Knowledge) else Knowledge(bank)
    workers = executor if isinstance(executor, Workers) else workers_of(executor)
    front = front_stages(graph, chip, dtype=dtype)
    baseline = finish_stages(front, chip).compiled
    baseline_s = simulate_graph(baseline).time_s
    compiled, sliced, operators, outcomes = baseline, None, None, []
    if "1" in jobs:
        sliced, outcome = slice_network(front, chip, settings, knowledge, progress)
        outcomes.append(outcome)
        if sliced.plan.regions:
            graph, compiled = sliced.graph, compiled_slices(sliced.graph, chip)
    if "2" in jobs and not (sliced and sliced.interrupted):
        operators = tune_network(
            compiled, settings, knowledge, workers=workers, wanted=wanted, progress=progress
        )
        compiled = operators.compiled
    return Tuning(
        graph,
        compiled,
        jobs,
        sliced,
        operators,
        baseline_s,
        simulate_graph(compiled).time_s,
        network_bound(front.rewritten, chip),
        time.monotonic() - started,
        tuple(outcomes),
        tuple(knowledge.warnings),
    )
