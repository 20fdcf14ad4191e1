"""Choose a training's techniques: search, predict and prove."""
