"""How a model is trained: the techniques to choose from, searched, predicted and proved."""
