"""The words of `aoe`: flags that mean something here, one line for those that do not, `aoe bank`.

The bank's verbs look at the custom knowledge bank, and take it from one machine to another.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_lab.cli.common import CLUSTER_FILE, LONGEST_S, check_least, refuse_idle, with_cores
from ascend_lab.cli.parser import Parser
from ascend_lab.cli.printing import show
from ascend_lab.errors import AscendLabError, InputError, complain, printable
from ascend_lab.limits import PROCESSES, count, decimal, shown, whole, whole_of
from ascend_lab.output import write_whole

if TYPE_CHECKING:
    from ascend_lab.aoe.bank import BankEntry, Store
    from ascend_lab.aoe.drive import Settings
    from ascend_lab.cluster import Topology
    from ascend_lab.machine.chip import Chip

DEFAULT_CHIP = "Ascend910A"
O1_TIMES = 5
"""Level O1 tries so many times more candidates."""

_ATC = "it steers a part of the real compiler that the model lacks"
_REMOTE = "nothing runs on a device: times come from the model, on this machine"
_ONE_SIZE = "shapes are fixed here; give one size with --input_shape"
REFUSED = {
    **dict.fromkeys(("--ip", "--port", "--device", "--virtual_type"), _REMOTE),
    **dict.fromkeys(("--host_env_os", "--host_env_cpu"), "nothing is built for a host"),
    **dict.fromkeys(("--weight", "-w"), "it holds Caffe's weights; an ONNX file has its own"),
    "--input_format": "the shapes of an ONNX model say it",
    "--dynamic_image_size": _ONE_SIZE,
    "--dynamic_dims": _ONE_SIZE,
    "--output_type": "outputs keep the model's own types",
    "--out_nodes": "a network is tuned whole",
    "--Fop_format": "the layout pass chooses formats, they are not searched",
    **dict.fromkeys(
        (
            "--insert_op_conf",
            "--op_name_map",
            "--is_input_adjust_hw_layout",
            "--is_output_adjust_hw_layout",
            "--fusion_switch_file",
            "--enable_scope_fusion_passes",
            "--enable_small_channel",
            "--compress_weight_conf",
            "--compression_optimize_conf",
            "--disable_reuse_memory",
            "--op_select_implmode",
            "--optypelist_for_implmode",
            "--modify_mixlist",
            "--keep_dtype",
            "--customize_dtypes",
            "--input_fp16_nodes",
        ),
        _ATC,
    ),
}
"""Published flags without a meaning here, and why."""
FRAMEWORKS = {"0": "Caffe", "1": "MindSpore", "3": "TensorFlow", "5": "ONNX"}
PRECISIONS = {
    "allow_fp32_to_fp16": "fp16",
    "allow_mix_precision": "fp16",
    "allow_mix_precision_fp16": "fp16",
    "force_fp16": "fp16",
    "allow_fp32_to_bf16": "bf16",
    "allow_mix_precision_bf16": "bf16",
}
"""--precision_mode, and the number format everything is computed in."""
FLAGS_OF_JOBS = {
    "1": ("--Fnonhomo_split",),
    "2": (
        "--Fdeeper_opat",
        "--tune_ops_file",
        "--budget",
        "--executor",
        "--tune_optimization_level",
    ),
    "12": ("--time_limit", "--seed", "--reload", "--progress_bar"),
    "4": ("--cluster", "--devices", "--max_segments", "--optimizer"),
}
"""Flags that count for some jobs only."""


def parser() -> Parser:
    """Return the parser of `aoe`."""
    parser_of_aoe = Parser(
        prog="aoe",
        description="Tune ONNX models for an Ascend chip; times are of the model.",
        epilog="`aoe bank --help`: the verbs of the knowledge bank. " + CLUSTER_FILE,
        allow_abbrev=False,
    )
    add = parser_of_aoe.add_argument
    jobs = "1 subgraph (sgat), 2 operator (opat), 1,2 both, 4 gradient (gdat)"
    add("--job_type", "-j", required=True, metavar="J", help=jobs)
    add("--framework", "-f", default="5", metavar="F", help="5 (ONNX)")
    source = parser_of_aoe.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", "-m", metavar="FILE.onnx", help="a model; also zoo:NAME")
    source.add_argument("--model_path", metavar="DIR", help="all .onnx files in a folder")
    source.add_argument(
        "--singleop",
        metavar="FILE.json",
        help=('operators, as [{"op": "matmul", "shapes": [[64, 64], [64, 32]]}]'),
    )
    add("--output", default=".", metavar="DIR", help="for reports and tuned models (here)")
    add("--soc_version", default="", metavar="CHIP", help=f"name or .toml file ({DEFAULT_CHIP})")
    add("--aicore_num", type=count, metavar="N", help="use N of the chip's cores")
    add("--input_shape", default="", metavar='"x:1,3,224,224;y:1,10"', help="sizes left open")
    add("--dynamic_batch_size", "--batch", default="", metavar="1,4,16", help="tune each batch")
    add("--precision_mode", default="allow_fp32_to_fp16", metavar="P", help=", ".join(PRECISIONS))
    add("--tune_ops_file", metavar="F.json", help="tune_ops_name and tune_ops_type: only these")
    _add_search(parser_of_aoe)
    add = parser_of_aoe.add_argument_group("job 4, gradients").add_argument
    add("--cluster", default="", metavar="T", help="910a-server, 910a-roce:64, a .toml, ...")
    add("--devices", type=count, metavar="N", help="of the cluster, in place of T:N")
    add("--optimizer", default="sgd", choices=("sgd", "adam"), help="of the training step (sgd)")
    add("--max_segments", type=count, metavar="K", help="all-reduces at most (8, as HCCL)")
    return parser_of_aoe


def _add_search(parser_of_aoe: Parser) -> None:
    add = parser_of_aoe.add_argument
    add(
        "--tune_optimization_level",
        default="O2",
        choices=("O1", "O2"),
        help=f"O1 tries {O1_TIMES} times as many candidates (O2)",
    )
    add("--Fdeeper_opat", action="store_true", help="search on until each best is proven")
    add("--Fnonhomo_split", action="store_true", help="uneven slices too")
    add("--budget", type=count, metavar="N", help="candidates per operator (200)")
    add("--time_limit", type=decimal, metavar="S", help="seconds per network")
    add("--seed", type=whole, default=0, help="of the searches (0)")
    add(
        "--executor",
        default="",
        metavar="E",
        help="serial, processes:N or dask:ADDRESS "
        "(a Dask scheduler runs others' code here: name only one that you trust)",
    )
    add("--reload", action="store_true", help="go on with an interrupted run")
    add("--progress_bar", default="on", choices=("on", "off"), help="in a terminal (on)")


def refuse(argv: Sequence[str]) -> None:
    """Raise `InputError` for a published flag that has no meaning here."""
    for word in argv:
        name = word.partition("=")[0]
        if name in REFUSED:
            raise InputError("flags with a meaning here", name, f"drop it: {REFUSED[name]}")


def job_of(arguments: argparse.Namespace) -> str:
    """Return the jobs in the order they run; raise `InputError` for others."""
    from ascend_lab.aoe.drive import jobs_of

    if arguments.framework != "5":
        name = FRAMEWORKS.get(arguments.framework, "unknown")
        remedy = "export the model to ONNX (tf2onnx, torch.onnx, mindspore.export, caffe2onnx)"
        raise InputError("--framework 5 (ONNX)", f"{arguments.framework} ({name})", remedy)
    asked = [job.strip() for job in arguments.job_type.split(",")]
    jobs = ("4",) if asked == ["4"] else asked if "4" in asked else jobs_of(arguments.job_type)
    _check_gradient(arguments, jobs)
    for jobs_of_flags, flags in FLAGS_OF_JOBS.items():
        if not set(jobs_of_flags) & set(jobs):
            refuse_idle(arguments, f"with --job_type {' or '.join(jobs_of_flags)}", *flags)
    return ",".join(jobs)


def chip_of(arguments: argparse.Namespace) -> Chip:
    """Return the chip, with fewer cores if the user wants; `AscendLabError` if there is none."""
    return with_cores(arguments.soc_version or DEFAULT_CHIP, arguments.aicore_num, "--aicore_num")


def dtype_of(arguments: argparse.Namespace) -> str:
    """Return the number format that --precision_mode means."""
    name = arguments.precision_mode
    if name not in PRECISIONS:
        remedy = "the cubes compute in fp16 or bf16; fp32 networks are converted"
        raise InputError(f"--precision_mode among {', '.join(PRECISIONS)}", name, remedy)
    return PRECISIONS[name]


def settings_of(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """Return budgets and limits; raise `InputError` for numbers that make no sense."""
    from ascend_lab.aoe import Settings, bank

    limit_s = arguments.time_limit
    if limit_s is not None and not 0 < limit_s <= LONGEST_S:
        needed = f"--time_limit above 0 and of at most {LONGEST_S:.0f} seconds"
        raise InputError(needed, f"{limit_s:g}", "change it, or leave it out")
    check_least(arguments, "--seed")
    budget = Settings().budget if arguments.budget is None else arguments.budget
    return Settings(
        budget=budget * (O1_TIMES if arguments.tune_optimization_level == "O1" else 1),
        seed=arguments.seed,
        time_limit_s=limit_s,
        repeat=bank.repeat_tune(environ),
        deeper=arguments.Fdeeper_opat,
    )


def executor_of(arguments: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """Return who measures: --executor, else as many processes as the environment says."""
    if arguments.executor:
        return str(arguments.executor)
    for name in ("TUNING_PARALLEL_NUM", "TE_PARALLEL_COMPILER"):
        text = environ.get(name, "")
        if not text:
            continue
        count = whole_of(text) or 0
        if not 1 <= count <= PROCESSES:
            raise InputError(f"{name} from 1 to {PROCESSES}", shown(text), "unset it")
        return f"processes:{count}" if count > 1 else "serial"
    return "serial"


def _check_gradient(arguments: argparse.Namespace, jobs: Sequence[str]) -> None:
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

    name = arguments.cluster
    devices = arguments.devices
    check_least(arguments, "--devices", 1)
    if devices is not None:
        if ":" in name or name.endswith(".toml"):
            topology = load_topology(name)
            if topology.size != devices:
                needed = f"--devices {topology.size}, as --cluster {name} has"
                raise InputError(needed, str(devices), "drop one of the two")
            return topology
        try:
            return load_topology(f"{name}:{devices}")
        except AscendLabError:
            topology = load_topology(name)  # a name without a count says what is wrong with it
            if topology.size == devices:
                return topology
            raise
    return load_topology(name)


# -- the bank -------------------------------------------------------------------------------------
LONGEST = 60


def bank_main(argv: Sequence[str]) -> int:
    """Run `aoe bank VERB ...` and return the exit code."""
    arguments = bank_parser().parse_args(argv)
    if arguments.verb == "compare":
        from ascend_lab.aoe.vendor_bank import lines as vendor_lines

        comparison = _compare(arguments)
        show("\n".join(vendor_lines(comparison)))
        return 0 if comparison["timed"] else 1
    from ascend_lab.aoe.bank import Store, bank_file, records

    make = arguments.verb in ("import", "merge")
    file = bank_file(make=make) if arguments.bank is None else Path(arguments.bank)
    if arguments.verb in ("forget", "merge"):  # before a bank is made: it is there, and a bank
        Store(file if arguments.verb == "forget" else arguments.operand, write=False).close()
    elif arguments.verb == "import":
        records.read_file(arguments.operand)
    with Store(file, write=make or arguments.verb == "forget") as store:
        if store.skipped:
            complain("aoe", store.passed_over)
        show(_VERBS[arguments.verb](store, arguments))
    return 0


def bank_parser() -> Parser:
    """Return the parser of `aoe bank`."""
    from ascend_lab.aoe.bank.store import UNFINISHED_DAYS

    parser_of_bank = Parser(
        prog="aoe bank",
        description="The custom knowledge bank.",
        epilog="What killed runs left goes when a bank is opened for writing: trials that "
        f"`aoe --reload` has not asked for in {UNFINISHED_DAYS} days, and those of problems "
        "solved since.",
        allow_abbrev=False,
    )
    verbs = parser_of_bank.add_subparsers(dest="verb", required=True, metavar="VERB")
    about = {
        "export": ("write all entries as JSON Lines", "FILE.jsonl"),
        "import": ("take the better entries of JSON Lines, or of CANN's bank", "FILE.jsonl"),
        "compare": ("hold a bank of CANN's, or a table of it, against our tuner", "FILE"),
        "merge": ("take the better entries of another bank", "FILE.db"),
        "forget": ("delete an entry, or all that the options choose", "DIGEST"),
        "list": ("show the entries", ""),
        "nearest": ("show the entries of like shapes", "DIGEST"),
    }
    for name, (text, operand) in about.items():
        verb = verbs.add_parser(name, help=text, allow_abbrev=False)
        if operand:
            nargs = "?" if name == "forget" else None
            operand_help = _OPERANDS.get(name, "the file")
            verb.add_argument("operand", metavar=operand, help=operand_help, nargs=nargs)
        if name != "compare":
            verb.add_argument("--bank", metavar="FILE", help="the bank (default: TUNE_BANK_PATH's)")
        if name == "nearest":
            verb.add_argument("--count", type=count, default=5, metavar="N", help="so many (5)")
        if name in ("list", "nearest", "forget", "compare"):
            verb.add_argument("--soc_version", metavar="CHIP", help="of this chip only")
        if name == "forget":
            verb.add_argument("--op", metavar="PATTERN", help="of these operators, such as conv*")
            verb.add_argument("--all", action="store_true", help="more than one entry")
            verb.add_argument("--unreadable", action="store_true", help="rows that are no entries")
    return parser_of_bank


_NUMBER = "an entry's number, as `aoe bank list` shows it; its first digits do"
_OPERANDS = {"nearest": _NUMBER, "forget": _NUMBER}


def _compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Hold the decisions of a file, all or those for one chip, against our tuner."""
    from ascend_lab.aoe import vendor_bank
    from ascend_lab.machine.chip import load_chip

    chip = arguments.soc_version
    if chip is not None:
        load_chip(chip)  # raises for a name that no preset has
    decisions = vendor_bank.read_decisions(arguments.operand)
    chosen = [decision for decision in decisions if chip is None or decision.chip == chip]
    return vendor_bank.summary([*vendor_bank.held_against(chosen)])


