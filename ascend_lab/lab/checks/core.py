"""Exercise checks: random cases, a property, and an answer that names the first failing case.

A check never raises whatever the tested function does (raise, return None, return nonsense, never
return, end Python: see `wall`), so that the page of a student who has not started still runs. It
takes `seed=`: the grader's hidden tests are the same properties with other seeds.
"""

import copy
import math
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from inspect import unwrap
from itertools import islice
from numbers import Real
from traceback import walk_tb
from typing import Any

import numpy as np

from ascend_lab.errors import AscendLabError
from ascend_lab.lab.checks.wall import CheckError, Run, Tell, Verdict, behind_wall

DEFAULT_CASES = 40
DEFAULT_SEED = 7
SHORT_CASE = 80
"""Characters of the arguments that may stand before the reason of a message."""
SHORT_ARRAY = 6
"""Numbers of an array that a message prints."""
Case = Mapping[str, Any]
"""One call: parameter name -> value. Values are passed by position, names are for the message."""
Edges = Sequence[Case | tuple[Any, ...]]
"""Cases that come first; a tuple has the values of a case in the order in which it is drawn."""
Rng = np.random.Generator
MakeCase = Callable[[Rng], Case]
Judge = Callable[[Any, Case], str | None]
"""Given what the function returned and the case, return None if right, else what is wrong,
as the end of the sentence "your function returned ..., "."""
Check = Callable[..., "CheckResult"]
"""Called with the answer, a function, and `seed=`."""
_EXERCISE = re.compile(r"ex_(\d\d)([a-z]?)_(\d+)")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True, repr=False)
class CheckResult:
    """The outcome of one check; prints as one sentence, the same for the same function and seed."""

    exercise: str
    passed: bool
    message: str
    seed: int
    cases: int
    subject: Any
    """The object that was tested itself, so that a test can assert whose function it was."""
    again: Callable[[], Case] | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the case that failed, to call the answer with again: `fn(**...)`.

        By position where the answer's own parameters have other names. Raises `CheckError` where
        no case failed.
        """
        if self.again is None:
            remedy = "a check that passed, or had no single case, has none"
            raise CheckError("a case that failed", self.message[:60], remedy)
        return dict(self.again())

    def __repr__(self) -> str:
        verdict = "passed" if self.passed else "not yet"
        return f"ex {exercise_number(self.exercise)} {verdict}: {self.message} (seed {self.seed})"

    def __bool__(self) -> bool:
        return self.passed


def exercise_number(exercise: str) -> str:
    """Return the printed number of an exercise: `ex_01_2` is "1.2"."""
    found = _EXERCISE.fullmatch(exercise)
    if found is None:
        raise CheckError("an exercise is named like ex_01_2", repr(exercise), "rename it")
    return f"{int(found[1])}{found[2]}.{int(found[3])}"


def show(value: object, limit: int = 70) -> str:
    """Return a short, stable text for any value: no memory addresses, no failing `repr`."""
    if isinstance(value, np.generic):
        value = value.item()
    try:
        if isinstance(value, np.ndarray):
            head = np.array2string(value, separator=", ", threshold=8, edgeitems=3, precision=6)
            text = f"{head} (shape {value.shape}, {value.dtype})"
        else:
            shortener = reprlib.Repr()
            shortener.maxstring = shortener.maxother = limit
            shortener.maxlist = shortener.maxtuple = shortener.maxdict = 8
            text = shortener.repr(value)
    except Exception as error:  # a student's class may have a broken __repr__
        text = f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    text = _ADDRESS.sub("", " ".join(text.split()))
    return text if len(text) <= 2 * limit else text[: 2 * limit - 3] + "..."


def brief(value: object, limit: int = 90) -> str:
    """Return a value as text if that is short, else what it is: no program, no array is printed.

    >>> brief(3), brief(np.zeros((64, 16)))
    ('3', 'an array of shape (64, 16)')
    >>> brief(range(10**95))  # its text has more than 90 characters
    'a range'
    """
    if isinstance(value, np.ndarray) and value.size > SHORT_ARRAY:
        return f"an array of shape {value.shape}"
    text = show(value, limit + 1)  # cut behind the limit, so that a long text is seen to be long
    if len(text) <= limit:
        return text
    kind = type(value).__name__
    if isinstance(value, list | tuple | dict | set | str | bytes):
        return f"a {kind} of {len(value)}"
    return f"a {kind}"


def equal_to(expected: Any, rel_tol: float = 0.0) -> Callable[[object], str | None]:
    """Return a judge of one value: numbers by `rel_tol`, arrays by shape then value, else `==`."""

    def judge(got: Any) -> str | None:
        if isinstance(expected, np.ndarray) and np.shape(got) != expected.shape:
            return f"of shape {np.shape(got)}, expected shape {expected.shape}"
        if _same(got, expected, rel_tol):
            return None
        where = _first_difference(got, expected, rel_tol)
        return f"{where}; expected {brief(expected)}" if where else f"expected {show(expected)}"

    return judge


def _first_difference(got: Any, expected: Any, rel_tol: float) -> str:
    """Return where two arrays or lists of one length first differ, as the end of a sentence."""
    if isinstance(expected, np.ndarray) and expected.ndim and expected.size > 1:
        same = np.isclose(got, expected, rtol=rel_tol, atol=0.0, equal_nan=True)
        place = tuple(int(i) for i in np.argwhere(~same)[0])
        at = ", ".join(map(str, place))
        values = f"{show(np.asarray(got)[place])} for {show(expected[place])}"
    elif isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        pairs = enumerate(zip(got, expected, strict=False))
        differing = (i for i, (g, e) in pairs if not _same(g, e, rel_tol))
        if len(got) != len(expected):
            return f"of length {len(got)} for {len(expected)}"
        first = next(differing)
        at = str(first)
        values = f"{show(got[first])} for {show(expected[first])}"
        if len(expected) < 2:
            return ""
    else:
        return ""
    return f"first differing at [{at}]: {values}"


def _same(got: Any, expected: Any, rel_tol: float) -> bool:
    """Compare by the type of what is expected; a bool is no number and None equals only None."""
    if expected is None:
        return got is None
    if isinstance(expected, bool | np.bool_):
        return isinstance(got, bool | np.bool_) and bool(got) == bool(expected)
    if isinstance(expected, int | float | complex | np.number | np.ndarray):
        if got is None or isinstance(got, bool | str | bytes):
            return False
        return np.shape(got) == np.shape(expected) and bool(
            np.allclose(got, expected, rtol=rel_tol, atol=0.0, equal_nan=True)
        )
    if isinstance(expected, list | tuple):
        alike = isinstance(got, list | tuple) and len(got) == len(expected)
        return alike and all(_same(g, e, rel_tol) for g, e in zip(got, expected, strict=True))
    return bool(got == expected)


def check_property(
    exercise: str,
    fn: Any,
    judge: Judge,
    make_case: MakeCase,
    *,
    edge_cases: Sequence[Case] = (),
    cases: int = DEFAULT_CASES,
    seed: int = DEFAULT_SEED,
) -> CheckResult:
    """Call `fn` on the edge cases, then on `cases` random ones, and judge what it returns.

    `make_case(rng)` draws one case; `judge(returned, case)` says what is wrong, or None. The first
    failing case ends the check and is named in the message.
    """
    exercise_number(exercise)
    if cases < 0 or cases + len(edge_cases) == 0:
        raise CheckError(f"{exercise}: a check needs at least one case", str(cases), "add cases")

    def all_cases() -> Iterator[Case]:
        rng = np.random.default_rng(seed)
        yield from edge_cases
        yield from (make_case(rng) for _ in range(cases))

    def run(tell: Tell) -> Verdict:
        if not callable(fn):
            return False, f"expected your function, got {show(fn)}", 0
        for number, case in enumerate(all_cases(), 1):
            wrong = _try_case(fn, judge, case, partial(tell, number))
            if wrong is not None:
                return False, wrong, number
        edges = f"{len(edge_cases)} edge and " if edge_cases else ""
        return True, f"{edges}{cases} random cases", len(edge_cases) + cases

    result = check_behind_wall(exercise, fn, run, seed)
    if result.passed or not result.cases:
        return result
    return replace(result, again=lambda: next(islice(all_cases(), result.cases - 1, None)))


def check_behind_wall(exercise: str, fn: Any, run: Run, seed: int) -> CheckResult:
    """Return the result of a check of `fn` that `run` makes, behind the wall.

    All that an answer gives is to be called, compared, shown and dropped inside of `run`.
    """
    passed, message, cases = behind_wall(run)
    return CheckResult(exercise, passed, message, seed, cases, fn)


def like(reference: Callable[..., object], rel_tol: float = 0.0) -> Judge:
    """Return a judge: right is what `reference` returns, numbers within a relative tolerance."""

    def judge(got: Any, case: Case) -> str | None:
        try:
            expected = reference(*_values(case))
        except Exception as error:
            needed = "a reference that works"
            raise CheckError(needed, repr(error), "correct the reference") from error
        return equal_to(expected, rel_tol)(got)

    return judge


def drawn(rng: Rng, **choices: Sequence[Any] | Callable[[Rng], Any]) -> dict[str, Any]:
    """Return one value of each sequence, `n=range(1, 9)`, by its name; drawn in their order.

    A function, such as `between(0.0, 1.0)`, draws for itself.
    """
    return {
        name: choice(rng) if callable(choice) else choice[int(rng.integers(len(choice)))]
        for name, choice in choices.items()
    }


def between(low: float, high: float) -> Callable[[Rng], float]:
    """Return a function that draws a number from low to high."""
    return lambda rng: float(rng.uniform(low, high))


def counting(function: Callable[..., Any], price: Callable[..., int]) -> Any:
    """Return a function that adds up the price of its calls in an attribute `spent`.

    `price(result, *arguments)` is that of one. A copied function is itself: `spent` sets it back.
    """

    def counted(*arguments: Any) -> Any:
        result = function(*arguments)
        counted.__dict__["spent"] += price(result, *arguments)
        return result

    counted.__name__ = counted.__qualname__ = function.__name__
    counted.__dict__["spent"] = 0
    return counted


def spent(counted: Any) -> int:
    """Return what the calls of a `counting` function came to, and begin again."""
    total = counted.__dict__["spent"]
    counted.__dict__["spent"] = 0
    return int(total)


def judged(
    judge: Judge | None = None,
    *,
    edges: Edges = (),
    cases: int = DEFAULT_CASES,
    wrap: Callable[[Any], Any] | None = None,
    **choices: Sequence[Any] | Callable[[Rng], Any],
) -> Callable[[Callable[..., Any]], Check]:
    """Turn a function that draws a case, `check_ex_NN_k(rng)`, into the check of its exercise.

    Without a judge the function is the judge, and cases are `drawn` from the choices. What `wrap`
    makes of the answer is called in its place.
    """

    def decorator(function: Callable[..., Any]) -> Check:
        draw: MakeCase = function if judge else lambda rng: drawn(rng, **choices)

        def check(fn: Any, seed: int = DEFAULT_SEED) -> CheckResult:
            exercise = check.__name__.removeprefix("check_")
            called = wrap(fn) if wrap and callable(fn) else fn
            if called is not fn:
                called.__wrapped__ = fn  # an error names the lines of the answer itself
            names = tuple(draw(np.random.default_rng(seed))) if edges else ()
            edge_cases = [
                dict(zip(names, edge, strict=True)) if isinstance(edge, tuple) else edge
                for edge in edges
            ]
            result = check_property(
                exercise,
                called,
                judge or function,
                draw,
                edge_cases=edge_cases,
                cases=cases,
                seed=seed,
            )
            return replace(result, subject=fn)

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(check, name, getattr(function, name))
        return check

    return decorator


def against(
    reference: Callable[..., object] | None = None, *, rel_tol: float = 0.0, **options: Any
) -> Callable[[Callable[..., Any]], Check]:
    """As `judged`, by the values of a reference; without one the function itself is it."""
    if reference:
        return judged(like(reference, rel_tol), **options)
    return lambda function: judged(**options)(wraps(function)(like(function, rel_tol)))


def _values(case: Case) -> list[Any]:
    """Copy the arguments, so that a function that changes them changes only its own copy."""
    return copy.deepcopy(list(case.values()))


def _try_case(
    fn: Callable[..., Any], judge: Judge, case: Case, tell: Callable[[str], None]
) -> str | None:
    """Run one case and return the sentence about what went wrong, or None.

    The reason stands first: arguments that take much room are named behind it.
    """
    named = ", ".join(f"{name}={brief(value)}" for name, value in case.items())
    where = f"for {named} your function" if named else "your function"
    behind = ""
    if len(named) > SHORT_CASE:
        behind = f"; called with {named}"
    start = "your function" if behind else where
    arguments = _values(case)
    tell(where)
    try:
        got = fn(*arguments)
    except (Exception, SystemExit) as error:
        return f"{start} {raised(error, fn)}{behind}"
    tell(where.removesuffix("your function") + "the judgement of what your function returned")
    try:
        wrong = judge(got, case)
    except CheckError:  # a broken reference must not look like a wrong answer
        raise
    except Exception as error:
        cannot = f"which cannot be judged ({type(error).__name__})"
        return f"{start} returned {brief(got)}, {cannot}{behind}"
    return None if wrong is None else f"{start} returned {brief(got)}, {wrong}{behind}"


def raised(error: BaseException, fn: Any = None) -> str:
    """Return "raised", the kind of an error, the line of `fn`'s cell, and its text in one line."""
    try:
        text = _ADDRESS.sub("", " ".join(str(error).split()))[:140]
    except Exception:  # a student's error may have a broken __str__
        text = ""
    file = getattr(getattr(unwrap(fn), "__code__", None), "co_filename", None)
    trace = walk_tb(error.__traceback__)
    lines = [line for frame, line in trace if frame.f_code.co_filename == file]
    where = f" in line {lines[-1]}" if lines else ""
    where = getattr(error, "place", "") or where  # the answer may have run in another process
    return f"raised {type(error).__name__}{where}" + (f": {text}" if text else "")


