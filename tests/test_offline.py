"""Offline models: the same numbers as from ONNX, without it, and no damaged byte ever loads."""

import json
import zlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_lines import run
from hypothesis import given, settings, strategies as st

from ascend_lab.compiler import GraphBuilder, compile_graph, random_inputs, run_compiled, zoo
from ascend_lab.compiler.onnx import Imported, import_model, save_onnx
from ascend_lab.deploy.compress.config import parse_config
from ascend_lab.deploy.runtime import OfflineModel, compile_offline, load_offline, unpack_parts
from ascend_lab.deploy.runtime.container import Kind, checksum, pack_parts
from ascend_lab.deploy.runtime.kernel_data import kernel_data, kernel_of
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import Kernel

MODEL = "model.onnx"


def save(path: Path, batch: str | int = 1, columns: int = 9) -> None:
    """Write a network with convolution, pooling, softmax, an int64 cast and a constant output."""
    rng = np.random.default_rng(0)
    make = onnx.helper
    tensors = [
        onnx.numpy_helper.from_array(rng.standard_normal(shape, np.float32), name)
        for name, shape in (("w", (16, 3, 3, 3)), ("b", (16,)), ("v", (16, 100)), ("k", (70,)))
    ]
    nodes = [
        make.make_node("Conv", ["x", "w", "b"], ["c"], "conv", pads=[1, 1, 1, 1]),
        make.make_node("Relu", ["c"], ["r"], "relu"),
        make.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
        make.make_node("Flatten", ["p"], ["f"], "flat"),
        make.make_node("MatMul", ["f", "v"], ["h"], "product"),
        make.make_node("Softmax", ["h"], ["y"], "softmax"),
        make.make_node("ArgMax", ["y"], ["best"], "best"),
        make.make_node("Identity", ["k"], ["same"], "same"),
    ]
    x = make.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [batch, 3, 9, columns])
    outputs = [onnx.ValueInfoProto(name=name) for name in ("y", "best", "same")]
    graph = make.make_graph(nodes, "toy", [x], outputs, tensors)
    opsets = [make.make_opsetid("", 17)]
    onnx.save(make.make_model(graph, opset_imports=opsets, ir_version=8), path)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / MODEL)
    save(tmp_path / "open.onnx", "n")
    return tmp_path


def good(capsys, *words):
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    return out


def refused(capsys, *words):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "") and err.count("\n") == 1, err
    return err


def test_a_compiled_file_gives_the_numbers_of_the_model_without_it(capsys, folder):
    rng = np.random.default_rng(1)
    np.savez("x.npz", x=rng.standard_normal((1, 3, 9, 9), np.float32))
    ways = ([], ["--compiled", "--chip", "Ascend310P3"])
    for i, flags in enumerate(ways):
        good(capsys, "run", MODEL, "--inputs", "x.npz", "--outputs", f"a{i}.npz", *flags)
    online = good(capsys, "simulate", MODEL, "--chip", "Ascend310P3", "--json", "-")
    plain = good(capsys, "simulate", MODEL, "--chip", "Ascend310P3", "--trace", "a.json")
    good(capsys, "compile", MODEL, "--chip", "Ascend310P3", "--output", "m.alm")
    (folder / MODEL).unlink()
    for i, flags in enumerate(([], ["--compiled"])):
        good(capsys, "run", "m.alm", "--inputs", "x.npz", "--outputs", f"b{i}.npz", *flags)
        with np.load(f"a{i}.npz") as one, np.load(f"b{i}.npz") as two:
            assert set(one) == set(two) == {"y", "best", "same"}
            assert all(one[n].tobytes() == two[n].tobytes() for n in one)
            assert all(one[n].dtype == two[n].dtype for n in one)
    assert good(capsys, "simulate", "m.alm", "--json", "-") == online
    assert good(capsys, "simulate", "m.alm", "--trace", "b.json") == plain
    assert json.loads(Path("a.json").read_text()) == json.loads(Path("b.json").read_text())


