"""Parameters, output sizes and feature maps by layer type. Names and defaults are those of ``torch.nn``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from brim.errors import UsageError
from brim.predict.formulas.result import Result, at_least_one, divides, item_bytes, result, written_bytes

Size = int | Sequence[int]


def linear(in_features: int, out_features: int, *, bias: bool = True) -> Result:
    """Parameters of ``nn.Linear``: weight (out, in) and bias (out)."""
    at_least_one(in_features=in_features, out_features=out_features)
    weight = in_features * out_features
    return _weights(f"{in_features:,} x {out_features:,}", weight, out_features if bias else 0)


def bilinear(in1_features: int, in2_features: int, out_features: int, *, bias: bool = True) -> Result:
    """Parameters of ``nn.Bilinear``: weight (out, in1, in2) and bias (out)."""
    at_least_one(in1_features=in1_features, in2_features=in2_features, out_features=out_features)
    text = f"{out_features:,} x {in1_features:,} x {in2_features:,}"
    return _weights(text, out_features * in1_features * in2_features, out_features if bias else 0)


def conv(in_channels: int, out_channels: int, kernel_size: Size, *, groups: int = 1, bias: bool = True) -> Result:
    """Parameters of ``nn.Conv1d/2d/3d``: weight (out, in / groups, *kernel) and bias (out).

    ``kernel_size`` has one number per dimension: ``3`` for Conv1d, ``(3, 3)`` for Conv2d.
    """
    kernel = _sizes(kernel_size)
    divides("groups", groups, in_channels=in_channels, out_channels=out_channels)
    weight = out_channels * (in_channels // groups) * math.prod(kernel)
    inputs = f"{in_channels:,}" if groups == 1 else f"{in_channels:,} / {groups}"
    return _weights(f"{out_channels:,} x {inputs} x {_times(kernel)}", weight, out_channels if bias else 0)


def conv_transpose(
    in_channels: int, out_channels: int, kernel_size: Size, *, groups: int = 1, bias: bool = True
) -> Result:
    """Parameters of ``nn.ConvTranspose1d/2d/3d``: weight (in, out / groups, *kernel) and bias (out)."""
    kernel = _sizes(kernel_size)
    divides("groups", groups, in_channels=in_channels, out_channels=out_channels)
    weight = in_channels * (out_channels // groups) * math.prod(kernel)
    outputs = f"{out_channels:,}" if groups == 1 else f"{out_channels:,} / {groups}"
    return _weights(f"{in_channels:,} x {outputs} x {_times(kernel)}", weight, out_channels if bias else 0)


def batch_norm(num_features: int, *, affine: bool = True) -> Result:
    """Parameters of ``nn.BatchNorm*`` and ``nn.InstanceNorm*(affine=True)``: weight and bias (features)."""
    at_least_one(num_features=num_features)
    return _scale_and_shift(num_features, weight=affine, bias=affine)


def batch_norm_buffer_bytes(num_features: int, *, dtype: str = "float32") -> Result:
    """Bytes of the buffers of ``nn.BatchNorm*``: running mean and variance, and an int64 counter."""
    at_least_one(num_features=num_features)
    count = 2 * num_features * item_bytes(dtype) + 8
    return result(count, "B", f"2 x {num_features:,} x {written_bytes(dtype)} + 8 B of counter")


def layer_norm(normalized_shape: Size, *, elementwise_affine: bool = True, bias: bool = True) -> Result:
    """Parameters of ``nn.LayerNorm``: weight and bias of the normalized shape."""
    size = math.prod(_sizes(normalized_shape))
    return _scale_and_shift(size, weight=elementwise_affine, bias=elementwise_affine and bias)


def rms_norm(normalized_shape: Size, *, elementwise_affine: bool = True) -> Result:
    """Parameters of ``nn.RMSNorm``: one weight of the normalized shape."""
    return _scale_and_shift(math.prod(_sizes(normalized_shape)), weight=elementwise_affine, bias=False)


def group_norm(num_groups: int, num_channels: int, *, affine: bool = True) -> Result:
    """Parameters of ``nn.GroupNorm``: weight and bias (channels); the groups share nothing."""
    divides("num_groups", num_groups, num_channels=num_channels)
    return _scale_and_shift(num_channels, weight=affine, bias=affine)


def embedding(num_embeddings: int, embedding_dim: int) -> Result:
    """Parameters of ``nn.Embedding`` and ``nn.EmbeddingBag``."""
    at_least_one(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
    return _weights(f"{num_embeddings:,} x {embedding_dim:,}", num_embeddings * embedding_dim, 0)


def multihead_attention(
    embed_dim: int,
    *,
    kdim: int | None = None,
    vdim: int | None = None,
    bias: bool = True,
    add_bias_kv: bool = False,
) -> Result:
    """Parameters of ``nn.MultiheadAttention``: query, key, value and output projections. Heads do not matter."""
    at_least_one(embed_dim=embed_dim)
    inputs = (embed_dim, kdim or embed_dim, vdim or embed_dim, embed_dim)
    weight = embed_dim * sum(inputs)
    extra = (4 * embed_dim if bias else 0) + (2 * embed_dim if add_bias_kv else 0)
    return _weights(f"{embed_dim:,} x ({' + '.join(f'{n:,}' for n in inputs)})", weight, extra)


def recurrent(
    kind: str,
    input_size: int,
    hidden_size: int,
    *,
    num_layers: int = 1,
    bias: bool = True,
    bidirectional: bool = False,
    proj_size: int = 0,
) -> Result:
    """Parameters of ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` (``kind`` in lower case).

    Per layer and direction: gates x hidden x (input + output) weights and two biases of gates x hidden; the layers
    above the first read the outputs of both directions. An LSTM's ``proj_size`` adds a (proj, hidden) projection.
    """
    gates = {"lstm": 4, "gru": 3, "rnn": 1}.get(kind)
    if gates is None:
        raise UsageError(f"The recurrent layer {kind!r} was asked for.", "Known are lstm, gru and rnn.")
    if proj_size and kind != "lstm":
        raise UsageError(f"proj_size = {proj_size} was given for {kind}.", "Only an LSTM has a projection.")
    at_least_one(input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
    directions, output = 2 if bidirectional else 1, proj_size or hidden_size
    total, lines = 0, []
    for layer in range(num_layers):
        inputs = input_size if layer == 0 else output * directions
        one = gates * hidden_size * (inputs + output) + proj_size * hidden_size + 2 * gates * hidden_size * bias
        total += directions * one
        text = f"{gates} x {hidden_size:,} x ({inputs:,} + {output:,}{' + 2' * bias})"
        text += f" + {proj_size:,} x {hidden_size:,}" if proj_size else ""
        lines.append(f"{directions} x ({text})" if bidirectional else text)
    return result(total, "parameters", " + ".join(lines))


def conv_output(size: int, kernel_size: int, *, stride: int = 1, padding: int | str = 0, dilation: int = 1) -> Result:
    """Elements along one dimension after a convolution. ``padding`` may be ``"same"`` (stride 1) or ``"valid"``."""
    at_least_one(size=size, kernel_size=kernel_size, stride=stride, dilation=dilation)
    reach = dilation * (kernel_size - 1)
    both = reach if padding == "same" else 0 if padding == "valid" else 2 * _number(padding)
    if padding == "same" and stride != 1:
        raise UsageError(f"padding='same' was given with stride {stride}.", "PyTorch has it for stride 1 only.")
    out = (size + both - reach - 1) // stride + 1
    text = f"({size} + {both} - {dilation} x ({kernel_size} - 1) - 1) / {stride} + 1"
    return _positive(out, text, size=size, kernel_size=kernel_size)


def conv_transpose_output(
    size: int, kernel_size: int, *, stride: int = 1, padding: int = 0, output_padding: int = 0, dilation: int = 1
) -> Result:
    """Elements along one dimension after a transposed convolution."""
    at_least_one(size=size, kernel_size=kernel_size, stride=stride, dilation=dilation)
    out = (size - 1) * stride - 2 * padding + dilation * (kernel_size - 1) + output_padding + 1
    text = f"({size} - 1) x {stride} - 2 x {padding} + {dilation} x ({kernel_size} - 1) + {output_padding} + 1"
    return _positive(out, text, size=size, kernel_size=kernel_size)


def pool_output(
    size: int,
    kernel_size: int,
    *,
    stride: int | None = None,
    padding: int = 0,
    dilation: int = 1,
    ceil_mode: bool = False,
) -> Result:
    """Elements along one dimension after pooling; ``stride`` is the kernel by default.

    With ``ceil_mode`` the last window must still start inside the input or its left padding
    (PyTorch ``aten/src/ATen/native/Pool.h``).
    """
    step = stride or kernel_size
    at_least_one(size=size, kernel_size=kernel_size, stride=step, dilation=dilation)
    span = size + 2 * padding - dilation * (kernel_size - 1) - 1
    out = -(-span // step) + 1 if ceil_mode else span // step + 1
    if ceil_mode and (out - 1) * step >= size + padding:
        out -= 1
    text = f"({size} + 2 x {padding} - {dilation} x ({kernel_size} - 1) - 1) / {step} + 1"
    return _positive(out, text + (" rounded up" if ceil_mode else ""), size=size, kernel_size=kernel_size)


def feature_map(batch: int, channels: int, sizes: Sequence[int], *, dtype: str = "float32") -> Result:
    """Bytes of one feature map (batch, channels, *sizes)."""
    at_least_one(batch=batch, channels=channels)
    elements = batch * channels * math.prod(sizes)
    text = f"{batch} x {channels:,} channels x {_times(sizes)} x {written_bytes(dtype)}"
    return result(elements * item_bytes(dtype), "B", text)


def _weights(text: str, weight: int, bias: int) -> Result:
    return result(weight + bias, "parameters", text + (f" + {bias:,}" if bias else ""))


def _scale_and_shift(size: int, *, weight: bool, bias: bool) -> Result:
    count = int(weight) + int(bias)
    return result(count * size, "parameters", f"{count} x {size:,}")


def _sizes(size: Size) -> tuple[int, ...]:
    return (size,) if isinstance(size, int) else tuple(size)


def _times(sizes: Sequence[int]) -> str:
    return " x ".join(f"{n:,}" for n in sizes)


def _number(padding: int | str) -> int:
    if isinstance(padding, str):
        raise UsageError(f"padding={padding!r} was given.", "It is a number, 'same' or 'valid'.")
    return padding


def _positive(out: int, text: str, **sizes: int) -> Result:
    if out < 1:
        raise UsageError(f"The output size for {sizes} was asked for.", f"{text} is {out}: the input is too small.")
    return result(out, "elements", text)
