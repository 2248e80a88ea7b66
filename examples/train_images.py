"""Train AFT-conv on the handwritten digits of scikit-learn, in plain PyTorch.

python examples/train_images.py --epochs 20
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from aft_mm.models import AFTClassifier


def digits():
    """Return 1,437 images to train with and 360 to test with, floats [N, 1, 8, 8]."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    samples = TensorDataset(images, torch.tensor(data.target))
    return torch.utils.data.random_split(samples, [1437, 360], torch.Generator().manual_seed(0))


def build():
    mixer = dict(type='aft_mm.AFTConv', num_heads=16, kernel_size=7)
    arch = dict(embed_dims=64, num_layers=3, mlp_ratio=2)
    model = AFTClassifier(arch, mixer, img_size=8, patch_size=2, in_chans=1, num_classes=10)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):  # the default, 0.02, is made for wide models
            torch.nn.init.trunc_normal_(layer.weight, std=layer.in_features**-0.5)
    return model


def train(epochs):
    """Return the accuracy on the test images."""
    torch.manual_seed(0)
    train_set, test_set = digits()
    model = build()
    biases = {name: p for name, p in model.named_parameters() if 'pos_bias' in name}
    others = [p for name, p in model.named_parameters() if name not in biases]
    groups = [dict(params=others), dict(params=[*biases.values()], weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.05)
    batches = DataLoader(train_set, batch_size=64, shuffle=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, epochs * len(batches))
    for _ in range(epochs):
        for images, labels in batches:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    images, labels = next(iter(DataLoader(test_set, batch_size=len(test_set))))
    with torch.no_grad():
        return (model.eval()(images).argmax(1) == labels).float().mean().item()


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--epochs', type=int, default=20)
    print(f'accuracy {train(parser.parse_args().epochs):.1%}')
