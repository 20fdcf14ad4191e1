"""A rank's training step under Megatron-LM with Transformer Engine, written as a trace."""
