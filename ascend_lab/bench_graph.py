"""Speed of the graph compiler, and what fusion saves: part of `lab.py bench`."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ascend_lab.bench_table import CHIPS, median_s
from ascend_lab.chip import Chip, load_chip
from ascend_lab.graph import (
    Graph,
    GraphBuilder,
    NetworkTimeline,
    compile_stages,
    simulate_graph,
    zoo,
)

NETWORKS = ("resnet50", "bert_base")


@dataclass(frozen=True, slots=True)
class ColdRun:
    """A fresh process: seconds from start to exit, and its largest resident memory."""

    time_s: float
    memory_bytes: int


def light_model(name: str) -> Path:
    """Return the file of a model that ships inside the onnx package."""
    import onnx

    folder = Path(str(onnx.__file__)).parent / "backend" / "test" / "data" / "light"
    return folder / f"light_{name}.onnx"


def cold_simulate(name: str, chip: str = "Ascend310") -> ColdRun:
    """Time `ascend-lab simulate` on a light model in a process of its own."""
    command = [sys.executable, "-m", "ascend_lab.cli_main", "simulate", str(light_model(name))]
    start = time.perf_counter()
    child = subprocess.Popen([*command, "--chip", chip, "--json", "-"], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise RuntimeError(f"simulate ended with {status}")
    return ColdRun(seconds, _resident_bytes(usage))


def _resident_bytes(usage: resource.struct_rusage) -> int:
    """Return the largest resident size; Linux counts it in KiB, macOS in bytes."""
    return int(usage.ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


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


@dataclass(frozen=True, slots=True)
class Saving:
    """A network without and with fusion: kernels, seconds, bytes.

    `gm_bytes` move between the cores and L2 or memory; `memory_bytes` cross the memory interface.
    """

    network: str
    chip: str
    kernels: tuple[int, int]
    time_s: tuple[float, float]
    gm_bytes: tuple[int, int]
    memory_bytes: tuple[int, int]


def _gm_bytes(times: NetworkTimeline) -> int:
    moved = (op.timeline.path_bytes for op in times.operators)
    return sum(n for paths in moved for pair, n in paths.items() if "GM" in pair)


def saving(network: str, chip: str) -> Saving:
    """Return what fusion saves, both sides timed as programs."""
    graph, target = zoo.build(network), load_chip(chip)
    plain, fused = (
        simulate_graph(compile_stages(graph, target, fusion=on).compiled) for on in (False, True)
    )
    return Saving(
        network,
        chip,
        (len(plain.operators), len(fused.operators)),
        (plain.time_s, fused.time_s),
        (_gm_bytes(plain), _gm_bytes(fused)),
        (plain.memory_bytes, fused.memory_bytes),
    )


def savings_table() -> str:
    """Return fused against unfused ResNet-50 and BERT-base on each chip, model results."""
    heads = f"{'kernels':>12}{'ms':>18}{'GM MB':>16}{'memory MB':>16}"
    lines = [f"{'batch 1':<13}{'chip':<13}{heads}"]
    for network in NETWORKS:
        for chip in CHIPS:
            s = saving(network, chip)
            kernels = f"{s.kernels[0]} -> {s.kernels[1]}"
            times = f"{s.time_s[0] * 1e3:.2f} -> {s.time_s[1] * 1e3:.2f}"
            moved = f"{s.memory_bytes[0] / 1e6:.0f} -> {s.memory_bytes[1] / 1e6:.0f}"
            near = f"{s.gm_bytes[0] / 1e6:.0f} -> {s.gm_bytes[1] / 1e6:.0f}"
            lines.append(f"{network:<13}{chip:<13}{kernels:>12}{times:>18}{near:>16}{moved:>16}")
    return "\n".join(lines)
