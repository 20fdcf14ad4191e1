"""Which of oneDNN's kernels a CPU's instructions and a convolution's shape lead to, on whatever machine."""

from dataclasses import replace

import pytest
import torch

from brim.predict.lowering import cpu_convolution_avx512 as avx512
from brim.predict.lowering.cpu_convolution_direct import Direct
from brim.predict.lowering.cpu_convolution_shape import lanes

pytestmark = pytest.mark.usefixtures("two_threads")

SPEECH = Direct(
    rank=2, batch=2, groups=1, inputs=1, outputs=32, source=(1, 1, 8000), result=(1, 1, 1599), kernel=(1, 1, 10),
    stride=(1, 1, 5), dilation=(1, 1, 1), before=(0, 0, 0),
)  # fmt: skip


@pytest.mark.parametrize(("most", "expected"), [("AVX2", 8), ("avx2_vnni", 8), ("AVX512_CORE", 16), ("", 16)])
def test_onednn_uses_what_the_processor_has_and_the_variable_allows(monkeypatch, most, expected):
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    assert lanes() == expected


def test_a_second_thread_sums_into_a_copy_of_its_own():
    copy = 32 * 10 + 32  # the weight and a bias, in float32
    expected = copy * 4 + 128 + 2 * 4096
    assert avx512.weight_scratchpad_bytes(SPEECH, has_bias=False, channels_last=False) == expected


def test_groups_take_the_widest_block_that_divides_them():
    grouped = replace(SPEECH, groups=2, inputs=12, outputs=24)
    assert [avx512.forward_block(replace(grouped, inputs=n)) for n in (48, 12, 3)] == [8, 4, 0]


def test_a_kernel_too_wide_to_unroll_is_left_to_columns():
    wide = replace(SPEECH, groups=4, inputs=48, outputs=48, source=(1, 1, 300), result=(1, 1, 301),
                   kernel=(1, 1, 64), stride=(1, 1, 1), before=(0, 0, 32))  # fmt: skip
    assert avx512.forward_block(wide) == avx512.source_block(wide) == 0
    assert not avx512.weight_taken(wide, channels_last=False)
