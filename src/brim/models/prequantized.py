"""Checkpoints whose weights are quantized: transformers' quantizers build the model, and brim moves its tensors.

The same quantizers also quantize the weights of other checkpoints, one at a time.

Where a method's layers have plain tensors as parameters, these are placed and streamed as they are stored. Where a
method joins several tensors into one object (bitsandbytes' weight with its statistics, torchao's subclasses), the
layer gets the tensors of the file as its parameters instead, and joins views of them for each call. So do layers of
gptqmodel, whose tensors are buffers. So placing, streaming, tracing and verifying know nothing of these objects.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial, partialmethod
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from brim.errors import ModelError, UnsupportedError
from brim.estimation.models import other_shape, short
from brim.models.file_tensor import FileTensor

METHODS = {  # compared with transformers, bit for bit: the packages of each
    "bitsandbytes": "bitsandbytes", "compressed-tensors": "compressed-tensors", "torchao": "torchao",
    "gptq": "gptqmodel optimum", "awq": "gptqmodel",
}  # fmt: skip
_OTHER = "Give a checkpoint in float32, bfloat16 or float16, or a .gguf file."
_EVERY_CALL = "bitsandbytes.autograd._functions"  # its logger says at every call that inputs become float16
_PIECE_VALUES = 1 << 20  # of a weight that are quantized at once: kernels of CPUs take several float32 copies
_FORMATS = ("gptq", "gptq_v2", "gemm")  # of gptqmodel's torch kernels
_STORED = "stored_"  # begins the names of parameters with tensors of the file that a layer gets for calls
_BLOCK_ROWS = 64  # with so many rows a piece has full blocks of values that share a scale, whatever the row's length

Parts = dict[str, Any]  # the tensors of a joined weight, by the end of their names in the file
Tensors = Mapping[str, torch.Tensor]
Join = Callable[[nn.Module, Tensors], Mapping[str, Any]]  # a layer and its tensors -> its attributes during a call


class Quantizer:
    """transformers' quantizer of a checkpoint, while its model is built. Raises UnsupportedError for a method that
    brim does not run.

    ``settings``: the configuration by which weights that are not quantized yet will be; ``wide`` names them. Weights
    that are not quantized are in ``dtype``, or as they are stored.
    """

    def __init__(
        self,
        directory: Path,
        method: str,
        files: Sequence[str],
        settings: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._directory, self._method, self._files, self._dtype = directory, method, files, dtype
        self.settings = settings
        self._quantizer: Any = None
        self._taken: dict[str, Parts] = {}
        self._blank: dict[str, Any] = {}  # weights as the library wants them, without values
        if method not in METHODS:
            raise self._unsupported(f"brim runs those of {', '.join(METHODS)}.")

    @property
    def wide(self) -> Collection[str]:
        return self._blank.keys()

    @contextmanager
    def building(self) -> Iterator[None]:
        """While open, ``from_pretrained`` leaves the tensors of joined weights apart, and moves nothing to a GPU.

        Raises UnsupportedError where a package or the method's kernels are missing.
        """
        import transformers.modeling_utils

        modeling_utils: Any = transformers.modeling_utils
        get_quantizer = modeling_utils.get_hf_quantizer

        def get(*args: Any, **kwargs: Any) -> Any:
            try:
                self._quantizer, config, _ = get_quantizer(*args, **kwargs)
            except Exception as error:  # packages raise any exception for what they miss
                raise self._not_here(error) from error
            if getattr(self._quantizer.quantization_config, "dequantize", False):
                raise self._unsupported("transformers has no kernels for it on this device, and would widen it.")
            if "gptqmodel" in METHODS[self._method]:
                self._unpack_by_torch()
            self._leave_apart()
            return self._quantizer, config, None

        without_bars = partialmethod(tqdm.__init__, disable=True)  # compressed-tensors shows one for each step
        with (
            mock.patch.object(modeling_utils, "get_hf_quantizer", get),
            mock.patch.object(tqdm, "__init__", without_bars),
            mock.patch.dict(os.environ),  # gptqmodel sets PyTorch's allocator by them
            redirect_stdout(io.StringIO()),  # and prints what it does
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", FutureWarning)  # optimum reads every attribute of the model
            yield

    def _unpack_by_torch(self) -> None:
        """Choose gptqmodel's kernels that read tensors as they are stored: others pack them anew."""
        self._quantizer._process_model_after_weight_loading = lambda model, **_: model
        chosen = getattr(self._quantizer, "optimum_quantizer", self._quantizer.quantization_config)
        chosen.backend = "torch"
        if chosen.format not in _FORMATS or (self._method == "awq" and chosen.bits != 4):
            problem = f"Its format is {chosen.format} of {chosen.bits} bits: brim runs"
            raise self._unsupported(f"{problem} {', '.join(_FORMATS)}, the last of 4 bits.")

    def _leave_apart(self) -> None:
        if hasattr(self._quantizer, "set_metadata"):  # torchao describes its weights in the files' headers
            self._quantizer.set_metadata(self._files)
        operation = _left_apart(self._quantizer, self._taken, self._dtype)
        if not self._quantizer.pre_quantized:
            self._quantizer.get_quantize_ops = lambda: operation
        elif "deserialize" in self._quantizer.get_load_operations():
            self._quantizer.get_load_operations = lambda: {"deserialize": lambda quantizer: operation}

    def finish(self, model: nn.Module) -> None:
        """Give layers the tensors of joined weights as parameters, or those that will be quantized. Raises ModelError
        where these do not fit."""
        vars(self._quantizer).pop("get_load_operations", None)
        if vars(self._quantizer).pop("get_quantize_ops", None) is not None:
            self._take_wide(model)
            return
        if self._method == "compressed-tensors":
            _decompress_during_calls(model, self._quantizer.compressor)
        if "gptqmodel" in METHODS[self._method]:
            of_gptq = getattr(self._quantizer, "optimum_quantizer", None)
            _give_parameters(model, is_shifted=of_gptq is not None and of_gptq.format == "gptq")
        for name, parts in self._quantized(model).items():
            self._replace(model, name, parts)

    def _replace(self, model: nn.Module, name: str, parts: Parts) -> None:
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        try:
            join = (self._torchao if self._method == "torchao" else _bitsandbytes)(module, name, parts)
        except Exception as error:  # the package's own readers raise any
            raise ModelError(
                f"Cannot read {name} of {self._directory}, which is quantized ({self._method}).",
                f"Its tensors do not fit together: {short(error)}",
                "Fetch the checkpoint again.",
            ) from error
        _take_apart(module, own, {part.replace(".", "_"): tensor for part, tensor in parts.items()})
        _join_during_calls(module, join)

    def give_layers(self, model: Any) -> None:
        """Give a model without values the layers and parameters of one that is quantized by the settings.

        Raises UnsupportedError where the package is missing.
        """
        from transformers.modeling_utils import local_torch_dtype
        from transformers.quantizers.auto import AutoHfQuantizer

        dtype = model.dtype
        try:
            self._quantizer = AutoHfQuantizer.from_config(self.settings, pre_quantized=False)
            self._quantizer.validate_environment()
        except Exception as error:
            raise self._not_here(error) from error
        with local_torch_dtype(dtype, type(model).__name__):
            self._quantizer.preprocess_model(model, device_map=None)
        for name, weight in model.named_parameters():
            if self._quantizer.param_needs_quantization(model, name):
                self._blank[name] = weight
        model.eval()  # as the replaced layers were
        for name in self._blank:
            shape = self._wide_shape(model, name)
            parts = self.quantized(model, name, torch.empty(shape, dtype=dtype, device="meta"))
            path = name.removesuffix("weight")
            self._replace(model, name, {part.removeprefix(path): FileTensor.of(t) for part, t in parts.items()})

    def _wide_shape(self, model: nn.Module, name: str) -> tuple[int, int]:
        """The shape of a weight before it is quantized: transformers' Conv1D has inputs first."""
        layer: Any = model.get_submodule(name.rpartition(".")[0])
        shape = (layer.out_features, layer.in_features)
        return shape if issubclass(layer.source_cls, nn.Linear) else shape[::-1]

    def _take_wide(self, model: nn.Module) -> None:
        for name, parts in self._taken.items():
            path, _, own = name.rpartition(".")
            module = model.get_submodule(path)
            (tensor,) = parts.values()
            shape = self._wide_shape(model, name)
            if tensor.shape != shape:
                raise other_shape(self._directory, name, shape, tensor.shape)
            self._blank[name] = module._parameters[own]
            module._parameters[own] = nn.Parameter(tensor, requires_grad=False)

    def quantized(self, model: nn.Module, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of the weight ``name`` of ``value``, by their names in a file; of a ``value`` without data
        (meta), tensors of the same shapes.

        Raises ModelError where scales are not finite.
        """
        path, _, own = name.rpartition(".")
        module: Any = model.get_submodule(path)
        before, module._parameters[own] = module._parameters[own], self._blank[name]
        with _InPieces(has_values=not value.is_meta):
            value = torch.empty_like(value, device="cpu") if value.is_meta else value
            operation = self._quantizer.get_quantize_ops()
            module._parameters[own] = operation.convert({name: value}, model=model, full_layer_name=name)[name]
        saved = module.state_dict(prefix=f"{path}.").items()
        module._parameters[own] = before
        module.quant_state = None
        parts = {part: tensor for part, tensor in saved if not tensor.is_meta}
        if not all(bool(tensor.isfinite().all()) for tensor in parts.values() if tensor.is_floating_point()):
            raise ModelError(
                f"Cannot quantize {name}.",
                "It has values that are not finite, or too large for float16.",
                "Fetch the checkpoint again, or leave out the precision.",
            )
        return parts

    def _quantized(self, model: nn.Module) -> dict[str, Parts]:
        """The tensors of each joined weight; of bitsandbytes also weights without any statistics beside them."""
        if self._method != "bitsandbytes":
            return self._taken
        names = [name for name, _ in model.named_parameters() if name not in self._taken]
        bare = [name for name in names if self._quantizer.param_needs_quantization(model, name)]
        return self._taken | {name: {} for name in bare}

    def _not_here(self, error: Exception) -> UnsupportedError:
        # Without gptqmodel transformers asks for a GPU.
        is_missing = isinstance(error, (ImportError, RuntimeError))
        todo = f"Run pip install {METHODS[self._method]}, or g{_OTHER[1:]}" if is_missing else _OTHER
        return self._unsupported(f"transformers cannot run it here: {short(error)}", todo)

    def _unsupported(self, problem: str, todo: str = _OTHER) -> UnsupportedError:
        state = "are quantized" if self.settings is None else "are to be quantized"
        return UnsupportedError(
            f"{self._directory} was given as the model.", f"Its weights {state} ({self._method}). {problem}", todo
        )

    def _torchao(self, module: nn.Module, name: str, parts: Parts) -> Join:
        from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

        path, _, own = name.rpartition(".")
        shapes = {f"{path}.{part}": torch.empty_like(tensor, device="meta") for part, tensor in parts.items()}
        described = {name: self._quantizer.metadata[name], "tensor_names": json.dumps([name])}
        weight = unflatten_tensor_state_dict(shapes, described)[0][name]
        inner, context = weight.__tensor_flatten__()
        _require(weight.shape == getattr(module, own).shape, f"its shape is {list(weight.shape)}")

        def join(module: nn.Module, tensors: Tensors) -> Mapping[str, Any]:
            values = {part: tensors[f"_{own}_{part}"] for part in inner}
            return {own: type(weight).__tensor_unflatten__(values, context, weight.shape, weight.stride())}

        return join


def _left_apart(quantizer: Any, taken: dict[str, Parts], dtype: torch.dtype | None) -> Any:
    """An operation for the loading code of transformers that adds a weight's tensors to ``taken``, and joins none."""
    from transformers.core_model_loading import ConversionOps

    class LeftApart(ConversionOps):
        hf_quantizer = quantizer  # so the loading code casts none of the tensors

        def __deepcopy__(self, memo: object) -> Any:
            return self

        def convert(self, input_dict: Any, *patterns: Any, **options: Any) -> Any:
            weights = {options["full_layer_name"]: input_dict}
            if not quantizer.pre_quantized:
                weights = {name: {"weight": tensors} for name, tensors in input_dict.items()}
            elif len(input_dict) == 1:  # a weight that is not quantized
                return {key: [tensor.to(dtype) for tensor in tensors] for key, tensors in input_dict.items()}
            for name, parts in weights.items():
                taken[name] = {
                    p: tensors[0] if isinstance(tensors, list) else tensors for p, tensors in parts.items()
                }
                module = options["model"].get_submodule(name.rpartition(".")[0])
                for owner in (module, *module.parameters(recurse=False)):
                    owner._is_hf_initialized = True
                options["missing_keys"].discard(name)
            return {}

    return LeftApart()


class _InPieces(TorchDispatchMode):
    """Quantizes some rows of a weight at a time, as whole ones take several float32 copies; without ``has_values``
    only the shapes of the results are right."""

    def __init__(self, *, has_values: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._has_values = has_values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() not in ("bitsandbytes::quantize_4bit", "bitsandbytes::int8_vectorwise_quant"):
            return func(*args, **(kwargs or {}))
        weight, *rest = args
        if not self._has_values:
            shapes = func(weight.to("meta"), *rest, **(kwargs or {}))
            return tuple(None if t is None else torch.zeros_like(t, device="cpu") for t in shapes)
        rows = max(_PIECE_VALUES // weight.shape[1] // _BLOCK_ROWS, 1) * _BLOCK_ROWS
        pieces = [func(piece, *rest, **(kwargs or {})) for piece in weight.split(rows)]
        return tuple(None if parts[0] is None else torch.cat(parts) for parts in zip(*pieces, strict=True))


def _take_apart(module: nn.Module, own: str, parts: Mapping[str, torch.Tensor]) -> None:
    """Replace the parameter ``own`` by ``parts``, in its place."""
    others = dict(module._parameters)
    module._parameters.clear()
    for name, parameter in others.items():
        inserted = {part: nn.Parameter(tensor, requires_grad=False) for part, tensor in parts.items()}
        module._parameters.update(inserted if name == own else {name: parameter})
    # They are parameters: the layer's own code would look for them in its weight.
    module._save_to_state_dict = MethodType(nn.Module._save_to_state_dict, module)  # type: ignore[method-assign]
    module._load_from_state_dict = MethodType(nn.Module._load_from_state_dict, module)  # type: ignore[method-assign]


def _join_during_calls(module: nn.Module, join: Join) -> None:
    """Let the layer have the attributes of ``join`` during its calls."""
    vars(module)["_brim_joined"] = join, module.forward
    vars(module)["forward"] = MethodType(_joined_forward, module)  # a method, so that it survives copies


def _joined_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with _joined(self):
        output = vars(self)["_brim_joined"][1](*args, **kwargs)
    if not _is_of_bitsandbytes(self) or not output.requires_grad or not output.numel():
        return output
    tensors = _tensors(self)
    node = _node_of(output)
    return _Rejoined.apply(output, node, self, [*tensors], *tensors.values())  # type: ignore[no-untyped-call]


@contextmanager
def _joined(module: nn.Module) -> Iterator[None]:
    own = vars(module)
    during = own["_brim_joined"][0](module, _tensors(module))
    before = {name: own[name] for name in during if name in own}
    own.update(during)  # before the parameters of that name
    try:
        yield
    finally:
        for name in during:
            del own[name]
        own.update(before)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


class TakenApart:
    """The layers of bitsandbytes in a model that transformers loaded, with plain tensors as parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._layers: list[tuple[Any, Any, dict[str, Any]]] = []
        try:
            for name, module in model.named_modules():
                if isinstance(module, nn.Linear) and _is_of_bitsandbytes(module):
                    self._take_apart(name, module)
        except BaseException:
            self.remove()
            raise

    def _take_apart(self, name: str, module: nn.Module) -> None:
        parts: Parts = {part: tensor for part, tensor in module.state_dict().items() if part != "bias"}
        if len(parts) == 1:  # not quantized yet
            return
        weight: Any = module.weight
        join = _bitsandbytes(module, name, parts)
        self._layers.append((module, weight, dict(vars(module))))
        _take_apart(module, "weight", {part.replace(".", "_"): tensor for part, tensor in parts.items()})
        _join_during_calls(module, join)
        _hold(module, weight, torch.empty(0, dtype=weight.dtype))

    def remove(self) -> None:
        """Join the weights again, in the objects that the layers had. A second call does nothing."""
        while self._layers:
            module, weight, before = self._layers.pop()
            with _joined(module):
                joined = vars(module)["weight"]
            for name in ("forward", "_brim_joined", "_save_to_state_dict", "_load_from_state_dict"):
                del vars(module)[name]
                vars(module).update({name: before[name]} if name in before else {})
            module._buffers.pop("weight_offset", None)
            bias = module._parameters["bias"]
            module._parameters.clear()
            module._parameters.update(weight=weight, bias=bias)
            _hold(module, weight, joined)


def _hold(module: Any, weight: Any, joined: Any) -> None:
    """Give the weight of a layer of bitsandbytes the tensors of ``joined``."""
    weight.data = joined.data
    if hasattr(module, "quant_state"):
        module.quant_state = weight.quant_state = getattr(joined, "quant_state", None)
    else:
        module.state.CB = module.state.SCB = module.state.idx = None
        weight.CB, weight.SCB = getattr(joined, "CB", None), getattr(joined, "SCB", None)


@contextmanager
def joined(model: nn.Module) -> Iterator[None]:
    """While open, let the layers have their joined weights, for code that looks at these."""
    with ExitStack() as stack:
        for module in model.modules():
            if "_brim_joined" in vars(module):
                stack.enter_context(_joined(module))
        yield


def _is_of_bitsandbytes(module: nn.Module) -> bool:
    return type(module).__module__.startswith("bitsandbytes.")


def _node_of(output: torch.Tensor) -> Any:
    """The node of bitsandbytes' product that gave ``output``; a cast may have followed."""
    last: Any = output.grad_fn
    nodes = [node for node in (last, last.next_functions[0][0]) if hasattr(node, "state")]
    assert nodes, f"bitsandbytes has no known product before {last}"
    return nodes[0]


class _Rejoined(torch.autograd.Function):
    """Changes nothing; in backward gives the product before it the layer's tensors as they are then.

    bitsandbytes keeps its weight as attributes of the node, not as saved tensors, which are brought back: by the time
    of backward a streamed weight's memory has the values of another.
    """

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, node: Any, module: nn.Module, names: list[str], *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.node, ctx.module, ctx.names = node, module, names
        ctx.save_for_backward(*tensors)
        ctx.mark_dirty(output)  # not a view, which could not be changed in place
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        during = vars(ctx.module)["_brim_joined"][0](ctx.module, tensors)
        if "state" in during:
            ctx.node.state.CB, ctx.node.state.SCB = during["weight"].CB, during["weight"].SCB
        else:
            ctx.node.tensors, ctx.node.state = (None, during["weight"].view(-1, 1)), during["weight"].quant_state
        return gradient, *(None for _ in range(3 + len(tensors)))


def _decompress_during_calls(model: nn.Module, compressor: Any) -> None:
    """Let layers of compressed-tensors widen their weights for each call; its own hook would widen all of the model
    at the first one, to stay."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationStatus

    compressor.remove_decompression_hook(model)
    for module in model.modules():
        if getattr(module, "quantization_status", None) == QuantizationStatus.COMPRESSED:
            scheme: Any = module.quantization_scheme
            kind = BaseCompressor.get_value_from_registry(scheme.format.value)
            shape: Any = module._parameters.get("weight_shape")
            known = {} if shape is None else {"weight_shape": torch.Size(shape.materialize().tolist())}
            during = {"quantization_status": QuantizationStatus.DECOMPRESSED}
            _join_during_calls(module, partial(_decompressed, kind=kind, scheme=scheme, known=known, during=during))


def _decompressed(
    module: nn.Module, tensors: Tensors, *, kind: Any, scheme: Any, known: Any, during: Any
) -> Mapping[str, Any]:
    stored = {name: tensor.detach() for name, tensor in tensors.items()} | known
    changed = {n: value for n, value in kind.decompress(stored, scheme).items() if value is not stored.get(n)}
    return {**changed, **during}


def _give_parameters(model: nn.Module, *, is_shifted: bool) -> None:
    """Give layers of gptqmodel the tensors of the file as parameters, under names to which its code assigns nothing.

    ``is_shifted``: zero points are stored minus one.
    """
    from gptqmodel.nn_modules.qlinear import AWQuantLinear, BaseQuantLinear

    for module in model.modules():
        if isinstance(module, BaseQuantLinear):
            is_awq = isinstance(module, AWQuantLinear)
            if not is_awq:
                module._init_wf_unsqueeze_buffers()  # or the first trace would, with tensors without values
            for name in [name for name in module._buffers if name not in module._non_persistent_buffers_set]:
                tensor = module._buffers.pop(name)
                module.register_parameter(_STORED + name, nn.Parameter(tensor, requires_grad=False))
            _join_during_calls(module, _of_awq if is_awq else partial(_of_gptq, is_shifted=is_shifted))


def _buffers(tensors: Tensors) -> dict[str, Any]:
    return {name.removeprefix(_STORED): t.detach() for name, t in tensors.items() if name.startswith(_STORED)}


def _of_gptq(module: Any, tensors: Tensors, *, is_shifted: bool) -> Mapping[str, Any]:
    from gptqmodel.nn_modules.qlinear import PackableQuantLinear

    during, bits = _buffers(tensors), module.bits
    if is_shifted and bits != 3:  # with the carries of gptqmodel's addition
        during["qzeros"] = during["qzeros"] + sum(1 << shift for shift in range(0, 32, bits))
    # The kernel's own method keeps unpacked zero points.
    during["dequantize_weight"] = partial(PackableQuantLinear.dequantize_weight, module)
    during["_dequantize_from_codes"] = partial(_gptq_weight, module, shift=is_shifted and bits == 3)
    return during


def _gptq_weight(module: Any, codes: torch.Tensor, zeros: torch.Tensor, *, num_itr: int, shift: bool) -> torch.Tensor:
    """The weight of a layer, by an explicit cast: a trace does not see the copy by which a CPU casts otherwise."""
    groups, zeros = module.g_idx.long(), (zeros + 1) & 7 if shift else zeros
    weight: torch.Tensor = module.scales[groups] * (codes[: len(groups)] - zeros[groups]).to(module.scales.dtype)
    return weight


def _of_awq(module: Any, tensors: Tensors) -> Mapping[str, Any]:
    return {**_buffers(tensors), "_dequantize_weight_for_inference": partial(_awq_weight, module)}


def _awq_weight(module: Any, _: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """The weight of a layer, in a fourth of the memory: gptqmodel unpacks into 64 bits."""
    order = torch.arange(8, dtype=torch.int32, device=module.qweight.device).view(2, 4).t().flatten()
    codes, zeros = (
        (q[:, :, None] >> 4 * order).to(torch.int8).flatten(1) & 15 for q in (module.qweight, module.qzeros)
    )
    codes = codes - zeros.repeat_interleave(module.group_size, dim=0)
    weight: torch.Tensor = codes.to(dtype) * module.scales.repeat_interleave(module.group_size, dim=0)
    return weight


def _bitsandbytes(module: Any, name: str, parts: Parts) -> Join:
    """Raises any exception where the tensors do not fit together."""
    return (_of_8_bits if "SCB" in parts else _of_4_bits)(module, parts)


def _of_8_bits(module: Any, parts: Parts) -> Join:
    logging.getLogger(_EVERY_CALL).setLevel(logging.ERROR)
    parts.pop("weight_format", None)
    shape = (module.out_features, module.in_features)
    _require(parts["weight"].dtype == torch.int8 and parts["weight"].shape == shape, f"its shape is not {shape}")
    _require(parts["SCB"].shape == shape[:1], "it has a wrong number of scales")

    def join(module: Any, tensors: Tensors) -> Mapping[str, Any]:
        codes, scales = tensors["weight"], tensors["SCB"]
        weight: Any = codes.detach()
        weight.CB, weight.SCB, weight.has_fp16_weights = codes.detach(), scales.detach(), False
        return {"weight": weight, "state": copy.copy(module.state)}

    return join


def _of_4_bits(module: Any, parts: Parts) -> Join:
    from bitsandbytes.functional import QuantState

    described = next((part for part in parts if part.startswith("weight.quant_state.")), "")
    _require(bool(described), "the description of its quantization is missing")
    description = parts.pop(described)
    described_by = {described: description.materialize() if isinstance(description, FileTensor) else description}
    statistics = {name: tensor for name, tensor in parts.items() if name != "weight"} | described_by
    state = QuantState.from_dict(statistics, device=parts["weight"].device)
    _check_4_bits(module, parts, state)
    if state.nested:
        module.register_buffer("weight_offset", state.offset, persistent=False)
    state.absmax = state.code = state.offset = None
    if state.nested:
        state.state2.absmax = state.state2.code = None

    def join(module: Any, tensors: Tensors) -> Mapping[str, Any]:
        weight: Any = tensors["weight"].detach()
        weight.quant_state = joined = copy.copy(state)
        weight.quant_type, weight.compress_statistics = state.quant_type, state.nested  # PEFT asks for them
        joined.absmax, joined.code = tensors["weight_absmax"].detach(), tensors["weight_quant_map"].detach()
        if state.nested:
            joined.offset, joined.state2 = tensors["weight_offset"], copy.copy(state.state2)
            joined.state2.absmax = tensors["weight_nested_absmax"].detach()
            joined.state2.code = tensors["weight_nested_quant_map"].detach()
        return {"weight": weight}

    return join


def _check_4_bits(module: Any, parts: Parts, state: Any) -> None:
    """Raise ValueError unless the sizes fit: kernels read as many values as the description says."""
    shape = (module.out_features, module.in_features)
    count = math.prod(shape)
    blocks = -(-count // state.blocksize)
    packed_bytes = parts["weight"].numel() * parts["weight"].element_size()
    _require(tuple(state.shape) == shape, f"it describes {list(state.shape)}, and the layer has {list(shape)}")
    _require(packed_bytes == -(-count // 2), f"it has {packed_bytes} bytes for {count} values")
    _require(parts["weight.absmax"].numel() == blocks, f"it has not {blocks} scales")
    _require(parts["weight.quant_map"].numel() == 16, "its code has not 16 values")
    if state.nested:
        nested = -(-blocks // state.state2.blocksize)
        _require(parts["weight.nested_absmax"].numel() == nested, f"it has not {nested} scales of scales")
        _require(parts["weight.nested_quant_map"].numel() == 256, "the code of its scales has not 256 values")


def _require(fits: bool, problem: str) -> None:
    if not fits:
        raise ValueError(problem)
