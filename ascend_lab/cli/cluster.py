"""The verbs on clusters of NPUs: topologies, collectives and plans for parallel training.

ascend-lab topologies 910b-server                  its devices and links
ascend-lab collective --op all_reduce --bytes 64M --topology 910b-server
ascend-lab fit-collective measured.csv             alpha and beta of measured all-reduces
ascend-lab train-plan resnet50 --cluster 910b-server --devices 8
"""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ascend_lab.cli import common
from ascend_lab.cli.common import CLUSTER_FILE, JSON, Verb, flag, refuse_idle
from ascend_lab.cli.printing import columns, emit
from ascend_lab.errors import InputError
from ascend_lab.limits import count, decimal
from ascend_lab.machine.chip import Chip, load_chip

if TYPE_CHECKING:
    from ascend_lab.cluster import Topology
    from ascend_lab.cluster.fit import CollectiveFit, Measured
    from ascend_lab.cluster.parallel import Ranking
    from ascend_lab.cluster.parallel.model import GraphModel
    from ascend_lab.cluster.timing import CollectiveTime


# "1e6", "64m", "64mib", "64mb", "512b": a number, a prefix, and whether it is of 1000 or 1024
_SIZE = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)(?:([kmgt])(ib|b)?|b)?")
HUGE_BYTES = 1e18
"""Largest --bytes: more than any memory holds, and small enough that no time overflows."""
ROOTED = ("broadcast", "reduce")
"""Operations in which one device is the source or the target of everything."""


def parse_bytes(text: str) -> float:
    """Return the bytes a text means: 1e6, 64M = 64MiB = 64 * 2^20 (as in nccl-tests), 64MB = 64e6.

    Raises `InputError` for anything else.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    try:
        size = float(match[1]) if match else math.nan
    except ValueError:  # the pattern lets 1.2.3 pass
        size = math.nan
    if match and match[2]:
        # 64m: 64 * 1024^2, 64mib: the same, 64mb: 64 * 1000^2
        base = 1000 if match[3] == "b" else 1024
        exponent = "kmgt".index(match[2]) + 1
        size *= base**exponent
    if not 0 <= size <= HUGE_BYTES:  # also refuses nan
        raise InputError(f"bytes from 0 to {HUGE_BYTES:g}", repr(text), "write 1e6, 64M or 64MB")
    return size


def _collective(arguments: argparse.Namespace) -> int:
    """Time a collective by one algorithm, or by all that can do it, the quickest first."""
    from ascend_lab.cluster import collective_time, compare, load_topology, schedule

    size_bytes = parse_bytes(arguments.bytes)
    topology = load_topology(arguments.topology)
    # On a large cluster the first P devices may take part; the other links stay idle.
    ranks = topology.size if arguments.ranks is None else arguments.ranks
    if not 1 <= ranks <= topology.size:
        remedy = "choose fewer, or a larger topology" if ranks > 1 else "raise it"
        raise InputError(f"--ranks from 1 to {topology.size}", str(ranks), remedy)
    if not 0 <= arguments.root < ranks:
        raise InputError(f"--root from 0 to {ranks - 1}", str(arguments.root), "choose one")
    places = range(ranks)
    root = arguments.root
    # An all-reduce has no root: a flag that changes nothing is refused.
    if schedule.op_name(arguments.op) not in ROOTED:
        refuse_idle(arguments, f"with --op {' or '.join(ROOTED)}", "--root")
    if arguments.algorithm == "auto":
        times = compare(arguments.op, topology, size_bytes, places, root)
    else:
        algorithm = arguments.algorithm
        times = (collective_time(arguments.op, topology, size_bytes, algorithm, places, root),)
    quickest = times[0]  # `compare` sorts by time
    data = {
        "op": quickest.op,
        "algorithm": quickest.algorithm,
        "ranks": quickest.ranks,
        "bytes": quickest.size_bytes,
        "time_s": quickest.time_s,
        "algorithm_bandwidth": quickest.algorithm_bandwidth,
        "bus_bandwidth": quickest.bus_bandwidth,
        "steps": len(quickest.rounds_s),
        "lower_bound_s": quickest.lower_bound_s,
        "topology": topology.name,
    }
    if arguments.algorithm == "auto":
        data["candidates"] = {candidate.algorithm: candidate.time_s for candidate in times}
    emit(arguments.json, data, _table(times, topology))
    return 0


COLLECTIVE_COLUMNS = {
    "algorithm": "<40",
    "steps": ">5",
    "time us": ">12.2f",
    "alg GB/s": ">9.3f",  # bytes of the call / its time: the rate that the caller sees
    "bus GB/s": ">9.3f",  # rate of the links: for an all-reduce of p ranks 2 (p-1)/p of alg
}


def _table(times: tuple[CollectiveTime, ...], topology: Topology) -> list[str]:
    """Return candidates for one collective as a table, and the bound that holds for all of them."""
    quickest = times[0]
    exchange = f"{quickest.op} of {quickest.size_bytes:.0f} bytes, {quickest.ranks} ranks"
    rows = [
        (
            candidate.algorithm,
            len(candidate.rounds_s),
            candidate.time_s * 1e6,
            candidate.algorithm_bandwidth / 1e9,
            candidate.bus_bandwidth / 1e9,
        )
        for candidate in times
    ]
    return [
        f"{exchange} on {topology.name} (model result)",
        *columns(COLLECTIVE_COLUMNS, rows),
        f"no schedule is faster than {quickest.lower_bound_s * 1e6:.2f} us",
    ]


def _fit_collective(arguments: argparse.Namespace) -> int:
    """Fit the ring algorithm's formula to measured all-reduces; print errors on rows left out."""
    from ascend_lab.cluster.fit import fit_collective, read_table

    common.check_least(arguments, "--max-ranks", 2)
    rows = read_table(arguments.file, device=arguments.device, max_ranks=arguments.max_ranks)
    data = report(rows, fit_collective(rows))
    emit(arguments.json, data, _text(data))
    return 0


