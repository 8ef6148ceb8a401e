"""`ascend-lab train-plan`: the contract, ONNX files, bad input in one line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ascend_lab.cli import ascend_lab as main
from ascend_lab.graph import Graph, GraphBuilder
from ascend_lab.graph.onnx import save_onnx

KEYS = {"plan", "step_s", "memory_bytes", "memory_per_stage", "data", "tensor", "pipeline"}


def small(batch: int = 1) -> Graph:
    """Return three linear layers."""
    net = GraphBuilder("small")
    x = net.input("x", (batch, 64))
    for i in range(3):
        x = net.relu(net.matmul(x, net.weight((64, 64), f"w{i}")), name=f"relu{i}")
    net.output(net.matmul(x, net.weight((64, 16), "out"), name="logits"))
    return net.build()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the network as ONNX with a batch that is left open."""
    import onnx

    path = tmp_path_factory.mktemp("plans") / "small.onnx"
    save_onnx(small(), path)
    found = onnx.load(path)
    for value in (*found.graph.input, *found.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "n"
    onnx.save(found, path)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["train-plan", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    code, out, err = run(capsys, *arguments, "--json", "-")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_contract(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    found = planned(capsys, model, "--cluster", "910a-roce", "--devices", 4, "--batch", 32)
    best = found["best"]
    assert best.keys() >= KEYS and found["beaten"]
    assert best["data"] * best["tensor"] * best["pipeline"] == 4 == found["devices"]
    assert found["step_s"] == best["step_s"] <= found["beaten"][0]["step_s"]
    assert found["memory_bytes"] == max(m["total_bytes"] for m in best["memory_per_stage"])
    assert found["chip"] == "Ascend910A" and found["cluster"] == "910a-roce:4"
    assert found["tried"] >= len(found["beaten"]) / 6 and found["too_large"] == 0


def test_sgd_needs_less_memory_and_the_table_says_so(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    where = ("--cluster", "910b-server", "--devices", 2, "--batch", 8)
    adam = planned(capsys, model, *where)
    sgd = planned(capsys, model, *where, "--optimizer", "sgd")
    assert adam["chip"] == "Ascend910B2"
    assert sgd["least_memory_bytes"] < adam["least_memory_bytes"]
    code, out, err = run(capsys, model, *where, "--plans", 3)
    assert (code, err) == (0, "") and len(out.splitlines()) == 12 and "samples/s" in out
    assert "Z ZeRO stage" in out and "no mark: T<D<P" in out
    for row in out.splitlines()[3:6]:
        step, *parts = (float(number) for number in re.findall(r"([0-9.]+) ms", row))
        assert len(parts) == 4 and step == pytest.approx(sum(parts), abs=0.0025), row


def test_nothing_fits(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    code, out, err = run(
        capsys, model, "--cluster", "ring", "--devices", 2, "--batch", 8, "--memory-limit", 1000
    )
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "the least any plan needs" in err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("bert_huge", "--cluster", "910a-server", "--devices", 8), "models"),
        (("bert_base", "--cluster", "nowhere", "--devices", 8), "topology"),
        (("bert_base", "--cluster", "910a-server", "--devices", 0), "--devices"),
        (("resnet18", "--cluster", "910a-server", "--devices", 9), "devices"),
        (("bert_base", "--cluster", "910a-server", "--devices", 8, "--batch", 0), "--batch"),
        (("bert_base", "--cluster", "ring", "--devices", 2, "--optimizer", "lion"), "--optimizer"),
        (("bert_base", "--cluster", "ring", "--devices", 2, "--dtype", "fp8"), "--dtype"),
        (("bert_base", "--cluster", "ring", "--devices", 2, "--plans", 0), "--plans"),
        (("bert_base", "--cluster", "ring", "--devices", 2, "--memory-limit", -1), "--memory"),
        (("none.onnx", "--cluster", "ring", "--devices", 2), "none.onnx"),
        (("bert_base", "--devices", 2), "--cluster"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], word: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("ascend-lab: ") and word in err
