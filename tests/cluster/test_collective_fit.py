"""Latency and rate from measured tables: recovered, judged on rows left out, bad tables refused."""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ascend_lab.cli import ascend_lab as main
from ascend_lab.cluster.fit import (
    Band,
    CollectiveFit,
    HeldOut,
    Measured,
    fit_collective,
    held_out,
    mape,
    predicted,
    read_table,
)
from ascend_lab.data import data_path
from ascend_lab.errors import InputError

DEEPBENCH = data_path("deepbench/allreduce_measured.csv")
DEVICES = ("NV_P100", "NV_M40")


def ring_rows(
    bands: Sequence[Band], sizes: Iterable[float], ranks: Sequence[int], noise: float = 0.0
) -> list[Measured]:
    """Return what bands would be measured as."""
    rng = np.random.default_rng(1)
    truth = CollectiveFit(tuple(bands))
    return [
        Measured(size, p, truth.band_of(size).time_s(size, p) * (1 + noise * rng.standard_normal()))
        for size in map(float, sizes)
        for p in ranks
    ]


# -- synthetic ------------------------------------------------------------------------------------
@given(
    alpha_s=st.floats(1e-7, 1e-3),
    rate_bytes_per_s=st.floats(1e8, 1e12),
    ranks=st.lists(st.integers(2, 64), min_size=1, max_size=4, unique=True),
)
def test_one_band_is_recovered(alpha_s: float, rate_bytes_per_s: float, ranks: list[int]) -> None:
    truth = Band(1, 1e12, alpha_s, 1 / rate_bytes_per_s)
    # Sizes around the one where latency and rate take as long, so that both can be seen.
    sizes = alpha_s * rate_bytes_per_s * np.logspace(-1, 2, 8)
    (band,) = fit_collective(ring_rows([truth], sizes, ranks)).bands
    assert band.alpha_s == pytest.approx(alpha_s, rel=1e-6)
    assert band.beta_s_per_byte == pytest.approx(1 / rate_bytes_per_s, rel=1e-6)
    assert (band.bytes_from, band.bytes_to) == (sizes[0], sizes[-1])


def test_three_protocols_are_three_bands() -> None:
    truth = [
        Band(1e3, 3e4, 5e-6, 2e-10),
        Band(3e4, 1e6, 12e-6, 1e-10),
        Band(1e6, 1e9, 40e-6, 5e-11),
    ]
    rows = ring_rows(truth, np.logspace(3, 8.5, 23), (2, 4, 8), noise=0.01)
    found = fit_collective(rows).bands
    assert len(found) == 3
    for band, real in zip(found, truth, strict=True):
        assert band.alpha_s == pytest.approx(real.alpha_s, rel=0.1)
        assert band.beta_s_per_byte == pytest.approx(real.beta_s_per_byte, rel=0.1)
    assert [a.bytes_to for a in found[:-1]] == [b.bytes_from for b in found[1:]]
    assert mape(held_out(rows, "ranks")) == pytest.approx(0.01, abs=0.01)


def test_noise_alone_makes_no_bands() -> None:
    truth = [Band(1e3, 1e9, 10e-6, 1e-10)]
    rows = ring_rows(truth, np.logspace(3, 8.5, 23), (2, 4, 8), noise=0.15)
    assert len(fit_collective(rows).bands) == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(2, 16), st.floats(1e-6, 1.0)),
        min_size=2,
        max_size=14,
    )
)
def test_any_table_gives_a_cost_that_never_falls(table: list[tuple[int, int, float]]) -> None:
    rows = [Measured(2.0**power, ranks, time) for power, ranks, time in table]
    if len({row.size_bytes / row.ranks for row in rows}) < 2:
        with pytest.raises(InputError, match="rows that are alike"):
            fit_collective(rows)
        return
    fit = fit_collective(rows)
    assert all(band.alpha_s >= 0 and band.beta_s_per_byte >= 0 for band in fit.bands)
    assert 2 * len(fit.bands) <= max(2, len({row.size_bytes for row in rows}))
    costs = [fit.cost(4)(size) for size in (0, *np.logspace(-1, 10, 60))]
    assert costs[0] == 0
    assert all(low <= high * (1 + 1e-12) for low, high in pairwise(costs))
    assert fit.time_s(1e6, 1) == 0


def test_a_row_is_judged_by_a_fit_that_never_saw_its_size() -> None:
    rows = ring_rows([Band(1e3, 1e9, 1e-5, 1e-10)], [1e4, 1e5, 1e6, 1e7], (2, 4))
    wrong = [
        Measured(row.size_bytes, row.ranks, 5 * row.time_s) if row.size_bytes == 1e6 else row
        for row in rows
    ]
    judged = {item.row: item for item in held_out(wrong)}
    assert len(judged) == len(wrong)
    for row in wrong:
        if row.size_bytes == 1e6:
            assert judged[row].error == pytest.approx(0.8)
    apart = [row for row in wrong if row.ranks == 2]
    (seen,) = [item for item in held_out(wrong, "ranks") if item.row == wrong[1]]
    assert seen == predicted(fit_collective(apart), wrong[1])


# -- DeepBench ------------------------------------------------------------------------------------
def deepbench(device: str, *ranks: int) -> list[Measured]:
    return [row for row in read_table(DEEPBENCH, device=device) if row.ranks in ranks]


def large(judged: Iterable[HeldOut]) -> list[HeldOut]:
    return [item for item in judged if item.row.size_bytes >= 1e6]


@pytest.mark.parametrize("device", DEVICES)
def test_sizes_of_a_megabyte_and_more_are_within_12_percent(device: str) -> None:
    rows = deepbench(device, 2, 4, 8)
    assert len(rows) == 21
    for by in ("size_bytes", "ranks"):
        judged = large(held_out(rows, by))
        assert len(judged) == 18
        error = mape(judged)
        assert error is not None
        assert 0.01 < error <= 0.12
    per_size = {row.size_bytes for row in rows if row.size_bytes >= 1e6}
    assert len(per_size) == 6
    small = mape(item for item in held_out(rows) if item.row.size_bytes < 1e6)
    assert small is not None
    assert small > 0.3, "one size below a megabyte: nothing to learn it from"


# -- tables ---------------------------------------------------------------------------------------


def test_a_file_that_is_not_there_and_a_device_that_is_not_in_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a CSV file"):
        read_table(tmp_path / "none.csv")
    with pytest.raises(InputError, match="got NV_M40, NV_P100"):
        read_table(DEEPBENCH, device="NV_V100")
    with pytest.raises(InputError, match="none of at most 1 ranks"):
        read_table(DEEPBENCH, device="NV_M40", max_ranks=1)


def test_the_command_prints_bands_and_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.csv"
    rows = ring_rows([Band(1e3, 1e9, 1e-5, 1e-10)], np.logspace(4, 8, 9), (2, 8))
    lines = [f"{row.size_bytes}, {row.ranks}, {row.time_s}" for row in rows]
    path.write_text("\n".join(["\ufeff# mine", "Bytes, Ranks, Time_S", "# us", *lines]), "utf-8")
    assert main(["fit-collective", str(path), "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    (band,) = data["bands"]
    assert (band["bytes_from"], band["bytes_to"]) == (1e4, 1e8)
    assert band["alpha_s"] == pytest.approx(1e-5)
    assert band["beta_s_per_byte"] == pytest.approx(1e-10)
    assert band["rows"] == data["rows"] == 18
    assert data["held_out_mape"] == pytest.approx(0, abs=1e-9)
    assert data["held_out_mape_ranks"] == pytest.approx(0, abs=1e-9)
