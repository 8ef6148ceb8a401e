"""The flags of `aoe`: those of CANN's tool AOE, with an effect here or refused with a reason."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ascend_lab.cli.common import CLUSTER_FILE, LONGEST_S, check_least, refuse_idle, with_cores
from ascend_lab.cli.parser import Parser
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.limits import PROCESSES, count, decimal, shown, whole, whole_of

if TYPE_CHECKING:
    from ascend_lab.aoe.drive import Settings
    from ascend_lab.cluster import Topology
    from ascend_lab.machine.chip import Chip

DEFAULT_CHIP = "Ascend910A"
O1_TIMES = 5
"""How many times as many candidates --tune_optimization_level O1 tries as O2."""

# Why a flag of the published tool means nothing here: told to the user after "drop it: ".
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
"""Flags of CANN's tool that have no effect here -> the reason."""
FRAMEWORKS = {"0": "Caffe", "1": "MindSpore", "3": "TensorFlow", "5": "ONNX"}
PRECISIONS = {
    # The cubes multiply 16-bit numbers: modes that differ only in what stays fp32 are equal here.
    "allow_fp32_to_fp16": "fp16",
    "allow_mix_precision": "fp16",
    "allow_mix_precision_fp16": "fp16",
    "force_fp16": "fp16",
    "allow_fp32_to_bf16": "bf16",
    "allow_mix_precision_bf16": "bf16",
}
"""Value of --precision_mode -> the number format of all computation."""
FLAGS_OF_JOBS = {
    # A key lists jobs: flags of "12" count for jobs 1 and 2, and are refused with job 4.
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
"""Jobs -> the flags that have an effect only in these jobs."""


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
    _add_gradients(parser_of_aoe)
    return parser_of_aoe


def _add_gradients(parser_of_aoe: Parser) -> None:
    """Add the flags of job 4, which tunes how gradients are sent."""
    add = parser_of_aoe.add_argument_group("job 4, gradients").add_argument
    add("--cluster", default="", metavar="T", help="910a-server, 910a-roce:64, a .toml, ...")
    add("--devices", type=count, metavar="N", help="of the cluster, in place of T:N")
    add("--optimizer", default="sgd", choices=("sgd", "adam"), help="of the training step (sgd)")
    add("--max_segments", type=count, metavar="K", help="all-reduces at most (8, as HCCL)")


def _add_search(parser_of_aoe: Parser) -> None:
    """Add the flags that say how much is searched, for how long and by whom."""
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
    """Raise `InputError` for a flag of CANN's tool that has no effect here."""
    # argparse does not know these flags, and would say "unrecognized" instead of why.
    for word in argv:
        name = word.partition("=")[0]
        if name in REFUSED:
            raise InputError("flags with a meaning here", name, f"drop it: {REFUSED[name]}")


def job_of(arguments: argparse.Namespace) -> str:
    """Return the jobs of --job_type in the order they run; raise `InputError` for others."""
    from ascend_lab.aoe.drive import jobs_of

    if arguments.framework != "5":
        name = FRAMEWORKS.get(arguments.framework, "unknown")
        remedy = "export the model to ONNX (tf2onnx, torch.onnx, mindspore.export, caffe2onnx)"
        raise InputError("--framework 5 (ONNX)", f"{arguments.framework} ({name})", remedy)
    # Job 4 is checked below: `jobs_of` would order it among other jobs, but it runs alone.
    jobs: Sequence[str] = [job.strip() for job in arguments.job_type.split(",")]
    if "4" not in jobs:
        jobs = jobs_of(arguments.job_type)
    _check_gradient(arguments, jobs)
    for jobs_of_flags, flags in FLAGS_OF_JOBS.items():
        if not set(jobs_of_flags) & set(jobs):
            refuse_idle(arguments, f"with --job_type {' or '.join(jobs_of_flags)}", *flags)
    return ",".join(jobs)


def chip_of(arguments: argparse.Namespace) -> Chip:
    """Return the chip of --soc_version with the cores of --aicore_num; raise for an unknown one."""
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

    # Budgets are counts, the limit is in seconds: with a budget alone a run can be repeated.
    limit_s = arguments.time_limit
    if limit_s is not None and not 0 < limit_s <= LONGEST_S:
        needed = f"--time_limit above 0 and of at most {LONGEST_S:.0f} seconds"
        raise InputError(needed, f"{limit_s:g}", "change it, or leave it out")
    check_least(arguments, "--seed")
    # Without --budget the library's default is used; O1 multiplies the budget in both cases.
    budget = Settings().budget if arguments.budget is None else arguments.budget
    return Settings(
        budget=budget * (O1_TIMES if arguments.tune_optimization_level == "O1" else 1),
        seed=arguments.seed,
        time_limit_s=limit_s,
        repeat=bank.repeat_tune(environ),
        deeper=arguments.Fdeeper_opat,
    )


def executor_of(arguments: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """Return the executor of measurements: --executor, or as many processes as `environ` says."""
    if arguments.executor:
        return str(arguments.executor)
    # Variables of the published tool: the first counts tuning processes, the second compilers.
    for name in ("TUNING_PARALLEL_NUM", "TE_PARALLEL_COMPILER"):
        text = environ.get(name, "")
        if not text:
            continue
        processes = whole_of(text) or 0
        if not 1 <= processes <= PROCESSES:
            raise InputError(f"{name} from 1 to {PROCESSES}", shown(text), "unset it")
        return f"processes:{processes}" if processes > 1 else "serial"
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
        # 910a-roce:64 and a file state the number of devices: --devices can only repeat it.
        if ":" in name or name.endswith(".toml"):
            topology = load_topology(name)
            if topology.size != devices:
                needed = f"--devices {topology.size}, as --cluster {name} has"
                raise InputError(needed, str(devices), "drop one of the two")
            return topology
        try:
            return load_topology(f"{name}:{devices}")
        except AscendLabError:
            # 910a-server always has 8 devices and takes no count; other names raise here.
            topology = load_topology(name)
            if topology.size == devices:
                return topology
            raise
    return load_topology(name)
