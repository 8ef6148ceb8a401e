"""Reads the TOML file that describes a server of a language model, and simulates the server.

    [model]     llm = "zoo:qwen3_8b"; optional: chip, cluster, tp, ep, dp, pp, format, mode
    [arrivals]  rate_per_s (Poisson); without it all requests arrive at the start
    [requests]  count; prompt and output: a number of tokens, or [smallest, largest] to draw;
                optional: seed of the draws
    [server]    optional: policy, max_batch, max_prefill_tokens, blocks
    [prefill]   optional second machine that reads the prompts; keys of [model] except llm

A second machine reads the prompts one after another. The pages of a prompt's cache are then sent
over a link to the first machine, which generates the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab.deploy.serving.language import (
    POLICIES,
    Conversation,
    Engine,
    Request,
    converse,
)
from ascend_lab.deploy.serving.paged_cache import blocks_of
from ascend_lab.errors import InputError
from ascend_lab.limits import Range, decoded, naming, shown, toml_of
from ascend_lab.llm.layer import PAGE_TOKENS
from ascend_lab.llm.machine import GAPS, machine_of
from ascend_lab.llm.memory import sequence_bytes
from ascend_lab.llm.models import load_decoder
from ascend_lab.llm.plan import MAX_DEVICES, Plan, decode
from ascend_lab.llm.serving import Steps
from ascend_lab.llm.step import Model

_PARTS = Range(int, 1, MAX_DEVICES)
_TOKENS = Range(int, 1, 1 << 20)
_MACHINE: dict[str, Any] = {
    "chip": str,
    "cluster": str,
    "tp": _PARTS,
    "ep": _PARTS,
    "dp": _PARTS,
    "pp": _PARTS,
    "format": str,
    "mode": tuple(GAPS),
}
FILE: dict[str, Any] = {
    "model": {"llm": str, **_MACHINE},
    "prefill": _MACHINE,
    "arrivals": {"rate_per_s": Range(float, 1e-6, 1e6)},
    "requests": {
        "count": Range(int, 1, 100_000),
        "prompt": [_TOKENS],
        "output": [_TOKENS],
        "seed": Range(int, 0, 2**53),
    },
    "server": {
        "policy": POLICIES,
        "max_batch": Range(int, 1, 4096),
        "max_prefill_tokens": Range(int, 1, 1 << 20),
        "blocks": Range(int, 1, 1 << 24),
    },
}
"""Tables of the file -> their keys -> the type or range of each value."""
DEFAULT_CHIP = "Ascend910B2"
"""The chip of a table that names none."""


@dataclass(frozen=True, slots=True)
class LlmScenario:
    """A served model, the requests to it and the settings of its scheduler.

    `reader` is the model on a second machine that reads prompts, None if there is none.
    """

    model: Model
    reader: Model | None
    requests: tuple[Request, ...]
    engine: Engine


def is_file_of_llm(path: str | Path) -> bool:
    """Tell whether a scenario's file describes a server of a language model."""
    model = toml_of(path, f"{path}: a TOML file of a scenario", InputError).get("model")
    return isinstance(model, dict) and "llm" in model


def read_llm_scenario(path: str | Path) -> LlmScenario:
    """Return the scenario of a TOML file; raises `InputError` naming the table and key at fault."""
    tables = toml_of(path, f"{path}: a TOML file of a scenario", InputError)
    with naming(path):
        requests = tables.get("requests")
        if isinstance(requests, dict):
            for key in ("prompt", "output"):
                # prompt = 512 is short for [512], the same length for all requests.
                if isinstance(requests.get(key), int):
                    requests[key] = [requests[key]]
        return _scenario(decoded(FILE, tables))


def _scenario(file: Mapping[str, Any]) -> LlmScenario:
    """Return the scenario of checked tables."""
    table = file["model"]
    model = _model(table, table["llm"])
    reader = _model(file["prefill"], table["llm"]) if "prefill" in file else None
    server = dict(file.get("server", {}))
    # without a number of blocks the cache gets as many pages as the model's machine has room for
    server.setdefault("blocks", Steps(model).pages())
    engine = Engine(block_tokens=PAGE_TOKENS, **server)
    return LlmScenario(model, reader, _requests(file), engine)


def _model(table: Mapping[str, Any], name: str) -> Model:
    """Return the model on the machine of a table."""
    parts = {key: table[key] for key in ("tp", "ep", "dp", "pp") if key in table}
    plan = Plan(**parts)
    chip = table.get("chip", DEFAULT_CHIP)
    machine = machine_of(chip, table.get("cluster", ""), plan, table.get("mode", "graph"))
    return Model(load_decoder(name), machine, plan, table.get("format", ""))


