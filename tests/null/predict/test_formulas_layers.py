"""Layer formulas against ``torch.nn`` itself."""

import pytest
import torch
from torch import nn

from brim.errors import UsageError
from brim.predict import formulas
from brim.predict.formulas import layers

PARAMETERS = [
    (layers.linear(30, 20), lambda: nn.Linear(30, 20)),
    (layers.linear(30, 20, bias=False), lambda: nn.Linear(30, 20, bias=False)),
    (layers.bilinear(3, 4, 5), lambda: nn.Bilinear(3, 4, 5)),
    (layers.conv(6, 9, 5), lambda: nn.Conv1d(6, 9, 5)),
    (layers.conv(6, 9, (3, 5), groups=3, bias=False), lambda: nn.Conv2d(6, 9, (3, 5), groups=3, bias=False)),
    (layers.conv(6, 12, (3, 3, 3), groups=6), lambda: nn.Conv3d(6, 12, 3, groups=6)),
    (layers.conv_transpose(6, 9, 5), lambda: nn.ConvTranspose1d(6, 9, 5)),
    (layers.conv_transpose(6, 9, (4, 2), groups=3), lambda: nn.ConvTranspose2d(6, 9, (4, 2), groups=3)),
    (layers.batch_norm(7), lambda: nn.BatchNorm2d(7)),
    (layers.batch_norm(7, affine=False), lambda: nn.BatchNorm1d(7, affine=False)),
    (layers.layer_norm((3, 7)), lambda: nn.LayerNorm((3, 7))),
    (layers.layer_norm(7, bias=False), lambda: nn.LayerNorm(7, bias=False)),
    (layers.rms_norm(7), lambda: nn.RMSNorm(7)),
    (layers.group_norm(4, 8), lambda: nn.GroupNorm(4, 8)),
    (layers.embedding(100, 16), lambda: nn.Embedding(100, 16)),
    (layers.multihead_attention(16), lambda: nn.MultiheadAttention(16, 4)),
    (
        layers.multihead_attention(16, kdim=5, vdim=7, add_bias_kv=True),
        lambda: nn.MultiheadAttention(16, 2, kdim=5, vdim=7, add_bias_kv=True),
    ),
    (layers.multihead_attention(16, bias=False), lambda: nn.MultiheadAttention(16, 2, bias=False)),
    (layers.recurrent("lstm", 5, 8), lambda: nn.LSTM(5, 8)),
    (
        layers.recurrent("lstm", 5, 8, num_layers=3, bidirectional=True, proj_size=3),
        lambda: nn.LSTM(5, 8, 3, bidirectional=True, proj_size=3),
    ),
    (layers.recurrent("gru", 5, 8, num_layers=2, bias=False), lambda: nn.GRU(5, 8, 2, bias=False)),
    (layers.recurrent("rnn", 5, 8, bidirectional=True), lambda: nn.RNN(5, 8, bidirectional=True)),
]


@pytest.mark.parametrize(("found", "build"), PARAMETERS)
def test_parameters_are_those_of_torch(found, build):
    assert found.value == sum(p.numel() for p in build().parameters())


def test_batch_norm_buffers():
    module = nn.BatchNorm2d(7)
    assert layers.batch_norm_buffer_bytes(7).value == sum(b.nbytes for b in module.buffers())


@pytest.mark.parametrize("size", [7, 8, 31, 32, 224])
@pytest.mark.parametrize("kernel", [1, 2, 3, 7])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
def test_sizes_after_convolution_and_pooling(size, kernel, stride, dilation):
    padding = kernel // 2
    if size + 2 * padding < dilation * (kernel - 1) + 1:
        pytest.skip("torch has no output for it either")
    x = torch.empty(1, 1, size, device="meta")
    conv = nn.Conv1d(1, 1, kernel, stride, padding, dilation, device="meta")
    found = layers.conv_output(size, kernel, stride=stride, padding=padding, dilation=dilation)
    assert found.value == conv(x).shape[-1]
    back = nn.ConvTranspose1d(
        1, 1, kernel, stride, padding, stride - 1, dilation=max(dilation, stride), device="meta"
    )
    found = layers.conv_transpose_output(
        size, kernel, stride=stride, padding=padding, output_padding=stride - 1, dilation=max(dilation, stride)
    )
    assert found.value == back(x).shape[-1]
    for ceil_mode in (False, True):
        pool = nn.MaxPool1d(kernel, stride, padding, dilation, ceil_mode=ceil_mode)
        found = layers.pool_output(
            size, kernel, stride=stride, padding=padding, dilation=dilation, ceil_mode=ceil_mode
        )
        assert found.value == pool(x).shape[-1]


def test_padding_by_name():
    assert layers.conv_output(10, 4, padding="same", dilation=2).value == 10
    assert layers.conv_output(10, 4, padding="valid").value == 7
    with pytest.raises(UsageError, match="stride 1 only"):
        layers.conv_output(10, 4, padding="same", stride=2)


def test_feature_map():
    found = layers.feature_map(8, 64, (112, 112), dtype="bfloat16")
    assert found.value == torch.empty(8, 64, 112, 112, dtype=torch.bfloat16, device="meta").nbytes
    assert found.arithmetic == "8 x 64 channels x 112 x 112 x 2 B = 12,845,056 B"


@pytest.mark.parametrize(
    "call",
    [
        lambda: layers.linear(0, 3),
        lambda: layers.conv(5, 4, 3, groups=2),
        lambda: layers.conv_output(2, 5),
        lambda: layers.recurrent("gru", 3, 4, proj_size=2),
        lambda: layers.recurrent("qrnn", 3, 4),
        lambda: layers.conv_output(5, 3, padding="reflect"),
    ],
)
def test_impossible_layers_are_usage_errors(call):
    with pytest.raises(UsageError):
        call()


def test_parameters_by_type_names_each_shape_and_sums_to_the_model():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 50, bias=False))
    model[3].weight = model[0].weight  # tied: counted with the embedding
    found = formulas.parameters_by_type(model)
    assert {name: line.arithmetic for name, line in found.items()} == {
        "Embedding [[50, 8]]": "1 x (50 x 8) = 400 parameters",
        "Linear [[8, 8], [8]]": "2 x (8 x 8 + 8) = 144 parameters",
    }
    assert sum(line.value for line in found.values()) == sum(p.numel() for p in model.parameters())
