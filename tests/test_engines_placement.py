"""Placement: the minimum cut against all placements, and models that no graph holds whole."""

import itertools
import json

import numpy as np
import onnx
import pytest
from hypothesis import given, settings, strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx_models import run_onnx

from ascend_lab.cli import ascend_lab as main
from ascend_lab.compiler.engines import CORE, CPU, HOST, MEDIA, RANKS, Problem, Work, copy_s
from ascend_lab.compiler.hosted import OUTPUTS, place_model
from ascend_lab.compiler.onnx.host import all_reads, run_on_host
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.machine.chip import load_chip

CHIP = load_chip("Ascend310")
US = 1e-6


# -- the cut ---------------------------------------------------------------------------------------
@st.composite
def problems(draw: st.DrawFn) -> Problem:
    works: list[Work] = []
    tensors: list[str] = []
    for i in range(draw(st.integers(1, 6))):
        seconds = {
            engine: draw(st.integers(0, 12)) * US
            for engine in (CORE, CPU, HOST)
            if draw(st.booleans())
        } or {HOST: 3 * US}
        reads = draw(st.lists(st.sampled_from(tensors), max_size=3, unique=True)) if tensors else []
        writes = [f"t{i}.{k}" for k in range(draw(st.integers(1, 2)))]
        works.append(Work(f"w{i}", seconds, tuple(reads), tuple(writes)))
        tensors += writes
    free = draw(st.sampled_from([None, *tensors]))
    return Problem(works, {t: draw(st.integers(0, 6)) * US for t in tensors if t != free})


@given(problems())
@settings(max_examples=150)
def test_the_cut_is_the_best_of_all_placements(problem: Problem) -> None:
    names = [work.name for work in problem.works]
    choices = itertools.product(*(list(work.seconds) for work in problem.works))
    least = min(problem.placed(dict(zip(names, c, strict=True))).time_s for c in choices)
    exact = problem.exact()
    assert exact.time_s == pytest.approx(least, abs=1e-12)
    assert exact.time_s <= problem.cheapest_engine().time_s + 1e-12
    assert problem.placed(exact.engines) == exact


def test_the_published_rule_ignores_copies() -> None:
    """A light operator between two of the host goes to the core by rank, and pays two copies."""
    works = [
        Work("a", {HOST: US}, (), ("t",)),
        Work("b", {CORE: US, HOST: 2 * US}, ("t",), ("u",)),
        Work("c", {HOST: US}, ("u", "t"), ("v",)),
    ]
    problem = Problem(works, dict.fromkeys("tuv", 10 * US))
    rule = problem.cheapest_engine()
    exact = problem.exact()
    assert rule.engines["b"] == CORE
    assert rule.copies == (("t", False), ("u", True))
    assert rule.time_s == pytest.approx(23 * US)
    assert exact.engines["b"] == HOST
    assert exact.time_s == pytest.approx(4 * US)


def test_a_tensor_is_copied_once_for_all_its_readers() -> None:
    readers = [Work(f"r{i}", {HOST: US}, ("t",), (f"u{i}",)) for i in range(3)]
    problem = Problem([Work("a", {CORE: US}, (), ("t",)), *readers], {"t": 10 * US})
    assert problem.exact().time_s == pytest.approx(14 * US)
    assert problem.exact().copies == (("t", True),)


def test_of_equal_placements_the_device_has_most() -> None:
    problem = Problem([Work("a", {CORE: US, HOST: US}, (), ("t",))])
    assert problem.exact().engines["a"] == CORE


def test_the_ranks_of_engines_are_the_published_ones() -> None:
    assert RANKS[CORE] < RANKS[CPU] == 3 < RANKS["media unit"] < RANKS[HOST]


def test_a_chip_without_a_link_to_the_host_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="a link to the host"):
        copy_s(load_chip("Toy"), 100)


