"""A decoder layer under Megatron-LM and Transformer Engine: its saved tensors, allocations and communication, in
order.

Read from Megatron-LM (megatron/core/transformer/{transformer_layer,attention,mlp}.py, fusions/fused_bias_swiglu.py)
and Transformer Engine 2.11 (pytorch/module/{layernorm_linear,linear}.py, pytorch/attention). Norms are fused into the
product that follows, activations into one kernel, weight gradients into the float32 buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from brim.estimation.ranks.job import MegatronOptions
from brim.estimation.ranks.script import Script
from brim.estimation.ranks.sizes import Shape
from brim.estimation.ranks.split import Split

_WIDTH = 2  # bytes of bfloat16
_PROBABILITIES = ("softmax", "dropped", "score_mask")
_NORMS = {"ln1": "input_layernorm", "ln2": "pre_mlp_layernorm"}


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's share of the model and of a micro-batch. Sizes are bytes of bfloat16 unless they say otherwise."""

    shape: Shape
    split: Split
    sequence: int
    recompute: str  # none, selective or full
    options: MegatronOptions = field(default_factory=MegatronOptions)
    capability: tuple[int, int] = (9, 0)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one context-parallel rank."""
        return self.sequence * self.split.micro_batch // self.split.cp

    @property
    def hidden_states(self) -> int:
        """Hidden states of all tokens."""
        return self.tokens * self.shape.hidden * _WIDTH

    @property
    def between(self) -> int:
        """Hidden states between tensor-parallel parts: split along the sequence under sequence parallelism."""
        return self.hidden_states // (self.split.tp if self.split.sequence_parallel else 1)

    @property
    def statistics(self) -> int:
        """A norm's saved statistics: float32 scales, and means where it has them."""
        tokens = self.tokens // (self.split.tp if self.split.sequence_parallel else 1)
        return tokens * 4 * (2 if self.shape.layer_norm else 1)

    @property
    def query(self) -> int:
        return self.tokens * self.shape.query // self.split.tp * _WIDTH

    @property
    def key(self) -> int:
        return self.tokens * self.shape.key_value // self.split.tp * _WIDTH

    @property
    def softmax(self) -> int:
        """Logarithms of the sums of exponentials, float32; unfused, the probabilities."""
        if self.attention == "unfused":
            return self.scores
        return self.tokens * self.shape.heads // self.split.tp * 4

    @property
    def inner(self) -> int:
        """The feed-forward's activation."""
        return self.tokens * self.shape.ffn // self.split.tp * _WIDTH

    @property
    def wide(self) -> int:
        """The output of the feed-forward's first product: gate and up in one where there is a gate."""
        return self.inner * (2 if self.shape.gated else 1)

    @property
    def attention_mask(self) -> int:
        """The loader's dense mask of a micro-batch, one byte for each pair of tokens."""
        if not self.options.create_attention_mask_in_dataloader:
            return 0
        return self.split.micro_batch * self.sequence * self.sequence

    @property
    def attention(self) -> str:
        """The attention kernel that Transformer Engine uses: ``flash``, ``fused`` or ``unfused``.

        If both are available, cuDNN's is preferred from Hopper on, unless it must be deterministic on Blackwell
        (transformer_engine/pytorch/attention/dot_product_attention/utils.py; GB200 by Megatron-LM's golden values).
        """
        if self.options.transformer_impl == "local":
            return "unfused"
        if self.options.attention_backend != "auto":
            return self.options.attention_backend
        return "flash" if self.capability < (9, 0) or self._is_deterministic_blackwell else "fused"

    @property
    def _is_deterministic_blackwell(self) -> bool:
        return self.options.deterministic_mode and self.capability >= (10, 0)

    @property
    def copies_attention(self) -> bool:
        """Return whether attention's output is saved twice: in the kernel's layout and in that of the next product.

        Context parallelism exchanges heads in between. FlashAttention needs the batch first, Megatron-LM has it
        second; for one sequence both layouts are equal.
        """
        return self.split.cp > 1 or (self.attention == "flash" and self.split.micro_batch > 1)

    @property
    def scores(self) -> int:
        """Scores of all pairs of tokens under this rank's heads."""
        return self.tokens * self.sequence * self.shape.heads // self.split.tp * _WIDTH

    @property
    def gathers(self) -> bool:
        return self.split.tp > 1 and self.split.sequence_parallel

    def weights(self) -> dict[str, tuple[int, int]]:
        """A plain layer's matrices as (outputs, inputs) on this rank."""
        shape, t = self.shape, self.split.tp
        return {
            "linear_qkv": ((shape.query + 2 * shape.key_value) // t, shape.hidden),
            "linear_proj": (shape.hidden, shape.query // t),
            "linear_fc1": (shape.ffn * (2 if shape.gated else 1) // t, shape.hidden),
            "linear_fc2": (shape.hidden, shape.ffn // t),
        }

    def is_routed(self, number: int) -> bool:
        """Return whether layer ``number`` has experts."""
        return self.shape.experts is not None and number >= self.shape.experts.dense_layers

    def matrices(self, number: int) -> list[tuple[int, int]]:
        """Layer ``number``'s matrices as (outputs, inputs), with one expert standing for all."""
        shape, matrices = self.shape, self.weights()
        own, latent = shape.experts, shape.latent
        if latent is not None:
            matrices = {name: size for name, size in matrices.items() if "fc" in name}
            width, h = shape.heads * (latent.plain + latent.rotary), shape.hidden
            matrices["kv_down"] = (latent.key_rank + latent.rotary, h)
            matrices["kv_up"] = (shape.heads * (latent.plain + latent.value), latent.key_rank)
            matrices["proj"] = (h, shape.heads * latent.value)
            if latent.query_rank:
                matrices |= {"q_down": (latent.query_rank, h), "q_up": (width, latent.query_rank)}
            else:
                matrices["q"] = (width, h)
        if own is not None and self.is_routed(number):
            matrices = {name: size for name, size in matrices.items() if "fc" not in name}
            inner = own.inner // self.split.tp
            matrices |= {"expert_fc1": (2 * inner, shape.hidden), "expert_fc2": (shape.hidden, inner)}
            if own.shared:
                shared = own.shared // self.split.tp
                matrices |= {"shared_fc1": (2 * shared, shape.hidden), "shared_fc2": (shape.hidden, shared)}
        return list(matrices.values())

    def parameters(self, number: int = 0) -> int:
        """Parameters of layer ``number`` on this rank, without experts."""
        shape, t, own = self.shape, self.split.tp, self.shape.experts
        count = sum(rows * columns for rows, columns in self.matrices(number))
        count += 2 * shape.hidden * (2 if shape.layer_norm else 1)
        if own is not None and self.is_routed(number):
            count += shape.hidden * own.count - 3 * own.inner * shape.hidden // t
        if shape.latent is not None:
            count += shape.latent.query_rank + shape.latent.key_rank
        if shape.qkv_bias:
            count += (shape.query + 2 * shape.key_value) // t
        if shape.bias:
            count += 2 * shape.hidden + shape.ffn * (2 if shape.gated else 1) // t
        return count

    def expert_parameters(self, number: int) -> int:
        """Parameters of layer ``number``'s experts on this rank."""
        own = self.shape.experts
        if own is None or not self.is_routed(number):
            return 0
        return own.count // self.split.ep * 3 * own.inner * self.shape.hidden // self.split.tp


@dataclass
class Saved:
    """Handles of the tensors saved for a layer's backward; ``given`` is its input."""

    given: int
    tensors: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class Layer:
    """Writes the forward and the backward of one layer into a script."""

    script: Script
    place: Place
    name: str

    # -- forward -------------------------------------------------------------------------------------------------

    def forward(self, given: int) -> tuple[Saved, int]:
        """Return the saved tensors, and the output (owned by the caller)."""
        saved = Saved(given)
        output = self._forward(saved)
        if self.place.recompute == "full":
            self.script.free(*saved.tensors.values())
            saved.tensors = {}
        elif self.place.recompute == "selective":
            self._drop_core(saved)
        return saved, output

    def _forward(self, saved: Saved) -> int:
        keep = saved.tensors
        keep["middle"] = self._add(self._forward_attention(keep), "mask1", keep)
        return self._add(self._forward_mlp(keep), "mask2", keep)

    def _forward_attention(self, keep: dict[str, int]) -> int:
        script, place = self.script, self.place
        self._norm("input_layernorm", "ln1", keep)
        mixed = self._column("self_attention.linear_qkv", "linear_qkv", place.query + 2 * place.key)
        keep["qkv"] = script.keep(place.query + 2 * place.key)  # rotated, or made contiguous
        self._move(2 * (place.query + 2 * place.key))
        script.free(mixed)
        self._attention(keep)
        return self._row("self_attention.linear_proj", "linear_proj")

    def _forward_mlp(self, keep: dict[str, int]) -> int:
        script, place = self.script, self.place
        self._norm("pre_mlp_layernorm", "ln2", keep)
        keep["fc1"] = self._column("mlp.linear_fc1", "linear_fc1", place.wide)
        self._at("mlp")
        keep["act"] = script.keep(place.inner)
        self._move(place.wide + place.inner)
        return self._row("mlp.linear_fc2", "linear_fc2")

    def _attention(self, keep: dict[str, int]) -> None:
        script, place = self.script, self.place
        self._at("self_attention.core_attention")
        if place.split.cp > 1:  # heads are exchanged for the rest of the sequence, and back
            script.send("all_to_all", "cp", place.query + 2 * place.key)
        self._probabilities(keep)
        keep["core"] = script.keep(place.query)
        self._core(4)
        if place.split.cp > 1:
            script.send("all_to_all", "cp", place.query)
        if place.copies_attention:
            keep["out"] = script.keep(place.query)
        else:
            keep["out"] = keep.pop("core")

    def _probabilities(self, keep: dict[str, int]) -> None:
        """Save attention's statistics; unfused, all probabilities, and with dropout their mask and its result."""
        script, place = self.script, self.place
        if place.attention != "unfused":
            keep["softmax"] = script.keep(place.softmax)
            return
        before = script.alloc(0 if place.options.transformer_impl == "local" else place.scores)
        keep["softmax"] = script.keep(place.softmax)
        script.free(before)
        if place.shape.dropout:
            keep["dropped"], keep["score_mask"] = script.keep(place.scores), script.keep(place.scores // _WIDTH)
        self._move((6 if place.shape.dropout else 4) * place.scores)

    def _drop_core(self, saved: Saved) -> None:
        """Recomputed attention saves queries, keys and values; the following product saves attention's output."""
        for name in ("core", *_PROBABILITIES):
            if name in saved.tensors:
                self.script.free(saved.tensors.pop(name))

    def _norm(self, module: str, name: str, keep: dict[str, int]) -> None:
        self._at(module)
        keep[name] = self.script.keep(self.place.between)
        keep[f"{name}_statistics"] = self.script.keep(self.place.statistics)
        self._move(2 * self.place.between)

    def _column(self, module: str, weight: str, output_bytes: int) -> int:
        """A product split by its outputs; its input is gathered from all ranks of the group first."""
        script = self.script
        self._at(module)
        gathered = self._gathered()
        output = script.keep(output_bytes)
        self._product(weight)
        if gathered is not None:
            script.free(gathered)
        return output

    def _gathered(self) -> int | None:
        """Gather the sequence over the tensor-parallel group, if it splits it."""
        if not self.place.gathers:
            return None
        gathered = self.script.alloc(self.place.hidden_states)
        self.script.send("all_gather", "tp", self.place.hidden_states)
        return gathered

    def _row(self, module: str, weight: str) -> int:
        """A product split by its inputs; its outputs are summed over the group."""
        script, place = self.script, self.place
        self._at(module)
        partial = script.alloc(place.hidden_states)
        self._product(weight)
        if place.split.tp == 1:
            return partial
        if not place.gathers:
            script.send("all_reduce", "tp", place.hidden_states)
            return partial
        output = script.alloc(place.between)
        script.send("reduce_scatter", "tp", place.hidden_states)
        script.free(partial)
        return output

    def _add(self, out: int, mask: str, keep: dict[str, int]) -> int:
        """Dropout, and the sum with the residual stream."""
        script, place = self.script, self.place
        self._at("")
        if place.shape.dropout:
            keep[mask] = script.keep(place.between // _WIDTH)
        total = script.keep(place.between)
        self._move(3 * place.between)
        script.free(out)
        return total

    # -- backward ------------------------------------------------------------------------------------------------

    def backward(self, saved: Saved, gradient: int) -> int:
        """Free the saved tensors, the input and ``gradient``; return the input's gradient."""
        script = self.script
        if self.place.recompute == "full":
            script.free(self._forward(saved))
        elif self.place.recompute == "selective":
            self._core_again(saved)
        gradient = self._backward_mlp(saved, gradient)
        gradient = self._backward_attention(saved, gradient)
        script.free(saved.given)
        return gradient

    def _core_again(self, saved: Saved) -> None:
        script, place = self.script, self.place
        self._at("self_attention.core_attention")
        self._probabilities(saved.tensors)
        again = script.alloc(place.query)
        self._core(4)
        if place.copies_attention:
            saved.tensors["core"] = again
        else:
            script.free(again)

    def _backward_mlp(self, saved: Saved, gradient: int) -> int:
        script, place, keep = self.script, self.place, saved.tensors
        inner = self._backward_row("mlp.linear_fc2", "linear_fc2", gradient, place.inner, saved, "mask2")
        script.free(keep.pop("act"))
        self._at("mlp")
        wide = script.alloc(place.wide)
        self._move(2 * place.wide + place.inner)
        script.free(inner, keep.pop("fc1"))
        return self._backward_column("mlp.linear_fc1", "linear_fc1", wide, "ln2", saved, gradient, keep.pop("middle"))

    def _backward_attention(self, saved: Saved, gradient: int) -> int:
        script, place, keep = self.script, self.place, saved.tensors
        out = self._backward_row("self_attention.linear_proj", "linear_proj", gradient, place.query, saved, "mask1")
        self._at("self_attention.core_attention")
        if place.split.cp > 1:
            script.send("all_to_all", "cp", place.query)
        mixed = script.alloc(place.query + 2 * place.key)
        self._core(10)
        if place.attention == "unfused":  # gradients of the probabilities, before and after dropout or the softmax
            script.free(script.alloc(place.scores), script.alloc(place.scores))
        script.free(out, keep.pop("qkv"), keep.pop("out"))
        script.free(*(keep.pop(name) for name in _PROBABILITIES if name in keep))
        if place.copies_attention:
            script.free(keep.pop("core"))
        if place.split.cp > 1:
            script.send("all_to_all", "cp", place.query + 2 * place.key)
        whole = script.alloc(place.query + 2 * place.key)  # rotated back, in one tensor
        self._move(2 * (place.query + 2 * place.key))
        script.free(mixed)
        return self._backward_column("self_attention.linear_qkv", "linear_qkv", whole, "ln1", saved, gradient, None)

    def _backward_row(
        self, module: str, weight: str, gradient: int, input_bytes: int, saved: Saved, mask: str
    ) -> int:
        script, place = self.script, self.place
        self._at(module)
        masked = None
        if mask in saved.tensors:
            masked = script.alloc(place.between)
            script.free(saved.tensors.pop(mask))
        gathered = self._gathered()
        input_gradient = script.alloc(input_bytes)
        self._product(weight)
        weight_gradient = self._weight_gradient(weight)
        script.free(*(handle for handle in (masked, gathered, weight_gradient) if handle is not None))
        return input_gradient

    def _backward_column(
        self, module: str, weight: str, output: int, norm: str, saved: Saved, gradient: int, residual: int | None
    ) -> int:
        """Product and norm before it, and the sum with the residual stream's gradient."""
        script, place = self.script, self.place
        self._at(module)
        gathered = self._gathered()
        partial = script.alloc(place.hidden_states)
        self._product(weight)
        scattered = script.alloc(place.between) if place.gathers else partial
        if place.split.tp > 1:
            script.send("reduce_scatter" if place.gathers else "all_reduce", "tp", place.hidden_states)
        weight_gradient = self._weight_gradient(weight)
        if gathered is not None:
            script.free(gathered, partial)
        script.free(output)
        total = self._backward_norm(norm, saved.tensors, gradient, scattered, None, residual)
        if weight_gradient is not None:
            script.free(weight_gradient)
        return total

    def _weight_gradient(self, weight: str) -> int | None:
        """Add to the float32 buffer, or write a tensor that a hook adds to it when the module's backward is over."""
        self._product(weight, accumulates=True)
        if self.place.options.gradient_accumulation_fusion:
            return None
        rows, columns = self.place.weights()[weight]
        return self.script.alloc(_WIDTH * rows * columns)

    def _backward_norm(
        self,
        norm: str,
        keep: dict[str, int],
        gradient: int,
        first: int,
        second: int | None,
        residual: int | None = None,
    ) -> int:
        """Compute the gradient of a norm's input from those of its readers and of the residual stream."""
        script, place = self.script, self.place
        self._at(_NORMS[norm])
        if second is not None:
            both = script.alloc(place.between)
            self._move(3 * place.between)
            script.free(first, second)
            first = both
        before = script.alloc(place.between)
        self._move(3 * place.between)
        script.free(first, keep.pop(norm), keep.pop(f"{norm}_statistics"))
        total = script.alloc(place.between)
        self._move(3 * place.between)
        script.free(gradient, before)
        if residual is not None:
            script.free(residual)
        return total

    def _at(self, module: str) -> None:
        self.script.module = f"{self.name}.{module}" if module else self.name

    def _product(self, weight: str, *, accumulates: bool = False) -> None:
        """A product; a weight gradient is added to its float32 buffer."""
        rows, columns = self.place.weights()[weight]
        self._product_of(rows, columns, self.place.tokens, accumulates=accumulates)

    def _product_of(
        self, rows: int, columns: int, tokens: int, *, accumulates: bool = False, name: str = "aten.mm.default"
    ) -> None:
        moved = _WIDTH * (tokens * (rows + columns)) + rows * columns * (8 if accumulates else _WIDTH)
        self.script.op(name, flops=2 * tokens * rows * columns, moved_bytes=moved)

    def _core(self, passes: int) -> None:
        """Causal attention: half of ``passes`` x tokens x sequence x width; backward is 2.5 times the forward.
        Unfused products compute all of it."""
        place = self.place
        flops = passes * place.tokens * place.sequence * (place.shape.query // place.split.tp)
        flops //= 1 if place.attention == "unfused" else 2
        self.script.op(
            "aten._scaled_dot_product_flash_attention.default", flops=flops, moved_bytes=2 * (place.query + place.key)
        )

    def _move(self, bytes: int) -> None:
        self.script.op("aten.add.Tensor", flops=0, moved_bytes=bytes)