def _of_vendor(operand: str) -> bool:
    from ascend_lab.aoe import vendor_bank

    return operand.endswith(vendor_bank.ENDING)


def _import_of_vendor(store: Store, operand: str) -> str:
    """Take what is better than our default of a runtime bank; the rest is counted."""
    from ascend_lab.aoe import vendor_bank

    entries: list[BankEntry] = []
    slower = 0
    refused = 0
    for decision in vendor_bank.read_decisions(operand):
        try:
            entry = vendor_bank.bank_entry(decision)
        except AscendLabError:
            refused += 1
            continue
        if entry is None:
            slower += 1
        else:
            entries.append(entry)
    taken = store.take(entries)
    counts = _counts(taken["add"], taken["update"], taken["reserved"])
    return f"{counts}, {slower} no better than our default, {refused} have no kernel here"


def _export(store: Store, arguments: argparse.Namespace) -> str:
    if _of_vendor(arguments.operand):
        from ascend_lab.aoe.vendor_bank import written_lines

        lines = written_lines(store.entries())
        write_whole(arguments.operand, "".join(f"{line}\n" for line in lines))
        return f"{len(lines)} entries of CANN's bank written to {arguments.operand}"
    count = store.export_jsonl(arguments.operand)
    return f"{count} entries written to {arguments.operand}"


