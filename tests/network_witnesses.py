"""What a random network computes, by two witnesses, and what becomes of it on each of our ways.

    witness     ONNX Runtime, its graph as it stands; the reference evaluator of onnx
    certain     both agree, or the standard's text decides who is right (`WRONG`)
    way         run: import and evaluate, or placed beside the host, as `ascend-lab run` does
                compiled: the kernels of a chip; offline: those read back from an .alm file
                migrated: the file that `migrate` writes, in ONNX Runtime
    verdict     right, refused (by name), wrong, crash, or open: rounding alone may change it

How far a right value may lie from the certain one is measured, not guessed: the witness runs again
with every tensor moved by up to a rounding error of the format, numbers that fp16 holds excepted.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from network_builder import FLOATS, Network, Values
from onnx.reference import ReferenceEvaluator
from onnx_models import run_onnx

from ascend_lab.chip import load_chip
from ascend_lab.errors import AscendLabError, UnsupportedError
from ascend_lab.graph import Road, evaluate, run_tasks
from ascend_lab.graph.hosted import place_model
from ascend_lab.graph.migrate import migrate
from ascend_lab.graph.onnx import Imported, import_pinning
from ascend_lab.graph.onnx.tensors import in_type
from ascend_lab.runtime import compile_offline, load_offline

CHIPS = ("Toy", "Ascend310", "Ascend310DK", "Ascend310P3", "Ascend910A", "Ascend910B2")
RUNS = 5
"""Runs with rounding errors, to see how far they carry."""
FP32, FP16 = 2.0**-21, 2.0**-10
"""Rounding errors behind a node: an operator of several steps rounds some times."""
SPREADS = 6.0
"""Largest error allowed, in spreads: of few runs, the largest difference is no bound."""
SHARES = {FP32: 2.0**-17, FP16: 2.0**-7}
"""Error allowed besides, a share of the tensor's largest number: what operators round inside."""
OPEN = 0.2
"""Spread, as a share of the largest number, from which rounding alone decides a value."""

