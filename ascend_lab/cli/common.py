"""Code that the verbs (subcommands) share: flags, checks of their values, reading of models."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_lab import __version__, limits, output
from ascend_lab.cli.parser import Parser
from ascend_lab.errors import AscendLabError, CapacityError, InputError
from ascend_lab.machine.chip import Chip, load_chip

if TYPE_CHECKING:
    from ascend_lab.compiler.compile import Road
    from ascend_lab.compiler.onnx import Imported
    from ascend_lab.compiler.tasks import Compiled


# Arguments whose values `check_outputs` checks before any work.
OUTPUTS = (
    "json",
    "trace",
    "output",
    "outputs",
    "fusion_result",
    "check_report",
    "report",
    "figure",
    "records",
)
"""Arguments that name a file to write; only JSON can be printed, with -."""
ONNX = ".onnx"
LONGEST_S = 86_400.0
"""Most seconds a --time-limit may ask for."""


Flag = tuple[str, tuple[str, ...], dict[str, Any]]
"""An argument of a verb: its group in the help ("": none), its names, argparse's settings."""


def flag(
    *names: str,
    help: str | None = None,  # noqa: A002 - argparse's word
    type: Callable[[str], Any] | None = None,  # noqa: A002
    group: str = "",
    **settings: Any,
) -> Flag:
    """Return an argument of a verb, with argparse's settings."""
    return group, names, {"help": help, "type": type, **settings}


JSON = flag("--json", metavar="F", help="write JSON to F, or print it with -")
TRACE = flag("--trace", metavar="F", help="write a Chrome trace of the slowest core")
MODEL = flag("model", metavar="MODEL", help="an .onnx file or zoo:NAME")
COMPILED = flag(
    "model",
    metavar="MODEL",
    help="an .onnx file, a compiled .alm, or zoo:NAME (NAME_0_75: a width)",
)
CHIP = flag("--chip", required=True, help="a preset name or your own .toml file")
SHAPES = flag(
    "--input-shape",
    action="append",
    default=[],
    metavar="NAME:1,3,224,224",
    help="the shape of an input whose sizes are symbolic; repeatable",
)
BATCH = flag("--batch", type=limits.count, metavar="N", help="the first size of the inputs")
LIKE = flag(
    "--like",
    choices=("cann",),
    default="",
    help="compile as that compiler does, by what its documents name; default: our compiler",
)
TUNED = (
    flag("--tuned", metavar="F.jsonl", help="schedules that `aoe` saved for the model"),
    flag(
        "--bank", metavar="PATH", help="use what a knowledge bank (file or export) or builtin knows"
    ),
    flag("--aicore-num", type=limits.count, metavar="N", help="use N of the chip's cores"),
)


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of `ascend-lab`: the function that runs it, and its arguments in the help's order."""

    name: str
    help: str
    run: Callable[[argparse.Namespace], int]
    flags: tuple[Flag, ...]
    about: Mapping[str, str] = field(default_factory=dict)
    """Argparse's description or epilog."""

    def add_to(self, verbs: Any) -> None:
        """Add the verb to a command's verbs."""
        parser = verbs.add_parser(self.name, help=self.help, **self.about)
        groups = {"": parser}
        # The help lists the flags of a group together, under the group's name.
        for group, names, settings in self.flags:
            if group not in groups:
                groups[group] = parser.add_argument_group(group)
            plain = {key: value for key, value in settings.items() if value is not None}
            groups[group].add_argument(*names, **plain)
        parser.set_defaults(run=self.run)


def parser_of(verbs: Iterable[Verb]) -> Parser:
    """Return the parser of `ascend-lab` with its verbs."""
    parser = Parser(prog="ascend-lab", description="A Da Vinci NPU on your laptop.")
    parser.add_argument("--version", action="version", version=f"ascend-lab {__version__}")
    added = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in verbs:
        verb.add_to(added)
    return parser


def run_one(verbs: Sequence[Verb], argv: Sequence[str]) -> int:
    """Run the verb of a command line and return its exit code."""
    # Parsers of all verbs take twenty times as long to build as one: they serve help and errors.
    named = [verb for verb in verbs if verb.name in argv[:1]]
    arguments = parser_of(named or verbs).parse_args(argv)
    check_outputs(arguments)
    try:
        code: int = arguments.run(arguments)
    except AscendLabError as error:
        raise InputError(in_flags(str(error), "ascend-lab", arguments)) from error
    return code


def refuse_idle(arguments: argparse.Namespace, when: str, *flags: str) -> None:
    """Raise `InputError` for the first of `flags` that was given: they matter only `when`."""
    for name in flags:
        # --time-limit is stored as time_limit
        if name.lstrip("-").replace("-", "_") in arguments.given:
            needed = f"{name} only {when}"
            raise InputError(needed, "", "leave it out: it changes nothing here")


