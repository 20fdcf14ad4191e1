"""Settings of engines that train models: DeepSpeed, and FSDP by accelerate."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import torch

from brim import catalog
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import UsageError
from brim.estimation.estimate import Study
from brim.estimation.models import Source, check_not_quantized, find_model
from brim.estimation.ranks.estimate import estimate_ranks
from brim.estimation.ranks.split import Split
from brim.estimation.silence import quiet
from brim.estimation.simulation import place_of
from brim.estimation.steps import Job
from brim.estimation.workload import Workload
from brim.planning.engines.answer import EnginePlan, check, copied
from brim.planning.ranks import card_of
from brim.planning.request import Machine
from brim.requests.plan import MeshRequest
from brim.units import MIB

# Stage, and the places of optimizer states and weights that are not the GPU, by the seconds that they cost.
_STAGES = ((2, "", ""), (3, "", ""), (2, "cpu", ""), (3, "cpu", ""), (3, "cpu", "cpu"), (3, "nvme", "nvme"))
_BUCKET = 50_000_000  # numbers that DeepSpeed reduces or gathers at once; its default is ten times as much
_ASSUMED = (
    "bytes of states: those of DeepSpeed's estimate_zero2_ and estimate_zero3_model_states_mem_needs, 1.5 in RAM",
    "AdamW in float32; the program's own optimizer may differ",
    "the program's TrainingArguments have the batch sizes of the file; transformers refuses others",
)


def _described(request: MeshRequest, engine: str) -> tuple[Source, Any]:
    """Return the model's source and its module without values."""
    source = find_model(request.model)
    if source.library != "transformers" or request.precision is not None:
        why, todo = "brim writes its settings for models of transformers in bf16.", "Leave out --precision."
        raise UsageError(f"Cannot plan {request.model} for {engine}.", why, todo)
    check_not_quantized(source)
    with quiet(), torch.device("meta"):
        return source, Job(source, Workload(task="train", precision="bf16")).module()


def _steps(batch: int) -> list[tuple[int, str]]:
    """Return sequences of a micro-batch and what is recomputed, the fastest first."""
    return list(dict.fromkeys([(batch, "none"), (batch, "full"), (1, "full")]))


