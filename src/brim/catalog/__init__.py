"""Facts with their source: GPUs and model configurations. Data files, and the little code that looks a name up."""

from __future__ import annotations

from brim.catalog.gpus import Context, Gpu, general_context, gpu, gpu_names, known_contexts
from brim.catalog.links import HOST_BYTES_PER_S, Network, nccl_bytes, nccl_source, network, training_rate
from brim.catalog.presets import Preset, model, model_names

__all__ = [
    "HOST_BYTES_PER_S",
    "Context",
    "Gpu",
    "Network",
    "Preset",
    "general_context",
    "gpu",
    "gpu_names",
    "known_contexts",
    "model",
    "model_names",
    "nccl_bytes",
    "nccl_source",
    "network",
    "training_rate",
]
