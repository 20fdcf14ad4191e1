"""Weights of quantized checkpoints, as large as their files have them; for traces only.

The headers of the files say which tensors belong to a weight; without them the settings of the method in the
configuration do. Layers run as transformers 5 runs them, with the kernels of the method's library.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import register_flop_formula

from brim.errors import UnsupportedError, UsageError
from brim.estimation.models import Source, check_not_quantized, quantization_of, quantized_by, stored_tensors
from brim.estimation.quantization import Linear4bit, Linear8bit, become, choice, define, is_linear
from brim.predict.lowering.cuda.kernels import NOT_ASKED
from brim.units import format_bytes

_FLOATS = ("F64", "F32", "F16", "BF16")
_EXPERTS_DIMENSIONS = 3  # of a weight that holds all experts of a layer
_LEAST_FLOAT8 = (8, 9)  # compute capability with float8 products (transformers' FineGrainedFP8HfQuantizer)
Form = Mapping[str, int]  # bytes of each tensor that a quantized weight consists of, by the end of its name
Settings = Mapping[str, Any]
# The settings of the methods that name modules which are not quantized.
_SKIPPED = ("modules_to_not_convert", "llm_int8_skip_modules", "ignore", "ignored_layers", "exclude_modules")
_IN_LAYER = re.compile(r"(.*?\.)?(\d+)\.(.*)")


# -- kernels ---------------------------------------------------------------------------------------------------------


define(
    "packed_mm(Tensor input, Tensor[] packed, int width) -> Tensor",
    lambda input, packed, width: input.new_empty((*input.shape[:-1], width)),
)
for _name in ("unpacked", "read_packed"):
    define(
        f"{_name}(Tensor[] packed, SymInt[] shape, ScalarType dtype) -> Tensor",
        lambda packed, shape, dtype: packed[0].new_empty(shape, dtype=dtype),
    )


@register_flop_formula(torch.ops.brim.packed_mm, get_raw=True)
def _packed_mm_flops(input: torch.Tensor, packed: object, width: int, **_: object) -> int:
    return 2 * input.numel() * width


# A kernel that multiplies packed weights makes no tensor of unpacked ones.
NOT_ASKED[torch.ops.brim.read_packed.default] = lambda kernel: kernel.drop(kernel.outputs[0])


# -- layers ----------------------------------------------------------------------------------------------------------


class PackedLinear(nn.Linear):
    """A linear layer whose kernel multiplies packed weights; only the backward pass unpacks them."""

    def take_over(self, form: Form) -> None:
        """Replace the weight by tensors of these bytes."""
        names = sorted(form, key=lambda name: form[name], reverse=True)
        tensors = [torch.empty(form[name], dtype=torch.uint8) for name in names]
        self.weight = nn.Parameter(tensors[0], requires_grad=False)
        for number, tensor in enumerate(tensors[1:]):
            self.register_parameter(f"packed_{number}", nn.Parameter(tensor, requires_grad=False))

    def packed(self) -> list[torch.Tensor]:
        return [tensor for name, tensor in self._parameters.items() if name != "bias" and tensor is not None]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and input.requires_grad:
            output: torch.Tensor = _PackedProduct.apply(input, self)  # type: ignore[no-untyped-call]
        else:
            output = self.product(input)
        return output if self.bias is None else output.add_(self.bias)

    def product(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.brim.packed_mm(input, self.packed(), self.out_features)
        return output

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        shape = [self.out_features, self.in_features]
        weight: torch.Tensor = torch.ops.brim.unpacked(self.packed(), shape, dtype)
        return weight


class UnpackedLinear(PackedLinear):
    """A linear layer that unpacks its weight at every call."""

    def product(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.unpacked(input.dtype))


class OnceUnpackedLinear(PackedLinear):
    """A linear layer whose weight is unpacked before the model's first pass; the scales stay."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.weight, self.bias)


def _unpack_all(model: nn.Module, *_: Any) -> None:
    for module in model.modules():
        if isinstance(module, OnceUnpackedLinear) and module.weight.dtype is torch.uint8:
            weight = module.unpacked(model.dtype)  # type: ignore[arg-type]
            module.weight = nn.Parameter(weight, requires_grad=False)