def deepspeed(request: MeshRequest, machine: Machine) -> Iterator[EnginePlan]:
    """Yield configurations, the fastest first: recomputation before RAM, and RAM before NVMe."""
    machine = check(request, machine, "deepspeed", "train", several=True)
    source, module = _described(request, "deepspeed")
    gpus, place = request.gpus or 1, place_of(machine.hardware)
    numbers = sum(parameter.numel() for parameter in module.parameters())
    largest = max(sum(p.numel() for p in part.parameters(recurse=False)) for part in module.modules())

    @functools.cache
    def beside(batch: int, checkpointing: str) -> int:
        """Return the bytes of a step beside weights and gradients, which are states here."""
        sizes: dict[str, Any] = {"batch": batch, "seq": request.seq, "checkpointing": checkpointing}
        workload = Workload(task="train", precision="bf16", optimizer="sgd", **sizes)
        seen = Study(source, workload, place, None, "").estimate()
        return seen.peak_bytes.reserved - seen.at_peak_bytes["parameters"] - seen.at_peak_bytes["gradients"]

    for stage, states, weights in _STAGES:
        for micro, checkpointing in _steps(request.batch):
            on_gpu = (2 * numbers if stage == 2 else 4 * largest) + (0 if states else 18 * numbers // gpus)
            on_gpu += 2 * numbers // gpus if stage == 3 and states and not weights else 0
            in_ram = 4 * gpus * (numbers if stage == 2 else largest)
            if states:
                in_ram = numbers * (max(4 * gpus, 16) if stage == 2 else 18 if weights else 16)
            on_disk = 18 * numbers if weights == "nvme" else 0
            in_ram = 74 * gpus * largest if on_disk else in_ram  # 5 buffers of weights, 4 of 4 states in float32
            used = {
                VRAM: {
                    "states": on_gpu, "activations": beside(micro, checkpointing), "buckets": 4 * _BUCKET,
                    "nccl": catalog.nccl_bytes(gpus) if gpus > 1 else 0,
                },
                RAM: {"states": int(1.5 * in_ram), "process": 256 * MIB * gpus}, DISK: {"states": on_disk},
            }  # fmt: skip
            zero: dict[str, Any] = {"stage": stage, "overlap_comm": False, "contiguous_gradients": True}
            zero |= {"reduce_bucket_size": _BUCKET, "allgather_bucket_size": _BUCKET}
            nvme = {"nvme_path": "offload"} if on_disk else {}
            if states:
                zero["offload_optimizer"] = {"device": states, "pin_memory": True, **nvme}
            if weights:
                zero["offload_param"] = {"device": weights, "pin_memory": True, **nvme}
            if stage == 3:
                zero |= {"stage3_max_live_parameters": 2 * largest, "stage3_prefetch_bucket_size": largest}
            if nvme:
                zero["offload_param"]["buffer_size"] = zero["sub_group_size"] = largest
            file = {
                "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": request.batch // micro,
                "bf16": {"enabled": True}, "zero_optimization": zero,
            }  # fmt: skip
            recomputes = "DeepSpeed cannot make a model recompute: call model.gradient_checkpointing_enable() first."
            moved = copied(machine, RAM, VRAM, 2 * numbers)
            split = f"DeepSpeed cannot leave a part of the states on the GPU: each step copies {moved} at least."
            cannot = [recomputes] * (checkpointing == "full") + [split] * bool(states)
            yield EnginePlan(
                engine="deepspeed", model=source.name, machine=machine, bytes=used, gpus=gpus,
                command=f"deepspeed --num_gpus {gpus} train.py --deepspeed ds_config.json",
                file=json.dumps(file, indent=2), file_name="ds_config.json", cannot=tuple(cannot),
                assumed=(*machine.assumed, *_ASSUMED),
            )  # fmt: skip


def fsdp(request: MeshRequest, machine: Machine) -> Iterator[EnginePlan]:
    """Yield configurations of FSDP2, the fastest first, with the bytes of a traced step of each rank."""
    machine = check(request, machine, "fsdp", "train", several=True)
    if (request.gpus or 1) < 2 or request.gpu is None:
        raise UsageError("Cannot plan for fsdp.", "It shards over several GPUs.", "Give --gpu and --gpus.")
    source, module = _described(request, "fsdp")
    context, per_node = card_of(request).context().bytes, request.gpus_per_node or 8
    plain = [(zero, *step, False) for step in _steps(request.batch) for zero in (2, 3)]
    for zero, micro, checkpointing, offload in [*plain, (3, 1, "full", True)]:
        split = Split(
            gpus=request.gpus or 1, gpus_per_node=per_node, zero=zero, micro_batch=micro, offload_shards=offload,
            global_batch=request.batch * (request.gpus or 1),
        )  # fmt: skip
        seen = estimate_ranks(
            str(request.model), split, seq=request.seq, gpu=request.gpu, checkpointing=checkpointing
        )
        parts = {name: count for name, count in seen.worst.breakdown.items() if name != "context"}
        slack = seen.process_bytes - context - sum(parts.values())
        used = {VRAM: {**parts, "allocator": slack}, RAM: {"shards": seen.node_ram_bytes}}
        sharding = {
            "fsdp_version": 2, "fsdp_reshard_after_forward": zero == 3, "fsdp_offload_params": offload,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_transformer_layer_cls_to_wrap": ",".join(sorted(module._no_split_modules or ())),
            "fsdp_activation_checkpointing": checkpointing == "full", "fsdp_cpu_ram_efficient_loading": True,
        }  # fmt: skip
        launch = {
            "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16",
            "num_machines": 1, "num_processes": split.gpus, "machine_rank": 0,
        }  # fmt: skip
        lines = [f"{name}: {json.dumps(value)}" for name, value in launch.items()]
        lines += ["fsdp_config:", *(f"  {name}: {json.dumps(value)}" for name, value in sharding.items())]
        yield EnginePlan(
            engine="fsdp", model=source.name, machine=machine, bytes=used, gpus=split.gpus,
            command="accelerate launch --config_file fsdp.yaml train.py",
            file="\n".join(["# by brim", *lines, ""]), file_name="fsdp.yaml",
            cannot=(
                f"The file cannot state the batch: {micro} sequences at once, {split.micro_batches} times a step.",
                "FSDP cannot offload optimizer states alone, nor to disk: all shards move, or none.",
            ),
            assumed=(*machine.assumed, *seen.notes),
        )  # fmt: skip
