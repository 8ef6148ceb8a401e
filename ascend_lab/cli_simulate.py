"""The verb `ascend-lab simulate`: an ONNX model's time on a chip, operator by operator."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from ascend_lab.cli_aoe_use import add_tuned, check_fits, chip_with, is_tuned, with_tuned
from ascend_lab.cli_common import add_json, add_shapes, emit, import_with, shapes_of
from ascend_lab.errors import InputError
from ascend_lab.limits import whole
from ascend_lab.output import write_whole

if TYPE_CHECKING:
    from ascend_lab.chip import Chip
    from ascend_lab.graph import NetworkTimeline, OperatorTime
    from ascend_lab.graph.fusion import Fused, Switches
    from ascend_lab.graph.pipeline import Front

LONGEST = 44
"""Characters of an operator's name in the table; the front is left out."""


def add_simulate(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser("simulate", help="time an ONNX model on a chip, operator by operator")
    verb.add_argument("model", metavar="MODEL.onnx")
    verb.add_argument("--chip", required=True, help="a preset name or your own .toml file")
    add_shapes(verb)
    verb.add_argument("--dtype", default="fp16", help="fp16 (default), bf16 or int8")
    verb.add_argument("--fusion-switch", metavar="F", help="a fusion_switch.cfg file")
    verb.add_argument("--fusion-result", metavar="F", help="write fusion_result.json to F")
    verb.add_argument("--no-fusion", action="store_true", help="one kernel for every operator")
    verb.add_argument(
        "--memory-limit", type=whole, metavar="BYTES", help="device memory (default: the chip's)"
    )
    add_tuned(verb)
    add_json(verb)
    verb.add_argument("--trace", metavar="F", help="write a Chrome trace of the kernels")
    verb.set_defaults(run=_simulate)


def _simulate(arguments: argparse.Namespace) -> int:
    from ascend_lab.graph.fusion import read_switches
    from ascend_lab.graph.pipeline import front_stages
    from ascend_lab.graph.trace import write_network_trace

    chip = chip_with(arguments)
    if arguments.memory_limit is not None and arguments.memory_limit < 1:
        raise InputError(
            "--memory-limit of at least 1 byte", str(arguments.memory_limit), "raise it"
        )
    switches = read_switches(arguments.fusion_switch) if arguments.fusion_switch else None
    graph = import_with(arguments.model, None, shapes_of(arguments), arguments.batch).graph
    if switches and (unknown := unknown_names(switches)):
        print(f"ascend-lab: no pass or rule is called {', '.join(unknown)}", file=sys.stderr)
    front = front_stages(graph, chip, dtype=arguments.dtype, switches=switches)
    times, fused = _timed(arguments, front, chip, switches)
    if arguments.trace:
        write_network_trace(times, arguments.trace)
    if arguments.fusion_result:
        write_whole(arguments.fusion_result, fused.result_json(front.matches))
    emit(arguments.json, times.summary(), table(times, len(graph.nodes)))
    return 0


def _timed(
    arguments: argparse.Namespace, front: Front, chip: Chip, switches: Switches | None
) -> tuple[NetworkTimeline, Fused]:
    """Return the times with default or tuned kernels, and the fusion report."""
    from ascend_lab.graph import simulate_graph
    from ascend_lab.graph.pipeline import finish_stages
    from ascend_lab.graph.tiling import simulate_within

    limit, fusion = arguments.memory_limit, not arguments.no_fusion
    if not is_tuned(arguments):
        return simulate_within(front, chip, limit, fusion=fusion, switches=switches)
    stages = finish_stages(front, chip, fusion=fusion, switches=switches)
    check_fits(stages.compiled, limit)
    return simulate_graph(with_tuned(stages.compiled, arguments, arguments.dtype)), stages.fused


def unknown_names(switches: Switches) -> list[str]:
    """Return the names of a switch file that no pass and no rule has here."""
    from ascend_lab.graph.fusion.rules import AUTOMATIC, RULES
    from ascend_lab.graph.passes import PASSES

    known = {"ALL", AUTOMATIC, *PASSES, *(rule.name for rule in RULES)}
    return sorted({name for _, name in switches.named} - known)


def table(times: NetworkTimeline, nodes: int) -> list[str]:
    """Return the operators as lines of a table, and the totals."""
    from ascend_lab.graph.tiling import TiledTimeline

    chip = times.chip
    kernels, total_s = len(times.operators) - len(times.on_ai_cpu), times.time_s
    head = f"{times.name} on {chip.name}: {nodes} nodes, {kernels} kernels (model)"
    columns = f"{'us':>9} {'share':>6} {'bound by':>8} {'cube':>5} {'GM MB':>8} {'mem MB':>8}"
    lines = [head, f"{'kernel':{LONGEST}} {columns} {'L2':>5}"]
    if isinstance(times, TiledTimeline):
        lines.insert(1, f"in {times.tiles} tiles, as {times.limit_bytes / 1e9:.3f} GB of device "
                        f"memory ask: {times.halo_share:.2%} of the multiply-accumulates twice; "
                        "time and bytes of a kernel are of all its runs")  # fmt: skip
        lines += [_line(op, total_s, count) for op, count in times.repeated()]
    else:
        lines += [_line(op, total_s) for op in times.operators]
    launch_s = sum(op.timeline.launch_cycles for op in times.operators) / chip.clock_hz
    lines.append(
        f"total {total_s * 1e6:.1f} us ({launch_s * 1e6:.1f} us of it launches), "
        f"{times.memory_bytes / 1e6:.2f} MB to and from device memory, "
        f"{times.l2_hit_rate:.0%} of reads hit L2, {times.macs / 1e9:.2f} GMAC on the cube "
        "(zeros that pad included)"
    )
    if times.on_ai_cpu:
        lines.append(_ai_cpu(times))
    return lines


def _ai_cpu(times: NetworkTimeline) -> str:
    """Return what no kernel computes, its share of the time, and how far to trust that."""
    found = times.on_ai_cpu
    kinds = ", ".join(dict.fromkeys(op.type.partition(" ")[0] for op in found))
    trust = times.chip.facts["ai_cpu.rate_bytes_per_s"].trust
    return (
        f"AI CPU: {len(found)} without a kernel ({kinds}), "
        f"{times.ai_cpu_s * 1e6:.1f} us, {times.ai_cpu_s / times.time_s:.1%} of the time "
        f"(launch and rate: {trust})"
    )


def _line(op: OperatorTime, total_s: float, count: int = 1) -> str:
    t = op.timeline
    name = f"{op.name} ({op.type}){f' x{count}' if count > 1 else ''}"
    if len(name) > LONGEST:
        name = f"...{name[3 - LONGEST :]}"
    moved = sum(n for pair, n in t.path_bytes.items() if "GM" in pair)
    return (
        f"{name:{LONGEST}} {op.time_s * count * 1e6:9.2f} {op.time_s * count / total_s:6.1%} "
        f"{t.bound_by:>8} {op.cube_utilisation:5.0%} {moved * count / 1e6:8.3f} "
        f"{t.memory_bytes * count / 1e6:8.3f} "
        f"{t.l2_hit_rate:5.0%}"
    )
