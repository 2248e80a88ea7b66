"""The models for Transformers: our numbers, generate with the state, checkpoints, Trainer."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import StackDataset

from aft_mm.models import AFTClassifier, AutoregressiveModel

from .documents import blocks
from .errors import refuses

pytest.importorskip('transformers', reason='transformers is not installed')
hf = pytest.importorskip('aft_mm.transformers', reason='transformers is not installed')

V, T = 11, 24
IMAGES = dict(arch=dict(embed_dims=16, num_layers=3), img_size=32)
FULL = dict(IMAGES, with_cls_token=True, out_type='cls_token')
MIXERS = [
    dict(type='aft_mm.AFTLocal', window=4, rank=4),
    dict(type='aft_mm.AFTConv', num_heads=4, kernel_size=5),
    dict(type='aft_mm.AFTSimple'),
    dict(type='aft_mm.SoftmaxAttention', num_heads=2),
]
every_mixer = pytest.mark.parametrize('mixer', MIXERS, ids=lambda mixer: mixer['type'])


def parts(mixer, **head):
    return dict(
        decoder=dict(
            type='aft_mm.SequenceDecoder',
            embed_dims=16,
            num_layers=2,
            embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=V),
            token_mixer=mixer,
            grid=(T,),
        ),
        head=dict(type='aft_mm.CategoricalHead', embed_dims=16, num_classes=V, **head),
    )


def language_models(mixer=MIXERS[0], **head):
    torch.manual_seed(0)
    model = hf.AFTForCausalLM(hf.AFTTextConfig(parts(mixer, **head), pad_token_id=0)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    ours = AutoregressiveModel(**parts(mixer, **head)).eval()
    ours.load_state_dict(model.state_dict())
    return model, ours


def tokens(*shape):
    return torch.randint(1, V, shape)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def assert_same_model(loaded, model, inputs):
    """Compare all weights by bits, logits to rounding, which depends on the place in memory."""
    states = loaded.state_dict(), model.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    torch.testing.assert_close(loaded(inputs).logits, model(inputs).logits)


def test_logits_and_loss_are_ours():
    model, ours = language_models()
    for length in (5, T):  # without and with a token after the last one
        ids = tokens(3, length)
        output = model(ids, labels=ids)
        torch.testing.assert_close(output.loss, ours(ids, mode='loss')['loss'])
        expected = ours.head.logits(ours(ids))[:, 1:]
        torch.testing.assert_close(output.logits[:, : length - 1], expected)
        assert output.logits.shape == (3, length, V)
    labels = ids.clone()
    labels[:, :7] = -100
    nats = ours.head.nats(ours(ids), ids)[:, 7:].mean()
    torch.testing.assert_close(model(ids, labels=labels).loss, nats)


def test_padding_on_either_side_changes_nothing():
    model, _ = language_models()
    ids = tokens(1, 9)
    alone = model(ids, labels=ids)
    for sides in ((3, 0), (0, 3), (2, 1)):
        mask = torch.nn.functional.pad(torch.ones_like(ids), sides)
        padded = torch.nn.functional.pad(ids, sides)
        output = model(padded, mask, labels=padded.masked_fill(mask == 0, -100))
        torch.testing.assert_close(output.logits[mask.bool()], alone.logits[0])
        torch.testing.assert_close(output.loss, alone.loss)


@pytest.mark.parametrize(
    'options', [dict(num_beams=3), dict(do_sample=True), dict(do_sample=True, num_beams=2)]
)
@every_mixer
def test_generation_with_the_state_is_that_without(mixer, options):
    model, _ = language_models(mixer)
    ids, found = tokens(2, 5), []
    for use_cache in (True, False):
        torch.manual_seed(1)
        found.append(model.generate(ids, max_length=T, use_cache=use_cache, **options))
    assert torch.equal(*found)


def test_checkpointing_changes_memory_not_gradients():
    model, _ = language_models()
    model.train()
    ids, grads = tokens(2, 9), []
    for enable in (False, True):
        model.zero_grad()
        if enable:
            model.activation_checkpointing_enable({'use_reentrant': False})
        saved: list = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, saved=saved: saved.append(x) or x, lambda x: x
        ):
            output = model(ids, labels=ids, output_hidden_states=True)
        output.loss.backward()
        grads.append((len(saved), [x.grad for x in model.parameters()]))
        assert model.is_activation_checkpointing is enable
    assert grads[1][0] < grads[0][0] and equal(grads[0][1], grads[1][1])
    model.activation_checkpointing_disable()
    assert not model.is_activation_checkpointing
    model.activation_checkpointing_enable(every_n_layers=2)
    assert [layer.gradient_checkpointing for layer in model.decoder.layers] == [True, False]


def test_hidden_states_are_those_of_the_blocks():
    model, ours = language_models()
    ids = tokens(2, 9)
    output = model(ids, output_hidden_states=True)
    states = output.hidden_states
    assert len(states) == 1 + len(ours.decoder.layers)
    torch.testing.assert_close(ours.head.logits(states[-1]), output.logits)
    block = ours.decoder.layers[1]
    whole = torch.nn.functional.pad(ids, (0, 1))
    x = ours.decoder.layers[0](ours.decoder._embed(whole)[:, :10])
    torch.testing.assert_close(states[1], x[:, 1:])
    torch.testing.assert_close(states[-1], ours.decoder.norm(block(x))[:, 1:])
    padded = model(
        torch.nn.functional.pad(ids, (3, 0)),
        torch.nn.functional.pad(torch.ones_like(ids), (3, 0)),
        output_hidden_states=True,
    )
    torch.testing.assert_close(padded.hidden_states[-1][:, 3:], states[-1])
    assert model(ids).hidden_states is None
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match='output_hidden_states must be False with a filled cache'):
        model(ids[:, :1], past_key_values=cache, output_hidden_states=True)


@pytest.mark.parametrize('tied', [False, True])
def test_the_vocabulary_grows_and_shrinks(tied, tmp_path):
    model, _ = language_models(tied=tied)
    ids = tokens(2, 9)
    before = model(ids).logits
    assert model.resize_token_embeddings(pad_to_multiple_of=8) is model.get_input_embeddings()
    found = model(ids).logits
    assert model.config.vocab_size == found.shape[-1] == 16
    torch.testing.assert_close(found[..., :V], before)
    model(ids.clamp_min(14))  # a new token
    model.save_pretrained(tmp_path)
    loaded = hf.AFTForCausalLM.from_pretrained(tmp_path)
    assert_same_model(loaded, model, ids)
    loaded.resize_token_embeddings(V)
    torch.testing.assert_close(loaded(ids).logits, before)
    table = torch.nn.Embedding(V, 16)
    loaded.set_input_embeddings(table)
    assert loaded.get_input_embeddings().weight is table.weight
    with pytest.raises(ValueError, match=r'value must be an embedding \[11, 16\]'):
        loaded.set_input_embeddings(torch.nn.Embedding(V + 1, 16))


@pytest.mark.parametrize('tied', [False, True])
def test_a_language_model_is_saved_and_loaded(tied, tmp_path):
    mixer = dict(type='aft_mm.TokenShift')  # its one-hot weights are not saved
    model, ours = language_models(mixer, tied=tied)
    model.save_pretrained(tmp_path)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokens(2, 9)
    assert type(loaded) is hf.AFTForCausalLM
    assert_same_model(loaded, model, ids)
    ours.load_state_dict(loaded.state_dict())


@pytest.mark.parametrize('backbone', [IMAGES, FULL], ids=['mean', 'class-token'])
def test_an_image_model_is_saved_and_loaded(backbone, tmp_path):
    from transformers import AutoBackbone, AutoModel, AutoModelForImageClassification

    model = hf.AFTForImageClassification(hf.AFTConfig(backbone, num_labels=5)).eval()
    image, labels = torch.randn(2, 3, 32, 48), torch.tensor([1, 4])
    output = model(image, labels=labels, output_hidden_states=True)
    torch.testing.assert_close(
        output.loss, torch.nn.functional.cross_entropy(output.logits, labels)
    )
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert_same_model(loaded, model, image)

    base = AutoModel.from_pretrained(tmp_path).eval()(image)
    torch.testing.assert_close(model.head['fc'](base.pooler_output), output.logits)
    torch.testing.assert_close(
        model.backbone.norm(output.hidden_states[-1]), base.last_hidden_state
    )
    stages = ['stem', 'stage1', 'stage3']
    features = hf.AFTBackbone.from_pretrained(tmp_path, out_features=stages).eval()
    assert features.channels == [16, 16, 16]
    found = features(image, output_hidden_states=True)
    states, grid = output.hidden_states, 6
    assert len(states) == 4 and states[0].shape == states[3].shape
    for maps, expected in (
        (found.feature_maps, (*states[:2], base.last_hidden_state)),
        (features(image).feature_maps, (*states[:2], base.last_hidden_state)),
        (found.hidden_states, states),
    ):
        for one, tokens in zip(maps, expected, strict=True):
            assert one.shape == (2, 16, 2, 3)
            torch.testing.assert_close(one.flatten(2).mT, tokens[:, -grid:])
    stem = hf.AFTBackbone.from_pretrained(tmp_path, out_indices=[0]).eval()(image).feature_maps
    assert torch.equal(stem[0], found.feature_maps[0])
    assert type(AutoBackbone.from_config(model.config)) is hf.AFTBackbone

    fresh = AutoModelForImageClassification.from_pretrained(
        tmp_path, num_labels=7, ignore_mismatched_sizes=True
    )
    assert fresh(image).logits.shape == (2, 7)
    assert 0.005 < fresh.head['fc'].weight.std() < 0.05  # initialised, not left as memory


def test_an_image_may_have_several_labels():
    model = hf.AFTForImageClassification(hf.AFTConfig(IMAGES, num_labels=5)).eval()
    image, labels = torch.randn(2, 3, 32, 32), torch.randint(2, (2, 5)).float()
    output = model(image, labels=labels)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(output.logits, labels)
    torch.testing.assert_close(output.loss, expected)
    model.config.problem_type = 'regression'
    expected = torch.nn.functional.mse_loss(output.logits, labels)
    torch.testing.assert_close(model(image, labels=labels).loss, expected)


def test_image_weights_are_those_of_the_plain_classifier():
    model = hf.AFTForImageClassification(hf.AFTConfig(FULL, num_labels=5)).eval()
    mixer = dict(type='aft_mm.AFTFull', rank=128)
    options = dict(class_token=True, global_pool='token', num_classes=5)
    plain = AFTClassifier(IMAGES['arch'], mixer, img_size=32, **options).eval()
    plain.load_state_dict(model.state_dict())
    image = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(plain(image), model(image).logits)
    model.load_state_dict(plain.state_dict())


def test_trainer_runs_an_epoch_of_the_digits(tmp_path):
    pytest.importorskip('accelerate', reason='accelerate is not installed')
    from transformers import Trainer, TrainingArguments

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    samples = StackDataset(pixel_values=images, labels=torch.tensor(digits.target))
    train, test = torch.utils.data.random_split(samples, [1437, 360])
    mixer = dict(type='aft_mm.AFTConv', num_heads=8, kernel_size=5)
    backbone = dict(
        arch=dict(embed_dims=32, num_layers=2),
        img_size=8,
        patch_size=2,
        in_channels=1,
        token_mixer=mixer,
    )
    torch.manual_seed(0)
    model = hf.AFTForImageClassification(hf.AFTConfig(backbone, num_labels=10))
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.trunc_normal_(layer.weight, std=layer.in_features**-0.5)
    arguments = TrainingArguments(
        tmp_path,
        num_train_epochs=1,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy='no',
        gradient_checkpointing=True,
    )
    trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=test)
    before = trainer.evaluate()['eval_loss']
    trainer.train()
    assert trainer.evaluate()['eval_loss'] < 0.8 * before


def test_messages():
    with pytest.raises(ValueError, match='head must be a CategoricalHead, got'):
        head = dict(type='aft_mm.LogisticMixtureHead', embed_dims=16, num_channels=3)
        model = parts(MIXERS[0])
        model['decoder']['embedding'] = dict(type='aft_mm.PixelEmbedding', num_channels=3)
        hf.AFTForCausalLM(hf.AFTTextConfig({**model, 'head': head}))
    model, _ = language_models()
    refuses(f'position table of {T} tokens, got {T + 1}', model, tokens(1, T + 1))
    with pytest.raises(ValueError, match=r'attention_mask must be of the shape \[2, 5\]'):
        model(tokens(2, 5), attention_mask=tokens(2, 3))
    refuses(r'labels must be of the shape \[2, 5\]', model, tokens(2, 5), labels=tokens(2, 3))
    refuses('new_num_tokens must be an int, 1 or larger, got 0', model.resize_token_embeddings, 0)
    assert model.config.vocab_size == len(model.get_input_embeddings().weight) == V
    refuses('arch must be one of .*, got .huge', hf.AFTConfig, backbone=dict(arch='huge'))
    with pytest.raises(ValueError, match='model.decoder must be a dict with embed_dims'):
        hf.AFTTextConfig(model=dict(decoder=dict(embed_dims=8)))
    config = hf.AFTTextConfig()
    config.model['decoder']['num_layers'] = 1
    assert hf.AFTTextConfig().num_hidden_layers > 1


def test_the_documented_example_runs():
    first, language_model, *_, example, conversion = blocks(
        'docs/tutorials/plain_pytorch.md', 'python'
    )
    names: dict = {}
    for code in (first, language_model, example, conversion):
        exec(code, names)
    assert names['text'].shape[0] == 2 and names['text'].shape[1] > 16
