"""Replace layers of softmax attention in a trained ViT by AFT-conv, and measure what is left.

A linear probe on the mean of the patch tokens is trained on the pictures of DATA/train and tested
on those of DATA/val, folders of each class. With --class-token the layers of softmax attention have
a class token, which converted ones do not mix. A line of JSON is added to OUT for each model;
results that OUT has are not computed again.
"""

import argparse
import json
import re
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from aft_mm.analysis.networks import record_attention
from aft_mm.analysis.plot_attention import MeanAttention, query_counts
from aft_mm.analysis.training_summary import wilson_interval
from aft_mm.cli.arguments import tool_parser
from aft_mm.convert.vit_weights import config_of, convert
from aft_mm.errors import DATA_ERRORS, UserError, user_errors
from aft_mm.images import read_rgb
from aft_mm.layers import AFTConv, DepthwiseConv
from aft_mm.models import AFTViT
from aft_mm.progress import progress

SOFTMAX = 'softmax'
#: How a converted layer starts, and whether that depends on the seed.
MIXERS = {
    'attention': False,
    'convolution': False,
    'zero': False,
    'shuffled': True,
    'random': True,
}
BATCH = 25
ROUNDS = 7


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument('source', metavar='SOURCE', help='as of `aft_mm convert vit`')
    parser.add_argument('data', metavar='DATA', help='folder with train/CLASS and val/CLASS')
    parser.add_argument('out', metavar='OUT', help='file of JSON lines')
    parser.add_argument('--size', type=int, default=112, help='pixels (default: %(default)s)')
    parser.add_argument(
        '--layers',
        nargs='+',
        default=['1-4', '1-8', '1-12', '9-12'],
        metavar='FIRST-LAST',
        help='layers to convert, from 1 (default: %(default)s)',
    )
    parser.add_argument(
        '--mixers',
        nargs='+',
        choices=(SOFTMAX, *MIXERS),
        default=list(MIXERS),
        help='AFT-conv with w from the mean attention; a depthwise convolution with the mean '
        'attention as kernel; AFT-conv with w = 0, with the entries of w shuffled in each head, or '
        'with all weights of the layer at random; softmax only with --epochs',
    )
    parser.add_argument('--class-token', action='store_true', help='keep it in layers of softmax')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--epochs', type=int, default=0, help='of fine-tuning all weights')
    parser.add_argument('--lr', type=float, default=1e-5, help='default: %(default)s')
    parser.add_argument(
        '--speed', type=int, nargs='+', metavar='PX', help='only time models at these sizes'
    )
    return parser.parse_args(argv)


def find_pictures(folder: Path) -> tuple[list[Path], list[str]]:
    paths = sorted(path for path in folder.glob('*/*') if path.is_file())
    return paths, sorted({path.parent.name for path in paths})


def read_pictures(folder: Path, classes: Sequence[str], size: int) -> tuple[Tensor, np.ndarray]:
    paths, found = find_pictures(folder)
    if found != classes:
        raise UserError(
            f'{str(folder)!r} must have the classes {", ".join(classes)}, got '
            f'{", ".join(found) or "none"}'
        )
    pictures = [
        Image.fromarray(read_rgb(path)[0]).resize((size, size), Image.Resampling.BICUBIC)
        for path in progress(paths, f'read {folder.name}')
    ]
    labels = np.array([classes.index(path.parent.name) for path in paths])
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2), labels


def build(
    settings: Mapping[str, Any], weights: Mapping[str, Tensor], size: int, token: bool
) -> Any:
    changes = dict(img_size=size, with_cls_token=token, out_type='avg_featmap')
    model = AFTViT(**{k: v for k, v in settings.items() if k != 'type'} | changes)
    state = {
        name.removeprefix('backbone.'): tensor
        for name, tensor in weights.items()
        if name.startswith('backbone.') and (token or name != 'backbone.cls_token')
    }
    if not token:
        state['pos_embed.weight'] = state['pos_embed.weight'][1:]
    model.load_state_dict(state)
    return model.eval()


