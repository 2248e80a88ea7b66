"""Checkpoints: read without running code from the file, written whole or not at all.

- `loading.py`: mmengine's loaders, and loading weights into a model
- `safe_unpickler.py`: torch.save's formats and the few objects a checkpoint may contain
- `safetensors.py`: weights in the safetensors format
- `plain_types.py`: training state as plain Python types and tensors
- `atomic_write.py`: files that appear only when complete
- `latest.py`: the newest complete checkpoint of a run
- `averaging.py`: the mean of the weights of several checkpoints
"""

from .atomic_write import ATOMIC_BACKEND, write_whole
from .averaging import average, averaged
from .latest import checkpoints_in, latest_checkpoint, remove_parts, write_pointer
from .loading import load_from_http, load_from_hub, load_from_local, load_weights
from .plain_types import HUB_KEYS, plain_hub, plain_value
from .safetensors import read_safetensors, write_safetensors

__all__ = [
    'ATOMIC_BACKEND',
    'HUB_KEYS',
    'average',
    'averaged',
    'checkpoints_in',
    'latest_checkpoint',
    'load_from_http',
    'load_from_hub',
    'load_from_local',
    'load_weights',
    'plain_hub',
    'plain_value',
    'read_safetensors',
    'remove_parts',
    'write_pointer',
    'write_safetensors',
    'write_whole',
]
