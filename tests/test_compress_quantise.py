"""Quantised graphs: ready, fake-quantised as ONNX Runtime computes them, configured, recorded."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from command_lines import refused, run, run_json

from ascend_lab.compiler import GraphBuilder, evaluate
from ascend_lab.compiler.evaluate import evaluate_all
from ascend_lab.compiler.onnx import export_onnx, save_onnx
from ascend_lab.deploy import compress as c
from ascend_lab.deploy.compress.adaptive_rounding import gate
from ascend_lab.errors import AscendLabError, InputError, UnsupportedError

RNG = np.random.default_rng(5)
ROWS = {"x": RNG.normal(size=(16, 3, 10, 10)).astype(np.float32)}


def network(batch=4):
    """A convolution with a norm, a depthwise one, a transposed one, products of both kinds."""
    rng = np.random.default_rng(0)

    def vector(size, low=-1.0, high=1.0):
        return net.constant(rng.uniform(low, high, size).astype(np.float32))

    net = GraphBuilder("net")
    x = net.input("x", (batch, 3, 10, 10))
    y = net.conv2d(x, net.weight((16, 3, 3, 3)), pad=1, name="first")
    y = net.batch_norm(y, vector(16, 0.5, 2), vector(16), vector(16), vector(16, 0.5, 2))
    y = net.relu(y, name="act")
    y = net.relu(net.depthwise_conv2d(y, net.weight((16, 1, 3, 3)), pad=1, name="deep"))
    y = net.conv_transpose2d(y, net.weight((16, 4, 2, 2)), stride=2, name="up")
    y = net.reshape(y, shape=(batch, 1600))
    y = net.relu(net.matmul(y, net.weight((1600, 12)), name="flat"))
    net.output(net.gemm(y, net.weight((5, 12)), vector(5), trans_b=True, name="last"))
    return net.build()


def onnx_runtime(model, feed, *, plain=False):
    """Return what ONNX Runtime computes: by its fused int8 kernels, or node by node as written."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if plain:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
    else:
        options.add_session_config_entry("session.x64quantprecision", "1")
    data = model if isinstance(model, bytes) else model.SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run(None, feed)[0]


PLANS = {
    "asymmetric": c.LayerPlan("ifmr"),
    "symmetric": c.LayerPlan("kl"),
    "per tensor": c.LayerPlan("minmax", channel_wise=False),
    "sixteen bits": c.LayerPlan("minmax", bits=16),
    "four bit weights": c.LayerPlan("minmax", weight_bits=4),
    "balanced": c.LayerPlan("minmax", strength=0.5),
}


@pytest.mark.parametrize("name", sorted(PLANS))
def test_onnx_runtime_computes_the_fake_quantised_values(name):
    """Its fused int8 kernels too: all levels of optimisation are on.

    Without VNNI they limit sums of two products to int16, unless they are asked for precision.
    """
    graph = network()
    feeds = c.batches_of(graph, ROWS)
    found = c.quantise_graph(graph, feeds, c.Plan(PLANS[name]))
    fake = c.fake_quantised(found)
    model = c.qdq_model(found)
    onnx.checker.check_model(model, full_check=True)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("QuantizeLinear") == 5
    assert "BatchNormalization" not in kinds
    for feed in feeds:
        (mine,) = evaluate(fake, feed).values()
        theirs = onnx_runtime(model, feed)
        close = 3e-7 if PLANS[name].bits == 8 else 2e-5  # sixteen bits are not summed exactly
        assert np.abs(mine - theirs).max() <= close * np.abs(mine).max()
    error = c.output_error(graph, fake, feeds)
    assert error < (0.3 if PLANS[name].weight_bits == 4 else 0.03)


def test_every_tensor_between_layers_equals_the_runtimes_to_one_step():
    graph = network()
    feed = c.batches_of(graph, ROWS)[0]
    found = c.quantise_graph(graph, [feed], c.Plan(c.LayerPlan("ifmr")))
    fake = evaluate_all(c.fake_quantised(found), feed)
    model = c.qdq_model(found)
    for layer in found.layers:
        source = found.graph.node(layer.name).inputs[0]
        name = f"{source}_dequantised"
        shown = onnx.ModelProto.FromString(model.SerializeToString())
        shown.graph.output.insert(0, onnx.ValueInfoProto(name=name))
        off = np.abs(onnx_runtime(shown, feed) - fake[f"{source}_fake"])
        assert off.max() <= layer.scale * 1.001
        assert np.mean(off > layer.scale / 2) < 1e-3


