"""Published rows of language models: errors as computed live, reasons of refused rows, routing."""

from dataclasses import replace
from functools import cache
from importlib.resources import files
from statistics import median

import numpy as np
import pytest

from ascend_lab import llm
from ascend_lab.cli import ascend_lab as command
from ascend_lab.compare import compare
from ascend_lab.compare.rows import Work
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.llm.routing import (
    GATING,
    expected_largest_load,
    gating_s,
    group_list_s,
    init_routing_s,
    merged_pairs,
)
from ascend_lab.machine.chip import load_chip

# Limits of the issue on language models; a row beyond 30 % stands here with its reason.
DENSE = {"ri/qwen3-8b/bf16": 0.05, "ri/qwen3-8b/w8a8": 0.10, "mm/qwen3-8B-decode": 0.10}
SPARSE = {
    "ri/deepseek-r1/6144": 0.25,
    "mm/qwen3-30b-a3b-decode": 0.30,  # one user: the term at fault is unknown
    "mm/GLM-4.7-decode": 0.10,
    "mm/kimi-k2.5-3.5k-decode": 0.20,
    "mm/minimax-m2.7-decode": 0.10,
}
PREFILL = {
    "ri/deepseek-r1/prefill/before": 0.05,
    "ri/deepseek-r1/prefill/after": 0.05,
    "mm/qwen3-8B-prefill": 0.20,
    "mm/kimi-k2.5-3.5k-prefill": 0.15,
    "mm/qwen3-30b-a3b-prefill": 0.50,  # as of one user
}
SERVED = {
    "va/qwen3-32b/a2": 0.20,
    "va/qwen3-32b/a3": 0.20,
    "va/qwen3-30b-a3b/a3": 0.10,
    "va/qwen3-235b/a3": 0.25,
}
MEDIANS = [(DENSE, 0.15), (SPARSE, 0.25), (PREFILL, 0.20), (SERVED, 0.25)]


@cache
def answers() -> tuple[dict[str, float], dict[str, str]]:
    """Return the errors of the timed rows, and the reasons of the refused ones, by case."""
    rows = compare(str(files("ascend_lab") / "data" / "measured" / "llm.csv")).rows
    errors = {row.case: row.error for row in rows if row.error is not None}
    return errors, {row.case: row.refused for row in rows if row.refused}


@pytest.mark.parametrize(("limits", "most"), MEDIANS, ids=["dense", "sparse", "prefill", "served"])
def test_medians_are_within_the_limits(limits: dict[str, float], most: float) -> None:
    errors, _ = answers()
    assert median(abs(errors[case]) for case in limits) <= most


@pytest.mark.parametrize(
    ("case", "limit"), [pair for limits, _ in MEDIANS for pair in limits.items()]
)
def test_each_row_is_within_its_limit(case: str, limit: float) -> None:
    errors, _ = answers()
    assert abs(errors[case]) <= limit


def test_every_row_is_timed_or_says_what_it_lacks() -> None:
    errors, refused = answers()
    timed = {case for limits, _ in MEDIANS for case in limits}
    assert set(errors) == timed
    assert not timed & set(refused)
    assert len(errors) + len(refused) == 57
    assert all("; got " in reason for reason in refused.values())


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("ri/qwen3-8b/bf16/prefill", "prompt as a number"),
        ("va/qwen3-235b/a3-disaggregated", "a plan: tp, ep or dp"),
        ("va/kimi-k2-thinking/c1", "output as a number"),
        ("ri/deepseek-v3.2/256x65536", "an index that selects the keys"),
        ("mm/qwen3.5-27b-1610-decode", "layers of linear attention"),
        ("va/qwen3-8b/310p", "a format: fp16"),
    ],
)
def test_a_refused_row_names_what_is_open(case: str, reason: str) -> None:
    assert reason in answers()[1][case]


# -- routing ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("tokens", "devices"), [(64, 4), (1024, 16), (6144, 64)])
def test_the_fullest_device_is_as_random_choices_have_it(tokens: int, devices: int) -> None:
    rng = np.random.default_rng(1)
    loads = rng.multinomial(tokens, [1 / devices] * devices, size=4000).max(axis=1)
    assert expected_largest_load(tokens, 1 / devices, devices) == pytest.approx(
        loads.mean(), rel=0.03
    )


