"""The command `aoe`: tune models, and say how far from the optimum they end.

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
from ascend_lab.cli.inputs import Network, Source, sources_of, wanted_of
from ascend_lab.cli.printing import show
from ascend_lab.machine.chip import PRESETS, Chip

if TYPE_CHECKING:
    from ascend_lab.aoe import Bars, Settings, bank, engine, saved
    from ascend_lab.aoe.workers import Deadline, Workers
    from ascend_lab.cluster import Topology


TOP = 8
"""Operators printed, those that take the most time."""
SAVING = 2.5
"""Seconds kept for saving a model, for each that reading it took."""


def run(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    started = time.monotonic()
    try:
        with _CtrlC():
            if argv[:1] == ["bank"]:
                return aoe_bank.bank_main(argv[1:])
            flags.refuse(argv)
            return _tune_all(flags.parser().parse_args(argv), started)
    except errors.AscendLabError as error:
        raise errors.InputError(common.in_flags(str(error), "aoe")) from error


def _complain(text: str) -> None:
    errors.complain("aoe", common.in_flags(text, "aoe"))


class _CtrlC:
    """The first Ctrl-C lets the run keep what it found, a second one ends it at once."""

    def __enter__(self) -> None:
        # Python lets only the main thread set handlers, and a caller's own handler stays in place.
        self.before: Any = signal.getsignal(signal.SIGINT)
        main = threading.current_thread() is threading.main_thread()
        self.ours = main and self.before is signal.default_int_handler
        if self.ours:
            signal.signal(signal.SIGINT, self._first)

    def __exit__(self, *_: object) -> None:
        if self.ours:
            signal.signal(signal.SIGINT, self.before)

    def _first(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._second)
        raise KeyboardInterrupt

    @staticmethod
    def _second(*_: object) -> None:
        import multiprocessing

        # os._exit leaves no time for the pool to end its workers: they are killed here.
        for child in multiprocessing.active_children():
            child.kill()
        _complain("ended at once")
        os._exit(errors.INTERRUPTED)


@dataclass
class _Run:
    """A run of the command: what the flags ask for, the bank, and what was printed already.

    `started` is when the time of the network at work began; `head` are lines that wait to be
    printed above the first result.
    """

    arguments: argparse.Namespace
    job: str
    chip: Chip
    dtype: str
    settings: Settings
    folder: Path
    ledger: bank.Knowledge
    workers: Workers
    bars: Bars
    started: float
    head: list[str]
    warnings_printed: set[str] = field(default_factory=set)

    def deadline(self) -> Deadline:
        """Return the end of the time of a network: the first one's began with the command."""
        from ascend_lab.aoe.workers import Deadline

        limit_s = self.settings.time_limit_s
        # Importing the package counts: the user waits for it, too.
        return Deadline() if limit_s is None else Deadline(self.started + limit_s)

    def tune(self, network: Network) -> engine.Tuning:
        """Tune one network."""
        from ascend_lab.aoe.engine import Session, tune

        began_s = time.monotonic()
        self.bars("read", 0, 1, "")
        graph = network.load()
        is_listed = None
        read_s = time.monotonic() - began_s
        _print_once(self.head)
        if self.arguments.tune_ops_file:
            file = Path(self.arguments.tune_ops_file)
            is_listed, warning = wanted_of(file, graph, self.chip, self.dtype)
            self.tell(warning)
        with self.bars:
            return tune(
                graph,
                self.chip,
                self.job,
                settings=self.settings,
                bank=self.ledger,
                session=Session(
                    executor=self.workers,
                    dtype=self.dtype,
                    chosen=is_listed,
                    progress=self.bars,
                    # A model read in 4 s is saved in about 10: the search ends as much earlier.
                    deadline=self.deadline().reserving(SAVING * read_s),
                ),
            )

    def tell(self, warning: str) -> None:
        """Print a warning once."""
        # Networks of a folder often share one cause.
        if warning and warning not in self.warnings_printed:
            self.warnings_printed.add(warning)
            _complain(warning)


def _tune_all(arguments: argparse.Namespace, started: float) -> int:
    """Check all flags, then tune one source after another."""
    from ascend_lab.aoe import Bars, open_knowledge, workers_of

    # A slip in any flag is told before the first model is read, which may take a minute.
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
        open_knowledge(resume=arguments.reload) as ledger,
    ):
        asked = "" if arguments.soc_version else " (--soc_version chooses another)"
        # The chip is a default that users forget: it stands above every result.
        head = [f"chip {chip.name}, {chip.core_count} cores{asked}; times are of the model"]
        if arguments.Fnonhomo_split:
            head.insert(
                0, "--Fnonhomo_split changes nothing: slices of uneven sizes are always tried"
            )
        run = _Run(
            arguments, job, chip, dtype, settings, folder, ledger, workers, bars, started, head
        )
        return _each(sources, partial(_source, run))


def _print_once(head: list[str]) -> None:
    """Print the lines above all results, once: a model that cannot be read is one line, without."""
    while head:
        show(head.pop(0))


def _each(sources: Sequence[Source], act: Callable[[Source], bool]) -> int:
    """Act on every source until the user stops; with several, an error is a line and code 2."""
    code = 0
    for source in sources:
        try:
            if act(source):
                _complain("interrupted; --reload goes on with what the bank holds")
                return errors.INTERRUPTED
        except errors.AscendLabError as error:
            # With a folder of models one that is damaged does not stop the others.
            if len(sources) == 1:
                raise
            _complain(f"{source.name}: {error}")
            code = 2
    return code


