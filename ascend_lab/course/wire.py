"""Calls functions in another process over lines of JSON, with objects as arguments and results.

The grader and the confined process of a hand-in exchange such lines when a check of the book calls
a student's function with more than plain data. Numbers, texts, lists, dictionaries, arrays and
frozen dataclasses of the package are sent by value. A dataclass is sent once and then referred to
by a number, so that it stays one object. Functions, generators and drafts of graphs are not sent;
the other process gets a `StandIn`, which sends calls back.

A value that JSON lacks is written as a table: "!" names its kind, "v" holds its contents, so that
(1, 2) is {"!": "tuple", "v": [1, 2]}. Further keys are "n" (number of an object), "c" (class), "t"
(type of an array's elements), "s" (shape) and "w" (whether it can be changed).

Other objects of the grader are pickled (kind "trusted"), as the other process trusts them.
Data from a hand-in is never unpickled. It can only name frozen dataclasses of the package that the
grader has imported already, and their constructors check the values. A hand-in may call functions
that it was given, and public methods of a draft.
"""

import base64
import importlib
import json
import math
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from ascend_lab.errors import AscendLabError

STAYS = ("ascend_lab.compiler.draft:Draft", "ascend_lab.compiler.draft:GraphBuilder")
"""Classes whose objects stay in the grader's process, where their methods are called."""
SPECIAL = ("__iter__", "__next__")
"""Methods with underscores that may be called: those of a generator."""
COLLECTIONS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
"""Kinds of collections that are sent as lists."""
Line = dict[str, Any]


