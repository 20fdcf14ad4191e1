"""Model, optimizer and step of a workload, for ``trace``: they allocate as a real program does."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from brim.core.options import STORED
from brim.errors import UnsupportedError, UsageError
from brim.estimation import inputs as making
from brim.estimation.extrapolation import Template
from brim.estimation.models import (
    Source,
    WeightType,
    check_not_quantized,
    check_shapes,
    class_of,
    keep_apart,
    parts_of,
    quantized_by,
    transformers_config,
    weight_type,
)
from brim.estimation.optimizers import make_optimizer
from brim.estimation.packed_weights import as_stored
from brim.estimation.quantization import SCHEMES, lora_layers, quantize
from brim.estimation.silence import quiet
from brim.estimation.workload import ASKED, DEFAULT_NEW_TOKENS, Workload
from brim.techniques.checkpointing.technique import selective_contexts
from brim.techniques.dry_run import as_arguments
from brim.techniques.lora import add_lora
from brim.techniques.optimizers import FUSED

Step = Callable[[], Any]

# An estimate describes a program as in the libraries' manuals: transformers' model and its ``generate``, optimizers
# by their defaults, PEFT's adapters, bitsandbytes' and torchao's layers. ``brim plan`` predicts brim's own commands.
PROGRAM = "an ordinary program"

_WIDENED = (
    "weights that are not quantized are float32 and products bfloat16, as PEFT's prepare_model_for_kbit_training and "
    "autocast have them; brim train --precision bf16 leaves them in 16 bits"
)
_HALF = {"bfloat16": "bf16", "float16": "bf16"}  # both take two bytes


class Job:
    """A model and its workload. ``build`` is for ``trace``; after it ``workload`` has every setting."""

    def __init__(self, source: Source, workload: Workload, *, full: Workload | None = None, later: int = 0) -> None:
        self.source, self.workload = source, workload
        self.full = full or workload  # the whole workload; this job may trace a part of it
        self.later = later  # tokens that are there already when generating begins, beyond those of the prompt
        self.template: Template | None = None  # the shallow trace that this job's deep one was extended from
        self.most_tokens: int | None = None  # length of the model's table of positions
        self.ignored: list[str] = []  # settings that mean nothing to this model
        self.notes: dict[str, str] = {}  # assumptions, by subject
        self.shapes: list[tuple[int, ...]] = []  # of the trained parameters
        self.differs: dict[str, str] = {}  # differences of brim's own commands, by part
        self.precision_origin = ""

    def with_layers(self, field: str, layers: int) -> Job:
        """The job of the same model with ``layers`` in its configuration's ``field``."""
        source = dataclasses.replace(self.source, config={**self.source.config, field: layers})
        return Job(source, self.workload, full=self.full, later=self.later)

    def adopt(self, done: Job) -> None:
        """Take over the findings of another job of this model."""
        self.workload, self.ignored, self.notes = done.workload, done.ignored, done.notes
        self.most_tokens, self.differs = done.most_tokens, done.differs
        self.precision_origin = done.precision_origin

    @property
    def has_windows(self) -> bool:
        """Return whether a setting gives a window or a chunk, which may fill up at one length and not at another."""
        parts = (part for _, part in parts_of(self.source.config))
        return any(
            value and re.search(r"window(?!_layers)|chunk", name)
            for part in parts for name, value in part.items()
            if name != "sliding_window" or part.get("use_sliding_window") is not False
        )  # fmt: skip

    def build(self) -> Step:
        if self.source.library == "python":
            return self._of_factory()
        if self.source.parts:
            return self._of_pipeline()
        model = self.module()
        self._quantize(model)
        if self.workload.method == "lora":
            if self._is_over_bitsandbytes:
                _widen(model)
                self.notes["not quantized"] = _WIDENED
            model = _with_lora(model, self.source, self.workload)
        model = model.cuda()
        return self._step(model)

    def module(self) -> nn.Module:
        """Build the model of the configuration, on the host and in the workload's weight type."""
        return self._diffusers() if self.source.library == "diffusers" else self._transformers()

    # -- models --------------------------------------------------------------------------------------------------

    def _transformers(self) -> nn.Module:
        from transformers.initialization import no_init_weights

        config = transformers_config(self.source)
        kind = _transformers_class(self.source, config)
        asked = self.source.architecture
        if asked and asked != kind.__name__:
            self.notes["architecture"] = f"transformers has no class {asked}; {kind.__name__} is used"
        stored = weight_type(self.source)
        self._set_precision(stored)
        keep_apart(config, kind, self.source)
        as_stored = self.workload.precision == STORED and stored.dtype == "float32"
        with no_init_weights():
            model: nn.Module = kind._from_config(
                config, dtype=torch.float32 if as_stored else _weights_dtype(self.workload)
            )
        model.tie_weights()  # type: ignore[operator]  # left out where weights are not initialised
        check_shapes(model, self.source)
        self._resolve(model, config)
        self.differs = differences(self.workload, stored.dtype, language_model=model.can_generate())  # type: ignore[operator]
        return model

    def _resolve(self, model: Any, config: Any) -> None:
        """Fill in the settings that are None, and record those that mean nothing to this model."""
        if making.is_multimodal(config) and making.takes_text_alone(model):
            self.notes["inputs"] = "text only: the memory for images and sounds is not included"
        generates = self.workload.task == "generate" and model.can_generate()
        tokens = making.takes_tokens(model, generates=generates)
        if self.workload.seq and not tokens:
            self.ignored.append(f"seq is ignored: {self.source.name} does not take tokens.")
            self.workload = dataclasses.replace(self.workload, seq=None)
        if self.full.new_tokens and not generates:
            self.ignored.append(f"new_tokens is ignored: {self.source.name} does not generate text.")
        new = (self.workload.new_tokens or DEFAULT_NEW_TOKENS) if generates else 0
        new_tokens = (self.full.new_tokens or DEFAULT_NEW_TOKENS) if generates else 0
        room = 0 if config.is_encoder_decoder else new_tokens  # positions needed for new tokens
        default = max(making.default_tokens(model) - room, 1) if tokens else 0
        self.workload = self.workload.resolved(seq=default or None, precision="fp32", new_tokens=new or None)
        if tokens:
            self.most_tokens = min((limit for _, limit in making.position_tables(model)), default=None)
            making.check_positions(model, (self.workload.seq or 0) + room)
        if generates and config.is_encoder_decoder:
            making.check_positions(model, new_tokens, "decoder")

    def _diffusers(self) -> nn.Module:
        import diffusers

        kind = getattr(diffusers, self.source.architecture, None)
        if kind is None or not issubclass(kind, nn.Module):
            raise UnsupportedError(
                f"{self.source.name} was given as the model.",
                "It is a pipeline of several models."
                if self.source.parts
                else f"diffusers {diffusers.__version__} has no model {self.source.architecture}.",
                "Use brim estimate, brim plan --for diffusers or brim.fit." * bool(self.source.parts),
            )
        self._set_precision(weight_type(self.source))
        if image := making.IMAGES.get(self.source.architecture):
            self.notes["inputs"] = image
        with quiet():  # the import may have set another level
            model: nn.Module = kind.from_config(dict(self.source.config)).to(_weights_dtype(self.workload))
        self.workload = self.workload.resolved(seq=None, precision="fp32", new_tokens=None)
        return model

    def _set_precision(self, stored: WeightType) -> None:
        """Fill in the precision where none was given, and note its origin."""
        if self.workload.precision is None:
            precision, self.precision_origin = _HALF.get(stored.dtype, "fp32"), stored.origin_and_type
            trains = self.workload.task == "train"
            if (method := quantized_by(self.source)) and not (trains and self.source.is_catalog):
                if trains and self.workload.method != "lora":
                    raise UsageError(
                        f"Cannot train all parameters of {self.source.name}.",
                        f"Its weights are quantized ({method}) and take no gradient.",
                        "Train adapters with --method lora, or give --precision bf16 for the unpacked model.",
                    )
                precision, self.precision_origin = STORED, f"{method}, the others {stored.origin_and_type}"
            self.workload = dataclasses.replace(self.workload, precision=precision)
        elif self.full.precision is not None:
            self.precision_origin = ASKED

    @property
    def _is_over_bitsandbytes(self) -> bool:
        """Return whether adapters are trained over weights that bitsandbytes quantized."""
        precision = self.workload.precision
        stored = precision == STORED and quantized_by(self.source).startswith("bitsandbytes")
        return self.workload.method == "lora" and (stored or precision in ("int8", "int4"))

    def _quantize(self, model: nn.Module) -> None:
        precision = self.workload.precision or ""
        if precision in SCHEMES:
            self.notes[precision] = quantize(model, precision, training=self.workload.task == "train")
        elif precision == STORED:
            self.notes |= as_stored(model, self.source, torch.cuda.get_device_capability())

    # -- steps ---------------------------------------------------------------------------------------------------

    def _step(self, model: Any) -> Step:
        if self.workload.task == "train":
            _checkpoint(model, self.workload.checkpointing or "none", self.source)
            inner = getattr(model, "base_model", model).model if self.workload.method == "lora" else model
            make = making.diffusion_inputs if self.source.library == "diffusers" else making.training_inputs
            return self._training(model, make(inner, self.workload))
        model.eval()
        if self.source.library == "transformers" and model.can_generate():
            return _generation(model, self._prompt(model), self.workload)
        make = making.diffusion_inputs if self.source.library == "diffusers" else making.forward_inputs
        return _forward_only(model, make(model, self.workload))

    def _prompt(self, model: Any) -> dict[str, Any]:
        """Inputs at the start of generation; ``later`` tokens belong to the decoder where there is an encoder."""
        workload = self.workload
        if not self.later:
            return making.forward_inputs(model, workload)
        if not model.config.is_encoder_decoder:
            longer = dataclasses.replace(workload, seq=(workload.seq or 1) + self.later)
            return making.forward_inputs(model, longer)
        told = making.token_ids(workload.batch, 1 + self.later)
        return making.forward_inputs(model, workload) | {"decoder_input_ids": told}

    def _training(self, model: nn.Module, inputs: dict[str, Any]) -> Step:
        model.train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.shapes = [tuple(parameter.shape) for parameter in trained]
        optimizer = make_optimizer(self.workload.optimizer or "adamw", trained)
        target = _target(inputs) if self.source.library == "diffusers" else None
        precision = "bf16-mixed" if self._is_over_bitsandbytes else self.workload.precision
        scaler = torch.amp.GradScaler("cuda") if precision == "fp16-mixed" else None

        def forward() -> torch.Tensor:
            with _autocast(precision):
                return _loss(model(**inputs), target)

        return training_step(forward, optimizer, scaler)

    def _of_pipeline(self) -> Step:
        """Load all models of a diffusers pipeline, and run each once: text, one denoising step, decoding."""
        if self.workload.task == "train":
            raise UnsupportedError(
                f"Cannot train the pipeline {self.source.name}.",
                "Its models are trained one at a time.",
                f"Give the folder of one of them ({', '.join(self.source.parts)}), or --task generate.",
            )
        if self.workload.precision is None:
            self.precision_origin = "diffusers' default"
            self.workload = dataclasses.replace(self.workload, precision="fp32")
        jobs = [Job(source, self.workload) for source in self.source.parts.values()]
        for source in self.source.parts.values():
            check_not_quantized(source)
        models: list[Any] = [job.module().cuda().eval() for job in jobs]
        denoisers = [model for model in models if making.denoises(model)]
        inputs = [making.diffusion_inputs(model, making.guided(model, self.workload)) for model in denoisers]
        runs: list[Step] = []
        for job, model in zip(jobs, models, strict=True):
            self.notes |= job.notes
            if job.source.library == "transformers":
                job.workload = dataclasses.replace(job.workload, seq=making.text_tokens(model, inputs))
                runs.append(_forward_only(model, making.forward_inputs(model, job.workload)))
        runs += [_forward_only(*pair) for pair in zip(denoisers, inputs, strict=True)]
        decoders = [model for model in models if type(model).__name__.startswith("Autoencoder") and inputs]
        runs += [_decoding(model, making.latents(model, inputs[0], self.workload.batch)) for model in decoders]

        def step() -> None:
            for run in runs:
                run()

        return step

    def _of_factory(self) -> Step:
        assert self.source.factory is not None
        returned = self.source.factory()
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], nn.Module):
            return self._of_module(*returned)
        if isinstance(returned, nn.Module) or not callable(returned):
            raise UsageError(
                f"Cannot use the result of {self.source.name}.",
                f"It returned {type(returned).__name__}.",
                "Return a function without arguments that runs one step, or a pair of a model and its inputs.",
            )
        ignored = {name: value for name, value in self.workload.given.items() if name != "task"}
        if ignored:
            raise UsageError(
                f"{' and '.join(ignored)} {'was' if len(ignored) == 1 else 'were'} given for {self.source.name}.",
                "Its function returns a complete step, which already has these settings.",
                "Leave them out, or return a pair of a model and its inputs.",
            )
        step: Step = returned
        return step

    def _of_module(self, model: nn.Module, example: Any) -> Step:
        for name in ("batch", "seq", "new_tokens"):
            if name in self.workload.given:
                raise UsageError(f"{name} was given for {self.source.name}.", "The inputs that it returns decide it.")
        if self.workload.method == "lora" or self.workload.checkpointing not in (None, "none"):
            raise UnsupportedError(
                f"Cannot add lora or checkpointing to {self.source.name}.",
                "brim estimate adds them to models of transformers and diffusers only.",
                "Add them in the function.",
            )
        dtype = None if self.workload.precision is None else _weights_dtype(self.workload)
        self._set_precision(_own_type(model))
        model = model.to(dtype=dtype)
        self._quantize(model)
        model = model.cuda()
        inputs = _named_inputs(example, dtype)
        call = _CallWith(model)
        if self.workload.task == "train":
            return self._training(call, {"inputs": inputs})
        return _forward_only(call.eval(), {"inputs": inputs})


