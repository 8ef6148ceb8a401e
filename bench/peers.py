"""Other simulators on our networks: `python3 lab.py bench --peers`.

Each peer gets an environment of its own under `_build/peers`, because their pins exclude each
other; one that cannot be installed is skipped with a message. All read files written from the same
graph, convolutions and batch norms folded, each in a fresh process: `python -m bench.peers write
NETWORK FOLDER`, or `time FOLDER`. The machines they model differ (`NOTES`), so the cycles are
neighbours, not rivals; what compares is coverage, time and memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_lab.compiler import Graph, Node, compile_stages, simulate_graph, zoo
from ascend_lab.compiler.counts import node_macs
from ascend_lab.compiler.ir import operator_of
from ascend_lab.compiler.onnx import import_onnx
from ascend_lab.compiler.onnx.export import export_onnx
from ascend_lab.compiler.passes import run_passes
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.operators.ops.formats import pair
from ascend_lab.output import write_whole

HEADER = (
    "Layer name, IFMAP Height, IFMAP Width, Filter Height, Filter Width, Channels, "
    "Num Filter, Strides,"
)
CONFIG = """\
[general]
run_name = scalesim
[run_presets]
InterfaceBandwidth = CALC
UseRamulatorTrace = False
[architecture_presets]
ArrayHeight = 64
ArrayWidth = 64
IfmapSramSzkB = 64
FilterSramSzkB = 64
OfmapSramSzkB = 256
IfmapOffset = 0
FilterOffset = 10000000
OfmapOffset = 20000000
Dataflow = os
ReadRequestBuffer = 32
WriteRequestBuffer = 32
[layout]
IfmapCustomLayout = False
FilterCustomLayout = False
IfmapSRAMBankBandwidth = 10
IfmapSRAMBankNum = 10
IfmapSRAMBankPort = 2
FilterSRAMBankBandwidth = 10
FilterSRAMBankNum = 10
FilterSRAMBankPort = 2
[sparsity]
SparsitySupport = false
"""
"""SCALE-Sim's settings: one cube's multipliers; it names offsets and layouts even if unused."""


def layer_row(graph: Graph, node: Node) -> str:
    """Return a convolution or matrix product as a row of SCALE-Sim's, or "" if it has no form.

    The format has neither batches, groups, dilation nor padding, and one stride. SCALE-Sim rounds
    the windows up: the input is given as the (outputs - 1) * stride + filter lines they read.
    """
    out = graph.types[node.output].shape
    if node.op in ("matmul", "gemm") and len(out) == 2:
        inner = node_macs(graph, node) // (out[0] * out[1])
        return f"{out[0]}, {inner}, 1, {inner}, 1, {out[1]}, 1,"
    if node.op != "conv2d":
        return ""
    options = operator_of(node.op).settings(node.attrs)
    strides, spread = (pair(name, options[name]) for name in ("stride", "dilation"))
    filters, channels, *window = graph.types[node.inputs[1]].shape
    plain = out[0] == 1 and options["groups"] == 1 and spread == (1, 1)
    if not plain or strides[0] != strides[1]:
        return ""
    lines, columns = ((n - 1) * strides[0] + k for n, k in zip(out[2:], window, strict=True))
    sizes: list[Any] = [lines, columns, *window, channels, filters, strides[0]]
    return ", ".join(map(str, sizes)) + ","


def topology(graph: Graph) -> str:
    """Return SCALE-Sim's table of a graph's layers; layers that have no form are left out."""
    rows = [row for node in graph.nodes if (row := layer_row(graph, node))]
    # names are numbers: SCALE-Sim reads one with DP in it as depthwise
    return "\n".join([HEADER, *(f"{k}, {row}" for k, row in enumerate(rows)), ""])


def folded(graph: Graph) -> Graph:
    """Return the graph with its batch norms folded into convolutions, else as it is."""
    return run_passes(graph, ["ConvBatchnormFusionPass"])[0]


def write_files(network: str, folder: Path) -> None:
    """Write a model of the zoo for every tool, and `about.json`: its nodes and macs."""
    graph = folded(zoo.build(network))
    (folder / "model.onnx").write_bytes(export_onnx(graph).SerializeToString())
    texts = {
        "scalesim.topology": topology(graph),
        "scalesim.layout": "Layer name,\n",
        "scalesim.config": CONFIG,
        "about.json": json.dumps({"nodes": len(graph.nodes), "macs": zoo.macs(graph)}),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")


def one_core() -> Chip:
    """Return Ascend310 with one of its two cores: 4096 multiply-accumulates a cycle."""
    return dataclasses.replace(load_chip("Ascend310"), core_count=1)


def time_model(file: Path) -> dict[str, int]:
    """Return the cycles (without and of launches) of a model file on one core, and its nodes.

    Every node is timed, alone or fused: what cannot be raises a typed error.
    """
    graph = import_onnx(file)
    times = simulate_graph(compile_stages(graph, one_core()).compiled).operators
    launches = sum(op.timeline.launch_cycles for op in times)
    cycles = sum(op.timeline.cycles for op in times)
    return {"cycles": cycles, "launch_cycles": launches, "covered": len(graph.nodes)}


# -- the comparison ------------------------------------------------------------------------------


FOLDER = Path(__file__).parent.parent / "_build" / "peers"
NETWORKS = ("squeezenet", "resnet50")
"""A small and a large network of the zoo, one image of 224 x 224."""
LIMIT_S = 1200.0
OURS = "ascend_lab"

_ZIGZAG = """
import json, sys, zigzag
from pathlib import Path
from zigzag.api import get_hardware_performance_zigzag as run
inputs = Path(zigzag.__file__).parent / "inputs"
machine, mapping = inputs / "hardware/ascend_like.yaml", inputs / "mapping/ascend_like.yaml"
_, cycles, found = run(sys.argv[1] + "/model.onnx", str(machine), str(mapping), opt="latency",
    lpf_limit=4, dump_folder=sys.argv[1] + "/zigzag", loma_show_progress_bar=False)
