"""Speed of the graph compiler, and what fusion saves: part of `lab.py bench`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ascend_lab.compiler import Graph, GraphBuilder, compile_stages, simulate_graph, zoo
from ascend_lab.compiler.memory import plan, simulate_writes, verify
from ascend_lab.compiler.memory_file import read_csv
from ascend_lab.compiler.network import NetworkTimeline
from ascend_lab.data import data_path
from ascend_lab.machine.chip import Chip, load_chip
from bench.table import CHIPS, Figure, median_s

NETWORKS = ("resnet50", "bert_base")


def light_model(name: str) -> Path:
    """Return the file of a model that ships inside the onnx package."""
    import onnx

    folder = Path(str(onnx.__file__)).parent / "backend" / "test" / "data" / "light"
    return folder / f"light_{name}.onnx"


def cold_simulate(name: str, chip: str = "Ascend310") -> tuple[float, int]:
    """Return wall seconds and largest memory (bytes) of `ascend-lab simulate` on a light model."""
    command = [sys.executable, "-m", "ascend_lab", "simulate", str(light_model(name))]
    start = time.perf_counter()
    child = subprocess.Popen([*command, "--chip", chip, "--json", "-"], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise RuntimeError(f"simulate ended with {status}")
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB, macOS in bytes
    return time.perf_counter() - start, int(usage.ru_maxrss) * unit


def warm_simulate_s(name: str, chip: Chip) -> float:
    """Return seconds to time a compiled network again."""
    compiled = compile_stages(zoo.build(name), chip).compiled
    return median_s(lambda: simulate_graph(compiled), 5)


def chain(nodes: int) -> Graph:
    """Return a network of `nodes` nodes: residual blocks of conv, relu, conv, add, relu."""
    net = GraphBuilder("chain")
    x = net.input("x", (1, 16, 28, 28))
    weight = net.weight((16, 16, 3, 3))
    for _ in range(nodes // 5):
        y = net.conv2d(net.relu(net.conv2d(x, weight, pad=1)), weight, pad=1)
        x = net.relu(net.add(x, y))
    net.output(x)
    return net.build()


def chain_s(nodes: int, chip: Chip) -> float:
    """Return seconds to build, compile and time a chain of nodes."""
    start = time.perf_counter()
    simulate_graph(compile_stages(chain(nodes), chip).compiled)
    return time.perf_counter() - start


def savings_table() -> str:
    """Return fused against unfused ResNet-50 and BERT-base on each chip, model results.

    GM bytes move between the cores and L2 or memory; memory bytes cross the memory interface.
    """
    heads = f"{'kernels':>12}{'ms':>18}{'GM MB':>16}{'memory MB':>16}"
    lines = [f"{'batch 1':<13}{'chip':<13}{heads}"]
    for network, chip in product(NETWORKS, CHIPS):
        graph = zoo.build(network)
        target = load_chip(chip)
        plain, fused = (
            simulate_graph(compile_stages(graph, target, fusion=on).compiled)
            for on in (False, True)
        )
        cells = [
            (f"{len(plain.operators)} -> {len(fused.operators)}", 12),
            (f"{plain.time_s * 1e3:.2f} -> {fused.time_s * 1e3:.2f}", 18),
            (f"{_gm_bytes(plain) / 1e6:.0f} -> {_gm_bytes(fused) / 1e6:.0f}", 16),
            (f"{plain.memory_bytes / 1e6:.0f} -> {fused.memory_bytes / 1e6:.0f}", 16),
        ]
        lines.append(f"{network:<13}{chip:<13}" + "".join(f"{c:>{w}}" for c, w in cells))
    return "\n".join(lines)


def _gm_bytes(times: NetworkTimeline) -> int:
    moved = (op.timeline.path_bytes for op in times.operators)
    return sum(n for paths in moved for pair, n in paths.items() if "GM" in pair)


# -- the challenging MiniMalloc instances, packed on one core --------------------------------------
CAPACITY_BYTES = 1_048_576
TIME_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Packing:
    """What the planner reached on one instance."""

    name: str
    buffers: int
    height_bytes: int
    lower_bound_bytes: int
    method: str
    optimal: bool
    time_s: float

    @property
    def over(self) -> float:
        """Return the height over the capacity, minus 1; at most 0 when it is packed."""
        return self.height_bytes / CAPACITY_BYTES - 1


def measure(names: Sequence[str] = "ABCDEF", time_limit_s: float = TIME_LIMIT_S) -> list[Packing]:
    """Plan each instance, check the plan on real bytes, and return what was reached.

    The planner runs in one thread.
    """
    rows = []
    for name in names:
        buffers = read_csv(data_path(f"minimalloc/{name}.{CAPACITY_BYTES}.csv"))
        start = time.perf_counter()
        found = plan(buffers, CAPACITY_BYTES, time_limit_s=time_limit_s)
        taken = time.perf_counter() - start
        verify(found, buffers)
        simulate_writes(buffers, found)
        high = found.height_bytes
        bound = found.lower_bound_bytes
        rows.append(Packing(name, len(buffers), high, bound, found.method, found.optimal, taken))
    return rows


def report(rows: Sequence[Packing]) -> str:
    """Return the table as text."""
    lines = [f"memory plans into {CAPACITY_BYTES} bytes, at most {TIME_LIMIT_S:.0f} s each"]
    for row in rows:
        verdict = "packed" if row.over <= 0 else f"{row.over:.1%} over"
        lines.append(
            f"  {row.name} {row.buffers:4d} buffers  height {row.height_bytes:8d}  "
            f"{verdict:10s} {row.time_s:6.2f} s  {row.method}"
        )
    return "\n".join(lines)


def memory_figures() -> list[Figure]:
    """Return what `lab.py bench` prints: how many are packed, how far above the others are."""
    rows = measure()
    packed = sum(row.over <= 0 for row in rows)
    worst = max((row.over for row in rows), default=0.0)
    print("\n" + report(rows) + "\n")
    return [
        Figure("MiniMalloc instances packed", f"{packed} of {len(rows)}", ">= 4 of 6", packed >= 4),
        Figure("  the others above capacity", f"{max(worst, 0.0):.1%}", "<= 5 %", worst <= 0.05),
    ]
