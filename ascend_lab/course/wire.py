"""Objects over lines of JSON: values travel, what has a state stays and is called from afar.

Both sides of the wall talk so when a hand-in's function takes and gives more than plain data.
Numbers, texts, lists, tables, arrays and the package's frozen dataclasses travel by value, each
such object once: after that it is named by a number, so that it stays the same object. Functions,
generators and drafts of graphs stay where they are; the other side holds a `StandIn`.

What comes from a hand-in is only ever read as data: it names a class that this side has imported
already, of the package, frozen, made by its own constructor. Nothing of it is unpickled. It may
call what was handed to it, and of a draft what has a public name.
"""

import base64
import importlib
import json
import math
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from ascend_lab.errors import AscendLabError

STAYS = ("ascend_lab.compiler.draft:Draft", "ascend_lab.compiler.draft:GraphBuilder")
"""Classes whose objects stay on the near side and are called there."""
SPECIAL = ("__iter__", "__next__")
SETS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
Line = dict[str, Any]


class StandIn:
    """What stands for an object of the other side: its calls and public names go there."""

    def __init__(self, wire: "Wire", number: int) -> None:
        self._wire = wire
        self._number = number

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._wire.ask(self._number, name)

    def __call__(self, *args: Any, **named: Any) -> Any:  # noqa: D102
        return self._wire.ask(self._number, "", args, named)

    def __iter__(self) -> Any:
        return self._wire.ask(self._number, "__iter__", ())

    def __next__(self) -> Any:
        return self._wire.ask(self._number, "__next__", ())


