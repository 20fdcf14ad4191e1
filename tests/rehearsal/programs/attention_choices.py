"""Which attention kernel PyTorch chooses, and which the trace says it does, for so many calls drawn at random."""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import torch

from brim.predict.lowering.cuda.attention import choose

_NAMES = ("math", "flash", "efficient", "cudnn")  # at::SDPBackend
_DTYPES = (torch.float16, torch.bfloat16, torch.bfloat16, torch.float32, torch.float64)
_HEAD_SIZES = (1, 4, 8, 12, 36, 64, 64, 72, 96, 128, 160, 192, 200, 224, 256, 264, 512)
_LENGTHS = (0, 1, 2, 7, 16, 64, 65, 128)


def _tensor(size: tuple[int, ...], dtype: torch.dtype, draw: random.Random) -> torch.Tensor:
    layout = draw.choices(("whole", "heads last", "transposed", "packed", "shifted"), (5, 5, 1, 2, 1))[0]
    batch, heads, tokens, width = size
    if layout == "heads last":
        made = torch.empty(batch, tokens, heads, width, dtype=dtype, device="cuda").transpose(1, 2)
    elif layout == "transposed":
        made = torch.empty(batch, heads, width, tokens, dtype=dtype, device="cuda").transpose(2, 3)
    elif layout == "packed":
        made = torch.empty(batch, tokens, heads, 3 * width, dtype=dtype, device="cuda")[..., width : 2 * width]
        made = made.transpose(1, 2)
    elif layout == "shifted":
        made = torch.empty(batch, heads, tokens, width + 1, dtype=dtype, device="cuda")[..., 1:]
    else:
        made = torch.empty(size, dtype=dtype, device="cuda")
    return made.requires_grad_(draw.random() < 0.5)


def _mask(query: torch.Tensor, keys: int, draw: random.Random) -> torch.Tensor | None:
    if draw.random() < 0.4:
        return None
    batch, heads, tokens, _ = query.shape
    dtype = draw.choice((torch.bool, query.dtype, query.dtype))
    size = draw.choice(
        (
            (tokens, keys), (1, keys), (1, 1, tokens, keys), (batch, 1, tokens, keys), (batch, 1, 1, keys),
            (batch, heads, tokens, keys), (heads, tokens, keys), (1, heads, tokens, keys), (batch, heads, tokens, 1),
        )
    )  # fmt: skip
    made = torch.empty(size, dtype=dtype, device="cuda")
    layout = draw.choices(("whole", "expanded", "transposed", "cut"), (6, 2, 2, 1))[0]
    if layout == "expanded":
        made = made.expand(*size[:-2], tokens, keys) if size[-1] == 1 or size[-2] == 1 else made
    elif layout == "transposed":
        made = torch.empty(*size[:-2], size[-1], size[-2], dtype=dtype, device="cuda").transpose(-1, -2)
    elif layout == "cut":
        made = torch.empty(*size[:-1], size[-1] + 3, dtype=dtype, device="cuda")[..., : size[-1]]
    return made.requires_grad_() if dtype.is_floating_point and draw.random() < 0.3 else made


def _call(draw: random.Random) -> dict[str, Any]:
    dtype, width, heads = draw.choice(_DTYPES), draw.choice(_HEAD_SIZES), draw.choice((1, 2, 4, 6))
    batch, tokens = draw.choice((1, 2, 3)), draw.choice(_LENGTHS)
    keys = tokens if draw.random() < 0.5 else draw.choice(_LENGTHS)
    gqa = draw.random() < 0.3
    key_heads = draw.choice([n for n in (1, 2, 3, heads) if heads % n == 0]) if gqa else heads
    value_width = width if draw.random() < 0.8 else draw.choice(_HEAD_SIZES)
    query = _tensor((batch, heads, tokens, width), dtype, draw)
    return {
        "query": query,
        "key": _tensor((batch, key_heads, keys, width), dtype, draw),
        "value": _tensor((batch, key_heads, keys, value_width), dtype, draw),
        "mask": _mask(query, keys, draw),
        "dropout": draw.choice((0.0, 0.0, 0.1, 0.125, 0.5)),
        "causal": draw.random() < 0.3,
        "gqa": gqa,
    }


def _told(call: dict[str, Any]) -> dict[str, str]:
    return {
        name: f"{str(value.dtype)[6:]}{list(value.shape)} strides {list(value.stride())}"
        + (f" from {value.storage_offset()}" if value.storage_offset() else "")
        + (" grad" if value.requires_grad else "")
        if isinstance(value, torch.Tensor)
        else str(value)
        for name, value in call.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=3_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    capability = torch.cuda.get_device_capability()
    draw, differ, chosen = random.Random(options.seed), [], dict.fromkeys(_NAMES, 0)
    for _ in range(options.calls):
        call = _call(draw)
        if call["causal"]:
            call["mask"] = None
        with torch.set_grad_enabled(draw.random() < 0.7):
            arguments = (call["query"], call["key"], call["value"], call["mask"], call["dropout"], call["causal"])
            theirs = _NAMES[torch._fused_sdp_choice(*arguments, enable_gqa=call["gqa"])]
            ours = choose(*arguments, call["gqa"], capability)
        chosen[theirs] += 1
        if ours != theirs:
            differ.append({"pytorch": theirs, "trace": ours, "call": _told(call)})
    print(json.dumps({"chosen": chosen, "differ": differ}))


if __name__ == "__main__":
    main()
