"""Speed of the simulators, of candidates, of imports and of the chapters."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim import (
    Surroundings,
    analyse,
    compile_program,
    numba_available,
    run_reference,
    simulate,
)
from ascend_lab.operators.kernels import GemmSchedule, GemmShape, elementwise_launch, gemm_launch
from bench import graph as graphs, operators
from bench.table import CHIPS, Figure, below, median_s, times

PUBLISHED = GemmSchedule(128, 64, 256, 4, 1, 1)


def bench_simulate() -> list[Figure]:
    """Fast engine on a 4096 cubed matmul of one core, and on 1000 times its iterations."""
    chip = load_chip("Ascend910B2")
    launch = gemm_launch(GemmShape(4096, 4096, 4096), chip, PUBLISHED)
    large = gemm_launch(GemmShape(40960, 40960, 40960), chip, PUBLISHED)
    fast, slow, again = (
        median_s(partial(simulate, one, chip), 15) for one in (launch, large, launch)
    )
    equal = simulate(launch, chip).cycles == simulate(launch, chip, engine="reference").cycles
    return [
        below("simulate 4096^3, one core", fast, 2e-3),
        Figure("  equal to the reference", str(equal), "to the cycle", equal),
        times("  1000x the iterations costs", slow / statistics.mean((fast, again)), 2),
    ]


def bench_candidates() -> list[Figure]:
    """What a search pays for one candidate: build the kernel, then time it."""
    chip = load_chip("Ascend910B2")
    tiling = GemmSchedule(128, 64, 256, 4, 4, 4)

    def cube(side: int) -> float:
        shape = GemmShape(side, side, side)
        return median_s(lambda: simulate(gemm_launch(shape, chip, tiling), chip).cycles, 60)

    def vector(tiles: int) -> float:
        elements = chip.cores_of("vector") * 2048 * tiles
        return median_s(lambda: simulate(elementwise_launch(chip, elements), chip).cycles, 60)

    ratio = cube(4096) / cube(1024)
    return [
        below("cube candidate, 1024^3", cube(1024), 2e-3),
        below("vector candidate, 4 tiles", vector(4), 6e-4),
        below("vector candidate, 1600 tiles", vector(1600), 6e-4),
        times("  1024^3 and 4096^3 differ", ratio, 1.3),
    ]


def bench_lowering() -> list[Figure]:
    """What one candidate costs through the DSL: lower a schedule, time the program."""
    split = load_chip("Ascend910B2")
    coupled = load_chip("Ascend910A")
    cube = operators.cube_candidate_s(1024, split)
    ratio = operators.cube_candidate_s(4096, split) / cube
    product, chain = operators.execute_s()
    return [
        below("lower + time matmul 1024^3", cube, 2e-3),
        times("  4096^3 against 1024^3", ratio, 1.3),
        below("lower + time fused vector", operators.vector_candidate_s(1 << 20, coupled), 1e-3),
        below("  with a tail core (48 cores)", operators.vector_candidate_s(1 << 20, split)),
        below("execute matmul 256^3", product, 1, "s"),
        below("execute fused vector 2^20", chain, 1, "s"),
    ]


def bench_defaults() -> list[Figure]:
    """Default schedules against the cube's peak and the memory's rate; prints the whole table."""
    shares = operators.all_shares()
    print("\n" + operators.table(shares) + "\n")
    found = {(s.name, s.chip): s.roof_share for s in shares}
    wanted = [("matmul 4096", chip, 0.7) for chip in ("Ascend910A", "Ascend910B2")]
    wanted += [("add 2^24", chip, 0.85) for chip in CHIPS]
    return [
        Figure(f"{n}, {c}", f"{found[n, c]:.0%}", f">= {least:.0%}", found[n, c] >= least)
        for n, c, least in wanted
    ]


def bench_reference() -> list[Figure]:
    """Events per second of the event-by-event engine, plain and compiled."""
    chip = load_chip("Ascend910B2")
    launch = gemm_launch(GemmShape(4096, 4096, 4096), chip, PUBLISHED)
    program = launch.parts[0].program
    compiled = compile_program(program, chip, Surroundings(1, analyse(launch, chip).memory_share))
    rows = []
    for name, quick, least in (("plain Python", False, 1), ("Numba", True, 20)):
        if quick and not numba_available():
            rows.append(Figure(f"reference, {name}", "not installed", f">= {least} M", None))
            continue
        seconds = median_s(partial(run_reference, compiled, compiled=quick), 5)
        rate = program.executed_count / seconds / 1e6
        told = f"{rate:.1f} M events/s"
        rows.append(Figure(f"reference, {name}", told, f">= {least} M", rate >= least))
    return rows


def bench_import() -> list[Figure]:
    """Wall time of `import ascend_lab` beyond a bare interpreter."""

    def run(code: str) -> float:
        return median_s(lambda: subprocess.run([sys.executable, "-c", code], check=True), 7)

    bare = run("pass")
    return [
        below("import ascend_lab", run("import ascend_lab") - bare, 0.4),
        below(
            "import with simulators",
            run("import ascend_lab.operators.kernels, ascend_lab.machine.sim") - bare,
        ),
    ]


def bench_graphs() -> list[Figure]:
    """A network from file to time, cold and warm; growth with nodes; prints what fusion saves."""
    chip = load_chip("Ascend310")
    cold_s, memory_bytes = graphs.cold_simulate("resnet50")
    half = graphs.chain_s(500, chip)
    whole = graphs.chain_s(1000, chip)
    print("\n" + graphs.savings_table() + "\n")
    megabytes = memory_bytes / 1e6
    return [
        below("ResNet-50 file to time, cold", cold_s, 3, "s"),
        Figure("  its largest memory", f"{megabytes:.0f} MB", "< 600 MB", megabytes < 600),
        below("  timed again, warm", graphs.warm_simulate_s("resnet50", chip), 0.15),
        below("graph of 1000 nodes", whole, 5, "s"),
        times("  against 500 nodes", whole / half),
    ]


def bench_chapters() -> list[Figure]:
    """Seconds to execute every notebook of the book fresh, kernel start included."""
    import nbformat
    from nbclient import NotebookClient

    folder = Path(__file__).parent.parent / "notebooks"
    rows = []
    first = 0.0
    for file in sorted(folder.glob("[012]*.ipynb")):
        notebook = nbformat.read(file, as_version=4)  # type: ignore[no-untyped-call]
        resources = {"metadata": {"path": str(folder)}}
        client = NotebookClient(notebook, timeout=120, resources=resources)
        start = time.perf_counter()
        client.execute(stderr=subprocess.DEVNULL)  # kernel log lines are not results
        seconds = time.perf_counter() - start
        first += seconds if file.stem < "05" else 0.0
        rows.append(below(f"chapter {file.stem}", seconds, 20, "s"))
    return [*rows, below("chapters 1 to 4", first, 60, "s")]
