"""The trace export: the Chrome trace schema that Perfetto and MindStudio Insight read."""

import json
from pathlib import Path

import pytest

from ascend_lab.errors import InputError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim import Timeline, simulate, trace_events, write_trace
from ascend_lab.operators.kernels import elementwise_program

CHIP = load_chip("Toy")
TILE = 1024
TILES = 5


RELU = elementwise_program(CHIP, TILE * TILES, op="vrelu", tile=TILE)


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return simulate(RELU, CHIP)


def test_every_event_keeps_the_schema(timeline: Timeline) -> None:
    """Fields and types: Trace Event Format, 'Complete Events' and 'Metadata Events'."""
    for event in trace_events(timeline):
        assert set(event) >= {"name", "ph", "pid", "tid", "args"}
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert isinstance(event["args"], dict)
        assert event["ph"] in {"M", "X"}
        if event["ph"] == "X":
            assert isinstance(event["cat"], str)
            assert event["ts"] >= 0 and event["dur"] >= 0
        else:
            assert event["name"] in {"process_name", "thread_name", "thread_sort_index"}


def test_one_event_an_instruction_with_its_times_in_microseconds(timeline: Timeline) -> None:
    drawn = [e for e in trace_events(timeline) if e["ph"] == "X"]
    assert len(drawn) == len(timeline.spans) == RELU.executed_count
    for event, span in zip(drawn, timeline.spans, strict=True):
        assert event["args"]["start_cycle"] == span.start
        assert event["ts"] == pytest.approx(span.start / CHIP.clock_hz * 1e6)
        assert event["dur"] == pytest.approx((span.end - span.start) / CHIP.clock_hz * 1e6)
    assert max(e["ts"] + e["dur"] for e in drawn) <= timeline.cycles / CHIP.clock_hz * 1e6 + 1e-9


def test_the_file_is_strict_json_with_the_same_events(timeline: Timeline, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_trace(timeline, file)

    def refuse(name: str) -> float:
        raise ValueError(f"{name} is no JSON")

    data = json.loads(file.read_text("utf-8"), parse_constant=refuse)
    assert data["traceEvents"] == trace_events(timeline)
    assert data["displayTimeUnit"] in {"ms", "ns"}


def test_a_file_that_cannot_be_written_is_an_input_error(
    timeline: Timeline, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="make its folder first"):
        write_trace(timeline, tmp_path / "missing" / "trace.json")