def check_limit(limit_s: float | None) -> None:
    """Raise `InputError` for a --time-limit that is not within 0 and `LONGEST_S`."""
    if limit_s is not None and not (math.isfinite(limit_s) and 0 <= limit_s <= LONGEST_S):
        raise InputError(f"--time-limit from 0 to {LONGEST_S:.0f} seconds", str(limit_s), "e.g. 10")


def check_least(
    arguments: argparse.Namespace,
    flag: str,
    minimum: int = 0,
    unit: str = "",
    remedy: str = "raise it",
) -> None:
    """Raise `InputError` for a flag's number below the minimum; a flag without a value passes."""
    value = getattr(arguments, flag.lstrip("-").replace("-", "_"))
    if value is not None and value < minimum:
        raise InputError(f"{flag} of at least {minimum}{unit}", str(value), remedy)


def check_outputs(arguments: argparse.Namespace) -> None:
    """Raise `InputError`, before any work, for outputs that cannot be written or are inputs."""
    places: set[str] = set()  # files that earlier flags write to, links followed
    words = {name: text for name, text in vars(arguments).items() if isinstance(text, str)}
    for name in OUTPUTS:
        target = words.get(name)
        flag_name = f"--{name.replace('_', '-')}"
        # "--json -" prints; no other flag can print its output
        if target is None or (name, target) == ("json", "-"):
            continue
        if target == "-":
            raise InputError(f"a file name for {flag_name}", "-", "only --json prints")
        # Checked before hours of work, not when the result is there.
        output.check_writable(target)
        if any(_same(target, text) for argument, text in words.items() if argument not in OUTPUTS):
            raise InputError(f"{flag_name} as another file than the inputs", target, "name another")
        place = os.path.realpath(target)
        # Two outputs may both go to /dev/null.
        if place in places and not place.startswith("/dev/"):
            raise InputError("a file for each output", f"{target} twice", "name another")
        places.add(place)


def _same(target: str, text: str) -> bool:
    """Tell whether an output would overwrite what another argument names, links followed."""
    try:
        return Path(target).is_file() and Path(target).samefile(text)
    except (OSError, ValueError):  # the text is not a path but a chip's name or a number
        return False


def arrays_named(names: Iterable[str], arrays: Mapping[str, Any], flag: str) -> dict[str, Any]:
    """Return the arrays called `names`; if one is missing, raise `InputError` that lists them."""
    if missing := [name for name in names if name not in arrays]:
        present = f"names {', '.join(arrays)}" if arrays else "nothing"
        raise InputError(f"{flag} with {', '.join(missing)}", present, "save every input by name")
    return {name: arrays[name] for name in names}


