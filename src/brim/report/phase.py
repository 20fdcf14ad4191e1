"""The phase of a program in which memory ran out, by its stack, and advice for each phase, the best first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class Advice:
    """A piece of advice. ``paste`` is a command or setting to paste, "" for none; ``helps`` False: it does not help.

    ``change`` names the change that a rehearsal can make to a program to try it (``rehearsal/changes.py``), "": none.
    """

    text: str
    paste: str = ""
    helps: bool = True
    change: str = ""


class Phase(StrEnum):
    """A part of a run. ``STATES`` is an optimizer's first step, which makes them; ``OPTIMIZER`` any later one."""

    LOADING = "loading"
    FORWARD = "forward"
    ATTENTION = "attention"
    LOSS = "loss"
    BACKWARD = "backward"
    STATES = "states"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    GENERATION = "generation"
    SAVING = "saving"


SMALLER = Advice(
    "Make the step smaller: batch size first (with gradient accumulation), then sequence length.",
    change="half the batch",
)
RECOMPUTE = Advice(
    "Recompute activations instead of keeping them.", "model.gradient_checkpointing_enable()", change="checkpointing"
)
PRECISION = Advice("Compute in bfloat16.", 'torch.autocast("cuda", dtype=torch.bfloat16)', change="bfloat16 autocast")
BUDGET = Advice("Let brim move tensors that do not fit to RAM or disk.", "brim run --vram 90% train.py")
GENERATE = Advice("Let brim move tensors that do not fit to RAM or disk.", "brim generate MODEL --vram 6GiB")

FUSED = Advice(
    "Use a fused optimizer: foreach allocates temporaries as large as the parameters.",
    "torch.optim.AdamW(..., fused=True)",
    change="fused optimizer",
)
ONE_BY_ONE = Advice(
    "Or update one tensor at a time: temporaries are then as large as one tensor.",
    "torch.optim.AdamW(..., foreach=False)",
    change="foreach=False",
)
STATES_IN_8_BITS = Advice(
    "Keep the optimizer's states in 8 bits.", "bitsandbytes.optim.AdamW8bit(...)", change="states in 8 bits"
)
STATES_IN_RAM = Advice(
    "Or keep them in RAM, or share them between GPUs (ZeRO, FSDP).", "bitsandbytes.optim.PagedAdamW8bit(...)"
)
_NO_ACTIVATIONS = Advice(
    "A smaller batch would not help: activations are gone when the optimizer's step begins.", helps=False
)
CHUNKED_LOSS = Advice(
    "Compute the loss in chunks, or fused with the last layer: the logits are then never all in memory.",
    "from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss",
    change="loss in chunks",
)
_LOGITS_IN_16_BITS = Advice(
    "Keep the logits in 16 bits: no .float() before the loss (the copy is twice their size).",
    change="logits in 16 bits",
)
_SHORTER = Advice(
    "Shorten the sequence, or use fewer sequences a step: logits grow with tokens times vocabulary.",
    change="half the batch",
)
_LABELS_ONLY = Advice(
    "Compute logits only where there are labels, or (generation) for the last token.", "model(..., logits_to_keep=1)"
)

WEIGHTS_IN_16_BITS = Advice(
    "Load the weights in 16 bits, or quantized to 4.",
    "from_pretrained(..., dtype=torch.bfloat16)",
    change="weights in 16 bits",
)
DETACH = Advice(
    "Keep numbers instead of tensors: a tensor kept over steps keeps its autograd graph and activations.",
    "losses.append(loss.item())  # or loss.detach(); no retain_graph=True",
)

BY_PHASE: dict[Phase, tuple[Advice, ...]] = {
    Phase.LOADING: (
        WEIGHTS_IN_16_BITS,
        Advice(
            "Load checkpoints into RAM first: on the GPU they are a second copy of the model.",
            'torch.load(..., map_location="cpu")',
            change="checkpoints to the CPU",
        ),
        Advice("Divide the weights between GPUs and RAM.", 'from_pretrained(..., device_map="auto")'),
        GENERATE,
    ),
    Phase.FORWARD: (SMALLER, RECOMPUTE, PRECISION, BUDGET),
    Phase.BACKWARD: (SMALLER, RECOMPUTE, PRECISION, BUDGET),
    Phase.ATTENTION: (
        Advice(
            "Use fused attention: scores of all pairs of tokens are then never all in memory.",
            'from_pretrained(..., attn_implementation="sdpa")',
            change="fused attention",
        ),
        Advice("Shorten the sequence: the scores grow with its square."),
        RECOMPUTE,
        SMALLER,
    ),
    Phase.LOSS: (CHUNKED_LOSS, _LOGITS_IN_16_BITS, _SHORTER, _LABELS_ONLY),
    Phase.STATES: (STATES_IN_8_BITS, STATES_IN_RAM, FUSED, _NO_ACTIVATIONS),
    Phase.OPTIMIZER: (FUSED, ONE_BY_ONE, STATES_IN_8_BITS, STATES_IN_RAM, _NO_ACTIVATIONS),
    Phase.EVALUATION: (
        Advice("Evaluate fewer samples at once.", "per_device_eval_batch_size=1", change="half the batch"),
        Advice(
            "Move predictions to RAM after each batch, or keep only what the metric needs, not logits.",
            "eval_accumulation_steps=1, preprocess_logits_for_metrics=...",
            change="outputs to the CPU",
        ),
        Advice(
            "Turn gradients off, so that nothing is kept for a backward pass.",
            "with torch.inference_mode():",
            change="no gradients in evaluation",
        ),
    ),
    Phase.GENERATION: (
        Advice(
            "Generate fewer tokens, or fewer sequences at once: the KV cache grows with both.",
            change="half the batch",
        ),
        Advice("Keep the KV cache in RAM.", 'model.generate(..., cache_implementation="offloaded")'),
        GENERATE,
    ),
    Phase.SAVING: (
        Advice(
            "Gather weights into RAM, or save shards.", "StateDictOptions(full_state_dict=True, cpu_offload=True)"
        ),
        Advice("Or let each rank save its own part.", "StateDictType.SHARDED_STATE_DICT"),
    ),
}

