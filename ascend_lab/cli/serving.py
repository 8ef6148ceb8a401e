"""The verbs on servers: `serve-sim` simulates a server, `serve` answers real requests.

ascend-lab serve-sim scenario.toml               latency and throughput of a server
ascend-lab serve model.onnx --port 8000          KServe v2 at http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

from ascend_lab.cli import common
from ascend_lab.cli.common import JSON, MODEL, SHAPES, Verb, flag, refuse_idle
from ascend_lab.cli.printing import check_picture, emit, say, write_picture
from ascend_lab.errors import InputError
from ascend_lab.limits import count, decimal, whole


def _serve_sim(arguments: argparse.Namespace) -> int:
    """Simulate the server of a scenario's file and print what its users see."""
    from ascend_lab.deploy.serving import read_scenario, simulate_serving

    check_picture(arguments.figure)
    from ascend_lab.llm import scenario as language

    # A language model gives one token a step: its server is another simulation.
    if language.is_file_of_llm(arguments.config):
        refuse_idle(arguments, "without llm in [model]", "--figure")
        return _serve_llm(arguments)
    file = read_scenario(arguments.config)
    served = simulate_serving(file.scenario)
    data = served.summary()
    # For networks that were timed on a chip: their seconds by batch size, and the fitted line.
    if file.timed:
        data["service"] = {
            name: {"seconds": {str(size): s for size, s in seconds_by_size.items()}, **asdict(line)}
            for name, (seconds_by_size, line) in file.timed.items()
        }
    if arguments.figure:
        from ascend_lab.lab.figures import fig_served

        write_picture(fig_served(served), arguments.figure)
    emit(arguments.json, data, [*_served_text(data), *(f"  note: {note}" for note in file.notes)])
    return 0


def _serve_llm(arguments: argparse.Namespace) -> int:
    """Simulate a server of a language model."""
    from ascend_lab.llm import scenario as language

    scenario = language.read_llm_scenario(arguments.config)
    log = language.serve_llm(scenario)
    data = log.summary() | {"bottleneck": language.bottleneck(scenario, log)}
    emit(arguments.json, data, _llm_text(scenario.model.decoder.title, data))
    return 0


def _llm_text(title: str, data: dict[str, Any]) -> list[str]:
    """Return the numbers of a language model's server as lines."""
    lines = [f"{title}: {data['tokens_per_s']:.6g} tokens/s (simulated), {data['steps']} steps"]
    # Users wait for the first token and read the others: the two are printed separately.
    for key, words in (
        ("first_token_s", "to the first token"),
        ("between_tokens_s", "between tokens"),
        ("latency_s", "to the last token"),
    ):
        times = ", ".join(f"{name} {seconds:.6g}" for name, seconds in data[key].items())
        lines.append(f"  seconds {words}: {times}")
    lines.append(
        f"  {data['preemptions']} preemptions, {data['prompt_tokens_read']} prompt tokens read"
    )
    lines.append(f"  a mean step: {data['bottleneck']}")
    return lines


def _served_text(data: dict[str, Any]) -> list[str]:
    """Return the numbers as lines, and the batches as bars."""
    times = ", ".join(f"{name} {seconds:.6g}" for name, seconds in data["latency_s"].items())
    counts = f"{data['served']} answered, {data['lost']} lost"
    lines = [
        f"{data['throughput_per_s']:.6g} requests/s (simulated), {counts}",
        f"  seconds to the answer: {times}; of it waiting, mean {data['wait_s']['mean']:.6g}",
        f"  instances busy {data['utilisation']:.2%}, mean batch {data['mean_batch']:.4g}",
    ]
    for name, row in data.get("service", {}).items():
        lines.append(
            f"  {name}: a batch of b takes {row['mean_s']:.4g} + {row['per_item_s']:.4g} b s, "
            f"within {row['worst_error']:.1%} of the network's times, which are used"
        )
    # These keys are absent if a scenario has one priority, one step or one version.
    lines += [
        f"  priority {row['priority']}: mean wait {row['wait_s']['mean']:.6g} s, "
        f"p95 {row['latency_s']['p95']:.6g} s, {row['lost']} lost"
        for row in data.get("priorities", ())
    ]
    for name, row in data.get("steps", {}).items():
        lines.append(f"  {name}: busy {row['utilisation']:.2%}, batch {row['mean_batch']:.4g}")
    if canary := data.get("canary"):
        lines += [f"  {row['time_s']:.6g} s: {row['decision']}" for row in canary["history"]]
        lines.append(f"  canary {canary['outcome']}, share of the new version {canary['share']:g}")
    total = sum(data["batches"].values())
    # "batch    8  40.00% ####################": a full bar is 50 characters
    lines += [
        f"  batch {size:>4} {batch_count / total:7.2%} {'#' * round(50 * batch_count / total)}"
        for size, batch_count in data["batches"].items()
    ]
    return lines


