"""Training data: JSONL, conversations and text, tokenised as it is needed."""
