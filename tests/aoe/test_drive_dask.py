"""A cluster of two workers, one of which is killed in the middle."""

from __future__ import annotations

import os
import signal

import pytest
import search_cases as cases

from ascend_lab.aoe.drive import drive
from ascend_lab.aoe.search import SEARCHES
from ascend_lab.aoe.workers import workers_of
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


def test_a_scheduler_that_is_not_there_is_said_so():
    workers = workers_of("dask:tcp://127.0.0.1:1")
    with pytest.raises(InputError, match=r"a Dask scheduler at tcp://127\.0\.0\.1:1; got"):
        drive(SEARCHES["random"], cases.table(), cases.cost, 5, executor=workers)
