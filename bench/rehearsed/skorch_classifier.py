"""skorch: a network as a scikit-learn classifier on the GPU."""

import numpy as np
from skorch import NeuralNetClassifier
from torch import nn

rows, labels = np.random.rand(2048, 64).astype(np.float32), np.random.randint(0, 4, 2048)
module = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, 4))
model = NeuralNetClassifier(module, criterion=nn.CrossEntropyLoss, max_epochs=3, lr=0.1, device="cuda")
model.fit(rows, labels)
print(model.predict_proba(rows[:4]).shape)
