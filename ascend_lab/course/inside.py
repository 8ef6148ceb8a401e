"""The far side of the wall: runs a hand-in's functions in a process of its own.

Started as `python -I -S -B inside.py` in an empty folder. Reads lines of JSON from what was
standard input, the task and then call by call, and answers each on what was standard output; before
the hand-in runs it says which wall stands. It holds no answer and no judge, so whatever a hand-in
does to this process changes nothing but its own answers.
"""

import ast
import builtins
import ctypes
import importlib.abc
import importlib.util
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

try:  # now: the account that runs the hand-in may not reach where this module lies
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


def main() -> None:
    """Take the task, build the wall, run the hand-in, answer call by call."""
    questions = os.fdopen(os.dup(0), "rb")
    task = json.loads(questions.readline())
    answers = os.dup(1)

    def tell(line: dict[str, Any]) -> None:
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        while data:
            data = data[os.write(answers, data) :]

    try:
        wall = _build_wall(task)
    except PermissionError as error:
        tell({"refused": str(error)})
        return
    _look_only_at(task["path"], task["moved"])
    sys.meta_path.insert(0, _Denied(task["denied"]))
    tell({"wall": wall})
    names: dict[str, Any] = {"__name__": "handin", "__builtins__": builtins}
    wire = _wire(tell, questions, task, names) if task["lenient"] else None
    _more_time(task["start_s"])
    tell({"at": -1, **_run(task, names)})
    for line in questions:
        call = json.loads(line)
        _more_time(task["case_s"])
        if wire is None:
            tell(_answer(task, names, call))
        elif "begin" in call:
            wire = _wire(tell, questions, task, names)
            tell({"began": True})
        else:
            wire.serve(call)


def _wire(tell: Any, questions: Any, task: dict[str, Any], names: dict[str, Any]) -> Any:
    from ascend_lab.course.wire import Wire

    return Wire(
        tell, lambda: json.loads(questions.readline()), names, lambda error: _place_of(error, task)
    )


def _run(task: dict[str, Any], names: dict[str, Any]) -> dict[str, str]:
    """Run the file; say what is wrong. A lenient run goes on behind a statement that fails."""
    file = task["file"]
    remark = ""
    try:
        if not task["lenient"]:
            exec(compile(task["source"], file, "exec"), names)
        for node in ast.parse(task["source"], file).body if task["lenient"] else ():
            try:
                exec(compile(ast.Module([node], []), file, "exec"), names)
            except Exception as error:
                remark = remark or _line_of(error, task)
    except BaseException as error:
        return {"error": _line_of(error, task)}
    return {"remark": remark}


def _answer(task: dict[str, Any], names: dict[str, Any], call: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to one call with plain data."""
    at = call["number"]
    try:
        for name, text in call["files"].items():
            Path(name).write_text(text, "utf-8")
        if not callable(function := names.get(call["function"])):
            raise NameError(f"no function {call['function']}")
        said = {"at": at, "value": _plain(function(**call["arguments"]))}
        json.dumps(said, allow_nan=False)
    except BaseException as error:
        said = {"at": at, "error": _line_of(error, task)}
    return said


def _build_wall(task: dict[str, Any]) -> dict[str, Any]:
    """Close what this system can close; return what was. Raises where root cannot leave itself."""
    wall: dict[str, Any] = {"account": -1, "files": False, "network": False, "disk": False}
    if os.name == "posix":
        own = str(Path.cwd())
        confine = _neighbour("confine")
        account = confine.account_of(os.getpid())
        libc = ctypes.CDLL(None, use_errno=True)
        made = None
        if sys.platform == "linux":
            confine.handles(task["handles"])
            wall["network"], wall["disk"] = confine.into_name_spaces(libc, own)
            made = confine.rules(libc, task["readable"], task["listed"])
        _redirect(task["output_bytes"])
        wall["account"] = confine.leave_root(account)
        if sys.platform == "linux":
            wall["files"] = confine.confine(libc, made)
    else:
        _redirect(task["output_bytes"])
    _limit(task)
    return wall


def _neighbour(name: str) -> Any:
    """Import a file beside this one, without the package around it."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _redirect(output_bytes: int) -> None:
    """Put a file under standard output and error, nothing under input."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for source, targets in (
        (os.open("output.txt", flags, 0o644), (1, 2)),
        (os.open(os.devnull, os.O_RDONLY), (0,)),
    ):
        for target in targets:
            os.dup2(source, target)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def _limit(task: dict[str, Any]) -> None:
    """Set what a process may use: memory, bytes of a file, open files; no processes of its own."""
    if resource is None:
        return
    limits = {
        "RLIMIT_AS": task["memory_bytes"],
        "RLIMIT_FSIZE": task["output_bytes"],
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
        "RLIMIT_NPROC": 0,
    }
    for name, limit in limits.items():
        with suppress(OSError, ValueError, AttributeError):
            resource.setrlimit(getattr(resource, name), (limit, limit))


def _look_only_at(path: list[str], moved: list[str]) -> None:
    """Import from these folders only; what is loaded already looks below the standard library's.

    `moved` is where that library was found, and by which path its account reaches it.
    """
    sys.path[:] = path
    sys.path_importer_cache.clear()
    old, new = moved
    for module in list(sys.modules.values()):
        below = getattr(module, "__path__", None)
        if isinstance(below, list):
            below[:] = [
                new + place[len(old) :] if place.startswith(old) else place for place in below
            ]


def _more_time(case_s: float) -> None:
    if resource is None:
        return
    with suppress(OSError, ValueError):
        soft = int(time.process_time() + case_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


class _Denied(importlib.abc.MetaPathFinder):
    """Says of modules that hold answers why they are not there; they are not on the path either."""

    def __init__(self, denied: list[str]) -> None:
        self.denied = tuple(denied)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if any(name == root or name.startswith(f"{root}.") for root in self.denied):
            raise ImportError(f"{name} is closed in this assignment")


def _plain(value: Any) -> Any:
    """Return plain data: numbers, text, lists, tables; NumPy's own become lists."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return [_plain(item) for item in value]
    if kind is dict:
        return {str(key): _plain(item) for key, item in value.items()}
    if kind.__module__ == "numpy":
        return _plain(value.tolist())
    raise TypeError(f"plain data, got {kind.__name__}: return lists, numbers, text")


def _place_of(error: BaseException, task: dict[str, Any]) -> str:
    """Return the line of the hand-in that an error came from, of a notebook with its cell."""
    line = 0
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == task["file"]:
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.filename == task["file"]:
        line = error.lineno or 0
    if not line:
        return ""
    above = task["source"].splitlines()[:line]
    heads = [(i, text) for i, text in enumerate(above, 1) if text.startswith("# %% code cell ")]
    cell = f" of {heads[-1][1][5:]}" if heads else ""
    return f" in line {line - (heads[-1][0] if heads else 0)}{cell} of {task['file']}"


def _line_of(error: BaseException, task: dict[str, Any]) -> str:
    """Return the error as one line with the line of the hand-in it came from."""
    try:
        said = error.msg if isinstance(error, SyntaxError) else str(error)
    except BaseException:
        said = ""
    return f"{type(error).__name__}{_place_of(error, task)}: {said}"[:400].replace("\n", " ")


if __name__ == "__main__":
    main()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(0)
