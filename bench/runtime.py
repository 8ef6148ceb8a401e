"""Offline models and the runtime: what compiling and loading cost, and whether values are equal."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from ascend_lab.compiler import evaluate, random_inputs, run_compiled, zoo
from ascend_lab.compiler.onnx import save_onnx
from ascend_lab.compiler.zoo import load_model
from ascend_lab.deploy.runtime import compile_offline, load_offline, pipeline_programs, run_streams
from ascend_lab.machine.chip import load_chip
from ascend_lab.output import write_whole
from bench.table import Figure, below, median_s

CHIP = "Ascend310"
COMPILE_S = 3.0
LOAD_S = 0.05


def runtime_figures() -> list[Figure]:
    """Return the rows: ResNet-50 from its ONNX file to a file that is loaded, both on disk."""
    chip = load_chip(CHIP)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name, "resnet50.onnx")
        file = Path(name, "resnet50.alm")
        save_onnx(zoo.build("resnet50"), model)
        start = time.perf_counter()
        write_whole(file, compile_offline({None: load_model(str(model))}, chip))
        compile_s = time.perf_counter() - start
        load_s = median_s(lambda: load_offline(file).gears, 9)
        rows = [
            below("compile ResNet-50 to a file", compile_s, COMPILE_S, "s"),
            below("load it, every byte checked", load_s, LOAD_S),
        ]
        gear = load_offline(file).gears[0]
        x = random_inputs(gear.imported.graph)
        same = _equal(evaluate(load_model(str(model)).graph, x), gear.run(x))
        rows.append(Figure("offline = online, ResNet-50", _yes(same), "bit for bit", same))
    rows.append(_kernels())
    programs = pipeline_programs(50_000, 4, 1.0, 2.0, 1.0)
    rows.append(
        below(
            "50,000 items through 4 streams", median_s(lambda: run_streams(programs), 1), None, "s"
        )
    )
    return rows


def _kernels() -> Figure:
    """Return whether kernels from a file compute what those just compiled do."""
    chip = load_chip(CHIP)
    found = load_model("zoo:mobilevit_block")
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "block.alm")
        write_whole(file, compile_offline({None: found}, chip))
        x = random_inputs(found.graph)
        kernels = load_offline(file).gears[0].run(x, kernels=True)
    same = _equal(run_compiled(found.graph, x, chip), kernels)
    return Figure("  its kernels, MobileViT block", _yes(same), "bit for bit", same)


def _equal(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> bool:
    return all(one[name].tobytes() == two[name].tobytes() for name in one)


def _yes(same: bool) -> str:
    return "equal" if same else "not equal"
