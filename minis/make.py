"""Make a model of aft_mm_minis of a finished run: weights in float16, their metric, and a card.

    python minis/make.py mnist work_dirs/aft-conv-mini-h128-k13_1xb16-3e-peak_mnist COMMIT

COMMIT is that of the code that trained. The metric is that of the rounded weights on the test set of the
config; its interval is of 1,000 bootstrap samples of the test set, or binomial for few words.
"""

import argparse
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from scipy.stats import binomtest

from aft_mm.apis import get_model
from aft_mm.checkpoint import latest_checkpoint, load_from_local, write_safetensors
from aft_mm.cli.commands.release_weights import list_weights
from aft_mm.config.reading import read_config
from aft_mm.convert.publish_model import publish, run_name
from aft_mm.registry import register_safe_loading

FOLDER = Path(__file__).parent / 'aft_mm_minis'
INDEX = FOLDER / 'weights.json'
NUM_RESAMPLED = 1000


class About(NamedTuple):
    """What a card says that the run does not."""

    title: str
    metric: str  # key of the metric
    label: str
    unit: str
    items: str  # of the test set, which are resampled
    subset: int | None  # of them, what the test measures; None: all
    use: str
    source: str  # of the data, with its licence
    limits: str


MODELS = {
    'digits': About(
        'Handwritten digits of 8 × 8 pixels',
        'accuracy/top1',
        'accuracy',
        '%',
        'images',
        None,
        'aft_mm predict digits digit.png --out predictions',
        'Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI, as in '
        'scikit-learn, CC BY 4.0',
        'Pictures are reduced to 8 × 8 pixels and must be light ink on a dark ground, one centred '
        'digit each. The model itself takes (x − 77.9) / 95.9 of pixels x from 0 to 255, as its '
        'data_preprocessor returns them. Seeds 0, 1 and 2 of the same recipe had 98.1, 98.6 and 99.2 % in float32 '
        '(docs/results/quickstart).',
    ),
    'mnist': About(
        'MNIST images, pixel by pixel',
        'bits_per_dim',
        'bits/dim',
        '',
        'images',
        100,
        'aft_mm sample mnist --out digits.png',
        'MNIST, Y. LeCun and C. Cortes, of digits of NIST; CC BY-SA 3.0 as the documentation of '
        'Keras states, while the files themselves state no licence',
        'About ten of sixteen samples can be read as digits. One epoch over a part of the training '
        'images; three epochs over 50,000 images reach 0.725 ± '
        '0.004 (docs/results/mnist).',
    ),
    'spoken-digits': About(
        'Spoken digits, English',
        'word_error_rate',
        'word error rate',
        '%',
        'recordings',
        None,
        'aft_mm transcribe spoken-digits a.wav',
        'Free Spoken Digit Dataset, Z. Jackson and others, CC BY-SA 4.0',
        'One word per recording of 8 kHz, of the five speakers of the training: speakers that it has '
        'not heard have an error rate of about 38 % (30 epochs, four speakers, '
        'docs/results/fsdd/new_speakers). Seeds 0, 1 and 2 of the same recipe had 1.2, 2.8 and 2.0 % '
        '(docs/results/fsdd).',
    ),
    'yesno': About(
        '"Yes" and "no"',
        'word_error_rate',
        'word error rate',
        '%',
        'words',
        None,
        'aft_mm transcribe yesno a.wav',
        'yesno, 16 recordings of one speaker, in Hebrew, as in a Kaldi tutorial, Apache-2.0',
        'One speaker and one microphone; the interval treats the 32 words as independent. Of seeds 0, '
        '1 and 2, trained on one machine, this one has the lowest training loss; seed 0 made two '
        'errors, seed 1 none. On another machine, seven of ten seeds made no error, the others two or '
        'three (docs/results/yesno).',
    ),
    'enwik8': About(
        'Text of Wikipedia, byte by byte',
        'bits_per_char',
        'bits/char',
        '',
        'blocks of 256 bytes',
        64,
        "aft_mm sample enwik8 --prompt 'The ' --temperature 0.7 --out text.txt",
        'the first 3.2 MB of enwik8, Wikipedia of March 2006, CC BY-SA 3.0 and GFDL 1.2',
        'Few articles, 256 bytes of context: it spells words and markup, and its sentences mean '
        'nothing. Blocks of one article are not independent. A run of the same recipe in bfloat16 had '
        '2.292 bits/char, too (docs/results/enwik8).',
    ),
}


def evaluate(config_name: str, weights: str, num: int | None = None) -> list[BaseMetric]:
    """Return the metrics of a config with the results of at least `num` items of its test set."""
    config = read_config(config_name)
    model = get_model(config_name, weights, device='cpu')
    with DefaultScope.overwrite_default_scope(config.default_scope):
        loader = Runner.build_dataloader(config.test_dataloader)
        evaluator = Evaluator(config.test_evaluator)
    evaluator.dataset_meta = loader.dataset.metainfo
    for batch in loader:
        with torch.no_grad():
            evaluator.process(data_samples=model.test_step(batch), data_batch=batch)
        if num is not None and len(evaluator.metrics[0].results) >= num:
            break
    return evaluator.metrics


