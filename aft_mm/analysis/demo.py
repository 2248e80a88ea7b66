import argparse
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from aft_mm.apis import ImageClassifier, ImageGenerator, SpeechRecognizer, TextGenerator, Translator
from aft_mm.apis.images import NO_LABEL
from aft_mm.apis.loading import is_classifier, task_of
from aft_mm.config.finding import install_command
from aft_mm.config.reading import read_config
from aft_mm.config.texts import type_name
from aft_mm.errors import CONFIG_ERRORS, UserError, user_errors
from aft_mm.images import enlarge_bicubic, image_size, read_image
from aft_mm.visualization import choose

from .networks import by_layer, load_network, mixers_with_keys, network_inputs, shown_image
from .plot_keys import draw_key_maps, keys_of

# More maps cannot be read at the width of a column of the page.
MOST_LAYERS, HEADS = 3, 'even:4'
MOST_PIXELS, MOST_BYTES = 2**26, 2**25
HOSTS = ('127.0.0.1', 'localhost')


class OwnPage:
    """Refuse requests from pages of others, and under a name that only resolves to this machine."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get('headers', ()))
        host, origin = headers.get(b'host', b'').decode('latin-1'), headers.get(b'origin')
        known = host.split(':')[0] in HOSTS and origin in (None, f'http://{host}'.encode())
        if known or scope['type'] == 'lifespan':
            await self.app(scope, receive, send)
            return
        await send({'type': 'http.response.start', 'status': 403})
        text = f'requests must come from the page at http://{HOSTS[0]}, got {host}, {origin!r}'
        await send({'type': 'http.response.body', 'body': text.encode()})


def picture(gradio: Any, label: str) -> Any:
    """Return an input that passes the path of its file, which gradio would decode unchecked."""
    given = gradio.Image(type='filepath', label=label)
    given.preprocess = lambda payload: payload and payload.path
    return given


def read_picture(path: str, channels: int) -> np.ndarray:
    width, height = image_size(path)
    if width * height > MOST_PIXELS:
        raise UserError(
            f'a picture must have at most {MOST_PIXELS:,} pixels, got {width} x {height}'
        )
    return read_image(path, channels)[0]


def classify(gradio: Any, config: str, checkpoint: str) -> dict[str, Any]:
    classifier, network = ImageClassifier(config, checkpoint), load_network(config, checkpoint)
    mixers = by_layer(mixers_with_keys(network.model))
    chosen = choose('layers', f'even:{MOST_LAYERS}', list(mixers)) if mixers else []
    layers = {f'layer {i}': mixers[i] for i in chosen}
    height, width = network.image_size
    blanks = [
        np.zeros((n * height, m * width, network.in_channels), np.uint8)
        for n, m in ((1, 1), (2, 3))
    ]
    any_size = len({classifier.preprocess(blank)['inputs'].shape for blank in blanks}) > 1

    def run(path: str | None) -> tuple[dict[str, float] | str, Any]:
        if path is None:
            raise gradio.Error('an image must be given, got none')
        image = read_picture(path, network.in_channels)
        if any_size:
            image = enlarge_bicubic(image, network.image_size)
        (result,) = classifier([image], progress=False)
        names = classifier.classes or range(len(result['scores']))
        shown = result.get('labels', range(len(names)))
        scores = {str(names[label]): float(result['scores'][label]) for label in shown}
        sample = classifier.preprocess(image)
        maps = keys_of(network, layers, network_inputs(network.model, [sample]))
        image = shown_image(network.config, sample)
        return scores or NO_LABEL, draw_key_maps(image, maps, HEADS) if maps else None

    most = None if classifier.label_rule else 5
    outputs = [gradio.Label(num_top_classes=most, label='classes'), gradio.Plot(label='keys')]
    return dict(fn=run, inputs=picture(gradio, 'picture'), outputs=outputs)


def complete(gradio: Any, config: str, checkpoint: str) -> dict[str, Any]:
    generator = ImageGenerator(config, checkpoint)
    height, width, channels = generator.image_shape

    def run(path: str | None, keep: float, seed: float) -> np.ndarray:
        options: dict[str, Any] = dict(progress=False, seed=int(seed))
        if path is None:
            return generator.sample(1, **options)[0].squeeze()
        pixels = enlarge_bicubic(read_picture(path, channels), (height, width))
        return generator.complete(pixels[None], keep, **options)[0].squeeze()

    inputs = [
        picture(gradio, f'picture, scaled to {width} x {height} px; none: sample one'),
        gradio.Slider(0.1, 0.9, 0.5, step=0.1, label='share of the rows that is kept'),
        gradio.Number(0, precision=0, minimum=0, label='seed'),
    ]
    return dict(fn=run, inputs=inputs, outputs=gradio.Image(label='completed', format='png'))


def continue_text(gradio: Any, config: str, checkpoint: str) -> dict[str, Any]:
    generator = TextGenerator(config, checkpoint)
    longest = generator.model.decoder.max_length

    def run(text: str, count: float, temperature: float, seed: float) -> str:
        options: dict[str, Any] = dict(temperature=temperature, seed=int(seed), progress=False)
        room = longest - len(text.encode())
        if room < 1:
            raise gradio.Error(
                f'the text must be shorter than {longest} bytes, got {longest - room}'
            )
        return generator(text or None, min(int(count), room), **options)

    inputs = [
        gradio.Textbox(label='text', lines=4),
        gradio.Slider(1, longest, min(200, longest), step=1, label='bytes to add'),
        gradio.Slider(0.1, 2.0, 0.8, label='temperature'),
        gradio.Number(0, precision=0, minimum=0, label='seed'),
    ]
    return dict(fn=run, inputs=inputs, outputs=gradio.Textbox(label='continued', lines=12))


def translate(gradio: Any, config: str, checkpoint: str) -> dict[str, Any]:
    translator = Translator(config, checkpoint)

    def run(text: str) -> str:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            raise gradio.Error('a text must be given, got none')
        return '\n'.join(translator(lines))

    text = gradio.Textbox(label='text, a sentence per line', lines=4)
    return dict(fn=run, inputs=text, outputs=gradio.Textbox(label='translation', lines=4))


def transcribe(gradio: Any, config: str, checkpoint: str) -> dict[str, Any]:
    recognizer = SpeechRecognizer(config, checkpoint)

    def run(path: str | None) -> str:
        if path is None:
            raise gradio.Error('a recording must be given, got none')
        recognition: Any = recognizer(path)
        return recognition.text

    sound = gradio.Audio(type='filepath', label='recording')
    return dict(fn=run, inputs=sound, outputs=gradio.Textbox(label='transcript'))


#: The parts of a page by the name of an inferencer.
PAGES: dict[str, Callable[[Any, str, str], dict[str, Any]]] = {
    'ImageClassifier': classify,
    'ImageGenerator': complete,
    'TextGenerator': continue_text,
    'Translator': translate,
    'SpeechRecognizer': transcribe,
}


def make_page(config: str, checkpoint: str) -> Any:
    read = read_config(config)
    classifies = is_classifier(read)
    task = 'ImageClassifier' if classifies else task_of(read)
    if task not in PAGES or ('backbone' in (read.get('model') or {}) and not classifies):
        kind = task if task not in PAGES else type_name(read.model.type)
        raise UserError(f'the model of {config} must be for {", ".join(PAGES)}, got {kind}')
    if importlib.util.find_spec('gradio') is None:
        raise UserError(f'the demo needs gradio: {install_command("demo")}')
    os.environ['GRADIO_ANALYTICS_ENABLED'] = 'False'  # nothing is sent
    import gradio

    def one_line(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            try:
                return call(*inputs)
            except (UserError, ValueError) as error:
                raise gradio.Error(str(error)) from error

        return run

    parts = PAGES[task](gradio, config, checkpoint)
    parts['fn'] = one_line(parts['fn'])
    return gradio.Interface(
        title=f'aft_mm: {Path(config).stem}', flagging_mode='never', api_name='run', **parts
    )


def launch(page: Any, **options: Any) -> str:
    from starlette.middleware import Middleware  # of gradio

    options['app_kwargs'] = dict(middleware=[Middleware(OwnPage)])
    options |= dict(server_name=HOSTS[0], share=False, ssr_mode=False, max_file_size=MOST_BYTES)
    return page.launch(**options)[1]


def run(args: argparse.Namespace) -> None:
    with user_errors(*CONFIG_ERRORS):
        page = make_page(args.config, args.checkpoint)
        try:
            launch(page, server_port=args.port)
        except OSError as error:
            raise UserError(f'--port must be free, got {args.port}: {error}') from error
