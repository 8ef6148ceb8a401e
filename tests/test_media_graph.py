"""AIPP in front of a network: the same values as AIPP and then the network, and what it costs."""

from dataclasses import astuple, replace

import numpy as np
import pytest

from ascend_lab.compiler import (
    GraphBuilder,
    compile_graph,
    evaluate,
    random_inputs,
    run_compiled,
    simulate_graph,
    zoo,
)
from ascend_lab.compiler.text_form import from_text
from ascend_lab.deploy.media import Aipp, AippOp, aipp, csc_of, insert_aipp, pack_block
from ascend_lab.deploy.media.insertion import settings_from
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.machine.chip import load_chip

RNG = np.random.default_rng(2)
NORMAL = {"mean": (104, 117, 123, 0), "var_reci": (0.0171, 0.0175, 0.0174, 1.0)}
NV12 = Aipp("YUV420SP_U8", 30, 20, csc_of("601 narrow", "RGB"), crop=(4, 2, 20, 16), **NORMAL)  # type: ignore[arg-type]


def small(n=1, c=3, size=(16, 20), **conv):
    """Return relu(conv2d) of an image whose weights are seeded."""
    b = GraphBuilder("small")
    x = b.input("x", (n, c, *size))
    kernel = conv.pop("kernel", (3, 3))
    weight = b.constant(RNG.standard_normal((8, c, *kernel)).astype(np.float32), name="w")
    b.output(b.relu(b.conv2d(x, weight, **conv)))
    return b.build()


def frames(op, n=1):
    return RNG.integers(0, 256, (n, op.frame_bytes)).astype(np.uint8)


@pytest.mark.parametrize("small_channel", [False, True])
def test_values_are_those_of_aipp_and_the_network(small_channel):
    graph = small(2, kernel=(7, 5), stride=2, pad=((3, 3), (2, 1)))
    raw = frames(NV12, 2)
    apart = evaluate(graph, {"x": aipp(raw, NV12)})
    fed = insert_aipp(graph, [AippOp(0, NV12)], small_channel=small_channel)
    assert str(fed.types["x"]) == "uint8[2, 900]" and fed.inputs == ("x",)
    assert random_inputs(fed)["x"].max() > 200
    (found,) = evaluate(fed, {"x": raw}).values()
    (wanted,) = apart.values()
    assert np.array_equal(found, wanted)
    again = from_text(str(fed), {n: c.array() for n, c in fed.constants.items()})
    assert str(again) == str(fed)
    for chip in ("Toy", "Ascend910B2"):
        with_fp16 = run_compiled(graph, {"x": aipp(raw, NV12)}, chip)
        (alone,) = with_fp16.values()
        (run,) = run_compiled(fed, {"x": raw}, chip).values()
        assert np.abs(run.astype(float) - alone).max() <= np.abs(alone).max() * 2**-10
        assert not small_channel or np.array_equal(run, alone)  # the default takes them too


def test_dynamic_frames_bring_their_block():
    graph = small(2)
    fed = insert_aipp(graph, [AippOp(0, None, max_bytes=4000)])
    assert fed.inputs == ("x", "ascend_dynamic_aipp_data")
    assert [str(fed.types[n]) for n in fed.inputs] == ["uint8[4000]", "uint8[256]"]
    each = [Aipp("RGB888_U8", 32, 20, crop=(0, 0, 20, 16)), Aipp("RGB888_U8", 32, 20)]
    each[1] = replace(each[1], crop=(2, 2, 25, 18), scaled=(20, 16), mean=(9, 0, 0, 0))
    raw = np.zeros(4000, np.uint8)
    raw[: 2 * 1920] = RNG.integers(0, 256, 2 * 1920)
    block = np.frombuffer(pack_block(each), np.uint8)
    image = np.concatenate([aipp(raw[:1920], each[0]), aipp(raw[1920:3840], each[1])])
    (wanted,) = evaluate(graph, {"x": image}).values()
    (found,) = evaluate(fed, {"x": raw, fed.inputs[1]: block}).values()
    assert np.array_equal(found, wanted)
    late = np.frombuffer(pack_block([replace(s, crop=(0, 0, 18, 16), scaled=None) for s in each]),
                         np.uint8)  # fmt: skip
    with pytest.raises(Exception, match="frames that become"):
        evaluate(fed, {"x": raw, fed.inputs[1]: late})


def test_sizes_come_from_the_network():
    fed = insert_aipp(small(), [AippOp(0, Aipp("RGB888_U8", 0, 0))])
    assert str(fed.types["x"]) == f"uint8[1, {20 * 16 * 3}]"
    (node,) = (n for n in fed.nodes if n.op == "aipp")
    kept = settings_from(node.attrs["settings"])
    assert kept.size == (20, 16) and astuple(kept) == node.attrs["settings"]
    listed = [list(v) if isinstance(v, tuple) else v for v in astuple(NV12)]
    assert settings_from(listed) == NV12


@pytest.mark.parametrize(
    ("op", "small_channel", "said"),
    [
        (AippOp(1, NV12), False, "related_input_rank below 1"),
        (AippOp(0, Aipp("RGB888_U8", 32, 32)), False, "20 x 16 pixels"),
        (AippOp(0, Aipp("YUV400_U8", 20, 16)), False, "1 channels from YUV400_U8; got 3"),
        (AippOp(0, None, 100), True, "static AIPP with small channels"),
    ],
)
def test_what_does_not_fit_is_said(op, small_channel, said):
    with pytest.raises(InputError, match=said):
        insert_aipp(small(), [op], small_channel=small_channel)


def test_small_channels_need_a_convolution():
    b = GraphBuilder("g")
    b.output(b.relu(b.input("x", (1, 3, 16, 20))))
    with pytest.raises(UnsupportedError, match=r"one convolution.*got relu"):
        insert_aipp(b.build(), [AippOp(0, NV12)], small_channel=True)
    odd = [AippOp(0, replace(NV12, crop=(4, 2, 18, 16)))]
    for width, taken in ((18, False), (20, True)):
        ops = odd if width == 18 else [AippOp(0, NV12)]
        fed = insert_aipp(small(size=(16, width)), ops, small_channel=True)
        assert [n.attrs["small"] for n in fed.nodes if n.op == "aipp"] == [taken]


def test_the_cost_no_launch_no_conversion_less_cube_work():
    chip = load_chip("Ascend310")
    graph = zoo.build("resnet18")
    op = AippOp(0, Aipp("RGB888_U8", 0, 0, **NORMAL))  # type: ignore[arg-type]
    times = [
        simulate_graph(compile_graph(g, chip))
        for g in (graph, insert_aipp(graph, [op]), insert_aipp(graph, [op], small_channel=True))
    ]
    without, plain_, packed = times
    head = plain_.operators[0]
    frame = 224 * 224 * 3
    assert head.type == "aipp on the AIPP" and head.timeline.launch_cycles == 0
    assert head.time_s == pytest.approx(frame / chip.device_memory.rate_bytes_per_s, rel=1e-3)
    assert not plain_.on_ai_cpu and packed.time_s < without.time_s
    assert without.operators[0].type == "trans_data"
    assert plain_.operators[1].timeline.macs > 3 * packed.operators[1].timeline.macs
    assert packed.time_s < plain_.time_s
