"""Cores that work together: values, times of both engines, and what the sanitizer finds."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from mix_cases import CHIP, Relay, relays

from ascend_lab.isa import parse_program, sanitize
from ascend_lab.sim import execute, simulate

FEW = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TWICE = (2 * np.eye(16)).astype(np.float16).ravel()


def run(case: Relay, seed: int | None = None) -> None:
    tensors = {"x": case.x, "twice0": TWICE}
    tensors |= {"twice2": TWICE} if case.stages == 4 else {}
    y = execute(case.launch(), tensors, CHIP, seed=seed)["y"]
    mask = case.mask()
    np.testing.assert_array_equal(y[mask], case.expected(case.x)[mask])


@given(relays())
@FEW
def test_relays_compute_what_they_should(case: Relay) -> None:
    run(case)
    run(case, seed=7)


@given(relays())
@FEW
def test_both_engines_agree_and_no_false_alarm_is_raised(case: Relay) -> None:
    launch = case.launch()
    assert simulate(launch, CHIP).cycles == simulate(launch, CHIP, engine="reference").cycles
    assert sanitize(launch, CHIP) == []
    for part in launch.parts:
        assert parse_program(str(part.program)) == part.program