def test_weights_lie_in_the_file_as_bytes():
    graph = network()
    found = c.quantise_graph(graph, c.batches_of(graph, ROWS))
    model = c.qdq_model(found)
    kinds = {t.name: t.data_type for t in model.graph.initializer}
    whole = [n for n, kind in kinds.items() if kind == onnx.TensorProto.INT8 and "/whole" in n]
    assert len(whole) == 5
    assert sum(kind == onnx.TensorProto.INT32 for kind in kinds.values()) >= 2, "biases"
    assert model.ByteSize() < export_onnx(found.graph).ByteSize() / 2.5


def test_balance_helps_where_one_channel_dominates():
    rng = np.random.default_rng(3)
    net = GraphBuilder("product")
    x = net.input("x", (32, 16))
    net.output(net.matmul(x, net.constant(rng.normal(size=(16, 8)).astype(np.float32))))
    graph = net.build()
    rows = rng.normal(size=(64, 16)).astype(np.float32)
    rows[:, 3] *= 80
    feeds = c.batches_of(graph, {"x": rows})
    noise = []
    for strength in (None, 0.5):
        found = c.quantise_graph(graph, feeds, c.Plan(c.LayerPlan("minmax", strength=strength)))
        wanted, fake = (evaluate(g, feeds[0]) for g in (graph, c.fake_quantised(found)))
        others = [w - f for w, f in zip(wanted.values(), fake.values(), strict=True)]
        noise.append(float(np.mean(np.square(others))))
    assert noise[1] < noise[0] / 4
    assert len(found.layers[0].balance) == 16


def test_balance_factors_are_those_of_the_original():
    """Rows 2 and 3 are zero in one of the two: golden values of AMCT's code."""
    x = np.cos(np.arange(48)).reshape(4, 12) * np.array([1, 10, 0, 5])[:, None]
    w = np.sin(np.arange(24)).reshape(4, 6)
    w[3] = 0
    found = c.balance_factors(np.abs(x).max(axis=1), np.abs(w).max(axis=1))
    assert found == pytest.approx([1.021193, 3.162231, 3.192183, 1.580930], abs=2e-6)
    assert c.balance_factors(np.zeros(2), np.zeros(2)).tolist() == [1, 1]
    with pytest.raises(InputError, match="strength"):
        c.balance_factors(x[:, 0], w[:, 0], 0.1)


def test_learned_rounding_brings_a_layer_closer_than_rounding_to_the_nearest():
    rng = np.random.default_rng(4)
    net = GraphBuilder("product")
    x = net.input("x", (64, 12))
    net.output(net.matmul(x, net.constant(rng.normal(size=(12, 6)).astype(np.float32))))
    graph = net.build()
    rows = (rng.normal(size=(64, 3)) @ rng.normal(size=(3, 12))).astype(np.float32)
    feeds = c.batches_of(graph, {"x": rows})
    error = {}
    for steps in (1, 600):
        how = c.Rounding(steps, lr=0.02)
        found = c.quantise_graph(
            graph, feeds, c.Plan(c.LayerPlan("minmax", weight_bits=3, rounding=how))
        )
        error[steps] = c.output_error(graph, c.fake_quantised(found), feeds)
        grid = found.graph.constants[found.graph.nodes[0].inputs[1]].array()
        steps_of = grid / np.float32(found.layers[0].weight_scales)
        assert np.abs(steps_of - np.rint(steps_of)).max() < 1e-4
    assert error[600] < 0.7 * error[1]
    h, slope = gate(np.array([-9.0, 0.0, 9.0]))
    assert h.tolist() == [0, 0.5, 1]
    assert slope.tolist() == [0, 0.3, 0]


