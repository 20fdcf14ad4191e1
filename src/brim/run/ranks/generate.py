"""``brim generate --gpus N``: generate with a model whose layers, or whose tensors, are split over several ranks.

Every rank runs transformers' own ``generate`` with its part of the model. Split layers send hidden states from rank
to rank, split tensors communicate through DTensor, and the scores of the last position reach all ranks, so that all
choose the same token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import StoppingCriteriaList

from brim.errors import UnsupportedError, UsageError
from brim.estimation.ranks.balance import balanced
from brim.estimation.ranks.split import Split, check_sizes, sizes_of
from brim.measure.token_clock import Clock
from brim.models.opening import DTYPES, OpenedModel, open_tokenizer, precision_of, prepare, verify_files
from brim.models.quantized import open_as
from brim.models.weights import by_parameter, materialize, verifier
from brim.requests.sampling import cut
from brim.requests.train import TIMEOUT_S
from brim.run.generate.inputs import check, encode
from brim.run.generate.loop import Ending, Printer, seeded
from brim.run.generate.request import Request
from brim.run.ranks.group import Ranks
from brim.run.ranks.model import Filler, move_buffers, own_shares
from brim.run.ranks.train import run_joined
from brim.techniques.checkpointing.technique import blocks
from brim.techniques.parallel import pipeline, sharding
from brim.techniques.streaming.weight_streaming import Weights

SPLITS = ("layers", "tensors")


@dataclass(frozen=True, kw_only=True)
class RanksRequest:
    """A generation over all ranks that were started. ``split``: one of ``SPLITS``."""

    generation: Request
    split: str = "layers"
    timeout_s: float = TIMEOUT_S

    def check(self) -> None:
        """Raise UsageError or UnsupportedError for options that several ranks do not support."""
        generation = self.generation
        generation.check()
        if self.split not in SPLITS:
            raise UsageError(f"--split {self.split} was given.", f"Allowed are {', '.join(SPLITS)}.")
        if not isinstance(generation.prompt, str):
            raise UnsupportedError(
                "Cannot generate from several prompts with --gpus.", "Ranks take one prompt at a time."
            )
        alone = {"--vram": generation.vram, "--ram": generation.ram, "--plan": generation.plan}
        alone["--prefill-chunk"] = None if generation.prefill_chunk == "auto" else generation.prefill_chunk
        options = [option for option, value in alone.items() if value is not None]
        if options:
            raise UnsupportedError(
                f"Cannot use {options[0]} with --gpus.", "A rank keeps its part in memory and streams nothing.",
                "Leave it out, or generate on one device.",
            )  # fmt: skip
        if generation.precision is not None and generation.precision not in DTYPES:
            raise UnsupportedError(
                f"Cannot use --precision {generation.precision} with --gpus.", f"Allowed are {', '.join(DTYPES)}."
            )


@dataclass(frozen=True, kw_only=True)
class RanksAnswer:
    """The result of a generation, on rank 0. ``weights_bytes``: of each rank."""

    text: str
    token_ids: list[int]
    split: str
    weights_bytes: list[int]
    s_per_token: float | None
    precision: tuple[str, str]
    seed: int | None = None

    def to_json(self) -> dict[str, Any]:
        ranks = [{"rank": rank, "weights_bytes": count} for rank, count in enumerate(self.weights_bytes)]
        return {
            "text": self.text, "token_ids": self.token_ids, "split": self.split, "ranks": ranks,
            "s_per_token": self.s_per_token, "precision": self.precision[0], "precision_origin": self.precision[1],
        } | ({} if self.seed is None else {"seed": self.seed})  # fmt: skip


def generate(request: RanksRequest, *, on_text: Callable[[str], None] = lambda text: None) -> RanksAnswer | None:
    """Generate with all ranks; returns the answer on rank 0, None on the others.

    A rank that fails reports it through rank 0 and ends. Raises UsageError where torchrun, or brim, has not started
    this process.
    """

    def work(ranks: Ranks) -> RanksAnswer | None:
        return _generate(request, ranks, on_text if ranks.is_first else lambda text: None)

    return run_joined(request.timeout_s, work)


def _generate(request: RanksRequest, ranks: Ranks, on_text: Callable[[str], None]) -> RanksAnswer | None:
    generation = request.generation
    opened, tokenizer, ids = ranks.agree(lambda: _open(request, ranks.world), in_turn=True)
    if request.split == "tensors":
        mesh = init_device_mesh(ranks.device.type, (1, ranks.world), mesh_dim_names=sharding.AXES)
        module = ranks.agree(lambda: _of_tensors(opened, mesh, ranks.device))
    else:
        module = ranks.agree(lambda: _of_layers(opened, ranks))
    weights_bytes = ranks.gathered(sum(_bytes(parameter) for parameter in module.parameters()))
    sampling = replace(generation.sampling, seed=ranks.gathered(generation.sampling.with_seed().seed or 0)[0])
    printer = Printer(tokenizer, on_text, generation.stop)
    options = sampling.options(module.generation_config)
    ending = Ending(tokenizer, generation.stop, begin=len(ids))
    if generation.stop:
        options["stopping_criteria"] = StoppingCriteriaList([ending])

    def on_tokens(tokens: torch.Tensor) -> None:
        ranks.reach(len(clock.times_s))
        printer.put(tokens)

    clock = Clock(on_tokens)
    with torch.inference_mode(), seeded(sampling):
        out = module.generate(
            ids[None].to(ranks.device), attention_mask=torch.ones_like(ids)[None].to(ranks.device),
            max_new_tokens=generation.max_new_tokens, num_beams=1, num_return_sequences=1,
            cache_implementation=None, return_dict_in_generate=False, streamer=clock, **options,
        )  # fmt: skip
    printer.end()
    token_ids = out[0, len(ids) :].tolist()[: ending.lengths.get(0)]
    if not ranks.is_first:
        return None
    text = cut(tokenizer.decode(token_ids, skip_special_tokens=True), generation.stop)
    return RanksAnswer(
        text=text, token_ids=token_ids, split=request.split, weights_bytes=weights_bytes,
        s_per_token=clock.s_per_step(), precision=precision_of(opened, generation.precision),
        seed=sampling.seed if sampling.draws else None,
    )  # fmt: skip


def _open(request: RanksRequest, ranks: int) -> tuple[OpenedModel, Any, torch.Tensor]:
    """The model with its weights still in their files, its tokenizer, and the prompt's tokens."""
    request.check()
    generation = request.generation
    assert isinstance(generation.prompt, str)
    folder = prepare(generation.model, trust_remote_code=generation.trust_remote_code)
    if generation.verify:
        verify_files(folder)
    opened = open_as(folder, generation.precision, trust_remote_code=generation.trust_remote_code, quantized=False)
    module: Any = opened.module
    if not module.can_generate() or module.config.is_encoder_decoder:
        raise UnsupportedError(
            f"Cannot generate with {opened.name} over ranks.", f"{type(module).__name__} is not a decoder-only model."
        )
    tokenizer = open_tokenizer(opened)
    ids = encode(tokenizer, generation.prompt, generation.chat, generation.system)
    check(module, opened.name, [ids], generation.max_new_tokens)
    tensors = request.split == "tensors"
    split = Split(gpus=ranks, gpus_per_node=ranks, tp=ranks if tensors else 1, pp=1 if tensors else ranks)
    check_sizes(split, sizes_of(module.config.get_text_config(), len(ids)))
    return opened, tokenizer, ids


