"""Language models: tables, plans, steps, memory and the search; the command `llm`."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from ascend_lab import llm
from ascend_lab.cli import ascend_lab as command
from ascend_lab.errors import CapacityError, InputError
from ascend_lab.llm import search
from ascend_lab.llm.machine import GAPS
from ascend_lab.llm.models import decoder_names, decoder_of
from ascend_lab.llm.search import plans_of
from ascend_lab.llm.step import LEDGER

PUBLISHED = [name for name in decoder_names() if llm.load_decoder(name).published]


def model(
    name: str = "tiny", chip: str = "Ascend910B2", number_format: str = "", **parts: int
) -> llm.Model:
    """Return a model on the usual server of a chip."""
    plan = llm.Plan(**parts)
    machine = llm.machine_of(chip, "", plan)
    return llm.Model(llm.load_decoder(name), machine, plan, number_format)


# -- tables ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_published(name: str) -> None:
    decoder = llm.load_decoder(name)
    assert decoder.parameters == decoder.published


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"layers": 2}, "hidden"),
        ({"layers": "two"}, "layers as a whole number"),
        ({"layer": 2}, "did you mean layers"),
        ({"tied": 1}, "true or false"),
        ({"layers": 0}, "layers as a whole number from 1"),
        ({"hidden": 1 << 30}, "hidden as a whole number from 1 to"),
    ],
)
def test_a_table_that_is_wrong_is_refused_by_its_entry(
    table: dict[str, object], reason: str
) -> None:
    attention = {"heads": 2, "kv_heads": 1, "head_dim": 16}
    with pytest.raises(InputError, match=reason):
        decoder_of("mine", {**table, "attention": attention}, "mine.toml")


def test_heads_of_queries_are_a_multiple_of_heads_of_keys() -> None:
    table = {"layers": 1, "hidden": 8, "vocabulary": 8, "dense_width": 8}
    attention = {"heads": 3, "kv_heads": 2, "head_dim": 4}
    with pytest.raises(InputError, match="multiple of 2 kv_heads"):
        decoder_of("mine", {**table, "attention": attention}, "mine.toml")


# -- plans -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "parts", "reason"),
    [
        ("qwen3_8b", {"tp": 3}, "tp that divides the 32 heads"),
        ("qwen3_8b", {"ep": 2, "dp": 2}, "has no experts"),
        ("qwen3_30b_a3b", {"ep": 3, "dp": 3}, "divides the 128 experts"),
        ("qwen3_30b_a3b", {"ep": 4}, "divides the 1 devices of a stage"),
        ("qwen3_8b", {"pp": 37}, "at most 36 layers"),
        ("qwen3_8b", {"tp": 0}, "tp from 1"),
        ("qwen3_8b", {"dp": 2000}, "dp from 1 to 1024"),
    ],
)
def test_a_plan_that_does_not_divide_a_model_is_refused(
    name: str, parts: dict[str, int], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        llm.Model(
            llm.load_decoder(name), llm.machine_of("Ascend910B2", "", llm.Plan()), llm.Plan(**parts)
        )


def test_more_devices_than_a_server_has_are_refused() -> None:
    with pytest.raises(InputError, match="at least 16 devices"):
        llm.machine_of("Ascend910B2", "a2-server", llm.Plan(tp=16))
    with pytest.raises(InputError, match="a cluster for 2 devices of Ascend310P3"):
        llm.machine_of("Ascend310P3", "", llm.Plan(tp=2))


def test_a_plan_larger_than_the_machine_is_refused() -> None:
    machine = llm.machine_of("Ascend910B2", "", llm.Plan())
    with pytest.raises(InputError, match="at least 2 devices"):
        llm.Model(llm.load_decoder("tiny"), machine, llm.Plan(tp=2))


def test_no_heads_of_keys_are_refused() -> None:
    table = {"layers": 1, "hidden": 8, "vocabulary": 8, "dense_width": 8}
    attention = {"heads": 2, "kv_heads": 0, "head_dim": 4}
    with pytest.raises(InputError, match="kv_heads as a whole number from 1"):
        decoder_of("mine", {**table, "attention": attention}, "mine.toml")


# -- steps -----------------------------------------------------------------------------------------
CASES = [
    ("qwen3_8b", "Ascend910C", "", {}),
    ("qwen3_8b", "Ascend910B2", "w8a8", {"tp": 4}),
    ("qwen3_8b", "Ascend310P3", "", {}),
    ("qwen3_8b", "Ascend910B2", "w4a16", {}),
    ("qwen3_30b_a3b", "Ascend910C", "", {"tp": 2, "dp": 2, "ep": 4}),
    ("tiny_mla", "Ascend910B2", "", {"tp": 2}),
    ("tiny", "Ascend910B2", "", {"pp": 2}),
]


@pytest.mark.parametrize(("name", "chip", "number_format", "parts"), CASES)
def test_no_step_beats_its_bound_and_the_ledger_is_the_step(
    name: str, chip: str, number_format: str, parts: dict[str, int]
) -> None:
    timed = model(name, chip, number_format, **parts)
    for load in (llm.decode(4, 512), llm.prefill(2, 128)):
        step = timed.step(load)
        assert set(step.ledger) == set(LEDGER)
        assert min(step.ledger.values()) >= 0
        assert step.time_s == pytest.approx(sum(step.ledger.values()))
        assert 0 < step.bound_s <= step.time_s
        assert timed.lower_bound_s(load) <= step.time_s
        assert timed.step(load).ledger["links"] >= 0


def test_a_decode_step_of_one_reads_all_weights() -> None:
    """The bound of a batch of one is the bytes of all weights but the embedding, at the peak."""
    timed = model("qwen3_8b", "Ascend910C")
    decoder = timed.decoder
    table = decoder.vocabulary * decoder.hidden
    norms = decoder.layers * (2 * decoder.hidden + 2 * 128) + decoder.hidden
    read_bytes = 2 * (decoder.parameters - table - norms)
    cache_bytes = 1024 * decoder.cache_bytes()
    rate = timed.machine.chip.memory_peak_bytes_per_s
    step = timed.step(llm.decode(1, 1024))
    assert step.bound_s == pytest.approx((read_bytes + cache_bytes) / rate, rel=1e-6)


def test_more_work_takes_no_less_time() -> None:
    timed = model("qwen3_8b", "Ascend910C")
    by_batch = [timed.step(llm.decode(batch, 1024)).time_s for batch in (1, 8, 32, 128)]
    by_context = [timed.step(llm.decode(8, context)).time_s for context in (256, 1024, 4096)]
    for times in (by_batch, by_context):
        assert all(shorter <= longer for shorter, longer in pairwise(times))


def test_eager_mode_adds_the_difference_of_the_gaps() -> None:
    decoder = llm.load_decoder("tiny")
    steps = [
        llm.Model(decoder, llm.machine_of("Ascend910B2", "", llm.Plan(), mode)).step(
            llm.decode(1, 128)
        )
        for mode in ("graph", "eager")
    ]
    gap_s = GAPS["eager"].time_s - GAPS["graph"].time_s
    assert steps[1].time_s - steps[0].time_s == pytest.approx(gap_s * steps[0].kernels)


# -- memory ----------------------------------------------------------------------------------------
def test_weights_of_all_devices_are_those_of_the_model() -> None:
    """Cut eight ways, a model's linear weights are on one device each; norms are not counted."""
    cuts = {
        "qwen3_8b": model("qwen3_8b", tp=8),
        "qwen3_30b_a3b": model("qwen3_30b_a3b", tp=2, dp=4, ep=8),
    }
    for name, cut in cuts.items():
        on_one = model(name).memory(llm.decode(1, 128)).weights_bytes
        assert on_one == pytest.approx(2 * cut.decoder.parameters, rel=1e-3)
        assert cut.memory(llm.decode(8, 128)).weights_bytes >= on_one / 8


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    timed = model("qwen3_32b", "Ascend910B2", tp=4)
    largest = timed.memory(llm.decode(1, 4096)).largest_batch
    assert timed.memory(llm.decode(largest, 4096)).fits
    assert not timed.memory(llm.decode(largest + 1, 4096)).fits
    with pytest.raises(CapacityError, match=f"largest batch that fits is {largest}"):
        timed.step(llm.decode(largest + 1, 4096))


