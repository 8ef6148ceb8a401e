"""`aoe --job_type 4`: split the gradients of models for a cluster."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ascend_lab.cli_aoe_flags import dtype_of, topology_of
from ascend_lab.cli_terminal import say
from ascend_lab.errors import AscendLabError

if TYPE_CHECKING:
    from ascend_lab.aoe.bank import Knowledge
    from ascend_lab.chip import Chip
    from ascend_lab.cli_aoe_inputs import Source
    from ascend_lab.cluster import Topology

Tell = Callable[[str], None]
CHIPS = {"910a": "Ascend910A", "910b": "Ascend910B", "ethernet": "Ascend910A"}
"""What the names of chips begin with, by what those of clusters begin with."""


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
                _tune_gradients(arguments, source, chip, topology, ledger, repeat, folder)
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


def _tune_gradients(
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
