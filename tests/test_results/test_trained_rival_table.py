"""The table of EfficientNet-Lite0 in docs/benchmarks.md is that of its output."""

from .shown import rows_of
from .test_benchmark_tables import PAGE, check, only, rows

FORMS = ('onnxruntime', 'float32'), ('openvino', 'float32'), ('openvino', 'int8')
MODELS = {
    'EfficientNet-Lite0': ('efficientnet_lite0', ''),
    'DeiT-tiny': ('deit-tiny', ''),
    'AFT-conv tiny h32 k11, with loops': ('aft-tiny-h32-k11', '-loops'),
}


def test_accuracy_and_speed_of_one_file():
    measured = rows('runtimes', 'tiny_224_batch1_trained')
    table = rows_of(PAGE, '| trained model | ONNX Runtime')
    assert len(table) == 4
    for label, *cells in table:
        name, what = label.split(': ')
        key = 'accuracy' if what.startswith('accuracy') else 'images_per_second'
        model, loops = MODELS[name]
        for cell, (runtime, dtype) in zip(cells, FORMS, strict=True):
            row = only(measured, model=model, runtime=runtime + loops, dtype=dtype)
            check(cell, row[key])
            assert row.get('num_pictures', 300) == 300
