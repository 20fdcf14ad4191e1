"""The programs around PyTorch, JAX and TensorFlow: their signs in a log, and their settings that take memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from brim.report.phase import (
    CHUNKED_LOSS,
    FUSED,
    PRECISION,
    RECOMPUTE,
    SMALLER,
    STATES_IN_8_BITS,
    STATES_IN_RAM,
    Advice,
)

_NEAREST_VERB = 120  # characters between "decrease" and the setting that is meant


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of a program. ``less`` and ``more`` are the advice in either direction, None: that does not help.

    ``name`` matches it in the program's own messages.
    """

    name: re.Pattern[str]
    less: Advice | None = None
    more: Advice | None = None


def _setting(name: str, less: tuple[str, str] | None = None, more: tuple[str, str] | None = None) -> Setting:
    return Setting(
        name=re.compile(name, re.IGNORECASE),
        less=Advice(less[0], less[1]) if less else None,
        more=Advice(more[0], more[1]) if more else None,
    )


_SHARE = "Take a smaller share of the device: what lies outside of the share has no room."
_LARGER_SHARE = "Take a larger share of the device, if nothing else runs there."
_LESS_CONTEXT = "Shorten the longest sequence."
_FEWER_SEQUENCES = "Serve fewer sequences at once."
_FEWER_TOKENS = "Compute fewer tokens at once in the prefill."
_MORE_GPUS = "Share the weights between more GPUs."
_WITHOUT_GRAPHS = "Do without CUDA graphs, whose pools take memory."
_CACHE_IN_8_BITS = "Store the KV cache in 8 bits."
_WEIGHTS_IN_4_BITS = "Take weights of 4 or 8 bits."

