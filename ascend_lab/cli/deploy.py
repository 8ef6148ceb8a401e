"""Verbs from a model to its users: `compile`, camera frames, a simulated server and a real one.

`compile` takes the options of ATC that mean something here.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab import limits
from ascend_lab.cli import common, inputs, network
from ascend_lab.cli.aoe_words import FRAMEWORKS, REFUSED, dtype_of
from ascend_lab.cli.common import JSON, MODEL, SHAPES, Verb, emit, flag, refuse_idle
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.limits import count, decimal, naming, whole, wholes_of
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.output import check_writable, write_whole

if TYPE_CHECKING:
    from ascend_lab.compiler import Road
    from ascend_lab.compiler.onnx import Imported
    from ascend_lab.deploy.runtime import OfflineModel

GEARS = range(2, 101)
LARGEST_BATCH = 2048
"""Limits of --dynamic_batch_size, as ATC's."""
OWN = ("--fusion_switch_file", "--insert_op_conf", "--enable_small_channel", "--keep_dtype")
"""Options that mean something here, though not to `aoe`."""
NO_MEANING = {name: why for name, why in REFUSED.items() if len(name) > 2 and name not in OWN} | {
    "--precision_mode_v2": "--precision_mode says it",
    "--om": "an offline model of CANN is another format",
    "--sparsity": "what makes weights sparse changes them before they are compiled",
    "--buffer_optimize": "what lies in L2 is simulated",
    "--enable_single_stream": "kernels of a network run one after another",
    "--external_weight": "weights lie in the file",
    "--core_type": "the chip file says it",
    "--oo_level": "--fusion_switch_file turns passes and rules off by name",
}
"""Options of ATC without a meaning here, and why."""
MODES = {"0": "compile", "3": "only the precheck report"}


def _compile(arguments: argparse.Namespace) -> int:
    from ascend_lab.deploy.runtime import OfflineModel, compile_offline, unpack_parts

    _check_flags(arguments)
    chip = common.with_cores(arguments.chip, arguments.aicore_num, "--aicore_num")
    road = _road(arguments)
    if arguments.check_report and not _report(arguments):
        return 1
    gears = _gears(arguments, chip)
    given = (
        "precision_mode",
        "input_shape",
        "dynamic_batch_size",
        "aicore_num",
        "insert_op_conf",
        "compression",
        "keep_dtype",
    )
    options = {name: str(getattr(arguments, name)) for name in given if name in arguments.given}
    data = compile_offline(gears, chip, road, options=options, told=network.told)
    model = OfflineModel(arguments.output, unpack_parts(data, arguments.output))
    write_whole(arguments.output, data)
    rows = [
        {
            "batch": gear.batch,
            "inputs": {n: list(s) for n, s in gear.inputs.items()},
            "time_s": gear.times["summary"]["time_s"],
            "tasks": len(gear.times["tasks"]),
            "ai_cpu_operators": gear.times["summary"]["totals"]["ai_cpu_operators"],
            "work_bytes": gear.memory["work_bytes"],
            "weight_bytes": gear.memory["weight_bytes"],
        }
        for gear in model.gears
    ]
    found = {
        "name": model.meta["name"],
        "chip": chip.name,
        "dtype": road.dtype,
        "output": arguments.output,
        "file_bytes": len(data),
        "kernels": len(model.kernels),
        "gears": rows,
    }
    emit(arguments.json, found, _lines(found, model))
    return 0


def _lines(found: Mapping[str, Any], model: OfflineModel) -> list[str]:
    """Return what was written as lines: the file and its bytes, then each gear."""
    from ascend_lab.deploy.runtime.container import Kind

    held = model.parts[Kind.WEIGHTS, 0].nbytes
    output = found["output"]
    return [
        f"{found['name']} for {found['chip']}: {found['file_bytes']:,} bytes in {output}",
        f"  {held:,} of them constants, as the graph states them and as kernels read them",
    ] + [
        f"  {', '.join(f'{n} {s}' for n, s in row['inputs'].items())}: {row['tasks']} tasks, "
        f"{row['time_s'] * 1e6:.1f} us (model), {row['weight_bytes'] / 1e6:.2f} MB of weights, "
        f"{row['work_bytes'] / 1e6:.2f} MB to work in"
        for row in found["gears"]
    ]