def report(rows: list[Measured], fit: CollectiveFit) -> dict[str, Any]:
    """Return the fit and its errors on left-out sizes and counts of ranks, as plain data.

    Errors are given for all rows, for each band (a range of sizes with its own alpha and beta) and
    for each size. If the table has only one size, errors on sizes are those on counts of ranks;
    they are None if nothing can be left out.
    """
    from ascend_lab.cluster.fit import held_out, mape, predicted

    # An error on rows that were fitted says little: each size is left out in turn, the formula is
    # fitted to the others, and its time for that size compared. Then counts of ranks are left out.
    by_ranks = held_out(rows, "ranks")
    judged = {"held_out_mape": held_out(rows) or by_ranks, "held_out_mape_ranks": by_ranks}
    sizes = sorted({row.size_bytes for row in rows})

    def errors(chosen: list[float]) -> dict[str, Any]:
        """Return how many rows have one of the sizes `chosen`, and the mean errors on them."""
        means: dict[str, Any] = {"rows": sum(row.size_bytes in chosen for row in rows)}
        for name, items in judged.items():
            means[name] = mape(item for item in items if item.row.size_bytes in chosen)
        return means

    return {
        "bands": [
            {**asdict(band), **errors([size for size in sizes if fit.band_of(size) is band])}
            for band in fit.bands
        ],
        **errors(sizes),
        "fit_mape": mape(predicted(fit, row) for row in rows),
        "sizes": [{"bytes": size, **errors([size])} for size in sizes],
    }


def _text(data: dict[str, Any]) -> list[str]:
    """Return a fit as lines: alpha and beta by band of sizes, then the error at each size."""
    lines = [f"ring law fitted to {data['rows']} rows; errors on sizes / ranks left out"]
    for band in data["bands"]:
        beta = band["beta_s_per_byte"]
        # Times of small messages may not grow with the size: then beta is 0.
        rate = f"{1e-9 / beta:.2f} GB/s" if beta else "no limit"
        lines.append(
            f"  {band['bytes_from']:.3g} to {band['bytes_to']:.3g} B: "
            f"alpha {band['alpha_s'] * 1e6:.2f} us, 1/beta {rate}, error {_both(band)}"
        )
    lines += [f"    {size['bytes']:12.0f} B: {_both(size)}" for size in data["sizes"]]
    lines.append(f"  in all {_both(data)}; on the rows fitted {_percent(data['fit_mape'])}")
    return lines


def _both(errors: dict[str, Any]) -> str:
    """Return the errors on sizes and on counts of ranks left out: "3.1% / 7.4%"."""
    return f"{_percent(errors['held_out_mape'])} / {_percent(errors['held_out_mape_ranks'])}"


def _percent(value: float | None) -> str:
    """Return an error such as 3.1%; a dash for none."""
    return "-" if value is None else f"{value:.1%}"


