"""A model over several ranks: data, tensor, sequence, context, expert and pipeline parallelism."""
