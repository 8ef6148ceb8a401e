"""Estimates the times of published measurements of language models.

A row of published measurements has attributes that state the model, the plan (tp, ep, dp), the
phase and the load (batch and context, or batch, prompt and output). Two types of rows are not the
time of one step:

    metric    microseconds per output token of a server: it serves `batch` requests at a time, reads
              each prompt once and generates `output` tokens for it, so that a token takes
                  (output step + batch / dp prefill of one prompt) / (batch output)
    accepted  time per output token with speculative decoding: a step has 1 + mtp queries and yields
              1 + accepted tokens

After a step that guesses `mtp` tokens, a draft model runs `mtp` times: it has one layer, built like
the model's last one, and the model's head (DeepSeek-V3, section 2.2). With `micro_batches` a
prefill is cut into parts, and messages of one part overlap with the kernels of another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ascend_lab.compare.estimates import Estimate, largest
from ascend_lab.compare.rows import Work
from ascend_lab.compare.words import NOT_PRINTED
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.limits import shown
from ascend_lab.llm.machine import machine_of
from ascend_lab.llm.models import Decoder, decoder_names, load_decoder
from ascend_lab.llm.plan import Load, Plan, decode, prefill
from ascend_lab.llm.step import Model, Step
from ascend_lab.machine.chip import PRESETS, Chip

SAME_SIZES_AS: Mapping[str, str] = {
    "deepseek-r1": "deepseek_v3",
    "deepseek-r1-0528": "deepseek_v3",
    "kimi-k2.5": "kimi_k2",
    "kimi-k2-thinking": "kimi_k2",
    "minimax-m2.7": "minimax_m2",
}
"""Title of a model -> the table with the same sizes."""
CHIP_OF_SERIES: Mapping[str, str] = {"A2": "Ascend910B2", "A3": "Ascend910C"}
"""First word of the chip's name in a source -> the preset that is timed."""
SLOWER_DIE = "560T"
"""The text by which a row states an A3 card of 560 TFLOP/s in fp16: each of its two dies has half.

The die is Ascend910_9362: 20 cores at 1.5 GHz, 168 MiB of L2. Sources: Ascend/msmodeling @1e5a50b1,
tensor_cast/device.py (245.8 TFLOP/s in bf16, that is 20 cores x 8192 x 1.5 GHz); hicann/runtime,
platform_config.
"""
DEVICES_PER_UNIT: Mapping[str, int] = {"die": 1, "card": 2, "chip": 2, "node": 16}
"""Unit in which a source counts A3 machines -> devices (dies) in it; of A2, each is one device."""
MODES: Mapping[str, str] = {
    "graph": "graph",
    "npugraph_ex": "graph",
    "super": "super",
    "eager": "eager",
}
"""Mode that a source states -> the mode of `machine`."""
UNSUPPORTED_FEATURES: Mapping[str, str] = {
    "gemma": "layers with a window of keys, a dense block beside the experts",
    "longcat": "two attentions a layer, experts that return their input",
    "deepseek-v3.2": "an index that selects the keys of each query",
    "deepseek-v4": "compressed keys, several residual streams",
    "qwen3.5": "layers of linear attention with a state",
    "wan": "steps that remove noise from a video",
}
"""Beginning of a model's title -> the feature that the tables of `models` cannot describe."""
SERVER_METRIC = "us per output token of the server"


def estimate_row(work: Work, own_chip: Chip | None) -> Estimate:
    """Return the estimate of a row; raises an `AscendLabError` that says what the row lacks."""
    attributes = work.attributes
    marks: list[str] = []
    chip, devices = _chip(work.chip, own_chip, marks)
    decoder = _decoder(attributes)
    plan = _plan(attributes, devices, decoder)
    mode = MODES.get(str(attributes.get("mode", "graph")), "")
    if not mode:
        raise UnsupportedError(
            f"a mode: {', '.join(MODES)}", shown(attributes["mode"]), "none is guessed"
        )
    stated_format = work.dtypes[0] if work.dtypes else ""
    if not stated_format:
        raise InputError("dtype: the format of the weights", "none", "none is guessed")
    has_bf16 = "bf16" in chip.cube
    number_format = "fp16" if stated_format == "bf16" and not has_bf16 else stated_format
    model = Model(decoder, machine_of(chip, "", plan, mode), plan, number_format)
    if "metric" in attributes:
        return _server_estimate(model, attributes, marks)
    return _step_estimate(model, attributes, marks)


