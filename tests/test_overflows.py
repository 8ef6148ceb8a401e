"""What leaves fp16 inside a compiled network is named, though the outputs look well."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_lines import run
from onnx_models import model_of, run_onnx

from ascend_lab.compiler import compile_graph
from ascend_lab.compiler.compile import Road
from ascend_lab.compiler.onnx import import_model, import_onnx
from ascend_lab.compiler.overflow import Overflow, broken_constants, vanished_constants
from ascend_lab.compiler.values import run_tasks
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import load_chip

CHIP = "Ascend310"


def normal(*shape, scale=1.0):
    drawn = np.random.default_rng(len(shape) * shape[-1]).standard_normal(shape)
    return (scale * drawn).astype(np.float32)


HIDDEN = {
    "sigmoid": ("mm: MatMul x w -> h; sg: Sigmoid h -> y", "mm"),
    "softmax": ("mm: MatMul x w -> h; sm: Softmax h -> y", "mm"),
    "relu6": ("fc: Gemm x w b -> h; cl: Clip h lo hi -> y", "fc"),
    "tanh": ("sq: Mul x x -> h; th: Tanh h -> y", "sq"),
}
WEIGHTS = {
    "w": normal(32, 16, scale=100),
    "b": normal(16),
    "lo": np.float32(0),
    "hi": np.float32(6),
}
X = normal(4, 32, scale=1000)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def overflows(made, feed):
    """Return what overflows when kernels compute a model, and the outputs."""
    graph = import_model(made).graph
    found = list[Overflow]()
    values = run_tasks(compile_graph(graph, CHIP), feed, graph.outputs, found)
    return found, values


@pytest.mark.parametrize("how", HIDDEN)
def test_a_hidden_overflow_is_told_and_its_remedy_works(capsys, how):
    text, title = HIDDEN[how]
    used = {n: w for n, w in WEIGHTS.items() if f" {n} " in text}
    made = model_of(text, {"x": X.shape}, ["y"], used)
    onnx.save(made, "m.onnx")
    np.savez("in.npz", x=X)
    words = ("run", "m.onnx", "--compiled", "--chip", CHIP, "--inputs", "in.npz", "--json", "j")
    code, _, err = run(capsys, *words)
    assert (code, err) == (0, "")
    data = json.loads(Path("j").read_text())
    (found,) = data["overflows"]
    exact = X * X if how == "tanh" else X @ WEIGHTS["w"]
    beyond = np.abs(exact) >= 65520
    assert found["node"].startswith(title)
    assert found["largest"] == pytest.approx(np.abs(exact).max(), rel=1e-2)
    assert found["share"] == pytest.approx(beyond.mean(), abs=0.05)
    _, out, _ = run(capsys, *words[:-2])
    assert f"overflow: node {found['node']}" in out
    assert "--keep_dtype F" in out
    Path("keep.txt").write_text("\n".join(data["keep_in_fp32"]))
    code, _, err = run(capsys, *words, "--keep_dtype", "keep.txt", "--outputs", "o.npz")
    assert (code, err) == (0, "")
    assert "overflows" not in json.loads(Path("j").read_text())
    want = run_onnx(made, {"x": X})["y"]
    np.testing.assert_allclose(np.load("o.npz")["y"], want, atol=2e-3)


# The first infinity hides what would overflow behind it.
CHAINS = {
    "product": "mm: MatMul x w -> h; up: Mul h c -> a; up2: Add a a -> t; th: Tanh t -> y",
    "squares": "sq: Mul x x -> a; down: Div a c -> t; sq2: Mul t t -> d; sg: Sigmoid d -> y",
    "beside": "mm: MatMul x w -> h; ab: Abs h -> a; sq: Mul a c -> t; ad: Add h t -> d; "
    "up: Mul d c -> e; th: Tanh e -> y",
}


@pytest.mark.parametrize("how", CHAINS)
def test_one_round_names_all_nodes_to_keep(capsys, how):
    """All that the first node writes leaves fp16, and so all that follows."""
    weights = {"w": np.full((32, 16), 3, np.float32), "c": np.float32(30)}
    weights = {name: w for name, w in weights.items() if f" {name} " in CHAINS[how]}
    made = model_of(CHAINS[how], {"x": X.shape}, ["y"], weights)
    onnx.save(made, "m.onnx")
    np.savez("in.npz", x=np.full(X.shape, 2000, np.float32))
    words = ("run", "m.onnx", "--compiled", "--chip", CHIP, "--inputs", "in.npz", "--json", "j")
    assert run(capsys, *words)[0] == 0
    names = json.loads(Path("j").read_text())["keep_in_fp32"]
    Path("keep.txt").write_text("\n".join(names))
    assert run(capsys, *words, "--keep_dtype", "keep.txt")[0] == 0
    assert "overflows" not in json.loads(Path("j").read_text())
    # What is kept already stands in the hint too: its list may replace the file.
    Path("keep.txt").write_text(names[-1])
    assert run(capsys, *words, "--keep_dtype", "keep.txt")[0] == 0
    assert set(json.loads(Path("j").read_text())["keep_in_fp32"]) == set(names)


def test_the_hint_says_where_keeping_more_does_not_help(capsys):
    text = "mm: MatMul x w -> h; mm2: MatMul h v -> g; th: Tanh g -> y"
    weights = {"w": WEIGHTS["w"], "v": normal(16, 16)}
    onnx.save(model_of(text, {"x": X.shape}, ["y"], weights), "m.onnx")
    np.savez("in.npz", x=X)
    Path("keep.txt").write_text("mm\nmm2\nth")
    words = ("run", "m.onnx", "--compiled", "--chip", CHIP, "--inputs", "in.npz")
    code, out, _ = run(capsys, *words, "--keep_dtype", "keep.txt")
    assert code == 0
    assert "overflow: node h_fp16" in out
    assert "--keep_dtype does not help further" in out


def test_a_compiled_file_tells_the_same(capsys):
    made = model_of(HIDDEN["sigmoid"][0], {"x": X.shape}, ["y"], {"w": WEIGHTS["w"]})
    onnx.save(made, "m.onnx")
    np.savez("in.npz", x=X)
    assert run(capsys, "compile", "m.onnx", "--chip", CHIP, "--output", "m.alm")[0] == 0
    words = ("run", "m.alm", "--compiled", "--inputs", "in.npz", "--json", "j")
    assert run(capsys, *words)[0] == 0
    (found,) = json.loads(Path("j").read_text())["overflows"]
    assert (found["node"], found["format"]) == ("mm", "fp16")
    assert found["largest"] == pytest.approx(np.abs(X @ WEIGHTS["w"]).max(), rel=1e-2)
    Path("keep.txt").write_text("mm\nsg\n")
    keep = ("--keep_dtype", "keep.txt")
    assert run(capsys, "compile", "m.onnx", "--chip", CHIP, "--output", "m.alm", *keep)[0] == 0
    assert run(capsys, *words)[0] == 0
    assert "overflows" not in json.loads(Path("j").read_text())


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("Sigmoid x -> y", 30),  # e^-x is infinite, 1 / (1 + e^-x) is right
        ("Softmax x -> y", 1000),
        ("Add x m -> h; Softmax h -> y", 90),  # a mask: minus infinity is meant
        ("MatMul x w -> h; Sigmoid h -> s; Mul h s -> y", 1),
    ],
)
def test_what_is_right_is_no_overflow(text, scale):
    x = normal(4, 32, scale=scale)
    masked = np.where(np.arange(32) % 3, 0, -3.4e38).astype(np.float32)
    weights = {"m": masked, "w": normal(32, 16)}
    used = {n: w for n, w in weights.items() if f" {n} " in text}
    assert overflows(model_of(text, {"x": x.shape}, ["y"], used), {"x": x})[0] == []


def test_an_input_beyond_fp16_is_told():
    x = np.array([1.0, 1e5, -2e5, 3.0], np.float32)
    found, _ = overflows(model_of("Sigmoid x -> y", {"x": (4,)}, ["y"]), {"x": x})
    assert found == [Overflow("x", "input", "fp16", 2e5, 0.5)]


def told_by_run(capsys, made, **feed):
    """Return what `run --compiled` says of overflows, by node."""
    onnx.save(made, "m.onnx")
    np.savez("in.npz", **feed)
    words = ("run", "m.onnx", "--compiled", "--chip", CHIP, "--inputs", "in.npz", "--json", "j")
    assert run(capsys, *words)[0] == 0
    return {row["node"]: row for row in json.loads(Path("j").read_text()).get("overflows", [])}


def test_a_constant_beyond_fp16_is_told(capsys):
    """Kernels read 65504 in its place: the output looks well, and is not."""
    weight = np.array([[1e5, 2], [3, 2e6]], np.float32)
    made = model_of("MatMul x w -> h; Sigmoid h -> y", {"x": (1, 2)}, ["y"], {"w": weight})
    told = told_by_run(capsys, made, x=np.array([[1e-3, 2e-3]], np.float32))
    assert told["w"]["op"] == "constant"
    assert told["w"]["largest"] == pytest.approx(2e6)
    assert told["w"]["share"] == 0.5


def test_a_constant_that_masks_is_no_overflow(capsys):
    mask = np.array([[0, np.finfo(np.float32).min]], np.float32)
    made = model_of("Add x m -> h; Softmax h -> y axis=-1", {"x": (1, 2)}, ["y"], {"m": mask})
    assert told_by_run(capsys, made, x=np.ones((1, 2), np.float32)) == {}


def test_nodes_to_keep_must_exist():
    graph = import_model(model_of("gate: Sigmoid x -> y", {"x": (4,)}, ["y"])).graph
    with pytest.raises(InputError, match=r"gat, which is none; did you mean gate\?"):
        Road(keep=frozenset(["gat"])).stages(graph, load_chip(CHIP))


@pytest.mark.parametrize("behind", ["Mul c sc -> y", "Mul c s -> d; Mul d ws -> y"])
def test_sums_of_dynamically_quantised_products_are_scaled_before_they_are_halves(behind):
    text = (
        "DynamicQuantizeLinear x -> q s z; MatMulInteger q w z -> a; Cast a -> c to=FLOAT; "
        f"Mul s ws -> sc; {behind}"
    )
    weights = {
        "w": np.random.default_rng(0).integers(-127, 128, (256, 16)).astype(np.int8),
        "ws": np.float32(7e-4),
    }
    x = normal(8, 256, scale=5)
    made = model_of(text, {"x": x.shape}, ["y"], weights)
    found, values = overflows(made, {"x": x})
    want = run_onnx(made, {"x": x})["y"]
    assert found == []
    off = np.abs(values["y"].astype(np.float32) - want).max()
    assert off <= 1e-2 * np.abs(want).max()  # x in fp16 may round to the next byte


# -- outputs that are not finite: the right cause --------------------------------------------------
NOT_FINITE = {
    "pow": ("p: Pow x y -> h; Relu h -> z", [-2.0, 4.0], "node p (pow) makes them"),
    "log": ("l: Log x -> h; Add h y -> z", [-2.0, 4.0], "node l (log) makes them"),
    "input": ("Add x y -> z", [np.inf, 1.0], "input x is not finite already"),
    "fp16": ("Mul x y -> z", [60000.0, 30.0], "numbers left what fp16 holds (65504), see above"),
}


@pytest.mark.parametrize("how", NOT_FINITE)
def test_what_is_not_finite_is_told_with_its_cause(capsys, how):
    text, x, cause = NOT_FINITE[how]
    made = model_of(text, {"x": (2,)}, ["z"], {"y": np.array([2.5, 1.5], np.float32)})
    onnx.save(made, "m.onnx")
    np.savez("in.npz", x=np.array(x, np.float32))
    code, out, _ = run(capsys, "run", "m.onnx", "--compiled", "--chip", CHIP, "--inputs", "in.npz")
    assert code == 0
    (line,) = [one for one in out.splitlines() if "not finite:" in one]
    assert cause in line


def test_weights_that_are_not_finite_are_named_when_compiled_and_when_run(capsys):
    weights = {"w": np.array([[1.0, np.nan], [np.inf, 2.0]], np.float32)}
    made = model_of("m: MatMul x w -> z", {"x": (2, 2)}, ["z"], weights)
    onnx.save(made, "m.onnx")
    cause = "constant w, read by node m (matmul): 2 of its numbers not finite"
    code, out, _ = run(capsys, "compile", "m.onnx", "--soc_version", CHIP, "--output", "m.alm")
    assert code == 0 and f"warning: {cause}" in out
    code, out, _ = run(capsys, "run", "m.onnx")
    assert code == 0 and cause in out


def test_an_infinity_that_an_operator_has_a_use_for_is_no_fault():
    bound = {"top": np.array(np.inf, np.float32)}
    made = model_of("Min x top -> z", {"x": (2,)}, ["z"], bound)
    assert broken_constants(import_onnx(made)) == []


def test_weights_that_fp16_rounds_to_zero_are_named_but_no_bias(capsys):
    weights = {"w": np.full((2, 2), 1e-9, np.float32), "b": np.full(2, 1e-9, np.float32)}
    made = model_of("m: MatMul x w -> h; Add h b -> z", {"x": (2, 2)}, ["z"], weights)
    cause = "constant w, read by node m (matmul): 4 of its 4 numbers other than 0 are 0 in fp16"
    (line,) = vanished_constants(import_onnx(made), "fp16")
    assert line.startswith(cause)
    onnx.save(made, "m.onnx")
    code, out, _ = run(capsys, "compile", "m.onnx", "--soc_version", CHIP, "--output", "m.alm")
    assert code == 0 and f"warning: {cause}" in out
    code, out, _ = run(capsys, "run", "m.onnx", "--compiled", "--chip", CHIP)
    assert code == 0 and f"lost: {cause}" in out
