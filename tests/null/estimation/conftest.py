"""Tiny models as folders with a config.json, as users have them."""

import json

import pytest

CONFIGS = {
    "llama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
        "max_position_embeddings": 256,
    },
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 4,
             "n_positions": 128, "vocab_size": 500},
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 500, "max_position_embeddings": 64},
    "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_ff": 128,
           "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 500, "decoder_start_token_id": 0,
           "pad_token_id": 0},
    "bart": {"model_type": "bart", "architectures": ["BartForConditionalGeneration"], "d_model": 64,
             "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
             "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 500, "max_position_embeddings": 64},
    "vit": {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32,
            "patch_size": 8},
    "resnet": {"model_type": "resnet", "architectures": ["ResNetForImageClassification"], "depths": [1, 1],
               "hidden_sizes": [16, 32], "embedding_size": 16, "layer_type": "basic"},
    "whisper": {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "d_model": 64,
                "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
                "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 500, "max_source_positions": 50,
                "max_target_positions": 32, "pad_token_id": 0, "decoder_start_token_id": 1},
    "moe": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64,
            "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "vocab_size": 500},
    "vlm": {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"],
            "text_config": {"model_type": "qwen3_vl_text", "dtype": "bfloat16", "hidden_size": 64, "head_dim": 16,
                            "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                            "num_key_value_heads": 2, "vocab_size": 500,
                            "rope_scaling": {"mrope_section": [4, 2, 2], "rope_type": "default"}},
            "vision_config": {"model_type": "qwen3_vl", "depth": 1, "hidden_size": 32, "intermediate_size": 64,
                              "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}},
    "unet": {"_class_name": "UNet2DConditionModel", "block_out_channels": [32, 64], "layers_per_block": 1,
             "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
             "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"], "cross_attention_dim": 32, "sample_size": 16,
             "in_channels": 4, "out_channels": 4, "attention_head_dim": 8, "norm_num_groups": 8},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """``folder("llama", hidden_size=128)``: the path of a folder with that config.json."""

    def make(name, **changes):
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
        return path

    return make