def test_gears_share_the_weights_and_other_batches_are_refused_by_name(capsys):
    good(capsys, "compile", "open.onnx", "--chip", "Toy", "--output", "b.alm", "--batch", 3)
    good(capsys, "compile", "open.onnx", "--chip", "Toy", "--output", "one.alm",
         "--input_shape", "x:1,3,9,9")  # fmt: skip
    data = json.loads(good(
        capsys, "compile", "open.onnx", "--chip", "Toy", "--output", "m.alm", "--json", "-",
        "--input_shape", "x:-1,3,9,9", "--dynamic_batch_size", "1,2,4",
    ))  # fmt: skip
    assert [gear["batch"] for gear in data["gears"]] == [1, 2, 4]
    sizes = [load_offline(f).parts[1, 0].nbytes for f in ("one.alm", "m.alm")]
    assert sizes[0] == sizes[1]
    for batch in (1, 2, 4):
        times = json.loads(good(capsys, "simulate", "m.alm", "--batch", batch, "--json", "-"))
        online = good(capsys, "simulate", "open.onnx", "--chip", "Toy", "--batch", batch,
                      "--json", "-")  # fmt: skip
        assert times == json.loads(online)
    np.savez("x.npz", x=np.ones((3, 3, 9, 9), np.float32))
    error = refused(capsys, "run", "m.alm", "--inputs", "x.npz", "--outputs", "y.npz")
    assert "x:1,3,9,9; x:2,3,9,9; x:4,3,9,9" in error and "x:3,3,9,9" in error and "pad" in error
    assert "batch 3" in refused(capsys, "simulate", "m.alm", "--batch", 3)
    assert "(x); got z" in refused(capsys, "run", "m.alm", "--input-shape", "z:1")
    assert not Path("y.npz").exists()


@pytest.fixture(scope="module")
def small() -> bytes:
    """An offline model of a few kilobytes."""
    net = GraphBuilder("small", "fp16")
    x = net.input("x", (2, 16))
    net.output(net.relu(net.add(x, net.weight((16,)))))
    path = Path("small.onnx")
    save_onnx(net.build(), path)
    found = import_model(path)
    path.unlink()
    return bytes(compile_offline({None: found}, load_chip("Toy")))


@settings(max_examples=150)
@given(place=st.integers(0, 2**62), bits=st.integers(1, 255), more=st.integers(0, 3))
def test_no_damaged_byte_loads(small, place, bits, more):
    damaged = bytearray(small)
    for step in range(more + 1):
        damaged[(place + step * 509) % len(small)] ^= bits
    with pytest.raises(InputError, match=r"damaged|version"):
        unpack_parts(memoryview(bytes(damaged)), "m.alm")


@pytest.mark.parametrize("cut", [0, 7, 8, 63, 64, 500, -64, -1])
def test_no_part_of_a_file_loads(small, cut, folder, capsys):
    Path("m.alm").write_bytes(small[:cut])
    refused(capsys, "simulate", "m.alm")
    Path("m.alm").write_bytes(small + bytes(1 + abs(cut)))
    assert "damaged" in refused(capsys, "run", "m.alm")


def test_the_checksum_sees_words_that_change_places():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**63, 4096, dtype=np.uint64)
    found = {checksum(words.data)}
    for one, two in ((0, 1), (0, 512), (5, 3000), (511, 512)):
        other = words.copy()
        other[[one, two]] = other[[two, one]]
        found.add(checksum(other.data))
        other[one] ^= np.uint64(1 << 63)
        other[two] ^= np.uint64(1 << 63)
        found.add(checksum(other.data))
    assert len(found) == 9
    assert checksum(b"") != checksum(bytes(1)) != checksum(bytes(4096))


