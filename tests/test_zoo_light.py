"""The light networks: parameters and multiply-accumulates to the digit, values, names, a time."""

import numpy as np
import pytest
from onnx_models import run_onnx

from ascend_lab.compiler import (
    compile_graph,
    evaluate,
    random_inputs,
    run_compiled,
    simulate_graph,
    zoo,
)
from ascend_lab.compiler.onnx.export import export_onnx
from ascend_lab.compiler.zoo import why, why_lines
from ascend_lab.compiler.zoo.blocks import Net
from ascend_lab.errors import InputError

# Counted on the definitions that `source` names (torchvision 0.28, timm 1.0.31,
# megvii-model/ShuffleNet-Series, AAboys/MobileFormer): all trainable tensors, 1000 classes; MACs of
# convolutions, linear layers and the products of attention.
COUNTS = """
mobilenet_v1             1.0   224    4231976   568740352
mobilenet_v1             1.0   192    4231976   418121728
mobilenet_v1             0.75  224    2585560   325400448
mobilenet_v1             0.25  224     470072    41030272
mobilenet_v2             1.0   160    3504872   154083200
mobilenet_v2             0.75  224    2636424   209069792
mobilenet_v2             0.35  224    1677128    59285808
mobilenet_v2             1.3   224    5386792   509374560
mobilenet_v3_large       1.0   224    5483032   216589760
mobilenet_v3_large       0.75  224    3993528   154560624
mobilenet_v3_small       1.0   224    2542856    56510400
mobilenet_v4_conv_small  1.0   224    3774024   186005568
mobilenet_v4_conv_medium 1.0   224    9715512   827649984
mobilenet_v4_conv_medium 1.0   256    9715512  1080244224
mobilenet_v4_conv_large  1.0   256   32590864  2835269632
mobilenet_v4_hybrid_large 1.0  384   37764624  7711877120
shufflenet_v2            -     224    2278604   144907992
shufflenet_v2_x1_0       -     224    2278604   144907992
shufflenet_v2_x2_0       -     224    7393996   583253464
shufflenet_v1_g3_x0_5    -     224     717324    37589856
shufflenet_v1_g3_x1_0    -     224    1864728   137460672
shufflenet_v1_g3_x2_0    -     224    5449776   524045184
shufflenet_v1_g8_x1_0    -     224    2433768   138365952
shufflenet_v1_g8_x1_5    -     224    4268952   290188800
squeezenet_1_0           -     224    1248424   818924576
squeezenet_1_1           -     224    1235496   349151936
efficientnet_b0          -     224    5288548   385814752
efficientnet_b1          -     240    7794184   686802832
efficientnet_b2          -     260    9109994   993561872
efficientnet_b3          -     300   12233232  1827141392
efficientnet_b5          -     456   30389784 10266384752
efficientnet_b7          -     600   66347960 37745884192
efficientnet_v2_s        -     384   21458488  8365617152
efficientnet_v2_l        -     480  118515272 56079699008
efficientnet_v2_b0       -     224    7139704   718086176
efficientnet_v2_b1       -     240    8141052  1196819360
efficientnet_v2_b3       -     300   14358406  3011458816
ghostnet                 0.5   224    2587292    42328152
ghostnet                 1.0   224    5182508   141150512
ghostnet_v2              1.0   224    6156908   167048288
ghostnet_v2              1.3   224    8960404   269322976
mobilevit_xxs            -     256    1272024   407364096
mobilevit_s              -     256    5578632  2000831488
mobilevit_v2             0.5   256    1370593   464594944
mobilevit_v2             1.0   256    4901841  1812090880
mobilevit_v2             2.0   256   18449329  7155785728
efficientformer_l1       -     224   12289928  1291284736
efficientformer_l3       -     224   31406000  3906573312
efficientformer_v2_s0    -     224    3600256   395892544
efficientformer_v2_s1    -     224    6185560   651969640
efficientformer_v2_l     -     224   26322288  2552546880
mobile_former_26m        -     224    3232788    23550208
mobile_former_52m        -     224    3469092    49290496
mobile_former_151m       -     224    7595828   146249168
mobile_former_294m       -     224   11422648   286732160
mobile_former_508m       -     224   13976976   498467680
"""
# Parameters alone: torchvision's documentation of the weights.
PARAMETERS = {
    "mnasnet": 4_383_312, "mnasnet_0_5": 2_218_512, "resnext50": 25_028_904,
    "efficientnet_b4": 19_341_616, "efficientnet_b6": 43_040_704, "efficientnet_v2_m": 54_139_356,
    "shufflenet_v2_x0_5": 1_366_792, "shufflenet_v2_x1_5": 3_503_624,
}  # fmt: skip
VALUES = {
    "mobilenet_v3_small": 32, "mobilenet_v4_hybrid_medium": 64, "shufflenet_v1_g3_x0_5": 32,
    "ghostnet_v2": 64, "efficientnet_v2_b0": 32, "mobilevit_v2": 64, "mobile_former_26m": 32,
    "efficientformer_l1": 64, "efficientformer_v2_s0": 64,
}  # fmt: skip
"""Pixels that are enough: one model of each kind of block."""