# Predict, then look: write a number down before the model says its own, then compare.
CLOSE = 0.05


class PredictionError(AscendLabError):
    """A guess or a model value that is not a finite number."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A question, the reader's guess (None: not yet), and its unit as text."""

    question: str
    guess: float | None = None
    unit: str = ""

    def __str__(self) -> str:
        if self.guess is None:
            unit = {"": "", "x": ", as a factor"}.get(self.unit, f", in {self.unit}")
            remedy = "Add guess=... to predict(...) and run it again."
            return f"{self.question}\nYour guess{unit}? {remedy}"
        return f"{self.question} Your guess: {_with_unit(self.guess, self.unit)}."


def predict(question: str, *, unit: str = "", guess: float | None = None) -> Prediction:
    """Keep and print a guess, or ask for one; `compare` it later with what the model says."""
    if guess is not None:
        guess = _finite(guess, "guess")
    prediction = Prediction(question, guess, unit)
    print(prediction)
    return prediction


def compare(
    prediction: Prediction | float,
    model_value: float,
    *,
    tempting: float | None = None,
    because: str = "",
) -> None:
    """Print, in one sentence, how far the guess was from the model value (in the guess's unit).

    `tempting` is the answer that a quick argument gives, and `because` that argument: a second
    sentence says both, so that a lost prediction teaches something.
    """
    if not isinstance(prediction, Prediction):  # a reader's `guess = 50`
        prediction = Prediction("", _finite(prediction, "guess"))
    model_value = _finite(model_value, "model value")
    print(_verdict(prediction, model_value))
    if tempting is not None:
        text = _with_unit(_finite(tempting, "tempting answer"), prediction.unit)
        print(f"The tempting answer is {text}: {because}.")