def training_step(
    forward: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
) -> Step:
    """A training step as in PyTorch's tutorials; ``forward`` returns the loss."""

    def step() -> None:
        loss = forward()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    return step


class _CallWith(nn.Module):
    """Call a module with positional or named inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Any:
        return self.model(**inputs) if isinstance(inputs, dict) else self.model(*inputs)


def _own_type(model: nn.Module) -> WeightType:
    """The type of most weights of a module that a function built."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    dtype = max(counts, key=lambda dtype: counts[dtype], default=torch.float32)
    return WeightType(dtype=str(dtype).removeprefix("torch."), origin="the function's module as it is")


def _named_inputs(example: Any, dtype: torch.dtype | None) -> Any:
    """Move inputs to the GPU, floating ones to ``dtype`` (None: unchanged)."""

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(dtype).cuda() if value.is_floating_point() and dtype is not None else value.cuda()

    inputs = as_arguments(example)
    if isinstance(inputs, dict):
        return {name: place(value) for name, value in inputs.items()}
    return tuple(place(value) for value in inputs)


def _transformers_class(source: Source, config: Any) -> Any:
    import transformers

    heads = ("CausalLM", "ImageTextToText", "Seq2SeqLM", "ImageClassification")
    autos = (*(f"AutoModelFor{head}" for head in heads), "AutoModel")
    model_class = class_of(config, [source.architecture], autos)
    if model_class is None:
        raise UnsupportedError(
            f"{source.name} was given as the model.",
            f"transformers {transformers.__version__} has no class {source.architecture or config.model_type}.",
            "Install a newer version of transformers.",
        )
    return model_class