WRONG = {
    # operator: (who is wrong, the opsets in which, why)
    "Softmax": ("reference", range(1, 13), "takes axis as of opset 13"),
    "LogSoftmax": ("reference", range(1, 13), "takes axis as of opset 13"),
}
"""Operators that a witness has wrong, by the text of the standard."""


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
        runs = {u: self.network.rounded_runs(u, RUNS, self.network.seed) for u in (FP32, FP16)}
        self.runs = runs

    def compare(self, found: Mapping[str, Values], unit: float) -> tuple[str, str]:
        """Return the verdict on outputs computed with such rounding errors, and why."""
        if sorted(found) != sorted(self.values):
            return "wrong", f"outputs {sorted(found)}"
        is_open = False
        for name, wanted in self.values.items():
            got = np.asarray(found[name])
            if got.shape != wanted.shape or got.dtype != wanted.dtype:
                return "wrong", f"{name}: {got.dtype}{got.shape}, not {wanted.dtype}{wanted.shape}"
            runs = [run[name] for run in self.runs[unit]]
            if wanted.dtype not in FLOATS:
                settled = np.all([run == runs[0] for run in (*runs, wanted)], axis=0)
                if not np.array_equal(got[settled], wanted[settled]):
                    return "wrong", f"{name}: {_first(got, wanted, (got != wanted) & settled)}"
                is_open |= not settled.all()
                continue
            wide, mine = wanted.astype(np.float64), got.astype(np.float64)
            scale = float(np.abs(wide).max(initial=0.0))
            spread = max(float(np.abs(run - wide).max(initial=0.0)) for run in runs)
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
def by_onnxruntime(network: Network) -> dict[str, Values] | None:
    """Return the outputs of ONNX Runtime without its rewrites; None where it refuses."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = network.model.SerializeToString()
    try:
        session = onnxruntime.InferenceSession(data, options, ["CPUExecutionProvider"])
        found = session.run(network.outputs, network.feed)
    except Exception:  # whatever ONNX Runtime raises
        return None
    return dict(zip(network.outputs, found, strict=True))


def by_reference(network: Network) -> dict[str, Values] | None:
    """Return the outputs of the reference evaluator; None where it has no such operator."""
    model = onnx.ModelProto()
    model.CopyFrom(network.model)
    for node in model.graph.node:
        if node.op_type == "BatchNormalization" and network.model.opset_import[0].version < 14:
            node.attribute.add(name="momentum", type=1).f = 1.0  # or it learns
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = ReferenceEvaluator(model).run(network.outputs, network.feed)
    except Exception:  # whatever it raises
        return None
    return dict(zip(network.outputs, map(np.asarray, found), strict=True))


def truth_of(network: Network) -> tuple[str, Truth | None]:
    """Return how the witnesses agree, and what is certain; None if nothing is."""
    one, two = by_onnxruntime(network), by_reference(network)
    opset = network.model.opset_import[0].version
    wrong = {
        WRONG[node.op_type][0]
        for node in network.model.graph.node
        if node.op_type in WRONG and opset in WRONG[node.op_type][1]
    }
    if one is None or two is None:
        alone = one if one is not None else two
        return "one witness", Truth(alone, network) if alone is not None else None
    truth = Truth(one, network)
    if truth.compare(two, FP32)[0] != "wrong":
        return "agree", truth
    if wrong == {"reference"}:
        return "decided", truth
    if wrong == {"onnxruntime"}:
        return "decided", Truth(two, network)
    return "disputed", None


# -- our ways --------------------------------------------------------------------------------------
def judged(network: Network, folder: Path, ways: tuple[str, ...] = ()) -> Outcome:
    """Return what becomes of a network on every way, or on those given."""
    outcome = Outcome(network.seed)
    outcome.witnesses, truth = truth_of(network)
    if truth is None:
        return outcome
    rng = np.random.default_rng([network.seed, 1])
    chip = CHIPS[int(rng.integers(len(CHIPS)))]
    often = {"run": 1.0, "compiled": 1.0, "migrated": 0.5, "offline": 0.15}
    chosen = [way for way, share in often.items() if rng.random() < share]
    units = {"run": FP32, "migrated": FP32, "compiled": FP16, "offline": FP16}
    for way in ways or chosen:
        try:
            found = WAYS[way](network, chip, folder)
            verdict, message = truth.compare(found, units[way])
        except AscendLabError as error:
            verdict, message = "refused", str(error)
        except Exception as error:
            verdict, message = "crash", f"{type(error).__name__}: {error}"
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
        return dict(place_model(data, load_chip(chip), given=network.feed).run())
    return _typed(evaluate(imported.graph, _inputs(network, imported)), imported)


def compiled(network: Network, chip: str, folder: Path) -> dict[str, Values]:
    """Return what the kernels of a chip compute."""
    imported = _imported(network)
    made = Road().stages(imported.graph, load_chip(chip)).compiled
    return _typed(run_tasks(made, _inputs(network, imported), imported.graph.outputs), imported)


def offline(network: Network, chip: str, folder: Path) -> dict[str, Values]:
    """Return what the kernels compute that an offline model holds."""
    imported = _imported(network)
    file = folder / f"{network.seed}.alm"
    file.write_bytes(compile_offline({None: imported}, load_chip(chip)))
    gear = load_offline(file).gear()
    return _typed(gear.run(_inputs(network, imported), kernels=True), gear.imported)


def migrated(network: Network, chip: str, folder: Path) -> dict[str, Values]:
    """Return what the migrated model computes in ONNX Runtime."""
    data = network.model.SerializeToString()
    shapes = {name: array.shape for name, array in network.feed.items()}
    model = migrate(data, load_chip(chip), shapes=shapes).model
    if model is None:
        raise UnsupportedError("a model that migrates", "none")
    names = {entry.name for entry in model.graph.input}
    return run_onnx(model, {n: a for n, a in network.feed.items() if n in names})


WAYS = {"run": run, "compiled": compiled, "migrated": migrated, "offline": offline}
