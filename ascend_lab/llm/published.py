"""Measured rows of language models: their conditions in our words, and the model's answer.

A row's attributes name the model, the plan (tp, ep, dp), the load (batch, context, or prompt and
output) and the phase. Two kinds of row are no time of one step:

    metric    a server's microseconds per output token: batch requests at a time, each read once
              and then given `output` tokens, so that a token takes
                  (output step + batch prefill of one prompt) / (batch output)
    accepted  time per output token with tokens guessed ahead: a step has 1 + mtp queries and gives
              1 + accepted tokens

A step with `mtp` guesses ends with as many passes through a draft of one layer, the kind of the
model's last, and the model's head (DeepSeek-V3, section 2.2). `micro_batches` are the parts of a
prefill whose messages pass while another part computes.
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

ALSO_CALLED: Mapping[str, str] = {
    "deepseek-r1": "deepseek_v3",
    "deepseek-r1-0528": "deepseek_v3",
    "kimi-k2.5": "kimi_k2",
    "kimi-k2-thinking": "kimi_k2",
    "minimax-m2.7": "minimax_m2",
}
"""Models that have the sizes of another one."""
SERIES: Mapping[str, str] = {"A2": "Ascend910B2", "A3": "Ascend910C"}
"""First word of a source's chip -> the preset that it is timed as."""
SLOWER_DIE = "560T"
"""In the words of a chip: an A3 card of 560 TFLOP/s in fp16, of which a die has half.

Its die is Ascend910_9362: 20 cores at 1.5 GHz, 168 MiB of L2. Sources: Ascend/msmodeling @1e5a50b1,
tensor_cast/device.py (245.8 TFLOP/s in bf16, that is 20 cores x 8192 x 1.5 GHz); hicann/runtime,
platform_config.
"""
DIES: Mapping[str, int] = {"die": 1, "card": 2, "chip": 2, "node": 16}
"""Devices of an A3 in one of what a source counts; of other series each is one device."""
MODES: Mapping[str, str] = {
    "graph": "graph",
    "npugraph_ex": "graph",
    "super": "super",
    "eager": "eager",
}
UNLIKE: Mapping[str, str] = {
    "gemma": "layers with a window of keys, a dense block beside the experts",
    "longcat": "two attentions a layer, experts that return their input",
    "deepseek-v3.2": "an index that selects the keys of each query",
    "deepseek-v4": "compressed keys, several residual streams",
    "qwen3.5": "layers of linear attention with a state",
    "wan": "steps that remove noise from a video",
}
"""Beginning of a model's title -> what no table of ours can say of it."""
PER_TOKEN = "us per output token of the server"


def estimate_row(work: Work, own_chip: Chip | None) -> Estimate:
    """Return the model's estimate of a row; raises an `AscendLabError` with what it lacks."""
    given = work.attributes
    marks: list[str] = []
    chip, devices = _chip(work.chip, own_chip, marks)
    decoder = _decoder(given)
    plan = _plan(given, devices, decoder)
    mode = MODES.get(str(given.get("mode", "graph")), "")
    if not mode:
        raise UnsupportedError(
            f"a mode: {', '.join(MODES)}", shown(given["mode"]), "none is guessed"
        )
    number_format = work.dtypes[0] if work.dtypes else ""
    if not number_format:
        raise InputError("dtype: the format of the weights", "none", "none is guessed")
    if number_format == "bf16" and "bf16" not in chip.cube:
        number_format = "fp16"
    model = Model(decoder, machine_of(chip, "", plan, mode), plan, number_format)
    if "metric" in given:
        return _served(model, given, marks)
    return _timed(model, given, marks)


def _chip(words: str, own_chip: Chip | None, marks: list[str]) -> tuple[Chip, int]:
    """Return the chip of a row, and the devices that its words count (0: none are counted)."""
    from ascend_lab.machine.chip import load_chip

    name = words.partition(" (")[0]
    # "A3 (8 cards)": 8 cards of 2 dies, 16 devices.
    counted = re.search(r"\((\d+) (die|card|chip|node)s?\)", words)
    if own_chip is not None and name in ("", own_chip.name):
        return own_chip, int(counted[1]) if counted else 0
    if name in PRESETS:
        return load_chip(name), int(counted[1]) if counted else 0
    series = name.partition(" ")[0]
    if series not in SERIES:
        known = ", ".join((*SERIES, *PRESETS))
        raise InputError(f"chip: one of {known}", shown(words), "none is guessed")
    preset = SERIES[series]
    chip = load_chip(preset)
    marks.append(f"chip: as {preset}, {NOT_PRINTED}")
    if SLOWER_DIE in words:
        chip = replace(
            chip, core_count=20, clock_hz=1.5e9, l2=replace(chip.l2, size_bytes=168 << 20)
        )
        marks.append("with 20 cores at 1.5 GHz")
    devices = 0
    if counted:
        devices = int(counted[1]) * (DIES[counted[2]] if series == "A3" else 1)
    return chip, devices


