"""How long the notebooks of the book take: part of `lab.py bench`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ascend_lab.chip import load_chip
from ascend_lab.kernels import GemmSchedule, GemmShape, elementwise_launch, gemm_launch
from ascend_lab.kernels.timed_schedules import time_tilings
from ascend_lab.sim import (
    Surroundings,
    analyse,
    compile_program,
    numba_available,
    run_reference,
    simulate,
)
from bench import graph as graphs
from bench import operators
from bench.table import CHIPS, Figure, median_s


def chapter_seconds() -> Iterator[tuple[str, float]]:
    """Yield name and seconds of every notebook, executed fresh, kernel start included."""
    import nbformat
    from nbclient import NotebookClient

    folder = Path(__file__).parent.parent / "notebooks"
    for file in sorted(folder.glob("[012]*.ipynb")):
        notebook = nbformat.read(file, as_version=4)  # type: ignore[no-untyped-call]
        client = NotebookClient(
            notebook, timeout=120, resources={"metadata": {"path": str(folder)}}
        )
        start = time.perf_counter()
        client.execute(stderr=subprocess.DEVNULL)  # kernel log lines are not results
        yield file.stem, time.perf_counter() - start


# Speed of the simulators, of the batch timer, of imports and of the chapters.


PUBLISHED = GemmSchedule(128, 64, 256, 4, 1, 1)


def bench_simulate() -> list[Figure]:
    """Fast engine on a 4096 cubed matmul of one core, and on 1000 times its iterations."""
    chip = load_chip("Ascend910B2")
    launch = gemm_launch(GemmShape(4096, 4096, 4096), chip, PUBLISHED)
    large = gemm_launch(GemmShape(40960, 40960, 40960), chip, PUBLISHED)
    fast = median_s(lambda: simulate(launch, chip), 15)
    slow = median_s(lambda: simulate(large, chip), 15)
    again = median_s(lambda: simulate(launch, chip), 15)
    ratio = slow / statistics.mean((fast, again))
    equal = simulate(launch, chip).cycles == simulate(launch, chip, engine="reference").cycles
    return [
        Figure("simulate 4096^3, one core", f"{fast * 1e3:.2f} ms", "< 2 ms", fast < 2e-3),
        Figure("  equal to the reference", str(equal), "to the cycle", equal),
        Figure("  1000x the iterations costs", f"{ratio:.2f}x", "< 2x", ratio < 2.0),
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
    seconds = {"cube candidate, 1024^3": cube(1024), "vector candidate, 4 tiles": vector(4)}
    seconds["vector candidate, 1600 tiles"] = vector(1600)
    return [
        Figure(name, f"{s * 1e3:.2f} ms", f"< {limit * 1e3:g} ms", s < limit)
        for (name, s), limit in zip(seconds.items(), (2e-3, 6e-4, 6e-4), strict=True)
    ] + [Figure("  1024^3 and 4096^3 differ", f"{ratio:.2f}x", "< 1.3x", ratio < 1.3)]


def bench_lowering() -> list[Figure]:
    """What one candidate costs through the DSL: lower a schedule, time the program."""
    split, coupled = load_chip("Ascend910B2"), load_chip("Ascend910A")
    cube = operators.cube_candidate_s(1024, split)
    ratio = operators.cube_candidate_s(4096, split) / cube
    vector = operators.vector_candidate_s(1 << 20, coupled)
    ragged = operators.vector_candidate_s(1 << 20, split)
    product, chain = operators.execute_s()
    return [
        Figure("lower + time matmul 1024^3", f"{cube * 1e3:.2f} ms", "< 2 ms", cube < 2e-3),
        Figure("  4096^3 against 1024^3", f"{ratio:.2f}x", "< 1.3x", ratio < 1.3),
        Figure("lower + time fused vector", f"{vector * 1e3:.2f} ms", "< 1 ms", vector < 1e-3),
        Figure("  with a tail core (48 cores)", f"{ragged * 1e3:.2f} ms", "", None),
        Figure("execute matmul 256^3", f"{product * 1e3:.0f} ms", "< 1 s", product < 1.0),
        Figure("execute fused vector 2^20", f"{chain * 1e3:.0f} ms", "< 1 s", chain < 1.0),
    ]


def bench_defaults() -> list[Figure]:
    """Default schedules against the cube's peak and the memory's rate; prints the whole table."""
    shares = operators.all_shares()
    print("\n" + operators.table(shares) + "\n")
    found = {(s.name, s.chip): s for s in shares}
    rows = []
    for chip in ("Ascend910A", "Ascend910B2"):
        share = found["matmul 4096", chip].roof_share
        rows.append(Figure(f"matmul 4096^3, {chip}", f"{share:.0%}", ">= 70 %", share >= 0.7))
    for chip in CHIPS:
        share = found["add 2^24", chip].roof_share
        rows.append(Figure(f"add 2^24, {chip}", f"{share:.0%}", ">= 85 %", share >= 0.85))
    return rows


def bench_reference() -> list[Figure]:
    """Events per second of the event-by-event engine, plain and compiled."""
    chip = load_chip("Ascend910B2")
    launch = gemm_launch(GemmShape(4096, 4096, 4096), chip, PUBLISHED)
    program = launch.parts[0].program
    compiled = compile_program(program, chip, Surroundings(1, analyse(launch, chip).fresh))
    events = program.event_count
    plain = events / median_s(lambda: run_reference(compiled), 5) / 1e6
    rows = [Figure("reference, plain Python", f"{plain:.1f} M events/s", ">= 1 M", plain >= 1.0)]
    if not numba_available():
        return [*rows, Figure("reference, Numba", "not installed", ">= 20 M", None)]
    run_reference(compiled, compiled=True)
    quick = events / median_s(lambda: run_reference(compiled, compiled=True), 5) / 1e6
    rows.append(Figure("reference, Numba", f"{quick:.1f} M events/s", ">= 20 M", quick >= 20.0))
    return rows


def bench_batch() -> list[Figure]:
    """Candidate timings per second of a three-level tile nest, sampled against the reference."""
    chip = load_chip("Ascend910B2")
    shape = GemmShape(6144, 6144, 6144)
    tilings = [
        GemmSchedule(m, k, n, step, rows, 24 // rows)
        for m in (16, 32, 64, 128, 256)
        for n in (16, 32, 64, 128, 256)
        for k in (32, 64, 128)
        for step in (1, 2, 4, 8)
        for rows in (1, 2, 3, 4, 6, 8, 12, 24)
        if 2 * k * max(m, n) * 2 <= 65536 and m * n * 4 <= 131072
        if 4 * (m + n) * k * step <= 524288
        if 6144 % (m * rows) == 0 and 6144 % (n * (24 // rows)) == 0
    ]
    rate = len(tilings) / median_s(lambda: time_tilings(shape, chip, tilings), 3)
    cycles = time_tilings(shape, chip, tilings)
    picks = np.random.default_rng(0).choice(len(tilings), 20, replace=False)
    wrong = sum(
        simulate(gemm_launch(shape, chip, tilings[i]), chip, engine="fast").cycles != cycles[i]
        for i in picks
    )
    small = GemmShape(768, 768, 768)
    few = [t for t in tilings if t.base_m * t.grid_rows <= 768 and t.base_n * t.grid_cols <= 768]
    few = [t for t in few if 768 % (t.base_k * t.step_k) == 0][::40]
    few = [
        t
        for t in few
        if 768 % (t.base_m * t.grid_rows) == 0 and 768 % (t.base_n * t.grid_cols) == 0
    ]
    wrong += sum(
        simulate(gemm_launch(small, chip, t), chip, engine="reference").cycles != c
        for t, c in zip(few, time_tilings(small, chip, few), strict=True)
    )
    return [
        Figure(f"batch of {len(tilings)} tilings", f"{rate:,.0f} /s", ">= 10,000 /s", rate >= 1e4),
        Figure("  wrong in sample", f"{wrong} of {20 + len(few)}", "0", wrong == 0),
    ]


def bench_import() -> list[Figure]:
    """Wall time of `import ascend_lab` beyond a bare interpreter."""

    def run(code: str) -> float:
        return median_s(lambda: subprocess.run([sys.executable, "-c", code], check=True), 7)

    cost = run("import ascend_lab") - run("pass")
    all_of_it = run("import ascend_lab.kernels, ascend_lab.sim") - run("pass")
    return [
        Figure("import ascend_lab", f"{cost * 1e3:.0f} ms", "< 400 ms", cost < 0.4),
        Figure("import with simulators", f"{all_of_it * 1e3:.0f} ms", "", None),
    ]


def bench_graphs() -> list[Figure]:
    """A network from file to time, cold and warm; growth with nodes; prints what fusion saves."""
    chip = load_chip("Ascend310")
    cold = graphs.cold_simulate("resnet50")
    warm = graphs.warm_simulate_s("resnet50", chip)
    half, whole = graphs.chain_s(500, chip), graphs.chain_s(1000, chip)
    print("\n" + graphs.savings_table() + "\n")
    megabytes = cold.memory_bytes / 1e6
    return [
        Figure("ResNet-50 file to time, cold", f"{cold.time_s:.2f} s", "< 3 s", cold.time_s < 3),
        Figure("  its largest memory", f"{megabytes:.0f} MB", "< 600 MB", megabytes < 600),
        Figure("  timed again, warm", f"{warm * 1e3:.0f} ms", "< 150 ms", warm < 0.15),
        Figure("graph of 1000 nodes", f"{whole:.2f} s", "< 5 s", whole < 5),
        Figure("  against 500 nodes", f"{whole / half:.2f}x", "about 2x", None),
    ]


def bench_chapters() -> list[Figure]:
    """Seconds to execute every notebook of the book fresh, kernel start included."""
    rows, first = [], 0.0
    for name, seconds in chapter_seconds():
        first += seconds if name < "05" else 0.0
        rows.append(Figure(f"chapter {name}", f"{seconds:.1f} s", "< 20 s", seconds < 20))
    return [*rows, Figure("chapters 1 to 4", f"{first:.1f} s", "< 60 s", first < 60)]
