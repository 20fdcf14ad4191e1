"""sentence-transformers: pairs of sentences, with negatives from the batch."""

import sys

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, models
from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
from sentence_transformers.losses import MultipleNegativesRankingLoss

words = models.Transformer(sys.argv[1], max_seq_length=64)
model = SentenceTransformer(modules=[words, models.Pooling(words.get_word_embedding_dimension())])
pairs = Dataset.from_dict({"anchor": ["the cat sat"] * 256, "positive": ["a dog ran to the mat"] * 256})
arguments = Arguments("out", per_device_train_batch_size=32, num_train_epochs=2, fp16=True, report_to="none")
trainer = SentenceTransformerTrainer(
    model=model, args=arguments, train_dataset=pairs, loss=MultipleNegativesRankingLoss(model)
)
trainer.train()
print(model.encode(["the cat sat", "a dog ran"]).shape)