# -- search ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "devices"), [("tiny", 4), ("tiny_moe", 2)])
def test_the_search_finds_what_timing_every_point_finds(
    monkeypatch: pytest.MonkeyPatch, name: str, devices: int
) -> None:
    monkeypatch.setattr(search, "LARGEST_BATCH", 256)
    decoder = llm.load_decoder(name)
    machine = llm.machine_of("Ascend910B2", "a2-server", llm.Plan(dp=devices))
    steps = []
    for plan in plans_of(decoder, devices):
        try:
            timed = llm.Model(decoder, machine, plan)
        except InputError:
            continue
        batches = [plan.dp * 2**power for power in range(9) if plan.dp * 2**power <= 256]
        steps += [timed.step(llm.decode(batch, 256)) for batch in batches]
    for limit_s in (2e-4, 1e-3, 1.0):
        in_limit = [step.tokens_per_s for step in steps if step.time_s <= limit_s]
        if not in_limit:
            with pytest.raises(InputError, match="raise the limit"):
                llm.best_plans(decoder, machine, devices, 256, limit_s)
            continue
        plans = llm.best_plans(decoder, machine, devices, 256, limit_s)
        assert plans.best.tokens_per_s == max(in_limit)
        assert plans.timed <= plans.points == len(steps)
        for point in plans.frontier:
            assert not any(
                step.time_s < point.time_s and step.tokens_per_s > point.tokens_per_s
                for step in steps
            )