def test_other_versions_and_chips_are_refused_by_name(capsys, small, folder):
    other = bytearray(small)
    other[8] = 7
    Path("m.alm").write_bytes(other)
    assert "version 1; got version 7" in refused(capsys, "simulate", "m.alm")
    Path("m.alm").write_bytes(small)
    error = refused(capsys, "simulate", "m.alm", "--chip", "Ascend310")
    assert "chip Toy" in error and "Ascend310" in error
    assert "Ascend310" in refused(capsys, "run", "m.alm", "--compiled", "--chip", "Ascend310")
    good(capsys, "simulate", "m.alm", "--chip", "Toy")
    text = (Path(__file__).parent.parent / "ascend_lab/machine/chip/presets/Toy.toml").read_text()
    Path("fast.toml").write_text(text.replace("hz = { value = 1", "hz = { value = 9", 1))
    assert "numbers of Toy" in refused(capsys, "simulate", "m.alm", "--chip", "fast.toml")
    for flags in (["--dtype", "bf16"], ["--no-fusion"], ["--memory-limit", "5"]):
        assert flags[0] in refused(capsys, "simulate", "m.alm", *flags)


def test_a_file_for_some_of_a_chips_cores_keeps_to_them(capsys):
    good(capsys, "compile", MODEL, "--chip", "Ascend910A", "--output", "m.alm", "--aicore_num", 4)
    online = good(capsys, "simulate", MODEL, "--chip", "Ascend910A", "--aicore-num", 4)
    assert good(capsys, "simulate", "m.alm", "--chip", "Ascend910A") == online
    good(capsys, "run", "m.alm", "--compiled")
    assert load_offline("m.alm").chip.core_count == 4


def test_a_chip_of_ones_own_goes_with_its_file(capsys, folder):
    text = (Path(__file__).parent.parent / "ascend_lab/machine/chip/presets/Toy.toml").read_text()
    Path("my.toml").write_text(text.replace('name = "Toy"', 'name = "Mine"', 1))
    good(capsys, "compile", MODEL, "--chip", "my.toml", "--output", "m.alm")
    assert '"chip": "Mine"' in good(capsys, "simulate", "m.alm", "--json", "-")
    assert "Mine" in refused(capsys, "run", "m.alm", "--compiled")
    good(capsys, "run", "m.alm", "--compiled", "--chip", "my.toml")


AIPP = """aipp_op { aipp_mode: static input_format: RGB888_U8
  mean_chn_0: 100 mean_chn_1: 110 mean_chn_2: 120
  var_reci_chn_0: 0.25 var_reci_chn_1: 0.5 var_reci_chn_2: 0.125 }"""


def test_frames_of_a_camera_go_in_where_aipp_is_inserted(capsys, folder):
    Path("a.cfg").write_text(AIPP)
    save(Path(MODEL), columns=12)  # small channels need columns in fours
    good(capsys, "compile", MODEL, "--chip", "Ascend310", "--output", "m.alm",
         "--insert_op_conf", "a.cfg")  # fmt: skip
    pixels = np.random.default_rng(0).integers(0, 256, (1, 9, 12, 3)).astype(np.uint8)
    image = (pixels - np.array([100.0, 110, 120])) * [0.25, 0.5, 0.125]
    np.savez("frames.npz", x=pixels.reshape(1, -1))
    np.savez("image.npz", x=image.transpose(0, 3, 1, 2).astype(np.float32))
    good(capsys, "run", "m.alm", "--inputs", "frames.npz", "--outputs", "a.npz")
    good(capsys, "run", MODEL, "--inputs", "image.npz", "--outputs", "b.npz")
    with np.load("a.npz") as one, np.load("b.npz") as two:
        np.testing.assert_allclose(one["y"], two["y"], rtol=1e-5)
    model = load_offline("m.alm")
    assert model.gears[0].times["tasks"][0][1] == "AIPP" == model.kernels[0].engine
    flags = ("--insert_op_conf", "a.cfg", "--enable_small_channel", "1")
    good(capsys, "compile", MODEL, "--chip", "Ascend310", "--output", "s.alm", *flags)
    for file in ("m.alm", "s.alm"):
        good(capsys, "run", file, "--compiled", "--inputs", "frames.npz", "--outputs", "c.npz")
        with np.load("a.npz") as one, np.load("c.npz") as two:
            np.testing.assert_allclose(one["y"], two["y"], atol=0.02)


