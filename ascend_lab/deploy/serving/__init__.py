"""Serves models: a discrete-event simulation of servers, queueing theory, and an HTTP server.

`simulate_serving` simulates a server of networks, `converse` one of a language model; `theory` has
formulas to compare with, and `loopback` a server that answers requests of the KServe protocol.
"""

# fmt: off
# isort: off
from ascend_lab.deploy.serving.language import Engine, Request, converse
from ascend_lab.deploy.serving.model import StepTime, fit_line, network_seconds
from ascend_lab.deploy.serving.paged_cache import BlockCache
from ascend_lab.deploy.serving.queues import Failure, Level, Policy
from ascend_lab.deploy.serving.scenario import (
    Arrivals, Canary, Scenario, Service, Step, Version,
)
from ascend_lab.deploy.serving.scenario_file import read_scenario
from ascend_lab.deploy.serving.simulate import Interval, Served, interval, simulate_serving

__all__ = [
    "Arrivals", "BlockCache", "Canary", "Engine", "Failure", "Interval", "Level", "Policy",
    "Request", "Scenario", "Served", "Service", "Step", "StepTime", "Version",
    "converse", "fit_line", "interval", "network_seconds", "read_scenario", "simulate_serving",
]
