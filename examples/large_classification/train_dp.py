"""Trains a ResNet and a classification layer over many classes. `--help` lists the options."""

from itertools import chain, islice, repeat

import torch
from margin import MarginHead
from options import open_images, parse
from resnet import BACKBONES
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import epl

epl.init()
epl.set_default_strategy(epl.replicate(epl.Env.get().cluster.total_gpu_num))
options = parse(__doc__)
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = BACKBONES[options.backbone]()
        self.head = (MarginHead if options.margin else nn.Linear)(self.backbone.features, options.num_classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        features = self.backbone(images)
        return self.head(features, labels) if options.margin else self.head(features)


images, held_out_images = open_images(options)
loader = DataLoader(images, options.batch_size, shuffle=True, drop_last=True, num_workers=options.workers)
held_out = DataLoader(held_out_images, options.batch_size, num_workers=options.workers)
model = Classifier().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=1e-4)
model, optimizer, loader, held_out = epl.parallelize(model, optimizer, loader, held_out)

for step, (x, y) in enumerate(islice(chain.from_iterable(repeat(loader)), options.steps), start=1):
    x, y = x.to(device), y.to(device)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x, y), y)
    loss.backward()
    optimizer.step()
    if step % max(1, options.steps // 20) == 0 or step == options.steps:
        print(f"step {step}/{options.steps}  loss {loss.item():.6f}", flush=True)

model.eval()
correct = seen = 0
with torch.no_grad():
    for x, y in held_out:
        correct += int((model(x.to(device)).argmax(dim=1) == y.to(device)).sum())
        seen += len(y)
print(f"Train Finished. Held-out accuracy {correct / seen:.1%} ({correct} of {seen} images).")