def _chip(description: str, own_chip: Chip | None, marks: list[str]) -> tuple[Chip, int]:
    """Return the chip of a row, and the number of devices that it states (0: it states none)."""
    from ascend_lab.machine.chip import load_chip

    name = description.partition(" (")[0]
    # "A3 (8 cards)": 8 cards of 2 dies, 16 devices.
    count_match = re.search(r"\((\d+) (die|card|chip|node)s?\)", description)
    if own_chip is not None and name in ("", own_chip.name):
        return own_chip, int(count_match[1]) if count_match else 0
    if name in PRESETS:
        return load_chip(name), int(count_match[1]) if count_match else 0
    series = name.partition(" ")[0]
    if series not in CHIP_OF_SERIES:
        chip_names = ", ".join((*CHIP_OF_SERIES, *PRESETS))
        raise InputError(f"chip: one of {chip_names}", shown(description), "none is guessed")
    preset = CHIP_OF_SERIES[series]
    chip = load_chip(preset)
    marks.append(f"chip: as {preset}, {NOT_PRINTED}")
    if SLOWER_DIE in description:
        chip = replace(
            chip, core_count=20, clock_hz=1.5e9, l2=replace(chip.l2, size_bytes=168 << 20)
        )
        marks.append("with 20 cores at 1.5 GHz")
    devices = 0
    if count_match:
        devices = int(count_match[1]) * (DEVICES_PER_UNIT[count_match[2]] if series == "A3" else 1)
    return chip, devices


def _decoder(attributes: Mapping[str, Any]) -> Decoder:
    """Return the decoder that a row names by its published title."""
    title = str(attributes["model"])
    titles = {load_decoder(name).title.lower(): name for name in decoder_names()}
    name = titles.get(title.lower()) or SAME_SIZES_AS.get(title.lower())
    if name is None:
        reasons = [
            why for start, why in UNSUPPORTED_FEATURES.items() if title.lower().startswith(start)
        ]
        hint = f"it has {reasons[0]}" if reasons else "write a .toml file for the command llm"
        raise UnsupportedError("a model that a table can describe", shown(title), hint)
    return load_decoder(name)