def _filler(opened: OpenedModel, device: torch.device) -> Filler:
    weights = Weights(sources=by_parameter(opened), verify=verifier(opened))
    materialize(opened.module, opened)
    names = {id(parameter): name for name, parameter in opened.module.named_parameters()}
    return Filler(weights, names, device)


def _bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.itemsize


def _moved(module: nn.Module, device: torch.device) -> Any:
    move_buffers(module, device)
    return module.eval().requires_grad_(False)


# -- tensors split ---------------------------------------------------------------------------------------------


def _of_tensors(opened: OpenedModel, mesh: Any, device: torch.device) -> Any:
    module: Any = opened.module
    filler = _filler(opened, device)
    module.requires_grad_(False)
    sharding.apply(module, mesh, sharding.Sharding(zero=0), filler)
    own_shares(module)
    module.get_output_embeddings().register_forward_hook(
        lambda _, __, output: output.full_tensor() if isinstance(output, DTensor) else output
    )
    return _moved(module, device)


# -- layers split ----------------------------------------------------------------------------------------------


def _of_layers(opened: OpenedModel, ranks: Ranks) -> Any:
    """The model with only this rank's layers; earlier and later layers are on other ranks."""
    module: Any = opened.module
    filler = _filler(opened, ranks.device)
    table, head = module.get_input_embeddings(), module.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedError(
            f"Cannot split {opened.name} by its layers.", f"{type(module).__name__} has no output layer.",
            "Use --split tensors.",
        )  # fmt: skip
    names = {id(child): name for name, child in module.named_modules()}
    part = pipeline.parts(_stages(module, table, head, ranks.world))[ranks.rank]
    stage = pipeline.cut(module, part)
    layers = [module.get_submodule(path) for path in blocks(module)]
    _renumber(module, stage.inner, layers, part)
    dtype = head.weight.dtype
    if not part.embeds:
        module.set_submodule(names[id(table)], _EmptyEmbedding(table.embedding_dim, dtype))
        layers[0].register_forward_pre_hook(_receives(ranks.rank - 1), with_kwargs=True)
    if part.has_head:
        head.register_forward_hook(_broadcasts(ranks.rank))
    else:
        layers[-1].register_forward_hook(_sends(ranks.rank + 1))
        setattr(module, names[id(head)], _ReceivedScores(head.out_features, dtype, ranks.world - 1))
    filler(module, ())
    return _moved(module, ranks.device)


