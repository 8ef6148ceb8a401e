"""The loop of tuning, in one process and on Dask."""

import io
import math
import os
import signal
from concurrent.futures import BrokenExecutor, Executor, Future

import pytest
import search_cases as cases

import ascend_lab.aoe.workers as workers_module
from ascend_lab.aoe.bank import Knowledge
from ascend_lab.aoe.drive import MAX_IDLE_BATCHES, Bars, Rules, Trial, drive
from ascend_lab.aoe.search import SEARCHES
from ascend_lab.aoe.workers import WORKER_DIED, Workers, WorkersLostError, workers_of
from ascend_lab.errors import InputError

SPACE = cases.table()


class Backwards(Executor):
    """Runs what was submitted last first, when the first result is asked for."""

    def __init__(self):
        self.waiting = []
        self.ran = []

    def submit(self, fn, /, *args, **kwargs):
        future = _Lazy(self)
        self.waiting.append((future, fn, args))
        return future

    def run(self):
        while self.waiting:
            future, fn, args = self.waiting.pop()
            self.ran.append(args[1])
            future.set_result(fn(*args))


class _Lazy(Future):
    def __init__(self, owner):
        super().__init__()
        self.owner = owner

    def result(self, timeout=None):
        self.owner.run()
        return super().result(timeout)


@pytest.mark.parametrize("name", SEARCHES)
def test_the_order_of_completion_does_not_change_the_trace(name):
    backwards = Backwards()
    trace = drive(SEARCHES[name], SPACE, cases.failing, 25, seed=4, rules=Rules(workers=backwards))
    assert trace == drive(SEARCHES[name], SPACE, cases.failing, 25, seed=4)
    assert len(backwards.ran) == 25
    if name == "genetic":
        assert backwards.ran != [t.point for t in trace.trials]


def test_the_number_of_processes_does_not_change_the_trace():
    with workers_of("processes:2") as workers:
        for name in ("genetic", "mcts"):
            alone = drive(SEARCHES[name], SPACE, cases.failing, 25, seed=4)
            trace = drive(
                SEARCHES[name], SPACE, cases.failing, 25, seed=4, rules=Rules(workers=workers)
            )
            assert trace == alone


def test_a_candidate_that_kills_its_process_costs_a_trial_and_nothing_else():
    with workers_of("processes:2") as workers:
        trace = drive(
            SEARCHES["exhaustive"], SPACE, cases.deadly, 100, rules=Rules(workers=workers)
        )
    assert trace.end == "exhausted" and len(trace.trials) == SPACE.size
    (dead,) = trace.failures
    assert dead.point == (2, 9, "y") and dead.note == "its worker process died"
    good = {t.point: t.cost for t in trace.trials if t is not dead}
    assert good == {p: cases.cost(p) for p in SPACE.points() if p != dead.point}


