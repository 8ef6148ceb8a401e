"""Any words for any verb: an exit code that is documented, one line, and no file lost.

The commands come from the parsers themselves, so that a new flag is tried at once. The guard at the
top is no help here: with ASCEND_LAB_DEBUG it lets through what no other place explained.
`FUZZ_EXAMPLES=5000 HYPOTHESIS_PROFILE=explore pytest tests/test_cli_fuzz.py` looks for more.
"""

import os
import signal
import tempfile
from pathlib import Path

import pytest
from fuzz_cases import check, command, files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CONTENTS = files()
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "150"))


@st.composite
def commands(draw):
    return command(lambda values: draw(st.sampled_from(values)))


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs an alarm")
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(words=commands())
def test_no_command_ends_in_a_traceback(words):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name, "work")
        folder.mkdir()
        patch.chdir(folder)
        patch.setenv("HOME", name)
        patch.setenv("TUNE_BANK_PATH", name)
        patch.setenv("ASCEND_LAB_DEBUG", "1")
        check(words, CONTENTS, folder)
