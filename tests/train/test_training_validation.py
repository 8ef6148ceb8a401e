"""Published training rates: the rows as written down, and the table that compares them."""

import pytest

from ascend_lab.lab.validation import (
    norms_s,
    published_rows,
    training_validation_rows,
    training_validation_table,
)
from ascend_lab.train.profile import GradientRow, OperatorRow, StepProfile


def fake(batch: int) -> StepProfile:
    """Return a step of 50 us an image, half of it a batch norm, with 51 MB of gradients."""
    half_s = batch * 25e-6
    kernels = (OperatorRow(("fc",), "forward", half_s), OperatorRow(("a.bn",), "backward", half_s))
    rows = tuple(GradientRow(f"g{i}", half_s * (i + 1) / 10, 5_100_000) for i in range(10))
    return StepProfile("fake", "Ascend910A", half_s, half_s, 0.0, rows, kernels)


def test_the_published_numbers_agree_with_each_other() -> None:
    rows = {row["name"]: row for row in published_rows()}
    for batch in (32, 256):
        one, eight = (rows[f"ResNet-50, {n} x 910, batch {batch}"] for n in (1, 8))
        share = eight["images_per_s"] / (8 * one["images_per_s"])
        assert share == pytest.approx(eight["efficiency"], abs=0.01)
    step = rows["ResNet-50, 1 x 910, step 18.07 ms"]
    assert step["batch_per_device"] / step["images_per_s"] == pytest.approx(18.07e-3, rel=1e-3)


def test_the_table_holds_every_row_against_the_model() -> None:
    rows = training_validation_rows({batch: fake(batch) for batch in (32, 256)})
    by_name = {row.name: row for row in rows}
    one = by_name["ResNet-50, 1 x 910, batch 256"]
    assert one.model_images_per_s == pytest.approx(20_000) and one.model_efficiency == 1.0
    assert one.time_error == pytest.approx(2115 / 20_000 - 1)
    assert one.norms_s == pytest.approx(one.model_s / 2) == norms_s(fake(256))
    eight = by_name["ResNet-50, 8 x 910, batch 32"]
    assert 0.2 < eight.model_efficiency < 1.0
    assert eight.model_images_per_s == pytest.approx(8 * 20_000 * eight.model_efficiency)
    text = training_validation_table(rows)
    assert len(rows) == len(published_rows()) == 5
    assert all(row.name in text for row in rows) and "-89%" in text and "norms" in text
