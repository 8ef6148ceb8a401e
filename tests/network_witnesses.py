"""What a random network computes, by two witnesses, and what becomes of it on each of our ways.

    witness     ONNX Runtime, its graph as it stands; the reference evaluator of onnx
    certain     both agree, or the standard's text decides who is right (`wrong_witness`)
    way         run: import and evaluate, or placed beside the host, as `ascend-lab run` does
                compiled: the kernels of a chip; offline: those read back from an .alm file
                migrated: the file that `migrate` writes, in ONNX Runtime
    verdict     right, refused (by name), wrong, crash, or open: rounding alone may change it

How far a right value may lie from the certain one is measured, not guessed: the witness runs again
with every tensor moved by up to a rounding error of the format, numbers that fp16 holds excepted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from network_builder import FLOATS, Network, Step, Values, onnxruntime_session, reference
from onnx.reference import ReferenceEvaluator
from onnx_models import run_onnx

from ascend_lab.compiler import evaluate
from ascend_lab.compiler.compile import Road
from ascend_lab.compiler.hosted import place_model
from ascend_lab.compiler.migrate import migrate
from ascend_lab.compiler.onnx import Imported, import_pinning
from ascend_lab.compiler.onnx.tensors import in_type
from ascend_lab.compiler.values import run_tasks
from ascend_lab.deploy.runtime import compile_offline, load_offline
from ascend_lab.errors import CapacityError, UnsupportedError
from ascend_lab.machine.chip import load_chip

CHIPS = ("Toy", "Ascend310", "Ascend310DK", "Ascend310P3", "Ascend910A", "Ascend910B2")
RUNS = (1.0,) * 4 + (4.0,) * 3
"""Runs with rounding errors, to see how far they carry: of one rounding, and of four.

The latter find steps, such as a cast to whole numbers, that a value is nearly at.
"""
FP32 = 2.0**-21
FP16 = 2.0**-10
"""Rounding errors behind a node: an operator of several steps rounds some times."""
SPREADS = 6.0
"""Largest error allowed, in spreads: of few runs, the largest difference is no bound."""
SHARES = {FP32: 2.0**-17, FP16: 2.0**-6}
"""Error allowed besides, a share of the tensor's largest number: what operators round inside."""
OPEN = 0.2
"""Spread, as a share of the largest number, from which rounding alone decides a value."""


def wrong_witness(node: onnx.NodeProto, opset: int) -> str:
    """Return who has a node wrong where the witnesses differ, by the text of the standard.

    "" where the text does not decide, or nobody has looked yet.
    """
    attrs = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
    if node.op_type in ("Softmax", "LogSoftmax") and opset < 13:
        return "reference"  # takes the axis as of opset 13: no rows of all axes behind it
    if node.op_type == "LpNormalization" and attrs.get("p") == 1:
        return "reference"  # adds numbers up with their signs
    if node.op_type == "LRN":
        return "reference"  # sums squares for as many channels as there are images
    if node.op_type == "GlobalMaxPool":
        return "reference"  # other than two dimensions
    same = attrs.get("auto_pad", b"").startswith(b"SAME")
    if node.op_type == "ConvTranspose" and attrs.get("group", 1) > 1:
        return "" if same else "reference"  # adds the first group's bias to all
    if node.op_type == "ConvTranspose" and same:
        return "onnxruntime"  # the output is the input times the stride, a short kernel or not
    if node.op_type == "MaxPool" and same and "dilations" in attrs:
        return ""  # both may be wrong: the output is the input over the stride, rounded up
    if node.op_type == "MaxPool":
        return "reference"  # miscounts windows of one dimension, and with ceil_mode or SAME
    if node.op_type == "AveragePool" and attrs.get("ceil_mode"):
        return "reference"  # shares the last window's overhang between both ends
    return ""


@dataclass
class Outcome:
    """What became of a network: how its witnesses agree, and the verdict of each way."""

    seed: int
    witnesses: str = "agree"
    verdicts: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        """Ways that are wrong or crash, with a message each."""
        bad = [way for way, verdict in self.verdicts.items() if verdict in ("wrong", "crash")]
        return [f"{self.seed} {way}: {self.verdicts[way]}: {self.messages[way]}" for way in bad]


