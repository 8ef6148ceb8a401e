"""Profiles of steps: phases add up, gradients come in backward order, equal layers are equal."""

import csv
import io

import pytest

from ascend_lab.chip import load_chip
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.graph import Graph, GraphBuilder, zoo
from ascend_lab.train.profile import (
    StepProfile,
    equal_layers,
    layer_prefix,
    profile_layers,
    profile_training,
    update_s,
)

CHIP = load_chip("Ascend910A")


def layers(count: int, batch: int = 32) -> Graph:
    """Return linear layers of width 64."""
    net = GraphBuilder("layers")
    x = net.input("x", (batch, 64))
    for i in range(count):
        weight, bias = net.weight((64, 64), f"w{i}"), net.weight((64,), f"b{i}")
        x = net.relu(net.add(net.matmul(x, weight, name=f"mm{i}"), bias, name=f"add{i}"))
    net.output(x)
    return net.build()


@pytest.fixture(scope="module")
def profile() -> StepProfile:
    return profile_training(layers(4), CHIP)


def test_gradients_come_from_the_last_layer_to_the_first(profile: StepProfile) -> None:
    names = [row.name for row in profile.gradients]
    assert sorted(names) == sorted(f"{kind}{i}" for kind in "wb" for i in range(4))
    assert [int(name[1]) for name in names] == sorted((int(n[1]) for n in names), reverse=True)
    ready = [row.ready_s for row in profile.gradients]
    assert ready == sorted(ready) and 0 < ready[0] < ready[-1] <= profile.backward_s


def test_gradients_are_exchanged_in_two_byte_numbers(profile: StepProfile) -> None:
    sizes = {row.name: row.size_bytes for row in profile.gradients}
    assert sizes["w0"] == 2 * 64 * 64 and sizes["b0"] == 2 * 64
    assert profile.gradient_bytes == 2 * 4 * (64 * 64 + 64)


def test_phases_are_the_sums_of_their_kernels(profile: StepProfile) -> None:
    for phase, total in (("forward", profile.forward_s), ("backward", profile.backward_s)):
        kernels = [row.time_s for row in profile.operators if row.phase == phase]
        assert kernels and sum(kernels) == pytest.approx(total)
    assert profile.backward_s > profile.forward_s > 0 and profile.update_s > 0
    assert profile.step_s == profile.forward_s + profile.backward_s + profile.update_s
    order = [row.phase for row in profile.operators]
    assert order == sorted(order, key=("forward", "backward", "update").index)


def test_updates_read_and_write_masters_and_states() -> None:
    many = 2**24  # many times what L2 holds: of fewer, what is written last stays there
    for optimizer, moved in (("sgd", 2 + 2 * 4 + 2 * 4 + 2), ("adam", 2 + 3 * 4 + 3 * 4 + 2)):
        least_s = many * moved / CHIP.device_memory.rate_bytes_per_s
        found_s = update_s(many, CHIP, optimizer)
        assert least_s <= found_s < 2 * least_s


def test_adam_differs_from_sgd_in_the_update_only(profile: StepProfile) -> None:
    adam = profile_training(layers(4), CHIP, optimizer="adam")
    assert adam.update_s > profile.update_s
    assert adam.gradients == profile.gradients and adam.forward_s == profile.forward_s


def test_gradients_as_a_table(profile: StepProfile) -> None:
    rows = list(csv.DictReader(io.StringIO(profile.to_csv())))
    assert list(rows[0]) == ["name", "ready_us", "bytes"]
    for row, gradient in zip(rows, profile.gradients, strict=True):
        assert row["name"] == gradient.name and int(row["bytes"]) == gradient.size_bytes
        assert float(row["ready_us"]) == pytest.approx(gradient.ready_s * 1e6, abs=1e-3)


@pytest.mark.parametrize("settings", [{"dtype": "fp32"}, {"dtype": "int8"}, {"optimizer": "lion"}])
def test_what_cannot_be_profiled(settings: dict[str, str]) -> None:
    with pytest.raises(AscendLabError):
        profile_training(layers(1), CHIP, **settings)


def test_convolutions_have_profiles() -> None:
    net = GraphBuilder("images")
    x = net.input("x", (2, 3, 16, 16))
    x = net.relu(net.conv2d(x, net.weight((16, 3, 3, 3), "k0"), pad=1, name="c0"))
    x = net.conv2d(x, net.weight((16, 16, 3, 3), "k1"), pad=1, name="c1")
    x = net.reshape(net.global_avg_pool(x), shape=(2, 16))
    net.output(net.matmul(x, net.weight((16, 16), "w")))
    found = profile_training(net.build(), CHIP)
    assert [row.name for row in found.gradients] == ["w", "k1", "k0"]


def test_three_layers_stand_for_many() -> None:
    def build(count: int) -> Graph:
        return zoo.build("bert_base", 1, 32, layers=count, vocabulary=512)

    short = profile_layers(build, 5, CHIP, optimizer="adam")
    whole = profile_training(build(5), CHIP, optimizer="adam")
    for name in ("forward_s", "backward_s", "update_s"):
        assert getattr(short, name) == pytest.approx(getattr(whole, name), rel=0.02)
    assert [r.name for r in short.gradients] == [r.name for r in whole.gradients]
    assert short.gradient_bytes == whole.gradient_bytes
    for mine, other in zip(short.gradients, whole.gradients, strict=True):
        assert mine.ready_s == pytest.approx(other.ready_s, rel=0.02)
    for phase, total in (("forward", short.forward_s), ("backward", short.backward_s)):
        assert sum(r.time_s for r in short.operators if r.phase == phase) == pytest.approx(total)
    assert len(short.operators) == len(whole.operators)


def test_layers_are_found_by_their_names() -> None:
    assert layer_prefix(["a", "h0.x", "h1.x", "h2.x", "head"]) == "h"
    assert equal_layers("bert_large") == 24 and equal_layers("resnet50") == 0
    with pytest.raises(InputError):
        layer_prefix(["a.b", "h0.x"])