def _check_flags(arguments: argparse.Namespace) -> None:
    """Raise `InputError` for options of ATC that mean nothing here, or a compiled model."""
    from ascend_lab.deploy.runtime import is_offline

    if is_offline(arguments.model):
        remedy = "give the .onnx file or zoo:NAME that it is from"
        raise InputError("a model to compile", f"{arguments.model}, compiled already", remedy)
    for name, why in NO_MEANING.items():
        if name[2:] in arguments.given:
            raise InputError("options with a meaning here", name, f"drop it: {why}")
    if arguments.framework != "5":
        kind = FRAMEWORKS.get(arguments.framework, "unknown")
        got = f"{arguments.framework} ({kind})"
        raise InputError("--framework 5 (ONNX)", got, "export the model to ONNX")
    if arguments.mode not in MODES:
        known = ", ".join(f"{n} ({what})" for n, what in MODES.items())
        raise InputError(f"--mode {known}", arguments.mode, "choose one")
    if arguments.mode == "3":
        arguments.check_report = arguments.check_report or "check_result.json"
        refuse_idle(arguments, "with --mode 0", "--output", "--json")
        check_writable(arguments.check_report)
    elif arguments.output is None:
        raise InputError("--output with the file to write", "none", "e.g. --output model.alm")


def _report(arguments: argparse.Namespace) -> bool:
    """Write the precheck report; tell whether compiling goes on."""
    from ascend_lab.deploy.runtime import precheck

    if not Path(arguments.model).is_file():
        raise InputError("a precheck of an ONNX file", arguments.model, "leave out --check_report")
    batch = _batches(arguments.dynamic_batch_size)[0]
    error: AscendLabError | None = None
    try:
        shapes = inputs.sized(inputs.shapes_of(arguments.input_shape), batch, "size")
        common.import_with(arguments.model, None, shapes, batch)
    except AscendLabError as found_error:
        error = found_error
    found = precheck(arguments.model, error)
    write_whole(arguments.check_report, json.dumps(found, indent=2) + "\n")
    failed = f"{found['fail']} of {found['total']} nodes cannot be compiled"
    if arguments.mode == "3" or found["fail"]:
        emit(None, None, [f"{found['name']}: {failed}; {arguments.check_report} says why"])
    return arguments.mode == "0" and not found["fail"]


def _road(arguments: argparse.Namespace) -> Road:
    """Return what passes, rules and number format the options ask for."""
    from ascend_lab.compiler import Road
    from ascend_lab.compiler.switches import Switches, read_switches

    file = arguments.fusion_switch_file
    switches = read_switches(file) if file else Switches()
    network.warn_of_switches(switches)
    keep = network.kept_nodes(arguments.keep_dtype)
    return Road(switches=switches, dtype=dtype_of(arguments), keep=keep)


def _batches(text: str | None) -> tuple[int | None, ...]:
    """Return the gears of --dynamic_batch_size, (None,) without."""
    if text is None:
        return (None,)
    found = tuple(dict.fromkeys(wholes_of(text, ",")))
    if len(found) not in GEARS or not all(1 <= n <= LARGEST_BATCH for n in found):
        needed = f"--dynamic_batch_size with 2 to 100 batches of 1 to {LARGEST_BATCH}"
        raise InputError(needed, repr(text), "e.g. 1,2,4,8")
    return found


