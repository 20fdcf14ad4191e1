"""Plans for other engines: the flags or the configuration with which they run a model inside the budgets."""
