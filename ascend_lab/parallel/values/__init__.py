"""Parallel plans executed on arrays: small models, real messages, the values of one device.

`train_single` is the reference; `train(model, batches, optimizer, plan)` and the functions named
after a plan reproduce it on many ranks and count what they send.
"""

from ascend_lab.parallel.plans.plan import Plan
from ascend_lab.parallel.values.asynchronous import (
    AsyncRun,
    delayed_descent,
    stable_rate,
    train_asynchronous,
    train_synchronous,
)
from ascend_lab.parallel.values.experts import route
from ascend_lab.parallel.values.group import Group, grid, send
from ascend_lab.parallel.values.mixed import MixedRun, train_mixed, vanishing
from ascend_lab.parallel.values.models import (
    experts_transformer,
    perceptron,
    points,
    sentences,
    transformer,
)
from ascend_lab.parallel.values.optimizers import Adam, Sgd
from ascend_lab.parallel.values.pieces import Batch, Model, Net, Piece, Shard
from ascend_lab.parallel.values.tape import Tape, Var
from ascend_lab.parallel.values.traffic import Count, Traffic
from ascend_lab.parallel.values.train import (
    Run,
    loss_and_gradients,
    train,
    train_3d,
    train_context_parallel,
    train_data_parallel,
    train_experts,
    train_pipeline,
    train_single,
    train_tensor_parallel,
    train_zero,
)

__all__ = [
    "Adam",
    "AsyncRun",
    "Batch",
    "Count",
    "Group",
    "MixedRun",
    "Model",
    "Net",
    "Piece",
    "Plan",
    "Run",
    "Sgd",
    "Shard",
    "Tape",
    "Traffic",
    "Var",
    "delayed_descent",
    "experts_transformer",
    "grid",
    "loss_and_gradients",
    "perceptron",
    "points",
    "route",
    "send",
    "sentences",
    "stable_rate",
    "train",
    "train_3d",
    "train_asynchronous",
    "train_context_parallel",
    "train_data_parallel",
    "train_experts",
    "train_mixed",
    "train_pipeline",
    "train_single",
    "train_synchronous",
    "train_tensor_parallel",
    "train_zero",
    "transformer",
    "vanishing",
]
