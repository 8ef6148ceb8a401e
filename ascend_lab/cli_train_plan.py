"""The verb `ascend-lab train-plan`: the quickest way to train a model on many devices."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ascend_lab.cli_common import add_json, emit, import_with, refuse_idle, shapes_of
from ascend_lab.cli_words import CLUSTER_FILE
from ascend_lab.errors import InputError
from ascend_lab.limits import count, decimal

if TYPE_CHECKING:
    from ascend_lab.chip import Chip
    from ascend_lab.cluster import Topology
    from ascend_lab.parallel.plans.model import GraphModel
    from ascend_lab.parallel.plans.search import Ranking

CHIPS = {"910b": "Ascend910B2"}
"""Chip by the start of a cluster's name; Ascend910A for all others."""
SAMPLES = 8
"""Default batch of a device."""
OPTIMIZERS = ("adam", "sgd")
LEGEND = """\
  D data, T tensor, P pipeline, E expert parallel: devices along each; Z ZeRO stage
  m micro-batches a step, v virtual stages a device; gpipe, 1f1b, interleaved: order of the pipeline
  T<P<D: neighbours share tensors, then stages, then data (no mark: T<D<P)
  work: of the busiest device; exchange: inside T and E, never hidden; exposed: gradients and update
  after the pipeline; waits: for other stages (bubble: share of all devices' time), and what ZeRO 2
  and 3 send meanwhile and no work hides"""


def add_train_plan(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser(
        "train-plan", help="the best parallel plan to train a model", epilog=CLUSTER_FILE
    )
    verb.add_argument("model", metavar="MODEL", help="a model of the zoo, or an .onnx file")
    verb.add_argument("--cluster", required=True, metavar="T", help="a topology or .toml file")
    verb.add_argument("--devices", required=True, type=count, metavar="N")
    verb.add_argument("--chip", help="a preset or .toml file (default: the cluster's)")
    verb.add_argument("--optimizer", default="adam", help=f"{' or '.join(OPTIMIZERS)} (adam)")
    verb.add_argument("--dtype", default="fp16", help="fp16 (default) or bf16")
    verb.add_argument("--memory-limit", type=decimal, metavar="BYTES", help="(default: the chip's)")
    verb.add_argument("--plans", type=count, default=20, metavar="K", help="plans to list (20)")
    verb.add_argument(
        "--batch",
        type=count,
        metavar="B",
        help=f"samples of a step, all devices ({SAMPLES} each)",
    )
    verb.add_argument(
        "--input-shape", action="append", default=[], metavar="NAME:1,3,224,224",
        help="the shape of an .onnx file's input with open sizes, batch as 1; repeatable",
    )  # fmt: skip
    add_json(verb)
    verb.set_defaults(run=_train_plan)


def _train_plan(arguments: argparse.Namespace) -> int:
    from ascend_lab.chip import load_chip
    from ascend_lab.parallel.plans.search import best_plans

    _check(arguments)
    topology = _topology(arguments.cluster, arguments.devices)
    start = arguments.cluster.partition("-")[0]
    chip = load_chip(arguments.chip or CHIPS.get(start, "Ascend910A"))
    batch = arguments.batch or SAMPLES * arguments.devices
    limit = arguments.memory_limit
    ranking = best_plans(
        _model(arguments, chip), topology, arguments.devices, batch,
        memory_bytes=chip.device_memory.size_bytes if limit is None else limit,
        optimizer=arguments.optimizer, keep=arguments.plans,
    )  # fmt: skip
    best = ranking.best
    data = {
        "model": arguments.model, "chip": chip.name, "cluster": topology.name,
        "devices": arguments.devices, "batch": batch, "optimizer": arguments.optimizer,
        "best": best.as_dict(),
        "step_s": best.step_s,
        "memory_bytes": best.memory_bytes,
        "beaten": [plan.as_dict() for plan in ranking.plans[1:]],
        "tried": ranking.tried, "too_large": ranking.too_large,
        "least_memory_bytes": ranking.least_bytes,
    }  # fmt: skip
    emit(arguments.json, data, table(arguments.model, topology.name, batch, ranking))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuse numbers and names that mean nothing."""
    if arguments.devices < 1:
        raise InputError("--devices of at least 1", str(arguments.devices), "raise it")
    if arguments.batch is not None and arguments.batch < 1:
        raise InputError("--batch of at least 1", str(arguments.batch), "raise it")
    if arguments.plans < 1:
        raise InputError("--plans of at least 1", str(arguments.plans), "raise it")
    if arguments.optimizer not in OPTIMIZERS:
        wanted = f"--optimizer {' or '.join(OPTIMIZERS)}"
        raise InputError(wanted, repr(arguments.optimizer), "choose one")
    if arguments.dtype not in ("fp16", "bf16"):
        raise InputError("--dtype fp16 or bf16", repr(arguments.dtype), "choose one")
    limit = arguments.memory_limit
    if limit is not None and not limit > 0:
        raise InputError("--memory-limit above 0 bytes", str(limit), "raise it")


def _topology(text: str, devices: int) -> Topology:
    """Return the topology; a preset that takes a count and has none gets the devices'."""
    from ascend_lab.cluster.presets import TOPOLOGIES, load_topology

    known = TOPOLOGIES.get(text)
    return load_topology(f"{text}:{devices}" if known is not None and known.limit else text)


def _model(arguments: argparse.Namespace, chip: Chip) -> GraphModel:
    from ascend_lab.parallel.plans.model import GraphModel, model_of

    name, optimizer, dtype = arguments.model, arguments.optimizer, arguments.dtype
    if not name.endswith(".onnx"):
        refuse_idle(arguments, "with an .onnx file", "--input-shape")
        return model_of(name, chip, optimizer=optimizer, dtype=dtype)
    shapes = shapes_of(arguments)

    for shape in shapes.values():
        if shape[:1] not in ((1,), (-1,)):
            remedy = "plans choose the batch of a device; --batch says a step's"
            raise InputError("--input-shape with a first size of 1", str(shape), remedy)

    def build(batch: int) -> Any:
        sizes = {n: (batch, *shape[1:]) for n, shape in shapes.items()}
        return import_with(name, None, sizes, batch).graph

    return GraphModel(name, build, chip, optimizer, dtype)


def table(model: str, cluster: str, batch: int, ranking: Ranking) -> list[str]:
    """Return the plans as lines of a table, the best first."""
    best = ranking.best
    lines = [
        (
            f"{model}, batch {batch}, on {cluster}: {best.plan.label}, {best.step_s * 1e3:.3f} ms "
            f"a step, {best.samples_per_s:.0f} samples/s, {best.memory_bytes / 1e9:.2f} GB (model)"
        ),
        (
            f"  of {ranking.tried} plans {ranking.too_large} do not fit; "
            f"step = work + exchange + waits + exposed"
        ),
        (
            f"{'plan':<36}{'step':>12}{'work':>12}{'exchange':>11}{'waits':>11}{'exposed':>11}"
            f"{'bubble':>8}{'memory':>11}"
        ),
    ]
    lines += [
        f"{p.plan.label:<36}{p.step_s * 1e3:>9.3f} ms{p.compute_s * 1e3:>9.3f} ms"
        f"{p.exchange_s * 1e3:>8.3f} ms{p.waits_s * 1e3:>8.3f} ms{p.exposed_s * 1e3:>8.3f} ms"
        f"{p.bubble:>8.1%}{p.memory_bytes / 1e9:>8.3f} GB"
        for p in ranking.plans
    ]
    return [*lines, *LEGEND.split("\n")]
