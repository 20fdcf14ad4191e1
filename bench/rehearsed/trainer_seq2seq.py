"""transformers' Seq2SeqTrainer: a small T5 in float32 with Adafactor, generating in evaluation."""

from datasets import Dataset
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

model = T5ForConditionalGeneration(T5Config(vocab_size=1000, num_layers=4, decoder_start_token_id=0, pad_token_id=0))
rows = Dataset.from_dict({"input_ids": [list(range(2, 34))] * 64, "labels": [list(range(2, 18))] * 64})
arguments = Seq2SeqTrainingArguments(
    "out", per_device_train_batch_size=16, max_steps=6, optim="adafactor", predict_with_generate=True,
    generation_max_length=8, report_to="none",
)  # fmt: skip
trainer = Seq2SeqTrainer(model, arguments, train_dataset=rows, eval_dataset=rows)
trainer.train()
print(trainer.evaluate())