def _requests(file: Mapping[str, Any]) -> tuple[Request, ...]:
    """Return the requests, with random arrivals and lengths from the file's seed."""
    table = file.get("requests", {})
    for key in ("count", "prompt", "output"):
        if key not in table:
            raise InputError(f"[requests] with {key}", "none", "add it")
    rng = np.random.default_rng(table.get("seed", 0))
    count = table["count"]
    prompts = _lengths(table["prompt"], count, rng, "prompt")
    outputs = _lengths(table["output"], count, rng, "output")
    rate = file.get("arrivals", {}).get("rate_per_s")
    # Poisson arrivals: the times between two of them are exponential with mean 1 / rate.
    waits = rng.exponential(1 / rate, count) if rate else np.zeros(count)
    arrivals = np.cumsum(waits)
    columns = zip(arrivals.tolist(), prompts, outputs, strict=True)
    return tuple(Request(arrival_s, prompt, output) for arrival_s, prompt, output in columns)


def _lengths(limits: tuple[int, ...], count: int, rng: np.random.Generator, key: str) -> list[int]:
    """Return a length for each request: the same for all, or drawn between two limits."""
    if len(limits) > 2 or limits[0] > limits[-1]:
        needed = f"[requests] {key}: a number of tokens, or [least, most]"
        raise InputError(needed, shown(list(limits)), "correct it")
    # [512] draws from 512 .. 512; [100, 200] includes 200
    lengths: list[int] = rng.integers(limits[0], limits[-1] + 1, count).tolist()
    return lengths


def serve_llm(scenario: LlmScenario) -> Conversation:
    """Return the log of serving all requests of a scenario."""
    if scenario.reader is None:
        return converse(scenario.requests, scenario.engine, Steps(scenario.model))
    in_order = sorted(scenario.requests, key=lambda request: request.arrival_s)
    arrivals = _after_prefill(in_order, scenario.reader)
    # this machine only decodes: the reader has computed the caches
    log = converse(arrivals, scenario.engine, _StepsWithoutPrefill(Steps(scenario.model)))
    # A user waits from the moment at which the request reached the machine that reads prompts.
    for request, served in zip(in_order, log.requests, strict=True):
        served.arrival_s = request.arrival_s
    return log


class _StepsWithoutPrefill:
    """Times of steps in which prompts take no time, as another machine has read them."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def seconds_of(self, prompt_tokens: int, decodes: int, cached: int) -> float:
        """Return the seconds of the decodes of a step."""
        return self.steps.seconds_of(0, decodes, cached)


def _after_prefill(requests: Sequence[Request], reader: Model) -> list[Request]:
    """Return requests with the times at which the machine that reads prompts has finished them.

    It reads one prompt at a time. A request is finished when its cache has been sent, too.
    """
    steps = Steps(reader)
    link_bytes_per_s = max(
        (link.rate_bytes_per_s * link.count for link in reader.machine.chip.links.values()),
        default=0.0,
    )
    if not link_bytes_per_s:
        needed = f"a chip with a link, to send caches from {reader.machine.chip.name}"
        raise InputError(needed, "none", "leave [prefill] out")
    page_bytes = sequence_bytes(reader.decoder, reader.shard, PAGE_TOKENS, reader.format)
    free_s = 0.0
    arriving = []
    for request in requests:
        # Prompts that take 2 s each and arrive at 0 s and 1 s: the second is read from 2 s to 4 s.
        free_s = max(free_s, request.arrival_s) + steps.seconds_of(request.prompt, 0, 0)
        pages = blocks_of(request.prompt, PAGE_TOKENS)
        # qwen3_8b: a page of 128 tokens is 18.9 MB, 0.75 ms over 25 GB/s.
        sent_s = pages * page_bytes / link_bytes_per_s
        arriving.append(replace(request, arrival_s=free_s + sent_s))
    return arriving


def bottleneck(scenario: LlmScenario, log: Conversation) -> str:
    """Return the bottleneck of a decode step with the mean batch and the mean context."""
    tokens = sum(request.output for request in log.requests)
    prompts = sum(request.prompt for request in log.requests)
    # 1000 tokens in 100 steps are 10 sequences a step on average.
    batch = max(1, min(scenario.engine.max_batch, round(tokens / max(log.steps, 1))))
    # Prompts of 100 tokens and answers of 60: half way through an answer, 130 tokens.
    context = max(1, round((prompts + tokens / 2) / len(log.requests)))
    return scenario.model.time_step(decode(batch, context)).bottleneck
