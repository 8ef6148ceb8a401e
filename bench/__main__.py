"""Speed of the simulators and the fidelity table: `python3 lab.py bench`.

Every figure is a median of this run; machines differ, so compare ratios, not seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ascend_lab.lab.validation import product_rows, product_table, validation_rows, validation_table
from ascend_lab.output import write_whole
from bench import peers, tuners
from bench.bound import bound_figures, tuned_figures
from bench.cluster import cluster_figures, strategy_figures
from bench.compared import compared_figures
from bench.compress import compression_figures
from bench.course import course_figures
from bench.deploy import deploy_figures
from bench.gradient import gradient_figures
from bench.graph import memory_figures
from bench.light import light_figures
from bench.media import media_figures
from bench.published import flash_figures, published_figures
from bench.rows import row_figures
from bench.runtime import runtime_figures
from bench.serving import serving_figures
from bench.speed import (
    bench_candidates,
    bench_chapters,
    bench_defaults,
    bench_graphs,
    bench_import,
    bench_lowering,
    bench_reference,
    bench_simulate,
)
from bench.table import Figure, closing

BENCHES = (
    bench_simulate,
    bench_candidates,
    bench_lowering,
    bench_defaults,
    bench_reference,
    bench_graphs,
    bound_figures,
    published_figures,
    flash_figures,
    compared_figures,
    row_figures,
    memory_figures,
    light_figures,
    runtime_figures,
    tuners.tuner_figures,
    cluster_figures,
    strategy_figures,
    gradient_figures,
    media_figures,
    compression_figures,
    serving_figures,
    deploy_figures,
    bench_import,
)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lab.py bench", description=__doc__)
    parser.add_argument(
        "what", nargs="?", choices=("course",), help="only the grader of the course"
    )
    parser.add_argument("--json", metavar="F", help="also write the figures to F")
    parser.add_argument("--no-chapters", action="store_true", help="skip executing the notebooks")
    parser.add_argument("--measured", metavar="D", help="only the measured tables in a folder")
    parser.add_argument("--tuners", action="store_true", help="only the quality of the tuners")
    parser.add_argument("--seeds", type=int, default=30, help="of every search, with --tuners")
    parser.add_argument("--tuned", type=float, metavar="S", help="only networks, each tuned S s")
    parser.add_argument("--peers", action="store_true", help="only compare with other simulators")
    parser.add_argument("--peer-limit", type=float, default=1200.0, metavar="S", help="seconds")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks and print a table; exit 1 if a target is missed."""
    arguments = _arguments(argv)
    if arguments.peers:
        return peers.report(arguments.peer_limit, arguments.json)
    if arguments.tuners:
        return tuners.report(arguments.seeds, arguments.json)
    benches: list[Callable[[], Iterable[Figure]]] = [*BENCHES]
    only = arguments.what or arguments.tuned or arguments.measured
    if arguments.what == "course":
        benches = [course_figures]
    elif arguments.tuned:
        benches = [partial(tuned_figures, arguments.tuned)]
    elif arguments.measured:
        benches = [partial(compared_figures, arguments.measured)]
    elif not arguments.no_chapters:
        benches.append(bench_chapters)
    figures: list[Figure] = []
    for bench in benches:
        for figure in bench():
            print(figure.line(), flush=True)
            figures.append(figure)
    if not only:
        print("\nFidelity: model/published on Ascend910B2 (goal: time 15 %, shares 10 points)")
        print(validation_table(validation_rows()))
    if not (arguments.what or arguments.measured):
        print(product_table(product_rows()))
    if arguments.json:
        rows = [
            {"name": f.name, "measured": f.measured, "met": None if f.met is None else bool(f.met)}
            for f in figures
        ]
        write_whole(arguments.json, json.dumps(rows, indent=2))
    print("\n" + closing(figures))
    return 1 if any(f.met is False for f in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
