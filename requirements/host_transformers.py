"""Transformers' common tests of models, with those of aft_mm; host_tests.py copies it into their folder."""

import copy
import unittest

import torch

from aft_mm.transformers import (
    AFTBackbone,
    AFTConfig,
    AFTForCausalLM,
    AFTForImageClassification,
    AFTModel,
    AFTTextConfig,
)

from .test_backbone_common import BackboneTesterMixin
from .test_modeling_common import ModelTesterMixin

CONV = dict(type='aft_mm.AFTConv', num_heads=4, kernel_size=3)
LOCAL = dict(type='aft_mm.AFTLocal', window=3, rank=4)
ARCH = dict(embed_dims=32, num_layers=2)
DECODER = dict(
    type='aft_mm.SequenceDecoder',
    embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=99),
    token_mixer=LOCAL,
    grid=[40],
    **ARCH,
)
HEAD = dict(type='aft_mm.CategoricalHead', embed_dims=32, num_classes=99)


class Inputs:
    """A config and inputs, as the common tests ask for them."""

    is_training, batch_size, seq_length = True, 3, 7

    def __init__(self, config, name, values):
        self.config, self.inputs = config, {name: values}

    def prepare_config_and_inputs_for_common(self):
        return copy.deepcopy(self.config), copy.deepcopy(self.inputs)


def images(mixer):
    config = AFTConfig(dict(arch=ARCH, img_size=32, token_mixer=mixer))
    return Inputs(config, 'pixel_values', torch.rand(3, 3, 32, 32))


class ConvTests(ModelTesterMixin, unittest.TestCase):
    all_model_classes = AFTModel, AFTForImageClassification
    has_attentions = test_resize_embeddings = False
    mixer = CONV

    def setUp(self):
        self.model_tester = images(self.mixer)


class LocalTests(ConvTests):
    mixer = LOCAL


class BackboneTests(BackboneTesterMixin, unittest.TestCase):
    all_model_classes = (AFTBackbone,)
    config_class = AFTConfig
    has_attentions = False

    def setUp(self):
        self.model_tester = images(CONV)


class TextTests(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (AFTForCausalLM,)
    has_attentions = False

    def setUp(self):
        tokens = torch.randint(99, (3, 7))
        config = AFTTextConfig(dict(decoder=DECODER, head=HEAD))
        self.model_tester = Inputs(config, 'input_ids', tokens)