def _plan(attributes: Mapping[str, Any], devices: int, decoder: Decoder) -> Plan:
    """Return the plan that a row states; raises `InputError` if it states none.

    If a row states `ep` alone, each device is a data-parallel group of its own, as in the sources
    that print `ep` alone.
    """
    ranks = _number(attributes, "ranks") if "ranks" in attributes else devices
    degrees = {word: _number(attributes, word) for word in ("tp", "ep", "dp") if word in attributes}
    if not degrees and ranks > 1:
        raise InputError("a plan: tp, ep or dp", f"{ranks} devices and none", "none is guessed")
    tp = degrees.get("tp", 1)
    ep = degrees.get("ep", 1)
    # ep 16 alone: 16 groups of one device. Without experts `ep` divides nothing, and no groups
    # follow from it.
    usual_dp = 1 if decoder.experts is None else max(1, ep // tp)
    return Plan(tp=tp, ep=ep, dp=degrees.get("dp", usual_dp))


def _number(attributes: Mapping[str, Any], key: str) -> int:
    """Return a positive integer attribute of a row; raises `InputError` if it has none."""
    value = attributes.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        needed = f"{key} as a number"
        raise InputError(
            needed, shown(value) if key in attributes else "none", "the row leaves it open"
        )
    return value


def _step_estimate(model: Model, attributes: Mapping[str, Any], marks: list[str]) -> Estimate:
    """Return the time of one step, or per output token with speculative decoding."""
    phase = attributes.get("phase")
    if phase == "prefill":
        prompts = prefill(_number(attributes, "batch"), _number(attributes, "prompt"))
        prefill_load = _with_balance(prompts, attributes)
        if "micro_batches" in attributes:
            parts = _number(attributes, "micro_batches")
            return _micro_batched_estimate(model, prefill_load, parts, marks)
        return _estimate_of(model.step(prefill_load), 1.0, marks)
    if phase != "decode":
        raise UnsupportedError("phase: decode or prefill", shown(phase), "none is guessed")
    if "mtp" not in attributes:
        queries = _number(attributes, "queries") if "queries" in attributes else 1
        load = _with_balance(_decode_load(attributes, queries, marks), attributes)
        return _estimate_of(model.step(load), 1.0, marks)
    return _speculative_estimate(model, attributes, marks)


def _with_balance(load: Load, attributes: Mapping[str, Any]) -> Load:
    """Return a load that spreads tokens evenly over experts if the row says so."""
    if "experts" not in attributes:
        return load
    if attributes["experts"] != "even":
        raise InputError("experts: even", shown(attributes["experts"]), "leave it out")
    return replace(load, even=True)


def _speculative_estimate(
    model: Model, attributes: Mapping[str, Any], marks: list[str]
) -> Estimate:
    """Return the time of a step with speculative decoding, or per token if the row is per token.

    The draft's first pass reads all new tokens, each of its other passes one token a sequence.
    """
    guesses = _number(attributes, "mtp")
    tokens_per_step = 1.0
    if "queries" in attributes:
        queries = _number(attributes, "queries")
    else:
        accepted = re.match(r"([\d.]+)", str(attributes.get("accepted", "")))
        if accepted is None:
            raise InputError("accepted tokens of those guessed", "none", "the row leaves it open")
        # 2 guesses: the step checks the last token and both guesses, 3 queries a sequence
        queries = 1 + guesses
        tokens_per_step += float(accepted[1])
    load = _with_balance(_decode_load(attributes, queries, marks), attributes)
    step = model.step(load)
    draft = _draft_of(model)
    all_tokens = draft.step(load)
    time_s = step.time_s + all_tokens.time_s
    bound_s = step.bound_s + all_tokens.bound_s
    if guesses > 1:
        single = draft.step(_with_balance(_decode_load(attributes, 1, []), attributes))
        # 3 guesses: one pass over all new tokens, two passes over one token
        time_s += (guesses - 1) * single.time_s
        bound_s += (guesses - 1) * single.bound_s
    marks.append(f"with guesses by a draft of one layer and the head: {guesses}")
    if "streams" in attributes:
        time_s -= _overlapped_s(model, load, step)
        marks.append("shared experts beside the messages")
    bound = _bound_or_none(bound_s / tokens_per_step, marks)
    # A step of 60 ms that gives 1 + 0.5 tokens is 40 ms a token.
    return Estimate(time_s / tokens_per_step, bound, largest(step.ledger), {}, tuple(marks))


def _overlapped_s(model: Model, load: Load, step: Step) -> float:
    """Return the seconds in which shared experts overlap with the messages to routed experts.

    The source runs shared experts on a second stream (enable_multi_streams), so that the shorter of
    the two takes no time of its own.
    """
    shared_s = 0.0
    for calls, repeats in model.calls(load):
        for call in calls:
            if call.name.startswith("shared."):
                timed = model.timer.call_time(call)
                shared_s += repeats * (timed.time_s - timed.start_s)
    # 5 ms of shared experts overlap with 12 ms of messages: 5 ms are saved
    return min(shared_s, step.ledger["links"])


def _draft_of(model: Model) -> Model:
    """Return the draft model that guesses tokens: one layer, built like the model's last one."""
    decoder = model.decoder
    experts = decoder.experts
    if experts is not None:
        # the only layer would otherwise count as one of the dense layers at the beginning
        experts = replace(experts, dense_layers=0)
    one_layer = replace(decoder, layers=1, experts=experts)
    return Model(one_layer, model.machine, model.plan, model.format.name, model.timer)


def _micro_batched_estimate(model: Model, load: Load, parts: int, marks: list[str]) -> Estimate:
    """Return the time of a prefill cut into parts, whose messages overlap with other parts.

        together = max(kernels of all parts, messages of all parts) + messages of one layer

    The messages of one part in one layer overlap with nothing.
    """
    if load.batch % (parts * model.plan.dp):
        needed = f"a batch of {parts} equal parts in each of {model.plan.dp} groups"
        raise InputError(needed, str(load.batch), "correct that row")
    step = model.step(replace(load, batch=load.batch // parts))
    links_s = parts * step.ledger["links"]
    # 2 parts of 30 ms each, of which 10 ms are links: 20 ms of links and 40 ms of kernels. Together
    # they take 40 ms and, with 61 layers, 10 / 61 ms.
    kernels_s = parts * step.time_s - links_s
    time_s = max(links_s, kernels_s) + step.ledger["links"] / model.decoder.layers
    marks.append(f"messages of {parts} parts hidden behind each other's kernels")
    return Estimate(
        time_s, _bound_or_none(parts * step.bound_s, marks), largest(step.ledger), {}, tuple(marks)
    )


def _decode_load(attributes: Mapping[str, Any], queries: int, marks: list[str]) -> Load:
    """Return the load of a decode row; without a context, the middle of the answer is timed."""
    batch = _number(attributes, "batch")
    if "context" in attributes:
        return decode(batch, _number(attributes, "context"), queries)
    # Answers of 200 tokens: on average 100 of them are in the cache.
    middle = _number(attributes, "output") // 2
    longest = re.fullmatch(r"(\d+) at most", str(attributes.get("prompt", "")))
    if longest is None:
        context = _number(attributes, "prompt") + middle
    else:
        # The mean prompt is not printed. Half of the maximum is assumed.
        context = int(longest[1]) // 2 + middle
        marks.append("length of the prompt not printed: half of the most it can be")
    marks.append(f"context: {context}, in the middle of the answer")
    return decode(batch, context, queries)


def _server_estimate(model: Model, attributes: Mapping[str, Any], marks: list[str]) -> Estimate:
    """Return a server's seconds per output token; prompts are read between decode steps."""
    if attributes["metric"] != SERVER_METRIC:
        raise InputError("a time of the whole work", f"metric={attributes['metric']}", "of a unit")
    batch = _number(attributes, "batch")
    output = _number(attributes, "output")
    step = model.step(_with_balance(_decode_load(attributes, 1, marks), attributes))
    prompt = model.step(_with_balance(prefill(1, _number(attributes, "prompt")), attributes))
    # batch 8, output 100, steps of 20 ms, prompts of 50 ms, dp 1: (100 * 20 + 8 * 50) / 800 = 3 ms
    # a token.
    read_s = batch / model.plan.dp * prompt.time_s
    token_s = (output * step.time_s + read_s) / (batch * output)
    marks.append("full batch at all times, each prompt read alone between two steps")
    bound_s = (output * step.bound_s + batch / model.plan.dp * prompt.bound_s) / (batch * output)
    # what takes longer in total, decoding or reading prompts, is the limit
    limit = largest(step.ledger) if output * step.time_s > read_s else "prefill"
    return Estimate(token_s, _bound_or_none(bound_s, marks), limit, {}, tuple(marks))


def _estimate_of(step: Step, tokens_per_step: float, marks: list[str]) -> Estimate:
    """Return the estimate of a step per output token."""
    bound_s = _bound_or_none(step.bound_s / tokens_per_step, marks)
    return Estimate(step.time_s / tokens_per_step, bound_s, largest(step.ledger), {}, tuple(marks))


def _bound_or_none(bound_s: float, marks: list[str]) -> float | None:
    """Return a bound, or None if the source does not state the exact chip, which may be faster."""
    return None if any(NOT_PRINTED in mark for mark in marks) else bound_s
