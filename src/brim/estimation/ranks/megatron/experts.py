"""Megatron-LM's decoder layers with latent attention, and with experts as the feed-forward.

Read from Megatron-LM (megatron/core/transformer/multi_latent_attention.py;
moe/{moe_layer,token_dispatcher,experts}.py): grouped products, all-to-all dispatch, equally many tokens for every
expert (``--moe-pad-expert-input-to-capacity`` with a factor of 1, or a balanced router), probabilities applied with
the activation. Tensors in Python variables live until a layer's forward returns, here too. Transformer
Engine multiplies a group's matrices one by one (cpp_extensions/gemm.py, ``general_grouped_gemm``), so each is a
separate operation here.
"""

from __future__ import annotations

from brim.estimation.ranks.megatron.layer import Layer, Place, Saved
from brim.estimation.ranks.script import Script
from brim.estimation.ranks.sizes import Experts, Latent
from brim.estimation.ranks.time import EXPERT_PRODUCT

_ROUTER_TENSORS = 3  # float32 per token and expert: scores, their scattered choice, the balance loss's scores

# Passes of the router over those tensors (moe_utils.py: scores in float32, top-k, zeros and the scattered choice, the
# balance loss's softmax and sum), forward; backward the gradients of each, and of the scores in bfloat16.
_ROUTER_PASSES, _ROUTER_PASSES_BACK = 8, 10

# Rows that are gathered or scattered by index get half of the memory's rate: 0.501 forward and 0.511 backward of
# 8 TB/s (B200; SimuMax, configs/system/b200_bf16_ceperm.json, permute_fwd and permute_bwd, Apache-2.0).
_PERMUTATION_SHARE = 0.5


class _Sizes:
    """Bytes of ``width`` bfloat16 numbers for each token."""

    def __init__(self, place: Place) -> None:
        self.place, self.tokens = place, place.tokens

    def of(self, width: int) -> int:
        return 2 * self.tokens * width


class LatentAttention(Layer):
    """Multi-head latent attention: keys and values from one latent vector, queries from another."""

    @property
    def _latent(self) -> Latent:
        assert self.place.shape.latent is not None, "chosen for shapes that have it"
        return self.place.shape.latent

    def _forward_attention(self, keep: dict[str, int]) -> int:
        script, place, own, size = self.script, self.place, self._latent, _Sizes(self.place).of
        heads, hidden = place.shape.heads, place.shape.hidden
        self._norm("input_layernorm", "ln1", keep)
        width = heads * (own.plain + own.rotary)
        self._at("self_attention.linear_q_up_proj")
        if own.query_rank:
            keep["q_latent"] = self._projection(hidden, own.query_rank)
            keep["q_norm"] = script.keep(size(own.query_rank) + 4 * place.tokens)
            keep["query"] = self._projection(own.query_rank, width)
        else:
            keep["query"] = self._projection(hidden, width)
        self._at("self_attention.linear_kv_up_proj")
        keep["kv_latent"] = self._projection(hidden, own.key_rank + own.rotary)
        keep["kv_norm"] = script.keep(size(own.key_rank) + 4 * place.tokens)
        both = self._projection(own.key_rank, heads * (own.plain + own.value))
        keep["key"], keep["value"] = script.keep(size(width)), script.keep(size(heads * own.value))
        self._move(2 * size(width))
        script.free(both)
        self._at("self_attention.core_attention")
        keep["out"] = script.keep(size(heads * own.value))
        keep["softmax"] = script.keep(4 * place.tokens * heads)
        self._attends(1.0)
        self._at("self_attention.linear_proj")
        out = script.alloc(place.hidden_states)
        self._multiplies(heads * own.value, hidden)
        return out

    def _drop_core(self, saved: Saved) -> None:
        self.script.free(saved.tensors.pop("softmax"))

    def _core_again(self, saved: Saved) -> None:
        self._at("self_attention.core_attention")
        saved.tensors["softmax"] = self.script.alloc(4 * self.place.tokens * self.place.shape.heads)
        self._attends(1.0)

    def _backward_attention(self, saved: Saved, gradient: int) -> int:
        script, place, own, size = self.script, self.place, self._latent, _Sizes(self.place).of
        heads, hidden, keep = place.shape.heads, place.shape.hidden, saved.tensors
        width = heads * (own.plain + own.rotary)
        if "mask1" in keep:
            script.free(keep.pop("mask1"))
        self._at("self_attention.linear_proj")
        out = self._back(heads * own.value, hidden)
        self._at("self_attention.core_attention")
        query, key, value = (script.alloc(size(each)) for each in (width, width, heads * own.value))
        self._attends(2.5)
        script.free(out, *(keep.pop(name) for name in ("query", "key", "value", "out", "softmax")))
        self._at("self_attention.linear_kv_up_proj")
        both = script.alloc(size(heads * (own.plain + own.value)))
        script.free(key, value)
        latent = self._back(own.key_rank, heads * (own.plain + own.value))
        script.free(both, keep.pop("kv_norm"))
        first = self._back(hidden, own.key_rank + own.rotary)
        script.free(latent, keep.pop("kv_latent"))
        self._at("self_attention.linear_q_up_proj")
        if own.query_rank:
            latent = self._back(own.query_rank, width)
            script.free(query, keep.pop("q_norm"))
            second = self._back(hidden, own.query_rank)
            script.free(latent, keep.pop("q_latent"))
        else:
            second = self._back(hidden, width)
            script.free(query)
        return self._backward_norm("ln1", keep, gradient, first, second)

    def _attends(self, times: float) -> None:
        place, own = self.place, self._latent
        width = place.shape.heads * (own.plain + own.rotary + own.value)
        flops = int(times * place.tokens * place.sequence * width)
        self.script.op("aten._scaled_dot_product_flash_attention.default", flops=flops, moved_bytes=0)

    def _projection(self, inputs: int, outputs: int) -> int:
        output = self.script.keep(_Sizes(self.place).of(outputs))
        self._multiplies(inputs, outputs)
        return output

    def _back(self, inputs: int, outputs: int) -> int:
        """The gradient of a product's input; the weight's is added to its buffer."""
        gradient = self.script.alloc(_Sizes(self.place).of(inputs))
        self._multiplies(inputs, outputs)
        self._multiplies(inputs, outputs, accumulates=True)
        return gradient

    def _multiplies(self, inputs: int, outputs: int, *, accumulates: bool = False) -> None:
        self._product_of(outputs, inputs, self.place.tokens, accumulates=accumulates)


