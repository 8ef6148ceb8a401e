"""AIPP: published matrices and golden pixels, image libraries as oracles, files, blocks, limits."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from fuzz_cases import run
from hypothesis import given, strategies as st
from PIL import Image as Picture

from ascend_lab.deploy import media as m
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import load_chip

RNG = np.random.default_rng(1)


def pixels(rows):
    """Return pixels, one a row, as an image of one column."""
    return np.array(rows, np.uint8).T[None, :, :, None]


def listed(image):
    return image[0, :, :, 0].T.tolist()


# -- colours --------------------------------------------------------------------------------------
PUBLISHED = {
    "601 wide": ((256, 0, 359), (256, -88, -183), (256, 454, 0)),
    "601 narrow": ((298, 0, 409), (298, -100, -208), (298, 516, 0)),
    "709 narrow": ((298, 0, 459), (298, -55, -136), (298, 541, 0)),
    "709 wide": ((256, 0, 403), (256, -48, -120), (256, 475, 0)),
}  # CANN, AIPP, CSC_config: the four tables to RGB, and to YUV444
BACK = {
    "601 wide": ((77, 150, 29), (-43, -85, 128), (128, -107, -21)),
    "601 narrow": ((66, 129, 25), (-38, -74, 112), (112, -94, -18)),
    "709 narrow": ((47, 157, 16), (-26, -87, 112), (112, -102, -10)),
    "709 wide": ((55, 183, 19), (-29, -99, 128), (128, -116, -12)),
}


@pytest.mark.parametrize("standard", PUBLISHED)
def test_matrices_follow_from_the_standards(standard):
    there = m.csc_of(standard, "RGB")
    back = m.csc_of(standard, "YUV")
    bias = (16 if "narrow" in standard else 0, 128, 128)
    assert (there.matrix, there.in_bias, there.out_bias) == (PUBLISHED[standard], bias, (0, 0, 0))
    assert (back.matrix, back.in_bias, back.out_bias) == (BACK[standard], (0, 0, 0), bias)
    assert m.csc_of(standard, "BGR").matrix == there.matrix[::-1]
    assert m.csc_of(standard, "YVU").matrix == tuple(back.matrix[i] for i in (0, 2, 1))


@pytest.mark.parametrize(
    ("standard", "rgb", "yuv"),
    [  # of (81, 90, 240), (145, 54, 34), (235, 128, 128); of red and white
        ("601 narrow", [[254, 0, 0], [0, 255, 1], [254] * 3], [[81, 90, 239], [235, 128, 128]]),
        ("601 wide", [[238, 14, 13], [13, 237, 13], [235] * 3], [[76, 85, 255], [255, 128, 128]]),
        ("709 narrow", [[255, 24, 0], [0, 216, 0], [254] * 3], [[62, 102, 239], [235, 127, 128]]),
        ("709 wide", [[255, 35, 10], [0, 202, 7], [235] * 3], [[54, 99, 255], [255, 128, 128]]),
    ],
)
def test_golden_pixels(standard, rgb, yuv):
    given = pixels([[81, 90, 240], [145, 54, 34], [235, 128, 128]])
    assert listed(m.convert(given, m.csc_of(standard, "RGB"))) == rgb
    assert listed(m.convert(pixels([[255, 0, 0], [255] * 3]), m.csc_of(standard, "YUV"))) == yuv


def test_pillow_and_opencv_differ_by_one_at_most():
    steps = np.arange(0, 256, 5, dtype=np.uint8)
    cube = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(1, -1, 3)
    image = cube.transpose(2, 0, 1)[None]
    for source, to, name in (("YCbCr", "RGB", "RGB"), ("RGB", "YCbCr", "YUV")):
        other = np.asarray(Picture.fromarray(cube, source).convert(to)).astype(int)
        ours = m.convert(image, m.csc_of("601 wide", name))[0].transpose(1, 2, 0)
        assert 0 < np.abs(ours - other).max() <= 1
    legal = RNG.integers(16, 236, 6 * 8 * 3 // 2).astype(np.uint8)  # luma within 16..235
    settings = m.Aipp("YUV420SP_U8", 8, 6, m.csc_of("601 narrow", "RGB"))
    other = cv2.cvtColor(legal.reshape(9, 8), cv2.COLOR_YUV2RGB_NV12).astype(int)
    assert np.abs(m.aipp(legal, settings)[0].transpose(1, 2, 0) - other).max() <= 1
    swapped = cv2.cvtColor(legal.reshape(9, 8), cv2.COLOR_YUV2RGB_NV21).astype(int)
    nv21 = m.aipp(legal, replace(settings, rbuv_swap=True))
    assert np.abs(nv21[0].transpose(1, 2, 0) - swapped).max() <= 1


@pytest.mark.parametrize("method", ["bilinear", "nearest"])
def test_resize_is_opencv_s_to_the_bit(method):
    how = {"bilinear": cv2.INTER_LINEAR, "nearest": cv2.INTER_NEAREST}[method]
    for _ in range(200):
        h, w, height, width = map(int, RNG.integers(1, 90, 4))
        image = RNG.integers(0, 256, (h, w)).astype(np.uint8)
        other = cv2.resize(image, (width, height), interpolation=how)
        assert np.array_equal(m.resize(image, width, height, method), other.reshape(height, width))


# -- the order of steps ---------------------------------------------------------------------------
def test_order_swap_crop_colour_normalise_pad():
    frame = np.arange(4 * 2 * 3, dtype=np.uint8)
    scale = (0.5, 1.0, 2.0, 1.0)
    s = m.Aipp("RGB888_U8", 4, 2, rbuv_swap=True, crop=(1, 1, 2, 1), padding=(1, 0, 0, 2))
    s = replace(
        s, padding_value=7.5, mean=(1, 2, 3, 0), minimum=(0.5, 0.0, 0.0, 0.0), var_reci=scale
    )
    got = m.aipp(frame, s)
    assert (got.dtype, got.shape) == (np.dtype(np.float16), (1, 3, 2, 4))
    pixel = frame.reshape(2, 4, 3)[1, 1, ::-1].astype(float)  # mean is of the swapped channels
    assert np.array_equal(got[0, :, 1, 0], (pixel - [1, 2, 3] - [0.5, 0, 0]) * scale[:3])
    assert (got[0, :, 0] == 7.5).all() and (got[0, :, 1, 2:] == 7.5).all()
    assert got[0, :, 1, 1].max() != 7.5
    raw = m.aipp(frame, replace(s, padding_value=7.0), dtype="uint8")
    assert np.array_equal(raw[0, :, 1, 0], pixel) and raw[0, 0, 0, 0] == 7  # nothing normalised


def test_four_bytes_a_pixel():
    xrgb = np.array([9, 1, 2, 3], np.uint8).repeat(2).reshape(4, 2).T.reshape(-1)
    s = m.Aipp("XRGB8888_U8", 2, 1, ax_swap=True)
    assert m.aipp(xrgb, s)[0, :, 0, 0].tolist() == [1, 2, 3]
    assert m.aipp(xrgb, replace(s, rbuv_swap=True))[0, :, 0, 0].tolist() == [3, 2, 1]
    assert m.aipp(xrgb, s, channels=4)[0, :, 0, 0].tolist() == [1, 2, 3, 9]
    grey = m.Csc(((76, 150, 30), (0, 0, 0), (0, 0, 0)))  # the published XRGB to GRAY
    got = m.aipp(xrgb, replace(s, csc=grey), channels=1)
    assert got.shape == (1, 1, 1, 2) and got[0, 0, 0, 0] == (76 + 300 + 90) >> 8


def test_chroma_is_used_for_four_pixels_also_behind_a_crop():
    frame = RNG.integers(0, 256, 8 * 6 * 3 // 2).astype(np.uint8)
    whole = m.aipp(frame, m.Aipp("YUV420SP_U8", 8, 6))
    part = m.aipp(frame, m.Aipp("YUV420SP_U8", 8, 6, crop=(2, 4, 5, 2)))
    assert np.array_equal(part, whole[:, :, 4:6, 2:7])
    assert np.array_equal(whole[0, 1, ::2, ::2], whole[0, 1, 1::2, 1::2])


def test_parameters_are_fp16_and_results_round_once():
    frame = np.arange(256, dtype=np.uint8)
    s = m.Aipp("YUV400_U8", 256, 1, mean=(104, 0, 0, 0), var_reci=(1 / 255, 1.0, 1.0, 1.0))
    exact = (np.arange(256) - 104.0) * float(np.float16(1 / 255))
    assert np.array_equal(m.aipp(frame, s)[0, 0, 0], exact.astype(np.float16))


def test_dynamic_images_resize_behind_the_crop():
    frame = RNG.integers(0, 256, 64 * 48).astype(np.uint8)
    s = m.Aipp("YUV400_U8", 64, 48, crop=(8, 4, 40, 40), scaled=(20, 30))
    inner = frame.reshape(48, 64)[4:44, 8:48]
    got = m.aipp_each(np.concatenate([frame, frame]), [s, replace(s, mean=(1, 0, 0, 0))])
    assert np.array_equal(got[0, 0], cv2.resize(inner, (20, 30)))
    assert np.array_equal(got[1], got[0] - 1)
    with pytest.raises(InputError, match="one size of result"):
        m.aipp_each(np.concatenate([frame, frame]), [s, replace(s, scaled=(30, 30))])


# -- the parameter block --------------------------------------------------------------------------
small = st.integers(0, 255)
halves = st.floats(0, 255, width=16)


@st.composite
def blocks(draw):
    entries = st.tuples(*[st.integers(-(2**15), 2**15 - 1)] * 3)
    bias = st.tuples(small, small, small)
    csc = draw(st.none() | st.builds(m.Csc, st.tuples(entries, entries, entries), bias, bias))
    names = ("YUV420SP_U8", "XRGB8888_U8", "RGB888_U8")
    shared = m.Aipp(draw(st.sampled_from(names)), 64, 32, csc, draw(st.booleans()),
                  draw(st.booleans()))  # fmt: skip
    parts = st.builds(
        replace, st.just(shared),
        crop=st.none() | st.sampled_from([(0, 2, 32, 20), (10, 0, 54, 32)]),
        scaled=st.none() | st.tuples(st.integers(16, 300), st.integers(16, 300)),
        padding=st.tuples(*[st.integers(0, 32)] * 4), mean=st.tuples(*[small] * 4),
        minimum=st.tuples(*[halves] * 4),
        var_reci=st.tuples(*[st.floats(-65504, 65504, width=16)] * 4),
    )  # fmt: skip
    return draw(st.lists(parts, min_size=1, max_size=3))


@given(images=blocks())
def test_a_block_comes_back_as_it_went(images):
    raw = m.pack_block(images)
    assert len(raw) == 64 + 96 * len(images) == m.block_bytes(len(images))
    assert list(m.unpack_block(raw)) == images
    assert m.pack_block(m.unpack_block(raw)) == raw


def test_every_byte_of_a_block_stands_where_the_header_says():
    csc = m.Csc(((1, 2, 3), (4, 5, 6), (7, 8, -9)), in_bias=(16, 127, 128), out_bias=(1, 2, 3))
    places = (10, 20, 300, 200), (150, 100), (1, 2, 3, 4)
    s = m.Aipp("RGB888_U8", 640, 480, csc, True, False, *places)
    s = replace(s, mean=(104, 117, 123, 0), var_reci=(0.5, 1.0, 2.0, 1.0))
    raw = m.pack_block([s])
    assert len(raw) == 160
    assert raw[:5] == bytes([3, 1, 1, 0, 1]) and struct.unpack_from("<2i", raw, 8) == (640, 480)
    assert struct.unpack_from("<9h", raw, 16) == (1, 2, 3, 4, 5, 6, 7, 8, -9)
    assert raw[40:46] == bytes([1, 2, 3, 16, 127, 128]) and not any(raw[46:64])
    assert raw[64:68] == bytes([1, 1, 1, 0])
    numbers = (10, 20, 300, 200, 300, 200, 150, 100, 1, 2, 3, 4)
    assert struct.unpack_from("<12i", raw, 72) == numbers
    assert struct.unpack_from("<4h", raw, 120) == (104, 117, 123, 0)
    assert struct.unpack_from("<4H", raw, 128) == (0, 0, 0, 0)
    assert struct.unpack_from("<4H", raw, 136) == (0x3800, 0x3C00, 0x4000, 0x3C00)
    assert not any(raw[144:])


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [(0, 9, "input format"), (4, 2, "256 bytes"), (67, 1, "rotation"), (88, 7, "resize from"),
     (8, 1, "src_image_size_w")],
)  # fmt: skip
def test_a_damaged_block_is_refused(place, value, said):
    s = m.Aipp("RGB888_U8", 64, 32, crop=(0, 0, 32, 32), scaled=(16, 16))
    raw = bytearray(m.pack_block([s]))
    raw[place] = value
    with pytest.raises(InputError, match=said):
        m.unpack_block(bytes(raw))
    with pytest.raises(InputError, match="at least 160"):
        m.unpack_block(bytes(raw[:100]))


# -- the file -------------------------------------------------------------------------------------
HEAD = "aipp_op { aipp_mode: static input_format: YUV420SP_U8 "


def test_the_published_example_has_its_size():
    text = """
    aipp_op: {  # sizes of CANN, crop_padding_config
        aipp_mode: static; input_format: YUV420SP_U8, src_image_size_w: 320
        src_image_size_h: 240 crop: true load_start_pos_w: 10 load_start_pos_h: 20
        crop_size_w: 50 crop_size_h: 60 padding: true left_padding_size: 20
        right_padding_size: 15 top_padding_size: 20 bottom_padding_size: 15 padding_value: 0 }
    """
    (op,) = m.parse_config(text)
    assert op.settings is not None and op.settings.size == (85, 95)
    assert op.rank == 0 and m.check_aipp(op.settings).frame_bytes == 320 * 240 * 3 // 2


def test_what_is_left_out_comes_from_the_template():
    (op,) = m.parse_config(HEAD + "csc_switch: true matrix_r0c0: 256 load_start_pos_w: 7 }")
    assert op.settings is not None and op.settings.csc is not None
    assert op.settings.csc.matrix == ((256, 516, 0), (298, -100, -208), (298, 0, 409))  # BGR
    assert op.settings.csc.in_bias == (16, 128, 128)
    assert op.settings.crop is None and op.settings.var_reci == (1.0,) * 4
    (op,) = m.parse_config(HEAD.replace("YUV420SP", "RGB888") + "csc_switch: true }")
    assert op.settings is not None and op.settings.csc is not None
    assert op.settings.csc.matrix == m.csc_of("601 narrow", "YUV").matrix  # as GE fills it


def test_several_inputs_and_modes():
    dynamic = "aipp_op { aipp_mode: dynamic related_input_rank: 1 max_src_image_size: 9000 }"
    one, two = m.parse_config(HEAD + "} " + dynamic)
    assert (one.rank, two.rank, two.settings, two.max_bytes) == (0, 1, None, 9000)
    with pytest.raises(InputError, match="each related_input_rank; got 0 twice"):
        m.parse_config((HEAD + "}") * 2)


def text_of(s, rank):
    """Return settings as a configuration file says them."""
    sizes = {"src_image_size_w": s.width, "src_image_size_h": s.height}
    lines = {"aipp_mode": "static", "related_input_rank": rank, **sizes}
    lines |= {"input_format": s.input_format, "padding": "true", "padding_value": s.padding_value}
    lines |= {"rbuv_swap_switch": s.rbuv_swap, "ax_swap_switch": s.ax_swap}
    sides = zip(("top", "bottom", "left", "right"), s.padding, strict=True)
    lines |= {f"{side}_padding_size": size for side, size in sides}
    for key, values in (("mean", s.mean), ("min", s.minimum), ("var_reci", s.var_reci)):
        lines |= {f"{key}_chn_{i}": value for i, value in enumerate(values)}
    if s.crop:
        names = ("load_start_pos_w", "load_start_pos_h", "crop_size_w", "crop_size_h")
        lines |= {"crop": "true", **dict(zip(names, s.crop, strict=True))}
    if s.csc:
        lines["csc_switch"] = "true"
        for i, row in enumerate(s.csc.matrix):
            lines |= {f"matrix_r{i}c{j}": value for j, value in enumerate(row)}
        for name, bias in (("input", s.csc.in_bias), ("output", s.csc.out_bias)):
            lines |= {f"{name}_bias_{i}": value for i, value in enumerate(bias)}
    words = {True: "true", False: "false"}
    said = (
        f"  {key}: {words[value] if isinstance(value, bool) else value}"
        for key, value in lines.items()
    )
    return "aipp_op {\n" + "\n".join(said) + "  # as drawn\n}\n"


@given(images=blocks(), value=st.floats(-60000, 60000, width=16), rank=st.integers(0, 9))
def test_a_file_says_what_settings_are(images, value, rank):
    drawn = [replace(s, scaled=None, padding_value=value) for s in images[:1]]
    texts = "".join(text_of(s, rank + i) for i, s in enumerate(drawn))
    found = m.parse_config(texts)
    assert [op.settings for op in found] == drawn and found[0].rank == rank


YUV = m.Aipp("YUV420SP_U8", 64, 48)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (replace(YUV, width=63), "src_image_size_w: an even number"),
        (replace(YUV, height=47), "src_image_size_h: an even number"),
        (replace(YUV, width=0), "src_image_size_w from 2"),
        (replace(YUV, crop=(1, 0, 8, 8)), "load_start_pos_w: an even number"),
        (replace(YUV, crop=(2, 0, 63, 8)), "of at most 64, src_image_size_w; got 2 \\+ 63"),
        (replace(YUV, crop=(2, 0, 0, 8)), "crop_size_w from 1"),
        (replace(YUV, scaled=(15, 48)), "scf output size w from 16"),
        (replace(YUV, crop=(0, 0, 8, 8), scaled=(130, 48)), "factor of 16"),
        (replace(YUV, padding=(33, 0, 0, 0)), "top_padding_size"),
        (replace(YUV, width=4096, padding=(0, 0, 1, 0)), "padded width of at most 4096"),
        (replace(YUV, mean=(256, 0, 0, 0)), "mean_chn_0"),
        (replace(YUV, var_reci=(1.0, float("nan"), 1.0, 1.0)), "var_reci_chn_1"),
        (m.Aipp("YUV400_U8", 4, 4, m.csc_of("601 wide", "RGB")), "csc_switch"),
    ],
)
def test_limits(settings, said):
    with pytest.raises(InputError, match=said):
        m.check_aipp(settings)


def test_limits_of_a_chip():
    wide = m.Aipp("RGB888_U8", 1100, 4, padding=(0, 0, 1, 0))
    assert m.check_aipp(wide) is wide and m.check_aipp(wide, load_chip("Ascend910B2")) is wide
    with pytest.raises(InputError, match="at most 1080 on Ascend310; got 1101"):
        m.check_aipp(wide, load_chip("Ascend310"))
    odd = m.Aipp("YUV420SP_U8", 64, 48, crop=(3, 1, 8, 8))
    assert m.check_aipp(odd, load_chip("Ascend950PR")) is odd


@pytest.mark.parametrize("frames", [np.zeros(5, np.uint8), np.zeros(0, np.uint8), np.zeros(6)])
def test_frames_are_whole_and_uint8(frames):
    with pytest.raises(InputError, match="uint8 frames of 6 bytes"):
        m.aipp(frames, m.Aipp("RGB888_U8", 2, 1))


def test_an_image_that_contradicts_the_settings_is_no_row_of_small_frames():
    settings = m.Aipp("RGB888_U8", 2, 1)
    with pytest.raises(InputError, match="height x width 1 x 2, as the settings say; got 4 x 4"):
        m.aipp_each(np.zeros((4, 4, 3), np.uint8), [settings] * 8)
    assert len(m.aipp_each(np.zeros(48, np.uint8), [settings] * 8)) == 8


# -- the verb -------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = HEAD + "src_image_size_w: 4 src_image_size_h: 2 }"
    (tmp_path / "a.cfg").write_text("\ufeff# 配置\n" + text, "utf-8")
    np.save("x.npy", np.arange(24, dtype=np.uint8))
    return tmp_path


WORDS = ["ascend-lab", "aipp", "a.cfg", "--image", "x.npy", "--output", "y.npy"]


def test_the_verb_writes_what_the_function_returns(folder):
    code, out, err = run([*WORDS, "--json", "-"])
    assert (code, err) == (0, "") and json.loads(out)["shape"] == [2, 3, 2, 4]
    frames = np.arange(24, dtype=np.uint8)
    assert np.array_equal(np.load("y.npy"), m.aipp(frames, m.Aipp("YUV420SP_U8", 4, 2)))


def test_the_verb_takes_a_parameter_block(folder):
    text = "aipp_op { aipp_mode: dynamic related_input_rank: 1 max_src_image_size: %d }"
    Path("a.cfg").write_text(text % 24)
    s = m.Aipp("YUV400_U8", 12, 1)
    Path("b.bin").write_bytes(m.pack_block([s, replace(s, mean=(3, 0, 0, 0))]))
    words = [*WORDS, "--rank", "1"]
    assert run([*words, "--block", "b.bin"])[0] == 0
    assert np.load("y.npy")[1, 0, 0, 0] == 12 - 3
    Path("a.cfg").write_text(text % 23)
    assert "max_src_image_size" in run([*words, "--block", "b.bin"])[2]
    assert "--block F.bin" in run(words)[2] and "got none; --rank" in run(WORDS)[2]


@pytest.mark.parametrize("bad", ["half", "text", "float", "pickle", "folder", "missing", "short"])
def test_the_verb_refuses_in_one_line(folder, bad):
    file = folder / "x.npy"
    raw = file.read_bytes()
    if bad in ("half", "text"):
        file.write_bytes(raw[:-5] if bad == "half" else b"no array")
    elif bad in ("folder", "missing"):
        file.unlink()
        if bad == "folder":
            file.mkdir()
    else:
        arrays = {"float": np.zeros(12), "pickle": np.array([{}]), "short": np.zeros(13, np.uint8)}
        np.save(file, arrays[bad], allow_pickle=bad == "pickle")
    Path("y.npy").write_bytes(b"mine")
    code, out, err = run(WORDS)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert Path("y.npy").read_bytes() == b"mine"