def value_of(metrics: list[BaseMetric], key: str, items: Any = slice(None)) -> float:
    """Return a metric of some items, given by a slice or by their numbers."""
    name = key.rpartition('/')[2]
    for metric in metrics:
        results = metric.results
        chosen = results[items] if isinstance(items, slice) else [results[i] for i in items]
        found = metric.compute_metrics(chosen)
        if name in found:
            return float(found[name])
    raise KeyError(key)


def count(metrics: list[BaseMetric], about: About) -> int:
    if about.items == 'words':
        return len(' '.join(text for text, _ in metrics[-1].results).split())
    return len(metrics[0].results)


def interval(metrics: list[BaseMetric], about: About) -> tuple[float, float]:
    """Return the 95 % interval of a metric over the items of the test set."""
    number = count(metrics, about)
    if (
        about.items == 'words'
    ):  # of few recordings; bootstrap samples without an error have no width
        errors = round(value_of(metrics, about.metric) * number / 100)
        low, high = binomtest(errors, number).proportion_ci()
        return 100 * low, 100 * high
    generator = np.random.default_rng(0)
    samples = (generator.integers(number, size=number) for _ in range(NUM_RESAMPLED))
    low, high = np.percentile(
        [value_of(metrics, about.metric, one) for one in samples], [2.5, 97.5]
    )
    return float(low), float(high)


def rounded(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    half = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }
    if bad := [name for name, tensor in half.items() if not tensor.isfinite().all()]:
        raise ValueError(f'{bad[0]} must be within the range of float16')
    return half


def card(entry: Mapping[str, Any]) -> str:
    """Return the Markdown card of a model, given its entry of weights.json."""
    about = MODELS[entry['name']]
    low, high = entry['interval']
    unit = f' {about.unit}' if about.unit else ''
    facts = {
        'config': entry['config'],
        'parameters': f'{entry["parameters"]:,}, float16',
        'data': about.source,
        'licence of the weights': entry['license'],
        'training': f'`{entry["command"]}`, {entry["iterations"]:,} iterations, one seed '
        f'({entry["seed"]}), commit {entry["commit"]}',
        about.label: f'{entry["value"]:.4g}{unit} on {entry["num"]:,} {about.items} of the test set, '
        f'95 % interval {low:.4g} to {high:.4g} over these {about.items}; it leaves out other seeds '
        'and other data',
        'sha256': entry['sha256'],
    }
    lines = [f'# {entry["name"]}', '', f'{about.title}.', '', f'    {about.use}', '']
    lines += [f'- {key}: {fact}' for key, fact in facts.items()]
    return '\n'.join([*lines, '', about.limits, ''])


def table(entries: list[dict]) -> str:
    """Return the Markdown table of the models."""
    lines = ['| name | what | parameters | metric of the float16 weights | interval | licence |']
    lines.append('| --- ' * 6 + '|')
    for entry in entries:
        about, (low, high) = MODELS[entry['name']], entry['interval']
        unit = f' {about.unit}' if about.unit else ''
        lines.append(
            f'| `{entry["name"]}` | {about.title} | {entry["parameters"]:,} | {about.label} '
            f'{entry["value"]:.4g}{unit} | {low:.4g} to {high:.4g} | {entry["license"]} |'
        )
    return '\n'.join(lines) + '\n'


def make(name: str, work_dir: str, commit: str) -> None:
    about = MODELS[name]
    path, _ = latest_checkpoint(work_dir)
    checkpoint = load_from_local(path)
    published = publish(checkpoint, path)
    published['state_dict'] = rounded(published['state_dict'])
    meta = published['meta']
    file = FOLDER / f'{name}.safetensors'
    with file.open('wb') as stream:
        write_safetensors(stream, published)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    config = run_name(meta)
    metrics = evaluate(config, str(file))
    entry = dict(
        name=name,
        config=config,
        file=file.name,
        sha256=digest,
        bytes=file.stat().st_size,
        parameters=sum(x.numel() for x in get_model(config, str(file), 'cpu').parameters()),
        license=meta['license'],
        command=meta['command'],
        seed=meta['seed'],
        iterations=meta['iter'],
        commit=commit,
        metric=about.metric,
        value=value_of(metrics, about.metric),
        interval=interval(metrics, about),
        num=count(metrics, about),
        subset=about.subset and value_of(metrics, about.metric, slice(about.subset)),
    )
    known = json.loads(INDEX.read_text()) if INDEX.exists() else []
    entries = {one['name']: one for one in [*known, entry]}
    listed = [entries[one] for one in MODELS if one in entries]
    INDEX.write_text(json.dumps(listed, indent=1) + '\n')
    for one in listed:
        (FOLDER / f'{one["name"]}.md').write_text(card(one))
    list_weights(config, f'mini://{file.name}#sha256={digest}')


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('name', choices=MODELS)
    parser.add_argument('work_dir')
    parser.add_argument('commit')
    args = parser.parse_args()
    register_safe_loading()
    make(args.name, args.work_dir, args.commit)