def _stages(module: Any, table: nn.Module, head: nn.Module, ranks: int) -> tuple[int, ...]:
    """Layers of each stage, balanced by bytes: decoding reads all weights for every token, embedding and head too."""
    paths = blocks(module)
    layer, embeds, scores = (
        sum(int(p.numel()) for p in part.parameters()) for part in (module.get_submodule(paths[0]), table, head)
    )

    def reads(stage: int, count: int) -> int:
        return count * layer + (scores if stage == ranks - 1 else 0)

    def holds(stage: int, count: int) -> int:
        return reads(stage, count) + (embeds if stage == 0 else 0)

    stages = balanced(len(paths), ranks, reads, holds)
    assert stages is not None, "there are as many layers as ranks"
    return stages


def _renumber(module: Any, inner: Any, layers: list[nn.Module], part: pipeline.Part) -> None:
    """Number the layers from 0 on, as the cache does: they form a smaller model."""
    for layer in layers:
        for child in layer.modules():
            if isinstance(vars(child).get("layer_idx"), int):
                child.layer_idx = vars(child)["layer_idx"] - part.first
    inner.config.num_hidden_layers = part.layers
    module.config = inner.config  # by which the cache is made


class _EmptyEmbedding(nn.Module):
    """Replaces the token table on later stages: zeros in the shape of the hidden states to be received."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._width, self._dtype = width, dtype
        # Decoders read its device and dtype.
        self.register_buffer("weight", torch.empty(0, width, dtype=dtype), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*ids.shape, self._width, dtype=self._dtype, device=ids.device)


class _ReceivedScores(nn.Module):
    """Replaces the output layer on earlier stages: the scores of the last rank."""

    def __init__(self, vocabulary: int, dtype: torch.dtype, last: int) -> None:
        super().__init__()
        self._vocabulary, self._dtype, self._last = vocabulary, dtype, last

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = torch.empty(*hidden.shape[:-1], self._vocabulary, dtype=self._dtype, device=hidden.device)
        dist.broadcast(scores, src=self._last)
        return scores


def _broadcasts(rank: int) -> Callable[..., torch.Tensor]:
    def broadcast(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        scores = output.contiguous()
        dist.broadcast(scores, src=rank)
        return scores

    return broadcast


def _receives(source: int) -> Callable[..., Any]:
    def receive(module: nn.Module, args: Any, kwargs: Any) -> Any:
        like = args[0] if args else kwargs["hidden_states"]
        hidden = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(hidden, src=source)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    return receive


def _sends(target: int) -> Callable[..., None]:
    def send(module: nn.Module, args: Any, output: Any) -> None:
        dist.send((output[0] if isinstance(output, tuple) else output).contiguous(), dst=target)

    return send