def _import(store: Store, arguments: argparse.Namespace) -> str:
    if _of_vendor(arguments.operand):
        return _import_of_vendor(store, arguments.operand)
    taken = store.import_jsonl(arguments.operand)
    return _counts(taken["add"], taken["update"], taken["reserved"])


def _merge(store: Store, arguments: argparse.Namespace) -> str:
    from ascend_lab.aoe.bank import Store

    if Path(arguments.operand).resolve() == store.file.resolve():
        raise InputError("another bank than the own one", arguments.operand)
    with Store(arguments.operand, write=False) as source:
        taken = store.take(source.entries())
        if source.skipped:
            complain("aoe", source.passed_over)
    return _counts(taken["add"], taken["update"], taken["reserved"])


def _counts(add: int, update: int, reserved: int) -> str:
    return f"{add} added, {update} updated, {reserved} already as good"


def _list(store: Store, arguments: argparse.Namespace) -> str:
    entries = _of_chip(store.entries(), arguments.soc_version)
    return "\n".join([f"{len(entries)} entries in {store.file}", *map(_line, entries)])


def _nearest(store: Store, arguments: argparse.Namespace) -> str:
    check_least(arguments, "--count", 1)
    asked = [e for e in store.entries() if e.key.digest.startswith(arguments.operand)]
    if len(asked) != 1:
        got = f"{arguments.operand}, which {len(asked)} entries begin with"
        raise InputError("the number of an entry", got, "see `aoe bank list`")
    key = asked[0].key
    features = asked[0].features
    neighbours = _of_chip(store.nearest(key, features, arguments.count), arguments.soc_version)
    return "\n".join([_line(asked[0]), f"{len(neighbours)} nearest:", *map(_line, neighbours)])


