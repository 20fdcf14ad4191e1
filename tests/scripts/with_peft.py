"""LoRA adapters of peft on a small Llama, trained by a loop of one's own and merged at the end."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(13)
config = LlamaConfig(
    vocab_size=512, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(4):
    ids = torch.randint(0, 512, (2, 12))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
with torch.no_grad():
    print(model(input_ids=ids).logits.double().sum().item())
