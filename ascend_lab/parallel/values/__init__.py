"""Parallel plans executed on arrays: small models, real messages, the values of one device.

`train_single` is the reference; `train(model, batches, optimizer, plan)` reproduces it on many
ranks and counts what they send.
"""

# fmt: off
# isort: off
from ascend_lab.parallel.plans.plan import Plan
from ascend_lab.parallel.values.group import Group, Traffic
from ascend_lab.parallel.values.layers import Batch, Model, Net, Piece, Shard
from ascend_lab.parallel.values.models import experts_transformer, sentences, transformer
from ascend_lab.parallel.values.group import Tape, Var
from ascend_lab.parallel.values.training import (
    MixedRun, Run, loss_and_gradients, train, train_mixed, train_single, vanishing,
)
from ascend_lab.parallel.values.weights import Adam, Sgd

__all__ = [
    "Adam", "Batch", "Group", "MixedRun", "Model", "Net", "Piece", "Plan", "Run", "Sgd",
    "Shard", "Tape", "Traffic", "Var", "experts_transformer", "loss_and_gradients", "sentences",
    "train", "train_mixed", "train_single", "transformer", "vanishing",
]