def _gears(arguments: argparse.Namespace, chip: Chip) -> Mapping[int | None, Imported]:
    """Return the model's graph for every gear, camera frames in place of images if asked for."""
    batches = _batches(arguments.dynamic_batch_size)
    load = partial(common.import_with, arguments.model, None)
    shapes = inputs.shapes_of(arguments.input_shape)
    found = {n: load(inputs.sized(shapes, n, "size"), n) for n in batches}
    if arguments.compression:
        found = {n: _compressed(arguments.compression, one) for n, one in found.items()}
    if not arguments.insert_op_conf:
        refuse_idle(arguments, "with --insert_op_conf", "--enable_small_channel")
        return found
    return {n: _with_aipp(arguments, one, chip) for n, one in found.items()}


def _compressed(records: str, found: Imported) -> Imported:
    """Return a model with the layers of a record file in eight bits."""
    from ascend_lab.compiler.onnx import import_onnx
    from ascend_lab.deploy.compress import qdq_model, read_records, with_records

    made = with_records(found.graph, read_records(records))
    return replace(found, graph=import_onnx(qdq_model(made)))


def _with_aipp(arguments: argparse.Namespace, found: Imported, chip: Chip) -> Imported:
    """Return a model with AIPP in front: its inputs are frames, or parameters, in bytes."""
    from ascend_lab.deploy.media import insert_aipp, read_config

    operations = read_config(arguments.insert_op_conf)
    small = arguments.enable_small_channel == "1"
    with naming(arguments.insert_op_conf):
        graph = insert_aipp(found.graph, operations, chip, small_channel=small)
    kinds = {n: found.input_types.get(n, "uint8") for n in graph.inputs}
    kinds |= {n: "uint8" for n in graph.inputs if graph.types[n].dtype == "uint8"}
    return replace(found, graph=graph, input_types=kinds)


# -- camera frames --------------------------------------------------------------------------------
def _aipp(arguments: argparse.Namespace) -> int:
    from ascend_lab.deploy.media import aipp_each, check, read_config, unpack_block

    found = [op for op in read_config(arguments.config) if op.rank == arguments.rank]
    if not found:
        raise InputError(f"an aipp_op of related_input_rank {arguments.rank}", "none", "--rank N")
    op = found[0]
    chip = load_chip(arguments.chip) if arguments.chip else None
    frames = inputs.load_array(arguments.image)
    if op.settings is not None:
        if arguments.block:
            raise InputError("--block only with aipp_mode: dynamic", "static", "drop it")
        with naming(arguments.config):
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
    inputs.save_array(arguments.output, result)
    wide = result.astype(np.float64)
    data = {
        "frames": len(result),
        "shape": list(result.shape),
        "dtype": str(result.dtype),
        "min": float(wide.min()),
        "max": float(wide.max()),
        "mean": float(wide.mean()),
    }
    line = (
        f"{len(result)} frames of {each[0].width} x {each[0].height} ({each[0].input_format}) -> "
        f"{result.dtype}{list(result.shape)}, {wide.min():g} to {wide.max():g}"
    )
    emit(arguments.json, data, [line])
    return 0


# -- servers --------------------------------------------------------------------------------------
PICTURES = (".svg", ".png", ".pdf")


def _serve_sim(arguments: argparse.Namespace) -> int:
    from ascend_lab.deploy.serving import read_scenario, simulate_serving

    ending = Path(arguments.figure).suffix.lower() if arguments.figure else PICTURES[0]
    if ending not in PICTURES:
        needed = f"--figure with an ending among {', '.join(PICTURES)}"
        raise InputError(needed, arguments.figure, "rename it")
    from ascend_lab.llm import scenario as language

    if language.is_file_of_llm(arguments.config):
        refuse_idle(arguments, "without llm in [model]", "--figure")
        return _serve_llm(arguments)
    found = read_scenario(arguments.config)
    served = simulate_serving(found.scenario)
    data = served.summary()
    if found.timed:
        data["service"] = {
            name: {"seconds": {str(size): s for size, s in timed.items()}, **asdict(line)}
            for name, (timed, line) in found.timed.items()
        }
    if arguments.figure:
        from ascend_lab.lab.figures import fig_served

        drawn = io.BytesIO()
        fig_served(served).savefig(drawn, format=ending[1:])
        write_whole(arguments.figure, drawn.getvalue())
    emit(arguments.json, data, [*_served_text(data), *(f"  note: {note}" for note in found.notes)])
    return 0