def _weights_dtype(workload: Workload) -> torch.dtype:
    return torch.bfloat16 if workload.precision in ("bf16", STORED, *SCHEMES) else torch.float32


def _widen(model: nn.Module) -> None:
    """Convert parameters of 16 bits to float32, as PEFT's ``prepare_model_for_kbit_training``."""
    for parameter in model.parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


def _with_lora(model: nn.Module, source: Source, workload: Workload) -> nn.Module:
    """Add PEFT adapters, with PEFT's defaults for settings that are None."""
    targets: list[str] | str | None = None
    if source.library == "diffusers":
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
    lora_targets = workload.lora_targets
    if lora_targets is not None:
        targets = lora_targets[0] if lora_targets == ("all-linear",) else list(lora_targets)
    rank = {} if workload.lora_rank is None else {"r": workload.lora_rank}
    kind = str(source.config.get("model_type"))
    adapted: nn.Module = add_lora(model, source.name, model_type=kind, targets=targets, layers=lora_layers(), **rank)
    return adapted


def _checkpoint(model: nn.Module, checkpointing: str, source: Source) -> None:
    if checkpointing == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if checkpointing in ("selective", "alternate"):
        options["context_fn"] = functools.partial(selective_contexts, alternate=checkpointing == "alternate")
    if source.library == "diffusers":
        if checkpointing != "full" or not getattr(model, "_supports_gradient_checkpointing", False):
            raise UnsupportedError(
                f"Cannot use checkpointing={checkpointing} for {source.name}.",
                "The models of diffusers support full checkpointing only.",
            )
        model.enable_gradient_checkpointing()  # type: ignore[operator]
        return
    inner: Any = getattr(model, "base_model", model)
    if not getattr(
        inner, "supports_gradient_checkpointing", getattr(model, "supports_gradient_checkpointing", False)
    ):
        raise UnsupportedError(
            f"Cannot use checkpointing={checkpointing} for {source.name}.", "Its class does not support it."
        )
    if hasattr(model, "activation_checkpointing_enable"):  # its name since transformers 5.20
        model.activation_checkpointing_enable(options)  # type: ignore[operator]
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[operator]