def _verdict(prediction: Prediction, model_value: float) -> str:
    model = f"the model says {_with_unit(model_value, prediction.unit)}"
    guess = prediction.guess
    if guess is None:
        return f"{model[0].upper()}{model[1:]}."
    text = f"You guessed {_with_unit(guess, prediction.unit)}; {model}: "
    if guess == model_value or abs(guess - model_value) <= CLOSE * abs(model_value):
        return text + f"within {CLOSE:.0%}, well predicted."
    if guess > 0 and model_value > 0:
        ratio = guess / model_value
        factor, side = (ratio, "high") if ratio > 1 else (1 / ratio, "low")
        return text + f"your guess is too {side} by a factor of {factor:.3g}."
    off = abs(guess - model_value)
    side = "high" if guess > model_value else "low"
    return text + f"your guess is too {side} by {_with_unit(off, prediction.unit)}."


def _with_unit(value: float, unit: str) -> str:
    """Write "2x", "15%" without and "3.2 us" with a space."""
    text = f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{text}{unit}" if unit in {"", "x", "%"} else f"{text} {unit}"


def _finite(value: object, what: str) -> float:
    """Accept any finite real number, NumPy's included, and return it as a float."""
    if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise PredictionError(f"a {what} must be a finite number", repr(value), "write a number")
