"""Plan a model's inference, and prove the plan."""
