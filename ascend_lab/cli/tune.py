"""The command `aoe`: tunes models and says how far from the optimum their schedules can be.

    aoe --job_type 2 --model resnet18.onnx --soc_version Ascend310 --output tuned

writes a report, the tuned model and its schedules into the folder. Exit codes: 0 done, also when
nothing improved; 2 bad input, one line on stderr; 130 interrupted, with everything that was found
until then in the knowledge bank.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_lab import errors, output
from ascend_lab.cli import aoe_bank, aoe_words as flags, common
from ascend_lab.cli.inputs import Network, Source, operator_filter, sources_of
from ascend_lab.cli.printing import show
from ascend_lab.machine.chip import PRESETS, Chip

if TYPE_CHECKING:
    from ascend_lab.aoe import Settings, bank, engine, saved
    from ascend_lab.aoe.drive import Bars
    from ascend_lab.aoe.subgraph import SubgraphResult
    from ascend_lab.aoe.workers import Deadline, Workers
    from ascend_lab.cluster import Topology


SHOWN_OPERATORS = 8
"""How many operators are printed: those that take the most time."""
SAVE_SECONDS_PER_READ_SECOND = 2.5
"""Seconds reserved for saving a model, per second that reading it took."""


def run(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    started = time.monotonic()
    try:
        with _InterruptHandler():
            if argv[:1] == ["bank"]:
                return aoe_bank.bank_main(argv[1:])
            flags.refuse(argv)
            return _tune_all(flags.parser().parse_args(argv), started)
    except errors.AscendLabError as error:
        raise errors.InputError(common.in_flags(str(error), "aoe")) from error


def _complain(text: str) -> None:
    errors.complain("aoe", common.in_flags(text, "aoe"))


class _InterruptHandler:
    """A handler: the first Ctrl-C lets the run save what it found, a second ends it at once."""

    def __enter__(self) -> None:
        # Python lets only the main thread set handlers, and a caller's own handler stays in place.
        self.previous_handler: Any = signal.getsignal(signal.SIGINT)
        is_main_thread = threading.current_thread() is threading.main_thread()
        self.is_installed = is_main_thread and self.previous_handler is signal.default_int_handler
        if self.is_installed:
            signal.signal(signal.SIGINT, self._first)

    def __exit__(self, *_: object) -> None:
        if self.is_installed:
            signal.signal(signal.SIGINT, self.previous_handler)

    def _first(self, *_: object) -> None:
        """Interrupt the search; a second signal ends the program."""
        signal.signal(signal.SIGINT, self._second)
        raise KeyboardInterrupt

    @staticmethod
    def _second(*_: object) -> None:
        """End the program at once."""
        import multiprocessing

        # os._exit leaves no time for the pool to end its workers: they are killed here.
        for child in multiprocessing.active_children():
            child.kill()
        _complain("ended at once")
        os._exit(errors.INTERRUPTED)


@dataclass
class _Run:
    """A run of the command: what the flags ask for, the bank, and the warnings printed so far.

    `started` is when the time limit of the present network began to run; `head` holds the lines to
    print above the first result.
    """

    arguments: argparse.Namespace
    job: str
    chip: Chip
    dtype: str
    settings: Settings
    folder: Path
    knowledge: bank.Knowledge
    workers: Workers
    bars: Bars
    started: float
    head: list[str]
    warnings_printed: set[str] = field(default_factory=set)

    def deadline(self) -> Deadline:
        """Return the deadline of a network.

        The time of the first one runs from the start of the command: importing the package counts.
        """
        from ascend_lab.aoe.workers import Deadline

        limit_s = self.settings.time_limit_s
        return Deadline() if limit_s is None else Deadline(self.started + limit_s)

    def tune(self, network: Network) -> engine.Tuning:
        """Tune one network."""
        from ascend_lab.aoe.engine import Session, tune

        began_s = time.monotonic()
        self.bars("read", 0, 1, "")
        graph = network.load()
        read_s = time.monotonic() - began_s
        _print_once(self.head)
        if self.arguments.tune_ops_file:
            file = Path(self.arguments.tune_ops_file)
            is_listed, warning = operator_filter(file, graph, self.chip, self.dtype)
            self.warn_once(warning)
        else:
            is_listed = None
        with self.bars:
            return tune(
                graph,
                self.chip,
                self.job,
                settings=self.settings,
                bank=self.knowledge,
                session=Session(
                    executor=self.workers,
                    dtype=self.dtype,
                    chosen=is_listed,
                    progress=self.bars,
                    # A model read in 4 s is saved in about 10 s: the search ends that much earlier.
                    deadline=self.deadline().reserving(SAVE_SECONDS_PER_READ_SECOND * read_s),
                ),
            )

    def warn_once(self, warning: str) -> None:
        """Print a warning once."""
        # Networks of a folder often share one cause.
        if warning and warning not in self.warnings_printed:
            self.warnings_printed.add(warning)
            _complain(warning)


def _tune_all(arguments: argparse.Namespace, started: float) -> int:
    """Check all flags, then tune one source after another."""
    from ascend_lab.aoe import open_knowledge
    from ascend_lab.aoe.drive import Bars
    from ascend_lab.aoe.workers import workers_of

    # Errors in any flag are reported before the first model is read, which may take a minute.
    job = flags.job_of(arguments)
    chip = flags.chip_of(arguments)
    dtype = flags.dtype_of(arguments)
    settings = flags.settings_of(arguments, os.environ)
    sources = sources_of(arguments)
    # Job 4 times a training step on a cluster: it shares neither searches nor tuned models.
    if job == "4":
        return _tune_gradients(arguments, sources, chip)
    folder = output.usable_folder(arguments.output)
    bars = Bars(False if arguments.progress_bar == "off" else None)
    with (
        workers_of(flags.executor_of(arguments, os.environ)) as workers,
        open_knowledge(resume=arguments.reload) as knowledge,
    ):
        chip_hint = "" if arguments.soc_version else " (--soc_version chooses another)"
        # Users forget that the chip has a default, so the chip is printed above every result.
        head = [f"chip {chip.name}, {chip.core_count} cores{chip_hint}; times are of the model"]
        if arguments.Fnonhomo_split:
            head.insert(
                0, "--Fnonhomo_split changes nothing: slices of uneven sizes are always tried"
            )
        run = _Run(
            arguments=arguments,
            job=job,
            chip=chip,
            dtype=dtype,
            settings=settings,
            folder=folder,
            knowledge=knowledge,
            workers=workers,
            bars=bars,
            started=started,
            head=head,
        )
        return _for_each(sources, partial(_tune_source, run))


def _print_once(head: list[str]) -> None:
    """Print the head lines, once and only after a model was read.

    An unreadable model gives its error line alone.
    """
    while head:
        show(head.pop(0))


def _for_each(sources: Sequence[Source], action: Callable[[Source], bool]) -> int:
    """Apply `action` to every source until the user interrupts.

    With several sources an error is printed as a line and makes the exit code 2.
    """
    code = 0
    for source in sources:
        try:
            if action(source):
                _complain("interrupted; --reload goes on with what the bank holds")
                return errors.INTERRUPTED
        except errors.AscendLabError as error:
            # With a folder of models one that is damaged does not stop the others.
            if len(sources) == 1:
                raise
            _complain(f"{source.name}: {error}")
            code = 2
    return code


def _tune_source(run: _Run, source: Source) -> bool:
    """Tune the networks of a source and write their report; tell whether the user stopped it."""
    from ascend_lab.aoe.saved import write_report

    sections: dict[str, list[Any]] = {}  # by job, "sgat" or "opat": a section for each network
    try:
        stopped = any(_tune_network(run, network, sections) for network in source.networks)
    except KeyboardInterrupt:
        stopped = True
    finally:  # what was found before an error is reported too
        for job, sections_of_job in sections.items():
            show(f"  report {write_report(run.folder, job, sections_of_job)}")
    return stopped


def _tune_network(run: _Run, network: Network, sections: dict[str, list[Any]]) -> bool:
    """Tune a network, print and save the result; tell whether the user stopped it.

    Its sections of the report are added to `sections`.
    """
    from ascend_lab.aoe.saved import Report

    tuning = run.tune(network)
    for warning in tuning.warnings:
        run.warn_once(warning)
    report = Report(network.name, tuning, run.settings, run.knowledge.written)
    for job, section in report.as_dict().items():
        sections.setdefault(job, []).append(section)
    _print_report(report)
    _save(run, network.name, tuning)
    run.started = time.monotonic()  # --time_limit is for each network
    return tuning.interrupted


def _print_report(report: saved.Report) -> None:
    """Print the gains of each job, the operators that take longest, and the gap of the network."""
    from ascend_lab.aoe.saved import GAP_FORMULA
    from ascend_lab.compiler.compile import ledger_table

    tuning = report.tuning
    show(f"{report.name}: {len(tuning.graph.nodes)} nodes, {tuning.spent_s:.1f} s")
    if tuning.subgraph is not None:
        _print_job("sgat", tuning.subgraph, "subgraph tuning: slices and launches")
    if tuning.operators is not None:
        _print_job("opat", tuning.operators, "operator tuning: a schedule for each kernel")
    # The plan of slices takes several lines; all are indented below the job's.
    if tuning.subgraph is not None:
        show("  " + str(tuning.subgraph.plan).replace("\n", "\n  "))
        if tuning.subgraph.plan.one_launch:
            show("  (one launch: the host starts all kernels as one, parted by barriers)")
    if tuning.operators is not None:
        _print_operators(report, tuning.operators)
    show(
        f"  network: gap {tuning.gap:.2%} = {GAP_FORMULA}, bound {tuning.bound_s * 1e3:.6g} ms\n"
        "  (for any slicing and schedule; it counts one launch and few waits)"
    )
    show("\n".join(ledger_table(*tuning.ledgers)))


def _print_job(job: str, result: engine.NetworkResult | SubgraphResult, meaning: str) -> None:
    """Print by how much a job shortened the time of a network."""
    from ascend_lab.aoe.saved import GAIN_FORMULA

    end = "interrupted" if result.interrupted else "finished"
    show(
        f"{job} process {end}. Performance improved by {result.gain:.2%}, "
        f"{result.before_s * 1e3:.6g} ms -> {result.after_s * 1e3:.6g} ms\n"
        f"  = {GAIN_FORMULA}; {job} is {meaning}"
    )


def _print_operators(report: saved.Report, result: engine.NetworkResult) -> None:
    """Print the operators that take longest, and how far from the optimum their schedules are."""
    from ascend_lab.aoe.tuning import NOT_REACHED

    show(report.top(SHOWN_OPERATORS))
    show(f"  {_gap_text(result)}")
    # A search that ended early has no result for the operators that it did not reach.
    not_reached = sum(r.note == NOT_REACHED for r in result.results)
    if not_reached:
        defaults = f"{not_reached} kinds of operators keep their defaults"
        show(
            f"  --time_limit ended the search: {defaults}, of which nothing is proven; raise it, "
            "or go on by the same command: the bank keeps what was found"
        )


def _gap_text(result: engine.NetworkResult) -> str:
    """Return how far from the best point of its space each operator's schedule is."""
    # Gap 0.05: at most 5 % of the time can be won. None: the operator has no lower bound.
    gaps = [0.0 if r.proven else r.gap for r in result.results if r.gap is not None]
    if not gaps:
        notes = {r.note for r in result.results if r.note} or {"there is none"}
        return f"no operator was tuned: {'; '.join(sorted(notes))}"
    proven = sum(r.proven for r in result.results)
    from_bank = result.outcomes.count("hit")
    line = f"{proven} of {len(gaps)} kinds of operators proven optimal in their spaces"
    if from_bank:
        line += f"; {from_bank} from the bank"
    if proven < len(gaps):
        line += f"\n  largest gap of the others {max(gap for gap in gaps if gap):.2%}"
    return line


