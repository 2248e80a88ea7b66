"""Train a language model of bytes on a text file, with torch only, and continue the text.

python examples/train_text.py README.md --steps 300
"""

import argparse
from pathlib import Path

import torch

from aft_mm.models import AutoregressiveModel

LENGTH = 128  # bytes


def build():
    decoder = dict(
        type='aft_mm.SequenceDecoder',
        embed_dims=64,
        num_layers=2,
        embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=256),
        token_mixer=dict(type='aft_mm.AFTLocal', window=16, rank=16),
        grid=(LENGTH,),
    )
    head = dict(type='aft_mm.CategoricalHead', embed_dims=64, num_classes=256)
    return AutoregressiveModel(decoder, head)


def train(text, steps):
    """Return the model and its loss in bits per byte, a mean over the last 20 steps."""
    torch.manual_seed(0)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = build()
    biases = {name: p for name, p in model.named_parameters() if 'pos_bias' in name}
    others = [p for name, p in model.named_parameters() if name not in biases]
    groups = [dict(params=others), dict(params=[*biases.values()], weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=4e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - LENGTH + 1, (16,))
        batch = torch.stack([data[start : start + LENGTH] for start in starts])
        loss = model(batch, mode='loss')['loss']
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, sum(losses[-20:]) / len(losses[-20:]) / 0.6931


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('file', type=Path)
    parser.add_argument('--steps', type=int, default=300)
    arguments = parser.parse_args()
    model, bits = train(arguments.file.read_bytes(), arguments.steps)
    print(f'{bits:.2f} bits per byte')
    prompt = list(arguments.file.read_bytes()[:32])
    tokens = model.generate(LENGTH, [prompt], temperature=0.8, seed=0)[0]
    print(bytes(tokens.tolist()).decode(errors='replace'))
