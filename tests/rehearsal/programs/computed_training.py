"""Four steps of small models on the CPU and on the device, each operator of which is computed: their losses."""

import copy

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from brim.rehearsal.force import InForce

InForce.put("all")
torch.manual_seed(0)
llama = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=100,
)
gpt2 = GPT2Config(
    n_embd=64, n_layer=2, n_head=4, vocab_size=100, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, eos_token_id=1
)
models = {
    "llama": LlamaForCausalLM(llama),
    "gpt2": GPT2LMHeadModel(gpt2),
    "convolutions": torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(8, 8, 3, groups=8),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 10),
    ),
}


def losses(name, device, kind):
    model, drawn = copy.deepcopy(models[name]).to(device), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **{kind: True})
    found = []
    for _ in range(4):
        if name == "convolutions":
            images = torch.randn(4, 3, 12, 12, generator=drawn).to(device)
            loss = torch.nn.functional.cross_entropy(model(images), torch.arange(4, device=device))
        else:
            tokens = torch.randint(0, 100, (2, 16), generator=drawn).to(device)
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


result = {
    f"{name} {kind}": [losses(name, device, kind) for device in ("cpu", "cuda")]
    for name in models
    for kind in ("foreach", "fused")
}