class StandIn:
    """A stand-in for an object of the other process, which passes on calls and attributes."""

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
    """One end of the connection between the grader and the process of a hand-in.

    `send` and `hear` transmit one line each. `roots` are the functions that the other process may
    call by name; only the end of the hand-in has them. "ex_01_1|bracket" calls the first of these
    names that exists. `place` describes where in the hand-in an error arose.
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
        # whether this is the process of the hand-in, which trusts the grader
        self.is_hand_in = roots is not None
        self.roots = roots or {}
        self.objects: dict[int, Any] = {}  # number -> object that was sent or received
        self.numbers: dict[int, int] = {}  # id of an object -> its number
        self.callable_numbers: set[int] = (
            set()
        )  # objects that stayed here and may be called by number

    # -- calls -------------------------------------------------------------------------------------

    def ask(self, number: int, name: str, args: Any = None, named: Mapping[str, Any] = {}) -> Any:
        """Call a method of an object of the other process, or read an attribute if `args` is None.

        Without a name the object itself is called. Number 0 stands for the functions that the other
        process lets be called by name (see `roots`).
        Until the result arrives, calls from the other process are served.
        """
        encoded_args = None if args is None else [self.encode(value) for value in args]
        encoded_named = {key: self.encode(value) for key, value in named.items()}
        self.send({"on": number, "name": name, "args": encoded_args, "named": encoded_named})
        while "on" in (reply := self.hear()):
            self.serve(reply)
        for position, changed in reply.get("changed", {}).items():
            _copy(args[int(position)], self.decode(changed))
        if "error" in reply:
            raise self._error(reply["error"])
        return self.decode(reply["value"])

    def serve(self, asked: Line) -> None:
        """Execute a call of the other process, and send its result or error.

        Arguments that the call changed in place, such as lists and arrays, are sent back as well.
        """
        try:
            args = [self.decode(value) for value in asked["args"] or []]
            contents_before = [_contents(self, value) for value in args]
            named = {key: self.decode(value) for key, value in asked["named"].items()}
            reply: Line = {"value": self.encode(self._do(asked, args, named)), "changed": {}}
            for i, (value, contents) in enumerate(zip(args, contents_before, strict=True)):
                if contents is not None and contents != _contents(self, value):
                    reply["changed"][str(i)] = self.encode(value)
            json.dumps(reply, allow_nan=False)
        except BaseException as error:
            if not self.is_hand_in and not isinstance(error, Exception):
                raise
            reply = {"error": self._described(error)}
        self.send(reply)

    def _do(self, asked: Line, args: list[Any], named: dict[str, Any]) -> Any:
        """Execute a call with decoded arguments and return its result."""
        number = asked["on"]
        name = asked["name"]
        if number == 0:  # a function of the hand-in, by name
            functions = [self.roots[n] for n in name.split("|") if callable(self.roots.get(n))]
            if not functions:
                # the second name, if there is one, is that on the book's page: it is stated first
                raise NameError(f"no function {' or '.join(reversed(name.split('|')))}")
            return functions[0](*args, **named)
        if number not in self.callable_numbers:
            raise LookupError(f"nothing called {number}")
        target = self.objects[number]
        if not name:
            return target(*args, **named)
        if name in SPECIAL:
            return iter(target) if name == "__iter__" else next(target)
        if name.startswith("_") or not (self.is_hand_in or _name(type(target)) in STAYS):
            raise AttributeError(name)
        attribute = getattr(target, name)
        return attribute if asked["args"] is None else attribute(*args, **named)

    # -- values ------------------------------------------------------------------------------------

    def encode(self, value: Any) -> Any:
        """Return a value as JSON; raise `TypeError` if it cannot be sent."""
        cls = type(value)
        if value is None or cls in (bool, int, str):
            return value
        if cls is float:
            return value if math.isfinite(value) else {"!": "float", "v": repr(value)}
        if cls is list:
            return [self.encode(item) for item in value]
        if cls.__name__ in COLLECTIONS and cls is COLLECTIONS[cls.__name__]:
            return {"!": cls.__name__, "v": [self.encode(item) for item in value]}
        if isinstance(value, dict | MappingProxyType):
            pairs = [[self.encode(key), self.encode(item)] for key, item in value.items()]
            return {"!": "table", "v": pairs, "w": isinstance(value, dict)}
        if cls in (bytes, complex):
            text = base64.b64encode(value).decode() if cls is bytes else str(value)
            return {"!": cls.__name__, "v": text}
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            return {
                "!": "array",
                "v": base64.b64encode(value.tobytes()).decode(),
                "t": value.dtype.str,
                "s": value.shape if cls is np.ndarray else None,
                "w": bool(value.flags.writeable),
            }
        return self._named(value)

    def _named(self, value: Any) -> Line:
        """Return an object with an identity as JSON: a known number, its fields, or a stand-in."""
        if isinstance(value, StandIn) and value._wire is self:
            return {"!": "known", "n": value._number}
        if id(value) in self.numbers:
            return {"!": "known", "n": self.numbers[id(value)]}
        if _is_sent_by_value(type(value)):
            field_values = {
                f.name: self.encode(getattr(value, f.name)) for f in fields(value) if f.init
            }
            return {"!": "data", "c": _name(type(value)), "v": field_values, "n": self._keep(value)}
        is_callable = callable(value) or hasattr(type(value), "__next__")
        if (is_callable and not isinstance(value, type)) or _name(type(value)) in STAYS:
            number = self._keep(value)
            self.callable_numbers.add(number)
            return {"!": "other", "n": number}
        if self.is_hand_in:
            raise TypeError(f"plain data, got {type(value).__name__}: it cannot leave your program")
        text = base64.b64encode(pickle.dumps(value)).decode()
        return {"!": "trusted", "v": text, "n": self._keep(value)}

    def _keep(self, value: Any, number: int | None = None) -> int:
        """Remember an object under a number, by default a new one, and return the number.

        The grader's numbers are positive, those of the hand-in's process negative. Objects of both
        are counted here: with two known ones, the next is 3 or -3.
        """
        if number is None:
            number = (len(self.objects) + 1) * (-1 if self.is_hand_in else 1)
        elif number in self.objects or (number > 0) is not self.is_hand_in:
            raise ValueError(f"{number} is no new number")
        self.objects[number] = value
        self.numbers[id(value)] = number
        return number

    def decode(self, encoded: Any) -> Any:
        """Return the value that `encode` wrote as this JSON; raise an error for other JSON."""
        if isinstance(encoded, list):
            return [self.decode(item) for item in encoded]
        if not isinstance(encoded, dict):
            return encoded
        tag: str = encoded["!"]
        content: Any = encoded.get("v")
        if tag in COLLECTIONS:
            return COLLECTIONS[tag](self.decode(item) for item in content)
        if tag == "table":
            table = {self.decode(key): self.decode(item) for key, item in content}
            return table if encoded["w"] else MappingProxyType(table)
        if tag in ("float", "complex"):
            return {"float": float, "complex": complex}[tag](content)
        if tag == "bytes":
            return base64.b64decode(content)
        if tag == "array":
            return _array(encoded)
        if tag == "known":
            return self.objects[encoded["n"]]
        if tag == "data":
            value = self._class(encoded["c"])(
                **{key: self.decode(item) for key, item in content.items()}
            )
        elif tag == "trusted" and self.is_hand_in:
            value = pickle.loads(base64.b64decode(content))
        elif tag == "other":
            value = StandIn(self, encoded["n"])
        else:
            raise ValueError(f"no kind of value: {tag}")
        self._keep(value, encoded["n"])
        return value

    def _class(self, name: str) -> Any:
        """Return a class by its name; raise `ValueError` unless it is sent by value."""
        module, _, path = name.partition(":")
        if self.is_hand_in:
            importlib.import_module(module)
        cls: Any = sys.modules.get(module) if module.startswith("ascend_lab.") else None
        for attribute in path.split("."):
            cls = getattr(cls, attribute, None)
        if not (isinstance(cls, type) and _is_sent_by_value(cls) and _name(cls) == name):
            raise ValueError(f"no class whose objects travel: {name[:60]}")
        return cls

    # -- errors ------------------------------------------------------------------------------------

    def _described(self, error: BaseException) -> Line:
        """Return an error as JSON: the names of its classes, its text and its place."""
        names = [_name(cls) for cls in type(error).__mro__]
        try:
            message = error.args[0] if len(error.args) == 1 else str(error)
            text = message if type(message) is str else str(error)
        except BaseException:
            text = ""
        returned = self.encode(error.value) if isinstance(error, StopIteration) else None
        return {"names": names, "text": text[:400], "place": self.place(error), "end": returned}

    def _error(self, encoded: Line) -> Exception:
        """Return an error of the other process, of the first of its classes that exists here."""
        text = str(encoded["text"])[:400]
        names = [str(name) for name in encoded["names"]]
        class_name = names[0].rpartition(":")[2]
        new_class = type(class_name if class_name.isidentifier() else "Error", (Exception,), {})
        error: Any = new_class(text)
        for name in names:
            known_error = self._known_error(name, encoded, error)
            if known_error is not None:
                error = known_error
                break
        error.place = str(encoded["place"])[:80]
        return error  # type: ignore[no-any-return]

    def _known_error(self, name: str, encoded: Line, unknown: Exception) -> Exception | None:
        """Return an error of the class `name`; None if it is not here or is of no use to a check.

        Classes of use are those of the package, StopIteration, and Python's other errors but the
        general Exception. If a class takes more than a text, return `unknown`.
        """
        text = str(encoded["text"])[:400]
        module, _, path = name.partition(":")
        cls = getattr(sys.modules.get(module), path, None) if path.isidentifier() else None
        if not isinstance(cls, type) or not issubclass(cls, Exception):
            return None
        if issubclass(cls, AscendLabError):
            error = cls.__new__(cls, text)
            AscendLabError.__init__(error, text)
            return error
        if cls is StopIteration:
            return cls(self.decode(encoded["end"]))
        if module != "builtins" or cls is Exception:
            return None
        try:
            return cls(text)
        except TypeError:  # UnicodeDecodeError, for one, takes five arguments
            return unknown


def _name(cls: type) -> str:
    """Return the name of a class, such as "ascend_lab.compiler.draft:Draft"."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _is_sent_by_value(cls: type) -> bool:
    """Tell whether objects of a class are sent by value: frozen dataclasses of the package are."""
    module = cls.__module__
    # the checks hold reference answers
    is_ours = module.startswith("ascend_lab.") and not module.startswith("ascend_lab.lab.checks")
    return is_ours and is_dataclass(cls) and cls.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _array(encoded: Line) -> Any:
    """Return an array, or a NumPy number, from JSON."""
    dtype = np.dtype(encoded["t"])
    if dtype.kind not in "biufc":
        raise ValueError(f"no array of {dtype}")
    flat = np.frombuffer(base64.b64decode(encoded["v"]), dtype).copy()
    if encoded["s"] is None:
        return flat[0]
    array = flat.reshape(encoded["s"])
    array.flags.writeable = encoded["w"]
    return array


def _contents(wire: Wire, value: Any) -> str | None:
    """Return the contents of an argument that can be changed in place as text; None for others."""
    if not isinstance(value, list | dict | set | np.ndarray):
        return None
    return json.dumps(wire.encode(value))


def _copy(target: Any, source: Any) -> None:
    """Overwrite an argument in place by its contents after a call."""
    if isinstance(target, np.ndarray):
        target[...] = source
    elif isinstance(target, list):
        if len(target) == len(source) and all(isinstance(item, np.ndarray) for item in target):
            for old_item, new_item in zip(target, source, strict=True):
                _copy(old_item, new_item)
        else:
            target[:] = source
    elif isinstance(target, dict | set):
        target.clear()
        target.update(source)