class Wire:
    """One side of the talk. `far` is the hand-in's side, which may trust the other.

    `send` and `hear` carry one line each; `roots` are the functions that the other side may call
    by one of their names, "ex_01_1|bracket"; `place` says where in the hand-in an error arose.
    """

    def __init__(
        self,
        send: Callable[[Line], None],
        hear: Callable[[], Line],
        roots: Mapping[str, Any] | None = None,
        place: Callable[[BaseException], str] = lambda error: "",
    ) -> None:
        self.send = send
        self.hear = hear
        self.place = place
        self.far = roots is not None
        self.roots = roots or {}
        self.objects: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}
        self.kept: set[int] = set()

    # -- calls -------------------------------------------------------------------------------------

    def ask(self, on: int, name: str, args: Any = None, named: Mapping[str, Any] = {}) -> Any:
        """Call (or, without arguments, get) something of the other side, serving it meanwhile."""
        given = None if args is None else [self.encode(value) for value in args]
        tables = {key: self.encode(value) for key, value in named.items()}
        self.send({"on": on, "name": name, "args": given, "named": tables})
        while "on" in (said := self.hear()):
            self.serve(said)
        for at, changed in said.get("changed", {}).items():
            _copy(args[int(at)], self.decode(changed))
        if "error" in said:
            raise self._error(said["error"])
        return self.decode(said["value"])

    def serve(self, asked: Line) -> None:
        """Do what the other side asks, and say what came of it, or what was raised."""
        try:
            args = [self.decode(value) for value in asked["args"] or []]
            before = [_held(self, value) for value in args]
            named = {key: self.decode(value) for key, value in asked["named"].items()}
            said: Line = {"value": self.encode(self._do(asked, args, named)), "changed": {}}
            for i, (value, held) in enumerate(zip(args, before, strict=True)):
                if held is not None and held != _held(self, value):
                    said["changed"][str(i)] = self.encode(value)
            json.dumps(said, allow_nan=False)
        except BaseException as error:
            if not self.far and not isinstance(error, Exception):
                raise
            said = {"error": self._described(error)}
        self.send(said)

    def _do(self, asked: Line, args: list[Any], named: dict[str, Any]) -> Any:
        on = asked["on"]
        name = asked["name"]
        if on == 0:
            own = [self.roots[n] for n in name.split("|") if callable(self.roots.get(n))]
            if not own:
                raise NameError(f"no function {' or '.join(reversed(name.split('|')))}")
            return own[0](*args, **named)
        if on not in self.kept:
            raise LookupError(f"nothing called {on}")
        thing = self.objects[on]
        if not name:
            return thing(*args, **named)
        if name in SPECIAL:
            return iter(thing) if name == "__iter__" else next(thing)
        if name.startswith("_") or not (self.far or _name(type(thing)) in STAYS):
            raise AttributeError(name)
        found = getattr(thing, name)
        return found if asked["args"] is None else found(*args, **named)

    # -- values ------------------------------------------------------------------------------------

    def encode(self, value: Any) -> Any:
        """Return a value as JSON; raise `TypeError` where it cannot travel."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"!": "float", "v": repr(value)}
        if kind is list:
            return [self.encode(item) for item in value]
        if kind.__name__ in SETS and kind is SETS[kind.__name__]:
            return {"!": kind.__name__, "v": [self.encode(item) for item in value]}
        if isinstance(value, dict | MappingProxyType):
            pairs = [[self.encode(key), self.encode(item)] for key, item in value.items()]
            return {"!": "table", "v": pairs, "w": isinstance(value, dict)}
        if kind in (bytes, complex):
            text = base64.b64encode(value).decode() if kind is bytes else str(value)
            return {"!": kind.__name__, "v": text}
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            return {
                "!": "array",
                "v": base64.b64encode(value.tobytes()).decode(),
                "t": value.dtype.str,
                "s": value.shape if kind is np.ndarray else None,
                "w": bool(value.flags.writeable),
            }
        return self._named(value)

    def _named(self, value: Any) -> Line:
        """Return an object that keeps its identity: by number, by its fields, or as a stand-in."""
        if isinstance(value, StandIn) and value._wire is self:
            return {"!": "known", "n": value._number}
        if id(value) in self.numbers:
            return {"!": "known", "n": self.numbers[id(value)]}
        if _travels(type(value)):
            parts = {f.name: self.encode(getattr(value, f.name)) for f in fields(value) if f.init}
            return {"!": "data", "c": _name(type(value)), "v": parts, "n": self._keep(value)}
        calls = callable(value) or hasattr(type(value), "__next__")
        if (calls and not isinstance(value, type)) or _name(type(value)) in STAYS:
            self.kept.add(number := self._keep(value))
            return {"!": "other", "n": number}
        if self.far:
            raise TypeError(f"plain data, got {type(value).__name__}: it cannot leave your program")
        text = base64.b64encode(pickle.dumps(value)).decode()
        return {"!": "trusted", "v": text, "n": self._keep(value)}

    def _keep(self, value: Any, number: int | None = None) -> int:
        if number is None:
            number = (len(self.objects) + 1) * (-1 if self.far else 1)
        elif number in self.objects or (number > 0) is not self.far:
            raise ValueError(f"{number} is no new number")
        self.objects[number] = value
        self.numbers[id(value)] = number
        return number

    def decode(self, said: Any) -> Any:
        """Return the value that JSON stands for; raise where it is none of `encode`."""
        if isinstance(said, list):
            return [self.decode(item) for item in said]
        if not isinstance(said, dict):
            return said
        kind: str = said["!"]
        v: Any = said.get("v")
        if kind in SETS:
            return SETS[kind](self.decode(item) for item in v)
        if kind == "table":
            table = {self.decode(key): self.decode(item) for key, item in v}
            return table if said["w"] else MappingProxyType(table)
        if kind in ("float", "complex"):
            return {"float": float, "complex": complex}[kind](v)
        if kind == "bytes":
            return base64.b64decode(v)
        if kind == "array":
            return _array(said)
        if kind == "known":
            return self.objects[said["n"]]
        if kind == "data":
            made = self._class(said["c"])(**{key: self.decode(item) for key, item in v.items()})
        elif kind == "trusted" and self.far:
            made = pickle.loads(base64.b64decode(v))
        elif kind == "other":
            made = StandIn(self, said["n"])
        else:
            raise ValueError(f"no kind of value: {kind}")
        self._keep(made, said["n"])
        return made

    def _class(self, name: str) -> Any:
        """Return a class of the package by its name, if its objects may travel."""
        home, _, path = name.partition(":")
        if self.far:
            importlib.import_module(home)
        found: Any = sys.modules.get(home) if home.startswith("ascend_lab.") else None
        for part in path.split("."):
            found = getattr(found, part, None)
        if not (isinstance(found, type) and _travels(found) and _name(found) == name):
            raise ValueError(f"no class whose objects travel: {name[:60]}")
        return found

    # -- errors ------------------------------------------------------------------------------------

    def _described(self, error: BaseException) -> Line:
        names = [_name(kind) for kind in type(error).__mro__]
        try:
            said = error.args[0] if len(error.args) == 1 else str(error)
            text = said if type(said) is str else str(error)
        except BaseException:
            text = ""
        end = self.encode(error.value) if isinstance(error, StopIteration) else None
        return {"names": names, "text": text[:400], "place": self.place(error), "end": end}

    def _error(self, said: Line) -> Exception:
        """Return an error of the other side as the first of its classes that is known here."""
        names = said["names"]
        text = str(said["text"])[:400]
        own = str(names[0]).rpartition(":")[2]
        error: Any = type(own if own.isidentifier() else "Error", (Exception,), {})(text)
        for name in map(str, names):
            home, _, path = name.partition(":")
            found = getattr(sys.modules.get(home), path, None) if path.isidentifier() else None
            if not isinstance(found, type) or not issubclass(found, Exception):
                continue
            if issubclass(found, AscendLabError):
                error = found.__new__(found, text)
                AscendLabError.__init__(error, text)
            elif found is StopIteration:
                error = found(self.decode(said["end"]))
            elif home == "builtins" and found is not Exception:
                with suppress(TypeError):  # some take more than a text
                    error = found(text)
            else:
                continue
            break
        error.place = str(said["place"])[:80]
        return error  # type: ignore[no-any-return]


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _travels(kind: type) -> bool:
    """Whether objects of a class travel by value: frozen dataclasses of the package."""
    home = kind.__module__
    ours = home.startswith("ascend_lab.") and not home.startswith("ascend_lab.lab.checks")
    return ours and is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _array(said: Line) -> Any:
    dtype = np.dtype(said["t"])
    if dtype.kind not in "biufc":
        raise ValueError(f"no array of {dtype}")
    flat = np.frombuffer(base64.b64decode(said["v"]), dtype).copy()
    if said["s"] is None:
        return flat[0]
    made = flat.reshape(said["s"])
    made.flags.writeable = said["w"]
    return made


def _held(wire: Wire, value: Any) -> str | None:
    """Return what an argument holds before or after a call, None of what cannot be changed."""
    if not isinstance(value, list | dict | set | np.ndarray):
        return None
    return json.dumps(wire.encode(value))


def _copy(old: Any, new: Any) -> None:
    """Lay what an argument holds after a call over what it held before it."""
    if isinstance(old, np.ndarray):
        old[...] = new
    elif isinstance(old, list):
        if len(old) == len(new) and all(isinstance(item, np.ndarray) for item in old):
            for one, other in zip(old, new, strict=True):
                _copy(one, other)
        else:
            old[:] = new
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)
