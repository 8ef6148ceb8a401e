"""The comparison with other simulators: files written, answers read, peers skipped; none is run."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_lab.compiler import Graph, GraphBuilder, zoo
from ascend_lab.compiler.onnx import import_onnx
from ascend_lab.compiler.onnx.export import export_onnx
from bench import __main__ as bench, peers, peers as files

REPORT = """\
LayerID, Total Cycles (incl. prefetch), Total Cycles, Stall Cycles, Overall Util %,
0, 11595, 7343.0, 0, 17.3,
1, 5736, 2279.0, 0, 7.9,
"""
ABOUT = {"nodes": 5, "macs": 4096 * 100}


def small_net() -> Graph:
    net = GraphBuilder("small")
    x = net.input("x", (1, 16, 9, 9))
    y = net.relu(net.conv2d(x, net.weight((32, 16, 3, 3)), pad=1, stride=2))
    y = net.conv2d(y, net.weight((32, 16, 1, 1)), groups=2)
    y = net.conv2d(y, net.weight((32, 32, 3, 3)), dilation=2, pad=2)
    y = net.reshape(y, shape=(1, 800))
    net.output(net.matmul(y, net.weight((800, 10))))
    return net.build()


def run(output: str = "", code: int = 0, over_limit: bool = False) -> peers.Run:
    return peers.Run(10.0, 8.0, 2_000_000, output, code, over_limit)


def windows(lines: int, kernel: int, stride: int) -> int:
    """Outputs as SCALE-Sim counts them, rounding up."""
    return -(-(lines - kernel + stride) // stride)


def test_layers_become_rows_and_those_without_a_form_are_left_out() -> None:
    # a stride of 2 over 9 + 2 lines gives 5: the (5 - 1) * 2 + 3 = 11 lines that they read
    assert files.topology(small_net()).splitlines() == [
        files.HEADER,
        "0, 11, 11, 3, 3, 16, 32, 2,",
        "1, 1, 800, 1, 800, 1, 10, 1,",
    ]


def test_even_inputs_are_trimmed_so_that_no_window_is_added() -> None:
    net = GraphBuilder("even")
    x = net.input("x", (1, 3, 224, 224))
    net.output(net.conv2d(x, net.weight((64, 3, 7, 7)), pad=3, stride=2))
    row = files.topology(net.build()).splitlines()[1]
    lines, kernel, stride = (int(row.split(",")[k]) for k in (1, 3, 7))
    assert windows(lines, kernel, stride) == 112
    assert windows(224 + 6, kernel, stride) == 113  # what the padded input would have given


def test_a_residual_network_is_folded_and_every_product_has_a_row() -> None:
    graph = files.folded(zoo.build("resnet18"))
    assert "batch_norm" not in {node.op for node in graph.nodes}
    rows = files.topology(graph).splitlines()[1:]
    assert len(rows) == 21
    macs = 0
    for row in rows:
        _, high, wide, kh, kw, channels, filters, stride = map(int, row.strip(",").split(","))
        outputs = windows(high, kh, stride) * windows(wide, kw, stride)
        macs += outputs * kh * kw * channels * filters
    assert macs == zoo.macs(graph)


def test_convolutions_in_the_model_state_their_windows(tmp_path: Path) -> None:
    graph = small_net()
    model = export_onnx(graph)
    convolutions = [node for node in model.graph.node if node.op_type == "Conv"]
    stated = [
        list(a.ints) for node in convolutions for a in node.attribute if a.name == "kernel_shape"
    ]
    assert stated == [[3, 3], [1, 1], [3, 3]]
    file = tmp_path / "model.onnx"
    file.write_bytes(model.SerializeToString())
    assert len(import_onnx(file).nodes) == len(graph.nodes)
    found = files.time_model(file)
    assert found["covered"] == len(graph.nodes)
    assert found["cycles"] > 0
    assert found["launch_cycles"] > 0


def test_the_machine_has_one_core_of_one_cube() -> None:
    chip = files.one_core()
    assert (chip.core_count, chip.macs_per_cycle("fp16")) == (1, 4096)


def test_reports_are_read_by_the_name_of_the_column() -> None:
    assert peers.counts_of("noise\n" + REPORT + "\n") == (7343 + 2279, 2)
    line = json.dumps({"cycles": 12, "covered": 3})
    assert peers.counts_of(f"2026 - INFO - noise\n{line}\n") == (12, 3)


@pytest.mark.parametrize("said", ["", "ERROR: Config file not found\nExiting\n"])
def test_a_tool_that_ends_well_without_a_report_has_no_result(said: str) -> None:
    row = peers.row_of("net", "SCALE-Sim", 4096, ABOUT, run(said))
    assert row.cycles is None
    assert row.problem == f"no result: {said.split(chr(10))[1] if said else 'it printed nothing'}"


def test_the_table_has_use_coverage_and_ratio() -> None:
    ours = peers.row_of("net", peers.OURS, 4096, ABOUT, run('{"cycles": 200, "covered": 5}'))
    slow = peers.row_of("net", "SCALE-Sim", 4096, ABOUT, run(REPORT, over_limit=True, code=-9))
    slow = dataclasses.replace(slow, time_s=30.0, cpu_s=16.0)
    broken = peers.row_of("net", "ZigZag", 1024, ABOUT, run("Traceback\nValueError: no\n", 1))
    assert ours.utilisation == 0.5
    lines = peers.table([ours, slow, broken]).splitlines()
    assert " ".join(lines[1].split()) == "net ascend_lab 4096 200 50% 5/5 10.0 8.0 2 1x 1x"
    assert lines[2].split()[3:7] == ["-", "-", "0/5", ">30.0"]
    assert lines[2].endswith(">3x         >2x  stopped at the limit of 10 s")
    assert lines[3].endswith("failed (1): ValueError: no")


def test_a_process_is_stopped_at_the_limit_and_one_that_ends_is_not(tmp_path: Path) -> None:
    sleeper = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"]
    late = peers.measure(sleeper, 0.2, tmp_path / "late.log")
    assert late.over_limit
    assert late.code != 0
    done = peers.measure([sys.executable, "-c", "print(7)"], 600, tmp_path / "done.log")
    assert (done.over_limit, done.code, done.output) == (False, 0, "7\n")
    assert done.memory_bytes > 1_000_000


def test_what_cannot_be_installed_is_skipped_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(command: list[str], **options: object) -> None:
        raise subprocess.CalledProcessError(1, command, "", "ERROR: first\nERROR: No matching x\n")

    monkeypatch.setattr(peers.subprocess, "run", refuse)
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(peers, "NETWORKS", ())
    assert bench.main(["--peers", "--json", str(tmp_path / "rows.json")]) == 0
    skipped = [line for line in capsys.readouterr().out.splitlines() if "skipped" in line]
    reason = "cannot be installed here (ERROR: No matching x)"
    assert skipped == [f"skipped: {peer.name} {reason}" for peer in peers.PEERS]
    assert json.loads((tmp_path / "rows.json").read_text("utf-8")) == []


def test_an_environment_is_made_once_and_again_when_pins_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[list[str]] = []

    def pretend(command: list[str], **options: object) -> None:
        calls.append(command)
        python = tmp_path / "new" / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch()

    monkeypatch.setattr(peers.subprocess, "run", pretend)
    old = peers.Peer("New", ("thing==1",), 1, "", "")
    python = peers.environment(old, tmp_path)
    assert python == peers.environment(old, tmp_path)
    assert len(calls) == 2
    assert calls[1][-1] == "thing==1"
    peers.environment(peers.Peer("New", ("thing==2",), 1, "", ""), tmp_path)
    assert len(calls) == 4
    python.unlink()
    peers.environment(peers.Peer("New", ("thing==2",), 1, "", ""), tmp_path)
    assert len(calls) == 6


def test_pins_name_exact_versions_of_the_peers() -> None:
    assert [peer.pins[0] for peer in peers.PEERS] == ["zigzag-dse==3.9.1", "scalesim==3.0.0"]
