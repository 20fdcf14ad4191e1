"""A rank's training step under Megatron-LM and Transformer Engine, as a trace.

The engine is not installed here, so its step is modelled by its code instead of being traced: Megatron-LM's DDP with
the float32 gradient buffer, its distributed optimizer (``--use-distributed-optimizer``), Transformer Engine's fused
layers, Megatron-LM's cross entropy, sequence parallelism, context parallelism by all-to-all, 1F1B and interleaved
pipelines. It also has memory that textbooks leave out: the loader's attention mask; with fused gradient
accumulation, a dummy weight gradient of every shape of matrix, never freed (``get_dummy_wgrad`` in
pytorch/module/base.py); one gathered input for the output layer (the buffer ``mpu`` of megatron/core/utils.py), the
workspaces of Transformer Engine and of PyTorch's two threads, and on pipeline ranks the last sent gradient.
Vocabularies are padded to a multiple of ``128 t``.
"""

from __future__ import annotations

from dataclasses import dataclass

from brim.core import Category, Op, Phase, Trace
from brim.estimation.ranks.job import MegatronOptions
from brim.estimation.ranks.megatron.experts import layer_of
from brim.estimation.ranks.megatron.layer import Place, Saved
from brim.estimation.ranks.schedule import Turn, brief, turns
from brim.estimation.ranks.script import Script, Sent
from brim.estimation.ranks.sizes import Shape
from brim.estimation.ranks.split import Split
from brim.units import MIB

_PADDED_TO = 128  # --make-vocab-size-divisible-by
_GROUPED_STREAMS = 4  # each with a workspace (common/multi_stream.cpp, nvte_get_num_compute_streams)
_DEFAULTS = MegatronOptions()
_POOL_BYTES = {"sm90": 32 * MIB, "other": 8_519_680}  # PyTorch 2.10, aten/src/ATen/cuda/CublasHandlePool.cpp