# -- plans, files ---------------------------------------------------------------------------------
CONFIG = """
# of all layers
batch_num: 2
activation_offset: false
skip_layers: "up"
common_config {
  arq_quantize { channel_wise: true quant_bits: 7 }
  ifmr_quantize { search_range_start: 0.8 search_range_end: 1.2 search_step: 0.02 }
}
override_layer_types { layer_type: "Gemm" calibration_config {
  hfmg_quantize { num_of_bins: 1024 asymmetric: true } } }
override_layer_configs { layer_name: "deep" calibration_config {
  arq_quantize { channel_wise: false } ifmr_quantize { dst_type: INT16 }
  dmq_balancer { migration_strength: 0.4 } } }
"""


def test_a_configuration_file_says_what_happens_to_each_layer():
    plan = c.parse_config(CONFIG)
    assert plan.batches == 2 and plan.fold
    assert plan.common.options["ratios"] == pytest.approx(np.arange(0.8, 1.199, 0.02))
    graph = network()
    found = c.quantise_graph(graph, c.batches_of(graph, ROWS), plan)
    by_name = {layer.name: layer for layer in found.layers}
    assert list(by_name) == ["first", "deep", "flat", "last"]
    assert [layer.bits for layer in found.layers] == [8, 16, 8, 8]
    assert [layer.weight_bits for layer in found.layers] == [7, 8, 7, 7]
    assert [layer.offset == 0 for layer in found.layers] == [True, True, False, False]
    assert len(by_name["deep"].weight_scales) == 1
    assert plan.layers["deep"].strength == 0.4


def test_layers_stay_out_of_it_by_type_and_norms_by_name():
    graph = network()
    feeds = c.batches_of(graph, ROWS)
    text = 'skip_layer_types: ["Conv2d", "ConvTranspose2d"] skip_fusion_layers: "first"'
    found = c.quantise_graph(graph, feeds, c.parse_config(text))
    assert [layer.name for layer in found.layers] == ["flat", "last"]
    assert any(node.op == "batch_norm" for node in found.graph.nodes)
    found = c.quantise_graph(graph, feeds, c.parse_config("do_fusion: false"))
    assert any(node.op == "batch_norm" for node in found.graph.nodes)
    assert c.output_error(graph, found.graph, feeds) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch: 1", "batch"),
        ("batch_num: 0", "batch_num"),
        ("batch_num: 1 batch_num: 2", "batch_num once"),
        ("batch_num: many", "batch_num"),
        ("batch_num 1", "colon"),
        ("do_fusion: 1", "do_fusion"),
        ("skip_layers: fc", "skip_layers"),
        ("common_config { ifmr_quantize { } hfmg_quantize { } }", "both"),
        ("common_config { arq_quantize { } ada_quantize { } }", "both"),
        ("common_config { hfmg_quantize { num_of_bins: 1000 } }", "num_of_bins"),
        ("common_config { arq_quantize { quant_bits: 9 } }", "quant_bits"),
        ("common_config { ifmr_quantize { search_step: 0 } }", "search_step"),
        ("common_config { ifmr_quantize { max_percentile: 1.5 } }", "max_percentile"),
        ("common_config { ifmr_quantize { dst_type: INT4 } }", "dst_type"),
        ("common_config { dmq_balancer { migration_strength: 0.9 } }", "migration_strength"),
        ("common_config { nuq_quantize { } }", "not public"),
        ("common_config {", "the end"),
        ("}", "a key"),
        ("override_layer_types { calibration_config { } }", "layer_type"),
        ('skip_layers: "a', "text"),
    ],
)
def test_a_configuration_that_means_nothing_is_refused_by_its_key(text, words):
    with pytest.raises(AscendLabError, match=words) as caught:
        c.parse_config(text, where="my.cfg")
    assert str(caught.value).startswith("my.cfg: ")


@pytest.mark.parametrize(
    "text",
    ['skip_layers: "none"', 'skip_layer_types: "Conv9"', "batch_num: 5",
     'override_layer_configs { layer_name: "x" calibration_config { } }',
     'skip_layer_types: ["Conv", "Linear", "ConvTranspose"]'],
)  # fmt: skip
def test_a_plan_that_does_not_fit_the_graph_is_refused(text):
    graph = network()
    with pytest.raises(InputError):
        c.quantise_graph(graph, c.batches_of(graph, ROWS), c.parse_config(text))