def _source(run: _Run, source: Source) -> bool:
    """Tune the networks of a source and write their report; tell whether the user stopped it."""
    from ascend_lab.aoe.saved import write_report

    sections: dict[str, list[Any]] = {}  # by job, "sgat" or "opat": a section for each network
    try:
        stopped = any(_network(run, network, sections) for network in source.networks)
    except KeyboardInterrupt:
        stopped = True
    finally:  # what was found before an error is reported too
        for job, sections_of_job in sections.items():
            show(f"  report {write_report(run.folder, job, sections_of_job)}")
    return stopped


def _network(run: _Run, network: Network, sections: dict[str, list[Any]]) -> bool:
    """Tune a network, print and save the result; tell whether the user stopped it.

    Its sections of the report are added to `sections`.
    """
    from ascend_lab.aoe.saved import Report

    tuning = run.tune(network)
    for warning in tuning.warnings:
        run.tell(warning)
    report = Report(network.name, tuning, run.settings, run.ledger.written)
    for job, section in report.as_dict().items():
        sections.setdefault(job, []).append(section)
    _print(report)
    _save(run, network.name, tuning)
    run.started = time.monotonic()  # --time_limit is for each network
    return tuning.interrupted


def _print(report: saved.Report) -> None:
    """Print the gains of each job, the operators that take longest, and the gap of the network."""
    from ascend_lab.aoe.saved import GAIN_FORMULA, GAP_FORMULA
    from ascend_lab.aoe.tuning import NOT_REACHED
    from ascend_lab.compiler.compile import ledger_table

    name = report.name
    tuning = report.tuning

    show(f"{name}: {len(tuning.graph.nodes)} nodes, {tuning.spent_s:.1f} s")
    for job, result, gloss in [
        ("sgat", tuning.subgraph, "subgraph tuning: slices and launches"),
        ("opat", tuning.operators, "operator tuning: a schedule for each kernel"),
    ]:
        if result is not None:
            before_s = result.before_s
            after_s = result.after_s
            end = "interrupted" if result.interrupted else "finished"
            show(
                f"{job} process {end}. Performance improved by {result.gain:.2%}, "
                f"{before_s * 1e3:.4f} ms -> {after_s * 1e3:.4f} ms\n"
                f"  = {GAIN_FORMULA}; {job} is {gloss}"
            )
    # The plan of slices takes several lines; all are indented below the job's.
    if tuning.subgraph is not None:
        show("  " + str(tuning.subgraph.plan).replace("\n", "\n  "))
        if tuning.subgraph.plan.one_launch:
            show("  (one launch: the host starts all kernels as one, parted by barriers)")
    if tuning.operators is not None:
        show(report.top(TOP))
        show(f"  {_operators(tuning.operators)}")
        # A search that ended early says nothing about the operators it has not come to.
        late = sum(r.note == NOT_REACHED for r in tuning.operators.results)
        if late:
            kept = f"{late} kinds of operators keep their defaults, of which nothing is proven"
            show(
                f"  --time_limit ended the search: {kept}; raise it, or go on by the same "
                "command: the bank keeps what was found"
            )
    show(
        f"  network: gap {tuning.gap:.2%} = {GAP_FORMULA}, bound {tuning.bound_s * 1e3:.4f} ms\n"
        "  (for any slicing and schedule; it counts one launch and few waits)"
    )
    show("\n".join(ledger_table(*tuning.ledgers)))


def _operators(result: engine.NetworkResult) -> str:
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

    # A default model under the name of a tuned one would mislead.
    if run.deadline().has_passed and not tuning.result_s < tuning.baseline_s:
        show("  no tuned model is written: in the time limit nothing was tuned")
        return
    try:
        with run.bars:
            run.bars("save", 0, 2, "")
            saved = save_tuned(run.folder, name, tuning, run.dtype)
            run.bars("save", 2, 2, "")
    except errors.UnsupportedError as error:
        run.tell(f"{name}: the schedules are saved, the tuned model is not: {error}")
        return
    show(
        f"  tuned model {saved.model}\n  schedules {saved.schedules}\n"
        f"  {saved.time_s * 1e3:.4f} ms when both are read again"
    )


# -- job 4, gradients ------------------------------------------------------------------------------
CHIPS = {"910a": "Ascend910A", "910b": "Ascend910B", "ethernet": "Ascend910A", "a3": "Ascend910C"}
"""By the start of a cluster's name the start of its chips' names: 910b-roce has Ascend910B2."""


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
                source=gradient.ProfileSource(ledger, repeat, settings),
            )
            show("\n".join(gradient.tuning_text(tuning)))
            sections.append(gradient.section(tuning))
        show(f"  report {saved.write_report(folder, 'gdat', sections)}")
        return False

    head = [f"chip {chip.name}, {chip.core_count} cores; times are of the model"]
    with bank.open_knowledge(resume=False) as ledger:
        code = _each(sources, tune_source)
        for warning in ledger.warnings:
            _complain(warning)
    return code


def _other_chip(chip: Chip, topology: Topology) -> str:
    """Return a warning where the devices of a preset cluster are not the chip that is timed."""
    devices = CHIPS.get(topology.name.partition("-")[0], chip.name)
    # Of a chip file of one's own nobody knows which cluster it is built into.
    if chip.name not in PRESETS or chip.name.startswith(devices):
        return ""
    return (
        f"warning: the devices of {topology.name} are {devices}, --soc_version is {chip.name}: "
        f"compute is timed on {chip.name}, all-reduces between {devices}"
    )