SETTINGS: dict[str, tuple[Setting, ...]] = {
    "vllm": (
        _setting(
            r"gpu[-_ ]memory[-_ ]utili[sz]ation",
            (_SHARE, "--gpu-memory-utilization 0.8"),
            (_LARGER_SHARE, "--gpu-memory-utilization 0.95"),
        ),
        _setting(r"max[-_ ]num[-_ ]seqs", (_FEWER_SEQUENCES, "--max-num-seqs 16")),
        _setting(r"max[-_ ]model[-_ ]len", (_LESS_CONTEXT, "--max-model-len 8192")),
        _setting(r"max[-_ ]num[-_ ]batched[-_ ]tokens", (_FEWER_TOKENS, "--max-num-batched-tokens 2048")),
        _setting(r"enforce[-_ ]eager", (_WITHOUT_GRAPHS, "--enforce-eager"), (_WITHOUT_GRAPHS, "--enforce-eager")),
        _setting(r"kv[-_ ]cache[-_ ]dtype", (_CACHE_IN_8_BITS, "--kv-cache-dtype fp8")),
        _setting(r"tensor[-_ ]parallel", None, (_MORE_GPUS, "--tensor-parallel-size 2")),
        _setting(r"cpu[-_ ]offload", None, ("Keep some of the weights in RAM.", "--cpu-offload-gb 8")),
        _setting(r"quantization", None, (_WEIGHTS_IN_4_BITS, "--quantization fp8")),
        _setting(r"limit[-_ ]mm", ("Take fewer images a prompt.", """--limit-mm-per-prompt '{"image": 1}'""")),
    ),
    "sglang": (
        _setting(
            r"mem[-_ ]fraction[-_ ]static",
            (_SHARE, "--mem-fraction-static 0.7"),
            (_LARGER_SHARE, "--mem-fraction-static 0.9"),
        ),
        _setting(
            r"cuda[-_ ]graph[-_ ]max[-_ ]bs", ("Capture CUDA graphs of smaller batches.", "--cuda-graph-max-bs 16")
        ),
        _setting(r"max[-_ ]running[-_ ]requests|batch[-_ ]size", (_FEWER_SEQUENCES, "--max-running-requests 16")),
        _setting(r"chunked[-_ ]prefill[-_ ]size", (_FEWER_TOKENS, "--chunked-prefill-size 2048")),
        _setting(r"context[-_ ]length", (_LESS_CONTEXT, "--context-length 8192")),
        _setting(r"kv[-_ ]cache[-_ ]dtype", (_CACHE_IN_8_BITS, "--kv-cache-dtype fp8_e5m2")),
        _setting(r"disable[-_ ]cuda[-_ ]graph", None, (_WITHOUT_GRAPHS, "--disable-cuda-graph")),
        _setting(r"tp[-_ ]size|--tp\b", None, (_MORE_GPUS, "--tp 2")),
        _setting(r"quantization", None, (_WEIGHTS_IN_4_BITS, "--quantization fp8")),
    ),
    "tgi": (
        _setting(r"max-batch-prefill-tokens", (_FEWER_TOKENS, "--max-batch-prefill-tokens 2048")),
        _setting(r"max-batch-total-tokens", (_FEWER_SEQUENCES, "--max-batch-total-tokens 16384")),
        _setting(r"max-input-(?:tokens|length)", (_LESS_CONTEXT, "--max-input-tokens 2048 --max-total-tokens 4096")),
        _setting(r"cuda-memory-fraction", (_SHARE, "--cuda-memory-fraction 0.8")),
        _setting(r"quantize", None, (_WEIGHTS_IN_4_BITS, "--quantize bitsandbytes-nf4")),
        _setting(r"num-shard", None, (_MORE_GPUS, "--num-shard 2")),
    ),
    "tensorrt-llm": (
        _setting(
            r"free_gpu_mem\w*_fraction",
            ("Give the KV cache a smaller share of what is free.", "kv_cache_config.free_gpu_memory_fraction: 0.7"),
            (_LARGER_SHARE, "kv_cache_config.free_gpu_memory_fraction: 0.95"),
        ),
        _setting(r"max_batch_size", (_FEWER_SEQUENCES, "--max_batch_size 16")),
        _setting(r"max_num_tokens", (_FEWER_TOKENS, "--max_num_tokens 2048")),
        _setting(r"max_seq_len", (_LESS_CONTEXT, "--max_seq_len 8192")),
        _setting(r"tp_size", None, (_MORE_GPUS, "--tp_size 2")),
        _setting(r"quantization", None, (_WEIGHTS_IN_4_BITS, "--quantization FP8")),
    ),
    "lmdeploy": (
        _setting(
            r"cache[-_]max[-_]entry[-_]count",
            ("Give the KV cache a smaller share of what is free.", "--cache-max-entry-count 0.4"),
        ),
        _setting(r"session[-_]len", (_LESS_CONTEXT, "--session-len 8192")),
        _setting(r"max[-_]batch[-_]size", (_FEWER_SEQUENCES, "--max-batch-size 16")),
        _setting(r"quant[-_]policy", (_CACHE_IN_8_BITS, "--quant-policy 8")),
    ),
    "llama.cpp": (
        _setting(r"\bngl\b|n[-_]gpu[-_]layers", ("Put fewer layers on the GPU.", "llama-server -ngl 20 ...")),
        _setting(
            r"-c\b|ctx|context",
            ("Shorten the context, or store its cache in 8 bits.", "-c 8192 -ctk q8_0 -ctv q8_0 -fa on"),
        ),
        _setting(
            r"ubatch|n_ubatch", ("Compute fewer tokens at once: the compute buffer grows with them.", "-ub 128")
        ),
        _setting(r"cpu-moe", None, ("Keep the experts of some layers in RAM.", "--n-cpu-moe 20")),
    ),
    "ollama": (
        _setting(
            r"num_ctx|context",
            ("Shorten the context.", '"options": {"num_ctx": 4096}   # or OLLAMA_CONTEXT_LENGTH=4096'),
        ),
        _setting(
            r"kv_cache_type", (_CACHE_IN_8_BITS, "OLLAMA_FLASH_ATTENTION=1 OLLAMA_KV_CACHE_TYPE=q8_0 ollama serve")
        ),
        _setting(
            r"num_parallel|max_loaded",
            (
                "Serve one request and one model at a time.",
                "OLLAMA_NUM_PARALLEL=1 OLLAMA_MAX_LOADED_MODELS=1 ollama serve",
            ),
        ),
        _setting(r"num_gpu", ("Put fewer layers on the GPU.", '"options": {"num_gpu": 20}')),
        _setting(r"quant", ("Take a smaller model, or weights of fewer bits (q4_K_M).", "ollama run MODEL:q4_K_M")),
    ),
    "exllama": (
        _setting(r"cache_mode", (_CACHE_IN_8_BITS, "cache_mode: Q8   # or Q4")),
        _setting(r"max_seq_len", (_LESS_CONTEXT, "max_seq_len: 8192")),
        _setting(r"bpw", ("Take weights of fewer bits (a smaller bpw).", "")),
        _setting(r"gpu_split", ("Split the layers between GPUs by hand.", "gpu_split: [22, 23]")),
        _setting(r"moe", None, ("Keep experts in RAM.", "cpu_moe_offload_layers: 24")),
    ),
    "koboldcpp": (
        _setting(r"gpulayers", ("Put fewer layers on the GPU.", "--gpulayers 20")),
        _setting(
            r"contextsize", ("Shorten the context, or store its cache in 8 bits.", "--contextsize 8192 --quantkv 1")
        ),
        _setting(r"blasbatchsize", ("Compute fewer tokens at once.", "--blasbatchsize 128")),
    ),
    "lm-studio": (
        _setting(r"context", ("Shorten the context, or store its cache in 8 bits (load settings of the model).", "")),
        _setting(r"gpu[ _]offload", ("Put fewer layers on the GPU (GPU offload, in the load settings).", "")),
        _setting(r"guardrail", None, ("Or let it try: Settings, Hardware, model loading guardrails.", "")),
        _setting(r"quant", ("Take a smaller model, or weights of fewer bits.", "")),
    ),
    "comfyui": (
        _setting(r"lowvram", ("Keep less of the models on the GPU.", "python main.py --lowvram")),
        _setting(r"tiled", ("Decode in tiles.", "VAE Decode (Tiled)")),
        _setting(r"resolution", ("Take a smaller picture, fewer frames, or a batch of one.", "")),
        _setting(r"reserve-vram", None, ("Leave room for other programs and for workspaces.", "--reserve-vram 1.5")),
        _setting(r"fp8|gguf", ("Take weights of 8 or 4 bits (fp8, GGUF).", "--fp8_e4m3fn-unet")),
    ),
    "webui": (
        _setting(r"medvram", ("Keep less of the models on the GPU.", "COMMANDLINE_ARGS=--medvram   # or --lowvram")),
        _setting(r"resolution", ("Take a smaller picture, and batch size 1; scale it up in tiles.", "")),
        _setting(r"vae", ("Decode in tiles (Tiled VAE), and use fused attention.", "--opt-sdp-attention")),
    ),
    "diffusers": (
        _setting(
            r"cpu_offload", ("Keep on the GPU what computes, and the rest in RAM.", "pipe.enable_model_cpu_offload()")
        ),
        _setting(r"tiling", ("Decode in tiles.", "pipe.vae.enable_tiling()")),
        _setting(
            r"dtype",
            ("Load the weights in 16 bits, or quantized.", "from_pretrained(..., torch_dtype=torch.bfloat16)"),
        ),
        _setting(r"resolution", ("Take a smaller picture, fewer frames, or a batch of one.", "")),
    ),
    "jax": (
        _setting(r"remat|checkpoint", ("Recompute in the backward pass.", "jax.checkpoint(f)")),
        _setting(r"donate", ("Let results take the place of arguments.", "jax.jit(f, donate_argnums=0)")),
        _setting(
            r"XLA_PYTHON_CLIENT_MEM_FRACTION",
            (_SHARE, "export XLA_PYTHON_CLIENT_MEM_FRACTION=0.5"),
            (
                "Take more of the device: by default JAX leaves a quarter.",
                "export XLA_PYTHON_CLIENT_MEM_FRACTION=0.95",
            ),
        ),
        _setting(
            r"XLA_PYTHON_CLIENT_PREALLOCATE",
            ("Do not take most of the device at the start.", "export XLA_PYTHON_CLIENT_PREALLOCATE=false"),
        ),
        _setting(
            r"autotune",
            ("Try fewer kernels: each try takes a workspace.", "export XLA_FLAGS=--xla_gpu_autotune_level=0"),
        ),
        _setting(r"batch[-_ ]size", ("Make the batch smaller, or compute in bfloat16.", "")),
    ),
    "tensorflow": (
        _setting(
            r"allow_growth|memory_growth", ("Take memory as it is needed.", "export TF_FORCE_GPU_ALLOW_GROWTH=true")
        ),
        _setting(
            r"TF_GPU_ALLOCATOR",
            ("Let the driver's pool join free pieces.", "export TF_GPU_ALLOCATOR=cuda_malloc_async"),
            ("Let the driver's pool join free pieces.", "export TF_GPU_ALLOCATOR=cuda_malloc_async"),
        ),
        _setting(r"batch[-_ ]size", ("Make the batch smaller.", "model.fit(..., batch_size=8)")),
        _setting(r"mixed", ("Compute in 16 bits.", 'keras.mixed_precision.set_global_policy("mixed_bfloat16")')),
    ),
    "onnxruntime": (
        _setting(r"batch", ("Make the batch, or the longest input, smaller.", "")),
        _setting(
            r"arena",
            (
                "Let its arena grow by what is asked for, not by powers of two.",
                'providers=[("CUDAExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})]',
            ),
        ),
        _setting(r"cudnn", ("Give convolutions less workspace.", '{"cudnn_conv_use_max_workspace": "0"}')),
    ),
    "tensorrt": (
        _setting(r"workspace", ("Give the builder less workspace.", "trtexec --memPoolSize=workspace:1024 ...")),
        _setting(r"shapes", ("Build for smaller shapes and batches (--maxShapes).", "")),
    ),
    "cupy": (
        _setting(
            r"free_all", ("Give back what the pool has cached.", "cupy.get_default_memory_pool().free_all_blocks()")
        ),
        _setting(
            r"managed",
            (
                "Let the driver move pages to RAM.",
                "cupy.cuda.set_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc)",
            ),
        ),
        _setting(r"chunk", ("Work on a part of the data at a time, or in float32.", "")),
    ),
    "rapids": (
        _setting(r"spill", ("Let cuDF move data frames to RAM.", "export CUDF_SPILL=on")),
        _setting(r"managed", ("Let the driver move pages to RAM.", "rmm.reinitialize(managed_memory=True)")),
        _setting(r"chunk", ("Work on a part of the data at a time (dask-cudf).", "")),
    ),
    "xgboost": (
        _setting(r"extmem|quantile", ("Let the data be quantized as it comes.", "xgboost.QuantileDMatrix(...)")),
        _setting(r"max_depth|max_bin", ("Grow shallower trees, with fewer bins.", "max_depth=6, max_bin=128")),
    ),
    "mlx": (
        _setting(r"quant", ("Take a smaller model, or weights of 4 bits.", "")),
        _setting(r"prompt|context", ("Shorten the prompt, or keep less of its cache.", "--max-kv-size 4096")),
        _setting(r"wired", None, ("Let the GPU have more of the RAM.", "sudo sysctl iogpu.wired_limit_mb=28000")),
    ),
    "ctranslate2": (
        _setting(r"compute_type", ("Take weights of 8 bits.", 'compute_type="int8_float16"')),
        _setting(r"batch|beam", ("Decode fewer pieces and beams at once.", "batch_size=4, beam_size=1")),
        _setting(r"model", ("Take a smaller model.", "")),
    ),
}