def test_one_device_has_the_mean() -> None:
    assert expected_largest_load(100, 0.25, 1) == 25


def test_merged_pairs_are_those_of_all_passes() -> None:
    assert merged_pairs(32) == 0
    assert merged_pairs(128) == 128
    assert merged_pairs(512) == 2 * 512
    assert merged_pairs(128, 8) == 4 * 8


@pytest.mark.parametrize("chip_name", ["Ascend910B2", "Ascend310P3", "Ascend950PR"])
def test_more_tokens_take_no_less_to_choose_and_to_order(chip_name: str) -> None:
    chip = load_chip(chip_name)
    tokens = (1, 48, 480, 4800)
    works = [Work(GATING, chip_name, ((n, 128), (n, 8)), dtypes=("fp32",)) for n in tokens]
    for times in (
        [gating_s(work, chip) for work in works],
        [init_routing_s(8 * n, chip) for n in tokens],
    ):
        assert times[0] > 0
        assert times == sorted(times)


def names_of(load: llm.Load, number_format: str, **parts: int) -> list[str]:
    """Return the kernels of a layer with experts on one device of a 910C pod."""
    plan = llm.Plan(**parts)
    machine = llm.machine_of("Ascend910C", "", plan)
    timed = llm.Model(llm.load_decoder("deepseek_v2_lite"), machine, plan, number_format)
    return [call.name for calls, _ in timed.calls(load) for call in calls]


def test_dispatch_stands_for_the_moves_of_a_decode_step() -> None:
    single = names_of(llm.decode(8, 128), "bf16")
    assert {"choice", "tokens.to", "tokens.back"} <= set(single)
    several = names_of(llm.decode(8, 128), "bf16", dp=4, ep=4)
    assert not [name for name in several if name.startswith("tokens")]
    prompts = names_of(llm.prefill(8, 128), "w8a8", dp=4, ep=4)
    moves = [name for name in prompts if name.startswith("tokens")]
    assert moves == [
        "tokens.quantise",
        "tokens.to",
        "tokens.order",
        "tokens.unsort",
        "tokens.back",
    ]


def test_a_token_is_brought_to_bytes_once_for_two_products() -> None:
    names = names_of(llm.decode(8, 128), "w8a8")
    assert "q.quantise" in names
    assert "kv.down.quantise" not in names
    assert "experts.down.quantise" not in names


def test_an_even_load_takes_no_longer() -> None:
    plan = llm.Plan(dp=16, ep=16)
    machine = llm.machine_of("Ascend910C", "", plan)
    timed = llm.Model(llm.load_decoder("qwen3_30b_a3b"), machine, plan)
    load = llm.prefill(64, 512)
    assert timed.step(replace(load, even=True)).time_s < timed.step(load).time_s


def test_a_longer_list_of_experts_takes_longer_though_as_many_have_tokens() -> None:
    chip = load_chip("Ascend910C")
    assert group_list_s(128, chip) == pytest.approx(3.5e-6, rel=0.02)
    assert group_list_s(8, chip) < group_list_s(64, chip) < group_list_s(128, chip)


# -- formats and modes -----------------------------------------------------------------------------
def model(name: str, number_format: str, mode: str = "graph") -> llm.Model:
    """Return a model on one 910C."""
    machine = llm.machine_of("Ascend910C", "", llm.Plan(), mode)
    return llm.Model(llm.load_decoder(name), machine, llm.Plan(), number_format)


def test_a_latent_cache_in_bytes_is_smaller_and_quicker() -> None:
    load = llm.decode(64, 4096)
    wide = model("deepseek_v2_lite", "w8a8").step(load)
    narrow = model("deepseek_v2_lite", "w8a8c8").step(load)
    share = (512 + 2 * 64) / (2 * 512 + 2 * 64)
    assert narrow.memory.cache_bytes == pytest.approx(share * wide.memory.cache_bytes)
    assert narrow.bound_s < wide.bound_s
    assert narrow.time_s < wide.time_s


