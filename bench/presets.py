"""Tune the model zoo on the chips, fill the built-in bank: `python3 lab.py bank`.

What is found goes to a bank file under `_build` first, so that a run that was stopped goes on where
it was. The rows of the network table come out as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from ascend_lab.aoe.bank import BUILTIN_FILE, Knowledge, Store, write_builtin
from ascend_lab.aoe.drive import Settings
from ascend_lab.aoe.engine import tune
from ascend_lab.compiler import zoo
from ascend_lab.errors import AscendLabError
from bench.table import CHIPS

BUILD = Path("_build")


@dataclass(frozen=True, slots=True)
class Row:
    """A network on a chip: seconds by default, after each job alone, after both, and its bound.

    `bound_s` holds for any slicing and schedule, every launch but one left out.
    """

    network: str
    chip: str
    batch: int
    default_s: float
    operator_s: float
    subgraph_s: float
    both_s: float
    bound_s: float
    spent_s: float

    @property
    def gain(self) -> float:
        """Improvement of both jobs, (before - after) / after."""
        return self.default_s / self.both_s - 1.0


def tuned_row(network: str, chip: str, batch: int, settings: Settings, knowledge: Knowledge) -> Row:
    """Tune one network by either job and by both; raises as `tune`."""
    graph = zoo.build(network, batch=batch)
    started = time.monotonic()
    operator, subgraph, both = (
        tune(graph, chip, job, settings=settings, bank=knowledge) for job in ("2", "1", "1,2")
    )
    return Row(
        network,
        chip,
        batch,
        operator.baseline_s,
        operator.result_s,
        subgraph.result_s,
        min(both.result_s, operator.result_s, subgraph.result_s),
        operator.bound_s,
        time.monotonic() - started,
    )


def show(row: Row) -> str:
    """Return a row as a line of the network table."""
    times = (row.default_s, row.operator_s, row.subgraph_s, row.both_s)
    cells = " ".join(f"{t * 1e3:9.3f}" for t in times)
    gap = row.both_s / row.bound_s - 1.0
    head = f"{row.network:<19}{row.chip:<13}{row.batch:>3}"
    return (
        f"{head} {cells} {row.gain:>8.1%} {gap:>8.1%} {row.bound_s * 1e3:9.3f} {row.spent_s:7.1f}"
    )


HEAD = (
    f"{'network':<19}{'chip':<13}{'b':>3} {'default ms':>9} {'operator':>9} {'subgraph':>9} "
    f"{'both':>9} {'gain':>8} {'gap':>8} {'bound ms':>9} {'tuning s':>8}"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tuning and write the bank; arguments narrow what is tuned."""
    parser = argparse.ArgumentParser(prog="lab.py bank", description=__doc__)
    parser.add_argument("--networks", default=",".join(zoo.ZOO))
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--budget", type=int, default=96)
    parser.add_argument("--bank", type=Path, default=BUILD / "presets.db")
    parser.add_argument("--rows", type=Path, default=BUILD / "networks.jsonl")
    parser.add_argument("--output", type=Path, default=BUILTIN_FILE)
    given = parser.parse_args(argv)
    given.bank.parent.mkdir(exist_ok=True)
    settings = Settings(budget=given.budget, verify=False)
    wanted = product(
        map(int, given.batches.split(",")),
        *(words.split(",") for words in (given.networks, given.chips)),
    )
    print(HEAD)
    with Knowledge(given.bank, None) as knowledge, given.rows.open("a") as rows:
        for batch, network, chip in wanted:
            try:
                row = tuned_row(network, chip, batch, settings, knowledge)
            except AscendLabError as error:
                print(f"{network} batch {batch} on {chip}: {error}", file=sys.stderr)
                continue
            rows.write(json.dumps(asdict(row)) + "\n")
            rows.flush()
            print(show(row), flush=True)
    with Store(given.bank) as store:
        print(f"{write_builtin(store.entries(), given.output)} entries in {given.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