# A program's signs in a log: files in a traceback, prefixes of lines. The first match wins.
_PROGRAMS = tuple(
    (name, re.compile(text))
    for name, text in (
        ("vllm", r"[/\\]vllm[/\\]|\bVllmWorker|\bEngineCore|\bvllm\b|\bgpu_memory_utilization\b|\bvLLM\b"),
        ("sglang", r"[/\\]sgl(?:ang|_jax)[/\\]|--mem-fraction-static|\bsglang\b|\bSGLang\b"),
        ("tensorrt-llm", r"tensorrt_llm|TensorRT-LLM|TRT-LLM"),
        ("tgi", r"text[-_]generation[-_](?:server|launcher)"),
        ("lmdeploy", r"[/\\]lmdeploy[/\\]|\blmdeploy\b"),
        ("comfyui", r"ComfyUI|[/\\]comfy(?:_\w+)?[/\\]|unloading all loaded models"),
        ("webui", r"stable-diffusion-webui|sd-webui|[/\\]modules[/\\](?:processing|sd_\w+|txt2img|call_queue)"),
        ("ollama", r"\b[oO]llama\b|llama runner|\bsource=(?:server|sched|routes|runner|memory|gpu|ggml)\.go:"),
        ("lm-studio", r"LM ?Studio|lmstudio|lm-studio|\blms\b"),
        ("koboldcpp", r"(?i)koboldcpp"),
        ("exllama", r"[/\\]exllamav\d[/\\]"),
        ("diffusers", r"[/\\]diffusers[/\\]"),
        ("ctranslate2", r"faster[_-]whisper|ctranslate2|whisperx"),
        ("onnxruntime", r"onnxruntime|\bOrt\w*Exception"),
        ("hf-trainer", r"[/\\](?:trl|axolotl|unsloth\w*|llamafactory)[/\\]|transformers[/\\]trainer|UnslothTrainer"),
        ("lightning", r"[/\\](?:pytorch_)?lightning[/\\]"),
        ("jax", r"[/\\](?:jax|flax|jaxlib)[/\\]|jaxlib\.xla_extension|\bjax\.errors"),
        ("tensorflow", r"[/\\](?:tensorflow|keras)[/\\]|tensorflow\.python"),
    )
)
# Any line of a log may show these: they run alone.
_SERVERS = (
    "vllm",
    "sglang",
    "tensorrt-llm",
    "tgi",
    "lmdeploy",
    "comfyui",
    "webui",
    "ollama",
    "lm-studio",
    "koboldcpp",
)
# Their settings decide about RAM, too.
IN_RAM = ("llama.cpp", "ollama", "lm-studio", "koboldcpp")
OF_FAMILY = {
    "sglang-unbalanced": "sglang",
    "rmm": "rapids",
    **{
        name: name
        for name in (
            "vllm", "sglang", "tgi", "tensorrt", "onnxruntime", "ollama", "lm-studio", "llama.cpp", "exllama", "jax",
            "tensorflow", "cupy", "xgboost", "mlx",
        )
    },
}  # fmt: skip
_OVER_FAMILY = {  # programs built on the writer of the message
    "llama.cpp": ("ollama", "lm-studio", "koboldcpp"),
    "llama.cpp-pinned": ("ollama", "lm-studio", "koboldcpp"),
    "tensorrt": ("tensorrt-llm",),
    "cuda-runtime": ("vllm", "sglang", "jax", "tensorflow", "ctranslate2", "tensorrt-llm", "tgi", "onnxruntime"),
}


