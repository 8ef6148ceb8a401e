"""How good the gradient tuner is and how fast: part of `lab.py bench`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab.aoe.bank import Knowledge
from ascend_lab.aoe.gradient import (
    BASELINES,
    AlphaBeta,
    Gradient,
    GradientTuning,
    ProfileSource,
    Scenario,
    evaluate,
    improve,
    plan,
    tune_gradients,
)
from ascend_lab.aoe.gradient.scenario import scorer
from ascend_lab.aoe.gradient.splits import best_split, brute_force, price_of, table_of
from ascend_lab.compiler import zoo
from bench.table import Figure, below, median_s

NETWORKS = {
    "resnet18": 32,
    "resnet50": 32,
    "densenet121": 16,
    "inception_v1": 32,
    "mobilenet_v2": 32,
    "squeezenet": 32,
    "vgg16": 16,
    "vit_b16": 16,
    "bert_base": 8,
    "gpt2_small": 4,
}
"""Networks and images or sequences a device."""
CLUSTERS = ("910a-roce", "ethernet-25g")
SIZES = (8, 64, 512)
CHIP = "Ascend910A"
PROFILES = Path("_build") / "gradients.db"
ALPHA_BETA = AlphaBeta(3e-4, 1e-10)


def chain(count: int, seed: int = 0) -> tuple[Gradient, ...]:
    """Return gradients with log-normal sizes and exponential gaps; sending takes half the time."""
    rng = np.random.default_rng(seed)
    ready = np.cumsum(rng.exponential(0.1 / count, count)).tolist()
    sizes = rng.lognormal(0.0, 2.0, count)
    whole = (sizes / sizes.sum() * 5e8).astype(int).tolist()
    return tuple(Gradient(f"g{i}", t, n) for i, (t, n) in enumerate(zip(ready, whole, strict=True)))


def plan_s(count: int, max_segments: int | None = None) -> float:
    """Return the seconds of the dynamic program alone, median."""
    table = table_of(chain(count))
    price = price_of(ALPHA_BETA)
    return median_s(lambda: best_split(table, price, max_segments), 9)


def exact_cases(count: int = 200) -> int:
    """Return in how many random cases the plan is not as good as the best of all splits."""
    wrong = 0
    for seed in range(count):
        rows = chain(2 + seed % 10, seed)
        cost = AlphaBeta(ALPHA_BETA.alpha_s * 2.0 ** (seed % 12), ALPHA_BETA.beta_s_per_byte)
        table = table_of(rows)
        price = price_of(cost)
        undisturbed = scorer(table, Scenario(cost))
        _, best = brute_force(table, undisturbed)
        wrong += abs(best_split(table, price)[1] / best - 1) > 1e-9
    return wrong


def beyond(cases: int = 12, count: int = 9) -> tuple[float, float]:
    """Return the plan's mean gap and the search's worst to the best of all splits.

    Small cases with two streams, slowed backward and noise.
    """
    planned = []
    searched = []
    for seed in range(cases):
        rows = chain(count, seed)
        cost = AlphaBeta(ALPHA_BETA.alpha_s * 10, ALPHA_BETA.beta_s_per_byte)
        scenario = Scenario(cost, streams=2, sharing=0.5, slowdown=0.3, noise=0.1, samples=4)
        _, best = brute_force(table_of(rows), scorer(table_of(rows), scenario))
        found = improve(rows, scenario, budget=100)
        planned.append(evaluate(plan(rows, cost).segments, rows, scenario) / best - 1)
        searched.append(found.end_s / best - 1)
    return statistics.mean(planned), max(searched)


def tuned(names: Sequence[str], file: Path = PROFILES) -> Iterator[tuple[str, GradientTuning]]:
    """Yield cluster and tuning of each network, cluster and size; profiles are kept in `file`."""
    file.parent.mkdir(exist_ok=True)
    with Knowledge(file, None) as bank:
        for name in names:
            graph = zoo.build(name, batch=NETWORKS[name])
            for cluster in CLUSTERS:
                for size in SIZES:
                    where = f"{cluster}:{size}"
                    settings = {"dtype": "fp16", "optimizer": "sgd"}
                    source = ProfileSource(bank, settings=settings)
                    yield (
                        where,
                        tune_gradients(graph, CHIP, where, max_segments=None, source=source),
                    )


def row_of(where: str, found: GradientTuning) -> dict[str, Any]:
    """Return a line of the table as data; gains are of the step, (before - after) / after."""
    return {
        "network": found.name,
        "cluster": where,
        "step_s": found.step_s(),
        "tail_s": found.plan.tail_s,
        "scaling": found.scaling,
        "segments": len(found.plan.segments),
        "bound_gap": found.plan.end_s / found.bound_s - 1 if found.bound_s else 0.0,
        "hccl_loss": found.forms.hccl.end_s / found.plan.end_s - 1,
        "ddp_cap_mib": found.forms.ddp_cap_mib,
        "gains": {name: found.gain(name) for name in BASELINES},
    }


HEAD = (
    f"{'network':<14}{'cluster':<18}{'step ms':>9}{'tail ms':>9}{'scaling':>8}{'parts':>6}"
    + "".join(f"{name[:9]:>11}" for name in BASELINES)
)


def line_of(row: dict[str, Any]) -> str:
    """Return a line of the table."""
    gains = "".join(f"{gain:>11.2%}" for gain in row["gains"].values())
    return (
        f"{row['network']:<14}{row['cluster']:<18}{row['step_s'] * 1e3:>9.2f}"
        f"{row['tail_s'] * 1e3:>9.2f}{row['scaling']:>8.1%}{row['segments']:>6}{gains}"
    )


def table(names: Sequence[str], file: Path = PROFILES) -> list[dict[str, Any]]:
    """Print the table of networks, clusters and baselines, and return its rows."""
    print(HEAD)
    rows = []
    for where, found in tuned(names, file):
        rows.append(row_of(where, found))
        print(line_of(rows[-1]), flush=True)
    for name, pick in (("mean gain of the step", statistics.mean), ("largest", max)):
        gains = [pick(row["gains"][other] for row in rows) for other in BASELINES]
        print(f"{name:<64}" + "".join(f"{gain:>11.2%}" for gain in gains))
    return rows


def gradient_figures() -> list[Figure]:
    """Return what `lab.py bench` prints; prints the table of networks and clusters."""
    free_s = plan_s(1000)
    eight_s = plan_s(1000, 8)
    wrong = exact_cases()
    plan_gap, worst_gap = beyond()
    whole_s = median_s(lambda: plan(chain(1000), ALPHA_BETA), 1)
    print()
    rows = table(tuple(NETWORKS))
    print()
    worse = sum(min(row["gains"].values()) < -1e-9 for row in rows)
    return [
        below("gradient DP, 1000 tensors", free_s, 0.05),
        below("  in at most 8 segments", eight_s),
        below("  with all baselines", whole_s),
        Figure("  not the best of all splits", f"{wrong} of 200", "0", wrong == 0),
        Figure("  worse than a baseline", f"{worse} of {len(rows)}", "0", worse == 0),
        Figure("  two streams: plan's mean gap", f"{plan_gap:.2%}", "", None),
        Figure("  two streams: search's gap", f"{worst_gap:.2%}", "<= 1 %", worst_gap <= 0.01),
    ]