def _serve_llm(arguments: argparse.Namespace) -> int:
    """Simulate a server of a language model."""
    from ascend_lab.llm import scenario as language

    scenario = language.read_llm_scenario(arguments.config)
    log = language.serve_llm(scenario)
    data = log.summary() | {"bottleneck": language.bottleneck(scenario, log)}
    emit(arguments.json, data, _llm_text(scenario.model.decoder.title, data))
    return 0


def _llm_text(title: str, data: dict[str, Any]) -> list[str]:
    """Return the numbers of a language model's server as lines."""
    lines = [f"{title}: {data['tokens_per_s']:.6g} tokens/s (simulated), {data['steps']} steps"]
    for key, words in (
        ("first_token_s", "to the first token"),
        ("between_tokens_s", "between tokens"),
        ("latency_s", "to the last token"),
    ):
        times = ", ".join(f"{name} {seconds:.6g}" for name, seconds in data[key].items())
        lines.append(f"  seconds {words}: {times}")
    lines.append(
        f"  {data['preemptions']} preemptions, {data['prompt_tokens_read']} prompt tokens read"
    )
    lines.append(f"  a mean step: {data['bottleneck']}")
    return lines


def _served_text(data: dict[str, Any]) -> list[str]:
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
    from ascend_lab.compiler.zoo import model_name
    from ascend_lab.deploy.runtime.container import is_offline
    from ascend_lab.deploy.serving import Level, Policy, loopback, opened, rest

    for name, low, high in (
        ("port", 0, 65535),
        ("instances", 1, 64),
        ("max_batch", 1, 1024),
        ("max_delay_s", 0, 60),
        ("queue_limit", 1, 100_000),
        ("body_mib", 1, 1024),
    ):
        if not low <= (value := getattr(arguments, name)) <= high:
            word = f"--{name.replace('_', '-')}"
            raise InputError(f"{word} from {low} to {high}", str(value), f"e.g. {word} {low}")
    if is_offline(arguments.model):
        needed = "an .onnx file or zoo:NAME: compiled models cannot be served"
        raise InputError(needed, arguments.model, "give what it was compiled from")
    levels = (Level(queue_limit=arguments.queue_limit),)
    policy = Policy(arguments.instances, arguments.max_batch, arguments.max_delay_s, levels=levels)
    name = model_name(arguments.model)
    shapes = common.shapes_of(arguments)

    def load() -> Any:
        return opened.open_model(arguments.model, arguments.chip, arguments.max_batch, shapes)

    def told(port: int) -> None:
        common.say([f"serving {name} at http://127.0.0.1:{port}"])
        sys.stdout.flush()

    service = rest.Service(name, load, policy, arguments.body_mib * 2**20)
    loopback.serve(service, arguments.port, told)
    common.say([f"{name} is served no more"])
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
max_error_rate, max_p95_s, users.