@dataclass
class Truth:
    """Certain outputs of a network, and how far rounding in a format carries."""

    values: dict[str, Values]
    network: Network

    def __post_init__(self) -> None:
        self.runs: dict[float, list[dict[str, Values]]] = {}

    def rounded(self, unit: float) -> list[dict[str, Values]]:
        """Return the outputs of `RUNS` with rounding errors of a format."""
        if unit not in self.runs:
            rng = np.random.default_rng(self.network.seed)
            self.runs[unit] = [self.network.rounded_run(unit * share, rng) for share in RUNS]
        return self.runs[unit]

    def compare(self, found: Mapping[str, Values], unit: float) -> tuple[str, str]:
        """Return the verdict on outputs computed with such rounding errors, and why."""
        if sorted(found) != sorted(self.values):
            return "wrong", f"outputs {sorted(found)}"
        is_open = False
        for name, wanted in self.values.items():
            got = np.asarray(found[name])
            if got.shape != wanted.shape or got.dtype != wanted.dtype:
                return "wrong", f"{name}: {got.dtype}{got.shape}, not {wanted.dtype}{wanted.shape}"
            runs = [run[name] for run in self.rounded(unit)]
            if wanted.dtype not in FLOATS:
                settled = np.all([run == wanted for run in runs], axis=0)
                if not np.array_equal(got[settled], wanted[settled]):
                    return "wrong", f"{name}: {_first(got, wanted, (got != wanted) & settled)}"
                is_open |= not settled.all()
                continue
            wide = wanted.astype(np.float64)
            mine = got.astype(np.float64)
            scale = float(np.abs(wide).max(initial=0.0))
            spreads = [float(np.abs(run - wide).max(initial=0.0)) for run in runs]
            spread = max(one / share for one, share in zip(spreads, RUNS, strict=True))
            if spread > OPEN * scale:
                is_open = True
                continue
            coarse = FP16 if wanted.dtype == np.float16 else unit
            limit = SPREADS * spread + SHARES[coarse] * scale
            far = ~(np.abs(mine - wide) <= limit)
            if far.any():
                return "wrong", f"{name}: {_first(mine, wide, far)}, limit {limit:.2g}"
        return ("open" if is_open else "right"), ""


def _first(got: Values, wanted: Values, far: Values) -> str:
    at = tuple(int(i) for i in np.argwhere(far)[0])
    return f"{int(far.sum())} of {far.size}, at {at} {got[at]} not {wanted[at]}"