def _serve(arguments: argparse.Namespace) -> int:
    """Answer requests for a model on this machine until the user stops it."""
    from ascend_lab.compiler.zoo import model_name
    from ascend_lab.deploy.runtime.container import is_offline
    from ascend_lab.deploy.serving import Level, Policy, loopback, opened, rest

    # --port 80000 is refused here, before a model is read.
    for key, low, high in (
        ("port", 0, 65535),
        ("instances", 1, 64),
        ("max_batch", 1, 1024),
        ("max_delay_s", 0, 60),
        ("queue_limit", 1, 100_000),
        ("body_mib", 1, 1024),
    ):
        value = getattr(arguments, key)
        if not low <= value <= high:
            flag_name = f"--{key.replace('_', '-')}"
            remedy = f"e.g. {flag_name} {low}"
            raise InputError(f"{flag_name} from {low} to {high}", str(value), remedy)
    if is_offline(arguments.model):
        needed = "an .onnx file or zoo:NAME: compiled models cannot be served"
        raise InputError(needed, arguments.model, "give what it was compiled from")
    # Priorities are for simulations: real requests wait in one queue.
    levels = (Level(queue_limit=arguments.queue_limit),)
    policy = Policy(arguments.instances, arguments.max_batch, arguments.max_delay_s, levels=levels)
    model_title = model_name(arguments.model)
    shapes = common.shapes_of(arguments)

    # A client may unload the model and have it loaded again.
    def load() -> Any:
        return opened.open_model(arguments.model, arguments.chip, arguments.max_batch, shapes)

    def announce(port: int) -> None:
        """Print the address at which the model is served."""
        say([f"serving {model_title} at http://127.0.0.1:{port}"])
        sys.stdout.flush()  # whoever started the server reads the port from a pipe

    service = rest.Service(model_title, load, policy, arguments.body_mib * 2**20)
    loopback.serve(service, arguments.port, announce)
    say([f"{model_title} is served no more"])
    return 0


CONFIG_HELP = """\
A .toml file. [service] law (exponential, deterministic, erlang, gamma) and mean_s, per_item_s: a
batch of b items takes mean_s + per_item_s * b on average, and the law is that of the whole; erlang
takes shape, the number of its phases. Instead of mean_s: model (an .onnx file or zoo:NAME) and
chip. [arrivals] law poisson with rate_per_s, or closed with clients that ask again after think_s
(default 0). [server] instances, max_batch, max_delay_s (how long the oldest request waits for
others; with 0 a free instance takes the waiting requests at once), queue_limit (most requests that
wait, without those being served; 0: no limit), preferred (batch sizes), loss (requests that find no
free instance are lost). [run] requests (measured), seed, warmup (requests before the measured ones;
default a tenth). The lost requests that are printed are measured ones.
[[priorities]] (the first is served first) share (fractions that sum to 1; equal if left out),
timeout_s, action (reject, delay), queue_limit; [[failures]] instance, at_s, repair_s; [[steps]]
name, after, service, server: an ensemble; two [[versions]] name, error_rate, service, server with
[canary] stages, window, max_error_rate, max_p95_s, users.

A language model: [model] llm = "zoo:qwen3_8b", chip, cluster, tp, ep, dp, pp, format, mode;
[requests] count, prompt, output (tokens, or [least, most]), seed; [arrivals] rate_per_s (left out:
all at the start); [server] policy (static, prefill, select, split), max_batch, max_prefill_tokens,
blocks of the cache; [prefill] a machine of its own for prompts, keys as [model]."""

VERBS = (
    Verb(
        "serve-sim",
        "simulate a server: latency, throughput and batches",
        _serve_sim,
        (
            flag("config", metavar="CONFIG.toml", help="service, arrivals, server: see below"),
            JSON,
            flag("--figure", metavar="F.svg", help="draw latencies and batches (.svg, .png, .pdf)"),
        ),
        {"epilog": CONFIG_HELP},
    ),
    Verb(
        "serve",
        "answer requests for a model on loopback (KServe v2, as Triton does)",
        _serve,
        (
            MODEL,
            SHAPES,
            flag("--chip", help="compute as this chip's kernels do (default: the graph, exactly)"),
            flag("--port", type=whole, default=0, help="0, the default, takes a free one"),
            flag("--instances", type=count, default=1, metavar="N", help="threads (1)"),
            flag(
                "--max-batch",
                type=count,
                default=8,
                metavar="N",
                help="most rows that run together (8); shapes of your own run alone",
            ),
            flag(
                "--max-delay-s",
                type=decimal,
                default=0.0,
                metavar="S",
                help="how long the oldest request waits for others (0)",
            ),
            flag(
                "--queue-limit",
                type=count,
                default=2048,
                metavar="N",
                help="most requests that wait; more are told to come again (2048)",
            ),
            flag(
                "--body-mib",
                type=count,
                default=16,
                metavar="N",
                help="largest body of a request, unpacked, in MiB (16)",
            ),
        ),
    ),
)
