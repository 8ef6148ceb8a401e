"""Defines a plan, which divides a decoder among devices, and a load, the work of one step.

    tp  tensor parallel: heads and widths are cut, and each layer's results are added up
    dp  data parallel: there are `dp` groups of `tp` devices, each with sequences of its own
    ep  expert parallel: the `tp dp` devices form `ep` sets, and each set has a share of the experts
    pp  pipeline parallel: the layers are cut into `pp` stages

An expert on several devices (`tp dp / ep` of them) is cut along its width. With tp 4, dp 8 and
ep 16, 32 devices form 16 sets of 2, and each of the two has half of every expert of its set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ascend_lab.errors import InputError
from ascend_lab.llm.models import Decoder, Experts, GroupedAttention

PHASES = ("decode", "prefill")
MAX_DEVICES = 1024
"""Largest number of devices of a plan; a larger number is taken for a mistake."""
MAX_TOKENS = 1 << 27
"""Largest product of sequences and tokens of a step; a larger number is taken for a mistake."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The degrees of tensor, expert, data and pipeline parallelism."""

    tp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1

    @property
    def devices(self) -> int:
        """Return the number of all devices: tp dp pp."""
        return self.tp * self.dp * self.pp

    @property
    def stage_devices(self) -> int:
        """Return the number of devices of a pipeline stage: tp dp."""
        return self.tp * self.dp

    @property
    def expert_parts(self) -> int:
        """Return the number of devices among which one expert is cut: tp dp / ep."""
        # tp 4, dp 8, ep 16: 32 devices, and every expert is cut among 2 of them.
        return self.stage_devices // self.ep

    def __str__(self) -> str:
        words = (f"{name} {getattr(self, name)}" for name in ("tp", "ep", "dp", "pp"))
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Load:
    """The work of a step: sequences of all groups, new tokens of each, and cached tokens of each.

    A decode step has one new token per sequence, or a few with speculative decoding, and `context`
    tokens are in the cache. A prefill has all tokens of the prompts, and usually no context.
    `even` means that all devices get the same number of tokens for their experts, as some
    benchmarks force it.
    """

    phase: str
    batch: int
    tokens: int
    context: int
    even: bool = False

    @property
    def keys(self) -> int:
        """Return the number of keys to which the last new token of a sequence attends."""
        # 4095 tokens in the cache and 1 new one: 4096 keys.
        return self.context + self.tokens


def decode(batch: int, context: int, queries: int = 1) -> Load:
    """Return the load of a decode step.

    `context` counts all tokens whose keys are read, including the `queries` new ones.
    """
    _check_size("batch", batch)
    _check_size("context", context)
    if not 1 <= queries <= context:
        raise InputError(f"queries from 1 to {context}, the context", str(queries), "lower them")
    _check_size("batch times context", batch * context)
    return Load("decode", batch, queries, context - queries)


def prefill(batch: int, tokens: int) -> Load:
    """Return the load of a prefill of whole prompts."""
    _check_size("batch", batch)
    _check_size("tokens of a prompt", tokens)
    _check_size("batch times tokens", batch * tokens)
    return Load("prefill", batch, tokens, 0)


