"""Models that are made from their configurations where a program loads what is not on this machine."""

import torch
from transformers import AutoConfig, Qwen3VLForConditionalGeneration

from brim.rehearsal import changes

TEXT = {
    "dtype": "bfloat16", "hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
    "rope_scaling": {"mrope_section": [4, 2, 2], "rope_type": "default"},
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}  # fmt: skip


def test_a_composite_model_is_made_in_the_type_of_its_text():
    config = AutoConfig.for_model("qwen3_vl", text_config=TEXT, vision_config=VISION)
    model = changes._build(Qwen3VLForConditionalGeneration, "vlm", {"config": config})
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