def _decoder(given: Mapping[str, Any]) -> Decoder:
    """Return the decoder that a row names by its published title."""
    title = str(given["model"])
    titles = {load_decoder(name).title.lower(): name for name in decoder_names()}
    name = titles.get(title.lower()) or ALSO_CALLED.get(title.lower())
    if name is None:
        reasons = [why for start, why in UNLIKE.items() if title.lower().startswith(start)]
        hint = f"it has {reasons[0]}" if reasons else "write a .toml file for the command llm"
        raise UnsupportedError("a model that a table can describe", shown(title), hint)
    return load_decoder(name)


def _plan(given: Mapping[str, Any], devices: int, decoder: Decoder) -> Plan:
    """Return the plan that a row states; raises `InputError` if it leaves it open.

    Of experts on as many devices as there are, with no word on attention, each device is a group of
    its own: that is how the sources that print `ep` alone run.
    """
    ranks = _number(given, "ranks") if "ranks" in given else devices
    words = {word: _number(given, word) for word in ("tp", "ep", "dp") if word in given}
    if not words and ranks > 1:
        raise InputError("a plan: tp, ep or dp", f"{ranks} devices and none", "none is guessed")
    tp = words.get("tp", 1)
    ep = words.get("ep", 1)
    # ep 16 alone: 16 groups of one device.
    dp = words.get("dp", max(1, ep // tp))
    if decoder.experts is None:
        dp = words.get("dp", 1)
    return Plan(tp=tp, ep=ep, dp=dp)


def _number(given: Mapping[str, Any], word: str) -> int:
    """Return a whole number above 0 of a row; raises `InputError` if it is not there."""
    value = given.get(word)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        needed = f"{word} as a number"
        raise InputError(
            needed, shown(value) if word in given else "none", "the row leaves it open"
        )
    return value


def _timed(model: Model, given: Mapping[str, Any], marks: list[str]) -> Estimate:
    """Return the time of one step, or per token where tokens are guessed ahead."""
    phase = given.get("phase")
    if phase == "prefill":
        load = _routed(prefill(_number(given, "batch"), _number(given, "prompt")), given)
        if "micro_batches" in given:
            return _in_parts(model, load, _number(given, "micro_batches"), marks)
        return _estimate(model.step(load), 1.0, marks)
    if phase != "decode":
        raise UnsupportedError("phase: decode or prefill", shown(phase), "none is guessed")
    if "mtp" not in given:
        queries = _number(given, "queries") if "queries" in given else 1
        load = _routed(_decode_load(given, queries, marks), given)
        return _estimate(model.step(load), 1.0, marks)
    return _guessing(model, given, marks)


def _routed(load: Load, given: Mapping[str, Any]) -> Load:
    """Return a load with what a row says of its experts; raises `InputError` for another word."""
    if "experts" not in given:
        return load
    if given["experts"] != "even":
        raise InputError("experts: even", shown(given["experts"]), "leave it out")
    return replace(load, even=True)


def _guessing(model: Model, given: Mapping[str, Any], marks: list[str]) -> Estimate:
    """Return the time of a step that guesses tokens, or, where a row is one per token, of a token.

    The first guess passes all new tokens through the draft, each other one token of a sequence.
    """
    guesses = _number(given, "mtp")
    tokens_per_step = 1.0
    if "queries" in given:
        queries = _number(given, "queries")
    else:
        accepted = re.match(r"([\d.]+)", str(given.get("accepted", "")))
        if accepted is None:
            raise InputError("accepted tokens of those guessed", "none", "the row leaves it open")
        queries = 1 + guesses
        tokens_per_step += float(accepted[1])
    load = _routed(_decode_load(given, queries, marks), given)
    step = model.step(load)
    draft = _draft_of(model)
    all_tokens = draft.step(load)
    time_s = step.time_s + all_tokens.time_s
    bound_s = step.bound_s + all_tokens.bound_s
    if guesses > 1:
        single = draft.step(_routed(_decode_load(given, 1, []), given))
        time_s += (guesses - 1) * single.time_s
        bound_s += (guesses - 1) * single.bound_s
    marks.append(f"with guesses by a draft of one layer and the head: {guesses}")
    if "streams" in given:
        time_s -= _beside_s(model, load, step)
        marks.append("shared experts beside the messages")
    bound = _bound(bound_s / tokens_per_step, marks)
    # A step of 60 ms that gives 1 + 0.5 tokens is 40 ms a token.
    return Estimate(time_s / tokens_per_step, bound, largest(step.ledger), {}, tuple(marks))


def _beside_s(model: Model, load: Load, step: Step) -> float:
    """Return the seconds of shared experts that messages of the routed ones hide.

    The source runs them on a second stream (enable_multi_streams): the shorter of both is hidden.
    """
    shared_s = 0.0
    for calls, repeats in model.calls(load):
        for call in calls:
            if call.name.startswith("shared."):
                timed = model.times.of(call)
                shared_s += repeats * (timed.time_s - timed.start_s)
    return min(shared_s, step.ledger["links"])


def _draft_of(model: Model) -> Model:
    """Return the model of one layer, of the kind of the last, that guesses the next tokens."""
    decoder = model.decoder
    experts = decoder.experts
    if experts is not None:
        experts = replace(experts, dense_layers=0)
    single = replace(decoder, layers=1, experts=experts)
    return Model(single, model.machine, model.plan, model.format.name, model.times)


def _in_parts(model: Model, load: Load, parts: int, marks: list[str]) -> Estimate:
    """Return the time of a prefill in parts: messages of one pass while another computes.

        together = max(kernels of all parts, messages of all parts)

    The first message of a layer and the last of all have nothing to hide behind: of the layers,
    one message of a part.
    """
    if load.batch % (parts * model.plan.dp):
        needed = f"a batch of {parts} equal parts in each of {model.plan.dp} groups"
        raise InputError(needed, str(load.batch), "mend that row")
    step = model.step(replace(load, batch=load.batch // parts))
    links_s = parts * step.ledger["links"]
    # 2 parts of 30 ms, of which 10 ms are links: links 20 ms, kernels 40 ms; together 40 ms and, of
    # 61 layers, one message of 10 / 61 ms.
    kernels_s = parts * step.time_s - links_s
    time_s = max(links_s, kernels_s) + step.ledger["links"] / model.decoder.layers
    marks.append(f"messages of {parts} parts hidden behind each other's kernels")
    return Estimate(
        time_s, _bound(parts * step.bound_s, marks), largest(step.ledger), {}, tuple(marks)
    )


def _decode_load(given: Mapping[str, Any], queries: int, marks: list[str]) -> Load:
    """Return the load of a decode row: its context, or the middle of its answer."""
    batch = _number(given, "batch")
    if "context" in given:
        return decode(batch, _number(given, "context"), queries)
    # Answers of 200 tokens: on average 100 of them stand in the cache.
    middle = _number(given, "output") // 2
    longest = re.fullmatch(r"(\d+) at most", str(given.get("prompt", "")))
    if longest is None:
        context = _number(given, "prompt") + middle
    else:
        # With one sequence the cache is a few per cent of what a step reads.
        context = int(longest[1]) // 2 + middle
        marks.append("length of the prompt not printed: half of the most it can be")
    marks.append(f"context: {context}, in the middle of the answer")
    return decode(batch, context, queries)


def _served(model: Model, given: Mapping[str, Any], marks: list[str]) -> Estimate:
    """Return a server's seconds per output token: prompts are read between the steps."""
    if given["metric"] != PER_TOKEN:
        raise InputError("a time of the whole work", f"metric={given['metric']}", "of a unit")
    batch = _number(given, "batch")
    output = _number(given, "output")
    step = model.step(_routed(_decode_load(given, 1, marks), given))
    prompt = model.step(_routed(prefill(1, _number(given, "prompt")), given))
    # batch 8, output 100, steps of 20 ms, prompts of 50 ms, dp 1: (100 * 20 + 8 * 50) / 800 = 3 ms
    # a token.
    read_s = batch / model.plan.dp * prompt.time_s
    token_s = (output * step.time_s + read_s) / (batch * output)
    marks.append("full batch at all times, each prompt read alone between two steps")
    bound_s = (output * step.bound_s + batch / model.plan.dp * prompt.bound_s) / (batch * output)
    limit = largest(step.ledger) if output * step.time_s > read_s else "prefill"
    return Estimate(token_s, _bound(bound_s, marks), limit, {}, tuple(marks))


def _estimate(step: Step, tokens_per_step: float, marks: list[str]) -> Estimate:
    """Return the estimate of a step."""
    bound_s = _bound(step.bound_s / tokens_per_step, marks)
    return Estimate(step.time_s / tokens_per_step, bound_s, largest(step.ledger), {}, tuple(marks))


def _bound(bound_s: float, marks: list[str]) -> float | None:
    """Return a bound, or None if the bin of the chip is not printed: another may be quicker."""
    return None if any(NOT_PRINTED in mark for mark in marks) else bound_s