class _PackedProduct(torch.autograd.Function):
    """Keeps nothing of the input: weights do not train."""

    @staticmethod
    def forward(ctx: Any, input: Any, layer: PackedLinear) -> torch.Tensor:
        ctx.layer = layer
        return layer.product(input)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return torch.matmul(grad, ctx.layer.unpacked(grad.dtype)), None


def _pack_parameter(owners: Sequence[tuple[nn.Module, str]], form: Form, dtype: torch.dtype) -> None:
    """Replace a parameter by packed tensors; its modules' own code reads it as a weight that takes no memory."""
    tensors = [nn.Parameter(torch.empty(bytes, dtype=torch.uint8), requires_grad=False) for bytes in form.values()]
    for module, name in owners:
        shape = list(module._parameters.pop(name).shape)  # type: ignore[union-attr]
        parts = {f"{name}_packed_{number}": tensor for number, tensor in enumerate(tensors)}
        module._parameters |= parts
        kind, weight = type(module), property(partial(_read, list(parts), shape, dtype))
        module.__class__ = type(kind.__name__, (kind,), {name: weight, "__module__": kind.__module__})


def _read(parts: list[str], shape: list[int], dtype: torch.dtype, module: nn.Module) -> Any:
    return torch.ops.brim.read_packed([module._parameters[part] for part in parts], shape, dtype)


# -- methods ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of quantization: the library that runs its layers and how, and the tensors of a weight.

    ``layer`` replaces linear layers; None: transformers unpacks the weights as it loads them. ``form`` gives the
    bytes of each tensor of an (out, in) weight by the method's settings; None: they are known from headers only.
    """

    by: str
    layer: type[nn.Linear] | None
    form: Callable[[Settings, int, int], Form] | None = None
    has_experts: bool = True  # weights that hold all experts of a layer are quantized too
    experts_only: bool = False


def _groups(settings: Settings, inside: int) -> int:
    size = settings.get("group_size")
    return 1 if size in (None, -1) else ceil(inside / int(size))


def _gptq(settings: Settings, out: int, inside: int) -> Form:
    """``qweight``, ``qzeros``: packed into int32; ``scales``: float16; ``g_idx``: an int32 per input, not in AWQ."""
    bits, groups = int(settings.get("bits", settings.get("w_bit", 4))), _groups(settings, inside)
    form = {
        "qweight": out * inside * bits // 8,
        "qzeros": groups * out * bits // 8,
        "scales": groups * out * 2,
    }
    return form if settings.get("quant_method") == "awq" else form | {"g_idx": inside * 4}


def _compressed_tensors(settings: Settings, out: int, inside: int) -> Form:
    scheme: Settings = next(iter((settings.get("config_groups") or {}).values()), {})
    weights = scheme.get("weights") or {}
    bits, strategy = int(weights.get("num_bits", 8)), weights.get("strategy")
    kind = str(scheme.get("format") or settings.get("format"))
    if strategy in ("group", "tensor_group"):
        scales = out * _groups(weights, inside)
    elif strategy == "block":
        rows, columns = weights["block_structure"]
        scales = ceil(out / rows) * ceil(inside / columns)
    else:
        scales = out if strategy == "channel" else 1
    if "fp4" in kind:
        global_scales = {"weight_global_scale": 4, "input_global_scale": 4} if "nvfp4" in kind else {}
        return {"weight_packed": out * inside // 2, "weight_scale": scales} | global_scales
    if kind == "pack-quantized":
        form = {"weight_packed": out * ceil(inside * bits / 32) * 4, "weight_scale": scales * 2, "weight_shape": 16}
        return form if weights.get("symmetric", True) else form | {"weight_zero_point": ceil(scales * bits / 32) * 4}
    return {"weight": out * inside, "weight_scale": scales * 2}


def _float8_blocks(settings: Settings, out: int, inside: int) -> Form:
    rows, columns = settings.get("weight_block_size") or (out, inside)
    return {"weight": out * inside, "weight_scale_inv": ceil(out / rows) * ceil(inside / columns) * 4}


def _mxfp4(settings: Settings, out: int, inside: int) -> Form:
    return {"blocks": out * inside // 2, "scales": out * inside // 32}


def _modelopt(settings: Settings, out: int, inside: int) -> Form:
    if "NVFP4" not in str(settings.get("quant_algo")):
        return {"weight": out * inside, "weight_scale": 4, "input_scale": 4}
    return {"weight": out * inside // 2, "weight_scale": out * inside // 16, "weight_scale_2": 4, "input_scale": 4}


def _mlx(settings: Settings, out: int, inside: int) -> Form:
    scales = out * _groups(settings, inside) * 2
    return {"weight": out * inside * int(settings.get("bits", 4)) // 8, "scales": scales, "biases": scales}


_GPTQMODEL = "gptqmodel, whose kernels multiply packed weights"
METHODS = {
    "bitsandbytes_4bit": Method(by="bitsandbytes", layer=Linear4bit, form=lambda *_: {}, has_experts=False),
    "bitsandbytes_8bit": Method(by="bitsandbytes", layer=Linear8bit, form=lambda *_: {}, has_experts=False),
    **dict.fromkeys(("gptq", "awq", "auto-round"), Method(by=_GPTQMODEL, layer=PackedLinear, form=_gptq)),
    "compressed-tensors": Method(
        by="compressed-tensors, which unpacks each weight to 16 bits in the first pass and keeps it so; engines with "
        "kernels for it, as vLLM, keep it packed", layer=OnceUnpackedLinear, form=_compressed_tensors,
    ),
    "fp8": Method(by="transformers' float8 kernels", layer=PackedLinear, form=_float8_blocks),
    "fbgemm_fp8": Method(
        by="fbgemm's float8 kernels", layer=PackedLinear,
        form=lambda _, out, inside: {"weight": out * inside, "weight_scale": out * 4},
    ),
    "mxfp4": Method(
        by="the MXFP4 kernels of the package kernels; without it transformers unpacks the weights to 16 bits",
        layer=PackedLinear, form=_mxfp4, experts_only=True,
    ),
    "modelopt": Method(
        by="engines with kernels for it, as vLLM and TensorRT-LLM: transformers does not load it", layer=PackedLinear,
        form=_modelopt,
    ),
    "mlx": Method(
        by="MLX, on Apple's machines: transformers does not load it for a GPU", layer=PackedLinear, form=_mlx
    ),
    "torchao": Method(by="torchao", layer=PackedLinear),
}  # fmt: skip
_OTHER = Method(by="its library, assumed to unpack each weight at every call", layer=UnpackedLinear)


def method_of(source: Source) -> tuple[str, Settings, Method]:
    """Return the name, the settings and the method by which a source's weights are quantized."""
    name, settings = quantization_of(source.config)
    if name == "bitsandbytes":
        name += "_8bit" if settings.get("load_in_8bit") else "_4bit"
    if name == "unknown" and "bits" in settings:
        name = "mlx"
    return name or quantized_by(source), settings, METHODS.get(name, _OTHER)


