"""Build the module that a config names with transformers' own loading code, its weights left in their files."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from brim.core.files import regular
from brim.errors import BrimError, ModelError, UnsupportedError
from brim.estimation.models import class_of, other_shape, quantization_of, wrong_size
from brim.memory.checkpoint_files import TensorSource
from brim.models.file_tensor import FileTensor
from brim.models.prequantized import Quantizer

_SHOWN = 5  # names in an error message
_MODULES, _MODULES_EACH = 2_000, 16  # allowed modules of a model, and further ones per tensor in its files
_INITIALIZED_BYTES = 128 << 20  # weights that a checkpoint may lack: position tables, mostly


@dataclass(frozen=True, kw_only=True)
class BuiltModule:
    """``tensors`` has each distinct tensor by its first name in the state dict; ``tied`` the other names.

    ``quantization``: the method by which the files quantize weights; ``""`` for floating weights. ``quantizer``: that
    of weights which are, or are to be, quantized.
    """

    module: torch.nn.Module
    tensors: dict[str, FileTensor]
    tied: dict[str, str]
    dtype: torch.dtype
    unexpected: tuple[str, ...]
    quantization: str = ""
    quantizer: Quantizer | None = None


def read_config(directory: Path, *, trust_remote_code: bool) -> Any:
    """The transformers config in ``directory``; remote code is refused."""
    path = directory / "config.json"
    try:
        raw = json.loads(regular(path).read_bytes())
    except FileNotFoundError as error:
        raise ModelError(
            f"{directory} was given as the model.", "It has no config.json.", "Give the folder save_pretrained wrote."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"Cannot read {path}.", f"It is damaged: {error}.", "Fetch it again.") from error
    if not isinstance(raw, dict):
        raise ModelError(f"Cannot read {path}.", "It is not a JSON object.", "Fetch it again.")
    if (wrong := wrong_size(raw)) is not None:
        raise ModelError(f"Cannot use {path}.", f"Its {wrong[0]} is {wrong[1]!s:.40}.", "Fetch it again.")
    if "_class_name" in raw and "model_type" not in raw:
        raise UnsupportedError(
            f"{directory} was given as the model.",
            f"It is a diffusers model ({raw['_class_name']}).",
            "Load it with diffusers and hand the module to brim.fit.",
        )
    if "auto_map" in raw and not trust_remote_code and not _is_native(raw):
        raise UnsupportedError(
            f"{directory} was given as the model.",
            f"Its config.json says that it needs custom Python code ({raw.get('model_type')}).",
            "Read that code; if you trust it, pass trust_remote_code=True.",
        )
    from transformers import AutoConfig

    with _quiet():
        try:
            return AutoConfig.from_pretrained(str(directory), trust_remote_code=trust_remote_code)
        except Exception as error:
            raise ModelError(
                f"Cannot use {path}.", f"transformers does not accept it: {_short(error)}", "Correct it."
            ) from error


def build_module(
    directory: Path,
    config: Any,
    stored: dict[str, TensorSource],
    *,
    dtype: torch.dtype | None,
    trust_remote_code: bool,
    settings: Any = None,
    state: Mapping[str, torch.Tensor] | None = None,
) -> BuiltModule:
    """Build the module in eval mode, every weight of the checkpoint on meta. Raises ModelError as open_model.

    ``state``: the values of ``stored``, if the module is to have them.
    ``settings``: a configuration of bitsandbytes, by which weights are to be quantized.
    """
    kind = model_class(directory, config, trust_remote_code)
    state = state or {name: FileTensor.open(source) for name, source in stored.items()}
    method = quantization_of(config.to_dict())[0]
    files = sorted({extent.path for source in stored.values() for extent in source.extents})
    asked = "" if settings is None else "bitsandbytes"
    quantizer = Quantizer(directory, method or asked, files, settings, dtype) if method or asked else None
    building = quantizer.building() if quantizer else nullcontext()
    with _quiet(), _NoLargeWeights(), limited_modules(directory, len(stored)), building:
        try:
            # transformers does the renaming, merging, tying and checking; only the tensors are brim's.
            module, info = kind.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=dtype or "auto",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                quantization_config=settings,
            )
        except BrimError:
            raise
        except Exception as error:
            raise ModelError(
                f"Cannot build {kind.__name__} from {directory}.",
                _short(error),
                "The config and the checkpoint may be of different models, or need a newer transformers.",
            ) from error
    _check_fit(directory, module, info)
    if quantizer is not None:
        quantizer.finish(module)
    module.config.name_or_path = module.name_or_path = str(directory)
    _load_generation_config(module, directory)
    tensors, tied = _move_to_meta(module)
    return BuiltModule(
        module=module,
        tensors=tensors,
        tied=tied,
        dtype=getattr(module.config, "dtype", None) or torch.get_default_dtype(),
        unexpected=tuple(sorted(info["unexpected_keys"])),
        quantization=method,
        quantizer=quantizer,
    )


class _NoLargeWeights(TorchFunctionMode):
    """Keep large missing weights on meta: transformers would allocate and initialize them, tens of gigabytes if the
    config is another model's, before the error."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated_bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty_like and isinstance(args[0], torch.nn.Parameter) and args[0].is_meta:
            self.allocated_bytes += args[0].nbytes
            if self.allocated_bytes > _INITIALIZED_BYTES:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


