"""Re-creates accelerate's text classification example with a small BERT on random tokens."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

set_seed(15)
config = BertConfig(
    vocab_size=300, hidden_size=160, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512,
    max_position_embeddings=32, num_labels=2,
)  # fmt: skip
rows = [{"input_ids": torch.randint(0, 300, (12,)), "labels": k % 2} for k in range(16)]
accelerator = Accelerator(cpu=not torch.cuda.is_available())
model = BertForSequenceClassification(config).to(accelerator.device)
optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-3)
train, test = DataLoader(rows, shuffle=True, batch_size=4), DataLoader(rows, batch_size=8)
schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=8)
model, optimizer, train, test, schedule = accelerator.prepare(model, optimizer, train, test, schedule)
for epoch in range(2):
    model.train()
    for step, batch in enumerate(train):
        loss = model(**batch).loss / 2
        accelerator.backward(loss)
        if step % 2 == 1:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        print(epoch, step, loss.item())
    model.eval()
    found = []
    for batch in test:
        with torch.no_grad():
            logits = model(**batch).logits
        found += accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))[0].tolist()
    print(f"epoch {epoch}:", found)
