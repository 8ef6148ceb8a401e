"""A small network with small tuning jobs, and a bank of one's own, for the tests of this folder."""

import pytest
from small_jobs import small_job_of, write_mlp


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Write the small network and let tuning use small jobs and a bank in the test's folder."""
    monkeypatch.setattr("ascend_lab.aoe.tuning.job_of", small_job_of)
    monkeypatch.setattr("ascend_lab.aoe.engine.job_of", small_job_of)
    for name in ("REPEAT_TUNE", "TE_PARALLEL_COMPILER", "TUNING_PARALLEL_NUM"):
        monkeypatch.delenv(name, raising=False)
    new_bank(monkeypatch, tmp_path / "bank")
    return write_mlp(tmp_path / "mlp.onnx")


def new_bank(monkeypatch, folder):
    """Make a folder the place of the custom bank."""
    folder.mkdir()
    monkeypatch.setenv("TUNE_BANK_PATH", str(folder))