# -- witnesses -------------------------------------------------------------------------------------
def outputs_of(runner: Callable[[], Any], network: Network) -> dict[str, Values] | None:
    """Return a witness's outputs; None where it refuses."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = runner().run(network.outputs, network.feed)
    except Exception:  # whatever either raises
        return None
    return dict(zip(network.outputs, map(np.asarray, found), strict=True))


def truth_of(network: Network) -> tuple[str, Truth | None]:
    """Return how the witnesses agree, and what is certain; None if nothing is."""
    one = outputs_of(lambda: onnxruntime_session(network.model), network)
    two = outputs_of(lambda: reference(network.model), network)
    if one is None or two is None:
        alone = one if one is not None else two
        return "one witness", Truth(alone, network) if alone is not None else None
    truth = Truth(one, network)
    if truth.compare(two, FP32)[0] != "wrong":
        return "agree", truth
    try:
        decided = _decided(network)
    except Exception:  # whatever ONNX Runtime raises for sizes that it would not have made
        decided = None
    return ("decided", decided) if decided else ("disputed", None)


def _decided(network: Network) -> Truth | None:
    """Return what is certain by the standard, node by node; None where a node stays in dispute."""
    values = {**network.constants, **network.feed}
    opset = network.model.opset_import[0].version
    steps = []
    for step in network.steps:
        found = step.run(values)
        taken = step
        if not _agree(found, step.by_reference(), values):
            wrong = wrong_witness(step.node, opset)
            if not wrong:
                return None
            if wrong == "onnxruntime":
                taken = step.by_reference()
                found = taken.run(values)
        values |= found
        steps.append(taken)
    outputs = {name: values[name] for name in network.outputs}
    return Truth(outputs, replace(network, steps=tuple(steps)))


def _agree(found: Mapping[str, Values], step: Step, values: Mapping[str, Values]) -> bool:
    """Tell whether another witness writes nearly the same; also where it has no such node."""
    try:
        other = step.run(values)
    except Exception:  # whatever the reference raises
        return True
    return all(
        array.shape == other[name].shape
        and np.allclose(array.astype(float), other[name].astype(float), rtol=1e-3, atol=1e-3)
        for name, array in found.items()
    )


# -- our ways --------------------------------------------------------------------------------------
def judged(network: Network, folder: Path, ways: tuple[str, ...] = ()) -> Outcome:
    """Return what becomes of a network on some ways, or on those given.

    A network of which nothing is certain is open at best.
    """
    outcome = Outcome(network.seed)
    outcome.witnesses, truth = truth_of(network)
    rng = np.random.default_rng([network.seed, 1])
    chip = CHIPS[int(rng.integers(len(CHIPS)))]
    often = {"run": 1.0, "compiled": 1.0, "migrated": 0.5, "offline": 0.15}
    chosen = [way for way, share in often.items() if rng.random() < share]
    units = {"run": FP32, "migrated": FP32, "compiled": FP16, "offline": FP16}
    for way in ways or chosen:
        try:
            found = WAYS[way](truth.network if truth else network, chip, folder)
            verdict, message = truth.compare(found, units[way]) if truth else ("open", "")
        except (UnsupportedError, CapacityError) as error:
            verdict = "refused"
            message = str(error)
        except Exception as error:
            verdict = "crash"
            message = f"{type(error).__name__}: {error}"
        outcome.verdicts[way] = verdict
        outcome.messages[way] = f"{chip}: {message}"
    return outcome


def _imported(network: Network) -> Imported:
    data = network.model.SerializeToString()
    shapes = {name: array.shape for name, array in network.feed.items()}
    return import_pinning(data, network.feed, shapes=shapes)


def _typed(found: Mapping[str, Values], imported: Imported) -> dict[str, Values]:
    return {name: in_type(found[name], kind) for name, kind in imported.output_types.items()}


def _inputs(network: Network, imported: Imported) -> dict[str, Values]:
    return {name: network.feed[name] for name in imported.graph.inputs}


def run(network: Network, chip: str, folder: Path) -> dict[str, Values]:
    """Return what `ascend-lab run` prints: of a graph, or of a model placed beside the host."""
    try:
        imported = _imported(network)
    except UnsupportedError:
        data = network.model.SerializeToString()
        beside_host = load_chip("Ascend310" if chip == "Toy" else chip)  # the toy has no host
        return dict(place_model(data, beside_host, inputs=network.feed).run())
    return _typed(evaluate(imported.graph, _inputs(network, imported)), imported)


def compiled(network: Network, chip: str, folder: Path) -> dict[str, Values]:
    """Return what the kernels of a chip compute, which must have a time, too."""
    imported = _imported(network)
    stages = Road().stages(imported.graph, load_chip(chip))
    assert stages.timeline().time_s >= 0
    found = run_tasks(stages.compiled, _inputs(network, imported), imported.graph.outputs)
    return _typed(found, imported)


def offline(network: Network, chip: str, folder: Path) -> dict[str, Values]:
    """Return what the kernels compute that an offline model holds."""
    imported = _imported(network)
    file = folder / f"{network.seed}.alm"
    file.write_bytes(compile_offline({None: imported}, load_chip(chip)))
    gear = load_offline(file).gear()
    return _typed(gear.run(_inputs(network, imported), kernels=True), gear.imported)


def migrated(network: Network, chip: str, folder: Path) -> dict[str, Values]:
    """Return what the migrated model computes in ONNX Runtime, or in the witness that is right."""
    data = network.model.SerializeToString()
    shapes = {name: array.shape for name, array in network.feed.items()}
    model = migrate(data, load_chip(chip), shapes=shapes).model
    if model is None:
        raise UnsupportedError("a model that migrates", "none")
    names = {entry.name for entry in model.graph.input}
    feed = {n: a for n, a in network.feed.items() if n in names}
    if any(isinstance(step.runner, ReferenceEvaluator) for step in network.steps):
        return dict(zip(network.outputs, reference(model).run(network.outputs, feed), strict=True))
    return run_onnx(model, feed)


WAYS = {"run": run, "compiled": compiled, "migrated": migrated, "offline": offline}