def program_of(family: str, frames: Sequence[str], text: str, before: str) -> str:
    """Return the program that ran out, "" for an unknown one.

    ``frames`` are lines of the message's traceback, the innermost first: the nearest decides. Without them the
    message's ``text`` does, then the program that the log named ``before``.
    """
    own = OF_FAMILY.get(family, "")
    above = _OVER_FAMILY.get(family, ()) if own or family in _OVER_FAMILY else None
    for frame in frames:
        for name, pattern in _PROGRAMS:
            if pattern.search(frame) and (above is None or name in above):
                return name
    if frames and family.startswith("torch-") and not own:
        return ""
    named = next(
        (name for name, pattern in _PROGRAMS if pattern.search(text) and (above is None or name in above)), ""
    )
    if named:
        return named
    return before if before and (above is None or before in above) else own


def server_in(text: str) -> str:
    """Return the server or application named in a piece of a log, "" for none."""
    return next((name for name, pattern in _PROGRAMS if name in _SERVERS and pattern.search(text)), "")


_DIRECTION = re.compile(
    r"(?P<less>\b(?:decreas|lower|reduc|small|less\b|fewer|shorten|shorter|disabl|limit)\w*)"
    r"|(?P<more>\b(?:increas|rais|larger|higher|more\b|enabl)\w*)",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r"(?<=[.;!])\s+|\s(?=\d\. )")