def has_equal_layers(source: Source, numbers: range) -> bool:
    """Return whether the layers of these numbers are quantized alike, by headers or settings."""
    if not quantized_by(source):
        return True
    settings = quantization_of(source.config)[1]
    skipped = [(str(name), "") for key in _SKIPPED for name in settings.get(key) or ()]
    tensors = [(name, f"{tensor.dtype} {tensor.shape}") for name, tensor in stored_tensors(source).items()]
    layers: dict[str, dict[int, set[str]]] = {}
    for name, kind in tensors or skipped:
        if (found := _IN_LAYER.match(name)) and int(found[2]) in numbers:
            layers.setdefault(found[1], {}).setdefault(int(found[2]), set()).add(f"{found[3]} {kind}")
    return all(len({frozenset(parts) for parts in alike.values()}) == 1 for alike in layers.values())


def as_stored(
    model: nn.Module, source: Source, capability: tuple[int, int], *, by_brim: bool = False
) -> dict[str, str]:
    """Replace the weights that the checkpoint has quantized by tensors as large as its files have them.

    ``capability``: the compute capability of the GPU. ``by_brim``: brim runs the model, which unpacks at every call
    the weights that others unpack once, and those of gptqmodel.

    Returns notes by subject. Raises UnsupportedError where the files' headers are unknown and the method's settings
    do not tell the sizes.
    """
    if not quantized_by(source):
        raise UsageError(f"--precision stored was given for {source.name}.", "Its weights are not quantized.")
    if source.library != "transformers":
        check_not_quantized(source)
    name, settings, method = method_of(source)
    unpacks = by_brim and (method.layer is OnceUnpackedLinear or method.by is _GPTQMODEL)
    layer = UnpackedLinear if unpacks else method.layer
    if name in ("fp8", "fbgemm_fp8") and capability < _LEAST_FLOAT8:
        return {name: "transformers unpacks the weights to 16 bits: this GPU has no float8 products"}
    stored = stored_tensors(source)
    forms = _by_headers(model, stored) if stored else _by_settings(model, source, name, settings, method)
    owners: dict[Any, list[tuple[nn.Module, str]]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, key = path.rpartition(".")
        owners.setdefault(parameter, []).append((model.get_submodule(owner), key))
    modules, places = set(), [owners[model.get_parameter(path)] for path in forms]
    for ((module, key), *tied), form in zip(places, forms.values(), strict=True):
        modules.add(module)
        if tied or key != "weight" or not is_linear(module) or layer is None:
            _pack_parameter([(module, key), *tied], form, model.dtype)  # type: ignore[arg-type]
        elif issubclass(layer, PackedLinear):
            become(module, layer, form)
        elif layer is Linear4bit:
            become(module, layer, bool(settings.get("bnb_4bit_use_double_quant")))
        else:
            become(module, layer)
    bytes = sum(t.nbytes for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False)))
    if layer is OnceUnpackedLinear:
        model.register_forward_pre_hook(_unpack_all)
    return {name: f"{len(forms):,} weights of {format_bytes(bytes)} as stored; run by {method.by}"}