def _check_size(quantity: str, value: int) -> None:
    """Raise `InputError` unless a number of sequences or tokens is one that a step can have."""
    if not 1 <= value <= MAX_TOKENS:
        raise InputError(f"{quantity} from 1 to {MAX_TOKENS}", str(value), "correct that number")


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a decoder on one device: its layers, heads, columns, words and experts.

    If the decoder has fewer heads of keys than `tp`, each device has one, and several have the
    same one. `words` are the rows of the vocabulary whose scores the device computes; a width is a
    number of columns, and a decoder without experts has 0 of the last three.
    """

    layers: int
    heads: int
    kv_heads: int
    dense_width: int
    words: int
    experts: int = 0
    expert_width: int = 0
    shared_width: int = 0


def shard_of(decoder: Decoder, plan: Plan) -> Shard:
    """Return the largest shard of a plan; raises `InputError` if it does not divide the decoder."""
    _check_degrees(plan)
    attention = decoder.attention
    _check_divides("tp", plan.tp, attention.heads, f"heads of {decoder.name}")
    kv_heads = 1
    if isinstance(attention, GroupedAttention):
        kv_heads = _kv_heads(attention, plan.tp)
    if decoder.dense_layers:
        _check_divides("tp", plan.tp, decoder.dense_width, "columns of the dense block")
    if plan.pp > decoder.layers:
        raise InputError(f"pp of at most {decoder.layers} layers", str(plan.pp), "lower it")
    if decoder.experts is None and plan.ep > 1:
        raise InputError(f"ep 1: {decoder.name} has no experts", f"ep {plan.ep}", "leave ep out")
    shard = Shard(
        layers=math.ceil(decoder.layers / plan.pp),
        heads=attention.heads // plan.tp,
        kv_heads=kv_heads,
        dense_width=decoder.dense_width // plan.tp,
        words=math.ceil(decoder.vocabulary / plan.tp),
    )
    if decoder.experts is None:
        return shard
    return _with_experts(shard, decoder.experts, plan)


def _check_degrees(plan: Plan) -> None:
    """Raise `InputError` if a degree of a plan is out of range or it needs too many devices."""
    for name in ("tp", "ep", "dp", "pp"):
        value = getattr(plan, name)
        if not 1 <= value <= MAX_DEVICES:
            raise InputError(f"{name} from 1 to {MAX_DEVICES}", str(value), "correct that number")
    if plan.devices > MAX_DEVICES:
        needed = f"at most {MAX_DEVICES} devices"
        raise InputError(needed, f"{plan.devices} ({plan})", "lower one of them")


def _kv_heads(attention: GroupedAttention, tp: int) -> int:
    """Return the heads of keys on one of `tp` devices; raises `InputError` if they do not divide.

    8 heads of keys: with tp 4 a device has 2; with tp 16 it has 1, and two have the same.
    """
    heads = attention.kv_heads
    if heads % tp and tp % heads:
        needed = f"tp that divides {heads} heads of keys, or is a multiple of them"
        raise InputError(needed, f"tp {tp}", f"try {divisors_text(heads)}")
    return max(1, heads // tp)


def _with_experts(shard: Shard, mixture: Experts, plan: Plan) -> Shard:
    """Return a shard with a device's part of the experts and of the shared block.

    deepseek_v3 with tp 4, dp 8, ep 16: 256 / 16 = 16 experts a device, each 2048 / 2 = 1024 wide,
    and 2048 / 4 = 512 columns of the shared block.
    """
    _check_divides("ep", plan.ep, plan.stage_devices, "devices of a stage (tp dp)")
    _check_divides("ep", plan.ep, mixture.count, "experts")
    _check_divides("tp dp / ep", plan.expert_parts, mixture.width, "columns of an expert")
    _check_divides("tp", plan.tp, mixture.shared_width, "columns of the shared block")
    return replace(
        shard,
        experts=mixture.count // plan.ep,
        expert_width=mixture.width // plan.expert_parts,
        shared_width=mixture.shared_width // plan.tp,
    )


def _check_divides(name: str, parts: int, total: int, what: str) -> None:
    """Raise `InputError` unless a number of parts divides a total."""
    if total % parts:
        needed = f"{name} that divides the {total} {what}"
        raise InputError(needed, f"{name} {parts}", f"try {divisors_text(total)}")


def divisors_text(total: int) -> str:
    """Return the divisors of a number that are powers of two, as words: "1, 2, 4 or 8"."""
    # 12 heads: "1, 2 or 4".
    powers = [2**bits for bits in range(11) if total % 2**bits == 0]
    if len(powers) == 1:
        return "1"
    return ", ".join(map(str, powers[:-1])) + f" or {powers[-1]}"