_ASKS = re.compile(r"\b(?:try|please|need to|should|consider|set|use|decreas|increas|reduc|lower)", re.IGNORECASE)


def remedies(program: str, text: str, numbers: Mapping[str, int]) -> list[Advice]:
    """Return the message's own advice in its order: the program's settings beside a direction."""
    advices: list[Advice] = []
    for clause in _CLAUSE.split(text):
        if not _ASKS.search(clause):
            continue
        verbs = list(_DIRECTION.finditer(clause))
        for match, setting in _named(program, clause):
            verb = next((verb for verb in reversed(verbs) if verb.end() <= match.start()), None)
            verb = verb or next((verb for verb in verbs if verb.start() >= match.end()), None)
            if verb is None or not -_NEAREST_VERB < match.start() - verb.end() < _NEAREST_VERB:
                continue
            advice = setting.less if verb["less"] else setting.more
            if advice is not None:
                advices.append(_measured(advice, text, numbers, less=bool(verb["less"])))
    return advices


def _named(program: str, clause: str) -> list[tuple[re.Match[str], Setting]]:
    """Return the settings in a clause, by position."""
    named = [(match, setting) for setting in SETTINGS.get(program, ()) if (match := setting.name.search(clause))]
    return sorted(named, key=lambda pair: pair[0].start())


