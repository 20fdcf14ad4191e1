"""Plans for other engines are read back, by the engines' own functions where they are here."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import infer_auto_device_map
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.modeling import check_device_map
from diffusers import AutoencoderKL, DiffusionPipeline
from gguf import GGMLQuantizationType, GGUFWriter
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import AutoConfig, AutoModelForCausalLM

import brim
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import BudgetError, ModelError, UnsupportedError, UsageError
from brim.models.gguf import open_gguf
from brim.planning.engines.answer import EnginePlan, first_that_fits
from brim.planning.engines.inference import _bytes_of, _grouped, accelerate, diffusers, llama_cpp, vllm
from brim.planning.engines.training import deepspeed, fsdp
from brim.planning.request import Machine, machine_of
from brim.requests.plan import MeshRequest
from support.pipelines import small_pipeline
from support.planned import LLAMA
from support.recorded_cases import CPU, MOE
from support.tiny_model import save_llama

GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 512, "n_layer": 6, "n_head": 8,
        "vocab_size": 5000, "dtype": "float32"}  # fmt: skip
TIED = {**LLAMA, "tie_word_embeddings": True, "vocab_size": 32000}
MODELS: dict[str, dict[str, Any]] = {"llama": LLAMA, "tied": TIED, "moe": MOE, "gpt2": GPT2}
BUDGETS = (("12GiB", "8GiB"), ("200MiB", "8GiB"), ("170MiB", "350MiB"))


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps(MODELS[request.param]))
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def planned(engine: Callable[..., Any], model: object, **settings: Any) -> EnginePlan:
    request = MeshRequest(model=str(model), **{"gpu": "RTX 3060", "seq": 64, "new_tokens": 16, **settings})
    plan: EnginePlan = first_that_fits(engine(request, machine_of(request)))
    for tier, count in plan.peak_bytes.items():
        assert 0 <= count <= plan.machine.budget_bytes[tier]
    return plan


def weights(plan: EnginePlan) -> dict[str, int]:
    return {tier: parts["weights"] for tier, parts in plan.bytes.items() if "weights" in parts}


def on_meta(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype).to(config.dtype)  # buffers too


def distinct_bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


# -- accelerate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vram", "ram"), BUDGETS)
def test_accelerate_reads_the_device_map_and_counts_the_same_bytes(model: Path, vram: str, ram: str) -> None:
    plan = planned(accelerate, model, vram=vram, ram=ram)
    device_map, module = json.loads(plan.file), on_meta(model)
    check_device_map(module, device_map)
    for tier, device in ((VRAM, 0), (RAM, "cpu"), (DISK, "disk")):
        tensors = [t for path, where in device_map.items() if where == device for t in tensors_of(module, path)]
        assert distinct_bytes(tensors) == weights(plan)[tier]
    assert sum(weights(plan).values()) == distinct_bytes([*module.parameters(), *module.buffers()])


def tensors_of(module: Any, path: str) -> list[torch.Tensor]:
    owner = module.get_submodule(path)
    return [*owner.parameters(), *owner.buffers()]


def test_accelerates_own_map_takes_no_more_of_the_gpu_with_the_same_max_memory(llama: Path) -> None:
    plan, module = planned(accelerate, llama, vram="200MiB", ram="8GiB"), on_meta(llama)
    own = infer_auto_device_map(module, plan.settings["max_memory"], no_split_module_classes=module._no_split_modules)
    theirs = distinct_bytes([t for path, where in own.items() if where == 0 for t in tensors_of(module, path)])
    assert 0 < theirs <= plan.settings["max_memory"][0]
    assert theirs <= weights(plan)[VRAM] <= plan.settings["max_memory"][0]


def test_a_decoder_layer_is_never_divided_and_shared_weights_are_together(model: Path) -> None:
    device_map = json.loads(planned(accelerate, model, vram="200MiB", ram="8GiB").file)
    numbered = [path for path in device_map if any(part.isdecimal() for part in path.split("."))]
    assert numbered and all(path.rpartition(".")[2].isdecimal() for path in numbered)
    module = on_meta(model)
    users: dict[int, set[object]] = {}
    for path, where in device_map.items():
        for tensor in tensors_of(module, path):
            users.setdefault(id(tensor), set()).add(where)
    assert all(len(places) == 1 for places in users.values())


@pytest.mark.thorough
def test_a_model_loaded_by_the_map_from_ram_and_disk_has_equal_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_llama(tmp_path / "llama", hidden=64, layers=4)
    request = MeshRequest(model=str(folder), seq=8, new_tokens=8, ram="300MiB")
    machine = machine_of(request)
    plans = list(accelerate(request, machine))
    plan = next(p for p in plans if 0 < p.bytes[DISK]["weights"] < sum(weights(p).values()))
    device_map = json.loads(plan.file)
    assert set(device_map.values()) == {"cpu", "disk"}
    ids = torch.arange(8)[None]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    offloaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", device_map=device_map, offload_folder=str(tmp_path / "offload")
    )
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, offloaded(ids).logits)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"task": "train"}, UsageError, "Add --task generate"),
        ({"gpus": 2}, UsageError, "one GPU"),
        ({"precision": "int4"}, UsageError, "brim's own"),
        ({"seq": 5000}, UsageError, "at most 4096 tokens"),
        ({"vram": "5MiB", "ram": "100MiB"}, BudgetError, "of VRAM and"),
    ],
)
def test_accelerate_refuses(llama: Path, settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        planned(accelerate, llama, **settings)


def test_the_least_budget_of_a_refusal_is_enough(llama: Path) -> None:
    with pytest.raises(BudgetError) as refused:
        planned(accelerate, llama, vram="5MiB", ram="8GiB")
    assert planned(accelerate, llama, vram=refused.value.smallest_bytes[VRAM], ram="8GiB")


def test_packed_weights_are_not_placed_by_a_device_map(tmp_path: Path) -> None:
    packed = {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    (tmp_path / "config.json").write_text(json.dumps(packed))
    with pytest.raises(UnsupportedError, match="stores its packed weights"):
        planned(accelerate, tmp_path)


# -- llama.cpp -------------------------------------------------------------------------------------------------------


def llama_flags(command: str) -> argparse.Namespace:
    """Parse the command strictly by the flags of llama-server's help."""
    parser = argparse.ArgumentParser(prog="llama-server", allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-m", "--model", required=True)
    for names in (("-ngl", "--n-gpu-layers"), ("-c", "--ctx-size"), ("-np", "--parallel"), ("-b", "--batch-size"),
                  ("-ub", "--ubatch-size"), ("-ncmoe", "--n-cpu-moe")):  # fmt: skip
        parser.add_argument(*names, type=int, default=0)
    parser.add_argument("-fa", "--flash-attn", choices=("on", "off", "auto"))
    for names in (("-ctk", "--cache-type-k"), ("-ctv", "--cache-type-v")):
        parser.add_argument(*names, choices=("f32", "f16", "bf16", "q8_0", "q4_0"))
    parser.add_argument("-dev", "--device")
    parser.add_argument("--no-mmap", action="store_true")
    program, *words = shlex.split(command)
    assert program == "llama-server"
    return parser.parse_args(words)


def gguf_file(
    path: Path, *, layers: int = 4, experts: int = 0, tied: bool = False, without: str = "", parted: bool = False
) -> Path:
    """Write a model in Q8_0, with vectors in float32: llama.cpp's own names and metadata, and zeros."""
    hidden, inner, vocabulary = 256, 512, 1024
    writer = GGUFWriter(str(path), "llama", split_max_tensors=20 if parted else 0)
    for count, name in ((4096, "context_length"), (hidden, "embedding_length"), (layers, "block_count"),
                        (inner, "feed_forward_length"), (8, "head_count"), (2, "head_count_kv")):  # fmt: skip
        if name != without:
            getattr(writer, f"add_{name}")(count)
    shapes = {"token_embd.weight": (vocabulary, hidden), "output_norm.weight": (hidden,)}
    shapes |= {} if tied else {"output.weight": (vocabulary, hidden)}
    for number in range(layers):
        block = {"attn_q": (hidden, hidden), "attn_k": (64, hidden), "attn_v": (64, hidden), "attn_norm": (hidden,)}
        for part in ("gate", "up", "down"):
            shape = (hidden, inner) if part == "down" else (inner, hidden)
            block[f"ffn_{part}" + "_exps" * bool(experts)] = (experts, *shape) if experts else shape
        shapes |= {f"blk.{number}.{name}.weight": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(name, np.zeros(shape, dtype=np.float32))
        else:
            packed = np.zeros((*shape[:-1], shape[-1] // 32 * 34), dtype=np.uint8)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def resident_by_llama_cpp(sizes: dict[str, int], layers: int, flags: argparse.Namespace) -> int:
    """The bytes on the GPU by llama.cpp's rules: the output is the last of layers + 1, the input is never there."""
    total = 0
    for name, count in sizes.items():
        match = re.match(r"blk\.(\d+)\.(.*)", name)
        number = int(match[1]) if match else layers
        is_expert = match is not None and "_exps" in match[2] and number < flags.n_cpu_moe
        if name != "token_embd.weight" and number >= layers + 1 - flags.n_gpu_layers and not is_expert:
            total += count
    return total + (sizes["token_embd.weight"] if "output.weight" not in sizes and flags.n_gpu_layers else 0)


@pytest.mark.parametrize("shape", [{}, {"tied": True}, {"experts": 8}], ids=["plain", "tied", "experts"])
@pytest.mark.parametrize("vram", ["1GiB", "79MiB", "77MiB", "76MiB"])
def test_a_gguf_files_own_tensors_are_where_llama_cpp_puts_them(
    tmp_path: Path, shape: dict[str, Any], vram: str
) -> None:
    path = gguf_file(tmp_path / "model.gguf", **shape)
    plan = planned(llama_cpp, path, vram=vram, ram="8GiB")
    flags = llama_flags(plan.command)
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in open_gguf(path).tensors}
    on_gpu = resident_by_llama_cpp(sizes, 4, flags)
    assert weights(plan)[VRAM] == on_gpu
    copied = sizes["token_embd.weight"] if shape.get("tied") and flags.n_gpu_layers else 0
    assert sum(weights(plan).values()) == sum(sizes.values()) + copied
    assert flags.ctx_size == 256 and flags.model == str(path)
    assert flags.cache_type_k == flags.cache_type_v == "f16"
    cell = 2 * (32 + 32) * 2  # two heads with keys and values of 32 numbers
    assert plan.bytes[VRAM]["kv_cache"] + plan.bytes[RAM]["kv_cache"] == 256 * 4 * cell


@pytest.mark.parametrize(("vram", "ram"), [("12GiB", "8GiB"), ("200MiB", "8GiB"), ("170MiB", "8GiB")])
def test_a_model_without_a_gguf_is_assumed_in_16_bits(model: Path, vram: str, ram: str) -> None:
    plan = planned(llama_cpp, model, vram=vram, ram=ram)
    flags, module = llama_flags(plan.command), on_meta(model)
    embedding, output = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    copied = 2 * embedding.numel() if embedding is output and flags.n_gpu_layers else 0
    vectors = sum(p.numel() for name, p in module.named_parameters() if p.dim() < 2 or ".gate.weight" in name)
    everything = sum(p.numel() for p in module.parameters())
    assert sum(weights(plan).values()) == 2 * everything + 2 * vectors + copied
    assert "has 16 bits" in " ".join(plan.assumed)


def test_llama_3_8b_has_the_buffers_that_llama_cpp_prints() -> None:
    """Of Llama 3 8B in a context of 8,192 tokens it reports 258.50 MiB and a cache of 1,024 MiB, all on the GPU."""
    plan = planned(llama_cpp, "llama-3-8b", gpu="A100 80GB", seq=8000, new_tokens=192)
    assert plan.bytes[VRAM]["compute_buffer"] == 258.5 * (1 << 20)
    assert plan.bytes[VRAM]["kv_cache"] == 1 << 30
    assert llama_flags(plan.command).n_gpu_layers == 33


def test_experts_leave_the_gpu_before_layers() -> None:
    flags = llama_flags(planned(llama_cpp, "qwen3-30b-a3b", ram="60GiB").command)
    assert flags.n_gpu_layers == 49 and 0 < flags.n_cpu_moe < 48


@pytest.mark.thorough
def test_experts_in_mxfp4_stay_so_in_a_gguf() -> None:
    """Its blocks of 32 values take 17 bytes, as in the checkpoint; llama.cpp has biases in more bits."""
    plan = planned(llama_cpp, "gpt-oss-20b", gpu="RTX 4090", ram="60GiB")
    published_bytes = 13_761_264_768
    assert 0 <= sum(weights(plan).values()) - published_bytes < 1e7
    assert llama_flags(plan.command).n_gpu_layers == 25
    few = llama_flags(planned(llama_cpp, "gpt-oss-20b", vram="6GiB", ram="60GiB").command)
    assert few.n_gpu_layers == 25 and 0 < few.n_cpu_moe < 24


def test_a_cache_is_rounded_last_and_never_where_nothing_may_be(llama: Path) -> None:
    tight = {"vram": "1GiB", "ram": "300MiB", "batch": 128, "seq": 1000}
    with pytest.raises(BudgetError):
        planned(llama_cpp, llama, **tight, lossless=True)
    assert llama_flags(planned(llama_cpp, llama, **tight).command).cache_type_k == "q8_0"


@pytest.mark.parametrize("without", ["embedding_length", "block_count", "head_count"])
def test_a_gguf_that_is_no_language_model_is_refused(tmp_path: Path, without: str) -> None:
    with pytest.raises(UnsupportedError, match="not a language model"):
        planned(llama_cpp, gguf_file(tmp_path / "model.gguf", without=without))


def test_a_gguf_in_several_files_is_planned_as_in_one(tmp_path: Path) -> None:
    gguf_file(tmp_path / "model.gguf", parted=True)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts] == ["model-00001-of-00002.gguf", "model-00002-of-00002.gguf"]
    alone = planned(llama_cpp, gguf_file(tmp_path / "model.gguf"), vram="77MiB", ram="8GiB")
    for part in parts:  # whichever was given, llama.cpp takes the first
        plan = planned(llama_cpp, part, vram="77MiB", ram="8GiB")
        assert plan.bytes == alone.bytes
        assert llama_flags(plan.command).model == str(parts[0])
    parts[1].rename(tmp_path / "second.gguf")
    with pytest.raises(ModelError, match=r"There is no .*model-00002-of-00002.gguf"):
        planned(llama_cpp, parts[0])
    parts[0].rename(tmp_path / "first.gguf")
    with pytest.raises(UnsupportedError, match="one of several files"):
        planned(llama_cpp, tmp_path / "first.gguf")


def test_vllm_is_not_planned_for_a_model_without_attention() -> None:
    with pytest.raises(UnsupportedError, match="attention layers alone"):
        planned(vllm, "mamba-130m", gpu="RTX 3060")


def test_blocks_of_a_decoder_without_an_optional_part_are_grouped() -> None:
    blocks = {"down_block_types": ["DownEncoderBlock2D"], "up_block_types": ["UpDecoderBlock2D"]}
    vae = AutoencoderKL(**blocks, block_out_channels=[32], use_quant_conv=False, use_post_quant_conv=False)
    assert 0 < _grouped(vae, 1, 1) <= _bytes_of(vae)


def test_a_revision_of_a_model_is_refused() -> None:
    for engine in (accelerate, llama_cpp, vllm):
        with pytest.raises(UsageError, match="has a revision"):
            planned(engine, "org/name@main")


def test_the_ram_beside_several_gpus_is_theirs(llama: Path) -> None:
    eight, one = (planned(vllm, llama, gpu="H100", gpus=gpus, gpus_per_node=8) for gpus in (8, 1))
    assert eight.machine.budget_bytes[RAM] == pytest.approx(8 * one.machine.budget_bytes[RAM], rel=1e-6)


def test_a_gguf_is_for_llama_cpp_alone(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Give --for llama\.cpp"):
        planned(accelerate, gguf_file(tmp_path / "model.gguf"))


# -- vLLM ------------------------------------------------------------------------------------------------------------


def vllm_flags(command: str) -> argparse.Namespace:
    """Parse the command strictly by the fields of vLLM's CacheConfig, SchedulerConfig, ModelConfig and offloader."""
    parser = argparse.ArgumentParser(prog="vllm serve", allow_abbrev=False, exit_on_error=False)
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=("auto", "half", "float16", "bfloat16", "float", "float32"))
    for name in ("max-model-len", "max-num-seqs", "max-num-batched-tokens", "kv-cache-memory-bytes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    parser.add_argument("--cpu-offload-gb", type=float, default=0)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--enforce-eager", action="store_true")
    program, serve, *words = shlex.split(command)
    assert (program, serve) == ("vllm", "serve")
    flags = parser.parse_args(words)
    assert 0 < flags.gpu_memory_utilization <= 1 and flags.max_num_batched_tokens >= flags.max_num_seqs
    return flags


@pytest.mark.parametrize("vram", ["12GiB", "1GiB", "430MiB"])
def test_vllm_has_room_for_every_sequence_and_moves_the_rest(model: Path, vram: str) -> None:
    plan = planned(vllm, model, vram=vram, ram="8GiB", batch=4)
    flags, module = vllm_flags(plan.command), on_meta(model)
    assert (flags.max_model_len, flags.max_num_seqs, flags.max_num_batched_tokens) == (80, 4, 320)
    assert flags.kv_cache_memory_bytes == plan.bytes[VRAM]["kv_cache"]
    everything = distinct_bytes(module.parameters())
    assert weights(plan)[VRAM] == everything - int(flags.cpu_offload_gb * (1 << 30))
    assert weights(plan)[RAM] >= everything - weights(plan)[VRAM]
    total = plan.machine.hardware.tier(VRAM).capacity_bytes
    assert flags.gpu_memory_utilization * total <= plan.machine.budget_bytes[VRAM]
    assert flags.enforce_eager is (vram != "12GiB")
    assert (flags.cpu_offload_gb > 0) is (plan.bytes[RAM]["weights"] > 0)


def test_vllm_offloads_what_does_not_fit(llama: Path) -> None:
    fits = planned(vllm, llama, vram="400MiB", ram="8GiB")
    tight = sum(fits.bytes[VRAM].values()) - (50 << 20)
    flags = vllm_flags(planned(vllm, llama, vram=tight, ram="8GiB").command)
    assert (50 << 20) <= flags.cpu_offload_gb * (1 << 30) <= (61 << 20)


def test_the_cache_of_vllm_has_a_block_of_16_tokens_more_than_its_sequences(llama: Path) -> None:
    cell = 4 * 4 * 2 * 128 * 2  # four layers of four heads
    assert planned(vllm, llama, batch=3).bytes[VRAM]["kv_cache"] == (3 * 80 + 16) * cell


def test_each_gpu_has_its_share_of_weights_and_heads(llama: Path) -> None:
    alone, split = planned(vllm, llama), planned(vllm, llama, gpus=4)
    assert split.bytes[VRAM]["kv_cache"] * 4 == alone.bytes[VRAM]["kv_cache"]
    assert 0 <= 4 * weights(split)[VRAM] - weights(alone)[VRAM] < 3 * 20 * 1024  # the norms, which each GPU has
    assert vllm_flags(split.command).tensor_parallel_size == split.gpus == 4


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"task": "train"}, UsageError, "Add --task generate"),
        ({"gpus": 3}, UsageError, "It has 8 heads"),
        ({"vram": "100MiB"}, BudgetError, "of VRAM at least"),
        ({"seq": 5000}, UsageError, "at most 4096 tokens"),
    ],
)
def test_vllm_refuses(llama: Path, settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        planned(vllm, llama, **settings)


def test_vllm_needs_a_gpu(llama: Path) -> None:
    request = MeshRequest(model=str(llama), seq=64, new_tokens=16)
    machine = Machine(hardware=CPU, budget_bytes={RAM: 1 << 30})
    with pytest.raises(UsageError, match="Give --gpu or --vram"):
        first_that_fits(vllm(request, machine))


def test_packed_weights_stay_packed_in_vllm(tmp_path: Path) -> None:
    packed = {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    (tmp_path / "config.json").write_text(json.dumps(packed))
    plan = planned(vllm, tmp_path)
    assert weights(plan)[VRAM] < weights(planned(vllm, tmp_path, precision="bf16"))[VRAM] / 3
    assert vllm_flags(plan.command).dtype == "auto"


def test_a_name_of_the_catalog_is_given_as_its_hub_id() -> None:
    assert vllm_flags(planned(vllm, "llama-3.2-1b").command).model == "meta-llama/Llama-3.2-1B"


# -- diffusers -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    small_pipeline(folder).save_pretrained(folder / "saved")
    return folder / "saved"


def pipeline_call(command: str) -> tuple[str, dict[str, Any]]:
    """The method that the command calls, with its arguments, which the installed diffusers has to accept."""
    load, apply = ast.parse(command).body
    assert isinstance(load, ast.Assign) and isinstance(apply, ast.Expr) and isinstance(apply.value, ast.Call)
    assert isinstance(apply.value.func, ast.Attribute)
    method = apply.value.func.attr
    arguments = {str(word.arg): ast.unparse(word.value) for word in apply.value.keywords}
    signature = inspect.signature(getattr(DiffusionPipeline, method))
    signature.bind(None, *apply.value.args, **arguments)
    return method, arguments


@pytest.mark.thorough
def test_a_pipeline_leaves_the_gpu_as_a_whole_then_by_blocks_then_by_layers(pipeline: Path) -> None:
    request = MeshRequest(model=str(pipeline), gpu="RTX 3060")
    plans = list(diffusers(request, machine_of(request)))
    methods = [pipeline_call(plan.command)[0] for plan in plans]
    assert methods == [
        "to", "enable_model_cpu_offload", *["enable_group_offload"] * 5, "enable_sequential_cpu_offload"
    ]  # fmt: skip
    needs = [plan.bytes[VRAM]["weights"] for plan in plans]
    pipe: Any = DiffusionPipeline.from_pretrained(pipeline)
    parts = {
        n: distinct_bytes([*m.parameters(), *m.buffers()])
        for n, m in pipe.components.items()
        if hasattr(m, "parameters")
    }
    assert needs[0] == sum(parts.values())
    assert needs[1] == max(parts.values())
    assert needs[3] >= needs[4] >= needs[5] >= needs[6] > needs[7]
    assert needs[2] >= needs[6]  # a stream loads the next block meanwhile
    for plan in plans:
        streams = "use_stream" in plan.command  # from page-locked copies beside the weights of a model
        in_ram = plan.bytes[RAM]["weights"]
        assert in_ram >= needs[0] + max(parts.values()) if streams else in_ram == needs[0]
        tight = MeshRequest(model=str(pipeline), gpu="RTX 3060", vram=plan.peak_bytes[VRAM])
        chosen = first_that_fits(diffusers(tight, machine_of(tight)))
        assert chosen.peak_bytes[VRAM] <= plan.peak_bytes[VRAM]


@pytest.mark.thorough
def test_diffusers_itself_groups_the_blocks_as_counted(pipeline: Path) -> None:
    from diffusers.hooks import apply_group_offloading
    from diffusers.hooks.group_offloading import GroupOffloadingHook

    request = MeshRequest(model=str(pipeline), gpu="RTX 3060")
    counted = [
        plan.bytes[VRAM]["weights"]
        for plan in diffusers(request, machine_of(request))
        if "num_blocks_per_group=1)" in plan.command
    ]
    pipe: Any = DiffusionPipeline.from_pretrained(pipeline)
    most = 0
    for module in (pipe.unet, pipe.vae, pipe.text_encoder):
        cpu = torch.device("cpu")
        apply_group_offloading(module, cpu, cpu, offload_type="block_level", num_blocks_per_group=1)
    for module in (pipe.unet, pipe.vae.encoder, pipe.vae.decoder, pipe.text_encoder):
        groups = {}
        for part in module.modules():
            registry = getattr(part, "_diffusers_hook", None)
            for hook in registry.hooks.values() if registry else ():
                if isinstance(hook, GroupOffloadingHook):
                    tensors = [t for m in hook.group.modules for t in (*m.parameters(), *m.buffers())]
                    groups[id(hook.group)] = distinct_bytes([*tensors, *hook.group.parameters, *hook.group.buffers])
        own = groups.pop(id(module._diffusers_hook.get_hook("group_offloading").group), 0)
        most = max(most, own + max(groups.values(), default=0))
    assert counted == [most]


@pytest.mark.parametrize(
    ("settings", "words"),
    [({}, "not a pipeline"), ({"task": "train"}, "Add --task generate"), ({"gpus": 2}, "one GPU")],
)
def test_diffusers_refuses(llama: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        planned(diffusers, llama, **settings)


# -- DeepSpeed -------------------------------------------------------------------------------------------------------

TRAIN = {"task": "train", "seq": 64, "batch": 4}
# Of 66 million parameters: 1.2 GB of states.
PLACES = (("12GiB", {}), ("1200MiB", {"gpus": 4}), ("700MiB", {}), ("560MiB", {}), ("500MiB", {}))


@pytest.mark.thorough
@pytest.mark.parametrize("shape", ["llama", "moe"])
@pytest.mark.parametrize(("vram", "settings"), PLACES)
def test_deepspeed_is_given_what_fits(tmp_path: Path, shape: str, vram: str, settings: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[shape]))
    plan = planned(deepspeed, tmp_path, **TRAIN, vram=vram, ram="32GiB", **settings)
    file = json.loads(plan.file)
    gpus = settings.get("gpus", 1)
    assert file["train_micro_batch_size_per_gpu"] * file["gradient_accumulation_steps"] == 4
    zero, numbers = file["zero_optimization"], sum(p.numel() for p in on_meta(tmp_path).parameters())
    assert plan.gpus == gpus
    if "offload_optimizer" not in zero:
        assert plan.bytes[VRAM]["states"] >= 18 * numbers // gpus
    else:
        assert zero["offload_optimizer"]["pin_memory"] and plan.bytes[RAM]["states"] >= 16 * numbers // gpus
    recomputes = any("gradient_checkpointing_enable" in text for text in plan.cannot)
    assert recomputes or file["train_micro_batch_size_per_gpu"] == 4


@pytest.mark.thorough
@pytest.mark.parametrize("gpus", [1, 3, 6])
def test_states_of_deepspeed_are_not_counted_twice_nor_rounded(llama: Path, gpus: int) -> None:
    """ZeRO-3 with all in RAM: 18 bytes a number in the node, a half more for buffers; no gradients on the GPU."""
    request = MeshRequest(model=str(llama), gpu="RTX 3060", gpus=gpus, **{**TRAIN, "batch": 1})
    plans = list(deepspeed(request, machine_of(request)))
    numbers = sum(p.numel() for p in on_meta(llama).parameters())
    places = [json.loads(p.file)["zero_optimization"].get("offload_param", {}).get("device") for p in plans]
    moved = plans[places.index("cpu")]
    assert moved.bytes[RAM]["states"] == int(1.5 * 18 * numbers)
    step = brim.estimate(llama, batch=1, seq=request.seq, precision="bf16", optimizer="sgd", gpu="RTX 3060")
    assert moved.bytes[VRAM]["activations"] <= step.peak_bytes.reserved - 2 * numbers


def test_deepspeeds_own_functions_agree(tmp_path: Path) -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    module = on_meta(tmp_path)
    numbers = sum(p.numel() for p in module.parameters())
    largest = max(sum(p.numel() for p in part.parameters(recurse=False)) for part in module.modules())
    for gpus in (1, 4):
        request = MeshRequest(model=str(tmp_path), gpu="RTX 3060", gpus=gpus, **{**TRAIN, "batch": 1})
        for plan in deepspeed(request, machine_of(request)):
            file = json.loads(plan.file)
            read = config.DeepSpeedConfig({**file, "train_batch_size": 1})
            zero, states = read.zero_config, {tier: plan.bytes[tier]["states"] for tier in (RAM, VRAM)}
            assert read.bfloat16_config.enabled and zero.stage in (2, 3)
            offloads = {"cpu_offload": zero.offload_optimizer is not None, "num_gpus_per_node": gpus}
            if zero.stage == 2:
                in_ram, on_gpu = stage_1_and_2.estimate_zero2_model_states_mem_needs(numbers, **offloads)
            else:
                in_ram, on_gpu, _ = stage3.estimate_zero3_model_states_mem_needs(
                    numbers, largest, cpu_offload_params=zero.offload_param is not None, **offloads
                )
            assert states[VRAM] == on_gpu
            assert states[RAM] == in_ram or plan.bytes[DISK]["states"]


# -- FSDP ------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("gpus", [2, 4])
def test_accelerate_reads_every_configuration_of_fsdp(
    tmp_path: Path, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    request = MeshRequest(model=str(tmp_path), gpu="RTX 3060", gpus=gpus, **TRAIN)
    plans = list(fsdp(request, machine_of(request)))
    assert len(plans) == 7
    for plan in plans:
        file = tmp_path / "fsdp.yaml"
        file.write_text(plan.file)
        config = load_config_from_file(str(file))
        assert (config.num_processes, config.mixed_precision, config.distributed_type) == (gpus, "bf16", "FSDP")
        for name, value in config.fsdp_config.items():
            monkeypatch.setenv(
                name.upper().replace("LAYER_CLS", "CLS"),
                str(value).lower() if isinstance(value, bool) else str(value),
            )
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        assert plugin.transformer_cls_names_to_wrap == ["LlamaDecoderLayer"]
        assert plugin.reshard_after_forward is config.fsdp_config["fsdp_reshard_after_forward"]
        assert plugin.activation_checkpointing is config.fsdp_config["fsdp_activation_checkpointing"]
        assert isinstance(plugin.cpu_offload, CPUOffloadPolicy) is (plan.bytes[RAM]["shards"] > 0)
        estimate = sum(plan.bytes[VRAM].values())
        assert estimate > sum(p.numel() for p in on_meta(tmp_path).parameters()) // gpus


@pytest.mark.parametrize(
    ("engine", "settings", "words"),
    [
        (deepspeed, {}, "Add --task train"),
        (fsdp, {}, "Add --task train"),
        (fsdp, TRAIN, "Give --gpu and --gpus"),
        (deepspeed, {**TRAIN, "precision": "fp32"}, "Leave out --precision"),
        (deepspeed, {**TRAIN, "gpus": 9}, "a single node"),
        (fsdp, {**TRAIN, "gpu": "RTX 3060", "gpus": 6, "gpus_per_node": 4}, "a single node"),
    ],
)
def test_what_trains_refuses(llama: Path, engine: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        planned(engine, llama, **settings)