def shapes_of(arguments: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    """Return the shapes given as NAME:sizes; raise `InputError` for other texts."""
    return shapes_in(arguments.input_shape, "--input-shape NAME:sizes", "e.g. data:1,3,224,224")


def shapes_in(texts: Iterable[str], needed: str, example: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of texts NAME:sizes; raise `InputError` with what is needed for others."""
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, colon, sizes = text.rpartition(":")
        # "data:-1,3" leaves the first size open; "scale:" is the shape () of a number
        shapes[name.strip()] = limits.wholes_of(sizes, ",")
        if not colon or not name.strip() or (sizes.strip() and not shapes[name.strip()]):
            raise InputError(needed, repr(text), example)
    return shapes


def is_compiled(model: str) -> bool:
    """Tell whether a file is a compiled model; a name that ends in .onnx is never opened for it."""
    if model.endswith(ONNX):
        return False
    from ascend_lab.deploy.runtime.container import is_offline

    return is_offline(model)


def import_with(
    model: str,
    feeds: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Any] | None = None,
    batch: int | None = None,
) -> Imported:
    """Return a model as a graph: an .onnx file, a compiled one, or zoo:NAME.

    `feeds` (an array for each input) fix the inputs on which shapes depend, such as the target of
    a Reshape, and give sizes that the model and the caller leave open. A compiled model holds a
    graph for each batch size (in ATC's term, a gear): the one for these sizes is returned.
    """
    # --input-shape takes precedence over the shapes of arrays.
    sizes = {**{name: array.shape for name, array in (feeds or {}).items()}, **(shapes or {})}
    if model.endswith(ONNX):
        from ascend_lab.compiler.onnx import import_pinning

        return import_pinning(model, feeds or {}, shapes=sizes, batch=batch)
    if is_compiled(model):
        from ascend_lab.deploy.runtime import load_offline

        return load_offline(model).gear(sizes, batch).imported
    from ascend_lab.compiler.zoo import load_model

    return load_model(model, given=feeds, shapes=shapes, batch=batch)


def imported(arguments: argparse.Namespace, feeds: Mapping[str, Any] | None = None) -> Imported:
    """Return the model with the sizes of --input-shape and --batch, as `import_with` does."""
    return import_with(arguments.model, feeds, shapes_of(arguments), arguments.batch)


# Words of Python in the remedies of errors: "shapes={'x': (1, 3)}", "batch=8", "resume=True".
_ARGUMENT = re.compile(
    r"\b(shapes|batch|pinned|resume)="
    r"(\{'(?P<key>[^'\\]*)': (\((?P<sizes>[\d, ]*)\)|array)\}|\d+|True)"
)
_FLAGS = {
    "ascend-lab": {"shapes": "--input-shape", "batch": "--batch", "pinned": "--inputs"},
    "aoe": {"shapes": "--input_shape", "batch": "--dynamic_batch_size", "resume": "--reload"},
}
CLUSTER_FILE = (
    "A cluster of your own is a .toml file with name, devices (names or a count), switches, "
    "servers (lists of devices), gamma_s_per_byte (adding a byte), call_s (before a collective), "
    "round_s (before each of its rounds), and entries [[links]] with "
    "from, to, alpha_us or alpha_s, gbytes_per_s or beta_s_per_byte, one_way. An example stands "
    "in book/bring_your_own.md."
)


def in_flags(text: str, program: str, arguments: Namespace | None = None) -> str:
    """Return a message in one line, its Python arguments as flags of the command line.

    "give shapes={'x': (1, 3)}" becomes "give --input-shape x:1,3". An argument for which the verb
    has no flag stays, with "in Python" added. `arguments` are those of the verb; with None every
    flag is taken to exist.
    """

    def as_flag(match: re.Match[str]) -> str:
        """Return the flag that stands for an argument of Python in a message."""
        name = match[1]
        value = match[2]
        flag_name = _FLAGS[program].get(name, "")
        if flag_name == "--reload":  # it takes no value
            return flag_name
        stored_name = flag_name[2:].replace("-", "_")
        if not flag_name or (arguments is not None and stored_name not in arguments):
            return f"{match[0]} in Python"
        if match["sizes"] is not None:
            value = f"{match['key']}:{match['sizes'].replace(' ', '').rstrip(',')}"
        # Values to pin come from a file of arrays, which the message cannot know.
        return f"{flag_name} {'F.npz' if name == 'pinned' else value}"

    return _ARGUMENT.sub(as_flag, " ".join(text.split()))


def is_tuned(arguments: argparse.Namespace) -> bool:
    """Tell whether --tuned or --bank asks for tuned kernels; raise `InputError` for both."""
    if arguments.tuned is not None and arguments.bank is not None:
        raise InputError("--tuned or --bank", "both", "choose one")
    return arguments.tuned is not None or arguments.bank is not None


def tuned_road(arguments: argparse.Namespace, chip: Chip, road: Road) -> Road:
    """Return the compiler's options `road` with the slices and launches of the tuned schedules.

    A schedule is for a kernel of a certain size: a network cut otherwise has other kernels.
    """
    if arguments.tuned is None:
        return road
    from ascend_lab.aoe.saved import read_schedules

    return read_schedules(arguments.tuned).launches.road(chip, road)


def with_tuned(compiled: Compiled, arguments: argparse.Namespace, dtype: str = "fp16") -> Compiled:
    """Return a compiled network with the tuned kernels that the arguments name."""
    from ascend_lab.aoe import bank, engine, saved

    if arguments.bank is not None:
        # A bank holds schedules of single operators: each kernel takes that of its shapes, if any.
        with bank.bank_at(arguments.bank) as knowledge:
            for warning in knowledge.warnings:
                print(f"ascend-lab: {warning}", file=sys.stderr)
            return engine.with_stored_schedules(compiled, knowledge).compiled
    schedules = saved.read_schedules(arguments.tuned)
    # A tile that fits in fp16 takes twice the bytes in fp32, half of them in int8.
    if schedules.dtype != dtype:
        remedy = f"`ascend-lab simulate --dtype {schedules.dtype}` takes these"
        raise InputError(f"schedules for {dtype}", f"some for {schedules.dtype}", remedy)
    return schedules.applied(compiled)


def check_fits(compiled: Compiled, limit_bytes: int | None) -> None:
    """Raise `CapacityError` for a network that would have to be computed in tiles."""
    from ascend_lab.compiler.placement import planned_bytes

    limit = compiled.chip.device_memory.size_bytes if limit_bytes is None else limit_bytes
    peak = planned_bytes(compiled)
    if peak > limit:
        needed = f"a tuned network within {limit:,} bytes of device memory"
        raise CapacityError(needed, f"{peak:,}", "leave out --tuned and --bank: it is tiled then")


def chip_with(arguments: argparse.Namespace) -> Chip:
    """Return the chip of --chip with the cores of --aicore-num."""
    return with_cores(arguments.chip, arguments.aicore_num, "--aicore-num")


def with_cores(name: str, cores: int | None, flag: str) -> Chip:
    """Return a chip that uses some of its cores."""
    chip = load_chip(name)
    if cores is None:
        return chip
    if not 1 <= cores <= chip.core_count:
        needed = f"{flag} from 1 to {chip.core_count}, the cores of {chip.name}"
        raise InputError(needed, str(cores), "without it all work")
    return replace(chip, core_count=cores)