_ESTIMATED_LENGTH = re.compile(r"estimated maximum model length is ([0-9]{1,9})")


def _measured(advice: Advice, text: str, numbers: Mapping[str, int], *, less: bool) -> Advice:
    """Return the advice with a value derived from the message's numbers, or from the value in force."""
    free, total = numbers.get("free"), numbers.get("total")
    if advice.paste.startswith("--gpu-memory-utilization") and less and free and total and "wanted" in numbers:
        return replace(advice, paste=f"--gpu-memory-utilization {int(100 * free / total) / 100:.2f}")
    if advice.paste.startswith("--max-model-len") and (match := _ESTIMATED_LENGTH.search(text)):
        return replace(advice, paste=f"--max-model-len {match[1]}")
    if (share := _SHARE_AT_END.search(advice.paste)) and (in_force := _share_in_force(share[1], text)) is not None:
        value = max(in_force - 0.1, in_force / 2) if less else min(in_force + 0.05, (1 + in_force) / 2)
        return replace(advice, paste=f"{advice.paste[: share.start(2)]}{value:.2f}")
    return advice


_SHARE_AT_END = re.compile(r"([\w-]+):?[ =](0\.[0-9]+)$")
SHARES = re.compile(
    r"(gpu[-_ ]memory[-_ ]utili[sz]ation|mem[-_]fraction[-_]static|XLA_PYTHON_CLIENT_MEM_FRACTION"
    r"|cuda[-_]memory[-_]fraction"
    r"|free_gpu_memory_fraction|cache[-_]max[-_]entry[-_]count)['\"]?[ =:]{1,3}\(?(0?\.[0-9]{1,4}|1\.0)\b",
    re.IGNORECASE,
)