print(json.dumps({"cycles": int(cycles), "covered": len(found[0][1])}))
"""
_SCALESIM = """
import sys
from scalesim.scale_sim import scalesim
sim = scalesim(save_disk_space=True, verbose=False, input_type_gemm=False,
    **{name: sys.argv[1] + "/scalesim." + name for name in ("config", "topology", "layout")})
sim.run_scale(top_path=sys.argv[1])
print(open(sys.argv[1] + "/scalesim/COMPUTE_REPORT.csv").read())
"""


@dataclass(frozen=True, slots=True)
class Peer:
    """A simulator to compare with: the packages it needs, and the program that runs it."""

    name: str
    pins: tuple[str, ...]
    macs_per_cycle: int
    configuration: str
    program: str


PEERS = (
    # zigzag-dse imports six without declaring it
    Peer(
        "ZigZag",
        ("zigzag-dse==3.9.1", "six==1.17.0"),
        1024,
        "zigzag-dse 3.9.1, its ascend_like machine (16x16x2x2) and mapping, lpf_limit 4",
        _ZIGZAG,
    ),
    # scalesim sets no upper bound, and fails on the scalars of numpy 2.4
    Peer(
        "SCALE-Sim",
        ("scalesim==3.0.0", "numpy<2.4"),
        4096,
        "scalesim 3.0.0, 64x64 output-stationary, 64/64/256 KB, bandwidth CALC, no traces",
        _SCALESIM,
    ),
)
NOTES = """\
Not comparable: the machines. Only ascend_lab models vector work, queues, flags and launches, on
one core with all of the chip's memory rate; its cycles leave launches out, as the others have none.
Numbers take two bytes here, one byte in the others. ZigZag's machine has a quarter of the
multipliers; its "64KB" input memories hold 65536 bits, 8 KB. SCALE-Sim's CALC assumes all the
bandwidth wanted: its buffers never stall; it has no padding, so strided inputs are trimmed to what
windows read. Neither times pooling, additions or activations.
use: multiply-accumulates of the network / (cycles x MAC/cycle); s, CPU s, MB: of a cold process."""


class PeerSkippedError(Exception):
    """A peer cannot be installed here; the message is one line."""


@dataclass(frozen=True, slots=True)
class Run:
    """A finished process: wall and processor seconds, largest memory, what it printed."""

    time_s: float
    cpu_s: float
    memory_bytes: int
    output: str
    code: int
    over_limit: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One tool on one network; `cycles` is None where it did not end, `problem` says why."""

    network: str
    tool: str
    macs_per_cycle: int
    cycles: int | None
    covered: int
    nodes: int
    macs: int
    time_s: float
    cpu_s: float
    memory_bytes: int
    problem: str = ""

    @property
    def utilisation(self) -> float:
        """Multiply-accumulates of the network / those of the machine in its cycles; 0 if none."""
        return self.macs / (self.cycles * self.macs_per_cycle) if self.cycles else 0.0