def test_a_record_file_puts_layers_in_eight_bits(capsys, folder):
    x = np.random.default_rng(0).standard_normal((4, 3, 9, 9), np.float32)
    np.savez("c.npz", x=x)
    np.savez("x.npz", x=x[:1])
    good(capsys, "quantize", MODEL, "--calibration", "c.npz", "--records", "r.txt", "--output",
         "q.onnx")  # fmt: skip
    good(capsys, "compile", MODEL, "--chip", "Ascend310", "--compression", "r.txt", "--output",
         "q.alm")  # fmt: skip
    for model, file in (("q.alm", "a.npz"), ("q.onnx", "b.npz"), (MODEL, "c.npz")):
        good(capsys, "run", model, "--inputs", "x.npz", "--outputs", file)
    with np.load("a.npz") as one, np.load("b.npz") as two, np.load("c.npz") as three:
        assert one["y"].tobytes() == two["y"].tobytes() != three["y"].tobytes()
        assert one["best"].dtype == three["best"].dtype == np.int64


GEARED = ["compile", "open.onnx", "--chip", "Toy", "--output", "m.alm"]
GEARED += ["--dynamic_batch_size", "1,2"]
BAD = (
    (["compile", MODEL, "--chip", "Toy"], "--output"),
    (
        [*GEARED, "--batch", "3"],
        "leave one out",
    ),
    (["compile", MODEL, "--chip", "Toi", "--output", "m.alm"], "Toy"),
    (["compile", "no.onnx", "--chip", "Toy", "--output", "m.alm"], "no.onnx"),
    (["compile", MODEL, "--chip", "Toy", "--output", "nowhere/m.alm"], "nowhere"),
    (["compile", MODEL, "--chip", "Toy", "--output", MODEL], "another file"),
    (["compile", MODEL, "--chip", "Toy", "--output", "."], "regular file"),
    (["compile", MODEL, "--chip", "Toy", "--output", "m.alm", "--framework", "3"], "TensorFlow"),
    (["compile", MODEL, "--chip", "Toy", "--output", "m.alm", "--mode", "1"], "--mode"),
    (["compile", MODEL, "--chip", "Toy", "--output", "m.alm", "--precision_mode", "force_fp32"],
     "--precision_mode"),
    (["compile", MODEL, "--chip", "Toy", "--output", "m.alm", "--dynamic_dims", "1;2"],
     "--dynamic_dims"),
    (["compile", MODEL, "--chip", "Toy", "--output", "m.alm", "--dynamic_batch_size", "4"],
     "2 to 100"),
    (["compile", MODEL, "--chip", "Toy", "--output", "m.alm", "--dynamic_batch_size", "1,4096"],
     "2048"),
    (["compile", "open.onnx", "--chip", "Toy", "--output", "m.alm"], "x"),
    (["compile", "open.onnx", "--chip", "Toy", "--output", "m.alm", "--input_shape",
      "x:-1,3,9,9"], "--dynamic_batch_size"),
    (["compile", MODEL, "--chip", "Toy", "--output", "m.alm", "--input_shape", "z:1,3,9,9"], "z"),
    (["compile", MODEL, "--chip", "Toy", "--output", "m.alm", "--aicore_num", "9"], "--aicore_num"),
    (["compile", MODEL, "--chip", "Toy", "--output", "m.alm", "--fusion_switch_file", MODEL], "f"),
    (["compile", MODEL, "--chip", "Toy", "--output", "m.alm", "--insert_op_conf", MODEL], ""),
    (["compile", MODEL, "--chip", "Toy", "--output", "m.alm", "--enable_small_channel", "1"],
     "--insert_op_conf"),
    (["compile", MODEL, "--chip", "Toy", "--output", "m.alm", "--compression", MODEL], ""),
    (["simulate", MODEL], "--chip"),
    (["run", MODEL, "--seed=-5"], "--seed of at least 0"),
)  # fmt: skip


@pytest.mark.parametrize(("words", "named"), BAD)
def test_bad_input_is_one_line(capsys, folder, words, named):
    before = (folder / MODEL).read_bytes()
    assert named in refused(capsys, *words)
    assert (folder / MODEL).read_bytes() == before and not Path("m.alm").exists()