def _share_in_force(name: str, text: str) -> float | None:
    """Return the last value of a share in a log; None without one."""
    plain = name.lower().lstrip("-").replace("-", "_")
    stated = [match for match in SHARES.finditer(text) if re.sub(r"[- ]", "_", match[1].lower()) == plain]
    return float(stated[-1][2]) if stated else None


def settings_of(program: str, order: Sequence[str], text: str, numbers: Mapping[str, int]) -> list[Advice]:
    """Return advice by setting, "-name" for less and "+name" for more, in this order."""
    advices = []
    for item in order:
        setting = next(setting for setting in SETTINGS[program] if setting.name.search(item[1:]))
        advice = setting.less if item[0] == "-" else setting.more
        assert advice is not None, f"{program} has no {item}"
        advices.append(_measured(advice, text, numbers, less=item[0] == "-"))
    return advices


# A program's settings that take memory, by the frames in which it ran out; the last entry is the default.
_PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "vllm": (
        (r"capture_model|cuda_?graph|_capture", "-gpu_memory_utilization -max_num_seqs -enforce_eager"),
        (
            r"_allocate_kv_cache|initialize_kv_cache|initialize_from_config|cumem",
            "-gpu_memory_utilization -max_model_len -kv_cache_dtype",
        ),
        (
            r"profile_run|determine_available_memory",
            "-max_num_batched_tokens -max_num_seqs -max_model_len -gpu_memory_utilization +tensor_parallel",
        ),
        (
            r"load_model|model_loader|create_weights|process_weights_after_loading|get_model",
            "+tensor_parallel +quantization +cpu_offload",
        ),
        ("", "-gpu_memory_utilization -max_num_seqs -max_num_batched_tokens -max_model_len"),
    ),
    "sglang": (
        (r"capture|cuda_graph", "-mem_fraction_static -cuda_graph_max_bs +disable_cuda_graph"),
        (r"load_model|model_loader|create_weights", "+--tp +quantization"),
        ("", "-mem_fraction_static -chunked_prefill_size -max_running_requests -context_length"),
    ),
    "tgi": (("", "-max-batch-prefill-tokens -max-batch-total-tokens -cuda-memory-fraction +num-shard"),),
    "tensorrt-llm": (("", "-free_gpu_memory_fraction -max_num_tokens -max_batch_size -max_seq_len"),),
    "lmdeploy": (("", "-cache_max_entry_count -session_len -max_batch_size -quant_policy"),),
    "llama.cpp": (("", "-ngl -context -ubatch +cpu-moe"),),
    "ollama": (("", "-num_ctx -kv_cache_type -num_parallel -num_gpu -quant"),),
    "exllama": (("", "-cache_mode -max_seq_len -bpw -gpu_split +moe"),),
    "koboldcpp": (("", "-gpulayers -contextsize -blasbatchsize"),),
    "lm-studio": (("", "-context -gpu_offload -quant +guardrail"),),
    "comfyui": (
        (r"vae|decode|encode", "-tiled -lowvram -resolution +reserve-vram"),
        ("", "-lowvram -resolution -fp8 +reserve-vram -tiled"),
    ),
    "webui": (("", "-medvram -resolution -vae"),),
    "diffusers": (
        (r"autoencoder|vae", "-tiling -cpu_offload -resolution"),
        ("", "-cpu_offload -dtype -tiling -resolution"),
    ),
    "jax": (("", "+XLA_PYTHON_CLIENT_MEM_FRACTION -remat -donate -batch_size"),),
    "tensorflow": (("", "-batch_size -mixed -allow_growth -TF_GPU_ALLOCATOR"),),
    "onnxruntime": (("", "-batch -arena -cudnn"),),
    "tensorrt": (("", "-workspace -shapes"),),
    "cupy": (("", "-free_all -chunk -managed"),),
    "rapids": (("", "-spill -managed -chunk"),),
    "xgboost": (("", "-quantile -max_depth"),),
    "mlx": (("", "-quant -prompt +wired"),),
    "ctranslate2": (("", "-compute_type -batch -model"),),
}
# By message, where it says more than the frames: a share larger than the free memory has to shrink, a full pool of
# tokens has to grow or to hold fewer.
_BY_TEXT = tuple(
    (program, re.compile(pattern), order)
    for program, pattern, order in (
        (
            "jax",
            r"failed to allocate .{0,60}from device|CUDA_ERROR_OUT_OF_MEMORY|CUDNN_STATUS|CUBLAS_STATUS",
            "-XLA_PYTHON_CLIENT_PREALLOCATE -XLA_PYTHON_CLIENT_MEM_FRACTION -autotune",
        ),
        ("tensorflow", r"failed to allocate .{0,60}from device|CUDA_ERROR_OUT_OF", "-allow_growth -batch_size"),
        ("vllm", r"on startup is less than", "-gpu_memory_utilization -max_model_len"),
        (
            "vllm",
            r"cache blocks|stored in KV cache|KV cache is needed",
            "-max_model_len +gpu_memory_utilization -kv_cache_dtype +tensor_parallel",
        ),
        (
            "sglang",
            r"out of memory\. ?Try to lower your batch",
            "-max_running_requests -context_length +mem_fraction_static -kv_cache_dtype",
        ),
        ("sglang", r"try to increase --mem", "+mem_fraction_static -context_length +--tp +quantization"),
    )
)


