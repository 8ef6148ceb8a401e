"""DVPP's pictures and rates, cards by formula and by events, simpy and queueing laws as oracles."""

import cv2
import numpy as np
import pytest
import simpy

from ascend_lab.deploy import media as m
from ascend_lab.errors import InputError

RNG = np.random.default_rng(3)


def test_strides_of_the_decoder():
    """Ascend310: 128 x 16, later chips: 64 x 16 (CANN, JPEGD restrictions)."""
    old, new = (m.jpegd_picture(1920, 1080, chip) for chip in ("Ascend310", "Ascend310P3"))
    assert (old.stride_w, old.stride_h, old.size_bytes) == (1920, 1088, 1920 * 1088 * 3 // 2)
    assert m.jpegd_picture(700, 33, "Ascend310").stride_w == 768 and new.stride_w == 1920
    assert m.jpegd_picture(700, 33, "Ascend910B2").stride_w == 704
    assert m.jpegd_picture(64, 64, "Ascend310", "4:4:4").size_bytes == 128 * 64 * 3
    assert m.jpegd_picture(64, 64, "Ascend310P3", "4:4:0").size_bytes == 64 * 64 * 2
    assert m.jpegd_picture(9000, 64, "Ascend910B2").width == 9000
    assert m.vpc_picture(224, 226) == m.Picture(224, 226, 224, 226)
    assert m.vpc_picture(130, 8).stride_w == 144
    assert m.vpc_picture(18, 8).stride_w == 32 and m.crop_box(10, 20, 50, 60) == (10, 59, 20, 79)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: m.jpegd_picture(31, 64, "Ascend310"), "32 x 32 to 8192"),
        (lambda: m.jpegd_picture(9000, 64, "Ascend310"), "8192 x 8192 on Ascend310"),
        (lambda: m.jpegd_picture(64, 64, "Ascend310", "4:1:1"), "4:2:0"),
        (lambda: m.vpc_picture(225, 224), "even"),
        (lambda: m.vpc_picture(8, 8), "10 x 6"),
        (lambda: m.crop_box(1, 0, 4, 4), "even place"),
        (lambda: m.unit_station("Ascend310", "PNGD", 64, 64), "published rate"),
        (lambda: m.unit_station("Toy", "VPC", 64, 64), r"\(none\)"),
        (lambda: m.unit_station("Ascend310", "VDEC", 1920, 100), "VDEC: from 128 x 128 to 4096"),
        (lambda: m.unit_station("Ascend310", "VENC", 0, 64), "VENC: from 1 x 1"),
        (lambda: m.cards_needed([], 1.0), "stations"),
        (lambda: m.cards_needed([m.Station("a", 1, 0.0)], 1.0), "stations that take time"),
        (lambda: m.cards_needed([m.Station("a", 1, 1.0)], float("nan")), "rate above 0"),
    ],
)
def test_what_units_refuse(call, said):
    with pytest.raises(InputError, match=said):
        call()


def test_junk_beside_the_picture_is_not_resized():
    picture = m.jpegd_picture(300, 200, "Ascend310")
    out = m.vpc_picture(224, 224)
    raw = RNG.integers(0, 256, picture.size_bytes).astype(np.uint8)
    rows = raw.reshape(-1, picture.stride_w)
    rows[: picture.stride_h, 300:] = 255
    rows[200 : picture.stride_h] = 255
    got = m.vpc_crop_and_resize(raw, picture, m.crop_box(0, 0, 300, 200), out).reshape(-1, 224)
    assert np.array_equal(got[:224], cv2.resize(rows[:200, :300], (224, 224)))
    chroma = rows[208:308, :300].reshape(100, 150, 2)
    assert np.array_equal(got[224:].reshape(112, 112, 2), cv2.resize(chroma, (112, 112)))
    with pytest.raises(InputError, match="even box inside 300 x 200"):
        m.vpc_crop_and_resize(raw, picture, m.crop_box(0, 0, 302, 200), out)
    with pytest.raises(InputError, match="buffer of"):
        m.vpc_crop_and_resize(raw[:-1], picture, m.crop_box(0, 0, 300, 200), out)


@pytest.mark.parametrize(
    ("unit", "size", "rate"),
    [("JPEGD", (1920, 1080), 256), ("JPEGD", (3840, 2160), 64), ("VDEC", (3840, 2160), 120),
     ("VPC", (3840, 2160), 360), ("VENC", (1920, 1080), 30), ("VDEC", (1920, 1080), 480)],
)  # fmt: skip
def test_published_rates(unit, size, rate):
    assert m.unit_station("Ascend310", unit, *size).rate_per_s == pytest.approx(rate)


def test_the_slowest_station_decides():
    decode = m.unit_station("Ascend310", "JPEGD", 1920, 1080)
    stations = [m.copy_station(4e5), decode, m.network_station(0.05, 16)]
    answer = m.cards_needed(stations, 3000)
    assert (answer.cards, answer.bottleneck) == (12, "JPEGD")
    assert answer.by_station == {"copy": 1, "JPEGD": 12, "network": 10}
    assert max(answer.busy.values()) == pytest.approx(3000 / 256 / 12)
    slow = m.cards_needed([decode, m.network_station(1 / 200)], 3000)
    assert (slow.cards, slow.bottleneck) == (15, "network")
    assert (
        m.cards_needed([m.Station("a", 1, 0.001)], 3000).cards == 3
    )  # no card for a rounding error


def by_simpy(stations, gaps):
    """Return the latencies of the same pictures, by another library."""
    env = simpy.Environment()
    servers = [simpy.Resource(env, s.servers) for s in stations]
    found = [0.0] * len(gaps)

    def picture(i):
        start = env.now
        for station, server in zip(stations, servers, strict=True):
            with server.request() as turn:
                yield turn
                yield env.timeout(station.time_s)
        found[i] = env.now - start

    def source():
        for i, gap in enumerate(gaps):
            yield env.timeout(gap)
            env.process(picture(i))

    env.process(source())
    env.run()
    return found


def test_simpy_sees_the_same_latencies():
    stations = [m.Station("a", 2, 0.013), m.Station("b", 1, 0.006), m.Station("c", 3, 0.021)]
    ours = m.simulate_card(stations, 120.0, 400, seed=5)
    gaps = np.random.default_rng(5).exponential(1 / 120.0, 400)
    assert np.allclose(ours.latencies_s, by_simpy(stations, gaps), rtol=1e-9)


def test_laws_of_queues_hold():
    """M/D/1: the mean wait is rho s / 2 (1 - rho) (Pollaczek and Khinchine); D/D/1: none."""
    station = m.Station("a", 1, 0.01)
    rate = 70.0
    waits = [m.simulate_card([station], rate, 20_000, seed).waited_s["a"] for seed in range(6)]
    exact = 0.7 * 0.01 / (2 * 0.3)
    spread = 3 * np.std(waits, ddof=1) / np.sqrt(len(waits))
    assert abs(np.mean(waits) - exact) < spread < 0.2 * exact
    even = m.simulate_card([station, m.Station("b", 2, 0.02)], 99.0, 500, seed=None)
    assert max(even.waited_s.values()) == pytest.approx(0.0, abs=1e-9)
    assert even.throughput_per_s == pytest.approx(99.0, rel=0.01)