# -- the command -----------------------------------------------------------------------------------
def test_the_command_prints_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llm", "zoo:qwen3_8b", "--chip", "Ascend910B2", "--cluster", "a2-server"]
    words += ["--tp", "2", "--ep", "1", "--dp", "1", "--batch", "32", "--context", "1536"]
    assert command([*words, "--prefill", "1024", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["step_s"] == pytest.approx(sum(data["ledger_s"].values()))
    assert data["prefill_s"] > data["step_s"] > data["bound_s"] > 0
    assert data["tokens_per_s"] == pytest.approx(32 / data["step_s"])
    assert data["memory_bytes"]["total"] <= data["memory_bytes"]["device"]
    assert data["largest_batch"] >= 32


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["zoo:qwen4", "--chip", "Ascend910B2", "--context", "9"], "did you mean"),
        (["tiny", "--chip", "Ascend910B2", "--context", "9", "--format", "fp4"], "a format: bf16"),
        (["tiny", "--chip", "Ascend910B2", "--context", "9", "--mode", "lazy"], "a mode: graph"),
        (["tiny", "--chip", "Ascend910B2", "--context", "9", "--queries", "10"], "queries from 1"),
        (["tiny", "--chip", "Ascend910B2", "--context", "99999999999"], "at most 1,000,000"),
        (["tiny", "--chip", "Ascend910B2", "--context", "9", "--plan", "auto"], "--tpot-ms"),
        (["tiny", "--chip", "Ascend910B2", "--context", "9", "--tpot-ms", "5"], "--tpot-ms only"),
        (["gone.toml", "--chip", "Ascend910B2", "--context", "9"], "gone.toml"),
    ],
)
def test_bad_input_is_one_line_with_the_reason(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["llm", *words]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


def test_a_model_of_ones_own_comes_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        "layers = 2\nhidden = 256\nvocabulary = 1000\ndense_width = 512\n"
        "[attention]\nheads = 4\nkv_heads = 2\nhead_dim = 64\n"
    )
    assert command(["llm", str(path), "--chip", "Ascend910B2", "--context", "100"]) == 0
    assert "mine on Ascend910B2, bf16" in capsys.readouterr().out