# -- models ----------------------------------------------------------------------------------------
def model_of(nodes, inputs, outputs, weights=(), opset=18):
    def entry(name, shape=None, kind=TensorProto.FLOAT):
        return helper.make_tensor_value_info(name, kind, shape)

    graph = helper.make_graph(
        nodes, "m", [entry(*one) for one in inputs], [entry(n, None, k) for n, k in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def detector(pixels: int = 64):
    """Convolutions, boxes by NonMaxSuppression, and what is done with as many as were found."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Conv", ["r", "w2"], ["d"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["d"], ["p"]),
        helper.make_node("Reshape", ["p", "boxes_shape"], ["b"]),
        helper.make_node("Sigmoid", ["b"], ["boxes"]),
        helper.make_node("ReduceMax", ["boxes"], ["s"], axes=[2], keepdims=0),
        helper.make_node("Reshape", ["s", "scores_shape"], ["scores"]),
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "iou"], ["found"]),
        helper.make_node("Gather", ["found", "last"], ["places"], axis=1),
        helper.make_node("Gather", ["flat", "places"], ["kept"], axis=0),
        helper.make_node("Reshape", ["boxes", "flat_shape"], ["flat"]),
    ]
    weights = [
        ("w", rng.standard_normal((32, 3, 3, 3)).astype(np.float32)),
        ("w2", rng.standard_normal((32, 32, 3, 3)).astype(np.float32) * 0.1),
        ("boxes_shape", np.array([1, 8, 4])), ("scores_shape", np.array([1, 1, 8])),
        ("flat_shape", np.array([8, 4])), ("most", np.array([5])),
        ("iou", np.array([0.5], np.float32)), ("last", np.array(2)),
    ]  # fmt: skip
    outputs = [("kept", TensorProto.FLOAT), ("found", TensorProto.INT64)]
    return model_of(nodes, [("x", (1, 3, pixels, pixels))], outputs, weights, opset=17)


def test_a_model_with_sizes_that_values_decide_runs_and_is_timed() -> None:
    model = detector()
    x = np.random.default_rng(1).standard_normal((1, 3, 64, 64)).astype(np.float32)
    hosted = place_model(model, CHIP, inputs={"x": x})
    theirs = run_onnx(model, {"x": x})
    ours = hosted.run()
    np.testing.assert_array_equal(ours["found"], theirs["found"])
    np.testing.assert_allclose(ours["kept"], theirs["kept"], rtol=1e-4, atol=1e-5)
    engines = hosted.placement.engines
    assert "NonMaxSuppression" in hosted.reasons["found"]
    assert engines["found"] != CORE
    assert engines["d"] == CORE  # a convolution this large is not the host's
    times = hosted.timeline()
    assert times.time_s == pytest.approx(sum(op.time_s for op in times.operators))
    assert {op.name for op in times.operators} >= hosted.off_core.keys()
    fused = [op for op in times.operators if op.type == "conv2d+relu"]
    assert fused, "parts of the core are compiled whole"


def test_every_node_is_in_one_part_after_all_it_reads() -> None:
    hosted = place_model(detector(), CHIP)
    there = {"x"}
    seen = []
    constants = {name for name in hosted.values if name not in there}
    for part in hosted.parts:
        for node in part.nodes:
            constants -= set(node.output)
    for part in hosted.parts:
        assert len({hosted.placement.engines[n.name] == CORE for n in part.nodes}) == 1
        written = set()
        for node in part.nodes:
            assert set(all_reads(node)) <= there | written | constants
            written |= set(node.output)
            seen.append(node.name)
        there |= written
    assert sorted(seen) == sorted(n for n in hosted.placement.engines if not n.startswith("graph"))


def test_what_a_rule_copies_is_what_the_time_holds() -> None:
    hosted = place_model(detector(), CHIP)
    copies = [op for op in hosted.timeline().operators if op.type.startswith("copy")]
    assert len(copies) == len(hosted.placement.copies)
    assert OUTPUTS in hosted.placement.engines


@pytest.mark.parametrize(
    ("nodes", "inputs", "outputs"),
    [
        # numbers of 64 bits, strings, a sequence, a branch that reads from outside
        ([helper.make_node("Add", ["x", "x"], ["y"])],
         [("x", (3,), TensorProto.DOUBLE)], [("y", TensorProto.DOUBLE)]),
        ([helper.make_node("StringConcat", ["x", "x"], ["y"])],
         [("x", (3,), TensorProto.STRING)], [("y", TensorProto.STRING)]),
        ([helper.make_node("SplitToSequence", ["x"], ["s"], axis=0),
          helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=0)],
         [("x", (3, 4))], [("y", TensorProto.FLOAT)]),
        ([helper.make_node("ReduceSum", ["x"], ["t"], keepdims=0),
          helper.make_node("Greater", ["t", "t"], ["c"]),
          helper.make_node("If", ["c"], ["y"], then_branch=helper.make_graph(
              [helper.make_node("Neg", ["x"], ["n"])], "then", [],
              [helper.make_tensor_value_info("n", TensorProto.FLOAT, (3,))]),
              else_branch=helper.make_graph(
              [helper.make_node("Relu", ["x"], ["n"])], "else", [],
              [helper.make_tensor_value_info("n", TensorProto.FLOAT, (3,))]))],
         [("x", (3,))], [("y", TensorProto.FLOAT)]),
    ],
)  # fmt: skip
def test_what_no_graph_holds_runs_on_the_host_or_its_processor(nodes, inputs, outputs) -> None:
    model = model_of(nodes, inputs, outputs, opset=20)
    hosted = place_model(model, CHIP)
    theirs = run_onnx(model, {"x": hosted.values["x"]})["y"]
    np.testing.assert_array_equal(hosted.run()["y"], theirs)
    assert hosted.off_core
    assert hosted.timeline().time_s > 0
    if theirs.dtype.kind == "O":
        assert set(hosted.off_core.values()) == {HOST}


def test_a_media_unit_resizes_frames_of_bytes(tmp_path, capsys) -> None:
    """A frame of 1080p: the published rate of the 310's VPC, 1440 pictures a second."""
    nodes = [
        helper.make_node("Resize", ["x", "", "half"], ["small"], mode="linear"),
        helper.make_node("Cast", ["small"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Relu", ["f"], ["y"]),
    ]
    half = ("half", np.array([1, 1, 0.5, 0.5], np.float32))
    entry = ("x", (1, 3, 1080, 1920), TensorProto.UINT8)
    model = model_of(nodes, [entry], [("y", TensorProto.FLOAT)], [half])
    plain = place_model(model, CHIP)
    unit = place_model(model, CHIP, media_pixels_per_s=1440.0 * 1080 * 1920)
    assert plain.placement.engines["small"] in (CPU, HOST)
    assert unit.placement.engines["small"] == MEDIA
    (work,) = [work for work in unit.problem.works if work.name == "small"]
    assert work.seconds[MEDIA] == pytest.approx(CHIP.launch_overhead_s + 1 / 1440)
    assert unit.placement.time_s < plain.placement.time_s
    np.testing.assert_array_equal(unit.run()["y"], plain.run()["y"])
    onnx.save(model, tmp_path / "frame.onnx")
    assert main(["simulate", str(tmp_path / "frame.onnx"), "--chip", "Ascend310"]) == 0
    assert "small (Resize on the media unit)" in capsys.readouterr().out


def test_a_model_that_nobody_computes_is_refused() -> None:
    alien = helper.make_node("Alien", ["x"], ["y"], domain="other.world")
    model = model_of([alien], [("x", (3,))], [("y", TensorProto.FLOAT)])
    model.opset_import.append(helper.make_opsetid("other.world", 1))
    with pytest.raises(UnsupportedError, match="the host computes"):
        place_model(model, CHIP)
    with pytest.raises(InputError, match="inputs with x"):
        place_model(detector(), CHIP, inputs={"y": np.zeros(3)})


# -- the command line ------------------------------------------------------------------------------
def test_simulate_and_run_name_what_is_off_the_core(tmp_path, capsys) -> None:
    file = tmp_path / "detector.onnx"
    out = tmp_path / "out.npz"
    onnx.save(detector(), file)
    assert main(["simulate", str(file), "--chip", "Ascend310", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    off = data["placement"]["engines"]
    assert off.keys() >= {"found"}
    assert "NonMaxSuppression" in data["placement"]["reasons"]["found"]
    assert data["placement"]["nodes_s"] <= data["placement"]["cheapest_engine_s"]
    totals = data["totals"]
    assert sorted(totals["host_operators"] + totals["ai_cpu_operators"]) == sorted(off)
    kinds = sum(len(totals[f"{k}_operators"]) for k in ("host", "ai_cpu", "copy"))
    assert totals["kernels"] + kinds == len(data["operators"])
    assert main(["simulate", str(file), "--chip", "Ascend310", "--trace", str(tmp_path / "t")]) == 0
    assert "NonMaxSuppression) on the" in capsys.readouterr().out
    assert main(["run", str(file), "--outputs", str(out)]) == 0
    with np.load(out) as found:
        assert found["found"].shape[1] == 3
        assert len(found["kept"]) == len(found["found"])


@pytest.mark.parametrize(
    "flags", [("--memory-limit", "9"), ("--no-fusion",), ("--bank", "builtin")]
)
def test_flags_that_mean_nothing_for_a_placed_model_are_refused(tmp_path, capsys, flags) -> None:
    file = tmp_path / "detector.onnx"
    onnx.save(detector(), file)
    assert main(["simulate", str(file), "--chip", "Ascend310", *flags]) == 2
    assert "only for models whose operators the compiler takes" in capsys.readouterr().err


def test_an_operator_that_nobody_knows_is_named_in_one_line(tmp_path, capsys) -> None:
    file = tmp_path / "alien.onnx"
    onnx.save(model_of([helper.make_node("Alien", ["x"], ["y"])], [("x", (3,))],
                       [("y", TensorProto.FLOAT)]), file)  # fmt: skip
    assert main(["simulate", str(file), "--chip", "Ascend310"]) == 2
    err = capsys.readouterr().err
    assert "Alien" in err
    assert err.count("\n") == 1


def test_complex_numbers_run_on_the_host_and_have_no_order(tmp_path, capsys):
    file = tmp_path / "complex.onnx"
    kind = TensorProto.COMPLEX64
    same = helper.make_node("Identity", ["x"], ["y"])
    onnx.save(model_of([same], [("x", (2,), kind)], [("y", kind)]), file)
    assert main(["run", str(file), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == ({"y": {"type": "complex64", "shape": [2]}}, "")


def test_a_chip_without_a_host_says_so(tmp_path, capsys):
    """A convolution of three dimensions has no kernel, and Toy has no link to a processor."""
    file = tmp_path / "solid.onnx"
    kind = TensorProto.FLOAT
    weights = [("w", np.ones((2, 1, 3, 3, 3), np.float32))]
    solid = helper.make_node("Conv", ["x", "w"], ["y"], name="solid")
    onnx.save(model_of([solid], [("x", (1, 1, 4, 4, 4))], [("y", kind)], weights), file)
    assert main(["simulate", str(file), "--chip", "Toy"]) == 2
    line = capsys.readouterr().err
    assert "got 3 dimensions; rewrite the model; off the core: Toy: a link to the host" in line
    assert main(["migrate", str(file), "--chip", "Toy", "--json", "-"]) == 1
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["verdict"] == "host"


@pytest.mark.parametrize("without_runtime", [False, True])
def test_batch_norms_of_old_versions_do_not_learn(monkeypatch, without_runtime):
    """The reference evaluator mixes in the batch's statistics before version 14."""
    rng = np.random.default_rng(3)
    x = rng.normal(5, 2, (2, 3, 4, 4)).astype(np.float32)
    own = [(n, rng.uniform(1, 2, 3).astype(np.float32)) for n in ("scale", "bias", "mean", "var")]
    norm = helper.make_node("BatchNormalization", ["x", *(n for n, _ in own)], ["y"], momentum=0.5)
    model = model_of([norm], [("x", x.shape)], [("y", TensorProto.FLOAT)], own, opset=12)
    if without_runtime:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    scale, bias, mean, var = (array.reshape(3, 1, 1) for _, array in own)
    wanted = scale * (x - mean) / np.sqrt(var + 1e-5) + bias
    np.testing.assert_allclose(run_on_host(model, {"x": x})["y"], wanted, rtol=1e-5, atol=1e-5)
    assert model.graph.node[0].attribute[0].f == 0.5


def test_a_softmax_of_an_old_version_flattens():
    x = np.random.default_rng(4).standard_normal((2, 3, 5), np.float32)
    old = helper.make_node("Softmax", ["x"], ["y"], axis=1)
    model = model_of([old], [("x", x.shape)], [("y", TensorProto.FLOAT)], opset=12)
    found = run_on_host(model, {"x": x})["y"]
    np.testing.assert_allclose(found.sum(axis=(1, 2)), 1, rtol=1e-6)
