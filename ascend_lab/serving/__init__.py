"""Serving: a simulated server and what theory says of it, language models, and a real server."""

from ascend_lab.serving.config import read_scenario
from ascend_lab.serving.rollout import Canary, Version
from ascend_lab.serving.simulate import Arrivals, Scenario, Served, Service, Step, simulate_serving
from ascend_lab.serving.station import Failure, Level, Policy
from ascend_lab.serving.statistics import Interval, interval
from ascend_lab.serving.times import affine, network_seconds

__all__ = [
    "Arrivals",
    "Canary",
    "Failure",
    "Interval",
    "Level",
    "Policy",
    "Scenario",
    "Served",
    "Service",
    "Step",
    "Version",
    "affine",
    "interval",
    "network_seconds",
    "read_scenario",
    "simulate_serving",
]
