"""`aoe`: reports, tuned models that run, flags, interrupts, and one line for every bad input."""

import json
import os
import re
import sqlite3
import subprocess
import sys

import pytest
from onnx_models import model_of
from small_jobs import SmallJob, write_convolutions, write_mlp

from ascend_lab.cli import aoe as main, ascend_lab as lab
from ascend_lab.cli.aoe_words import REFUSED
from ascend_lab.machine.chip import load_chip

CHIP = ("--soc_version", "Ascend310")


def aoe(capsys, *arguments):
    code = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def tune(capsys, model, output, *more):
    """Tune operators; return what was printed and the sections of the report."""
    arguments = ("-j", "2", "-m", model, "--output", output, *CHIP, *more)
    code, out, err = aoe(capsys, *arguments)
    assert (code, err) == (0, "")
    return out, sections(output)


def sections(output, job="opat"):
    (path,) = sorted(output.glob(f"aoe_result_{job}_*.json"))[-1:]
    assert re.fullmatch(rf"aoe_result_{job}_\d+_pid\d+\.json", path.name)
    return json.loads(path.read_text("utf-8"))


def refused(capsys, *arguments):
    """Return the one line that a bad input gets."""
    code, _, err = aoe(capsys, *arguments)
    assert code == 2
    assert err.startswith("aoe: ") and err.count("\n") == 1
    return err