def test_the_precheck_names_every_node_at_fault(capsys, folder):
    good(capsys, "compile", MODEL, "--chip", "Toy", "--output", "m.alm", "--check_report", "r.json")
    report = json.loads(Path("r.json").read_text())
    counts = [report[key] for key in ("result", "total", "pass", "fail")]
    assert counts == ["success", 8, 8, 0] and Path("m.alm").exists()
    assert checked(capsys, folder, {0: [1, 1]}) == {"conv": [2]}  # what only importing finds
    assert checked(capsys, folder, {1: "Relux", 5: "axes"}) == {"relu": [1], "softmax": [2]}
    save(folder / MODEL)
    model = onnx.load(MODEL)
    model.graph.node[0].input[0] = "y"
    onnx.save(model, MODEL)
    refused(capsys, "compile", MODEL, "--chip", "Toy", "--mode", "3")


def checked(capsys, folder, faults):
    """Return the codes of the nodes at fault in a model with faults."""
    save(folder / MODEL)
    model = onnx.load(MODEL)
    for place, fault in faults.items():
        node = model.graph.node[place]
        if fault == "axes":
            node.attribute.append(onnx.helper.make_attribute("axes", [1]))
        elif isinstance(fault, str):
            node.op_type = fault
        else:
            node.attribute[0].ints[:] = fault
    onnx.save(model, MODEL)
    code, out, _ = run(capsys, "compile", MODEL, "--chip", "Toy", "--mode", "3")
    assert code == 1 and f"{len(faults)} of 8" in out
    report = json.loads(Path("check_result.json").read_text())
    assert report["fail"] == len(faults) and report["result"] == "failed"
    return {row["name"]: [c["code"] for c in row["cause"]] for row in report["op"] if row["cause"]}


@pytest.mark.parametrize("name", ["resnet18", "squeezenet", "bert_base"])
def test_kernels_of_networks_survive_as_text(name):
    compiled = compile_graph(zoo.build(name), "Ascend910A")
    kernels: list[Kernel] = [t.lowered.kernel for t in compiled.tasks if t.lowered is not None]
    for kernel in kernels[:40]:
        assert kernel_of(json.loads(json.dumps(kernel_data(kernel)))) == kernel


@pytest.mark.parametrize("target", ["Ascend310P3", "Ascend910B2"])
def test_every_buffer_keeps_its_own_form_of_a_weight(target):
    """A transposed convolution reads the weights of each phase from a buffer of its own."""
    net = GraphBuilder("up", "fp16")
    x = net.input("x", (1, 32, 9, 7))
    net.output(net.conv_transpose2d(x, net.weight((32, 16, 3, 3)), stride=2, pad=1))
    graph = net.build()
    chip = load_chip(target)
    (kernel,) = (
        t.lowered.kernel for t in compile_graph(graph, chip).tasks if t.op == "conv_transpose2d"
    )
    assert sum("." in buffer.name for buffer in kernel.tensors) > 1
    gear = OfflineModel(
        "m", unpack_parts(compile_offline({None: Imported(graph, {"x": "float16"}, {})}, chip), "m")
    ).gears[0]
    inputs = random_inputs(graph)
    wanted = run_compiled(graph, inputs, chip)
    found = gear.run(inputs, kernels=True)
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)