def _autocast(precision: str | None) -> Any:
    if precision not in ("bf16-mixed", "fp16-mixed"):
        return nullcontext()
    return torch.autocast("cuda", torch.bfloat16 if precision == "bf16-mixed" else torch.float16)


def _target(inputs: dict[str, Any]) -> torch.Tensor:
    """The noise that a diffusion model learns to predict."""
    sample = next(inputs[name] for name in ("sample", "hidden_states", "x") if name in inputs)
    return torch.zeros_like(sample[0] if isinstance(sample, list) else sample)


def _loss(output: Any, target: torch.Tensor | None) -> torch.Tensor:
    loss: torch.Tensor | None = getattr(output, "loss", None)
    if loss is not None:
        return loss
    first: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    first = first[0] if isinstance(first, list) else first
    if target is not None:
        return nn.functional.mse_loss(first[:, : target.shape[1]].float(), target.float())
    return first.float().mean()


def _forward_only(model: nn.Module, inputs: dict[str, Any]) -> Step:
    def step() -> None:
        with torch.no_grad():
            model(**inputs)

    return step


def _decoding(model: Any, latents: torch.Tensor) -> Step:
    def step() -> None:
        with torch.no_grad():
            model.decode(latents)

    return step


def _generation(model: Any, inputs: dict[str, Any], workload: Workload) -> Step:
    """Greedy generation to the last token, by transformers' own loop."""
    from transformers import GenerationConfig, GenerationMixin

    config: Any = model.config
    start = getattr(config, "decoder_start_token_id", None)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, use_cache=True, pad_token_id=0, bos_token_id=0, decoder_start_token_id=start,
        max_new_tokens=workload.new_tokens, eos_token_id=None,
    )  # fmt: skip
    if "input_ids" in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])

    def step() -> None:
        GenerationMixin.generate(model, **inputs)

    return step