def test_records_are_written_and_read_back(tmp_path):
    graph = network()
    feeds = c.batches_of(graph, ROWS)
    found = c.quantise_graph(graph, feeds, c.Plan(c.LayerPlan(strength=0.5)))
    file = tmp_path / "record.txt"
    file.write_text(c.records_text(found.layers))
    layers = c.read_records(file)
    assert [layer.name for layer in layers] == [layer.name for layer in found.layers]
    again = c.with_records(graph, layers)
    one, two = (evaluate(c.fake_quantised(each), feeds[0]) for each in (found, again))
    for name, value in one.items():
        assert np.allclose(two[name], value, atol=2e-3)


def test_a_published_record_is_read():
    text = """record {
      key: "conv1"
      value { scale_d: 0.00392156886 offset_d: -128 scale_w: [0.1, 0.25] offset_w: 0
              skip_fusion: true dst_type: INT8 } }"""
    (layer,) = c.parse_records(text)
    assert layer == c.LayerScales("conv1", 0.00392156886, -128, (0.1, 0.25))
    assert c.parse_records(c.records_text([layer])) == (layer,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('record { key: "a" value { scale_d: 1 } }', "scale_w"),
        ('record { key: "a" value { scale_d: 0 scale_w: 1 } }', "above 0"),
        ('record { key: "a" value { scale_d: nan scale_w: 1 } }', "scale_d"),
        ('record { key: "a" value { scale_d: 1 scale_w: 1 offset_d: 200 } }', "offset"),
        ('record { key: "a" value { scale_d: 1 scale_w: 1 offset_w: 3 } }', "symmetric"),
        ('record { key: "a" value { scale_h: 1 } }', "recurrent"),
        ('record { value { scale_d: 1 scale_w: 1 } }', "key"),
        ('record { key: "a" value { scale_d: 1 scale_w: 1 } } ' * 2, "twice"),
        ("prune_record { }", "pruning"),
        ("record " * 3, "record"),
        ("\x00", "protobuf"),
        ("record {" * 40, "key"),
    ],
)  # fmt: skip
def test_records_that_cannot_be_are_refused(text, words):
    with pytest.raises(AscendLabError, match=words):
        c.parse_records(text)


def test_what_a_graph_has_not_is_refused():
    graph = network()
    feeds = c.batches_of(graph, ROWS)
    with pytest.raises(InputError, match="layer"):
        c.fake_quantised(c.Quantised(graph, (c.LayerScales("act", 1.0, 0, (1.0,)),)))
    with pytest.raises(InputError, match="one a channel"):
        c.fake_quantised(c.Quantised(graph, (c.LayerScales("first", 1.0, 0, (1.0, 2.0)),)))
    with pytest.raises(UnsupportedError, match="8 or 16"):
        c.qdq_model(c.quantise_graph(graph, feeds, c.Plan(c.LayerPlan(bits=4))))
    for arrays in (
        {}, {"y": ROWS["x"]}, {"x": ROWS["x"][:3]}, {"x": ROWS["x"][..., :4]},
        {"x": np.float32(1)}, {"x": ROWS["x"], "y": ROWS["x"]},
    ):  # fmt: skip
        with pytest.raises(InputError):
            c.batches_of(graph, arrays)
    bad = ROWS["x"].copy()
    bad[0, 0, 0, 0] = np.nan
    with pytest.raises(InputError, match="finite"):
        c.quantise_graph(graph, c.batches_of(graph, {"x": bad}))
    assert len(c.layers_of(graph)) == 5


# -- command --------------------------------------------------------------------------------------
@pytest.fixture
def files(tmp_path):
    save_onnx(network(), tmp_path / "net.onnx")
    np.savez(tmp_path / "x.npz", **ROWS)
    return tmp_path


def test_the_command_writes_a_model_that_runs(files, capsys):
    words = ("quantize", files / "net.onnx", "--calibration", files / "x.npz")
    out_file = files / "q.onnx"
    records = files / "r.txt"
    more = ("--method", "kl", "--output", out_file, "--records", records)
    data = run_json(capsys, *words, *more)
    assert [row["op"] for row in data["layers"]] == ["conv2d"] * 2 + [
        "conv_transpose2d", "matmul", "gemm"]  # fmt: skip
    assert data["size_bytes"] == out_file.stat().st_size < data["float_bytes"]
    assert 0 < data["output_error"] < 0.1
    assert [layer.name for layer in c.read_records(records)] == [r["name"] for r in data["layers"]]
    feed = {"x": ROWS["x"][:4]}
    wanted = onnx_runtime((files / "net.onnx").read_bytes(), feed)
    off = onnx_runtime(out_file.read_bytes(), feed) - wanted
    assert np.linalg.norm(off) < 0.1 * np.linalg.norm(wanted)
    code, out, err = run(capsys, *words, "--output", out_file)
    assert (code, err) == (0, "") and "off by" in out


