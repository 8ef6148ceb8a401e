"""The page on files of one's own: they load, every command runs, and no key is left out."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_models import model_of

from ascend_lab.cli import aoe, ascend_lab as lab
from ascend_lab.cluster.loader import KEYS, LINK_KEYS
from ascend_lab.compiler.fusion import rules_restored
from ascend_lab.compiler.onnx import CONVERTERS
from ascend_lab.compiler.passes import PASSES
from ascend_lab.deploy.compress import read_config
from ascend_lab.operators import ops

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "book" / "bring_your_own.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


SHOWN = [*blocks("toml"), *blocks("text")]
FILES = {block.split()[1]: block for block in SHOWN if block.startswith("# ")}
COMMANDS = [line for block in SHOWN if block not in FILES.values() for line in block.splitlines()]
QUICK = [line for line in COMMANDS if " train-plan " not in line]
"""test_messages.py parses them all."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the commands read: the page's files, a model, a recorded step."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, "utf-8")
    model = model_of("relu: Relu data -> y", {"data": ("N", 3, 224, 224)}, ["y"])
    onnx.save(model, tmp_path / "model.onnx")
    gradient = {"ph": "X", "name": "torch::autograd::AccumulateGrad", "ts": 10, "dur": 1}
    gradient["args"] = {"Input Dims": [[10, 512]], "Input type": ["float"]}
    np.save(tmp_path / "frame.npy", np.arange(24, dtype=np.uint8))
    (tmp_path / "step.json").write_text(json.dumps({"traceEvents": [gradient]}), "utf-8")
    (tmp_path / "notebooks").mkdir()
    kernel = (ROOT / "notebooks" / "my_kernel.py").read_text("utf-8")
    (tmp_path / "notebooks" / "my_kernel.py").write_text(kernel, "utf-8")
    monkeypatch.setenv("TUNE_BANK_PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_has_files_and_commands() -> None:
    own = {"my_chip.toml", "room.toml", "mine.csv", "measured.csv", "op_summary.csv"}
    assert set(FILES) == own | {"my_decoder.toml", "camera.cfg", "amct.cfg", "server.toml"}
    assert len(COMMANDS) >= 10


def test_the_lines_of_python_run_from_top_to_bottom(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict = {}
    try:
        with rules_restored():
            for block in blocks("python"):
                code = compile(block, "page", "exec")
                if "torch" not in block:
                    exec(code, names)
    finally:
        ops.OPERATORS.pop("softsign", None)
        CONVERTERS.pop("my.lab.Softsign", None)
        PASSES.pop("SoftsignFusionPass", None)
    np.testing.assert_allclose(names["computed"]["y"], names["exact"]["y"], atol=5e-3)
    wide = names["y"].astype(float)
    near = np.linspace(-4, 4, 64_000).reshape(64, 1000)
    assert np.abs(wide - near / (1 + np.abs(near))).max() < 5e-3
    assert [node.op for node in names["after"].nodes] == ["softsign", "exp"]
    assert json.loads(names["stages"].fusion_result())[0]["ub_fusion"]["SoftsignExpRule"]
    assert names["trace"].best.point in names["points"]
    assert names["trace"].failures
    assert "SoftsignFusionPass" in capsys.readouterr().out


def test_the_configuration_of_a_quantisation_is_one(folder: Path) -> None:
    plan = read_config(folder / "amct.cfg")
    assert "8192" in repr(plan) and "conv1" in repr(plan)


@pytest.mark.parametrize("line", QUICK)
def test_every_command_runs(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, *words = shlex.split(line.replace("step.json.gz", "step.json"))
    main = {"ascend-lab": lab, "aoe": aoe}[program]
    assert main(words) == 0, capsys.readouterr().err


def test_every_key_of_a_cluster_stands_on_the_page_and_in_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = "".join(re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE))
    texts = [table + "`links`"]
    for words in (["topologies"], ["collective"], ["train-plan"]):
        with pytest.raises(SystemExit):
            lab([*words, "--help"])
        texts.append(capsys.readouterr().out)
    with pytest.raises(SystemExit):
        aoe(["--help"])
    texts.append(capsys.readouterr().out)
    for text in texts:
        assert [key for key in (*KEYS, *LINK_KEYS) if not re.search(rf"\b{key}\b", text)] == []


def test_help_and_page_say_how_to_record_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lab(["gradient-plan", "--help"])
    for text in (capsys.readouterr().out, PAGE):
        flat = " ".join(text.split())
        for word in ("record_shapes=True", "export_chrome_trace", "Input Dims", "In msg nelems"):
            assert word in flat
        assert all(word in flat for word in ("name", "ready_us", "bytes", "dtype"))