def differences(workload: Workload, stored: str, *, language_model: bool) -> dict[str, str]:
    """Return differences of brim's own commands from the ordinary step, by part; empty if the steps are equal.

    Args:
        workload: The request, with a value for every setting.
        stored: The type of the model's weights in its files, as in ``"bfloat16"``.
        language_model: True if the model generates text.
    """
    if not language_model:
        return {"command": "brim train and brim generate run language models; others by brim.fit"}
    if workload.task == "generate":
        return _of_generation(workload)
    precision = workload.precision or "fp32"
    parts = {}
    if precision in ("int8", "int4"):
        parts["layers"] = "brim train quantizes nothing; it takes checkpoints that are quantized"
    elif precision == "fp8":
        parts["layers"] = "brim train takes torchao's own layers"
    if workload.method == "lora" and "mixed" in precision and stored != "float32":
        parts["weights"] = f"brim train keeps weights that are not trained in their stored dtype, {stored}"
    elif workload.method == "lora" and precision == "bf16":
        parts["adapters"] = "brim train --precision bf16 keeps them in bfloat16, PEFT in float32"
    if workload.optimizer in (None, *FUSED):
        parts["optimizer"] = "brim train uses PyTorch's fused optimizer, which allocates nothing in its step"
    elif workload.optimizer == "adamw8bit":
        parts["optimizer"] = "brim train takes torchao's own"
    if workload.checkpointing == "alternate":
        parts["checkpointing"] = "brim train has no alternate"
    return parts


def _of_generation(workload: Workload) -> dict[str, str]:
    parts = {"cache": "brim generate allocates the cache once, for all tokens"}
    if workload.precision == "fp8":
        parts["layers"] = "brim generate does not quantize to fp8"
    return parts
