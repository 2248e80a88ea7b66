"""Train the classifier of train_images.py with Lightning.

python examples/lightning_images.py --epochs 20
"""

import argparse

import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from train_images import build, digits


class LitClassifier(lightning.LightningModule):
    """Cross entropy and accuracy of an image classifier."""

    def __init__(self):
        super().__init__()
        self.model = build()

    def training_step(self, batch, index):
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        self.log('accuracy', (self.model(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        biases = {name: p for name, p in self.named_parameters() if 'pos_bias' in name}
        others = [p for name, p in self.named_parameters() if name not in biases]
        groups = [dict(params=others), dict(params=[*biases.values()], weight_decay=0.0)]
        optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
        return [optimizer], [dict(scheduler=schedule, interval='step')]


def train(epochs):
    """Return the accuracy on the test images."""
    lightning.seed_everything(0)
    train_set, test_set = digits()
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator='cpu', logger=False, enable_checkpointing=False
    )
    batches = DataLoader(train_set, batch_size=64, shuffle=True)
    trainer.fit(LitClassifier(), batches, DataLoader(test_set, batch_size=len(test_set)))
    return trainer.callback_metrics['accuracy'].item()


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--epochs', type=int, default=20)
    print(f'accuracy {train(parser.parse_args().epochs):.1%}')
