"""Closed forms: formulas that can be computed on paper, with the arithmetic shown."""

from __future__ import annotations

from brim.predict.formulas.activations import activations_first_stage, activations_per_layer
from brim.predict.formulas.cache import kv_cache, kv_cache_of_config, latent_kv_cache
from brim.predict.formulas.checkpoint import checkpoint_weights, parameters_from_size, weights
from brim.predict.formulas.model import explain_generation, explain_training, parameters_by_type
from brim.predict.formulas.optimizers import OPTIMIZERS, optimizer_state
from brim.predict.formulas.result import Result
from brim.predict.formulas.training import gpt_flops, gpt_parameters, megatron_states, zero_states

__all__ = [
    "OPTIMIZERS",
    "Result",
    "activations_first_stage",
    "activations_per_layer",
    "checkpoint_weights",
    "explain_generation",
    "explain_training",
    "gpt_flops",
    "gpt_parameters",
    "kv_cache",
    "kv_cache_of_config",
    "latent_kv_cache",
    "megatron_states",
    "optimizer_state",
    "parameters_by_type",
    "parameters_from_size",
    "weights",
    "zero_states",
]
