"""Plans of jobs, and the configuration of a small Llama of 16-bit weights for plans: 4 layers of 31 MB."""

from __future__ import annotations

from typing import Any

from brim.core import Hardware, Plan
from brim.planning.solver import Job
from brim.planning.solver.streaming import contender

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}


def plan_streaming(job: Job, hardware: Hardware, budget_bytes: dict[str, int], **options: Any) -> Plan:
    return contender(job, hardware, budget_bytes, **options).plan
