"""`aoe --job_type 4`: split the gradients of models for a cluster."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ascend_lab.cli_aoe_flags import dtype_of
from ascend_lab.cli_common import Parser
from ascend_lab.cli_guard import say
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.limits import count

if TYPE_CHECKING:
    from ascend_lab.aoe.bank import Knowledge
    from ascend_lab.chip import Chip
    from ascend_lab.cli_aoe_inputs import Source
    from ascend_lab.cluster import Topology

Tell = Callable[[str], None]
CHIPS = {"910a": "Ascend910A", "910b": "Ascend910B", "ethernet": "Ascend910A"}
"""What the names of chips begin with, by what those of clusters begin with."""


def add_flags(made: Parser) -> None:
    """Add the flags of job 4."""
    group = made.add_argument_group("job 4, gradients")
    add = group.add_argument
    add("--cluster", default="", metavar="T", help="910a-server, 910a-roce:64, a .toml, ...")
    add("--devices", type=count, metavar="N", help="of the cluster, in place of T:N")
    add("--optimizer", default="sgd", choices=("sgd", "adam"), help="of the training step (sgd)")
    add("--max_segments", type=count, metavar="K", help="all-reduces at most (8, as HCCL)")


def check_flags(arguments: argparse.Namespace, jobs: Sequence[str]) -> None:
    """Raise `InputError` for job 4 with other jobs or without a cluster."""
    if "4" not in jobs:
        return
    if list(jobs) != ["4"]:
        remedy = "run jobs 1 and 2 first, then 4"
        raise InputError("--job_type 4 (gradient) by itself", ",".join(jobs), remedy)
    if not arguments.cluster:
        remedy = "e.g. --cluster 910a-roce:64; `ascend-lab topologies` lists them"
        raise InputError("--cluster for --job_type 4 (gradient)", "none", remedy)
    if arguments.singleop:
        raise InputError("--model or --model_path for job 4", "--singleop", "train a network")


def topology_of(arguments: argparse.Namespace) -> Topology:
    """Return the cluster that the flags name."""
    from ascend_lab.cluster import load_topology

    name, devices = arguments.cluster, arguments.devices
    if devices is not None:
        if devices < 1:
            raise InputError("--devices of at least 1", str(devices))
        if ":" in name or name.endswith(".toml"):
            found = load_topology(name)
            if found.size != devices:
                needed = f"--devices {found.size}, as --cluster {name} has"
                raise InputError(needed, str(devices), "drop one of the two")
            return found
        try:
            return load_topology(f"{name}:{devices}")
        except AscendLabError:
            found = load_topology(name)  # a name without a count says what is wrong with it
            if found.size == devices:
                return found
            raise
    return load_topology(name)


def tune_gradients_of(
    arguments: argparse.Namespace, sources: Sequence[Source], chip: Chip, tell: Tell
) -> int:
    """Tune all models, print and write reports; return the exit code."""
    from ascend_lab.aoe.bank import open_knowledge, repeat_tune
    from ascend_lab.aoe.saved import usable_folder

    topology, repeat = topology_of(arguments), repeat_tune(os.environ)
    folder, code = usable_folder(arguments.output), 0
    other = _other_chip(chip, topology)
    if other:
        tell(other)
    with open_knowledge(resume=False) as ledger:
        say([f"chip {chip.name}, {chip.core_count} cores; times are of the model"])
        for source in sources:
            try:
                _source(arguments, source, chip, topology, ledger, repeat, folder)
            except AscendLabError as error:
                if len(sources) == 1:
                    raise
                tell(f"{source.name}: {error}")
                code = 2
        for warning in ledger.warnings:
            tell(warning)
    return code


def _other_chip(chip: Chip, topology: Topology) -> str:
    """Return a warning where a preset's devices are of another kind than the chip."""
    from ascend_lab.chip import PRESETS

    devices = CHIPS.get(topology.name.partition("-")[0], chip.name)
    if chip.name not in PRESETS or chip.name.startswith(devices):
        return ""
    return (
        f"warning: the devices of {topology.name} are {devices}, --soc_version is {chip.name}: "
        f"compute is timed on {chip.name}, all-reduces between {devices}"
    )


def _source(
    arguments: argparse.Namespace,
    source: Source,
    chip: Chip,
    topology: Topology,
    ledger: Knowledge,
    repeat: bool,
    folder: Any,
) -> None:
    """Tune the networks of a source and write their report."""
    from dataclasses import replace

    from ascend_lab.aoe.gradient.forms import HCCL_SEGMENTS
    from ascend_lab.aoe.gradient.reporting import section, tuning_text
    from ascend_lab.aoe.gradient.tuning import tune_gradients
    from ascend_lab.aoe.report import write_report

    limit = HCCL_SEGMENTS if arguments.max_segments is None else arguments.max_segments
    settings = {"dtype": dtype_of(arguments), "optimizer": arguments.optimizer}
    sections = []
    for network in source.networks:
        found = tune_gradients(
            replace(network.load(), name=network.name),
            chip,
            topology,
            max_segments=limit,
            knowledge=ledger,
            repeat=repeat,
            settings=settings,
        )
        say(tuning_text(found))
        sections.append(section(found))
    say([f"  report {write_report(folder, 'gdat', sections)}"])
