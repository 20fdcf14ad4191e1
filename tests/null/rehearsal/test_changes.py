"""What a rehearsal changes in a program by itself: results stay, and what the program asked for gives way."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from brim.rehearsal.changes import HALF_BATCH, HALF_SEQUENCE, changed_arguments
from brim.report.phase import BY_PHASE


@pytest.mark.parametrize(
    ("change", "given", "made"),
    [
        (HALF_BATCH, ("--batch", "8", "--steps", "4"), ("--batch", "4", "--steps", "4")),
        (HALF_BATCH, ("--batch-size=8",), ("--batch-size=4",)),
        (HALF_BATCH, ("--per_device_train_batch_size", "3"), ("--per_device_train_batch_size", "1")),
        (HALF_BATCH, ("train.batch_size=2",), ("train.batch_size=1",)),
        (HALF_BATCH, ("--batch", "1"), ("--batch", "1")),
        (HALF_BATCH, ("--batch", "1", "--seq", "64"), ("--batch", "1", "--seq", "32")),
        (HALF_BATCH, ("--steps", "8", "--batch-norm", "2"), ("--steps", "8", "--batch-norm", "2")),
        (HALF_SEQUENCE, ("--max-seq-length", "2048"), ("--max-seq-length", "1024")),
        ("checkpointing", ("--batch", "8"), ("--batch", "8")),
    ],
)
def test_an_option_of_the_program_is_halved(change: str, given: tuple[str, ...], made: tuple[str, ...]) -> None:
    assert changed_arguments(change, given) == made


def test_every_change_that_an_advice_names_is_known() -> None:
    from brim.rehearsal import changes

    named = {advice.change for advices in BY_PHASE.values() for advice in advices if advice.change}
    assert named <= set(changes._CHANGES)


PROGRAMS = {
    "fused optimizer": """
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        assert optimizer.defaults["fused"] and not optimizer.defaults["foreach"]
    """,
    "foreach=False": """
        assert torch.optim.RMSprop(model.parameters()).defaults["foreach"] is False
    """,
    "checkpointing": """
        times = []
        model[0].register_forward_hook(lambda *_: times.append(1))
        model[0][0].register_forward_hook(lambda *_: times.append(2))
        model(torch.ones(3, 4)).sum().backward()
        assert times == [2, 1, 2], times  # what lies inside of a block runs again in the backward pass
    """,
    "no gradients in evaluation": """
        assert model(torch.ones(3, 4)).requires_grad
        assert not model.eval()(torch.ones(3, 4)).requires_grad
        assert torch.is_grad_enabled()
        try:
            model(torch.ones(3, 5))
        except RuntimeError:
            assert torch.is_grad_enabled()
    """,
    "outputs to the CPU": """
        seen = model.eval()(torch.ones(3, 4))
        assert seen.device.type == "cpu"
    """,
    "half the batch": """
        assert torch.utils.data.DataLoader(range(9), 4).batch_size == 2
        assert torch.utils.data.DataLoader(range(9), batch_size=4).batch_size == 2
    """,
    "logits in 16 bits": """
        logits = torch.ones(2, 9000, dtype=torch.bfloat16, requires_grad=True)
        assert logits.float() is logits
        assert torch.ones(2, 9, dtype=torch.bfloat16, requires_grad=True).float().dtype is torch.float32
    """,
    "loss in chunks": """
        torch.manual_seed(0)
        from torch.nn.functional import cross_entropy
        logits = torch.randn(600, 7, requires_grad=True)
        labels = torch.randint(0, 7, (600,))
        labels[::5] = -100
        for reduction in ("mean", "sum"):
            chunks = cross_entropy(logits, labels, reduction=reduction)
            (gradient,) = torch.autograd.grad(chunks, logits)
            whole = torch.nn.functional.nll_loss(logits.log_softmax(1), labels, reduction=reduction)
            (wanted,) = torch.autograd.grad(whole, logits)
            assert torch.allclose(chunks, whole) and torch.allclose(gradient, wanted)
    """,
}


@pytest.mark.thorough
@pytest.mark.parametrize("change", PROGRAMS)
def test_a_change_is_made_and_says_so(change: str) -> None:
    program = """
        import torch
        from brim.rehearsal import changes
        changes.apply([{change!r}])
        block = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
        model = torch.nn.Sequential(block(), block())
    """
    text = textwrap.dedent(program).format(change=change) + textwrap.dedent(PROGRAMS[change])
    end = f"\nassert changes.applied >= {{{change!r}}}, changes.applied\n"
    done = subprocess.run([sys.executable, "-P", "-c", text + end], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_what_there_is_nothing_to_change_in_is_not_said_to_be_changed() -> None:
    text = """
        import torch
        from brim.rehearsal import changes
        changes.apply(["checkpointing", "fused optimizer", "half the batch"])
        torch.nn.Linear(4, 4)(torch.ones(3, 4)).sum().backward()
        torch.utils.data.DataLoader(range(9))
        assert not changes.applied
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_copies_of_logits_that_a_library_makes_stay() -> None:
    text = """
        import torch, types
        from brim.rehearsal import changes
        changes.apply(["logits in 16 bits"])
        library = types.ModuleType("accelerate.utils.operations")
        exec("def convert(tensor):\\n    return tensor.float()", vars(library))
        logits = torch.ones(2, 9000, dtype=torch.bfloat16, requires_grad=True)
        assert library.convert(logits).dtype is torch.float32 and not changes.applied
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
