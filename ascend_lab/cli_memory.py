"""The verb `ascend-lab plan-memory`: offsets for the buffers of a CSV file."""

from __future__ import annotations

import argparse
from typing import Any

from ascend_lab.cli_common import add_json, check_limit, check_seed, emit, refuse_idle
from ascend_lab.errors import InputError
from ascend_lab.limits import decimal, whole


def add_plan_memory(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser("plan-memory", help="give buffers with lifetimes their addresses")
    verb.add_argument("file", metavar="FILE.csv", help="rows of id,lower,upper,size")
    verb.add_argument("--capacity", type=whole, metavar="N", help="bytes there are (default: any)")
    verb.add_argument("--time-limit", type=decimal, default=60.0, metavar="S", help="seconds (60)")
    verb.add_argument(
        "--alignment", type=whole, default=1, metavar="A", help="of offsets, bytes (1)"
    )
    verb.add_argument("--method", default="best of", metavar="M", help='a rule ("best of")')
    verb.add_argument("--seed", type=whole, default=0, help="seed of the search (0)")
    add_json(verb)
    verb.set_defaults(run=_plan_memory)


def _plan_memory(arguments: argparse.Namespace) -> int:
    _check_memory(arguments)
    from ascend_lab.graph.memory import plan, verify
    from ascend_lab.graph.memory.table import read_csv

    buffers, capacity = read_csv(arguments.file), arguments.capacity
    found = plan(
        buffers,
        capacity,
        arguments.method,
        arguments.time_limit,
        arguments.alignment,
        arguments.seed,
    )
    verify(found, buffers, arguments.alignment)
    fits = capacity is None or found.height_bytes <= capacity
    data = {
        "height_bytes": found.height_bytes,
        "lower_bound_bytes": found.lower_bound_bytes,
        "capacity_bytes": capacity,
        "fits": fits,
        "gap": found.gap,
        "optimal": found.optimal,
        "method": found.method,
        "offsets": dict(found.offsets),
    }
    lowest = "no plan is lower" if found.optimal else "a lower plan may exist"
    lines = [
        f"{len(buffers)} buffers in {found.height_bytes} bytes by {found.method}: {lowest}",
        f"  peak of live bytes {found.lower_bound_bytes}, gap {found.gap:.2%}",
    ]
    if capacity is not None:
        verdict = "packed" if fits else "NOT packed"
        lines.append(f"  {verdict} into the capacity of {capacity} bytes")
    emit(arguments.json, data, lines)
    return 0 if fits else 1


def _check_memory(arguments: argparse.Namespace) -> None:
    """Refuse numbers and names that mean nothing."""
    check_limit(arguments.time_limit)
    check_seed(arguments.seed)
    from ascend_lab.graph.memory import METHODS

    if arguments.method not in METHODS:
        needed = f"--method as one of {', '.join(METHODS)}"
        raise InputError(needed, repr(arguments.method))
    if arguments.method not in ("best of", "exact"):
        searching = 'with a --method that searches ("best of", exact)'
        refuse_idle(arguments, searching, "--time-limit", "--seed")
    if arguments.capacity is not None and arguments.capacity < 0:
        raise InputError("--capacity of at least 0 bytes", str(arguments.capacity))
    if not 1 <= arguments.alignment <= 2**30:
        raise InputError("--alignment from 1 to 2**30 bytes", str(arguments.alignment))