def _forget(store: Store, arguments: argparse.Namespace) -> str:
    """Delete what the arguments choose; more than one entry only with --all."""
    digest = arguments.operand
    pattern = arguments.op
    narrowed = any(x is not None for x in (digest, pattern, arguments.soc_version))
    if (narrowed or arguments.all) == arguments.unreadable:
        needed = "an entry's number, --soc_version, --op or --all; or --unreadable alone"
        raise InputError(needed, "both" if narrowed or arguments.all else "none of them")
    if arguments.unreadable:
        return f"{store.forget_unreadable()} unreadable rows deleted from {store.file}"
    chosen = [
        entry
        for entry in _of_chip(store.entries(), arguments.soc_version)
        if entry.key.digest.startswith(digest or "")
        and fnmatchcase(entry.key.op, "*" if pattern is None else pattern)
    ]
    if not chosen or (len(chosen) > 1 and not arguments.all):
        remedy = "see `aoe bank list`" + ("; --all deletes all of these" if chosen else "")
        raise InputError("one entry to forget", str(len(chosen)), remedy)
    store.forget(entry.key for entry in chosen)
    return "\n".join([*map(_line, chosen), f"{len(chosen)} entries deleted from {store.file}"])


def _of_chip(entries: Sequence[BankEntry], name: str | None) -> list[BankEntry]:
    return [e for e in entries if name is None or e.key.chip == name]


def _line(entry: BankEntry) -> str:
    """Return an entry as one line: number, chip, operator, cycles, how far from optimal."""
    key = entry.key
    gap = entry.gap
    far = "proven" if entry.proven else "no bound" if gap is None else f"gap {gap:.2%}"
    sizes = "x".join(f"{2**f:g}" for f in entry.features)
    operator = f"{key.op} {sizes}"
    operator = operator if len(operator) <= LONGEST else f"{operator[: LONGEST - 3]}..."
    return printable(
        f"{key.digest[:8]} {key.chip}/{key.core_count} {operator:{LONGEST}} "
        f"{entry.before_cycles:>10} -> {entry.after_cycles:>10} cycles, {far}, "
        f"{entry.search} {entry.trials} trials"
    )


_VERBS = {
    "export": _export,
    "import": _import,
    "merge": _merge,
    "forget": _forget,
    "list": _list,
    "nearest": _nearest,
}