def test_a_model_of_any_batch_stays_one(files, capsys):
    model = onnx.load(files / "net.onnx")
    for entry in (*model.graph.input, *model.graph.output):
        entry.type.tensor_type.shape.dim[0].dim_param = "n"
    del model.graph.value_info[:]
    for tensor in model.graph.initializer:
        if tensor.name == "int64_constant":
            shape = onnx.numpy_helper.to_array(tensor).copy()
            shape[0] = -1
            tensor.CopyFrom(onnx.numpy_helper.from_array(shape, tensor.name))
    onnx.save(model, files / "open.onnx")
    words = ("quantize", files / "open.onnx", "--calibration", files / "x.npz")
    assert run_json(capsys, *words, "--output", files / "q.onnx")["batch"] == "any"
    model = (files / "q.onnx").read_bytes()
    assert [len(onnx_runtime(model, {"x": ROWS["x"][:rows]})) for rows in (1, 7)] == [1, 7]


def test_the_command_refuses_in_one_line_and_leaves_files_alone(files, capsys):
    net = files / "net.onnx"
    samples = files / "x.npz"
    target = files / "q.onnx"
    target.write_bytes(b"mine")
    (files / "bad.cfg").write_text("batch_num: 0")
    (files / "ifmr.cfg").write_text("common_config { ifmr_quantize { } }")
    np.savez(files / "nan.npz", x=np.full((4, 3, 10, 10), np.nan, np.float32))
    np.savez(files / "few.npz", x=ROWS["x"][:2])
    np.savez(files / "other.npz", y=ROWS["x"])
    usual = ("--calibration", samples, "--output", target)
    for words in (
        (net, "--output", target), (net, "--calibration", samples), (files / "none.onnx", *usual),
        (files, *usual), (samples, *usual), (net, *usual, "--method", "mean"),
        (net, *usual, "--config", files / "bad.cfg"), (net, *usual, "--config", files / "none"),
        (net, *usual, "--config", files / "ifmr.cfg", "--method", "kl"),
        (net, *usual, "--config", net),
        *((net, "--calibration", files / f"{name}.npz", "--output", target)
          for name in ("nan", "few", "other", "none")),
        (net, "--calibration", samples, "--output", net),
        (net, "--calibration", samples, "--output", files),
        (net, "--calibration", samples, "--output", "-"),
        (net, *usual, "--records", target), ("zoo:none", *usual),
    ):  # fmt: skip
        refused(capsys, "quantize", *words)
        assert target.read_bytes() == b"mine"


def test_the_file_goes_on_to_the_chip(files, capsys):
    """Imported again it computes the same, and compiled its layers run on whole numbers."""
    words = ("quantize", files / "net.onnx", "--calibration", files / "x.npz")
    code, _, err = run(capsys, *words, "--output", files / "q.onnx")
    assert (code, err) == (0, "")
    feed = {"x": ROWS["x"][:4]}
    np.savez(files / "feed.npz", **feed)
    words = ("run", files / "q.onnx", "--inputs", files / "feed.npz", "--outputs")
    wanted = onnx_runtime((files / "q.onnx").read_bytes(), feed)
    for more, close in (((), 1e-6), (("--compiled",), 0.05)):
        code, _, err = run(capsys, *words, files / "y.npz", *more)
        assert (code, err) == (0, "")
        (found,) = np.load(files / "y.npz").values()
        assert np.abs(found - wanted).max() <= close * np.abs(wanted).max()
    code, out, err = run(capsys, "simulate", files / "q.onnx", "--chip", "Ascend310")
    assert (code, err) == (0, "")
    assert out.count("requantise)") + out.count("+requantise") >= 3