def _save(run: _Run, name: str, tuning: engine.Tuning) -> None:
    """Save the tuned model, and print the time that it takes when it is read again."""
    from ascend_lab.aoe.saved import save_tuned

    # An untuned model must not be saved under the name of a tuned one.
    if run.deadline().has_passed and not tuning.result_s < tuning.baseline_s:
        show("  no tuned model is written: in the time limit nothing was tuned")
        return
    try:
        with run.bars:
            run.bars("save", 0, 2, "")
            saved = save_tuned(run.folder, name, tuning, run.dtype)
            run.bars("save", 2, 2, "")
    except errors.UnsupportedError as error:
        run.warn_once(f"{name}: the schedules are saved, the tuned model is not: {error}")
        return
    show(
        f"  tuned model {saved.model}\n  schedules {saved.schedules}\n"
        f"  {saved.time_s * 1e3:.6g} ms when both are read again"
    )


# -- job 4, gradients ------------------------------------------------------------------------------
CHIP_OF_CLUSTER = {
    "910a": "Ascend910A",
    "910b": "Ascend910B",
    "ethernet": "Ascend910A",
    "a3": "Ascend910C",
}
"""Prefix of a cluster's name -> prefix of its chips' names: 910b-roce has chips such as the
Ascend910B2."""


def _tune_gradients(arguments: argparse.Namespace, sources: Sequence[Source], chip: Chip) -> int:
    """Choose for each model which gradients go into one all-reduce; return the exit code."""
    from ascend_lab.aoe import bank, gradient, saved
    from ascend_lab.aoe.gradient.planning import HCCL_SEGMENTS

    topology = flags.topology_of(arguments)
    repeat = bank.repeat_tune(os.environ)
    folder = output.usable_folder(arguments.output)
    max_segments = arguments.max_segments
    settings = {"dtype": flags.dtype_of(arguments), "optimizer": arguments.optimizer}
    if chip_warning := _other_chip(chip, topology):
        _complain(chip_warning)

    head = [f"chip {chip.name}, {chip.core_count} cores; times are of the model"]

    def tune_source(source: Source) -> bool:
        """Tune the networks of a source and write their report.

        Return False, since an interrupt is not caught here.
        """
        sections = []
        for network in source.networks:
            # The report names a model as the user did, not as the ONNX file does.
            graph = replace(network.load(), name=network.name)
            _print_once(head)
            tuning = gradient.tune_gradients(
                graph,
                chip,
                topology,
                max_segments=HCCL_SEGMENTS if max_segments is None else max_segments,
                source=gradient.ProfileSource(knowledge, repeat, settings),
            )
            show("\n".join(gradient.tuning_text(tuning)))
            sections.append(gradient.section(tuning))
        show(f"  report {saved.write_report(folder, 'gdat', sections)}")
        return False

    with bank.open_knowledge(resume=False) as knowledge:
        code = _for_each(sources, tune_source)
        for warning in knowledge.warnings:
            _complain(warning)
    return code


def _other_chip(chip: Chip, topology: Topology) -> str:
    """Return a warning if the devices of a preset cluster are not the chip that is timed."""
    devices = CHIP_OF_CLUSTER.get(topology.name.partition("-")[0], chip.name)
    # For a user's own chip file the cluster is unknown.
    if chip.name not in PRESETS or chip.name.startswith(devices):
        return ""
    return (
        f"warning: the devices of {topology.name} are {devices}, --soc_version is {chip.name}: "
        f"compute is timed on {chip.name}, all-reduces between {devices}"
    )
