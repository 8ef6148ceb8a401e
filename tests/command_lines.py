"""What a command line answers: its exit code, what it prints, what it complains of."""

import json

import pytest

from ascend_lab.cli import ascend_lab


def run(capsys, *words):
    """Run `ascend-lab` with these words."""
    code = ascend_lab([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def run_json(capsys, *words, code=0):
    """Return what a command that succeeds, or ends with a code, prints as JSON and nothing else."""
    found, out, err = run(capsys, *words, "--json", "-")
    assert (found, err) == (code, "")
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def refused(capsys, *words):
    """Return the one line in which a command says that it cannot be done; nothing else is said."""
    code, out, err = run(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1), (words, err)
    assert err.startswith("ascend-lab: ") and err.endswith("\n") and "Traceback" not in err
    return err