def test_a_cache_of_heads_has_no_bytes() -> None:
    with pytest.raises(UnsupportedError, match="latent vector in the cache"):
        model("qwen3_8b", "w8a8c8")


def test_weights_in_four_bits_are_half_of_those_in_eight() -> None:
    load = llm.decode(1, 128)
    eight = model("qwen3_30b_a3b", "w8a8").step(load)
    four = model("qwen3_30b_a3b", "w4a8").step(load)
    assert four.time_s < eight.time_s
    assert four.ledger["weights"] < eight.ledger["weights"]
    # Embedding, head and router stay wide.
    tables = 2 * 2 * 151936 * 2048 + 2 * 48 * 2048 * 128
    narrow = eight.memory.weights_bytes - tables
    assert four.memory.weights_bytes == pytest.approx(tables + narrow / 2, rel=1e-6)


def test_a_super_kernel_starts_no_tasks() -> None:
    graph = model("qwen3_8b", "bf16").step(llm.decode(1, 128))
    fused = model("qwen3_8b", "bf16", "super").step(llm.decode(1, 128))
    assert fused.ledger["starts"] == 0
    assert fused.ledger["gaps"] < graph.ledger["gaps"]
    assert fused.ledger["weights"] == graph.ledger["weights"]


def test_a_context_beyond_the_positions_is_refused() -> None:
    with pytest.raises(InputError, match="at most 40960 tokens for Qwen3-8B"):
        model("qwen3_8b", "bf16").step(llm.decode(1, 40961))


# -- odd words of the command ----------------------------------------------------------------------
ODD = [
    ("--context 0", "context from 1"),
    ("--context=-1", "context from 1"),
    ("--context nan", "a whole number"),
    ("--context inf", "a whole number"),
    ("--context 3.5", "a whole number"),
    ("--context 1,000", "a whole number"),
    ("--context 99999999999999999999", "a whole number"),
    ("--context 40961", "shorten it"),
    ("--batch 0", "batch from 1"),
    ("--batch 1000000", "the largest batch that fits"),
    ("--queries 0", "queries from 1"),
    ("--prefill 0", "tokens of a prompt from 1"),
    ("--prefill 1000000", "at most 40960"),
    ("--tp 0", "tp from 1"),
    ("--tp=-2", "tp from 1"),
    ("--tp 3", "try 1, 2, 4"),
    ("--tp 1000000", "lower one of its numbers"),
    ("--ep 2 --dp 2", "has no experts"),
    ("--pp 37", "at most 36 layers"),
    ("--format int8", "a format: bf16"),
    ("--format w8a8c8", "take w8a8"),
    ("--mode lazy", "a mode: graph"),
    ("--cluster none", "a topology"),
    ("--cluster a3-pod:0", "a3-pod"),
    ("--devices 8", "only with --plan auto"),
    ("--plan auto", "--tpot-ms"),
    ("--plan auto --tpot-ms nan", "a number"),
    ("--plan auto --tpot-ms 0", "above 0"),
    ("--plan auto --tpot-ms=-5", "above 0"),
    ("--plan auto --tpot-ms 5 --figure x.foo", "an ending among"),
    ("--plan auto --tpot-ms 0.001", "raise the limit"),
    ("--plan auto --tpot-ms 50 --context 50000", "shorten it"),
]


@pytest.mark.parametrize(("words", "reason"), ODD, ids=[words for words, _ in ODD])
def test_odd_input_is_one_line_with_a_remedy(
    words: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["llm", "qwen3_8b", "--chip", "Ascend910B2"]
    if "--context" not in words:
        line += ["--context", "100"]
    try:
        status = command([*line, *words.split()])
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    error = capsys.readouterr().err
    assert status == 2
    assert reason in error
    assert error.count("\n") == 1
    assert "Traceback" not in error


@pytest.mark.parametrize("name", ["", "zoo:", "zoo:qwen4", "../x.toml", "/tmp", "x" * 500])
def test_an_unknown_model_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["llm", name, "--chip", "Ascend910B2", "--context", "100"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_rows_that_a_chip_cannot_copy_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["llm", "tiny", "--chip", "Ascend310P3", "--context", "100"]) == 2
    assert "take a model with wider heads" in capsys.readouterr().err