class PatchMixer(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return F.pad(self.mixer(x[:, 1:], **options), (0, 0, 1, 0))


@torch.no_grad()
def replaced(mixer: Any, start: str, mean: Tensor, seed: int) -> nn.Module:
    """Return a mixer in place of softmax attention with the mean attention [h, *kernel] by offset.

    Its gate starts at a constant, whose inverse is in the last projection, and its keys start at 0.
    """
    torch.manual_seed(seed)
    dims, heads, kernel = mixer.embed_dims, mixer.num_heads, tuple(mean.shape[1:])
    new: Any
    if start == 'convolution':
        new = DepthwiseConv(dims, kernel)
        counts = query_counts(kernel)
        read = (mean * counts).sum((1, 2), keepdim=True)
        mean = mean / (read / counts.max())  # the class token had a share
        new.weight.copy_(mean.repeat_interleave(dims // heads, 0))
    else:
        new = AFTConv(dims, heads, kernel, reparameterize=False)
        if start == 'random':
            return new
        weight = torch.zeros_like(mean) if start == 'zero' else mean.log()
        if start == 'shuffled':
            order = torch.rand(heads, weight[0].numel()).argsort(1)
            weight = weight.flatten(1).gather(1, order).view_as(weight)
        new.pos_bias.weight.copy_(weight)
        nn.init.zeros_(new.key.weight)
        nn.init.zeros_(new.key.bias)
    nn.init.zeros_(new.query.weight)
    nn.init.zeros_(new.query.bias)
    new.value.load_state_dict(mixer.value.state_dict())
    new.proj.load_state_dict(mixer.proj.state_dict())
    new.proj.weight.mul_(2)  # the gate is sigmoid(0)
    return new


def converted(
    model: Any, start: str, span: tuple[int, int], means: Sequence[Tensor], seed: int
) -> Any:
    """Return a copy of `model` with other mixers in its layers from the first to the last of `span`."""
    model = deepcopy(model)
    if start != SOFTMAX:
        for i in range(span[0] - 1, span[1]):
            layer = model.layers[i]
            mixer = replaced(layer.token_mixer, start, means[i], 100 * seed + i)
            layer.token_mixer = PatchMixer(mixer) if model.num_prefix_tokens else mixer
    return model.eval()


def span_of(text: str, depth: int) -> tuple[int, int]:
    edges = re.fullmatch(r'(\d+)-(\d+)', text)
    if not edges or not 1 <= int(edges[1]) <= int(edges[2]) <= depth:
        raise UserError(f'--layers must be FIRST-LAST of 1 to {depth}, got {text!r}')
    return int(edges[1]), int(edges[2])


class Study:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, Path(args.out)
        self.settings, self.weights, _ = convert(args.source)
        entries = config_of(self.settings, 0, args.size, args.out)['data_preprocessor']
        self.mean, self.std = (torch.tensor(entries[key]).view(-1, 1, 1) for key in ('mean', 'std'))
        self.softmax = build(self.settings, self.weights, args.size, args.class_token)
        depth = len(self.softmax.layers)
        self.spans = {text: span_of(text, depth) for text in args.layers}
        train, val = (Path(args.data, part) for part in ('train', 'val'))
        _, classes = find_pictures(train)
        if len(classes) < 3:
            raise UserError(
                f'{str(train)!r} must have 3 classes or more, got {", ".join(classes) or "none"}'
            )
        parts = [read_pictures(folder, classes, args.size) for folder in (train, val)]
        self.pictures = torch.cat([pictures for pictures, _ in parts])
        self.labels = np.concatenate([labels for _, labels in parts])
        self.train = len(parts[0][1])
        self.tokens: dict[Any, Tensor] = {}
        self.rows = []
        if self.out.exists():
            self.rows = [json.loads(line) for line in self.out.read_text().splitlines()]

    def images(self, chosen: Any) -> Tensor:
        return (self.pictures[chosen] - self.mean) / self.std

    def batches(self, first: int, last: int, name: str) -> Any:
        starts = range(first, last, BATCH)
        return progress([slice(i, min(i + BATCH, last)) for i in starts], name)

    @torch.no_grad()
    def mean_attention(self) -> list[Tensor]:
        mean = MeanAttention((self.args.size,) * 2, self.softmax.num_prefix_tokens)
        with record_attention(mean.take):
            for batch in self.batches(0, self.train, 'attention'):
                images = self.images(batch)
                mean.next_batch(len(images))
                self.softmax(images)
        return [maps.float() for maps in mean.means().values()]

    @torch.no_grad()
    def features(self, model: Any, key: tuple, cuts: Sequence[int], name: str) -> np.ndarray:
        """Return the mean patch tokens [N, D] of all pictures; `key` has an entry per layer."""
        # Of other models only the tokens after layers of softmax attention are of use.
        self.tokens = {
            entries: tokens
            for entries, tokens in self.tokens.items()
            if {*entries} <= {SOFTMAX, *key}
        }
        known = [cut for cut in cuts if key[:cut] in self.tokens]
        first = max(known, default=0)
        source = self.tokens.get(key[:first])
        kept: dict[int, list[Tensor]] = {cut: [] for cut in cuts if cut > first}
        outputs = []
        grid = model.grid
        for batch in self.batches(0, len(self.pictures), name):
            x = model._embed(self.images(batch))[0] if source is None else source[batch]
            for i in range(first, len(model.layers)):
                x = model.layers[i](x, grid)
                if i + 1 in kept:
                    kept[i + 1].append(x)
            outputs.append(model.norm(x)[:, model.num_prefix_tokens :].mean(1))
        self.tokens |= {key[:cut]: torch.cat(parts) for cut, parts in kept.items()}
        return torch.cat(outputs).numpy()

    def probe(self, features: np.ndarray) -> Any:
        classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
        return classifier.fit(features[: self.train], self.labels[: self.train])

    def fine_tune(self, model: Any, classifier: Any, seed: int) -> np.ndarray:
        scaler, regression = (step for _, step in classifier.steps)
        weight = regression.coef_ / scaler.scale_
        head = nn.Linear(*weight.T.shape)
        head.weight.data.copy_(torch.from_numpy(weight))
        head.bias.data.copy_(torch.from_numpy(regression.intercept_ - weight @ scaler.mean_))
        net = nn.ModuleList([model, head])
        optimizer = torch.optim.AdamW(net.parameters(), lr=self.args.lr, weight_decay=0.05)
        steps = self.args.epochs * -(-self.train // BATCH)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            self.args.lr,
            total_steps=max(steps, 2),
            pct_start=max(0.1, 2 / max(steps, 2)),
        )
        rng = np.random.default_rng(seed)
        order = np.concatenate([rng.permutation(self.train) for _ in range(self.args.epochs)])
        net.train()
        labels = torch.from_numpy(self.labels)
        for chosen in progress(np.array_split(order, steps), 'fine-tune'):
            images = self.images(torch.from_numpy(chosen))
            flip = torch.from_numpy(rng.random(len(chosen)) < 0.5).view(-1, 1, 1, 1)
            logits = head(model(torch.where(flip, images.flip(-1), images))[0])
            loss = F.cross_entropy(logits, labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        net.eval()
        with torch.no_grad():
            batches = self.batches(self.train, len(self.pictures), 'test')
            return torch.cat([head(model(self.images(b))[0]) for b in batches]).argmax(1).numpy()

    def measured(self, name: str, span: str, seed: int) -> bool:
        wanted = self.key(name, span, seed)
        return any(wanted.items() <= row.items() for row in self.rows)

    def key(self, name: str, span: str, seed: int) -> dict[str, Any]:
        args = self.args
        return dict(
            source=Path(args.source).name,
            mixer=name,
            layers=span,
            seed=seed,
            class_token=args.class_token,
            data=Path(args.data).name,
            size=args.size,
            epochs=args.epochs,
            lr=args.lr if args.epochs else None,
        )

    def write(self, name: str, span: str, seed: int, predicted: np.ndarray, began: float) -> None:
        right = predicted == self.labels[self.train :]
        row = dict(
            **self.key(name, span, seed),
            top1=round(100 * float(right.mean()), 2),
            pictures=len(right),
            right=np.packbits(right).tobytes().hex(),  # to compare picture by picture
            seconds=round(time.time() - began),
        )
        self.rows.append(row)
        with self.out.open('a') as file:
            file.write(json.dumps(row) + '\n')
        print(f'{name}, layers {span}, seed {seed}, epochs {row["epochs"]}: {row["top1"]} %')

    def run(self) -> None:
        spans, depth = self.spans, len(self.softmax.layers)
        cuts = sorted({edge for a, b in spans.values() for edge in (a - 1, b)} - {0, depth})
        before = self.args.epochs == 0
        means = self.mean_attention()
        models = [] if not before else [(SOFTMAX, '', 0)]
        models += [
            (start, span, seed)
            for start in self.args.mixers
            for seed in (self.args.seeds if MIXERS.get(start) or not before else [0])
            for span in ([''] if start == SOFTMAX else spans)
        ]
        for start, span, seed in models:
            if self.measured(start, span, seed):
                continue
            began = time.time()
            edges = spans.get(span, (1, 0))
            draw = seed if MIXERS.get(start) else 0
            model = converted(self.softmax, start, edges, means, draw)
            inside = range(edges[0] - 1, edges[1])
            key = tuple((start, draw) if i in inside else SOFTMAX for i in range(depth))
            own = f' {seed}' if MIXERS.get(start) else ''
            found = self.features(model, key, cuts, f'{start} {span}{own}'.strip())
            classifier = self.probe(found)
            if before:
                predicted = classifier.predict(found[self.train :])
            else:
                predicted = self.fine_tune(model, classifier, seed)
            self.write(start, span, seed, predicted, began)

    @torch.no_grad()
    def time(self) -> None:
        torch.set_num_threads(1)
        heads = self.settings['token_mixer']['num_heads']
        for size in self.args.speed:
            softmax = build(self.settings, self.weights, size, token=False)
            kernel = [2 * side - 1 for side in softmax.grid]
            means = [torch.randn(heads, *kernel).exp() for _ in softmax.layers]
            models = {(SOFTMAX, ''): softmax} | {
                (start, span): converted(softmax, start, edges, means, 0)
                for start in self.args.mixers
                for span, edges in self.spans.items()
            }
            images = torch.randn(max(1, 4 * 112 * 112 // size**2), 3, size, size)
            seconds: dict[Any, list[float]] = {key: [] for key in models}
            for _ in progress(range(ROUNDS + 1), f'{size} px'):
                for key, model in models.items():
                    began = time.process_time()
                    model(images)
                    seconds[key].append((time.process_time() - began) / len(images))
            for (name, span), found in seconds.items():
                rates = [1 / second for second in found[1:]]  # the first plans
                row = dict(
                    mixer=name,
                    layers=span,
                    size=size,
                    rounds=len(rates),
                    images_per_cpu_second=np.median(rates),
                )
                ratios = np.array(seconds[SOFTMAX, ''][1:]) / found[1:]
                row |= dict(speedup=np.median(ratios), least=ratios.min(), most=ratios.max())
                row = {
                    k: v if isinstance(v, int | str) else round(float(v), 3) for k, v in row.items()
                }
                with self.out.open('a') as file:
                    file.write(json.dumps(row) + '\n')
                print(row)


def right_answers(row: Mapping[str, Any]) -> np.ndarray:
    return np.unpackbits(np.frombuffer(bytes.fromhex(row['right']), np.uint8))[: row['pictures']]


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a row of Markdown per model: seeds, top-1 and its difference to softmax attention of these.

    Intervals are of 95 % over pictures; of the top-1 of several seeds, the range.
    """
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        if 'right' in row:
            names = 'class_token', 'data', 'size', 'epochs', 'lr', 'layers', 'mixer'
            groups.setdefault(tuple(row[name] or '' for name in names), []).append(row)
    lines = []
    for setting, runs in sorted(groups.items(), key=str):
        token, data, size, epochs, rate, span, mixer = setting
        top1 = [run['top1'] for run in runs]
        bounds = min(top1), max(top1)
        if len(runs) == 1:
            bounds = wilson_interval(top1[0], runs[0]['pictures'])
        trained = f'{epochs} at {rate:g}' if epochs else '0'
        cells = ['yes' if token else 'no', f'{data}, {size} px', trained, span or 'none', mixer]
        cells.append(str(len(runs)))
        cells.append(f'{np.mean(top1):.1f} ({bounds[0]:.1f}–{bounds[1]:.1f})')
        seeds = {run['seed'] for run in runs} if epochs else {0}
        base = [run for run in groups.get((*setting[:-2], '', SOFTMAX), ()) if run['seed'] in seeds]
        if len(base) == len(seeds) and mixer != SOFTMAX:
            right = np.mean([right_answers(run) for run in runs], 0)
            gain = 100 * (right - np.mean([right_answers(run) for run in base], 0))
            half = 1.96 * gain.std(ddof=1) / len(gain) ** 0.5
            cells.append(f'{gain.mean():+.1f} ± {half:.1f}'.replace('-', '−'))
        else:
            cells.append('')
        lines.append(f'| {" | ".join(cells)} |')
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with user_errors(*DATA_ERRORS):
        study = Study(args)
        if args.speed:
            study.time()
        else:
            study.run()
            print(*table(study.rows), sep='\n')


if __name__ == '__main__':
    main()
