"""A folder to run the commands in: what they print comes back as text, their files stay inside."""

import contextlib
import io
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ascend_lab import cli


class Workbench:
    """A temporary folder with a knowledge bank of its own, for one chip."""

    def __init__(self, chip: str) -> None:
        self._folder = TemporaryDirectory()
        self.chip, self.path = chip, Path(self._folder.name)
        (self.path / "bank").mkdir()

    def aoe(self, *arguments: object, bank: str = "bank") -> str:
        """Run the command `aoe` on ONNX models with results in the folder; return what it said."""
        given = ["--framework", "5", "--soc_version", self.chip, "--output", str(self.path)]
        kept = os.environ.get("TUNE_BANK_PATH")
        os.environ["TUNE_BANK_PATH"] = str(self.path / bank)
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = cli.aoe([*map(str, arguments), *given, "--progress_bar", "off"])
        finally:
            del os.environ["TUNE_BANK_PATH"]
            if kept is not None:
                os.environ["TUNE_BANK_PATH"] = kept
        text = said.getvalue().replace(str(self.path), "WORK").strip()
        return f"{text}\nexit code {code}"

    def simulate(self, model: str, *arguments: object) -> dict[str, Any]:
        """Run `ascend-lab simulate` on a model of the folder; return its JSON report."""
        report = self.path / "simulated.json"
        given = [str(self.path / model), *map(str, arguments)]
        with contextlib.redirect_stdout(io.StringIO()):
            cli.ascend_lab(["simulate", *given, "--chip", self.chip, "--json", str(report)])
        found: dict[str, Any] = json.loads(report.read_text("utf-8"))
        return found

    def report(self, job: str) -> dict[str, Any]:
        """Return the latest report of a job, "sgat" or "opat"."""
        path = max(self.path.glob(f"aoe_result_{job}_*.json"))
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))[0]
        return found
