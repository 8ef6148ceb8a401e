"""Times and memory of the zoo on four chips, to the last digit, as kernels were last changed."""

import json
from pathlib import Path

import pytest

from ascend_lab.compiler import compile_stages, simulate_graph, zoo
from ascend_lab.machine.chip import load_chip

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_zoo.json").read_text("utf-8"))
QUICK = (
    "mobilevit_block 16 Ascend310P3",
    "resnet18 1 Ascend910A",
    "shufflenet_v2 1 Ascend310",
    "squeezenet 1 Ascend910B2",
)
"""What every run checks, a row for each chip; `pytest -m full` checks all."""


@pytest.mark.parametrize(
    "row", [pytest.param(r, marks=() if r in QUICK else pytest.mark.full) for r in GOLDEN]
)
def test_simulated_time_and_memory_are_as_published(row: str) -> None:
    name, batch, chip = row.split()
    graph = zoo.build(name, batch=int(batch))
    report = simulate_graph(compile_stages(graph, load_chip(chip)).compiled)
    assert [report.time_s, report.memory_bytes] == GOLDEN[row]
