"""Changes to a rehearsed program that show whether it would fit with them. Each is an advice of
``brim.report.phase``, applied to calls of PyTorch and transformers, without editing the program.
"""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from brim.catalog import presets
from brim.errors import UsageError
from brim.run.script.import_hook import when_imported

ALLOCATOR = "allocator:"  # followed by settings: "allocator:expandable_segments:True"
HALF_BATCH, HALF_SEQUENCE = "half the batch", "half the sequence"
_BATCH = re.compile(r"(?:[\w-]*batch[_-]?size|batch|bs|[\w-]*_train_batch_size)$")
_SEQUENCE = re.compile(r"(?:seq|seq[_-]?len(?:gth)?|max[_-](?:seq[_-])?len(?:gth)?|block[_-]size|context[_-]len\w*)$")
_CHUNK_TOKENS = 256
_VOCABULARY = 8192  # a tensor whose last dimension is at least this is assumed to hold logits
applied: set[str] = set()  # changes that had an effect in this process


def changed_arguments(change: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """A program's arguments with the batch, or the sequence, halved if an argument names it; else unchanged.

    If the batch is a single sequence, the sequence is halved instead.
    """
    pattern = {HALF_BATCH: _BATCH, HALF_SEQUENCE: _SEQUENCE}.get(change)
    words = list(arguments)
    if pattern is None:
        return tuple(words)
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not pattern.match(name.lstrip("-").rpartition(".")[2]):
            continue
        if equals and value.isdigit():
            words[at] = f"{name}={_half(value)}"
        elif name.startswith("-") and at + 1 < len(words) and words[at + 1].isdigit():
            words[at + 1] = _half(words[at + 1])
    if change == HALF_BATCH and words == list(arguments):
        return changed_arguments(HALF_SEQUENCE, arguments)
    return tuple(words)


def _half(number: str) -> str:
    return str(max(int(number) // 2, 1))


def apply(changes: Sequence[str]) -> None:
    """Apply ``changes`` in this process, right after the import of PyTorch."""
    for change in changes:
        if change in _CHANGES:
            _CHANGES[change]()


def _of_optimizers(change: str, names: Sequence[str], **settings: Any) -> None:
    """Override the ``settings`` of optimizers of ``torch.optim``."""
    import torch

    for name in names:
        kind = getattr(torch.optim, name)
        kind.__init__ = _with(change, kind.__init__, settings)


def _with(change: str, call: Callable[..., Any], settings: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def changed(*args: Any, **kwargs: Any) -> Any:
        applied.add(change)
        return call(*args, **kwargs | settings)

    return changed


def _fused() -> None:
    _of_optimizers("fused optimizer", ("Adam", "AdamW", "SGD"), fused=True, foreach=None)


def _one_by_one() -> None:
    import inspect

    import torch

    kinds = {name: kind for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    takes = [name for name, kind in kinds.items() if "foreach" in inspect.signature(kind.__init__).parameters]
    _of_optimizers("foreach=False", takes, foreach=False)


def _states_in_8_bits() -> None:
    """Use bitsandbytes; a program that cannot import it fails, and the change is not reported."""
    import bitsandbytes
    import torch

    def of_8_bits(kind: Any) -> Callable[..., Any]:
        def make(*args: Any, foreach: Any = None, fused: Any = None, **kwargs: Any) -> Any:
            applied.add("states in 8 bits")
            return kind(*args, **kwargs)

        return make

    torch.optim.Adam = of_8_bits(bitsandbytes.optim.Adam8bit)  # type: ignore[assignment, misc]
    torch.optim.AdamW = of_8_bits(bitsandbytes.optim.AdamW8bit)  # type: ignore[assignment, misc]


def _around_models(
    before: Callable[[Any], Callable[[], None] | None],
    after: Callable[[Any, Any], Any] = lambda model, output: output,
) -> None:
    """Call ``before`` with each model that the program itself calls, and its result when the call has ended.

    ``after(model, output)`` returns the output for the program.
    """
    from torch.nn.modules import module as modules

    depth, ends = [0], list[Callable[[], None]]()

    def enter(module: Any, _: Any) -> None:
        depth[0] += 1
        if depth[0] == 1 and (end := before(module)) is not None:
            ends.append(end)

    def leave(module: Any, _: Any, output: Any) -> Any:
        depth[0] -= 1
        if depth[0]:
            return None
        if ends:
            ends.pop()()
        return after(module, output)

    modules.register_module_forward_pre_hook(enter)
    modules.register_module_forward_hook(leave, always_call=True)


def _checkpointing() -> None:
    """Checkpoint by the model's own library if it can, else block by block."""
    import torch

    done: set[int] = set()

    def before(model: Any) -> None:
        if id(model) in done or not (model.training and torch.is_grad_enabled()):
            return
        done.add(id(model))
        own = [part for part in model.modules() if getattr(part, "_supports_gradient_checkpointing", False)]
        for part in own:
            enable = getattr(part, "gradient_checkpointing_enable", None)
            if enable is not None:
                enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            else:
                part.enable_gradient_checkpointing()
        from brim.techniques.checkpointing import technique

        blocks = [] if own else technique.blocks(model)
        technique.apply(model, dict.fromkeys(blocks, technique.FULL))
        if own or blocks:
            applied.add("checkpointing")

    _around_models(before)


def _autocast() -> None:
    import torch
    from torch.utils import _pytree

    def before(_: Any) -> Callable[[], None]:
        applied.add("bfloat16 autocast")
        context = torch.autocast("cuda", dtype=torch.bfloat16)
        context.__enter__()
        return lambda: context.__exit__(None, None, None)

    def after(_: Any, output: Any) -> Any:
        if "accelerate.accelerator" not in sys.modules:
            return output
        half = (torch.bfloat16, torch.float16)  # Accelerate returns outputs of mixed precision in float32
        return _pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype in half else t, output)

    _around_models(before, after)


def _no_gradients() -> None:
    import torch

    def before(model: Any) -> Callable[[], None] | None:
        if model.training or not torch.is_grad_enabled():
            return None
        applied.add("no gradients in evaluation")
        context = torch.no_grad()
        context.__enter__()
        return lambda: context.__exit__(None, None, None)

    _around_models(before)


def _outputs_to_the_cpu() -> None:
    import torch
    from torch.utils import _pytree

    def after(model: Any, output: Any) -> Any:
        if model.training:
            return output
        applied.add("outputs to the CPU")
        return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), output)

    _around_models(lambda _: None, after)


def _fused_attention() -> None:
    """Switch transformers' models to PyTorch's own attention kernel."""

    def before(model: Any) -> None:
        for part in model.modules():
            if getattr(part, "_supports_sdpa", False) and part.config._attn_implementation == "eager":
                applied.add("fused attention")
                part.set_attn_implementation("sdpa")

    _around_models(before)


def _weights_in_16_bits() -> None:
    """Cast a model on its way to the GPU, before the copy."""
    import torch

    apply_to_all: Any = torch.nn.Module._apply

    def cast_first(module: Any, call: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
        def cast(tensor: Any) -> Any:
            moved = call(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            goes = moved.is_cuda and not tensor.is_cuda and tensor.is_floating_point() and tensor.itemsize > 2
            if goes:
                applied.add("weights in 16 bits")
            return call(tensor.to(torch.bfloat16) if goes else tensor)

        return apply_to_all(module, cast, *args, **kwargs)

    modules: Any = torch.nn.Module
    modules._apply = cast_first


def _checkpoints_to_the_cpu() -> None:
    import torch

    torch.load = _with("checkpoints to the CPU", torch.load, {"map_location": "cpu"})
    from safetensors import torch as safetensors

    safetensors.load_file = _with("checkpoints to the CPU", safetensors.load_file, {"device": "cpu"})


def _half_the_batch() -> None:
    """Halve the batch of data loaders; ``changed_arguments`` does it for command lines."""
    from torch.utils.data import DataLoader

    make = DataLoader.__init__

    @functools.wraps(make)
    def halved(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is DataLoader and isinstance(kwargs.get("batch_size"), int):
            kwargs["batch_size"] = _halved(kwargs["batch_size"])
        elif type(self) is DataLoader and len(args) > 1 and isinstance(args[1], int):
            args = (args[0], _halved(args[1]), *args[2:])
        make(self, *args, **kwargs)

    DataLoader.__init__ = halved  # type: ignore[method-assign]


def _halved(count: int) -> int:
    if count > 1:
        applied.add(HALF_BATCH)
    return max(count // 2, 1)


def _logits_in_16_bits() -> None:
    """Leave out the copy of logits by ``.float()``. Accelerate's own copies stay, as a user cannot remove them."""
    import torch

    to_float = torch.Tensor.float

    @functools.wraps(to_float)
    def unless_logits(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        looks_so = tensor.requires_grad and tensor.itemsize == 2 and tensor.dim() > 1
        by_library = sys._getframe(1).f_globals.get("__name__", "").startswith("accelerate.")
        if looks_so and tensor.shape[-1] >= _VOCABULARY and not by_library:
            applied.add("logits in 16 bits")
            return tensor
        return to_float(tensor, *args, **kwargs)

    tensors: Any = torch.Tensor
    tensors.float = unless_logits


def _loss_in_chunks() -> None:
    """Compute cross entropy over classes some tokens at a time, each chunk again in the backward pass."""
    import torch
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    cross_entropy, to_float = functional.cross_entropy, torch.Tensor.float
    _logits_in_16_bits()

    @functools.wraps(cross_entropy)
    def in_chunks(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        options = dict(zip(_LOSS_OPTIONS, args, strict=False)) | kwargs
        plain = input.dim() == 2 and target.dim() == 1 and options.get("reduction", "mean") in ("mean", "sum")
        if not plain or options.get("weight") is not None or len(input) <= _CHUNK_TOKENS:
            return cross_entropy(input, target, *args, **kwargs)
        applied.add("loss in chunks")
        summed = options | {"reduction": "sum"}

        def part(logits: Any, labels: Any) -> Any:
            return cross_entropy(to_float(logits), labels, **summed)

        rows = zip(input.split(_CHUNK_TOKENS), target.split(_CHUNK_TOKENS), strict=True)
        total = torch.stack([checkpoint(part, *row, use_reentrant=False) for row in rows]).sum()
        if options.get("reduction", "mean") == "sum":
            return total
        return total / (target != options.get("ignore_index", -100)).sum()

    functional.cross_entropy = in_chunks


_LOSS_OPTIONS = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_CHANGES: dict[str, Callable[[], None]] = {
    "fused optimizer": _fused,
    "foreach=False": _one_by_one,
    "checkpointing": _checkpointing,
    "bfloat16 autocast": _autocast,
    "no gradients in evaluation": _no_gradients,
    "weights in 16 bits": _weights_in_16_bits,
    "checkpoints to the CPU": _checkpoints_to_the_cpu,
    "loss in chunks": _loss_in_chunks,
    "logits in 16 bits": _logits_in_16_bits,
    "states in 8 bits": _states_in_8_bits,
    "outputs to the CPU": _outputs_to_the_cpu,
    "fused attention": _fused_attention,
    HALF_BATCH: _half_the_batch,
}


_OF_THE_HUB = frozenset(  # arguments that get_config_dict consumes
    """cache_dir force_download proxies token local_files_only revision trust_remote_code subfolder _from_pipeline
    _from_auto _commit_hash gguf_file""".split()  # noqa: SIM905
)


def build_missing_models() -> None:
    """Let ``from_pretrained`` build missing models from their configuration, once transformers is imported.

    A configuration that is missing too is the catalog's (``brim.catalog.presets``), for hub ids that it has.
    Weights are allocated but not initialised: their values are not used.
    """
    when_imported("transformers.configuration_utils", _use_catalog)
    when_imported("transformers.modeling_utils", _build_missing_models)


def _use_catalog(module: types.ModuleType) -> None:
    original = module.PreTrainedConfig.get_config_dict.__func__

    def get_config_dict(cls: Any, name: Any, /, **named: Any) -> Any:
        try:
            return original(cls, name, **named)
        except OSError:
            try:
                preset = presets.model(str(name))
            except UsageError:
                raise  # with the hub's own error as its context
            return dict(preset.config), {key: value for key, value in named.items() if key not in _OF_THE_HUB}

    module.PreTrainedConfig.get_config_dict = classmethod(get_config_dict)


def _build_missing_models(module: types.ModuleType) -> None:
    original = module.PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any, /, *arguments: Any, **named: Any) -> Any:
        try:
            return original(cls, name, *arguments, **named)
        except OSError:
            return _build(cls, name, named)

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _build(cls: Any, name: Any, named: dict[str, Any]) -> Any:
    import torch

    from brim.estimation.models import Source, weight_type

    config = named.get("config")
    if config is None:
        config = cls.config_class.from_pretrained(name)
    dtype = named.get("dtype", named.get("torch_dtype"))
    if dtype in (None, "auto"):
        described = Source(name=str(name), library="transformers", config=config.to_dict())
        dtype = getattr(torch, weight_type(described).dtype)
    place = named.get("device_map")
    device = torch.device("cuda" if place == "auto" else place) if isinstance(place, (str, int)) else None
    with torch.device("meta"):
        model = cls._from_config(config, dtype=dtype)
    model.to_empty(device=device or "cpu")
    model.tie_weights()
    model.config.name_or_path = model.name_or_path = str(name)  # trainers look up its tokenizer by it
    return model.eval()