def test_operators_of_the_ai_cpu_are_kept_apart():
    net = GraphBuilder("whole", "int32")
    x = net.input("x", (2, 70))
    y = net.input("y", (2, 70))
    weight = net.constant(np.arange(70, dtype=np.int32), name="w")
    net.output(net.less(x, weight), net.greater(y, weight), net.greater(x, y), net.add(x, y))
    chip = load_chip("Ascend310")
    kinds = {"x": "int32", "y": "int32"}
    gears = {None: Imported(net.build(), kinds, {})}
    data = compile_offline(gears, chip)
    gear = OfflineModel("m", unpack_parts(data, "m")).gears[0]
    engines = [row[1] for row in gear.times["tasks"]]
    assert engines.count("AI CPU") == 3 and engines.count("AI Core") == 1
    made = compile_graph(gears[None].graph, chip).tasks
    assert set(gear.model.kernels) == {task.lowered.kernel for task in made if task.lowered}
    assert len(gear.model.kernels) == 4
    rng = np.random.default_rng(0)
    inputs = {name: rng.integers(0, 70, (2, 70)).astype(np.int32) for name in "xy"}
    wanted = run_compiled(gears[None].graph, inputs, chip)
    found = gear.run(inputs, kernels=True)
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)


def test_command_lines_say_what_is_amiss(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty.alm").touch()
    assert "empty file" in refused(capsys, "simulate", "empty.alm")
    assert "No such file" in refused(capsys, "simulate", "gone.alm")
    compiling = ("compile", "empty.alm", "--chip", "Toy", "--output", "m.alm")
    assert "compiled already" in refused(capsys, *compiling)
    Path("x.npy").write_bytes(b"12345")
    said = refused(capsys, "calibrate", "x.npy", "--method", "minmax")
    assert "pickle" not in said and "numpy.save" in said
    with pytest.raises(InputError, match=r"f\.cfg: line 1: batch_num"):
        parse_config("batch_num: two", where="f.cfg")


# -- forged files: their checksums are right ------------------------------------------------------
JUNK = (None, True, -1, 2**63, 10**30, 1.5, "", "\ud800", "fp16", "/dev/zero", [], {}, [[]], [0])


def resealed(change):
    """Return the file with one partition's plain data changed, every checksum right."""
    parts = []
    for (kind, gear), body in unpack_parts(memoryview(Path("m.alm").read_bytes()), "m").items():
        raw = bytes(body)
        if kind == Kind.KERNELS:
            raw = change(kind, raw)
        elif kind != Kind.WEIGHTS:
            raw = json.dumps(change(kind, json.loads(raw))).encode()
        parts.append((kind, gear, [np.frombuffer(raw, np.uint8)]))
    return bytes(pack_parts(parts))


def places(data, path=()):
    """Yield the path of every value in plain data."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def with_junk(data, rng):
    """Return plain data with junk in one place."""
    found = list(places(data))
    *path, last = found[rng.integers(len(found))]
    inner = data
    for key in path:
        inner = inner[key]
    inner[last] = JUNK[rng.integers(len(JUNK))]
    return data


def answered(capsys, *words):
    """Run the compiled model in all ways; each ends well, or in one line with exit code 2."""
    for rest in (("run",), ("run", "--compiled"), ("simulate",)):
        code, _, err = run(capsys, rest[0], "forged.alm", *rest[1:], *words)
        assert code in (0, 2)
        assert err.count("\n") == (code == 2)


def test_forged_files_end_in_a_line(capsys):
    good(capsys, "compile", MODEL, "--chip", "Ascend310", "--output", "m.alm")
    rng = np.random.default_rng(0)
    for kind in (Kind.META, Kind.GRAPH, Kind.TASKS, Kind.MEMORY):
        for _ in range(12):
            forged = resealed(lambda k, data: with_junk(data, rng) if k == kind else data)  # noqa: B023
            Path("forged.alm").write_bytes(forged)
            answered(capsys)


@pytest.mark.parametrize(
    "raw",
    [zlib.compress(bytes(2**28)), zlib.compress(b"[" * 10**6), b"", zlib.compress(b"[{}]")],
    ids=["bomb", "deep", "empty", "other"],
)
def test_forged_kernels_are_not_unpacked_without_a_limit(capsys, raw):
    good(capsys, "compile", MODEL, "--chip", "Ascend310", "--output", "m.alm")
    Path("forged.alm").write_bytes(
        resealed(lambda kind, data: raw if kind == Kind.KERNELS else data)
    )
    code, _, err = run(capsys, "run", "forged.alm", "--compiled")
    assert code == 2
    assert err.count("\n") == 1
    answered(capsys)
