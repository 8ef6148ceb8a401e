"""The command line `ascend-lab`: chips, gemm, conv, op, run-kernel, run, simulate, ...

Errors are one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from ascend_lab import __version__
from ascend_lab.cli_collective import add_collective
from ascend_lab.cli_fit_collective import add_fit_collective
from ascend_lab.cli_gradient import add_gradient
from ascend_lab.cli_memory import add_plan_memory
from ascend_lab.cli_ops import add_op
from ascend_lab.cli_replay import add_replay
from ascend_lab.cli_run import add_run
from ascend_lab.cli_simulate import add_simulate
from ascend_lab.cli_strategy import add_strategy
from ascend_lab.cli_subgraph import add_subgraph
from ascend_lab.cli_topologies import add_topologies
from ascend_lab.cli_train_plan import add_train_plan
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.limits import count, printable, shown, whole, wholes_of


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors."""

    def error(self, message: str) -> NoReturn:
        verb = self.prog.partition(" ")[2]
        where = f"{verb}: " if verb else ""
        raise InputError(f"{where}{message}", remedy=f"see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 done, 1 checks failed, 2 bad input."""
    try:
        arguments = _parser().parse_args(argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except AscendLabError as error:
        print(f"ascend-lab: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("ascend-lab: interrupted", file=sys.stderr)
        return 130
    except (MemoryError, RecursionError, OverflowError) as error:
        print(
            f"ascend-lab: the input is too large ({type(error).__name__}); use a smaller one",
            file=sys.stderr,
        )
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ascend-lab", description="A Da Vinci NPU on your laptop.")
    parser.add_argument("--version", action="version", version=f"ascend-lab {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
    _add_chips(verbs)
    _add_gemm(verbs)
    _add_conv(verbs)
    add_op(verbs, _emit)
    _add_run_kernel(verbs)
    add_run(verbs, _emit)
    add_simulate(verbs, _emit)
    add_plan_memory(verbs, _emit)
    add_replay(verbs, _emit)
    add_subgraph(verbs, _emit)
    add_strategy(verbs, _emit)
    add_gradient(verbs, _emit)
    add_topologies(verbs, _emit)
    add_collective(verbs, _emit)
    add_fit_collective(verbs, _emit)
    add_train_plan(verbs, _emit)
    return parser


def _common(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--chip", required=True, help="a preset name or your own .toml file")
    verb.add_argument("--json", metavar="F", help="write JSON to F, or print it with -")
    verb.add_argument("--trace", metavar="F", help="write a Chrome trace of the slowest core")


def _tiling(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--tile", metavar="m,k,n", help="base tile of L0, in elements")
    verb.add_argument(
        "--step-k", type=count, metavar="S", help="base_k tiles staged in L1 (1 with --tile)"
    )
    verb.add_argument("--grid", metavar="RxC", help="cores along m and along n")
    verb.add_argument("--dtype", default="fp16", help="fp16 (default) or int8")
    verb.add_argument("--out-dtype", default="", help="fp32, int32 or fp16")
    _common(verb)


def _add_chips(verbs: Any) -> None:
    verb = verbs.add_parser("chips", help="list the chips, or show one with all its numbers")
    verb.add_argument("name", nargs="?", help="a preset name or your own .toml file")
    verb.add_argument("--json", metavar="F", help="write JSON to F, or print it with -")
    verb.set_defaults(run=_chips)


def _add_gemm(verbs: Any) -> None:
    verb = verbs.add_parser("gemm", help="time C = A @ B, A is M x K, B is K x N")
    sizes = {"m": "rows of A and C", "n": "columns of B and C", "k": "columns of A, rows of B"}
    for name, text in sizes.items():
        verb.add_argument(name, metavar=name.upper(), type=whole, help=text)
    _tiling(verb)
    verb.set_defaults(run=_gemm)


def _add_conv(verbs: Any) -> None:
    verb = verbs.add_parser("conv", help="time a convolution: batch, channels, image, kernels")
    sizes = {"n": "images", "c": "channels", "h": "image height", "w": "image width"}
    sizes |= {"k": "kernels (output channels)", "r": "kernel height", "s": "kernel width"}
    for name, text in sizes.items():
        verb.add_argument(name, metavar=name.upper(), type=whole, help=text)
    verb.add_argument("--stride", default="1", metavar="S", help="one number, or down,across")
    verb.add_argument(
        "--pad", default="0", metavar="P", help="one number, rows,columns or top,bottom,left,right"
    )
    verb.add_argument("--dilation", default="1", metavar="D", help="one number, or down,across")
    verb.add_argument("--groups", type=count, default=1, metavar="G")
    _tiling(verb)
    verb.set_defaults(run=_conv)


def _add_run_kernel(verbs: Any) -> None:
    verb = verbs.add_parser("run-kernel", help="execute, check and time a kernel of your own")
    verb.add_argument("file", metavar="FILE.py")
    verb.add_argument("--sanitize", action="store_true", help="look for races and lost flags")
    verb.add_argument("--seed", type=whole, default=0, help="seed of the inputs")
    _common(verb)
    verb.set_defaults(run=_run_kernel)


# -- verbs --------------------------------------------------------------------------------------


def _chips(arguments: argparse.Namespace) -> int:
    from ascend_lab.chip import load_chip, presets
    from ascend_lab.chip.report import chip_dict, chip_lines, chip_table

    if arguments.name is None:
        chips = presets()
        data: Any = {name: chip_dict(chip) for name, chip in chips.items()}
        text = chip_table(chips.values())
    else:
        chip = load_chip(arguments.name)
        data, text = chip_dict(chip), chip_lines(chip)
    _emit(arguments.json, data, text)
    return 0


def _gemm(arguments: argparse.Namespace) -> int:
    from ascend_lab.chip import load_chip
    from ascend_lab.kernels import GemmShape, default_schedule, gemm_launch

    chip = load_chip(arguments.chip)
    shape = GemmShape(arguments.m, arguments.k, arguments.n, arguments.dtype, arguments.out_dtype)
    schedule = _override(default_schedule(shape, chip), arguments)
    return _time(arguments, chip, gemm_launch(shape, chip, schedule), schedule, shape)


def _conv(arguments: argparse.Namespace) -> int:
    from ascend_lab.chip import load_chip
    from ascend_lab.kernels import ConvShape, conv_launch, conv_schedule

    chip = load_chip(arguments.chip)
    names = ("n", "c", "h", "w", "k", "r", "s", "groups", "dtype", "out_dtype")
    given: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    for name in ("stride", "pad", "dilation"):
        text = getattr(arguments, name)
        given[name] = tuple(_numbers(text, ",", text.count(",") + 1, f"--{name} as numbers"))
    shape = ConvShape(**given)
    schedule = _override(conv_schedule(shape, chip), arguments)
    return _time(arguments, chip, conv_launch(shape, chip, schedule), schedule, shape)


def _run_kernel(arguments: argparse.Namespace) -> int:
    from ascend_lab.chip import load_chip
    from ascend_lab.kernels.student import run_kernel_file
    from ascend_lab.sim import write_trace

    chip = load_chip(arguments.chip)
    report = run_kernel_file(
        arguments.file, chip, check_sync=arguments.sanitize, seed=arguments.seed
    )
    if arguments.trace:
        write_trace(report.timeline, arguments.trace)
    lines = [report.text, *map(str, report.findings)]
    if arguments.sanitize and not report.findings:
        lines.append("sanitizer: nothing found")
    _emit(arguments.json, report.as_dict(), "\n".join(lines))
    return 0 if report.values_ok and not report.findings else 1


# -- helpers ------------------------------------------------------------------------------------


def _numbers(text: str, separator: str, count: int, what: str) -> list[int]:
    values = wholes_of(text.lower(), separator)
    if len(values) != count:
        raise InputError(f"{what}", shown(text), "give whole numbers")
    return list(values)


def _override(schedule: Any, arguments: argparse.Namespace) -> Any:
    fields: dict[str, int] = {}
    if arguments.tile is not None:
        m, k, n = _numbers(arguments.tile, ",", 3, "--tile as m,k,n")
        fields |= {"base_m": m, "base_k": k, "base_n": n}
        fields["step_k"] = 1
    if arguments.step_k is not None:
        fields["step_k"] = arguments.step_k
    if arguments.grid is not None:
        rows, cols = _numbers(arguments.grid, "x", 2, "--grid as RxC")
        fields |= {"grid_rows": rows, "grid_cols": cols}
    return replace(schedule, **fields)


def _time(arguments: argparse.Namespace, chip: Any, launch: Any, schedule: Any, shape: Any) -> int:
    from ascend_lab.sim import simulate, write_trace

    timeline = simulate(launch, chip)
    if arguments.trace:
        write_trace(timeline, arguments.trace)
    busy = timeline.busy
    store = busy.get("FIX", 0.0) if not chip.combined else busy.get("MTE3", 0.0)
    ops_per_s = shape.ops / timeline.time_s
    data = {
        **timeline.summary(),
        "tflops": ops_per_s / 1e12,
        "peak_share": ops_per_s / chip.peak_ops_per_s(shape.dtype),
        "busy": {
            "cube": busy.get("M", 0.0),
            "mte1": busy.get("MTE1", 0.0),
            "mte2": busy.get("MTE2", 0.0),
            "store": store,
        },
        "schedule": schedule.as_dict(),
    }
    shares = ", ".join(f"{name} {share:.1%}" for name, share in data["busy"].items())
    text = (
        f"{timeline.name} on {timeline.core_count} cores of {chip.name} (model result)\n"
        f"  {timeline.time_s * 1e6:.2f} us with launch, {timeline.cycles} cycles, "
        f"{data['tflops']:.2f} TFLOPS = {data['peak_share']:.1%} of the cube peak\n"
        f"  bound by {timeline.bound_by}; busy: {shares}\n"
        f"  schedule: {', '.join(f'{k} {v}' for k, v in schedule.as_dict().items())}"
    )
    _emit(arguments.json, data, text)
    return 0


def _emit(target: str | None, data: Any, text: str) -> None:
    """Print `text`, or write `data` as JSON to a file or, for "-", to stdout."""
    if target is None:
        print(printable(text))
        return
    dump = json.dumps(_finite(data), indent=2)
    if target == "-":
        print(dump)
        return
    try:
        Path(target).write_text(dump + "\n", "utf-8")
    except OSError as error:
        raise InputError("a file that can be written", f"{target}: {error}", "check it") from error


def _finite(value: Any) -> Any:
    """JSON has no infinity: write null instead."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


if __name__ == "__main__":
    sys.exit(main())