class ExpertFeedForward(Layer):
    """A router, experts split over the ranks of ``ep``, and shared experts for every token."""

    @property
    def _experts(self) -> Experts:
        assert self.place.shape.experts is not None, "chosen for shapes that have them"
        return self.place.shape.experts

    @property
    def _sent_bytes(self) -> int:
        """Hidden states of this rank's tokens, once for every chosen expert."""
        return self.place.between * self._experts.chosen

    @property
    def _gathered_bytes(self) -> int:
        """The same for the whole tensor-parallel group, whose ranks each have a part of every expert."""
        return self.place.hidden_states * self._experts.chosen

    @property
    def _routed_tokens(self) -> int:
        return self.place.tokens // (self.place.split.tp if self.place.gathers else 1)

    def _of_inner(self, matrices: int) -> int:
        """Bytes of ``matrices`` activations as wide as this rank's part of an expert, for all routed tokens."""
        return _Sizes(self.place).of(matrices * self._experts.inner * self._experts.chosen) // self.place.split.tp

    def _forward_mlp(self, keep: dict[str, int]) -> int:
        script, place, own = self.script, self.place, self._experts
        self._norm("pre_mlp_layernorm", "ln2", keep)
        self._at("mlp.router")
        keep["router"] = script.keep(self._routed_tokens * own.count * (4 * _ROUTER_TENSORS + 1))
        self._product_of(own.count, place.shape.hidden, self._routed_tokens)
        self._move(4 * _ROUTER_PASSES * self._routed_tokens * own.count)
        permuted = script.alloc(self._sent_bytes)
        self._permute(self._sent_bytes + place.between)
        received = script.alloc(self._sent_bytes)
        script.send("all_to_all", "ep", self._sent_bytes)
        temporaries = [permuted, received]
        if own.shared:
            temporaries.append(self._forward_shared(keep))
        self._at("mlp.experts")
        gathered = self._gathered_rows()
        keep["tokens"] = script.keep(self._gathered_bytes)
        self._permute(2 * self._gathered_bytes)
        if gathered is not None:
            script.free(gathered)
        keep["fc1"] = script.keep(self._of_inner(2))
        self._grouped()
        keep["act"] = script.keep(self._of_inner(1))
        self._move(self._of_inner(3))
        out = script.alloc(self._gathered_bytes)
        self._grouped(back=True)
        sorted_back = script.alloc(self._gathered_bytes)
        self._permute(2 * self._gathered_bytes)
        script.free(out)
        if place.gathers:
            temporaries.append(script.alloc(self._sent_bytes))
            script.send("reduce_scatter", "tp", self._gathered_bytes)
        returned = script.alloc(self._sent_bytes)
        script.send("all_to_all", "ep", self._sent_bytes)
        total = script.alloc(place.between)
        self._permute(self._sent_bytes + 2 * place.between)
        script.free(returned, sorted_back, *temporaries)
        return total

    def _gathered_rows(self) -> int | None:
        """Gather the routed tokens of the tensor-parallel group, if it splits experts."""
        if not self.place.gathers:
            return None
        gathered = self.script.alloc(self._gathered_bytes)
        self.script.send("all_gather", "tp", self._gathered_bytes)
        return gathered

    def _forward_shared(self, keep: dict[str, int]) -> int:
        script, place, own = self.script, self.place, self._experts
        width = own.shared // place.split.tp
        size = _Sizes(place).of(width)
        self._at("mlp.shared_experts")
        gathered = self._gathered()
        keep["shared_fc1"] = script.keep(2 * size)
        self._product_of(2 * width, place.shape.hidden, place.tokens)
        if gathered is not None:
            script.free(gathered)
        keep["shared_act"] = script.keep(size)
        self._move(3 * size)
        out = script.alloc(place.hidden_states)
        self._product_of(place.shape.hidden, width, place.tokens)
        return self._scattered(out)

    def _scattered(self, partial: int) -> int:
        """Reduce-scatter over the tensor-parallel group: this rank gets its part of the sequence."""
        if not self.place.gathers:
            return partial
        scattered = self.script.alloc(self.place.between)
        self.script.send("reduce_scatter", "tp", self.place.hidden_states)
        self.script.free(partial)
        return scattered

    def _backward_mlp(self, saved: Saved, gradient: int) -> int:
        script, place, own, keep = self.script, self.place, self._experts, saved.tensors
        if "mask2" in keep:
            script.free(keep.pop("mask2"))
        shared = self._backward_shared(keep) if own.shared else None
        self._at("mlp.experts")
        out = self._sent_back(script.alloc(self._sent_bytes), "all_to_all", "ep", self._sent_bytes)
        if place.gathers:
            out = self._sent_back(out, "all_gather", "tp", self._gathered_bytes)
        out = self._sorted(out)
        act = script.alloc(self._of_inner(1))
        self._grouped(back=True, gradient=True)
        script.free(out, keep.pop("act"))
        wide = script.alloc(self._of_inner(2))
        self._move(self._of_inner(5))
        script.free(act, keep.pop("fc1"))
        tokens = script.alloc(self._gathered_bytes)
        self._grouped(gradient=True)
        script.free(wide, keep.pop("tokens"))
        tokens = self._sorted(tokens)
        if place.gathers:
            tokens = self._sent_back(tokens, "reduce_scatter", "tp", self._sent_bytes)
        tokens = self._sent_back(tokens, "all_to_all", "ep", self._sent_bytes)
        self._at("mlp.router")
        hidden = script.alloc(place.between)
        self._permute(self._sent_bytes + place.between)
        self._move(4 * _ROUTER_PASSES_BACK * self._routed_tokens * own.count)
        for accumulates in (False, True):
            self._product_of(own.count, place.shape.hidden, self._routed_tokens, accumulates=accumulates)
        script.free(tokens, keep.pop("router"))
        return self._backward_norm("ln2", keep, gradient, hidden, shared, keep.pop("middle"))

    def _sent_back(self, tokens: int, kind: str, axis: str, received_bytes: int) -> int:
        received = self.script.alloc(received_bytes)
        self.script.send(kind, axis, max(received_bytes, self._sent_bytes if axis == "ep" else self._gathered_bytes))
        self.script.free(tokens)
        return received

    def _sorted(self, tokens: int) -> int:
        """Reorder the rows: by expert, or by token."""
        in_order = self.script.alloc(self._gathered_bytes)
        self._permute(2 * self._gathered_bytes)
        self.script.free(tokens)
        return in_order

    def _backward_shared(self, keep: dict[str, int]) -> int:
        script, place, own = self.script, self.place, self._experts
        width = own.shared // place.split.tp
        size = _Sizes(place).of(width)
        self._at("mlp.shared_experts")
        act = script.alloc(size)
        for accumulates in (False, True):
            self._product_of(place.shape.hidden, width, place.tokens, accumulates=accumulates)
        script.free(keep.pop("shared_act"))
        wide = script.alloc(2 * size)
        self._move(5 * size)
        script.free(act, keep.pop("shared_fc1"))
        hidden = script.alloc(place.hidden_states)
        for accumulates in (False, True):
            self._product_of(2 * width, place.shape.hidden, place.tokens, accumulates=accumulates)
        script.free(wide)
        return self._scattered(hidden)

    def _grouped(self, *, back: bool = False, gradient: bool = False) -> None:
        """A grouped product over this rank's experts: up (gate beside it) or back down."""
        own, place = self._experts, self.place
        inner = own.inner // place.split.tp
        rows, columns = (place.shape.hidden, inner) if back else (2 * inner, place.shape.hidden)
        local = own.count // place.split.ep
        tokens = place.tokens * own.chosen // local
        for accumulates in (False, True) if gradient else (False,):
            for _ in range(local):
                self._product_of(rows, columns, tokens, accumulates=accumulates, name=EXPERT_PRODUCT)

    def _permute(self, bytes: int) -> None:
        """Gather or scatter rows: ``bytes`` are read and written."""
        self._move(int(bytes / _PERMUTATION_SHARE))


class LatentExperts(ExpertFeedForward, LatentAttention):
    """Latent attention and experts."""


def layer_of(script: Script, place: Place, number: int) -> Layer:
    """Layer ``number`` of the model."""
    shape = place.shape
    routed = place.is_routed(number)
    kinds: dict[tuple[bool, bool], type[Layer]] = {
        (False, False): Layer,
        (True, False): LatentAttention,
        (False, True): ExpertFeedForward,
        (True, True): LatentExperts,
    }
    return kinds[shape.latent is not None, routed](script, place, f"decoder.layers.{number}")
