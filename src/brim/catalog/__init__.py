"""GPUs, the machines they are sold in, and model configurations: data files with sources, and their look-up."""

from __future__ import annotations

from brim.catalog.gpus import (
    HOST_BYTES_PER_S,
    HOST_SHARE,
    Context,
    Gpu,
    Host,
    Network,
    general_context,
    gpu,
    gpu_names,
    host_of,
    known_contexts,
    nccl_bytes,
    nccl_source,
    network,
    training_rate,
)  # fmt: skip
from brim.catalog.presets import Preset, model, model_names

__all__ = [
    "HOST_BYTES_PER_S",
    "HOST_SHARE",
    "Context",
    "Gpu",
    "Host",
    "Network",
    "Preset",
    "general_context",
    "gpu",
    "gpu_names",
    "host_of",
    "known_contexts",
    "model",
    "model_names",
    "nccl_bytes",
    "nccl_source",
    "network",
    "training_rate",
]
