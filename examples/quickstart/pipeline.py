"""The quick start of EPL's manual in PyTorch, for one device."""

from itertools import islice

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import epl

epl.init(epl.Config({"pipeline.num_micro_batch": 5}))

# Define model
np.random.seed(0)
torch.manual_seed(0)
num_x = np.random.randint(0, 10, (500, 20)).astype(dtype=np.float32)
num_y = np.random.randint(0, 10, 500).astype(dtype=np.int64)
loader = DataLoader(TensorDataset(torch.from_numpy(num_x), torch.from_numpy(num_y)), batch_size=10)
model = nn.Sequential(nn.Linear(20, 2), nn.Linear(2, 10))
epl.annotate(epl.replicate(1, name="stage_0"), model[0])
epl.annotate(epl.replicate(1, name="stage_1"), model[1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
model, optimizer, loader = epl.parallelize(model, optimizer, loader)

# Training
for step, (x, labels) in enumerate(islice(loader, 10), start=1):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), labels)
    loss.backward()
    optimizer.step()
    print(f"Iteration {step} , Loss: {loss.item()} .")
print("Train Finished.")
