"""Entry points of torch.hub, which need torch only."""

from aft_mm.models import CLASSIFIERS as _CLASSIFIERS
from aft_mm.models import AFTClassifier as _AFTClassifier

dependencies = ['torch']


def _entry(name):
    def create(**options):
        return _AFTClassifier(**{**_CLASSIFIERS[name], **options})

    create.__doc__ = f'Return {name} with random weights; see aft_mm.models.AFTClassifier.'
    return create


globals().update({name: _entry(name) for name in _CLASSIFIERS})
