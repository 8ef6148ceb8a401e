"""The verbs `aipp`, `serve-sim` and `serve`: camera frames, a simulated server and a real one."""

from __future__ import annotations

import argparse
import io
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab import limits
from ascend_lab.cli.arrays import load_array, save_array
from ascend_lab.cli.common import JSON, MODEL, SHAPES, Verb, emit, flag, shapes_of
from ascend_lab.cli.terminal import say
from ascend_lab.errors import InputError
from ascend_lab.limits import count, decimal, whole
from ascend_lab.output import write_whole

if TYPE_CHECKING:
    from ascend_lab.serving import Served


def _aipp(arguments: argparse.Namespace) -> int:
    from ascend_lab.chip import load_chip
    from ascend_lab.media import aipp_each, check, read_config, unpack_block

    found = [op for op in read_config(arguments.config) if op.rank == arguments.rank]
    if not found:
        raise InputError(f"an aipp_op of related_input_rank {arguments.rank}", "none", "--rank N")
    op, chip = found[0], load_chip(arguments.chip) if arguments.chip else None
    frames = load_array(arguments.image)
    if op.settings is not None:
        if arguments.block:
            raise InputError("--block only with aipp_mode: dynamic", "static", "drop it")
        with limits.naming(arguments.config):
            size = check(op.settings, chip).frame_bytes
        each = [op.settings] * max(1, frames.size // size)
    else:
        if not arguments.block:
            raise InputError("--block F.bin with aipp_mode: dynamic", "none", "64 + 96 n bytes")
        what = "a parameter block of dynamic AIPP"
        block = limits.read_file(arguments.block, what, limits.TABLE_BYTES)
        each = [check(s, chip) for s in unpack_block(block)]
        total = sum(s.frame_bytes for s in each)
        limits.refuse_above("frames of max_src_image_size", total, op.max_bytes, "raise it")
    width, height = each[0].size
    limits.refuse_above("bytes of the result", len(each) * width * height * 6, limits.ARRAY_BYTES)
    result = aipp_each(frames, each)
    save_array(arguments.output, result)
    wide = result.astype(np.float64)
    data = {
        "frames": len(result), "shape": list(result.shape), "dtype": str(result.dtype),
        "min": float(wide.min()), "max": float(wide.max()), "mean": float(wide.mean()),
    }  # fmt: skip
    line = (
        f"{len(result)} frames of {each[0].width} x {each[0].height} ({each[0].input_format}) -> "
        f"{result.dtype}{list(result.shape)}, {wide.min():g} to {wide.max():g}"
    )
    emit(arguments.json, data, [line])
    return 0


# -- servers --------------------------------------------------------------------------------------
PICTURES = (".svg", ".png", ".pdf")


def _serve_sim(arguments: argparse.Namespace) -> int:
    from ascend_lab.serving import read_scenario, simulate_serving

    ending = Path(arguments.figure).suffix.lower() if arguments.figure else PICTURES[0]
    if ending not in PICTURES:
        needed = f"--figure with an ending among {', '.join(PICTURES)}"
        raise InputError(needed, arguments.figure, "rename it")
    found = read_scenario(arguments.config)
    served = simulate_serving(found.scenario)
    data = served.summary()
    if found.timed:
        data["service"] = {
            name: {"seconds": {str(size): s for size, s in timed.items()}, **asdict(line)}
            for name, (timed, line) in found.timed.items()
        }
    if arguments.figure:
        _draw(served, arguments.figure, ending)
    emit(arguments.json, data, [*_text(data), *(f"  note: {note}" for note in found.notes)])
    return 0


def _draw(served: Served, path: str, ending: str) -> None:
    from ascend_lab.lab.figures import fig_served

    whole = io.BytesIO()
    fig_served(served).savefig(whole, format=ending[1:])
    write_whole(path, whole.getvalue())


def _text(data: dict[str, Any]) -> list[str]:
    """Return the numbers as lines, and the batches as bars."""
    times = ", ".join(f"{name} {seconds:.6g}" for name, seconds in data["latency_s"].items())
    counts = f"{data['served']} answered, {data['lost']} lost"
    lines = [
        f"{data['throughput_per_s']:.6g} requests/s (simulated), {counts}",
        f"  seconds to the answer: {times}; of it waiting, mean {data['wait_s']['mean']:.6g}",
        f"  instances busy {data['utilisation']:.2%}, mean batch {data['mean_batch']:.4g}",
    ]
    for name, row in data.get("service", {}).items():
        lines.append(
            f"  {name}: a batch of b takes {row['mean_s']:.4g} + {row['per_item_s']:.4g} b s, "
            f"within {row['worst_error']:.1%} of the network's times, which are used"
        )
    lines += [
        f"  priority {row['priority']}: mean wait {row['wait_s']['mean']:.6g} s, "
        f"p95 {row['latency_s']['p95']:.6g} s, {row['lost']} lost"
        for row in data.get("priorities", ())
    ]
    for name, row in data.get("steps", {}).items():
        lines.append(f"  {name}: busy {row['utilisation']:.2%}, batch {row['mean_batch']:.4g}")
    if canary := data.get("canary"):
        lines += [f"  {row['time_s']:.6g} s: {row['decision']}" for row in canary["history"]]
        lines.append(f"  canary {canary['outcome']}, share of the new version {canary['share']:g}")
    total = sum(data["batches"].values())
    lines += [
        f"  batch {size:>4} {count / total:7.2%} {'#' * round(50 * count / total)}"
        for size, count in data["batches"].items()
    ]
    return lines


def _serve(arguments: argparse.Namespace) -> int:
    from ascend_lab.graph.zoo import model_name
    from ascend_lab.runtime.container import is_offline
    from ascend_lab.serving import Level, Policy
    from ascend_lab.serving.model import open_model
    from ascend_lab.serving.rest import Service, serve

    for name, low, high in (("port", 0, 65535), ("instances", 1, 64), ("max_batch", 1, 1024),
                            ("max_delay_s", 0, 60), ("queue_limit", 1, 100_000)):  # fmt: skip
        if not low <= (value := getattr(arguments, name)) <= high:
            raise InputError(f"--{name.replace('_', '-')} from {low} to {high}", str(value))
    if is_offline(arguments.model):
        needed = "an .onnx file or zoo:NAME: compiled models cannot be served"
        raise InputError(needed, arguments.model, "give what it was compiled from")
    levels = (Level(queue_limit=arguments.queue_limit),)
    policy = Policy(
        arguments.instances, arguments.max_batch, arguments.max_delay_s, levels=levels
    )  # fmt: skip
    name, shapes = model_name(arguments.model), shapes_of(arguments)

    def load() -> Any:
        return open_model(arguments.model, arguments.chip, arguments.max_batch, shapes)

    def told(port: int) -> None:
        say([f"serving {name} at http://127.0.0.1:{port}"])
        sys.stdout.flush()

    serve(Service(name, load, policy), arguments.port, told)
    say([f"{name} is served no more"])
    return 0


CONFIG_HELP = """\
A .toml file. [service] law (exponential, deterministic, erlang, gamma) and mean_s, per_item_s: a
batch of b items takes mean_s + per_item_s * b on average, and the law is that of the whole; erlang
takes shape, the number of its phases. Instead of mean_s: model (an .onnx file or zoo:NAME) and
chip. [arrivals] law poisson with rate_per_s, or closed with clients that ask again after think_s
(0). [server] instances, max_batch, max_delay_s (from the oldest that waits; with 0 a free instance
takes what waits, later arrivals wait), queue_limit (most that wait, those being served not
counted; 0: no limit), preferred (batch sizes), loss (nobody waits). [run] requests (measured),
seed, warmup (requests before those, a tenth as many). lost counts measured requests.
[[priorities]] (first served first) share (of 1; none: alike), timeout_s, action (reject, delay),
queue_limit; [[failures]] instance, at_s, repair_s; [[steps]] name, after, service, server: an
ensemble; two [[versions]] name, error_rate, service, server with [canary] stages, window,
max_error_rate, max_p95_s, users."""

VERBS = (
    Verb(
        "aipp", "raw camera frames through an AIPP configuration", _aipp,
        (
            flag("config", metavar="CONFIG.cfg"),
            flag("--image", required=True, metavar="X.npy", help="raw frames, flat uint8"),
            flag("--output", required=True, metavar="Y.npy", help="write fp16 (n, c, h, w) to it"),
            flag("--rank", type=whole, default=0, metavar="N", help="related_input_rank (0)"),
            flag("--block", metavar="F.bin", help="parameters, with aipp_mode: dynamic"),
            flag("--chip", help="keep this chip's limits, too"),
            JSON,
        ),
    ),
    Verb(
        "serve-sim", "simulate a server: latency, throughput and batches", _serve_sim,
        (
            flag("config", metavar="CONFIG.toml"),
            JSON,
            flag("--figure", metavar="F.svg", help="draw latencies and batches (.svg, .png, .pdf)"),
        ),
        {"epilog": CONFIG_HELP},
    ),
    Verb(
        "serve", "answer requests for a model on loopback (KServe v2, JSON tensors)", _serve,
        (
            MODEL, SHAPES,
            flag("--chip", help="compute as this chip's kernels do (default: the graph, exactly)"),
            flag("--port", type=whole, default=0, help="0, the default, takes a free one"),
            flag("--instances", type=count, default=1, metavar="N", help="threads (1)"),
            flag("--max-batch", type=count, default=8, metavar="N",
                 help="most rows that run together (8); shapes of your own run alone"),
            flag("--max-delay-s", type=decimal, default=0.0, metavar="S",
                 help="how long the oldest request waits for others (0)"),
            flag("--queue-limit", type=count, default=2048, metavar="N",
                 help="most requests that wait; more are told to come again (2048)"),
        ),
    ),
)  # fmt: skip
