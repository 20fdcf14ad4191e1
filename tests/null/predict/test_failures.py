"""What fails in a trace says so with the line of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import brim
from brim.errors import UnsupportedError

HERE = r"test_failures\.py:\d+"


def on_cuda(step: Callable[[], Any], target: str = "cuda") -> brim.Trace:
    return brim.trace(lambda: step, steps=1, target=target)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_operation_that_fails_names_the_line(target: str) -> None:
    def step() -> None:
        torch.ones(2, 3) @ torch.ones(2, 3)

    with pytest.raises(UnsupportedError, match=rf"reduction dim.*\nCalled at .*{HERE}: torch\.ones") as refused:
        on_cuda(step, target)
    assert isinstance(refused.value.__cause__, RuntimeError)


def test_one_that_autograd_refuses_names_the_line() -> None:
    def step() -> None:
        weight = torch.ones(3, device="cuda", requires_grad=True)
        torch.nn.functional.nll_loss(torch.ones(2, 3, device="cuda"), torch.tensor([0, 1]).cuda(), weight)

    with pytest.raises(UnsupportedError, match=rf"not differentiable(.|\n)*{HERE}: torch\.nn"):
        on_cuda(step)


def test_one_that_fails_in_the_backward_pass_names_the_line_that_began_it() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, source: torch.Tensor) -> torch.Tensor:
            return source.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return torch.ones(7, device="cuda")

    def step() -> None:
        Broken.apply(torch.ones(3, device="cuda", requires_grad=True)).sum().backward()

    with pytest.raises(UnsupportedError, match=rf"(.|\n)*{HERE}: Broken"):
        on_cuda(step)


def test_one_that_reads_values_in_c_names_the_line() -> None:
    def step() -> None:
        unknown = torch.randn(2, device="cuda").long().cpu()
        torch.ops.aten.tensor_split.tensor_indices_or_sections(torch.ones(6), unknown)

    with pytest.raises(UnsupportedError, match=rf"reads the values of a tensor(.|\n)*{HERE}"):
        on_cuda(step)


def test_what_else_a_program_raises_is_raised_as_it_is() -> None:
    def step() -> None:
        torch.ones(3, device="cuda")
        raise RuntimeError("its own")

    with pytest.raises(RuntimeError, match="its own"):
        on_cuda(step)


def test_a_program_sees_the_error_that_it_expects() -> None:
    def step() -> None:
        try:
            torch.ones(2, 3, device="cuda") @ torch.ones(2, 3, device="cuda")
        except RuntimeError:
            torch.ones(1000, device="cuda")

    assert max(storage.bytes for storage in on_cuda(step).storages) == 4000


def test_a_kernel_that_is_compiled_from_text_makes_results_of_the_inputs_shape() -> None:
    sums = torch.cuda.jiterator._create_multi_output_jit_fn(
        "template <typename T> void f(T x, T y, T& sum, T& difference) { sum = x + y; difference = x - y; }", 2
    )
    made = on_cuda(lambda: sums(torch.ones(30, 1, device="cuda"), torch.ones(40, device="cuda")))
    assert [storage.bytes for storage in made.storages] == [120, 160, 4800, 4800]


def test_what_functions_of_pytorch_make_where_their_input_lies_lies_there() -> None:
    def step() -> None:
        torch.unravel_index(torch.arange(1000, device="cuda"), (40, 25))

    made = on_cuda(step)
    assert sorted(storage.bytes for storage in made.storages)[-2:] == [16_000, 16_000]


def test_a_formula_that_broadcasts_does_not_write_in_place() -> None:
    def step() -> None:
        base = torch.rand(5, 1, device="cuda", requires_grad=True)
        exponent = torch.rand(5, 5, device="cuda", requires_grad=True)
        (base**exponent).sum().backward()
        torch.mvlgamma(torch.rand(5, 5, device="cuda", requires_grad=True) + 3, 2).sum().backward()

    on_cuda(step)


def test_attention_kernels_count_heads_as_heads() -> None:
    def step() -> None:
        query, key, value = (torch.rand(2, rows, 4, 8, device="cuda") for rows in (16, 32, 32))
        torch.ops.aten._efficient_attention_forward(query, key, value, None, None, None, None, None, 0.0, 0)

    (flops,) = [op.flops for op in on_cuda(step).ops if "attention" in op.name]
    assert flops == 2 * 2 * 4 * 16 * 32 * 8 * 2