@dataclass(frozen=True, kw_only=True)
class StageTrace:
    """A pipeline rank's step. ``ops`` and ``sent`` are those of one micro-batch through all chunks, and the
    optimizer's."""

    trace: Trace
    ops: tuple[Op, ...]
    sent: tuple[Sent, ...]
    parameters: int
    layers: int
    expert_parameters: int = 0


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Layers ``[first, first + layers)`` of the model; ``embeds`` and ``has_head``: embedding and head too."""

    first: int
    layers: int
    embeds: bool
    has_head: bool

    @property
    def numbers(self) -> range:
        """The numbers of its layers in the model."""
        return range(self.first, self.first + self.layers)


def stage_trace(
    shape: Shape,
    split: Split,
    stage: int,
    *,
    sequence: int,
    recompute: str,
    options: MegatronOptions = _DEFAULTS,
    capability: tuple[int, int] = (9, 0),
) -> StageTrace:
    """The step of pipeline rank ``stage`` with its first micro-batches; later ones repeat them."""
    place = Place(
        shape=shape, split=split, sequence=sequence, recompute=recompute, options=options, capability=capability
    )
    rank = _Rank(place, stage)
    rank.build()
    for turn in turns(brief(split, stage), stage):
        rank.take(turn)
    rank.optimize()
    return StageTrace(
        trace=rank.script.trace(shape.name),
        ops=tuple(rank.ops),
        sent=tuple(rank.sent),
        parameters=rank.parameters,
        layers=sum(chunk.layers for chunk in rank.chunks),
        expert_parameters=rank.experts,
    )


def chunks_of(shape: Shape, split: Split, stage: int) -> list[Chunk]:
    """A pipeline rank's model chunks: chunk ``c`` of rank ``r`` is the model's part ``c p + r``.

    Uneven ones are those of ``--pipeline-model-parallel-layout``.
    """
    count = split.pp * split.interleave
    layers = split.stage_layers or (shape.layers // count,) * count
    parts = [chunk * split.pp + stage for chunk in range(split.interleave)]
    return [
        Chunk(first=sum(layers[:part]), layers=layers[part], embeds=part == 0, has_head=part == count - 1)
        for part in parts
    ]


class _Rank:
    def __init__(self, place: Place, stage: int) -> None:
        self.place, self.stage, self.script = place, stage, Script()
        self.chunks = chunks_of(place.shape, place.split, stage)
        self.ops: list[Op] = []
        self.sent: list[Sent] = []
        self.parameters = self.experts = 0
        self._padded = -(-place.shape.vocabulary // (_PADDED_TO * place.split.tp)) * _PADDED_TO
        self._flying: dict[tuple[int, int], tuple[list[Saved], int | None]] = {}
        self._masks: dict[int, int] = {}  # micro-batch -> the embedding's dropout mask
        self._sent_before: int | None = None  # the gradient sent last is freed at the next send

    # -- before the step -------------------------------------------------------------------------------------------

    def build(self) -> None:
        script, split = self.script, self.place.split
        numbers = [n for chunk in self.chunks for n in chunk.numbers]
        self.parameters = sum(self._count(chunk) for chunk in self.chunks)
        self.experts = sum(self.place.expert_parameters(number) for number in numbers)
        self._states(self.parameters, split.shards)
        self._states(self.experts, split.shards // split.ep, "experts ")  # on fewer ranks
        head = any(chunk.has_head for chunk in self.chunks)
        self._workspaces(head)
        shapes = {size for number in numbers for size in self.place.matrices(number)} | (
            {(self._padded, self.place.shape.hidden)} if head else set()
        )
        for rows, columns in sorted(shapes) if self.place.options.gradient_accumulation_fusion else ():
            script.alloc(2 * rows * columns, Category.WORKSPACE, name="dummy weight gradients")
        if head and self.place.gathers:
            script.alloc(self.place.hidden_states, Category.WORKSPACE, name="gathered input of the output layer")
        if not self.place.shape.positions:
            tokens = self.place.sequence // split.cp
            script.alloc(4 * tokens * self.place.shape.head_dim, Category.BUFFER, "float32", "rotary_pos_emb")
        script.begin()

    def _states(self, count: int, shards: int, of: str = "") -> None:
        script = self.script
        shards = self._shards(shards)
        script.alloc(2 * count, Category.PARAMETER, name=f"{of}parameters")
        script.alloc(4 * count, Category.GRADIENT, "float32", f"{of}main_grad")
        for name in ("main_param", "exp_avg", "exp_avg_sq"):
            script.alloc(-(-4 * count // shards), Category.OPTIMIZER_STATE, "float32", f"{of}{name}")

    def _shards(self, ranks: int) -> int:
        """The number of ``ranks`` that split the optimizer's states."""
        return max(ranks // self.place.options.num_distributed_optimizer_instances, 1) if self.place.split.zero else 1

    def _workspaces(self, head: bool) -> None:
        capability = self.place.capability
        ninth = capability[0] >= 9
        if self.place.options.transformer_impl == "local":
            self.script.alloc(self.place.scores, Category.WORKSPACE, name="buffer of attention scores")
        else:
            routed = any(self.place.is_routed(n) for chunk in self.chunks for n in chunk.numbers)
            for _ in range(1 + _GROUPED_STREAMS if routed else 1):
                workspace = 32 * MIB if ninth else 4 * MIB
                self.script.alloc(workspace, Category.WORKSPACE, name="Transformer Engine's cuBLAS")
        if head:  # PyTorch's only own product, in the forward thread and the backward thread
            pool = self.place.options.cublas_workspace_bytes(_POOL_BYTES["sm90" if capability == (9, 0) else "other"])
            for _ in range(2):
                self.script.alloc(pool, Category.WORKSPACE, name="PyTorch's cuBLAS")

    def _count(self, chunk: Chunk) -> int:
        shape = self.place.shape
        table = self._padded * shape.hidden
        count = sum(self.place.parameters(n) for n in chunk.numbers)
        if chunk.embeds:
            count += table + shape.positions * shape.hidden
        if chunk.has_head:
            shared = shape.tied and any(other.embeds for other in self.chunks)
            count += (0 if shared else table) + shape.hidden * (2 if shape.layer_norm else 1)
        return count

    # -- turns ---------------------------------------------------------------------------------------------------

    def take(self, turn: Turn) -> None:
        script = self.script
        script.phase = Phase.FORWARD if turn.forward else Phase.BACKWARD
        before, ops_before = len(script.sent), len(script.ops)
        chunk = self.chunks[turn.chunk]
        if turn.forward:
            self._forward(turn, chunk)
        else:
            self._backward(turn, chunk)
        if turn.micro_batch == 0:
            self.sent += script.sent[before:]
            self.ops += script.ops[ops_before:]

    def _forward(self, turn: Turn, chunk: Chunk) -> None:
        script, place = self.script, self.place
        # ``get_batch`` in Megatron-LM's script: these chunks read a batch.
        loads = (chunk.embeds or chunk.has_head) and place.attention_mask > 0
        mask = script.alloc(place.attention_mask, name="attention mask") if loads else None
        hidden = self._embed(turn.micro_batch) if chunk.embeds else script.keep(place.between, name="received")
        kept = []
        for number in chunk.numbers:
            saved, hidden = layer_of(script, place, number).forward(hidden)
            kept.append(saved)
        output: int | None = None
        if chunk.has_head:
            output = self._head(hidden)
        else:  # its storage is freed when it has been sent (deallocate_pipeline_outputs)
            script.send("send", "pp", place.between)
            script.free(hidden)
        if mask is not None:
            script.free(mask)
        self._flying[turn.micro_batch, turn.chunk] = (kept, output)

    def _embed(self, micro_batch: int) -> int:
        script, place = self.script, self.place
        script.module = "embedding"
        rows = script.alloc(place.hidden_states)
        script.op("aten.embedding.default", moved_bytes=2 * place.hidden_states)
        if place.split.tp == 1:
            embedded = script.keep(place.between)
            script.op("aten.clone.default", moved_bytes=2 * place.hidden_states)
        else:
            embedded = script.keep(place.between)
            script.send("reduce_scatter" if place.gathers else "all_reduce", "tp", place.hidden_states)
        script.free(rows)
        if place.shape.dropout:
            self._masks[micro_batch] = script.keep(place.between // 2)
        return embedded

    def _head(self, hidden: int) -> int:
        """The last norm, the output layer, and the loss, whose gradient overwrites the logits."""
        script, place = self.script, self.place
        script.module = "decoder.final_layernorm"
        norm = script.keep(place.between)
        statistics = script.keep(place.statistics)
        script.op("aten.native_layer_norm.default", moved_bytes=2 * place.between)
        script.module = "output_layer"
        if place.gathers:
            script.send("all_gather", "tp", place.hidden_states)
        logits = script.keep(place.tokens * self._padded * 2)
        self._output_product()
        script.op("aten._log_softmax.default", moved_bytes=3 * place.tokens * self._padded * 2)
        losses = script.keep(place.tokens * 4)
        self._head_kept = (hidden, norm, statistics, losses)
        loss = place.options.loss
        if loss == "te":
            return logits
        softmax = script.keep(place.tokens * self._padded * 4)  # tensor_parallel/cross_entropy.py, in place
        if loss == "native":  # the compiled loss writes its exponentials into a tensor of their own
            script.free(script.alloc(place.tokens * self._padded * 4))
        script.free(logits)
        return softmax

    def _output_product(self, *, accumulates: bool = False) -> None:
        place, hidden = self.place, self.place.shape.hidden
        moved = 2 * place.tokens * (self._padded + hidden) + self._padded * hidden * (8 if accumulates else 2)
        self.script.op("aten.mm.default", flops=2 * place.tokens * self._padded * hidden, moved_bytes=moved)

    def _backward(self, turn: Turn, chunk: Chunk) -> None:
        script, place = self.script, self.place
        kept, output = self._flying.pop((turn.micro_batch, turn.chunk))
        if output is not None:
            gradient = self._backward_head(output)
        else:
            gradient = script.alloc(place.between, name="received")
        for saved, number in zip(reversed(kept), reversed(chunk.numbers), strict=True):
            gradient = layer_of(script, place, number).backward(saved, gradient)
        if self._sent_before is not None:
            script.free(self._sent_before)
            self._sent_before = None
        if chunk.embeds:
            self._backward_embedding(gradient)
            if turn.micro_batch in self._masks:
                script.free(self._masks.pop(turn.micro_batch))
        else:
            script.send("send", "pp", place.between)
            self._sent_before = gradient

    def _backward_head(self, logits: int) -> int:
        script, place = self.script, self.place
        script.module = "output_layer"
        if place.options.loss != "te":  # the gradient overwrites the saved tensor, and is then converted to bfloat16
            softmax, logits = logits, script.alloc(place.tokens * self._padded * 2)
            script.free(softmax)
        if place.gathers:
            script.send("all_gather", "tp", place.hidden_states)
        partial = script.alloc(place.hidden_states)
        self._output_product()
        scattered = script.alloc(place.between) if place.gathers else partial
        if place.split.tp > 1:
            script.send("reduce_scatter" if place.gathers else "all_reduce", "tp", place.hidden_states)
        self._output_product(accumulates=True)
        fused = place.options.gradient_accumulation_fusion
        weight_gradient = None if fused else script.alloc(2 * self._padded * place.shape.hidden)
        hidden, norm, statistics, losses = self._head_kept
        script.free(logits, losses)
        if scattered is not partial:
            script.free(partial)
        if weight_gradient is not None:
            script.free(weight_gradient)
        script.module = "decoder.final_layernorm"
        gradient = script.alloc(place.between)
        script.op("aten.native_layer_norm_backward.default", moved_bytes=3 * place.between)
        script.free(scattered, norm, statistics, hidden)
        return gradient

    def _backward_embedding(self, gradient: int) -> None:
        """Allocate a dense gradient of the whole table, add it to its buffer and free it."""
        script, place = self.script, self.place
        script.module = "embedding"
        if place.gathers:
            script.send("all_gather", "tp", place.hidden_states)
        table = script.alloc(2 * self._padded * place.shape.hidden)
        script.op("aten.embedding_dense_backward.default", moved_bytes=4 * self._padded * place.shape.hidden)
        script.op("aten.add_.Tensor", moved_bytes=10 * self._padded * place.shape.hidden)
        script.free(table, gradient)

    def optimize(self) -> None:
        """Clear the gradients, take their norm over all of them, and update the optimizer's share."""
        script, split = self.script, self.place.split
        script.phase, script.module = Phase.OPTIMIZER, "optimizer"
        before = len(script.ops)
        mine = self.parameters // self._shards(split.shards)
        mine += self.experts // self._shards(split.shards // split.ep)
        script.op("aten.zero_.default", moved_bytes=4 * (self.parameters + self.experts), dtype="float32")
        script.op("aten.linalg_vector_norm.default", moved_bytes=4 * mine, dtype="float32")
        script.op("aten._fused_adam_.default", moved_bytes=30 * mine, dtype="float32")  # reads 16 B, writes 14 B
        self.ops += script.ops[before:]
