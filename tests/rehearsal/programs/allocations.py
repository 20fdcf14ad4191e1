"""What the allocator did in steps of three models, with whole numbers computed if BRIM_REHEARSAL_VALUES says so."""

import torch
import transformers.masking_utils
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

# The one branch on values in these steps: without values it goes wrong, and another step would be compared.
transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None


def llama():
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=5000,
    )
    return LlamaForCausalLM(config)


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=3, n_head=4, vocab_size=5000, eos_token_id=1))


def vit():
    config = ViTConfig(hidden_size=192, num_hidden_layers=3, num_attention_heads=3, intermediate_size=384)
    return ViTForImageClassification(config)


def loss_of(model):
    if isinstance(model, ViTForImageClassification):
        return model(pixel_values=torch.randn(4, 3, 224, 224).cuda(), labels=torch.arange(4).cuda()).loss
    tokens = torch.randint(0, 5000, (4, 256)).cuda()
    return model(input_ids=tokens, labels=tokens).loss


def events(make, mixed):
    torch.cuda.memory._record_memory_history(context=None, max_entries=10**6)
    model = make().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=mixed)
    scaler = torch.amp.GradScaler("cuda", enabled=mixed)
    for _ in range(3):
        # A cache of casts is freed in an order that changes from run to run.
        with torch.autocast("cuda", torch.float16, enabled=mixed, cache_enabled=False):
            loss = loss_of(model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found = [[one["action"], one["size"]] for one in torch.cuda.memory._snapshot()["device_traces"][0]]
    torch.cuda.memory._record_memory_history(enabled=None)
    return {"events": found, "scale": scaler.get_scale() if mixed else None, "stepped": len(optimizer.state)}


result = {f"{make.__name__} {mixed}": events(make, mixed) for make in (llama, gpt2, vit) for mixed in (False, True)}
