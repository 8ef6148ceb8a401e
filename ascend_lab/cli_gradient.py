"""The verb `ascend-lab gradient-plan`: which gradients of a profile to send together."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ascend_lab.cli_common import add_json, check_seed, emit, refuse_idle
from ascend_lab.limits import count, decimal, whole

if TYPE_CHECKING:
    from ascend_lab.aoe.gradient import AlphaBeta, Gradient, GradientPlan, Improved, Scenario

PROFILES = (
    "CSV: a row a gradient in backward order, columns name, ready_us (from the start of backward), "
    "bytes and, where wanted, dtype. Trace: torch.profiler.profile(record_shapes=True) and "
    "export_chrome_trace; read are AccumulateGrad events (Input Dims, Input type) or all-reduces "
    "(In msg nelems, dtype) of the last step. How to record one stands in book/bring_your_own.md."
)


def add_gradient(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser(
        "gradient-plan", help="split gradients into all-reduces, optimally", epilog=PROFILES
    )
    verb.add_argument(
        "file",
        metavar="PROFILE",
        help="name,ready_us,bytes as .csv, or a PyTorch profiler trace as .json or .json.gz",
    )
    numbers = {"--alpha-us": "startup of an all-reduce", "--beta-us-per-byte": "time of a byte"}
    for name, text in numbers.items():
        verb.add_argument(name, type=decimal, required=True, metavar="T", help=f"{text}, in us")
    verb.add_argument("--max-segments", type=count, metavar="K", help="at most K (HCCL takes 8)")
    verb.add_argument(
        "--max-bytes",
        type=decimal,
        metavar="N",
        help="of a segment; a larger gradient is one by itself",
    )
    group = verb.add_argument_group("beyond one undisturbed stream (searched, not proven)")
    group.add_argument("--streams", type=count, default=1, metavar="S", help="at once (1)")
    group.add_argument(
        "--slowdown", type=decimal, default=0.0, metavar="F", help="of backward meanwhile, e.g. 0.3"
    )
    group.add_argument("--noise", type=decimal, default=0.0, metavar="X", help="sigma, e.g. 0.1")
    group.add_argument(
        "--budget", type=count, default=1000, metavar="N", help="splits tried (1000)"
    )
    group.add_argument("--seed", type=whole, default=0, help="of noise and search (0)")
    add_json(verb)
    verb.set_defaults(run=_gradient)


def _gradient(arguments: argparse.Namespace) -> int:
    from ascend_lab.aoe.gradient import AlphaBeta, bound, plan
    from ascend_lab.aoe.gradient.forms import forms_of
    from ascend_lab.aoe.gradient.readers import read_profile
    from ascend_lab.aoe.gradient.reporting import bound_text, forms_text, plan_table
    from ascend_lab.aoe.gradient.rows import out_of_order

    check_seed(arguments.seed)
    cost = AlphaBeta(arguments.alpha_us * 1e-6, arguments.beta_us_per_byte * 1e-6)
    rows = read_profile(arguments.file)
    limit = arguments.max_bytes
    found = plan(rows, cost, arguments.max_segments, max_bytes=limit)
    forms = forms_of(found, rows, cost, max_bytes=limit)
    late = out_of_order(rows)
    bound_s = bound(rows, cost, max_bytes=limit)
    own = {"gradients": len(rows), "out_of_order": late, "bound_us": bound_s * 1e6}
    data = {**found.as_dict(), **own, "forms": forms.as_dict()}
    text = [*plan_table(found, rows), bound_text(bound_s)]
    if late:
        text.append(f"  {late} gradients are ready before one above them: they wait for it")
    text += forms_text(forms)
    searched = _searched(arguments, rows, cost, found)
    if searched is not None:
        better, lines = searched
        data["scenario"], text = better, [*text, *lines]
    emit(arguments.json, data, text)
    return 0


def _searched(
    arguments: argparse.Namespace, rows: Sequence[Gradient], cost: AlphaBeta, found: GradientPlan
) -> tuple[dict[str, Any], list[str]] | None:
    """Return what a search finds where streams, slowdown or noise were asked for."""
    from ascend_lab.aoe.gradient import Scenario, improve

    scenario = Scenario(
        cost,
        streams=arguments.streams,
        slowdown=arguments.slowdown,
        noise=arguments.noise,
        seed=arguments.seed,
    )
    if scenario == Scenario(cost, seed=arguments.seed):
        needed = "with --streams, --slowdown or --noise"
        refuse_idle(arguments, needed, "--budget", "--seed")
        return None
    better = improve(
        rows,
        scenario,
        max_segments=arguments.max_segments,
        max_bytes=arguments.max_bytes,
        budget=arguments.budget,
        seed=arguments.seed,
    )
    return _scenario_dict(scenario, better), _scenario_text(scenario, better)


def _scenario_dict(scenario: Scenario, better: Improved) -> dict[str, Any]:
    return {
        "streams": scenario.streams,
        "slowdown": scenario.slowdown,
        "noise": scenario.noise,
        "segments": [list(bucket) for bucket in better.segments],
        "end_us": better.end_s * 1e6,
        "plan_end_us": better.start_s * 1e6,
        "tried": better.tried,
        "optimal": False,
    }


def _scenario_text(scenario: Scenario, better: Improved) -> list[str]:
    return [
        (
            f"with {scenario.streams} streams, slowdown {scenario.slowdown:g}, noise "
            f"{scenario.noise:g}: end {better.end_s * 1e6:.3f} us in {len(better.segments)} "
            f"segments (best of {better.tried} tried); the plan above ends at "
            f"{better.start_s * 1e6:.3f} us"
        ),
        f"  last gradients: {[last for _, last in better.segments]}",
    ]
