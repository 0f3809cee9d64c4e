"""Classifies images in the style of torchvision's reference script: mixed precision, a schedule, averaged weights.

On scikit-learn's handwritten digits, or on a folder of images by class (which needs torchvision). Runs under torchrun,
under `evenstep run`, or alone.
"""

import argparse
import os

import torch
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset, random_split

import evenstep


def images(folder):
    if folder is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        return TensorDataset(torch.tensor(digits.images).float().unsqueeze(1) / 16, torch.tensor(digits.target))
    from torchvision import datasets, transforms

    return datasets.ImageFolder(folder, transforms.Compose([transforms.RandomResizedCrop(176), transforms.ToTensor()]))


def network(channels, classes):
    def stage(before, after):
        return torch.nn.Conv2d(before, after, 3, padding=1), torch.nn.BatchNorm2d(after), torch.nn.ReLU()

    body = (*stage(channels, 64), torch.nn.MaxPool2d(2), *stage(64, 128), torch.nn.AdaptiveAvgPool2d(1))
    return torch.nn.Sequential(*body, torch.nn.Flatten(), torch.nn.Linear(128, classes))


@torch.no_grad()
def accuracy(model, loader, device):
    model.eval()
    right = [model(batch.to(device)).argmax(1).cpu() == truth for batch, truth in loader]
    return torch.cat(right).float().mean().item()


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--folder", help="of images: a folder in it for each class")
parser.add_argument("--classes", type=int, default=10)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=128, help="of one worker")
parser.add_argument("--amp", default="float32", choices=["float32", "float16", "bfloat16"], help="to compute in")
options = parser.parse_args()
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
train, test = random_split(images(options.folder), [0.8, 0.2])
model = network(3 if options.folder else 1, options.classes).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
model, optimizer, loader = evenstep.prepare(model, optimizer, DataLoader(train, options.batch_size, shuffle=True))
averaged = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
scaler = torch.amp.GradScaler(device.type, enabled=options.amp == "float16")
for epoch in range(options.epochs):
    total = count = 0
    for batch, truth in loader:
        with torch.autocast(device.type, getattr(torch, options.amp), enabled=options.amp != "float32"):
            loss = functional.cross_entropy(model(batch.to(device)), truth.to(device), label_smoothing=0.1)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        scaler.step(optimizer)
        scaler.update()
        averaged.update_parameters(model.module)
        total += loss.item() * loader.current.samples
        count += loader.current.samples  # 0 if the batch is only a copy of another worker's sample.
    scheduler.step()
    mean = loader.mean_over_workers(total / max(count, 1), count)
    if int(os.environ.get("RANK", "0")) == 0:  # All workers have the same weights, so one evaluates.
        right = accuracy(averaged, DataLoader(test, 256), device)
        print(f"epoch {epoch + 1}: training loss {mean:.3f}, test accuracy {right:.1%}")
