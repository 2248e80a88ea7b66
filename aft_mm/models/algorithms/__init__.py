from .autoregressive_model import AutoregressiveModel
from .ctc_model import CTCModel

__all__ = ['AutoregressiveModel', 'CTCModel']