def lab_json(capsys, *arguments):
    assert lab([*map(str, arguments), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_tuned_model_takes_what_the_report_says(capsys, small, tmp_path):
    out, (section,) = tune(capsys, small, tmp_path / "out")
    report = section["OPAT"]
    before, after = (report[f"model_{k}_performance(ms)"] for k in ("baseline", "result"))
    assert after < before
    assert f"improved by {(before - after) / after:.2%}, {before:.6g} ms -> " in out
    assert "\n  = (before - after) / after; opat is " in out
    assert report["model_performance_improvement"] == f"{(before - after) / after:.2%}"
    model, schedules = (tmp_path / "out" / f"mlp_tuned.{end}" for end in ("onnx", "jsonl"))
    assert f"tuned model {model}\n" in out and "network: gap" in out
    assert "2 of 2 kinds of operators proven" in out
    chip = ("--chip", "Ascend310")
    tuned = lab_json(capsys, "simulate", model, "--tuned", schedules, *chip)
    default = lab_json(capsys, "simulate", model, *chip)
    assert tuned["time_s"] * 1e3 == pytest.approx(after, rel=1e-9)
    assert default["time_s"] * 1e3 == pytest.approx(before, rel=1e-9)
    values = lab_json(capsys, "run", model, "--compiled", "--tuned", schedules, *chip)
    wanted = lab_json(capsys, "run", small)
    assert values["p"]["max"] == pytest.approx(wanted["p"]["max"], rel=0.02)


def test_a_network_without_kernels_is_not_improved(capsys, tmp_path):
    view = tmp_path / "view.onnx"
    words = ("-j", "1,2", "--output", tmp_path, *CHIP)
    view.write_bytes(model_of("Flatten x -> y", {"x": (2, 8)}, ["y"]).SerializeToString())
    code, out, err = aoe(capsys, "-m", view, *words)
    assert (code, err, out.count("improved by 0.00%")) == (0, "", 2)
    for job, section in (("sgat", "SGAT"), ("opat", "OPAT")):
        ((found,),) = ([part[section]] for part in sections(tmp_path, job))
        assert found["model_performance_improvement"] == "0.00%"


def test_the_report_has_the_published_fields(capsys, small, tmp_path):
    _, (section,) = tune(capsys, small, tmp_path)
    assert set(section) == {"basic", "OPAT", "ascend_lab"}
    assert set(section["basic"]) == {"tuning_name", "tuning_time(s)"}
    times = ("baseline_performance(ms)", "performance_improvement", "result_performance(ms)")
    assert set(section["OPAT"]) == {
        *(f"model_{name}" for name in times), "opat_tuning_result", "repo_modified_operators",
        "repo_summary", "tune_failed_operators",
    }  # fmt: skip
    summary = section["OPAT"]["repo_summary"]
    counted = {"add": 1, "hit": 0, "reserved": 0, "unsatisfied": 1, "update": 0}
    assert summary == {f"repo_{name}_num": n for name, n in counted.items()} | {"total_num": 2}
    (added,) = section["OPAT"]["repo_modified_operators"]["add_repo_operators"]
    before, after = (added[f"performance_{k}_tune(us)"] for k in ("before", "after"))
    assert added["performance_improvement"] == f"{(before - after) / after:.2%}"
    own = section["ascend_lab"]
    (tuned,) = (o for o in own["operators"] if o["op_name"] == added["op_name"])
    clock_hz = load_chip("Ascend310").clock_hz
    assert tuned["trials"] == 18 and tuned["source"] == "tuned"
    assert tuned["ticks_best(cycles)"][-1][1] / clock_hz * 1e6 == pytest.approx(after)
    assert {o["op_type"] for o in own["untuned_operators"]} >= {"softmax"}
    assert all(o["reason"] for o in own["untuned_operators"])


def timeless(output):
    """Return the text of a report without what a clock says."""
    (path,) = output.glob("aoe_result_opat_*.json")
    return re.sub(r'"tuning_time\(s\)": \d+', '"tuning_time(s)": 0', path.read_text("utf-8"))


def test_one_seed_gives_one_report_whoever_measures(capsys, small, tmp_path, monkeypatch):
    texts = []
    for i, executor in enumerate(("serial", "serial", "processes:2")):
        monkeypatch.setenv("TUNE_BANK_PATH", str(tmp_path / f"bank{i}"))
        (tmp_path / f"bank{i}").mkdir()
        output = tmp_path / f"out{i}"
        tune(capsys, small, output, "--executor", executor, "--seed", "3")
        texts.append(timeless(output))
        model = (output / "mlp_tuned.onnx").read_bytes()
        assert model == (tmp_path / "out0" / "mlp_tuned.onnx").read_bytes()
    assert texts[0] == texts[1] == texts[2]


def test_a_second_run_is_answered_by_the_bank(capsys, small, tmp_path, monkeypatch):
    _, (first,) = tune(capsys, small, tmp_path / "1")
    _, (second,) = tune(capsys, small, tmp_path / "2")
    monkeypatch.setenv("REPEAT_TUNE", "True")
    _, (third,) = tune(capsys, small, tmp_path / "3")
    name = "model_result_performance(ms)"
    assert first["OPAT"][name] == second["OPAT"][name] == third["OPAT"][name]
    assert second["OPAT"]["repo_summary"]["repo_hit_num"] == 2
    assert third["OPAT"]["repo_summary"]["repo_reserved_num"] == 2
    modified = third["OPAT"]["repo_modified_operators"]
    assert modified == {"add_repo_operators": [], "update_repo_operators": []}


def test_nothing_improved_is_no_failure(capsys, small, tmp_path, monkeypatch):
    monkeypatch.setattr(SmallJob, "choice", lambda job, point: pytest.fail("not asked for"))
    file = tmp_path / "ops.json"
    file.write_text('{"tune_ops_type": ["softmax"]}')
    out, (section,) = tune(capsys, small, tmp_path, "--tune_ops_file", file)
    assert "improved by 0.00%" in out and "no operator was tuned: " in out
    reasons = {o["op_type"]: o["reason"] for o in section["ascend_lab"]["untuned_operators"]}
    assert reasons["matmul+relu"] == reasons["matmul"] == "not asked for"


@pytest.mark.parametrize(
    ("text", "tuned"),
    [
        ('{"tune_ops_type": ["MatMul"]}', {"matmul", "matmul+relu"}),
        ('{"tune_ops_type": ["relu"]}', {"matmul+relu"}),
        ('{"tune_ops_type": ["mat"], "tune_ops_name": ["second"]}', {"matmul"}),
    ],
)
def test_listed_operators_only(capsys, small, tmp_path, text, tuned):
    file = tmp_path / "ops.json"
    file.write_text(text)
    code, _, err = aoe(
        capsys, "-j", "2", "-m", small, "--output", tmp_path, "--tune_ops_file", file, *CHIP
    )
    assert code == 0
    assert ("not in this model: mat " in err) == ("mat" in json.loads(text)["tune_ops_type"])
    (section,) = sections(tmp_path)
    assert {o["op_type"] for o in section["ascend_lab"]["operators"]} == tuned


def test_the_tuners_themselves(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNE_BANK_PATH", str(tmp_path))
    model = write_mlp(tmp_path / "mlp.onnx")
    out, (section,) = tune(capsys, model, tmp_path, "--budget", "20")
    report = section["OPAT"]
    own = section["ascend_lab"]
    before, after = (report[f"model_{k}_performance(ms)"] for k in ("baseline", "result"))
    assert own["bound(ms)"] < after < before
    units = {o["op_type"]: o["unit"] for o in own["operators"]}
    assert units == {"matmul+relu": "cube", "matmul": "cube", "softmax": "vector"}
    assert all(0 < o["trials"] <= 20 for o in own["operators"])
    assert f"{after:.6g} ms when both are read again" in out
    files = (tmp_path / "mlp_tuned.onnx", "--tuned", tmp_path / "mlp_tuned.jsonl")
    values = lab_json(capsys, "run", *files, "--compiled", "--chip", "Ascend310")
    wanted = lab_json(capsys, "run", model)
    assert values["p"]["max"] == pytest.approx(wanted["p"]["max"], rel=0.02)


def test_batches_share_a_report(capsys, small, tmp_path):
    model = write_mlp(tmp_path / "open.onnx", batch="n")
    _, found = tune(
        capsys, model, tmp_path, "--input_shape", "x:-1,512", "--dynamic_batch_size", "16,64"
    )
    assert [s["basic"]["tuning_name"] for s in found] == ["open_batch16", "open_batch64"]
    times = [s["OPAT"]["model_baseline_performance(ms)"] for s in found]
    assert times[0] < times[1]
    assert (tmp_path / "open_batch64_tuned.onnx").is_file()


def test_a_sliced_model_is_saved_and_takes_what_the_report_says(capsys, small, tmp_path):
    model = write_convolutions(tmp_path / "convs.onnx")
    output = tmp_path / "out"
    arguments = ("-j", "1,2", "-m", model, "--output", output, "--tune_ops_file")
    file = tmp_path / "ops.json"
    file.write_text('{"tune_ops_type": ["relu"]}')
    code, out, _ = aoe(capsys, *arguments, file, *CHIP)
    assert code == 0
    assert out.index("sgat process finished") < out.index("opat process finished")
    assert out.index("sgat is subgraph tuning") < out.index("opat is operator tuning")
    (sgat,) = sections(output, "sgat")
    (opat,) = sections(output)
    baseline, result = (sgat["SGAT"][f"model_{k}_performance(ms)"] for k in ("baseline", "result"))
    assert result < baseline and sgat["ascend_lab"]["slices"]
    assert opat["OPAT"]["model_baseline_performance(ms)"] == pytest.approx(result, rel=1e-6)
    files = (output / "convs_tuned.onnx", "--tuned", output / "convs_tuned.jsonl")
    tuned = lab_json(capsys, "simulate", *files, "--chip", "Ascend310")
    wanted = opat["OPAT"]["model_result_performance(ms)"]
    assert tuned["time_s"] * 1e3 == pytest.approx(wanted, rel=1e-9)
    assert f"{wanted:.6g} ms when both are read again" in out


def test_one_bad_model_does_not_stop_the_others(capsys, small, tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "a.onnx").write_bytes(b"no model")
    write_mlp(folder / "b.onnx")
    code, _, err = aoe(
        capsys, "-j", "2", "--model_path", folder, "--output", tmp_path / "out", *CHIP
    )
    assert code == 2
    assert "a:" in err and err.count("\n") == 1
    assert sections(tmp_path / "out")[0]["basic"]["tuning_name"] == "b"


OURS = '{"op": "matmul", "shapes": [[128, 256], [256, 64]], "attrs": {}, "constants": [1]}'
PUBLISHED = """[{"op": "MatMul", "input_desc": [
  {"format": "ND", "shape": [128, 256], "type": "float16"},
  {"format": "ND", "shape": [256, 64], "type": "float16"}], "output_desc": []},
  {"op": "relu", "shapes": [[64]], "dtypes": ["float16"]}]"""


@pytest.mark.parametrize(
    ("text", "names"), [(OURS, ["matmul"]), (PUBLISHED, ["1_matmul", "2_relu"])]
)
def test_single_operators(capsys, small, tmp_path, text, names):
    file = tmp_path / "op.json"
    file.write_text(text)
    code, _, err = aoe(capsys, "-j", "2", "--singleop", file, "--output", tmp_path, *CHIP)
    assert (code, err) == (0, "")
    found = sections(tmp_path)
    assert [s["basic"]["tuning_name"] for s in found] == names
    assert found[0]["ascend_lab"]["operators"][0]["op_type"] == "matmul"


def test_an_interrupt_keeps_what_was_found_and_reload_goes_on(capsys, small, tmp_path, monkeypatch):
    calls = []
    choice = SmallJob.choice

    def interrupted(job, point):
        calls.append(point)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return choice(job, point)

    monkeypatch.setattr(SmallJob, "choice", interrupted)
    arguments = ("-j", "2", "-m", small, "--output", tmp_path, *CHIP)
    code, out, err = aoe(capsys, *arguments)
    assert code == 130 and "interrupted" in err and err.count("\n") == 1
    assert "opat process interrupted" in out and "finished" not in out
    assert sections(tmp_path)[0]["OPAT"]["opat_tuning_result"] == "tuning incomplete"
    assert (tmp_path / "mlp_tuned.jsonl").is_file()
    calls[:] = [None] * 12
    code, _, _ = aoe(capsys, *arguments, "--reload")
    assert code == 0
    resumed = len(calls) - 12
    calls[:] = [None] * 12
    monkeypatch.setenv("REPEAT_TUNE", "True")
    assert aoe(capsys, *arguments)[0] == 0
    assert 0 < resumed < len(calls) - 12


def test_a_time_that_is_over_after_the_compile_leaves_the_network_as_it_is(capsys, small, tmp_path):
    arguments = ("-j", "2", "-m", small, "--output", tmp_path, *CHIP, "--time_limit", "1e-6")
    code, out, err = aoe(capsys, *arguments)
    assert code == 0 and err.count("\n") == 1 and "limit of 1e-06 s: nothing was tuned" in err
    assert re.search(r"default\n +not reached in the time limit\n", out)
    assert re.search(
        r"--time_limit ended the search: [1-9]\d* kinds .* nothing is proven; raise", out
    )
    opat = sections(tmp_path)[0]["OPAT"]
    assert opat["model_performance_improvement"] == "0.00%"
    assert opat["tune_failed_operators"] == [] == list(tmp_path.glob("*_tuned*"))


def test_what_takes_the_most_time_is_printed_and_the_shares_of_it(capsys, small, tmp_path):
    out, _ = tune(capsys, small, tmp_path)
    table = out[out.index("kernel ") : out.index("time of the kernels")].splitlines()[1:]
    table = [line for line in table if not line.startswith("    ")]  # notes
    times = [float(re.search(r"\) +\d+ +[\d.]+ +([\d.]+)", line)[1]) for line in table]
    assert len(times) == 5 and times == sorted(times, reverse=True)
    assert all(len(line) <= 88 for line in table)
    shares = out.partition("each alone with a launch of its own:\n")[2].partition("\n")[0]
    assert sum(map(float, re.findall(r"([\d.]+) % [a-z]", shares))) == pytest.approx(100)


TWICE = """
import os, signal, sys, time
sys.path[:0] = {path!r}
from ascend_lab.aoe import tuning, workers
from ascend_lab.cli import aoe as main
measured = []
original = workers.attempt
def attempt(*given):
    measured.append(given)
    if len(measured) == 40:
        os.kill(os.getpid(), signal.SIGINT)
    return original(*given)
def difference_of(*given):
    if len(measured) >= 40:  # by then another than the default is best
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(300)
    return really(*given)
really = tuning.difference_of
workers.attempt, tuning.difference_of = attempt, difference_of
sys.exit(main(["-j", "2", *{arguments!r}]))
"""


def test_a_second_ctrl_c_ends_at_once(small, tmp_path):
    arguments = ["-m", str(small), "--output", str(tmp_path), *CHIP]
    environ = {**os.environ, "REPEAT_TUNE": "True"}
    found = subprocess.run(
        [sys.executable, "-c", TWICE.format(path=sys.path, arguments=arguments)],
        capture_output=True, text=True, env=environ, check=False, timeout=250,
    )  # fmt: skip
    assert found.returncode == 130 and found.stderr == "aoe: ended at once\n"


def test_bank_verbs(capsys, small, tmp_path, monkeypatch):
    tune(capsys, small, tmp_path / "out")
    file = tmp_path / "export.jsonl"
    assert aoe(capsys, "bank", "export", file) == (0, f"2 entries written to {file}\n", "")
    code, out, _ = aoe(capsys, "bank", "list")
    assert code == 0 and out.startswith("2 entries") and out.count("matmul") == 2
    number = next(line.split()[0] for line in out.splitlines() if " matmul " in line)
    assert aoe(capsys, "bank", "nearest", number)[0] == 0
    other = tmp_path / "other.db"
    found = aoe(capsys, "bank", "import", file, "--bank", other)
    assert found == (0, "2 added, 0 updated, 0 already as good\n", "")
    found = aoe(capsys, "bank", "merge", other)
    assert found == (0, "0 added, 0 updated, 2 already as good\n", "")
    times = [
        lab_json(capsys, "simulate", small, "--chip", "Ascend310", "--bank", bank)["time_s"]
        for bank in (file, other)
    ]
    report = sections(tmp_path / "out")[0]["OPAT"]
    wanted = report["model_result_performance(ms)"] / 1e3
    assert times == pytest.approx([wanted, wanted], rel=1e-9)


def test_forgetting_needs_one_entry_or_all(capsys, small, tmp_path):
    tune(capsys, small, tmp_path / "out")
    listed = aoe(capsys, "bank", "list")[1].splitlines()[1:]
    number = listed[0].split()[0]
    for wrong, word in (
        ((), "none of them"),
        (("--op", "*"), "got 2; see `aoe bank list`; --all"),
        (("",), "not empty"),
        (("--op", "conv*"), "got 0"),
        ((number, "--soc_version", "Toy"), "got 0"),
        (("--all", "--unreadable"), "both"),
        (("--all", "--bank", tmp_path / "none.db"), "no such file"),
    ):
        assert word in refused(capsys, "bank", "forget", *wrong)
    assert not (tmp_path / "none.db").exists()
    code, out, _ = aoe(capsys, "bank", "forget", number)
    assert code == 0 and out.startswith(f"{listed[0]}\n1 entries deleted")
    assert aoe(capsys, "bank", "list")[1].splitlines()[1:] == listed[1:]
    assert aoe(capsys, "bank", "forget", "--op", "mat*", "--soc_version", "Ascend310")[0] == 0
    assert aoe(capsys, "bank", "list")[1].startswith("0 entries")


def test_bad_banks_cost_themselves_only(capsys, small, tmp_path):
    """Of two rows one is damaged: the other is used, the user hears of it, the file stays."""
    tune(capsys, small, tmp_path / "out")
    file, export, empty = (tmp_path / n for n in ("own.db", "own.jsonl", "empty.db"))
    aoe(capsys, "bank", "export", export)
    aoe(capsys, "bank", "import", export, "--bank", file)
    with sqlite3.connect(file) as con:
        con.execute("UPDATE entries SET line = 'x' WHERE rowid = 1")
    con.close()
    empty.touch()
    data = file.read_bytes()
    simulate = ["simulate", str(small), "--chip", "Ascend310", "--bank"]
    assert lab([*simulate, str(file)]) == 0
    warning = capsys.readouterr().err
    assert warning.startswith(f"ascend-lab: 1 unreadable rows of {file}")
    assert warning.count("\n") == 1 and file.read_bytes() == data
    assert lab([*simulate, str(empty)]) == 2
    err = capsys.readouterr().err
    assert str(empty) in err and err.count("\n") == 1 and empty.read_bytes() == b""
    code, out, err = aoe(capsys, "bank", "list", "--bank", file)
    assert code == 0 and out.startswith("1 entries") and err.startswith("aoe: 1 unreadable rows")
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "nothing")
    for place in ("/dev/null", link, tmp_path):
        assert "a regular file" in refused(capsys, "bank", "export", place)
    assert "1 unreadable" in aoe(capsys, "bank", "forget", "--unreadable", "--bank", file)[1]
    assert aoe(capsys, "bank", "list", "--bank", file)[2] == ""


def test_progress_and_processes_come_from_the_environment(capsys, small, tmp_path, monkeypatch):
    monkeypatch.setenv("TE_PARALLEL_COMPILER", "99")
    err = refused(capsys, "-j", "2", "-m", small, "--output", tmp_path, *CHIP)
    assert "TE_PARALLEL_COMPILER from 1 to 32" in err


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_published_flags_without_a_meaning_say_so(capsys, small, tmp_path, flag):
    err = refused(capsys, "-j", "2", "-m", small, "--output", tmp_path, flag, "1")
    assert f"got {flag}; drop it: " in err


BAD = {
    "job 4": (["-j", "4", "-m", "MODEL"], "gradient"),
    "job 3": (["-j", "3", "-m", "MODEL"], "1 subgraph, 2 operator"),
    "no job": (["-m", "MODEL"], "--job_type"),
    "framework": (["-j", "2", "-f", "3", "-m", "MODEL"], "export the model to ONNX"),
    "no model": (["-j", "2"], "--model"),
    "missing": (["-j", "2", "-m", "none.onnx"], "none.onnx"),
    "no folder": (["-j", "2", "--model_path", "none"], "none"),
    "chip": (["-j", "2", "-m", "MODEL", "--soc_version", "Ascend9"], "Ascend9"),
    "cores": (["-j", "2", "-m", "MODEL", "--aicore_num", "33"], "from 1 to 32"),
    "shape": (["-j", "2", "-m", "MODEL", "--input_shape", "x:a"], "--input_shape"),
    "shape -1": (["-j", "2", "-m", "MODEL", "--input_shape", "x:-1,512"], "--dynamic_batch_size"),
    "batch": (["-j", "2", "-m", "MODEL", "--dynamic_batch_size", "0"], "above 0"),
    "precision": (["-j", "2", "-m", "MODEL", "--precision_mode", "force_fp32"], "fp16 or bf16"),
    "budget": (["-j", "2", "-m", "MODEL", "--budget", "0"], "budget"),
    "time": (["-j", "2", "-m", "MODEL", "--time_limit", "nan"], "--time_limit"),
    "seed": (["-j", "2", "-m", "MODEL", "--seed", "-1"], "--seed"),
    "executor": (["-j", "2", "-m", "MODEL", "--executor", "gpu"], "processes:N"),
    "deeper": (["-j", "1", "-m", "MODEL", "--Fdeeper_opat"], "--job_type 2"),
    "uneven": (["-j", "2", "-m", "MODEL", "--Fnonhomo_split"], "--job_type 1"),
    "ops": (["-j", "2", "-m", "MODEL", "--tune_ops_file", "none.json"], "none.json"),
    "both": (["-j", "2", "-m", "MODEL", "--singleop", "x"], "--singleop"),
    "verb": (["bank", "sell"], "sell"),
    "bank file": (["bank", "list", "--bank", "none.db"], "none.db"),
    "bank json": (["bank", "import", "none.jsonl"], "none.jsonl"),
}


def test_schedules_for_something_else_are_refused(capsys, small, tmp_path):
    tune(capsys, small, tmp_path)
    model = tmp_path / "mlp_tuned.onnx"
    schedules = tmp_path / "mlp_tuned.jsonl"
    other = write_mlp(tmp_path / "other.onnx", (64, 32, 16))
    cut = tmp_path / "cut.jsonl"
    cut.write_text(schedules.read_text("utf-8")[:-20])
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    chip = ("--chip", "Ascend310")
    for arguments, word in (
        ((model, "--tuned", schedules, "--chip", "Ascend910A"), "2 cores of Ascend310"),
        ((model, "--tuned", schedules, *chip, "--aicore-num", "1"), "1 cores"),
        ((other, "--tuned", schedules, *chip), "none of them"),
        ((model, "--tuned", schedules, *chip, "--dtype", "int8"), "--dtype fp16"),
        ((model, "--tuned", cut, *chip), "line 2"),
        ((model, "--tuned", empty, *chip), "line 1"),
        ((model, "--tuned", "none.jsonl", *chip), "none.jsonl"),
        ((model, "--bank", "none.db", *chip), "none.db"),
        ((model, "--bank", schedules, *chip), "line 1"),
        ((model, "--tuned", schedules, "--bank", "builtin", *chip), "choose one"),
    ):
        assert lab(["simulate", *map(str, arguments)]) == 2
        err = capsys.readouterr().err
        assert word in err and err.count("\n") == 1
    assert lab(["run", str(model), "--tuned", str(schedules)]) == 2
    assert "only with --compiled" in capsys.readouterr().err