@pytest.mark.parametrize("row", COUNTS.split("\n")[1:-1], ids=lambda row: "@".join(row.split()[:3]))
def test_counts_are_the_definitions(row: str) -> None:
    name, width, size, parameters, macs = row.split()
    found = zoo.counts_of(name, width=None if width == "-" else float(width), size=int(size))
    assert (found["parameters"], found["macs"]) == (int(parameters), int(macs))
    assert found["input_shape"] == [1, 3, int(size), int(size)]
    assert "arXiv" in found["source"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert zoo.counts_of(name)["parameters"] == PARAMETERS[name]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("MobileNetV4 conv_small", "mobilenet_v4_conv_small"),
        ("shufflenet_v1_g3_0.5x", "shufflenet_v1_g3_x0_5"),
        ("squeezenet1_0", "squeezenet_1_0"),
        ("ghostnetv2 1.3", "ghostnet_v2"),
        ("mobilenet_v2_0_75", "mobilenet_v2"),
    ],
)
def test_names_are_found_as_people_spell_them(text: str, name: str) -> None:
    assert zoo.counts_of(text)["name"] == name


@pytest.mark.parametrize("text", ["resnet50_0_5", "squeezenet_1_2", "x0_5", "", "mobilenet_v2_9_0"])
def test_a_width_that_no_model_has_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        zoo.build(text)


@pytest.mark.parametrize("name", VALUES)
def test_values_agree_with_onnx_runtime(name: str) -> None:
    graph = zoo.build(name, size=VALUES[name], classes=10)
    given = random_inputs(graph, 5)
    (theirs,) = run_onnx(export_onnx(graph), given).values()
    ours = evaluate(graph, given)[graph.outputs[0]]
    assert np.isfinite(ours).all()
    assert 1e-3 < ours.std() < 1e3
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=2e-4 * np.abs(ours).max())


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("shufflenet_v1_g3_x0_5", "Ascend910B2"),
        ("ghostnet_v2", "Ascend310"),
        ("mobile_former_26m", "Ascend910A"),
        ("efficientformer_v2_s0", "Ascend310P3"),
    ],
)
def test_light_networks_have_kernels_for_everything(name: str, chip: str) -> None:
    times = simulate_graph(compile_graph(zoo.build(name, size=64), chip))
    assert times.operators
    assert not times.on_ai_cpu


def test_compiled_values_of_the_new_blocks() -> None:
    graph = zoo.build("shufflenet_v1_g3_x0_5", size=32, classes=10)
    given = random_inputs(graph, 5)
    wanted = evaluate(graph, given)[graph.outputs[0]]
    found = run_compiled(graph, given, "Ascend310")[graph.outputs[0]]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0.02 * np.abs(wanted).max())


def test_a_shuffle_is_undone_by_a_shuffle_of_the_other_groups() -> None:
    net = Net("shuffle")
    x = net.images(1, 12, 2)
    y = net.channel_shuffle(x, 3, name="one")
    net.output(y, net.channel_shuffle(y, 12 // 3, name="other"))
    graph = net.build()
    given = random_inputs(graph)
    once, twice = evaluate(graph, given).values()
    assert once[0, :4, 0, 0].tolist() == given["x"][0, [0, 4, 8, 1], 0, 0].tolist()
    np.testing.assert_array_equal(twice, given["x"])


def test_macs_do_not_rank_times_and_the_table_says_why() -> None:
    """A sixth of ResNet-18's products, and far from a sixth of its time: depthwise layers."""
    plain, light = why(["resnet18", "mobilenet_v2"], "Ascend310")
    assert plain["macs"] / light["macs"] > 6
    assert plain["time_s"] / light["time_s"] < 3
    assert light["cube_fill"] < plain["cube_fill"] < 1
    assert light["padded"] > 1.5 * plain["padded"] > 1.5
    for row in (plain, light):
        assert row["bound_s"] < row["time_s"]
        assert 0 < row["launch_share"] + row["vector_share"] < 2
    assert light["launches"] > plain["launches"]
    assert "mobilenet_v2" in why_lines([light])[1]