@contextmanager
def limited_modules(path: Path, tensors: int) -> Iterator[None]:
    """While open, raise ModelError if a model with ``tensors`` tensors in files gets far more modules, which any
    field of its config may cause: an early error, not one after minutes and gigabytes."""
    most, made = _MODULES + _MODULES_EACH * tensors, 0

    def count(module: torch.nn.Module, name: str, part: torch.nn.Module | None) -> None:
        nonlocal made
        made += 1
        if made > most:
            raise ModelError(
                f"Cannot build {path} as its config describes it.",
                f"It would have more than {most:,} parts, and the file holds {tensors:,} tensors.",
                "config.json and weights are of different models: fetch them again.",
            )

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _is_native(raw: dict[str, Any]) -> bool:
    from transformers import CONFIG_MAPPING

    return raw.get("model_type") in CONFIG_MAPPING


def model_class(directory: Path, config: Any, trust_remote_code: bool) -> Any:
    import transformers

    autos = ("AutoModelForCausalLM", "AutoModel")
    cls = class_of(config, config.architectures or (), ())
    if cls is not None:
        return cls
    auto_map = getattr(config, "auto_map", None) or {}
    for auto in autos:
        if trust_remote_code and auto in auto_map:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            return get_class_from_dynamic_module(auto_map[auto], str(directory))
        cls = class_of(config, (), (auto,))
        if cls is not None:
            return cls
    raise UnsupportedError(
        f"{directory} was given as the model.",
        f"transformers {transformers.__version__} has no class {config.architectures or config.model_type}.",
        "Install a newer version of transformers.",
    )


def _check_fit(directory: Path, module: Any, info: dict[str, Any]) -> None:
    for name, stored_shape, model_shape in sorted(info["mismatched_keys"]):
        raise other_shape(directory, name, model_shape, stored_shape)
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ModelError(
            f"Cannot open {directory} as its config describes it.",
            f"The checkpoint lacks {', '.join(missing[:_SHOWN])}{more}.",
            "Fetch the checkpoint again; if it is of another architecture, correct config.json.",
        )
    if left_out := sorted(info["unexpected_keys"]):
        warnings.warn(_left_out_warning(directory, module, left_out), stacklevel=4)


def _left_out_warning(directory: Path, module: Any, names: list[str]) -> str:
    """The warning for tensors of the files that the model has no place for, as transformers warns of them."""
    layers = {found[0] for name in names if (found := re.match(r".*?\.\d+(?=\.)", name))}
    layers -= {name for name, _ in module.named_modules()}
    most = sorted(layers, key=lambda layer: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", layer)])
    shown = (most or names)[:_SHOWN]
    more = f" and {len(most or names) - _SHOWN} more" if len(most or names) > _SHOWN else ""
    problem = f"{len(names)} tensors of its files have no place in the model that its config.json describes"
    todo = " If the config has fewer layers than the files, the results are not those of the trained model."
    return f"{directory}: {problem}, and are left out: {', '.join(shown)}{more}.{todo if layers else ''}"


def _load_generation_config(module: Any, directory: Path) -> None:
    if not module.can_generate():
        return
    from transformers import GenerationConfig

    try:
        if (directory / "generation_config.json").exists():
            module.generation_config = GenerationConfig.from_pretrained(str(directory))
        else:  # older checkpoints keep these settings in config.json
            module.generation_config = GenerationConfig.from_pretrained(
                str(directory), config_file_name="config.json", _from_model_config=True
            )
    except (OSError, ValueError) as error:
        raise ModelError(
            f"Cannot read {directory / 'generation_config.json'}.", _short(error), "Fetch it again."
        ) from error


def _move_to_meta(module: torch.nn.Module) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """Replace each FileTensor by a meta tensor, one for all places that share it."""
    tensors: dict[str, FileTensor] = {}
    tied: dict[str, str] = {}
    names: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, FileTensor):
            canonical = names.setdefault(id(tensor), name)
            if canonical == name:
                tensors[name] = tensor
            else:
                tied[name] = canonical
        elif tensor.is_meta:
            raise UnsupportedError(
                "Cannot open the model.",
                f"{name} is not in the checkpoint, and computing it takes {tensor.nbytes} bytes.",
                "Load this model without brim.",
            )
    twins = {id(tensor): _meta_twin(tensor) for tensor in tensors.values()}
    for child in module.modules():
        for slots in (child._parameters, child._buffers):
            for key, tensor in slots.items():
                if tensor is not None and id(tensor) in twins:
                    slots[key] = twins[id(tensor)]  # type: ignore[assignment]
    return tensors, tied


def _meta_twin(tensor: FileTensor) -> torch.Tensor:
    meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(meta, requires_grad=tensor.requires_grad) if is_parameter else meta


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and loading report; its important parts become errors."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _short(error: Exception) -> str:
    return f"{' '.join(str(error).split()) or type(error).__name__:.400}"
