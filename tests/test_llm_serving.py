"""A language model behind a scheduler: steps between grid points, scenarios, the command."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from ascend_lab import llm
from ascend_lab.cli import ascend_lab as command
from ascend_lab.llm.scenario import read_llm_scenario, serve_llm
from ascend_lab.llm.serving import Steps


def steps_of(name: str = "qwen3_8b", **parts: int) -> Steps:
    """Return the steps of a model on a 910B2."""
    plan = llm.Plan(**parts)
    machine = llm.machine_of("Ascend910B2", "", plan)
    return Steps(llm.Model(llm.load_decoder(name), machine, plan))


# -- steps -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("batch", "context"), [(1, 128), (8, 1024), (32, 256)])
def test_points_of_the_grid_are_exact(batch: int, context: int) -> None:
    steps = steps_of()
    assert (
        steps.seconds_of(0, batch, batch * context)
        == steps.model.step(llm.decode(batch, context)).time_s
    )
    assert steps.seconds_of(context, 0, 0) == steps.model.step(llm.prefill(1, context)).time_s


@pytest.mark.parametrize(("batch", "context"), [(3, 300), (11, 1500), (23, 700), (50, 3000)])
def test_between_points_the_error_is_small(batch: int, context: int) -> None:
    steps = steps_of()
    direct_s = steps.model.time_step(llm.decode(batch, context)).time_s
    assert steps.seconds_of(0, batch, batch * context) == pytest.approx(direct_s, rel=0.05)
    direct_s = steps.model.time_step(llm.prefill(1, context)).time_s
    assert steps.seconds_of(context, 0, 0) == pytest.approx(direct_s, rel=0.1)


def test_a_mixed_step_lies_between_the_longer_part_and_the_sum() -> None:
    steps = steps_of()
    prompt_s = steps.seconds_of(512, 0, 0)
    tokens_s = steps.seconds_of(0, 16, 16 * 512)
    mixed_s = steps.seconds_of(512, 16, 16 * 512)
    assert max(prompt_s, tokens_s) < mixed_s < prompt_s + tokens_s


def test_pages_fill_the_memory_that_weights_leave() -> None:
    steps = steps_of()
    pages = steps.pages()
    page_bytes = 128 * steps.model.decoder.cache_bytes()
    memory = steps.model.memory(llm.decode(1, 128))
    assert pages * page_bytes + memory.weights_bytes <= memory.device_bytes
    assert (pages + 1) * page_bytes + memory.weights_bytes > 0.999 * memory.device_bytes


# -- scenarios -------------------------------------------------------------------------------------
def scenario_file(folder: Path, count: int = 40, rate: float | None = 8.0, more: str = "") -> Path:
    """Write a scenario of a small model on one device."""
    arrivals = f"[arrivals]\nrate_per_s = {rate}\n" if rate else ""
    text = (
        '[model]\nllm = "zoo:qwen3_0_6b"\nchip = "Ascend910B2"\n'
        f"{arrivals}[requests]\ncount = {count}\nprompt = [100, 400]\noutput = [20, 60]\n{more}"
    )
    path = folder / "server.toml"
    path.write_text(text)
    return path


POLICIES = ["static", "prefill", "select", "split"]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_token_is_given(policy: str, tmp_path: Path) -> None:
    more = f'[server]\npolicy = "{policy}"\nmax_batch = 16\n'
    scenario = read_llm_scenario(scenario_file(tmp_path, more=more))
    log = serve_llm(scenario)
    assert [request.produced for request in log.requests] == [r.output for r in scenario.requests]
    assert log.prompt_tokens == sum(request.prompt for request in scenario.requests)


def test_a_request_alone_takes_its_prefill_and_a_step_a_token(tmp_path: Path) -> None:
    scenario = read_llm_scenario(scenario_file(tmp_path, count=1))
    log = serve_llm(scenario)
    (request,) = log.requests
    steps = Steps(scenario.model)
    expected_s = steps.seconds_of(request.prompt, 0, 0)
    assert request.first_s - request.arrival_s == pytest.approx(expected_s)
    for given in range(1, request.output):
        expected_s += steps.seconds_of(0, 1, request.prompt + given)
    assert request.end_s - request.arrival_s == pytest.approx(expected_s)


def test_throughput_grows_with_the_rate_until_the_server_is_full(tmp_path: Path) -> None:
    """Requests that all wait at the start are the most that a server can be given."""
    rates = [
        serve_llm(read_llm_scenario(scenario_file(tmp_path, 60, rate))).summary()["tokens_per_s"]
        for rate in (1.0, 4.0, 16.0, None)
    ]
    assert all(low <= high for low, high in pairwise(rates))  # type: ignore[operator]


def test_a_machine_for_prompts_shortens_the_time_between_tokens(tmp_path: Path) -> None:
    alone = serve_llm(read_llm_scenario(scenario_file(tmp_path, rate=20.0)))
    apart = serve_llm(
        read_llm_scenario(
            scenario_file(tmp_path, rate=20.0, more='[prefill]\nchip = "Ascend910B2"\n')
        )
    )
    mean = [log.summary()["between_tokens_s"]["mean"] for log in (apart, alone)]  # type: ignore[index]
    assert mean[0] <= mean[1]
    assert all(request.first_s > request.arrival_s for request in apart.requests)


# -- the command -----------------------------------------------------------------------------------
def test_the_command_prints_what_became_of_the_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["serve-sim", str(scenario_file(tmp_path)), "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["tokens_per_s"] > 0
    assert "of the step is" in data["bottleneck"]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("qwen3_0_6b", "qwen9", "a language model by name"),
        ("count = 40", "", "[requests] with count"),
        ("prompt = [100, 400]", "prompt = [400, 100]", "[requests] prompt"),
        ("prompt = [100, 400]", "prompt = 0", "whole number from 1"),
        ('chip = "Ascend910B2"', 'chip = "Ascend910B2"\ntp = 3', "tp that divides the 16 heads"),
        ('chip = "Ascend910B2"', 'chips = "Ascend910B2"', "did you mean chip?"),
        ("[requests]", "[server]\nblocks = 2\n[requests]", "at most 2 blocks"),
    ],
)
def test_a_wrong_scenario_is_one_line_with_the_reason(
    old: str, new: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = scenario_file(tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert command(["serve-sim", str(path)]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