def measure(command: list[str], limit_s: float, log: Path) -> Run:
    """Run a command to its end or to the limit, its output into `log`.

    A child's largest memory never reads below its parent's: keep this process small.
    """
    late = threading.Event()
    start = time.perf_counter()
    with log.open("w", encoding="utf-8") as sink:
        child = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=_variables())

    def stop() -> None:
        late.set()
        child.kill()

    timer = threading.Timer(limit_s, stop)
    timer.start()
    try:
        _, status, usage = os.wait4(child.pid, 0)
    finally:
        timer.cancel()
    seconds = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    memory = int(usage.ru_maxrss) * (1 if sys.platform == "darwin" else 1024)
    output = log.read_text("utf-8", errors="replace")
    cpu_s = usage.ru_utime + usage.ru_stime
    return Run(seconds, cpu_s, memory, output, child.returncode, late.is_set())


def _variables() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}


def last_line(text: str) -> str:
    """Return the last line that says something: of a traceback, the error."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def environment(peer: Peer, folder: Path) -> Path:
    """Return the interpreter of a peer's environment, made on first use.

    Raises `PeerSkippedError` where it cannot be made: no network, no wheel for this Python.
    """
    home = folder / peer.name.lower()
    python = home / "bin" / "python"
    stamp = home / "pins.txt"
    wanted = "\n".join(peer.pins)
    if python.exists() and stamp.exists() and stamp.read_text("utf-8") == wanted:
        return python
    print(f"installing {' '.join(peer.pins)} into {home}", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    install = [str(python), "-m", "pip", "install", "-q", "--no-input"]
    install += ["--disable-pip-version-check", *peer.pins]
    for command in ([sys.executable, "-m", "venv", str(home)], install):
        try:
            subprocess.run(command, capture_output=True, text=True, env=_variables(), check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = str(getattr(error, "stderr", "")) + str(getattr(error, "stdout", ""))
            reason = (last_line(said) or str(error))[:160]
            raise PeerSkippedError(f"{peer.name} cannot be installed here ({reason})") from error
    stamp.write_text(wanted, "utf-8")
    return python


def counts_of(output: str) -> tuple[int, int]:
    """Return (cycles, layers covered) that a run printed; raise `ValueError` if it did not.

    Ours and ZigZag print one JSON line; SCALE-Sim a report with a row a layer, header first.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    if lines and lines[-1].startswith("{"):
        found = json.loads(lines[-1])
        return int(found["cycles"]), int(found["covered"])
    heads = [k for k, line in enumerate(lines) if line.startswith("LayerID,")]
    if not heads:
        raise ValueError(last_line(output) or "it printed nothing")
    column = [name.strip() for name in lines[heads[-1]].split(",")].index("Total Cycles")
    layers = [line.split(",") for line in lines[heads[-1] + 1 :]]
    return round(sum(float(layer[column]) for layer in layers)), len(layers)


