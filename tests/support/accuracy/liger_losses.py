"""The preference and distillation losses of Liger-Kernel's benchmarks in plain PyTorch, as its test suite has them.

The heads of both providers lie on the GPU in the recorded runs, so ``other`` is held beside the one that is run.
Labels that the benchmark drew at random are drawn here as alternating where an index depends on them: which rows are
chosen does not change how many bytes are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Step = Callable[[], Any]


def _dtype(config: dict[str, Any]) -> torch.dtype:
    found: torch.dtype = getattr(torch, config["dtype"].removeprefix("torch."))
    return found


def _sequence_logps(logits: torch.Tensor, labels: torch.Tensor, ignored: int) -> torch.Tensor:
    """Mean log-probability of each sequence's labels: (batch, tokens, words) -> (batch,)."""
    mask = labels != ignored
    labels = torch.where(labels == ignored, 0, labels)
    per_token = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (per_token * mask).sum(-1) / mask.sum(-1)


class _Cpo(nn.Module):
    def __init__(self, hidden: int, words: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.lin = nn.Linear(hidden, words, bias=False, dtype=dtype)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        chosen = source.shape[0] // 2
        outputs = source @ self.lin.weight.t()
        logits = outputs.float()
        half = logits[:chosen]
        likelihood = nn.CrossEntropyLoss()(half.view(-1, half.shape[-1]), target[:chosen].view(-1))
        logps = _sequence_logps(logits, target, -100)
        margin = logps[:chosen] - logps[chosen:]
        losses = F.logsigmoid(0.1 * margin) * 1.0 + F.logsigmoid(-0.1 * margin) * 0.0
        return likelihood * 1.0 - losses.mean()


def cpo(config: dict[str, Any], size: int, mode: str) -> Step:
    """Contrastive preference optimization; ``size`` is the batch, its first half chosen."""
    hidden, words, dtype = config["H"], config["V"], _dtype(config)
    head, other = (_Cpo(hidden, words, dtype).to("cuda") for _ in range(2))
    source = torch.randn(size, config["T"], hidden, requires_grad=True, dtype=dtype, device="cuda")
    target = torch.randint(words, (size, config["T"]), dtype=torch.long, device="cuda")

    def full(held: nn.Module = other) -> None:
        loss = head(source, target)
        loss.backward()

    return full


class _Kto(nn.Module):
    def __init__(self, hidden: int, words: int, config: dict[str, Any]) -> None:
        super().__init__()
        self.lin, self.ref_lin = (
            nn.Linear(hidden, words, bias=config["bias"], dtype=_dtype(config)) for _ in range(2)
        )
        self.beta, self.ignored = config["beta"], config["ignore_index"]

    def _reference(
        self, source: torch.Tensor, target: torch.Tensor, preferred: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            logits = source @ self.ref_lin.weight.t()
            logits = logits + self.ref_lin.bias
            logps = _sequence_logps(logits, target, self.ignored)
            return logps[preferred], logps[~preferred]

    def _policy(
        self, source: torch.Tensor, target: torch.Tensor, preferred: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs = source @ self.lin.weight.t()
        outputs = outputs + self.lin.bias
        logits = outputs.float()
        logps = _sequence_logps(logits, target, self.ignored)
        return logps[preferred], logps[~preferred], logits[preferred], logits[~preferred]

    def forward(
        self, source: torch.Tensor, reference: torch.Tensor, target: torch.Tensor, preferred: torch.Tensor,
        divergence: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        chosen, rejected, chosen_logits, rejected_logits = self._policy(source, target, preferred)
        ref_chosen, ref_rejected = self._reference(reference, target, preferred)
        chosen_losses = 1 - F.sigmoid(self.beta * ((chosen - ref_chosen) - divergence))
        rejected_losses = 1 - F.sigmoid(self.beta * (divergence - (rejected - ref_rejected)))
        loss = torch.cat((chosen_losses, rejected_losses), 0).mean()
        return loss, chosen_logits.detach().sum(), rejected_logits.detach().sum()


def kto(config: dict[str, Any], size: int, mode: str) -> Step:
    """Kahneman-Tversky optimization with a reference model; ``size`` is the batch."""
    hidden, words, tokens, dtype = config["H"], config["V"], config["T"], _dtype(config)
    head, other = (_Kto(hidden, words, config).to("cuda") for _ in range(2))
    source = torch.randn(size, tokens, hidden, device="cuda", dtype=dtype)
    target = torch.randint(words, (size, tokens), dtype=torch.long, device="cuda")
    preferred = (torch.arange(size, device="cuda") % 2).to(torch.bool)
    divergence = torch.randn(1, device="cuda", dtype=dtype)
    reference = torch.randn(size, tokens, hidden, device="cuda", dtype=dtype)

    def full(held: nn.Module = other) -> None:
        loss = head(source, reference, target, preferred, divergence)[0]
        loss.backward()

    return full


class _Grpo(nn.Module):
    def __init__(self, hidden: int, words: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.lin, self.ref_lin = (nn.Linear(hidden, words, bias=False, dtype=dtype) for _ in range(2))

    def forward(
        self, source: torch.Tensor, chosen: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor,
        reference: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        # All in one function, as there: its variables hold both models' logits until it returns.
        logits = source @ self.lin.weight.t()
        logps = F.log_softmax(logits.float(), dim=-1)
        per_token = logps.gather(dim=-1, index=chosen.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            ref_logits = reference @ self.ref_lin.weight.t()
            ref_logps = F.log_softmax(ref_logits.float(), dim=-1)
            ref_per_token = ref_logps.gather(dim=-1, index=chosen.unsqueeze(-1)).squeeze(-1)
        ratio = torch.exp(per_token - per_token.detach())
        clipped = torch.clamp(ratio, 0.8, 1.2)
        losses = -torch.min(ratio * advantages.unsqueeze(1), clipped * advantages.unsqueeze(1))
        divergence = torch.exp(ref_per_token - per_token) - (ref_per_token - per_token) - 1.0
        losses = losses + 0.1 * divergence
        return (losses * mask).sum() / torch.clamp(mask.sum(), min=1.0)


def grpo(config: dict[str, Any], size: int, mode: str) -> Step:
    """Group-relative policy optimization per token; ``size`` is the batch."""
    hidden, words, tokens, dtype = config["H"], config["V"], config["T"], _dtype(config)
    head, other = (_Grpo(hidden, words, dtype).to("cuda") for _ in range(2))
    source = torch.randn(size, tokens, hidden, requires_grad=True, dtype=dtype, device="cuda")
    chosen = torch.randint(0, words, (size, tokens), dtype=torch.long, device="cuda")
    mask = torch.ones(size, tokens, device="cuda")
    advantages = torch.randn(size, dtype=dtype, device="cuda")
    reference = torch.randn(size, tokens, hidden, dtype=dtype, device="cuda")

    def full(held: nn.Module = other) -> None:
        loss = head(source, chosen, mask, advantages, reference)
        loss.backward()

    return full


def _divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Jensen-Shannon, between logits."""
    student_logps, teacher_logps = F.log_softmax(student, dim=-1), F.log_softmax(teacher, dim=-1)
    mean = 0.5 * student_logps.exp() + (1 - 0.5) * teacher_logps.exp()
    log_mean = mean.log()
    student_part = F.kl_div(log_mean, student_logps, reduction="batchmean", log_target=True)
    teacher_part = F.kl_div(log_mean, teacher_logps, reduction="batchmean", log_target=True)
    return 0.5 * teacher_part + (1 - 0.5) * student_part


def _cosine(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    student_norm, teacher_norm = F.normalize(student, p=2, dim=-1), F.normalize(teacher, p=2, dim=-1)
    similarity = F.cosine_similarity(student_norm, teacher_norm, dim=-1)
    loss = 1.0 * (1 - similarity)
    return loss.mean()


class _Distillation(nn.Module):
    """The student's hidden states are half as wide as the teacher's."""

    def __init__(self, hidden: int, words: int, dtype: torch.dtype, soft: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.student_lin = nn.Linear(hidden // 2, words, bias=False, dtype=dtype)
        self.teacher_lin = nn.Linear(hidden, words, bias=False, dtype=dtype)
        self.soft = soft

    def _logits(
        self, student: torch.Tensor, teacher: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        student_outputs = student.view(-1, student.shape[1]) @ self.student_lin.weight.t()
        with torch.no_grad():
            teacher_outputs = teacher.view(-1, teacher.shape[1]) @ self.teacher_lin.weight.t()
        student_logits = student_outputs.view(student.shape[0], -1).float()
        teacher_logits = teacher_outputs.view(teacher.shape[0], -1).float()
        return student_logits, teacher_logits, nn.CrossEntropyLoss()(student_logits, target)

    def forward(self, student: torch.Tensor, teacher: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        student_logits, teacher_logits, hard = self._logits(student, teacher, target)
        student_logits /= 1.0
        teacher_logits /= 1.0
        return 0.5 * hard + 0.5 * self.soft(student_logits, teacher_logits)


def _distillation(config: dict[str, Any], size: int, soft: Callable[..., torch.Tensor]) -> Step:
    hidden, words, dtype = config["H"], config["V"], _dtype(config)
    head, other = (_Distillation(hidden, words, dtype, soft).to("cuda") for _ in range(2))
    first = torch.rand(size, hidden // 2, device="cuda", dtype=dtype)
    student, unused = (first.detach().clone().requires_grad_(True) for _ in range(2))
    teacher = torch.rand(size, hidden, device="cuda", dtype=dtype)
    target = torch.randint(0, words, (size,), device="cuda", dtype=torch.long)

    def full(held: tuple[Any, ...] = (other, first, unused)) -> None:
        loss = head(student, teacher, target)
        loss.backward()

    return full


def distill_jsd(config: dict[str, Any], size: int, mode: str) -> Step:
    return _distillation(config, size, _divergence)


def distill_cosine(config: dict[str, Any], size: int, mode: str) -> Step:
    return _distillation(config, size, _cosine)