def _topologies(arguments: argparse.Namespace) -> int:
    """List the named clusters with their sources, or show the links of one."""
    from ascend_lab.cluster import load_topology, loader
    from ascend_lab.cluster.loader import TOPOLOGIES

    if arguments.name is not None:
        topology = load_topology(arguments.name)
        emit(arguments.json, loader.topology_dict(topology), loader.topology_text(topology))
        return 0
    data: dict[str, Any] = {}
    lines = []
    for preset in TOPOLOGIES.values():
        name = loader.usage(preset.name)
        most_devices = preset.limit or None  # a server as built has a fixed number
        data[name] = {
            "summary": preset.summary,
            "source": preset.source,
            "most_devices": most_devices,
        }
        lines += [f"{name:<15} {preset.summary}", f"{'':<15} {preset.source}"]
    emit(arguments.json, data, lines)
    return 0


CHIPS = {"910b": "Ascend910B2", "a3": "Ascend910C"}
"""Start of a cluster's name -> its chip: 910b-roce has Ascend910B2. Others have Ascend910A."""
SAMPLES = 8
"""Default batch of a device, in samples."""
OPTIMIZERS = ("adam", "sgd")
LEGEND = """\
  D data, T tensor, P pipeline, E expert parallel: devices along each; Z ZeRO stage
  m micro-batches a step, v virtual stages a device; gpipe, 1f1b, interleaved: order of the pipeline
  T<P<D: neighbours share tensors, then stages, then data (no mark: T<D<P)
  work: of the busiest device; exchange: inside T and E, never hidden; exposed: gradients and update
  after the pipeline; waits: for other stages (bubble: share of all devices' time), and what ZeRO 2
  and 3 send meanwhile and no work hides"""


def _train_plan(arguments: argparse.Namespace) -> int:
    """Print the parallel plans that train a model the fastest on a cluster."""
    from ascend_lab.cluster import load_topology
    from ascend_lab.cluster.loader import TOPOLOGIES
    from ascend_lab.cluster.parallel import best_plans

    _check(arguments)
    name = arguments.cluster
    # --cluster 910b-roce --devices 32 means 910b-roce:32
    open_preset = name in TOPOLOGIES and TOPOLOGIES[name].limit
    topology = load_topology(f"{name}:{arguments.devices}" if open_preset else name)
    chip = load_chip(arguments.chip or CHIPS.get(name.partition("-")[0], "Ascend910A"))
    # The batch of a step is for all devices together: it grows with them.
    batch = arguments.batch or SAMPLES * arguments.devices
    limit = arguments.memory_limit
    ranking = best_plans(
        _model(arguments, chip),
        topology,
        arguments.devices,
        batch,
        memory_bytes=chip.device_memory.size_bytes if limit is None else limit,
        keep=arguments.plans,
    )
    best = ranking.best
    data = {
        "model": arguments.model,
        "chip": chip.name,
        "cluster": topology.name,
        "devices": arguments.devices,
        "batch": batch,
        "optimizer": arguments.optimizer,
        "best": best.as_dict(),
        "step_s": best.step_s,
        "memory_bytes": best.memory_bytes,
        # the plans after the best, so that a reader sees how close the second is
        "beaten": [plan.as_dict() for plan in ranking.plans[1:]],
        "tried": ranking.tried,
        "too_large": ranking.too_large,
        # if no plan fits: how much memory a device needs for the smallest one
        "least_memory_bytes": ranking.least_bytes,
    }
    emit(arguments.json, data, table(arguments.model, topology.name, batch, ranking))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raise `InputError` for numbers out of range and unknown names."""
    for name in ("--devices", "--batch", "--plans"):
        common.check_least(arguments, name, 1, remedy="raise it")
    if arguments.optimizer not in OPTIMIZERS:
        needed = f"--optimizer {' or '.join(OPTIMIZERS)}"
        raise InputError(needed, repr(arguments.optimizer), "choose one")
    if arguments.dtype not in ("fp16", "bf16"):
        raise InputError("--dtype fp16 or bf16", repr(arguments.dtype), "choose one")
    limit = arguments.memory_limit
    if limit is not None and not limit > 0:
        raise InputError("--memory-limit above 0 bytes", str(limit), "raise it")


def _model(arguments: argparse.Namespace, chip: Chip) -> GraphModel:
    """Return the model whose training is planned, a zoo's or that of an .onnx file."""
    from ascend_lab.cluster.parallel.model import GraphModel, model_of

    optimizer = arguments.optimizer
    dtype = arguments.dtype
    name = arguments.model.removeprefix("zoo:")
    if not name.endswith(".onnx"):
        refuse_idle(arguments, "with an .onnx file", "--input-shape")
        return model_of(name, chip, optimizer=optimizer, dtype=dtype)
    shapes = common.shapes_of(arguments)

    # Plans cut the batch into micro-batches: the graph is imported anew for each size.
    for shape in shapes.values():
        if shape[:1] not in ((1,), (-1,)):
            remedy = "plans choose the batch of a device; --batch says a step's"
            raise InputError("--input-shape with a first size of 1", str(shape), remedy)

    # A plan with 4 micro-batches of 2 samples needs the graph of batch 2.
    def build(batch: int) -> Any:
        """Return the network of a file for a batch."""
        sizes = {n: (batch, *shape[1:]) for n, shape in shapes.items()}
        return common.import_with(name, None, sizes, batch).graph

    return GraphModel(name, build, chip, optimizer, dtype)