def row_of(network: str, tool: str, macs_per_cycle: int, about: dict[str, int], run: Run) -> Row:
    """Return a run as a row of the table; `about` has the network's nodes and macs."""
    cycles = None
    covered = 0
    problem = ""
    try:
        if run.over_limit:
            problem = f"stopped at the limit of {run.time_s:.0f} s"
        elif run.code:
            problem = f"failed ({run.code}): {last_line(run.output)}"[:160]
        else:
            cycles, covered = counts_of(run.output)
    except (ValueError, KeyError, IndexError) as error:
        problem = f"no result: {error}"[:160]
    return Row(
        network=network,
        tool=tool,
        macs_per_cycle=macs_per_cycle,
        cycles=cycles,
        covered=covered,
        nodes=about["nodes"],
        macs=about["macs"],
        time_s=run.time_s,
        cpu_s=run.cpu_s,
        memory_bytes=run.memory_bytes,
        problem=problem,
    )


def table(rows: list[Row]) -> str:
    """Return the rows, ours of each network among them, as text; ">" marks lower bounds."""
    ours = {row.network: row for row in rows if row.tool == OURS}
    heads = f"{'MAC/cycle':>10}{'cycles':>11}{'use':>6}{'nodes':>9}{'s':>9}{'CPU s':>8}{'MB':>7}"
    lines = [f"{'network':<11}{'tool':<11}{heads}{'s / ours':>10}{'CPU / ours':>12}"]
    for r in rows:
        more = ">" if r.problem.startswith("stopped") else ""
        cycles = f"{r.cycles:,}" if r.cycles else "-"
        line = f"{r.network:<11}{r.tool:<11}{r.macs_per_cycle:>10}{cycles:>11}"
        line += f"{r.utilisation:>6.0%}" if r.cycles else f"{'-':>6}"
        line += f"{f'{r.covered}/{r.nodes}':>9}{f'{more}{r.time_s:.1f}':>9}{r.cpu_s:>8.1f}"
        us = ours[r.network]
        ratios = r.time_s / us.time_s, r.cpu_s / us.cpu_s
        line += f"{r.memory_bytes / 1e6:>7.0f}{f'{more}{ratios[0]:.0f}x':>10}"
        line += f"{f'{more}{ratios[1]:.0f}x':>12}"
        lines.append(line + (f"  {r.problem}" if r.problem else ""))
    return "\n".join(lines)


def bench_network(network: str, peers: dict[Peer, Path], limit_s: float) -> list[Row]:
    """Run us and the peers on one network, one after another; return a row each."""
    folder = FOLDER / network
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    itself = [sys.executable, "-m", "bench.peers"]
    subprocess.run([*itself, "write", network, str(folder)], check=True)
    about = json.loads((folder / "about.json").read_text("utf-8"))
    run = measure([*itself, "time", str(folder)], limit_s, folder / "ours.log")
    rows = [row_of(network, OURS, one_core().macs_per_cycle("fp16"), about, run)]
    if rows[0].problem:
        raise RuntimeError(f"ascend_lab on {network}: {rows[0].problem}")
    for peer, python in peers.items():
        print(f"running {peer.name} on {network} (limit {limit_s:.0f} s)", flush=True)
        log = folder / f"{peer.name.lower()}.log"
        run = measure([str(python), "-c", peer.program, str(folder)], limit_s, log)
        rows.append(row_of(network, peer.name, peer.macs_per_cycle, about, run))
    return rows


def report(limit_s: float = LIMIT_S, json_file: str | None = None) -> int:
    """Run the comparison and print it; peers that cannot be installed are skipped. Returns 0."""
    peers = {}
    for peer in PEERS:
        try:
            peers[peer] = environment(peer, FOLDER)
        except PeerSkippedError as error:
            print(f"skipped: {error}", flush=True)
    rows: list[Row] = []
    for network in NETWORKS:
        rows += bench_network(network, peers, limit_s)
        print("\n" + table(rows) + "\n", flush=True)
    print(f"{OURS}: Ascend310 with one core, fp16; it reads the ONNX file that ZigZag reads")
    for peer in peers:
        print(f"{peer.name}: {peer.configuration}")
    print(NOTES)
    if json_file:
        text = json.dumps([dataclasses.asdict(row) for row in rows], indent=2)
        write_whole(json_file, text)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write_files(sys.argv[2], Path(sys.argv[3]))
    else:
        print(json.dumps(time_model(Path(sys.argv[2]) / "model.onnx")))