_TO_RAM = ("-ngl", "+cpu-moe", "-num_gpu", "-gpulayers", "-gpu_offload")


def program_advice(
    program: str, frames: Sequence[str], text: str, numbers: Mapping[str, int], *, on_host: bool
) -> list[Advice]:
    """Return the program's helpful settings: those of its own message, then those of the place where it ran out."""
    if program not in _PLACES:
        return []
    places = _PLACES[program]
    order = next(
        (
            settings
            for frame in frames
            for pattern, settings in places
            if pattern and re.search(pattern, frame, re.IGNORECASE)
        ),
        places[-1][1],
    )
    by_text = (settings for name, pattern, settings in _BY_TEXT if name == program and pattern.search(text))
    order = next(by_text, order)
    # On the host, layers that leave the GPU would need RAM.
    items = [item for item in order.split() if not (on_host and item in _TO_RAM)]
    advices = remedies(program, text, numbers)
    for advice in settings_of(program, items, text, numbers):
        if all(_key(advice) != _key(other) for other in advices):
            advices.append(advice)
    return advices


def _key(advice: Advice) -> str:
    """Return the setting of an advice, whatever its direction."""
    return re.split(r"[ =]", advice.paste.removeprefix("export "))[0] if advice.paste else advice.text


# Trainers' own names of settings.
_SPELLED: dict[str, dict[Advice, str]] = {
    "hf-trainer": {
        SMALLER: "per_device_train_batch_size: 1, gradient_accumulation_steps: 8",
        RECOMPUTE: "gradient_checkpointing: true",
        PRECISION: "bf16: true",
        FUSED: "optim: adamw_torch_fused",
        STATES_IN_8_BITS: "optim: adamw_bnb_8bit",
        STATES_IN_RAM: "optim: paged_adamw_8bit",
        CHUNKED_LOSS: "use_liger_kernel: true",
    },
    "lightning": {SMALLER: "Trainer(accumulate_grad_batches=8)", PRECISION: 'Trainer(precision="bf16-mixed")'},
}


def spelled(program: str, advices: Sequence[Advice]) -> list[Advice]:
    """Return advice with the running trainer's names of settings."""
    names = _SPELLED.get(program, {})
    return [replace(advice, paste=names[advice]) if advice in names else advice for advice in advices]
