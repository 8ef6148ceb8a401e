"""The verb `llm`: prints the time of a step of a language model on a machine, or the best plan.

    ascend-lab llm zoo:qwen3_8b --chip Ascend910B2 --context 4096 --batch 16
    ascend-lab llm zoo:qwen3_8b --chip Ascend910B2 --context 4096 --plan auto --tpot-ms 20

A step yields one token for each sequence of the batch; tpot is the time per output token.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from ascend_lab.cli.common import JSON, Verb, flag, refuse_idle
from ascend_lab.cli.printing import emit
from ascend_lab.errors import InputError
from ascend_lab.limits import count, decimal, shown

if TYPE_CHECKING:
    from ascend_lab.llm import Machine, Model, Plans, Step

AUTO = "auto"
"""The value of --plan that asks for a search instead of stating the plan."""
# Flags that have an effect only with a stated plan, and those only with a search.
OF_PLAN = ("--tp", "--ep", "--dp", "--pp", "--batch", "--prefill", "--queries")
OF_SEARCH = ("--tpot-ms", "--devices", "--figure")
PICTURES = (".svg", ".png", ".pdf")
MS = 1e3
GIB = 2**30


def _llm(arguments: argparse.Namespace) -> int:
    """Time a step of a plan, or search for the best plan."""
    from ascend_lab.llm import Plan, load_decoder, machine_of

    decoder = load_decoder(arguments.model)
    if arguments.plan == AUTO:
        # The search chooses what these flags state.
        refuse_idle(arguments, "without --plan auto", *OF_PLAN)
        devices = arguments.devices or 8
        # The machine only has to have the devices: the search decides how a plan divides them.
        plan = Plan(dp=devices)
        machine = machine_of(arguments.chip, arguments.cluster, plan, arguments.mode)
        return _search(arguments, decoder, machine, devices)
    refuse_idle(arguments, "with --plan auto", *OF_SEARCH)
    from ascend_lab.llm import Model

    plan = Plan(arguments.tp, arguments.ep, arguments.dp, arguments.pp)
    machine = machine_of(arguments.chip, arguments.cluster, plan, arguments.mode)
    model = Model(decoder, machine, plan, arguments.format)
    return _step(arguments, model)


def _step(arguments: argparse.Namespace, model: Model) -> int:
    """Print a decode step, and a prefill if one is asked for."""
    from ascend_lab.llm import decode, prefill

    step = model.step(decode(arguments.batch, arguments.context, arguments.queries))
    data: dict[str, Any] = {
        "model": model.decoder.name,
        "chip": model.machine.chip.name,
        "plan": {name: getattr(model.plan, name) for name in ("tp", "ep", "dp", "pp")},
        "devices": model.plan.devices,
        "format": model.format.name,
        "mode": model.machine.mode,
        "batch": arguments.batch,
        "context": arguments.context,
        "step_s": step.time_s,
        "prefill_s": None,  # the key is always present: readers of the JSON need no test
        "tokens_per_s": step.tokens_per_s,
        "memory_bytes": _memory(step),
        "largest_batch": step.memory.largest_batch,
        "bound_s": step.bound_s,
        "ledger_s": dict(step.ledger),
        "kernels": step.kernels,
        "bottleneck": step.bottleneck,
    }
    lines = _lines(model, step)
    # Prompts are read in one step of many tokens, limited by the cube; decoding is by memory.
    if arguments.prefill is not None:
        prompt = model.step(prefill(arguments.batch, arguments.prefill))
        data["prefill_s"] = prompt.time_s
        data["prefill"] = prompt.as_dict()
        lines += _prefill_lines(prompt)
    emit(arguments.json, data, lines)
    return 0


def _memory(step: Step) -> dict[str, float]:
    """Return the bytes on the fullest device; stages of a pipeline may differ."""
    memory = step.memory
    return {
        "weights": memory.weights_bytes,
        "cache": memory.cache_bytes,
        "activations": memory.activations_bytes,
        "total": memory.total_bytes,
        "device": memory.device_bytes,
    }


def _lines(model: Model, step: Step) -> list[str]:
    """Return the lines that the command prints about a decode step."""
    memory = step.memory
    parts = (
        f"weights {memory.weights_bytes / GIB:.2f}",
        f"cache {memory.cache_bytes / GIB:.2f}",
        f"activations {memory.activations_bytes / GIB:.2f}",
    )
    return [
        f"{model.decoder.title} on {_devices(model)}, {model.format.name} (model result)",
        (
            f"  decode of {step.load.batch} at {step.load.keys} tokens: {step.time_s * MS:.2f} ms, "
            f"{step.tokens_per_s:.0f} tokens/s, {step.kernels} kernels"
        ),
        f"  no schedule beats {step.bound_s * MS:.2f} ms",
        f"  {_ledger(step)}",
        f"  {step.bottleneck}",
        (
            f"  GiB a device: {', '.join(parts)}, of {memory.device_bytes / GIB:.0f}; "
            f"the largest batch that fits is {memory.largest_batch}"
        ),
    ]


def _devices(model: Model) -> str:
    """Return the name of the chip; for several also their number and the plan."""
    machine = model.machine
    if machine.topology is None:  # one device has no links
        return machine.chip.name
    where = f"{model.plan.devices} {machine.chip.name} of {machine.topology.name}"
    return f"{where} ({model.plan})"


def _ledger(step: Step) -> str:
    """Return the time by cause in ms, without causes that take no time."""
    parts = (f"{entry} {time_s * MS:.2f}" for entry, time_s in step.ledger.items() if time_s)
    return f"ms: {', '.join(parts)}"


def _prefill_lines(prompt: Step) -> list[str]:
    """Return the lines that the command prints about a prefill (the step that reads prompts)."""
    load = prompt.load
    return [
        (
            f"  prefill of {load.batch} x {load.tokens} tokens: {prompt.time_s * MS:.2f} ms, "
            f"{prompt.tokens_per_s:.0f} tokens/s"
        ),
        f"  no schedule beats {prompt.bound_s * MS:.2f} ms",
        f"  {_ledger(prompt)}",
        f"  {prompt.bottleneck}",
    ]


def _search(arguments: argparse.Namespace, decoder: Any, machine: Machine, devices: int) -> int:
    """Print the best plan under the limit, and the frontier: plans that no other plan beats."""
    from ascend_lab.llm import best_plans

    if arguments.figure and not arguments.figure.lower().endswith(PICTURES):
        needed = f"--figure with an ending among {', '.join(PICTURES)}"
        raise InputError(needed, shown(arguments.figure), "rename it")
    if arguments.tpot_ms is None:
        raise InputError("--tpot-ms, the longest step, with --plan auto", "none", "e.g. 50")
    # not `<= 0`: a NaN must be refused, too
    if not arguments.tpot_ms > 0:
        raise InputError("--tpot-ms above 0", shown(arguments.tpot_ms), "e.g. 50")
    limit_s = arguments.tpot_ms / MS
    # A pod of 32 devices takes up to half a minute; a terminal says so.
    if sys.stderr.isatty():
        print(f"searching plans and batches of {devices} devices", file=sys.stderr)
    # On the frontier no plan gives more tokens a second with a shorter step.
    plans = best_plans(decoder, machine, devices, arguments.context, limit_s, arguments.format)
    where = f"{decoder.title} on {devices} {machine.chip.name}, context {arguments.context}"
    lines = [
        f"{where}, steps within {arguments.tpot_ms:g} ms (model result)",
        f"  {plans.points} points of plan and batch fit, {plans.timed} had to be timed",
        "  (tp, ep and batch / dp are powers of two, pp is 1: another batch may do more)",
        f"  best: {_point(plans.best)}",
        "  frontier:",
        *(f"    {_point(step)}" for step in plans.frontier),
    ]
    if arguments.figure:
        _draw(arguments.figure, plans)
        lines.append(f"{arguments.figure}: the frontier")
    emit(arguments.json, _plans(plans), lines)
    return 0


def _point(step: Step) -> str:
    """Return a plan and its step as words."""
    return (
        f"{step.plan}, batch {step.load.batch}: {step.time_s * MS:.2f} ms, "
        f"{step.tokens_per_s:.0f} tokens/s"
    )


def _plans(plans: Plans) -> dict[str, Any]:
    """Return a search as plain data."""
    return {
        "best": _plain(plans.best),
        "frontier": [_plain(step) for step in plans.frontier],
        "points": plans.points,
        "timed": plans.timed,
    }


def _plain(step: Step) -> dict[str, Any]:
    """Return a plan, its batch and its step as plain data."""
    plan = {name: getattr(step.plan, name) for name in ("tp", "ep", "dp", "pp")}
    return {"plan": plan, "batch": step.load.batch, "step_s": step.time_s, **step.as_dict()}


def _draw(path: str, plans: Plans) -> None:
    """Write the frontier as a figure."""
    from ascend_lab.lab.figures import fig_frontier

    fig_frontier(plans).savefig(path)


LLM = Verb(
    "llm",
    "time a step of a language model on a machine, or find the best plan",
    _llm,
    (
        flag("model", metavar="MODEL", help="zoo:qwen3_8b and others, or a .toml table of yours"),
        flag("--chip", required=True, help="a preset name or your own .toml file"),
        flag(
            "--cluster",
            default="",
            metavar="NAME",
            help="a2-server, a3-pod:N, a topology of `collective` or a .toml file; "
            "default: the chip's usual server",
        ),
        flag("--batch", type=count, default=1, metavar="N", help="sequences of all groups"),
        flag("--context", type=count, required=True, metavar="N", help="tokens in each cache"),
        flag("--prefill", type=count, metavar="N", help="also time prompts of N tokens"),
        flag("--queries", type=count, default=1, metavar="N", help="tokens guessed per step"),
        flag(
            "--format",
            default="",
            metavar="F",
            help="bf16 (default), fp16, w8a8, w8a8c8, w4a8 or w4a16",
        ),
        flag("--mode", default="graph", metavar="M", help="graph (default), eager or super"),
        flag(
            "--tp",
            type=count,
            default=1,
            metavar="N",
            help="tensor parallel: devices are tp x dp x pp",
            group="plan",
        ),
        flag(
            "--ep",
            type=count,
            default=1,
            metavar="N",
            help="expert parallel: divides tp x dp",
            group="plan",
        ),
        flag("--dp", type=count, default=1, metavar="N", help="data parallel", group="plan"),
        flag("--pp", type=count, default=1, metavar="N", help="pipeline parallel", group="plan"),
        flag(
            "--plan",
            choices=(AUTO,),
            help="search tp, ep, dp and batch; needs --tpot-ms",
            group="search",
        ),
        flag("--devices", type=count, metavar="N", help="devices to use (8)", group="search"),
        flag("--tpot-ms", type=decimal, metavar="MS", help="the longest step", group="search"),
        flag("--figure", metavar="F.svg", help="draw the frontier", group="search"),
        JSON,
    ),
)
