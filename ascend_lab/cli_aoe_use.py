"""Options `--tuned` and `--bank` of other commands: use what `aoe` has found."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ascend_lab.errors import CapacityError, InputError
from ascend_lab.limits import count

if TYPE_CHECKING:
    from ascend_lab.chip import Chip
    from ascend_lab.graph import Compiled


def add_tuned(verb: argparse.ArgumentParser) -> None:
    """Add the options."""
    verb.add_argument("--tuned", metavar="F.jsonl", help="schedules that `aoe` saved for the model")
    verb.add_argument(
        "--bank", metavar="PATH", help="use what a knowledge bank (file or export) or builtin knows"
    )
    verb.add_argument("--aicore-num", type=count, metavar="N", help="use N of the chip's cores")


def is_tuned(arguments: argparse.Namespace) -> bool:
    """Tell whether the user wants tuned kernels."""
    if arguments.tuned is not None and arguments.bank is not None:
        raise InputError("--tuned or --bank", "both", "choose one")
    return arguments.tuned is not None or arguments.bank is not None


def with_tuned(compiled: Compiled, arguments: argparse.Namespace, dtype: str = "fp16") -> Compiled:
    """Return a compiled network with the tuned kernels that the arguments name."""
    from ascend_lab.aoe.saved import bank_at, read_schedules, with_bank

    if arguments.bank is not None:
        with bank_at(arguments.bank) as knowledge:
            for warning in knowledge.warnings:
                print(f"ascend-lab: {warning}", file=sys.stderr)
            return with_bank(compiled, knowledge).compiled
    schedules = read_schedules(arguments.tuned)
    if schedules.dtype != dtype:
        remedy = f"`ascend-lab simulate --dtype {schedules.dtype}` takes these"
        raise InputError(f"schedules for {dtype}", f"some for {schedules.dtype}", remedy)
    return schedules.applied(compiled)


def check_fits(compiled: Compiled, limit_bytes: int | None) -> None:
    """Raise `CapacityError` for a network that would have to be computed in tiles."""
    from ascend_lab.graph.tiling.timing import planned_bytes

    limit = compiled.chip.device_memory.size_bytes if limit_bytes is None else limit_bytes
    peak = planned_bytes(compiled)
    if peak > limit:
        what = f"a tuned network within {limit:,} bytes of device memory"
        raise CapacityError(what, f"{peak:,}", "leave out --tuned and --bank: it is tiled then")


def chip_with(arguments: argparse.Namespace) -> Chip:
    """Return the chip with as many cores as the user says."""
    return with_cores(arguments.chip, arguments.aicore_num, "--aicore-num")


def with_cores(name: str, cores: int | None, flag: str) -> Chip:
    """Return a chip that uses some of its cores."""
    from dataclasses import replace

    from ascend_lab.chip import load_chip

    chip = load_chip(name)
    if cores is None:
        return chip
    if not 1 <= cores <= chip.core_count:
        needed = f"{flag} from 1 to {chip.core_count}, the cores of {chip.name}"
        raise InputError(needed, str(cores))
    return replace(chip, core_count=cores)
