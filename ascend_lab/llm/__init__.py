"""Predicts the time of one step of a language model on a machine, and finds the quickest plan.

A step computes new tokens for a batch of sequences: one token of each in decoding, all tokens of
the prompts in a prefill. A plan says how the model is divided among devices.

>>> from ascend_lab import llm
>>> model = llm.Model(llm.load_decoder("qwen3_8b"), llm.machine_of("Ascend910B2", "", llm.Plan()))
>>> step = model.step(llm.decode(batch=1, context=2048))
>>> step.bottleneck.partition(":")[0].partition(" of ")[2]
'the step is reading weights from memory'
>>> 0.010 < step.time_s < 0.020 and step.bound_s < step.time_s
True
"""

from ascend_lab.facade import names_of
from ascend_lab.llm.machine import Machine, machine_of
from ascend_lab.llm.models import Decoder, load_decoder
from ascend_lab.llm.plan import Load, Plan, decode, prefill
from ascend_lab.llm.search import Plans, best_plans
from ascend_lab.llm.step import Model, Step

__all__ = [
    "Decoder",
    "Load",
    "Machine",
    "Model",
    "Plan",
    "Plans",
    "Step",
    "best_plans",
    "decode",
    "load_decoder",
    "machine_of",
    "prefill",
]

__getattr__ = names_of(__name__, {})