def _by_headers(model: Any, stored: Mapping[str, Any]) -> dict[str, Form]:
    """Return the forms of the quantized weights by the names of their parameters."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    transforms: list[Any] = get_model_conversion_mapping(model)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renamings = [transform for transform in transforms if not isinstance(transform, WeightConverter)]
    state, parameters = model.state_dict(), dict(model.named_parameters())
    forms: dict[str, Counter[str]] = defaultdict(Counter)
    packed = set()
    for name, tensor in stored.items():
        for candidate in _weights_of(name):
            target = rename_source_key(candidate, renamings, converters, model.base_model_prefix, state)[0]
            if target in state:
                if target in parameters and ".quant_state." not in name:  # settings as text, which stay on the host
                    forms[target][name.rpartition(".")[2]] += tensor.bytes
                    if tensor.dtype not in _FLOATS:
                        packed.add(target)
                break
    return {target: form for target, form in forms.items() if target in packed}


def _weights_of(name: str) -> Iterator[str]:
    """Yield the names of the weights that a tensor of a file may be a part of, likely ones first."""
    name = name.replace(".switch_mlp.", ".experts.0.")  # MLX joins the experts of a layer
    module, _, part = name.rpartition(".")
    yield name
    yield f"{module}.weight"
    yield f"{name.partition('.weight.')[0]}.weight"  # bitsandbytes' x.weight.absmax
    yield f"{module}.{part.rpartition('_')[0]}"  # MXFP4's x.experts.down_proj_blocks
    if name.startswith("language_model."):  # MLX's order of both
        ours = name.removeprefix("language_model.")
        yield from _weights_of(ours.replace("model.", "model.language_model.", 1))


def _by_settings(model: nn.Module, source: Source, name: str, settings: Settings, method: Method) -> dict[str, Form]:
    from transformers.quantizers.base import get_keys_to_not_convert

    if method.form is None:
        raise UnsupportedError(
            f"{source.name} was given as the model.",
            f"Its weights are quantized ({name}), and their sizes are known from the headers of its files alone.",
            "Give the folder of its safetensors files or its name on the hub, or --precision bf16.",
        )
    skipped = [str(name).removeprefix("re:") for key in _SKIPPED for name in settings.get(key) or ()]
    if method.by is _GPTQMODEL:
        skipped += get_keys_to_not_convert(model)
    chosen = choice(model, skipped if skipped or name == "mlx" else None)
    forms: dict[str, Form] = {}
    for key, parameter in model.named_parameters():
        path = key.rpartition(".")[0]
        module = model.get_submodule(path)
        experts = parameter.dim() == _EXPERTS_DIMENSIONS and method.has_experts and "experts" in path
        table = is_linear(module) or (name == "mlx" and isinstance(module, nn.Embedding))
        if ((table and key.endswith(".weight") and not method.experts_only) or experts) and chosen(path):
            *counts, out, inside = parameter.shape
            form = method.form(settings, out, inside)
            forms[key] = {part: bytes * (counts[0] if counts else 1) for part, bytes in form.items()}
    return forms