class Dying(Executor):
    """Breaks at once, as a pool whose every process is killed."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        future.set_exception(BrokenExecutor())
        return future


def test_processes_that_all_die_measure_nothing():
    told = []
    for workers in (Workers(executor=Dying()), Workers(Dying)):
        with pytest.raises(
            WorkersLostError, match=r"lost the workers: they end.*resume=True goes on"
        ):
            drive(
                SEARCHES["random"],
                SPACE,
                cases.cost,
                5,
                rules=Rules(workers=workers, on_trial=told.append),
            )
    assert told == []


def test_what_a_dead_worker_left_is_not_banked_and_not_believed(tmp_path):
    lost = (WORKER_DIED, "CancelledError: ", "KilledWorker: ('attempt', 4)")
    notes = ("", "took longer than 30 s", *lost)
    trials = [Trial(i, (i,), math.inf if note else 1.0, note) for i, note in enumerate(notes)]
    with Knowledge(tmp_path / "bank.db", None) as bank:
        bank.save_trials("run", trials)
        assert [t.note for t in bank.trials("run")] == list(notes[:2])
        bank._store.save_trials("run", trials)  # as earlier versions did
        assert [t.note for t in bank.trials("run")] == list(notes[:2])


@pytest.mark.parametrize("workers", ["serial", "processes:1"])
def test_a_candidate_that_never_ends_is_stopped(workers):
    with workers_of(workers) as some:
        trace = drive(
            SEARCHES["random"],
            SPACE,
            cases.endless,
            100,
            rules=Rules(workers=some, trial_limit_s=0.05),
        )
    assert {t.point for t in trace.failures} == {p for p in SPACE.points() if p[0] == 4}
    assert {t.note for t in trace.failures} == {"took longer than 0.05 s"}
    assert trace.best.cost == min(cases.cost(p) for p in SPACE.points() if p[0] != 4)


def test_failures_say_why():
    trace = drive(SEARCHES["exhaustive"], SPACE, cases.failing, 100)
    notes = {t.point[0]: t.note for t in trace.failures}
    ours = "a schedule that fits; got one that does not"
    assert notes == {4: ours, 8: "ZeroDivisionError: division by zero"}
    trace = drive(SEARCHES["exhaustive"], SPACE, cases.nothing_runs, 5)
    with pytest.raises(InputError, match=r"can be built.*a schedule that fits"):
        _ = trace.best
    numbers = drive(SEARCHES["exhaustive"], SPACE, cases.not_a_number, 100)
    assert {t.note for t in numbers.failures} == {"its cost is not a number"}


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("stop", [0, 3, 17])
def test_an_interrupt_keeps_what_was_found_and_resuming_gives_the_same_trace(name, stop):
    measured = []

    def interrupted(point):
        if len(measured) == stop:
            raise KeyboardInterrupt
        measured.append(point)
        return cases.cost(point)

    first = drive(SEARCHES[name], SPACE, interrupted, 25, seed=9)
    assert first.end == "interrupted" and [t.point for t in first.trials] == measured
    again = []

    def counted(point):
        again.append(point)
        return cases.cost(point)

    known = {t.point: (t.cost, t.note) for t in first.trials}
    resumed = drive(SEARCHES[name], SPACE, counted, 25, seed=9, rules=Rules(known=known))
    assert resumed == drive(SEARCHES[name], SPACE, cases.cost, 25, seed=9)
    assert len(again) == 25 - stop


def test_an_error_of_the_listener_is_not_taken_for_one_of_a_candidate():
    def full(trial):
        raise InputError("a disk with room", "none left")

    for workers in (None, Workers(executor=Backwards())):
        with pytest.raises(InputError, match="a disk with room"):
            drive(
                SEARCHES["random"],
                SPACE,
                cases.cost,
                20,
                rules=Rules(on_trial=full, workers=workers),
            )


def test_no_time_means_no_trials_and_a_search_that_repeats_itself_ends():
    assert (
        drive(SEARCHES["random"], SPACE, cases.cost, 20, rules=Rules(time_limit_s=0.0)).end
        == "time"
    )
    batches = []

    def repeats(space, rng, start=()):
        while True:
            batches.append(1)
            yield [(4, 3, "y")]

    trace = drive(repeats, SPACE, cases.cost, 20)
    assert len(trace.trials) == 1 and trace.end == "exhausted"
    assert len(batches) == MAX_IDLE_BATCHES + 2


def test_a_batch_that_the_budget_cuts_is_never_answered():
    answers = []

    def two_batches(space, rng, start=()):
        points = list(space.points())
        answers.append((yield points[:4]))
        answers.append((yield points[4:8]))

    assert drive(two_batches, SPACE, cases.cost, 6).end == "budget"
    assert len(answers) == 1 and len(answers[0]) == 4
    assert drive(two_batches, SPACE, cases.cost, 8).end == "exhausted"


def test_early_stop_takes_the_bound_of_what_is_hopeless():
    class Measure:
        built = 0

        def __call__(self, point):
            self.built += 1
            return cases.cost(point)

        def bound(self, point):
            return cases.bound(point)

    measure = Measure()
    trace = drive(SEARCHES["exhaustive"], SPACE, measure, 100, rules=Rules(early_stop=1.5))
    skipped = [t for t in trace.trials if t.note == "stopped early"]
    assert skipped and measure.built == SPACE.size - len(skipped)
    assert all(t.cost == cases.bound(t.point) > 1.5 * trace.best.cost for t in skipped)
    assert trace.best.cost == cases.optimum(SPACE)


def test_executors_are_named_and_checked():
    counts = [f"processes:{count}" for count in ("0", "x", "²", "9" * 5000)]
    for text in ("threads", "threads:2", *counts, "dask:"):
        with pytest.raises(InputError, match="serial, processes:N or dask:ADDRESS"):
            workers_of(text)


distributed = pytest.importorskip("distributed", reason="the extra `scale` is not installed")
pytestmark = pytest.mark.filterwarnings("default")  # those of a dying cluster are its own


def test_a_worker_that_is_killed_in_the_middle_loses_no_trial():
    space = cases.table()
    killed = []
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        pids = client.run(os.getpid)
        assert len(set(pids.values())) == 2

        def kill(trial):
            if trial.number == 10:
                killed.append(next(iter(pids.values())))
                os.kill(killed[0], signal.SIGKILL)

        with workers_of(f"dask:{cluster.scheduler_address}") as workers:
            trace = drive(
                SEARCHES["genetic"],
                space,
                cases.failing,
                25,
                rules=Rules(workers=workers, on_trial=kill),
            )
        assert killed and killed[0] not in set(client.run(os.getpid).values())
    assert trace == drive(SEARCHES["genetic"], space, cases.failing, 25)


def test_a_lost_scheduler_ends_the_run_banks_nothing_unmeasured_and_reload_goes_on(tmp_path):
    space = cases.table()
    search = SEARCHES["genetic"]
    cluster = distributed.LocalCluster(n_workers=1, processes=False, dashboard_address=None)
    with Knowledge(tmp_path / "bank.db", None) as bank:

        def lose(trial):
            bank.save_trials("run", [trial])
            if trial.number == 10:
                cluster.close()

        with (
            workers_of(f"dask:{cluster.scheduler_address}") as workers,
            pytest.raises(WorkersLostError, match=r"lost the Dask scheduler .*resume=True goes on"),
        ):
            drive(search, space, cases.cost, 25, rules=Rules(workers=workers, on_trial=lose))
        kept = bank.trials("run")
    assert len(kept) >= 11 and all(t.cost == cases.cost(t.point) for t in kept)
    known = {t.point: (t.cost, t.note) for t in kept}
    again = drive(search, space, cases.cost, 25, rules=Rules(known=known))
    assert again == drive(search, space, cases.cost, 25)


@pytest.mark.parametrize("limit_s", [None, 0.2])
def test_a_cluster_without_workers_is_not_waited_for(monkeypatch, limit_s):
    monkeypatch.setattr(workers_module, "PATIENCE_S", 0.3)
    monkeypatch.setattr(workers_module, "POLL_S", 0.05)
    options = {"n_workers": 0, "processes": False, "dashboard_address": None}
    args = SEARCHES["random"], cases.table(), cases.cost, 5
    with (
        distributed.LocalCluster(**options) as cluster,
        workers_of(f"dask:{cluster.scheduler_address}") as workers,
    ):
        if limit_s:
            trace = drive(*args, rules=Rules(workers=workers, time_limit_s=limit_s))
            assert trace.end == "time" and trace.trials == ()
        else:
            with pytest.raises(WorkersLostError, match="no workers; see to them"):
                drive(*args, rules=Rules(workers=workers))


def test_a_scheduler_that_is_not_there_is_said_so():
    workers = workers_of("dask:tcp://127.0.0.1:1")
    with pytest.raises(InputError, match=r"a Dask scheduler at tcp://127\.0\.0\.1:1; got"):
        drive(SEARCHES["random"], cases.table(), cases.cost, 5, rules=Rules(workers=workers))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("on", "stream"), [(None, io.StringIO()), (False, Terminal())])
def test_a_file_gets_no_bars_nor_a_terminal_that_is_told_so(on, stream):
    with Bars(on, stream) as bars:
        bars("1/2 matmul", 1, 10, "7")
    assert stream.getvalue() == "" and bars.bar is None


def test_a_terminal_gets_a_bar_per_label():
    stream = Terminal()
    with Bars(stream=stream) as bars:
        for done in range(1, 11):
            bars("1/2 matmul", done, 10, f"{7 + (done - 4) ** 2} us")
        assert bars.bar.postfix == "best 7 us"
        first = bars.bar
        assert (first.n, first.total, first.desc) == (10, 10, "1/2 matmul")
        bars("2/2 conv2d", 3, 10, "")
        assert bars.bar is not first and bars.bar.n == 3
    assert "1/2 matmul" in stream.getvalue() and "2/2 conv2d" in stream.getvalue()
    assert bars.bar is None
