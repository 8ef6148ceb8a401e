"""Serving: a simulated server and what theory says of it, language models, and a real server."""

# fmt: off
# isort: off
from ascend_lab.serving.config import read_scenario
from ascend_lab.serving.language import BlockCache, Engine, Request, StepTime, converse
from ascend_lab.serving.rollout import Canary, Version
from ascend_lab.serving.simulate import (
    Arrivals, Interval, Scenario, Served, Service, Step, interval, simulate_serving,
)
from ascend_lab.serving.station import Failure, Level, Policy
from ascend_lab.serving.times import affine, network_seconds

__all__ = [
    "Arrivals", "BlockCache", "Canary", "Engine", "Failure", "Interval", "Level", "Policy",
    "Request", "Scenario", "Served", "Service", "Step", "StepTime", "Version", "affine",
    "converse", "interval", "network_seconds", "read_scenario", "simulate_serving",
]
