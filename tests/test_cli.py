"""The command line: verbs, the JSON contract, exit codes, and one line for every bad input."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from command_lines import refused, run, run_json

from ascend_lab import __version__
from ascend_lab.cli import ascend_lab as main
from ascend_lab.cli.verbs import VERBS
from ascend_lab.cluster.schedule import ALGORITHMS, OPS
from ascend_lab.compiler.memory import METHODS
from ascend_lab.compiler.memory_file import REQUIRED
from ascend_lab.machine.chip import PRESETS, load_chip
from ascend_lab.operators.kernels.run_file import REQUIRED_FUNCTIONS
from ascend_lab.operators.ops import OPERATORS

ROOT = Path(__file__).resolve().parent.parent
MY_KERNEL = ROOT / "notebooks" / "my_kernel.py"
GEMM_KEYS = {"time_s", "cycles", "tflops", "busy", "bound_by", "bytes", "schedule"}


# -- verbs -----------------------------------------------------------------------------------------
def test_chips_lists_all_and_shows_one(capsys):
    assert tuple(run_json(capsys, "chips")) == PRESETS
    data = run_json(capsys, "chips", "Ascend910A")
    assert data["peak_ops_per_s"]["fp16"] == pytest.approx(262.144e12)
    assert data["facts"]["clock.hz"]["source"] in data["sources"]
    code, out, _ = run(capsys, "chips")
    assert code == 0
    assert all(name in out for name in PRESETS)
    code, out, _ = run(capsys, "chips", "Ascend310")
    assert re.search(r"buffer\.L1\.size_bytes +1048576 ", out)


@pytest.mark.parametrize("chip", PRESETS)
@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_gemm_keeps_the_contract(capsys, chip, dtype):
    data = run_json(capsys, "gemm", 500, 300, 200, "--chip", chip, "--dtype", dtype)
    assert data.keys() >= GEMM_KEYS
    assert set(data["busy"]) == {"cube", "mte1", "mte2", "store"}
    assert all(0 <= share <= 1 for share in data["busy"].values())
    assert data["time_s"] > 0
    assert isinstance(data["cycles"], int)
    assert data["tflops"] == pytest.approx(2 * 500 * 300 * 200 / data["time_s"] / 1e12)
    assert data["bound_by"]
    assert data["bytes"]["GM->L1"] > 0
    assert set(data["schedule"]) >= {"base_m", "base_k", "base_n", "step_k"}


def test_gemm_takes_a_schedule(capsys):
    options = ("--tile", "128,64,256", "--step-k", 4, "--grid", "4x6")
    data = run_json(capsys, "gemm", 1536, 1536, 1536, "--chip", "Ascend910B2", *options)
    names = ("base_m", "base_k", "base_n", "step_k", "grid_rows", "grid_cols")
    assert data["schedule"] == dict(zip(names, (128, 64, 256, 4, 4, 6), strict=True))
    assert data["cores"] == 24


def test_conv_keeps_the_contract(capsys):
    sizes = (1, 16, 20, 20, 32, 3, 3)
    data = run_json(capsys, "conv", *sizes, "--stride", 2, "--pad", 1, "--chip", "Toy")
    assert data.keys() >= GEMM_KEYS
    assert set(data["busy"]) == {"cube", "mte1", "mte2", "store"}
    twice = run_json(capsys, "conv", *sizes, "--stride", 1, "--pad", 1, "--chip", "Toy")
    assert twice["cycles"] > data["cycles"]


def test_text_output_names_what_bounds_it(capsys):
    code, out, err = run(capsys, "gemm", 256, 256, 256, "--chip", "Toy")
    assert (code, err) == (0, "") and "TFLOPS" in out
    (shares,) = re.search(r"cube peak; busy (.+)", out).groups()
    (limit,) = re.search(r"bound by (\w+)", out).groups()
    assert limit in {"launch", *(share.split()[0] for share in shares.split(", "))}


def test_json_and_trace_go_to_files(capsys, tmp_path):
    target = tmp_path / "out.json"
    trace = tmp_path / "trace.json"
    files = ("--json", target, "--trace", trace)
    assert run(capsys, "gemm", 64, 64, 64, "--chip", "Toy", *files) == (0, "", "")
    assert json.loads(target.read_text("utf-8")).keys() >= GEMM_KEYS
    assert json.loads(trace.read_text("utf-8"))["traceEvents"]


def test_a_chip_file_of_ones_own(capsys, tmp_path):
    file = tmp_path / "fast.toml"
    file.write_text(
        'base = "Toy"\nname = "Fast"\nsummary = "Toy at 2 GHz"\ncombined = true\n'
        '[clock]\nhz = { value = 2e9, source = "TEAM", trust = "assumed" }\n',
        "utf-8",
    )
    assert run_json(capsys, "chips", file)["clock_hz"] == 2e9
    assert run_json(capsys, "gemm", 64, 64, 64, "--chip", file)["chip"] == "Fast"


def test_version_and_help(capsys):
    for flag, text in (("--version", __version__), ("--help", "run-kernel")):
        with pytest.raises(SystemExit) as stop:
            main([flag])
        assert stop.value.code == 0
        assert text in capsys.readouterr().out


def test_help_says_what_every_argument_is_and_names_every_choice(capsys):
    for verb in VERBS:
        for _, names, how in verb.flags:
            assert how.get("help") or how.get("choices"), (verb.name, names)
    choices = {
        "plan-memory": (*METHODS, *REQUIRED, "alignment", "offset", "gaps", "6-8 11-12", "@"),
        "collective": (*OPS, *ALGORITHMS["all_reduce"]),
        "run-kernel": REQUIRED_FUNCTIONS,
    }
    for name, words in choices.items():
        with pytest.raises(SystemExit):
            main([name, "--help"])
        text = "".join(capsys.readouterr().out.split())  # lines break at hyphens, too
        assert [word for word in words if word.replace(" ", "") not in text] == []


# -- kernels of one's own --------------------------------------------------------------------------
KERNEL = MY_KERNEL.read_text("utf-8")


def kernel_file(tmp_path, text):
    file = tmp_path / "student.py"
    file.write_text(text, "utf-8")
    return file


@pytest.mark.parametrize("chip", ["Toy", "Ascend910A", "Ascend910B2"])
def test_the_example_kernel_is_right_and_clean(capsys, chip):
    data = run_json(capsys, "run-kernel", MY_KERNEL, "--chip", chip, "--sanitize")
    assert data["values_ok"] is True
    assert data["findings"] == []
    assert data["cycles"] > 0


def test_wrong_values_exit_with_1(capsys, tmp_path):
    file = kernel_file(tmp_path, KERNEL.replace("np.maximum(arrays", "np.minimum(arrays"))
    code, out, err = run(capsys, "run-kernel", file, "--chip", "Toy")
    assert (code, err) == (1, "")
    assert "values WRONG, largest error: y " in out
    assert out.splitlines()[1] == "y[0]: expected 0, got 0.125732, tolerance 0.00012"
    assert run_json(capsys, "run-kernel", file, "--chip", "Toy", code=1)["values_ok"] is False


def test_the_report_names_time_cores_and_the_longest_stalls(capsys):
    code, out, err = run(capsys, "run-kernel", MY_KERNEL, "--chip", "Ascend910A")
    assert (code, err) == (0, "")
    assert " launch = " in out
    cores, busy, head, *stalls = out.splitlines()[2:]
    assert cores == "cores: 1" and head == "longest stalls:"
    assert busy.startswith("busy, launch included: V ")
    assert len(stalls) == 3 and all(" cycles on " in stall for stall in stalls)


def test_poison_in_the_output_exits_with_1(capsys, tmp_path):
    file = kernel_file(tmp_path, KERNEL.replace("        k.copy(y.region", "        (y.region"))
    found = run_json(capsys, "run-kernel", file, "--chip", "Toy", code=1)
    assert found["max_error"] == {"y": None}  # infinite, which JSON cannot say


RACY = KERNEL.replace("        x_ub.enqueue()\n", "").replace(
    "source, target = x_ub.dequeue(), y_ub.alloc()", "source, target = first, y_ub.alloc()"
)
RACY = RACY.replace(
    "        k.copy(x_ub.alloc().region()",
    "        first = x_ub.alloc()\n        k.copy(first.region()",
).replace(
    "        x_ub.free()\n", "        x_ub.enqueue()\n        x_ub.dequeue()\n        x_ub.free()\n"
)


def test_a_race_exits_with_1_only_when_asked_to_look(capsys, tmp_path):
    file = kernel_file(tmp_path, RACY)
    found = run_json(capsys, "run-kernel", file, "--chip", "Toy", "--sanitize", code=1)
    kinds = {finding["kind"] for finding in found["findings"]}
    assert kinds & {"race", "uninitialised-read"}


def test_a_kernel_in_place_is_clean(capsys, tmp_path):
    """The sanitizer knows from `inputs` which tensors are filled before the launch."""
    in_place = KERNEL.replace("k.copy(y.region(", "k.copy(x.region(").replace(
        '{"y": np.maximum', '{"x": np.maximum'
    )
    file = kernel_file(tmp_path, in_place)
    data = run_json(capsys, "run-kernel", file, "--chip", "Toy", "--sanitize")
    assert data["values_ok"] is True
    assert data["findings"] == []


# -- bad input: exit code 2, one line, no traceback ------------------------------------------------
TOY = ("--chip", "Toy")


HEAD = (
    "import numpy as np\n"
    "from ascend_lab.machine.isa import *\n"
    "from ascend_lab.machine.isa import Program\n"
)


def functions(kernel="return Program('p', (), ())", inputs="return {}", reference="return {}"):
    return (
        f"{HEAD}def kernel(chip):\n    {kernel}\n"
        f"def inputs(rng):\n    {inputs}\n"
        f"def reference(arrays):\n    {reference}\n"
    )


COPY = (
    "k = KernelBuilder('c', chip); x = k.tensor('x', 'fp16', 16); y = k.tensor('y', 'fp16', 16); "
    "t = k.buffer('t', 'UB', 'fp16', 16); k.copy(t.region(), x.region()); k.barrier(); "
    "k.copy(y.region(), t.region()); return k.finish()"
)
ONES = "return {'x': np.ones(16, np.float16)}"
BAD_KERNELS = {
    "syntax error": "def kernel(chip:\n",
    "not text": b"\xff\xfe\x00",
    "null byte": b"x = 1\0",
    "raises on loading": "1 / 0\n",
    "imports itself in a loop": "import student\nfrom student import kernel\n",
    "imports what is absent": "import no_such_module_at_all\n",
    "stops the program": "import sys\nsys.exit(0)\n",
    "stops in kernel": functions("raise SystemExit(3)"),
    "no functions": "x = 1\n",
    "functions are numbers": "kernel = inputs = reference = 3\n",
    "kernel raises": functions("return undefined"),
    "kernel asserts": functions("assert False, 'no'"),
    "kernel recurses": functions("return kernel(chip)"),
    "kernel takes nothing": functions().replace("kernel(chip)", "kernel()"),
    "kernel returns nothing": functions("pass"),
    "kernel returns text": functions("return 'program'"),
    "kernel returns a class": functions("return Program"),
    "kernel breaks a rule": functions(
        "KernelBuilder('k', chip).buffer('b', 'UB', 'fp16', 1 << 30)"
    ),
    "kernel leaves a buffer": functions(COPY.replace("x.region()", "x.region(16, 16)")),
    "kernel deadlocks": functions(
        "return Program('p', (), (Instruction('wait_flag', 'V', event=Event('S', 'V', 0)),))"
    ),
    "kernel uses too many cores": functions(
        "p = Program('p', (), (), (('core', 99),)); "
        "return Launch('l', (Part(p, tuple([(('core', i),) for i in range(99)])),))"
    ),
    "kernel is hand-made nonsense": functions("return Program('p', (), (1, 2))"),
    "kernel is endless": functions(
        "return Program('p', (), (Loop('i', 10**12, (Instruction('scalar', 'S'),)),))"
    ),
    "launch without parts": functions("return Launch('l', ())"),
    "inputs raise": functions(COPY, "return {}['x']", ONES),
    "inputs return a list": functions(COPY, "return [1]"),
    "inputs of another size": functions(COPY, "return {'x': np.ones(3, np.float16)}"),
    "inputs of another type": functions(COPY, "return {'x': np.ones(16)}"),
    "inputs with a strange name": functions(COPY, "return {'z': np.ones(16, np.float16)}"),
    "inputs with a number for a name": functions(COPY, "return {7: np.ones(16, np.float16)}"),
    "inputs ragged": functions(COPY, "return {'x': [[1], [1, 2]]}"),
    "reference raises": functions(COPY, ONES, "raise ValueError('multi\\nline')"),
    "reference returns an array": functions(COPY, ONES, "return np.ones(16)"),
    "reference of another size": functions(COPY, ONES, "return {'y': np.ones(4)}"),
    "reference of another name": functions(COPY, ONES, "return {'z': np.ones(16)}"),
    "reference of text": functions(COPY, ONES, "return {'y': ['a'] * 16}"),
    "reference of objects": functions(COPY, ONES, "return {'y': [None] * 16}"),
    "reference ragged": functions(COPY, ONES, "return {'y': [[1], [1, 2]]}"),
}


@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize("case", BAD_KERNELS)
def test_bad_kernel_files_give_one_line_and_code_2(capsys, tmp_path, monkeypatch, case, sanitize):
    text = BAD_KERNELS[case]
    file = tmp_path / "student.py"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("student", None)
    options = ("--sanitize",) if sanitize else ()
    err = refused(capsys, "run-kernel", file, *TOY, *options)
    sys.modules.pop("student", None)
    assert "student.py" in err or "got" in err


def test_errors_in_a_kernel_name_its_line(capsys, tmp_path):
    file = kernel_file(tmp_path, functions("return undefined"))
    err = refused(capsys, "run-kernel", file, *TOY)
    assert "line 5: NameError: name 'undefined' is not defined" in err


# -- operators -------------------------------------------------------------------------------------
def test_shapes_may_stand_behind_a_flag(capsys):
    plain = run(capsys, "op", "matmul", "64x32", "32x16", "--chip", "Ascend310")
    assert run(capsys, "op", "matmul", "64x32", "--chip", "Ascend310", "32x16") == plain
    assert "op: unrecognized arguments: -4x8" in refused(capsys, "op", "softmax", "-4x8")


def test_op_times_an_operator_and_shows_its_nest(capsys):
    words = ("op", "softmax", "64x100", "--chip", "Ascend910A")
    code, out, _ = run(capsys, *words, "--show")
    assert code == 0 and "softmax on" in out and "phase 1: y (64, 100) fp16" in out
    assert run_json(capsys, *words)["cycles"] > 0


def test_loops_that_are_not_timed_say_so(capsys):
    words = ("op", "flash_attention", *["1x1x64x32"] * 3, "--chip", "Ascend910A", "--show")
    out = run(capsys, *words)[1]
    assert "timed is a kernel written by hand, which ascend_lab.fused.flash_attention names" in out
    assert "not timed:\nphase 1: " in out
    words = ("op", "relu", "64x64", "--chip", "Ascend910A", "--show")
    assert "not timed" not in run(capsys, *words)[1]


def test_sizes_of_a_product_are_named_in_their_order(capsys):
    out = run(capsys, "gemm", 16, 32, 48, *TOY)[1]
    assert out.startswith("gemm m 16, n 32, k 48, fp16, on ")
    assert "m, n and k of at least 1; got m 16, n 0, k 48" in refused(
        capsys, "gemm", 16, 0, 48, *TOY
    )


def test_op_starts_with_operands_in_l2(capsys):
    words = ("op", "relu", "256x4096", "--chip", "Ascend910B2")
    found = [run_json(capsys, *words, *more) for more in ((), ("--warm-l2",))]
    cold, warm = found
    chip = load_chip("Ascend910B2")
    assert cold["memory_bytes"] == 2 * 256 * 4096 and warm["memory_bytes"] == 0
    assert warm["cycles"] < cold["cycles"]
    launches = [chip.launch_overhead_s, chip.queued_launch_s]
    for told, launch_s in zip(found, launches, strict=True):
        assert told["time_s"] == pytest.approx(launch_s + told["cycles"] / chip.clock_hz)
        assert max(told["busy"].values()) > 0
    words = ("op", "conv2d", "1x16x8x8", "16x16x3x3", "--chip", "Ascend310P3", "--warm-l2")
    assert run_json(capsys, *words)["memory_bytes"] == 0  # weights are an operand too


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_the_example_in_a_message_works(name, capsys):
    example = refused(capsys, "op", name).rpartition("e.g. ")[2]
    assert f"{name} on " in run(capsys, *shlex.split(example))[1]
