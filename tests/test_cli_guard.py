"""What both commands promise at their top: streams, interruption, mistakes of ours, idle flags.

And whatever the words of any verb are: an exit code that is documented, one line, no file lost. The
commands come from the parsers themselves, so that a new flag is tried at once. The guard is no help
here: with ASCEND_LAB_DEBUG it lets through what no other place explained.
`FUZZ_EXAMPLES=5000 HYPOTHESIS_PROFILE=explore pytest tests/test_cli_guard.py` looks for more.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import pytest
from fuzz_cases import (
    GOOD,
    OUTPUTS,
    PARSERS,
    QUICK,
    check,
    command,
    files,
    fill,
    lying,
    relu_model,
    run,
)
from hypothesis import HealthCheck, given, settings, strategies as st

from ascend_lab import output
from ascend_lab.cli import aoe, ascend_lab as lab, common, tune
from ascend_lab.errors import printable

ROOT = Path(__file__).resolve().parent.parent
CONTENTS = files()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Work in an empty folder, with nothing explained by the guard."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNE_BANK_PATH", str(tmp_path))
    monkeypatch.setenv("ASCEND_LAB_DEBUG", "1")
    return tmp_path


def shell(command, **environ):
    """Run a shell command in which `$LAB` and `$AOE` are the two; return code, output, errors."""
    lab = f"{sys.executable} -m ascend_lab"
    aoe = f"{sys.executable} -c 'from ascend_lab.cli import aoe; exit(aoe())'"
    command = command.replace("$LAB", lab).replace("$AOE", aoe)
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
    )
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


# -- streams -----------------------------------------------------------------------------------
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("$LAB chips > /dev/full", 2, "standard output cannot be written: No space left"),
        ("$AOE --help > /dev/full", 2, "standard output cannot be written: No space left"),
        ("$LAB chips >&-", 2, "a standard output to print on; got a closed one"),
        ("$LAB gemm 16 16 16 --chip Toy --json a.json >&-", 0, ""),
        ("$LAB chips no 2> /dev/full", 2, ""),
        ("$LAB chips no 2>&-", 2, ""),
        ("$AOE --help | head -n 1 > /dev/null", 0, ""),
        ("$LAB chips Toy | head -n 1 > /dev/null", 0, ""),
    ],
)
def test_streams_that_take_nothing_end_in_one_line(words, code, said):
    found, out, err = shell(words)
    assert (found, out, len(err)) == (code, [], bool(said)), err
    assert said in "".join(err)


def test_a_narrow_encoding_gets_escapes(folder):
    (folder / "chip.toml").write_text('base = "Toy"\nname = "Öre"\nsummary = "s"\ncombined = true')
    narrow = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    code, out, err = shell("$LAB chips chip.toml", **narrow)
    assert (code, err, out[0]) == (0, [], r"\xd6re: s")


# -- Ctrl-C ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "start",
    ["$LAB run x", "$AOE -j 2 -m x.onnx"],
)  # fmt: skip
def test_ctrl_c_while_modules_are_imported_is_one_line(folder, start):
    (folder / "numpy.py").write_text("raise KeyboardInterrupt")
    code, out, err = shell(start, PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")
    assert (code, out, len(err)) == (130, [], 1)
    assert "interrupted" in err[0]


def test_the_guard_is_there_before_anything_else_is_imported():
    code = f"import sys; a = set(sys.modules); sys.path.insert(0, {str(ROOT)!r}); "
    code += "import ascend_lab.cli; print(*sorted(set(sys.modules) - a))"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [
        "ascend_lab",
        "ascend_lab.cli",
        "ascend_lab.errors",
        "ascend_lab.moved",
    ]


# -- mistakes of ours --------------------------------------------------------------------------
def failing(error, cause=None):
    def verb(*_):
        raise error from cause

    return verb


@pytest.mark.parametrize(("runs", "main"), [((common, "run_one"), lab), ((tune, "run"), aoe)])
def test_a_mistake_of_ours_is_one_line_and_the_trace_on_request(runs, main, monkeypatch, capsys):
    monkeypatch.setattr(*runs, failing(TypeError("x\ny")))
    with pytest.raises(TypeError):
        main([])
    monkeypatch.delenv("ASCEND_LAB_DEBUG")
    assert main([]) == 70
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "a mistake of ours: TypeError in cli/__init__.py:" in err
    assert "report" in err and "ASCEND_LAB_DEBUG=1" in err


def test_what_ctrl_c_was_turned_into_is_ctrl_c(monkeypatch, capsys):
    monkeypatch.setattr(common, "run_one", failing(ImportError("half"), KeyboardInterrupt()))
    assert lab([]) == 130
    assert capsys.readouterr().err == "ascend-lab: interrupted\n"


# -- words -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PARSERS)
def test_an_empty_text_is_refused_for_every_flag(name):
    words, parser = PARSERS[name]
    flags = [a.option_strings[-1] for a in parser._actions if a.option_strings and a.nargs != 0]
    assert flags
    for flag in flags:
        for pair in ([flag, ""], [f"{flag}="]):
            code, out, err = run([*words, *pair])
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert flag in err and "leave it out" in err


IDLE = {
    "run model.onnx --chip nosuch": "--chip only with --compiled",
    "run model.onnx --aicore-num 1": "--aicore-num only with --compiled",
    "run model.onnx --bank builtin": "--bank only with --compiled",
    "run model.onnx --inputs x.npz --seed 1": "--seed only without --inputs",
    "op --chip Toy": "--chip only with an operator's name",
    "op --dtype fp16": "--dtype only with an operator's name",
    "op relu 4x4 --chip Toy --show --json -": "--show only without --json",
    "plan-memory buffers.csv --method l2 --seed 1": "--seed only with a --method that searches",
    "subgraph subgraph.json --evaluations 5 --time-limit 1": "--time-limit only without",
    "gradient-plan gradients.csv --alpha-us 1 --beta-us-per-byte 1 --seed 1": "--seed only with",
    "collective --op allreduce --bytes 1 --topology star:4 --root 0": "--root only with --op",
    "train-plan resnet18 --cluster star:4 --devices 4 --input-shape x:1": "only with an .onnx",
    "aoe -j 1 -m model.onnx --budget 3": "--budget only with --job_type 2",
    "aoe -j 1 -m model.onnx --optimizer adam": "--optimizer only with --job_type 4",
    "aoe -j 4 -m model.onnx --cluster star:4 --time_limit 3": "--time_limit only with --job_type 1",
    "aoe -j 2 -m model.onnx --devices 0": "--devices only with --job_type 4",
}


@pytest.mark.parametrize("words", IDLE)
def test_a_flag_without_effect_is_refused(folder, words):
    fill(folder, CONTENTS)
    start = [] if words.startswith("aoe") else ["ascend-lab"]
    code, out, err = run([*start, *words.split()])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert IDLE[words] in err


@pytest.mark.parametrize("step", ["-5", "0"])
def test_a_step_below_one_is_refused(step):
    sizes = ["conv", *["1", "16", "8", "8", "16", "3", "3"], "--tile", "16,16,16", "--step-k", step]
    code, _, err = run(["ascend-lab", *sizes, "--chip", "Toy"])
    assert code == 2 and "of at least 1" in err


def test_train_plan_takes_the_sizes_of_an_image(folder):
    """Plans choose the batch, the user the other sizes."""
    fill(folder, {"open.onnx": relu_model("n", "k")})
    words = ["ascend-lab", "train-plan", "open.onnx", "--cluster", "star:2", "--devices", "2"]
    assert run([*words, "--chip", "Toy"])[0] == 2  # not without them
    code, out, err = run([*words, "--chip", "Toy", "--input-shape", "x:1,16"])
    assert (code, err) == (0, "") and "samples/s" in out
    code, _, err = run([*words, "--input-shape", "x:8,16"])
    assert code == 2 and "first size of 1" in err


# -- files -------------------------------------------------------------------------------------
WRITERS = {
    "--json": "gemm 16 16 16 --chip Toy --json",
    "--trace": "gemm 16 16 16 --chip Toy --trace",
    "--trace of a network": "simulate model.onnx --chip Toy --trace",
    "--fusion-result": "simulate model.onnx --chip Toy --fusion-result",
    "--outputs": "run model.onnx --outputs",
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_leaves_the_old_output(folder, monkeypatch, writer):
    fill(folder, CONTENTS)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = run(["ascend-lab", *WRITERS[writer].split(), "old.json"])
    assert code == 2 and "No space left" in err
    assert (folder / "old.json").read_bytes() == CONTENTS["old.json"]
    with pytest.raises(output.InputError):
        output.write_whole(folder / "buffers.csv", "id,lower,upper,size\n")
    assert (folder / "buffers.csv").read_bytes() == CONTENTS["buffers.csv"]


@pytest.mark.parametrize("target", ["nowhere/a.json", ".", "space.csv", "x" * 300])
def test_an_output_that_cannot_be_is_refused_before_the_work(folder, monkeypatch, target):
    fill(folder, CONTENTS)
    module = import_module("ascend_lab.aoe.drive")  # the room has a function of this name
    monkeypatch.setattr(module, "replay", failing(AssertionError("it worked")))
    code, out, err = run(["ascend-lab", "replay", "space.csv", "--json", target])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert (folder / "space.csv").read_bytes() == CONTENTS["space.csv"]


def test_two_outputs_need_two_files(folder):
    words = ["gemm", "16", "16", "16", "--chip", "Toy", "--json", "a.json", "--trace"]
    code, _, err = run(["ascend-lab", *words, "./a.json"])
    assert code == 2 and "a file for each output" in err and not (folder / "a.json").exists()
    assert run(["ascend-lab", *words, "b.json"])[0] == 0


PLACES = ("chip", "soc_version", "name", "file", "model", "model_path", "singleop", "inputs",
          "tune_ops_file", "fusion_switch", "tuned", "bank", "topology", "cluster", "operand",
          "output", *OUTPUTS)  # fmt: skip
AWKWARD = ("/", ".", "..", "~", "folder", "loop", "dangling", "rubbish", "missing/", "x" * 5000,
           "y/" * 2500, "rubbish/x", "folder/", "\udcff", "a\nb")  # fmt: skip


def plain(name):
    """Return a good command of a verb, all of it required."""
    words, parser = PARSERS[name]
    found = list(words)
    for action in parser._actions:
        good = GOOD.get(f"{name} {action.dest}") or GOOD.get(action.dest) or ("2",)
        if not action.option_strings:
            found.append(good[0])
        elif action.required or f"{name} {action.dest}" in QUICK:
            found += [action.option_strings[0], QUICK.get(f"{name} {action.dest}", good[0])]
    return [*found, "--model", "model.onnx"] if name == "aoe" else found


def is_named(file, words):
    """Tell whether a command names a file, or a folder that it lies in."""
    return any(file in word or file.startswith(word.rstrip("/") + "/") for word in words)


@pytest.mark.parametrize("name", PARSERS)
def test_no_path_is_too_awkward_for_any_argument(tmp_path_factory, monkeypatch, name):
    words, parser = PARSERS[name]
    good = plain(name)
    for action in parser._actions:
        if action.dest not in PLACES:
            continue
        for path in AWKWARD:
            if action.option_strings:
                flag = action.option_strings[0]
                at = good.index(flag) if flag in good else len(good)
                given = [*good[:at], flag, path, *good[at + 2 :]]
            else:
                at = len(words)
                given = [*good[:at], path, *good[at + 1 :]]
            folder = tmp_path_factory.mktemp("path")
            monkeypatch.chdir(folder)
            check(given, {n: CONTENTS[n] for n in CONTENTS if is_named(n, given)}, folder)


# -- names from files --------------------------------------------------------------------------
def test_names_are_shown_and_not_obeyed(folder):
    fill(folder, CONTENTS)
    for words in (
        "chips chip.toml",
        "gemm 16 16 16 --chip chip.toml",
        "op relu 4x4 --chip chip.toml",
        "topologies cluster.toml",
        "collective --op allreduce --bytes 1e3 --topology cluster.toml",
        "gradient-plan gradients.csv --alpha-us 1 --beta-us-per-byte 1",
    ):
        code, out, err = run(["ascend-lab", *words.split()])
        assert (code, err) == (0, "")
        assert r"\x1b" in out and all(line.isprintable() for line in out.split("\n"))
    assert r"My\x1b[31m\nchip" in run(["ascend-lab", "chips", "chip.toml"])[1]


def test_printable_keeps_every_script_and_no_control():
    assert printable("Größe 置换 (é)") == "Größe 置换 (é)"
    assert printable("a\x1b[2J\n\u202e\udcff\x9b") == r"a\x1b[2J\n\u202e\udcff\x9b"


def test_json_on_the_terminal_is_json_and_printable(folder):
    name = 'base = "Toy"\nname = "a\\u001b\\u007f\\u202e"\nsummary = "s"\ncombined = true'
    (folder / "chip.toml").write_text(name)
    _, out, _ = run(["ascend-lab", "chips", "chip.toml", "--json", "-"])
    assert json.loads(out)["name"] == "a\x1b\x7f\u202e"
    assert all(line.isprintable() for line in out.split("\n"))
    assert np.isfinite(json.loads(out)["clock_hz"])


# -- any words ---------------------------------------------------------------------------------
# -- words and files that nobody means ---------------------------------------------------------
LONG = "p" * 300  # more than a file name may have on any system we know
ODD_WORDS = {
    "two dashes for a value": (["zoo", "--json=--"], "a value for --json"),
    "a set of lists": (["op", "relu", "4x4", "--chip=Toy", "--attr", "k={[]:1}"], "attributes"),
    "a long model": (["simulate", LONG, "--chip=Toy"], "File name too long"),
    "a long hand-in": (["course", "check", "A1", LONG], "File name too long"),
    "a long folder": (["course", "start", "A1", "--student=x", "--output", LONG], "too long"),
    "an endless search": (
        ["aoe", "-j=2", "-f=5", "-m=model.onnx", "--soc_version=Toy", "--time_limit=1e19"],
        "at most 86400 seconds",
    ),
}


@pytest.mark.parametrize("case", ODD_WORDS)
def test_odd_words_are_one_line(folder, monkeypatch, case):
    monkeypatch.delenv("ASCEND_LAB_DEBUG")
    (folder / "model.onnx").write_bytes(relu_model(1))
    words, said = ODD_WORDS[case]
    code, _, err = run(words if words[0] == "aoe" else ["ascend-lab", *words])
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


@pytest.mark.parametrize(
    ("field", "value"), [("base_m", [16]), ("grid_rows", "2"), ("window", 1), ("rest", 3)]
)
def test_tuned_files_with_wrong_types_name_the_line(folder, field, value):
    head, kernel = map(json.loads, CONTENTS["tuned.jsonl"].splitlines())
    kernel["schedule"]["tiling"][field] = value
    file = folder / "tuned.jsonl"
    file.write_text(f"{json.dumps(head)}\n{json.dumps(kernel)}\n")
    (folder / "conv.onnx").write_bytes(CONTENTS["conv.onnx"])
    code, _, err = run(["ascend-lab", "simulate", "conv.onnx", "--chip=Toy", f"--tuned={file}"])
    assert code == 2
    assert "line 2: a kernel and its schedule" in err


@pytest.mark.parametrize("sizes", [[16], [16, 16, 2**40], [-1, 16]])
def test_weights_whose_sizes_lie_are_named(folder, sizes):
    model = onnx.ModelProto.FromString(relu_model(1))
    model.graph.initializer[0].dims[:] = sizes
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    (folder / "x.npz").write_bytes(CONTENTS["x.npz"])
    code, _, err = run(["ascend-lab", "run", "model.onnx", "--inputs=x.npz"])
    assert code == 2
    assert "tensor w" in err


EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "150"))


@st.composite
def commands(draw):
    return command(lambda values: draw(st.sampled_from(values)))


@st.composite
def lies(draw):
    return lying(lambda values: draw(st.sampled_from(values)))


def check_quietly(words, contents):
    """Judge a command in an empty folder of its own, with nothing explained by the guard."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name, "work")
        folder.mkdir()
        patch.chdir(folder)
        patch.setenv("HOME", name)
        patch.setenv("TUNE_BANK_PATH", name)
        patch.setenv("ASCEND_LAB_DEBUG", "1")
        check(words, contents, folder)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs an alarm")
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(lie=lies())
def test_no_file_ends_in_a_traceback(lie):
    words, spoiled = lie
    check_quietly(words, {**CONTENTS, **spoiled})


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs an alarm")
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(words=commands())
def test_no_command_ends_in_a_traceback(words):
    check_quietly(words, CONTENTS)