A language model: [model] llm = "zoo:qwen3_8b", chip, cluster, tp, ep, dp, pp, format, mode;
[requests] count, prompt, output (tokens, or [least, most]), seed; [arrivals] rate_per_s (none: all
at the start); [server] policy (static, prefill, select, split), max_batch, max_prefill_tokens,
blocks of the cache; [prefill] a machine of its own for prompts, keys as [model]."""

COMPILE = Verb(
    "compile",
    "compile an ONNX model into one file that runs without it",
    _compile,
    (
        MODEL,
        flag("--chip", "--soc_version", required=True, help="a preset name or your own .toml file"),
        flag("--output", metavar="F.alm", help="the file to write"),
        flag("--framework", default="5", metavar="5", help="5 (ONNX)"),
        flag("--mode", default="0", metavar="M", help="0 compile (default), 3 precheck only"),
        flag(
            "--input_shape",
            "--input-shape",
            default="",
            metavar='"x:1,3,224,224;y:1,10"',
            help="sizes left open; -1 for the batch of --dynamic_batch_size",
        ),
        flag("--dynamic_batch_size", metavar="1,2,4,8", help="compile for each of these"),
        flag(
            "--precision_mode",
            default="force_fp16",
            metavar="P",
            help="force_fp16 (default), allow_fp32_to_bf16, ...",
        ),
        flag("--keep_dtype", metavar="F", help="nodes, one a line, that stay in fp32"),
        flag(
            "--fusion_switch_file",
            "--fusion-switch",
            metavar="F",
            help='JSON: {"Switch": {"GraphFusion": {"ALL": "off"}, "UBFusion": {...}}}',
        ),
        flag("--compression", metavar="F", help="scales that `quantize --records` wrote: int8"),
        flag("--insert_op_conf", metavar="F.cfg", help="AIPP: camera frames, not images"),
        flag(
            "--enable_small_channel",
            choices=("0", "1"),
            default="0",
            help="1: AIPP writes four channels a pixel",
        ),
        flag(
            "--aicore_num",
            "--aicore-num",
            type=count,
            metavar="N",
            help="use N of the chip's cores",
        ),
        flag("--check_report", metavar="F.json", help="write a precheck report, node by node"),
        JSON,
        *(flag(name, help=argparse.SUPPRESS, nargs="?") for name in NO_MEANING),
    ),
)
VERBS = (
    Verb(
        "aipp",
        "raw camera frames through an AIPP configuration",
        _aipp,
        (
            flag("config", metavar="CONFIG.cfg", help="aipp_op { key: value ... } for each input"),
            flag("--image", required=True, metavar="X.npy", help="raw frames, flat uint8"),
            flag("--output", required=True, metavar="Y.npy", help="write fp16 (n, c, h, w) to it"),
            flag(
                "--rank",
                type=whole,
                default=0,
                metavar="N",
                help="which input: the aipp_op with this related_input_rank (0)",
            ),
            flag("--block", metavar="F.bin", help="parameters, with aipp_mode: dynamic"),
            flag("--chip", help="keep this chip's limits, too"),
            JSON,
        ),
    ),
    Verb(
        "serve-sim",
        "simulate a server: latency, throughput and batches",
        _serve_sim,
        (
            flag("config", metavar="CONFIG.toml", help="service, arrivals, server: see below"),
            JSON,
            flag("--figure", metavar="F.svg", help="draw latencies and batches (.svg, .png, .pdf)"),
        ),
        {"epilog": CONFIG_HELP},
    ),
    Verb(
        "serve",
        "answer requests for a model on loopback (KServe v2, as Triton does)",
        _serve,
        (
            MODEL,
            SHAPES,
            flag("--chip", help="compute as this chip's kernels do (default: the graph, exactly)"),
            flag("--port", type=whole, default=0, help="0, the default, takes a free one"),
            flag("--instances", type=count, default=1, metavar="N", help="threads (1)"),
            flag(
                "--max-batch",
                type=count,
                default=8,
                metavar="N",
                help="most rows that run together (8); shapes of your own run alone",
            ),
            flag(
                "--max-delay-s",
                type=decimal,
                default=0.0,
                metavar="S",
                help="how long the oldest request waits for others (0)",
            ),
            flag(
                "--queue-limit",
                type=count,
                default=2048,
                metavar="N",
                help="most requests that wait; more are told to come again (2048)",
            ),
            flag(
                "--body-mib",
                type=count,
                default=16,
                metavar="N",
                help="largest body of a request, unpacked, in MiB (16)",
            ),
        ),
    ),
)
