"""pytorch-tabnet: a classifier of tables, with early stopping."""

import numpy as np
from pytorch_tabnet.tab_model import TabNetClassifier

rows, labels = np.random.rand(4096, 32).astype(np.float32), np.random.randint(0, 3, 4096)
model = TabNetClassifier(device_name="cuda")
model.fit(rows, labels, eval_set=[(rows[:512], labels[:512])], max_epochs=2, batch_size=1024, virtual_batch_size=128)
print(model.predict(rows[:8]))