PLAN_COLUMNS = {
    "plan": "<36",
    "step": ">11",
    "work": ">11",
    "exchange": ">10",
    "waits": ">10",
    "exposed": ">10",
    "bubble": ">7.1%",
    "memory": ">10",
}


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
    ]
    rows = [
        (
            timed.plan.label,
            _ms(timed.step_s),
            _ms(timed.compute_s),
            _ms(timed.exchange_s),
            _ms(timed.waits_s),
            _ms(timed.exposed_s),
            timed.bubble,
            f"{timed.memory_bytes / 1e9:.3f} GB",
        )
        for timed in ranking.plans
    ]
    return [*lines, *columns(PLAN_COLUMNS, rows), *LEGEND.split("\n")]


def _ms(seconds: float) -> str:
    """Return a time in milliseconds."""
    return f"{seconds * 1e3:.3f} ms"


VERBS = (
    Verb(
        "topologies",
        "list clusters, or show one with its links",
        _topologies,
        (
            flag("name", nargs="?", help="such as 910a-roce:64, or your own .toml file"),
            JSON,
        ),
        {"epilog": CLUSTER_FILE},
    ),
    Verb(
        "collective",
        "time a collective on a cluster by one algorithm",
        _collective,
        (
            flag(
                "--op",
                required=True,
                help="all_reduce, reduce_scatter, all_gather, broadcast, reduce or all_to_all",
            ),
            flag(
                "--algorithm",
                default="auto",
                metavar="A",
                help="of the operation; auto: the quickest (auto). Of all_reduce: ring, "
                "double-ring, mesh, halving-doubling, recursive-doubling, nhr, tree, chain, "
                "hierarchical, pipeline",
            ),
            flag("--bytes", required=True, metavar="N", help="1e6, 64M (* 2^20) or 64MB"),
            flag("--topology", required=True, metavar="T", help="see `topologies`, or .toml"),
            flag("--ranks", type=count, metavar="P", help="use the first P devices (all)"),
            flag("--root", type=count, default=0, metavar="R", help="of broadcast, reduce (0)"),
            JSON,
        ),
        {"epilog": CLUSTER_FILE},
    ),
    Verb(
        "fit-collective",
        "alpha and beta from measured all-reduces",
        _fit_collective,
        (
            flag("file", metavar="TABLE.csv", help="columns bytes, ranks, time_s"),
            flag("--device", metavar="D", help="rows with this in the column device"),
            flag("--max-ranks", type=count, metavar="P", help="rows of at most P ranks"),
            JSON,
        ),
    ),
    Verb(
        "train-plan",
        "the best parallel plan to train a model",
        _train_plan,
        (
            flag("model", metavar="MODEL", help="a model of the zoo, or an .onnx file"),
            flag("--cluster", required=True, metavar="T", help="a topology or .toml file"),
            flag("--devices", required=True, type=count, metavar="N", help="of the cluster"),
            flag("--chip", help="a preset or .toml file (default: the cluster's)"),
            flag("--optimizer", default="adam", help=f"{' or '.join(OPTIMIZERS)} (adam)"),
            flag("--dtype", default="fp16", help="fp16 (default) or bf16"),
            flag("--memory-limit", type=decimal, metavar="BYTES", help="(default: the chip's)"),
            flag("--plans", type=count, default=20, metavar="K", help="plans to list (20)"),
            flag(
                "--batch",
                type=count,
                metavar="B",
                help=f"samples of a step, all devices ({SAMPLES} each)",
            ),
            flag(
                "--input-shape",
                action="append",
                default=[],
                metavar="NAME:1,3,224,224",
                help="the shape of an .onnx file's input with open sizes, batch as 1; repeatable",
            ),
            JSON,
        ),
        {"epilog": CLUSTER_FILE},
    ),
)