# A frame is a line of a traceback or of a recorded stack, or the source line below it. The first patterns are matched
# from the innermost frame outwards up to a module's forward pass, the second also outside of it.
_INNERMOST = (
    (
        Phase.STATES,
        r"_init_group|\binit_state\b|initialize_optimizer_states|state\[[^\]]*\]\s*=|init_optimizer_state",
    ),
    (
        Phase.OPTIMIZER,
        r"torch/optim/|_foreach_|_(?:multi|single)_tensor_|\b(?:bitsandbytes|apex|deepspeed)/\w*(?:optim|adam)"
        r"|(?:optim|adam|sgd|lion|muon|adafactor|grad_scaler)\w*\.py\W.*\bin (?:\w+\.)?step\b"
        r"|^step at \S*(?:optim|adam|sgd|lion|muon|adafactor)\w*\.py|optimizer\.step\(|distrib_optimizer|fused_adam"
        r"|zero/stage\w*\.py",
    ),
    (
        Phase.LOSS,
        r"cross_entropy|\bloss_utils\.py|log_softmax|logsumexp|nll_loss|logits\.float\(|logits\.to\(|Loss\.forward"
        r"|get_batch_logps|logprobs_from_logits|entropy_from_logits|per_token_logps",
    ),
    (Phase.ATTENTION, r"eager_attention|softmax\(\w*(?:attn|scores|attention)|matmul\((?:q|query)\w*, ?(?:k|key)"),
    (
        Phase.SAVING,
        r"save_checkpoint|\bsave_pretrained|_save_checkpoint|full_tensor\(|_gather_state|state_dict_utils",
    ),
    (
        Phase.LOADING,
        r"from_pretrained|load_state_dict|\bin (?:_apply|convert|cuda|to)\b|^(?:_apply|convert) at |safetensors"
        r"|load_file|model_loader|serialization\.py|_load_state_dict_into|modeling_utils\.py",
    ),
    (Phase.EVALUATION, r"nested_concat|pad_across_processes|nested_gather|gather_for_metrics"),
)
_ENCLOSING = (
    (Phase.LOSS, r"logits = [\w.]*(?:lm_head|embed_out|output)\("),
    (
        Phase.BACKWARD,
        r"_engine_run_backward|run_backward|torch/autograd/(?:__init__|graph)\.py|\.backward\("
        r"|\bin backward\b|^backward at ",
    ),
    (Phase.EVALUATION, r"evaluation_loop|prediction_step|\bin evaluate\b|validation_step|^evaluate at "),
    (Phase.GENERATION, r"generation/utils\.py|\.generate\(|\bin generate\b|^generate at |cache_utils\.py"),
)
_FORWARD = re.compile(r"_call_impl|\bin forward\b|^forward at |\.forward\(")
_INNERMOST_PATTERNS = tuple((phase, re.compile(text)) for phase, text in _INNERMOST)
_ENCLOSING_PATTERNS = tuple((phase, re.compile(text)) for phase, text in _ENCLOSING)
# A closure runs forward and backward inside of the optimizer's step.
_CLOSURE = re.compile(r"\bclosure\(|closure\.py|\bin closure\b|^closure at ")


def phase_of(frames: Iterable[str]) -> Phase | None:
    """Return the phase of a stack, given the innermost frame first; None if no frame shows it."""
    is_forward = False
    for line in frames:
        frame = line.replace("\\", "/").strip()
        if not is_forward:
            for phase, pattern in _INNERMOST_PATTERNS:
                if pattern.search(frame):
                    return phase
            is_forward = _FORWARD.search(frame) is not None
        for phase, pattern in _ENCLOSING_PATTERNS:
            if pattern.search(frame):
                return phase
        if _CLOSURE.search(frame):
            break
    return Phase.FORWARD if is_forward else None
