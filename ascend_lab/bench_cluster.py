"""Clusters: speed of timed collectives and steps, and what published figures say of the model."""

from __future__ import annotations

import subprocess
import sys
import time

from ascend_lab.bench_table import Figure
from ascend_lab.cluster import load_topology
from ascend_lab.cluster.collectives import collective_time, make
from ascend_lab.cluster.fit import held_out, mape
from ascend_lab.cluster.tables import read_table
from ascend_lab.cluster.timing import time_collective
from ascend_lab.data import data_path
from ascend_lab.train.validation import training_validation_table

DEVICES, SIZES = 1024, tuple(2**k for k in range(10, 26))
TABLE = data_path("deepbench/allreduce_measured.csv")
LARGE_BYTES, ERROR_LIMIT = 1e6, 0.12
STEP = """
import time
from ascend_lab.cluster import load_topology
from ascend_lab.graph.zoo import build
from ascend_lab.train.repeated import profile_layers
from ascend_lab.train.timeline import all_reduce_cost, step_timeline

start = time.process_time()
profile = profile_layers(
    lambda layers: build("bert_large", batch=8, layers=layers), 24, "Ascend910A", optimizer="adam"
)
middle = time.process_time()
step_timeline(profile, all_reduce_cost(load_topology("910a-server")))
print(middle - start, time.process_time() - middle)
"""


def cluster_figures() -> list[Figure]:
    """Return what `lab.py bench` prints of clusters; prints the published table on the way."""
    print("\n" + training_validation_table() + "\n")
    return [*collective_figures(), *step_figures(), *fit_figures()]


def collective_figures() -> list[Figure]:
    """Time the hierarchical all-reduce of 1024 devices at 16 sizes, and the choice of the best."""
    found: list[Figure] = []
    for kind in ("910a-roce", "910b-roce"):
        cluster = load_topology(f"{kind}:{DEVICES}")
        start = time.perf_counter()
        plan = make("all_reduce", "hierarchical", cluster)
        for size in SIZES:
            time_collective(plan, cluster, size)
        one_s = time.perf_counter() - start
        for size in SIZES:
            collective_time("all_reduce", cluster, size)
        all_s = time.perf_counter() - start - one_s
        name = f"{kind}:{DEVICES} hierarchical all-reduce, {len(SIZES)} sizes"
        found.append(Figure(name, f"{one_s:.1f} s", "< 5 s", one_s < 5))
        found.append(Figure(f"{name}, best of all", f"{all_s:.1f} s", "information", None))
    return found


def step_figures() -> list[Figure]:
    """Time a BERT-large step of 8 devices in a fresh process: profile, then timeline."""
    done = subprocess.run(
        [sys.executable, "-c", STEP], capture_output=True, text=True, check=True, timeout=600
    )
    profile_s, timeline_s = map(float, done.stdout.split())
    name = "BERT-large on 8 devices, processor time"
    return [
        Figure(f"{name}: timeline of a step", f"{timeline_s:.2f} s", "< 2 s", timeline_s < 2),
        Figure(f"{name}: with its profile", f"{profile_s + timeline_s:.1f} s", "< 2 s", None),
    ]


def fit_figures() -> list[Figure]:
    """Return the errors on left-out sizes of the measured all-reduces, per band of sizes."""
    found: list[Figure] = []
    for device in ("NV_P100", "NV_M40"):
        judged = held_out(read_table(TABLE, device=device, max_ranks=8))
        large = mape(j for j in judged if j.row.size_bytes >= LARGE_BYTES)
        small = mape(j for j in judged if j.row.size_bytes < LARGE_BYTES)
        assert large is not None and small is not None
        name = f"all-reduce fit, {device}, 2-8 ranks, left-out sizes"
        found.append(Figure(f"{name} >= 1 MB", f"{large:.1%}", "<= 12 %", large <= ERROR_LIMIT))
        found.append(Figure(f"{name} < 1 MB", f"{small:.1%}", "information", None))
    return found
