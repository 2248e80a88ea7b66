"""Continue a text by the files of `aft_mm export CONFIG CHECKPOINT OUT.onnx --steps`.

It needs numpy and onnxruntime only. Tokens are bytes, as in the configs of language modelling.
"""

import argparse

import numpy as np
import onnxruntime


def generate(prompt, step, tokens, length, **source):
    """Return tokens [1, L] continued greedily to `length`; a translation also takes its source."""
    names = [x.name for x in prompt.get_outputs()]
    state = dict(zip(names, prompt.run(None, {'tokens': tokens, **source}), strict=True))
    names = [x.name.removeprefix('next.') for x in step.get_outputs()]
    while True:
        token = state.pop('scores').argmax(-1)
        tokens = np.append(tokens, token[:, None], 1)
        if tokens.shape[1] >= length:
            return tokens
        state.update(zip(names, step.run(None, {'token': token, **state}), strict=True))


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('prompt', help='OUT-prompt.onnx')
    parser.add_argument('step', help='OUT-step.onnx')
    parser.add_argument('text')
    parser.add_argument('length', type=int, help='bytes in all, with the text')
    args = parser.parse_args()
    sessions = [onnxruntime.InferenceSession(path) for path in (args.prompt, args.step)]
    start = np.frombuffer(args.text.encode(), np.uint8)[None].astype(np.int64)
    about = sessions[0].get_modelmeta().custom_metadata_map
    longest = int(about['longest_prompt']) + 1
    if not start.size < args.length <= longest:
        parser.error(f'length must be {start.size + 1} to {longest}, got {args.length}')
    if 'image_shape' in about:
        parser.error('the tokens must be bytes of text, got the files of an image model')
    print(bytes(generate(*sessions, start, args.length)[0].tolist()).decode(errors='replace'))
