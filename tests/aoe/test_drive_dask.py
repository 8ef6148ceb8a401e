"""A cluster of two workers, one of which is killed in the middle."""

import os
import signal

import pytest
import search_cases as cases

import ascend_lab.aoe.workers as workers_module
from ascend_lab.aoe.bank import Knowledge
from ascend_lab.aoe.drive import drive
from ascend_lab.aoe.search import SEARCHES
from ascend_lab.aoe.workers import WorkersLostError, workers_of
from ascend_lab.errors import InputError

distributed = pytest.importorskip("distributed", reason="the extra `scale` is not installed")
pytestmark = pytest.mark.filterwarnings("default")  # those of a dying cluster are its own


def test_a_worker_that_is_killed_in_the_middle_loses_no_trial():
    space, killed = cases.table(), []
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        pids = client.run(os.getpid)
        assert len(set(pids.values())) == 2

        def kill(trial):
            if trial.number == 10:
                killed.append(next(iter(pids.values())))
                os.kill(killed[0], signal.SIGKILL)

        with workers_of(f"dask:{cluster.scheduler_address}") as workers:
            trace = drive(
                SEARCHES["genetic"], space, cases.failing, 25, executor=workers, on_trial=kill
            )
        assert killed and killed[0] not in set(client.run(os.getpid).values())
    assert trace == drive(SEARCHES["genetic"], space, cases.failing, 25)


def test_a_lost_scheduler_ends_the_run_banks_nothing_unmeasured_and_reload_goes_on(tmp_path):
    space, search = cases.table(), SEARCHES["genetic"]
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
            drive(search, space, cases.cost, 25, executor=workers, on_trial=lose)
        kept = bank.trials("run")
    assert len(kept) >= 11 and all(t.cost == cases.cost(t.point) for t in kept)
    known = {t.point: (t.cost, t.note) for t in kept}
    again = drive(search, space, cases.cost, 25, known=known)
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
            trace = drive(*args, executor=workers, time_limit_s=limit_s)
            assert trace.end == "time" and trace.trials == ()
        else:
            with pytest.raises(WorkersLostError, match="no workers; see to them"):
                drive(*args, executor=workers)


def test_a_scheduler_that_is_not_there_is_said_so():
    workers = workers_of("dask:tcp://127.0.0.1:1")
    with pytest.raises(InputError, match=r"a Dask scheduler at tcp://127\.0\.0\.1:1; got"):
        drive(SEARCHES["random"], cases.table(), cases.cost, 5, executor=workers)
