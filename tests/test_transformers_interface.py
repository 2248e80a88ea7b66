"""What Transformers and peft ask of the models: names of arguments, the cache between tokens."""

import inspect

import numpy as np
import pytest
import torch
from PIL import Image

from aft_mm.models import generate

pytest.importorskip('transformers', reason='transformers is not installed')
hf = pytest.importorskip('aft_mm.transformers', reason='transformers is not installed')

from .errors import refuses  # noqa: E402
from .test_transformers import IMAGES, T, V, every_mixer, language_models, tokens  # noqa: E402


def argmax_loop(model, ids, length):
    """Greedy generation without Transformers' loop and without a cache."""
    while ids.shape[1] < length:
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids


@every_mixer
def test_greedy_generation_is_ours(mixer):
    model, ours = language_models(mixer)
    ids = tokens(2, 6)
    expected = argmax_loop(model, ids, T)
    assert torch.equal(generate(ours, T, ids, greedy=True), expected)
    assert torch.equal(model.generate(ids, max_length=T, do_sample=False), expected)
    # Padding on the left takes no position, also if one prompt is shorter.
    padded = torch.nn.functional.pad(ids, (5, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (5, 0))
    mask[1, 5:8] = 0
    found = model.generate(padded, attention_mask=mask, max_length=T + 5, do_sample=False)
    assert torch.equal(found[0, 5:], expected[0])
    assert torch.equal(found[1, 8:], argmax_loop(model, ids[1:, 3:], T - 3)[0])
    with pytest.raises(ValueError, match=f'position table of {T} tokens, got {T + 1}'):
        model.generate(ids, max_length=T + 1, do_sample=False)
    with pytest.raises(ValueError, match=f'position table of {T} tokens, got {T + 1}'):
        model.generate(padded, attention_mask=mask, max_length=T + 6, do_sample=False)


@pytest.mark.parametrize('name', ['cache', 'past_key_values'])
def test_a_cache_has_either_name(name):
    model, _ = language_models()
    ids = tokens(2, 9)
    whole = model(ids).logits
    cache, sizes = hf.AFTCache(), set()
    torch.testing.assert_close(model(ids[:, :4], **{name: cache}).logits, whole[:, :4])
    mask = torch.ones_like(ids)
    for start, end, given in ((4, 6, None), (6, 7, mask[:, 6:7]), (7, 9, mask)):
        step = model(ids[:, start:end], given, **{name: cache})
        torch.testing.assert_close(step.logits, whole[:, start:end])
        state = cache.state.blocks[0].mixing
        sizes.add(sum(x.numel() for x in state if isinstance(x, torch.Tensor)))
    assert cache.get_seq_length() == 9 and len(sizes) == 1
    # All tokens, or the new ones only.
    text = argmax_loop(model, ids, T)
    more = text[:, :12]
    for given in (more, more[:, 9:]):
        filled = model(ids, use_cache=True)[1]
        options = dict(attention_mask=torch.ones_like(more), max_length=T - 12 + given.shape[1])
        found = model.generate(given, do_sample=False, **{name: filled}, **options)
        assert torch.equal(found[:, given.shape[1] :], text[:, 12:])


def test_a_cache_is_continued_by_its_own_tokens_only():
    model, _ = language_models()
    ids, cache = tokens(2, 6), hf.AFTCache()
    options = dict(max_length=10, do_sample=False)
    text = model.generate(ids, **options, cache=cache)
    assert torch.equal(text, argmax_loop(model, ids, 10)) and cache.get_seq_length() == 9
    others = tokens(2, 12)
    for given in (ids, text[:, :9], others, text[:1], torch.cat([text[:, 1:], text], 1)):
        message = r'input_ids must be the \[2, 9\] tokens of the cache and more'
        refuses(message, model.generate, given, max_length=T, do_sample=False, cache=cache)
    more = torch.cat([text, others[:, :1]], 1)
    found = model.generate(more, max_length=T, do_sample=False, cache=cache)
    assert torch.equal(found, argmax_loop(model, more, T))
    cache.reset()
    found = model.generate(ids, num_beams=2, **options, cache=cache)
    assert torch.equal(found, model.generate(ids, num_beams=2, **options))
    refuses('token must be one for each of the 4 sequences', model, ids[:, :1], cache=cache)


def test_what_transformers_would_keep_or_misread():
    model, _ = language_models()
    ids = tokens(2, 5)
    bias = torch.zeros(2, 5).masked_fill(torch.arange(5) > 2, -torch.inf)
    with pytest.raises(ValueError, match='attention_mask must be 1 for tokens and 0 for padding'):
        model(ids, attention_mask=bias)
    ones = torch.ones(2, 5)
    torch.testing.assert_close(model(ids, attention_mask=ones).logits, model(ids).logits)
    with pytest.raises(TypeError, match=r'token_mixer must be given as backbone=dict\(token_mixer'):
        hf.AFTConfig(token_mixer=dict(type='aft_mm.AFTConv'))
    with pytest.raises(TypeError, match="'bakbone' is no argument; did you mean 'backbone'"):
        hf.AFTConfig(bakbone=IMAGES)
    with pytest.raises(TypeError, match=r'decoder must be given as model=dict\(decoder'):
        hf.AFTTextConfig(decoder=dict(), head=dict())
    with pytest.raises(TypeError, match="did you mean 'model'"):
        hf.AFTTextConfig(modle=dict())


def test_a_lost_cache_is_an_error(monkeypatch):
    model, _ = language_models()
    forward = model.forward

    def forget(*args, **kwargs):
        return forward(*args, **{**kwargs, 'use_cache': False})

    forget.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(model, 'forward', forget)
    with pytest.raises(RuntimeError, match='the cache of 6 tokens must be passed'):
        model.generate(tokens(2, 6), max_length=T, do_sample=False)


def test_what_a_model_does_not_know_is_refused():
    from transformers import DynamicCache

    model, _ = language_models()
    ids = tokens(2, 5)
    logits = model(ids).logits
    # peft passes these.
    assert torch.equal(model(ids, inputs_embeds=None, output_attentions=False).logits, logits)
    with pytest.raises(ValueError, match='output_attentions must be None or False for AFTFor'):
        model(ids, output_attentions=True)
    for name, value in (('position_ids', ids), ('state', hf.AFTCache()), ('label', None)):
        with pytest.raises(TypeError, match=f"AFTForCausalLM has no argument '{name}', only input"):
            model(ids, **{name: value})
    refuses('cache must be an AFTCache, got', model, ids, cache=DynamicCache())
    with pytest.raises(ValueError, match='past_key_values must be None with a cache'):
        model(ids, cache=hf.AFTCache(), past_key_values=hf.AFTCache())
    image = torch.randn(1, 3, 32, 32)
    for cls in (hf.AFTModel, hf.AFTForImageClassification, hf.AFTBackbone):
        vision = cls(hf.AFTConfig(IMAGES))
        assert len(vision(image, output_attentions=None))
        with pytest.raises(TypeError, match=f"{cls.__name__} has no argument 'bool_masked_pos'"):
            vision(image, bool_masked_pos=image)


def test_a_filled_cache_takes_whole_tokens_only():
    model, _ = language_models()
    ids = tokens(2, 7)
    cache = model(ids, use_cache=True)[1]
    padded = torch.tensor([[1, 1], [1, 0]])
    with pytest.raises(ValueError, match='attention_mask must be 1 for the tokens after a filled'):
        model(ids[:, :2], padded, cache=cache)
    with pytest.raises(ValueError, match=r'attention_mask must be of the shape \[2, 2\].* 7 more'):
        model(ids[:, :2], torch.ones(2, 3), cache=cache)
    for name in ('labels', 'shift_labels'):
        with pytest.raises(ValueError, match=f'^{name} must be None with a filled cache'):
            model(ids[:, :2], cache=cache, **{name: ids[:, :2]})
    assert cache.get_seq_length() == 7 and not cache.is_croppable
    cache.crop(0)
    refuses('tokens_to_remove must be 0', cache.crop, 1)
    for change in (cache.reorder_cache, cache.batch_select_indices, cache.batch_repeat_interleave):
        with pytest.raises(NotImplementedError, match='AFTCache'):
            change(2)


def test_shifted_labels_give_the_loss_of_transformers():
    from transformers.loss.loss_utils import ForCausalLMLoss

    model, _ = language_models()
    text = tokens(3, 10)
    ids, after = text[:, :9], text[:, 1:].clone()
    after[0, 5:], after[1, 2] = -100, -100
    output = model(ids, shift_labels=after)
    expected = ForCausalLMLoss(output.logits, None, V, shift_labels=after)
    torch.testing.assert_close(output.loss, expected)
    # Transformers passes both, and labels count the first token.
    assert torch.equal(model(ids, labels=ids, shift_labels=after).loss, output.loss)
    assert not torch.isclose(model(ids, labels=ids).loss, output.loss)
    cached = model(ids, shift_labels=after, use_cache=True, logits_to_keep=1)
    assert torch.equal(cached.loss, output.loss) and cached.logits.shape[1] == 1
    padded, mask, labels = (
        torch.nn.functional.pad(x, (2, 0), value=value)
        for x, value in ((ids, 0), (torch.ones_like(ids), 0), (after, -100))
    )
    torch.testing.assert_close(model(padded, mask, shift_labels=labels).loss, output.loss)
    longest = tokens(2, T)
    after = torch.nn.functional.pad(longest[:, 1:], (0, 1), value=-100)
    output = model(longest, shift_labels=after)
    expected = ForCausalLMLoss(output.logits, None, V, shift_labels=after)
    torch.testing.assert_close(output.loss, expected)
    with pytest.raises(ValueError, match='shift_labels must be -100 for the token after the last'):
        model(longest, shift_labels=longest)
    refuses(r'shift_labels must be of the shape \[3, 9\]', model, ids, shift_labels=longest)


def test_trainer_smooths_the_labels_of_the_next_tokens(tmp_path):
    from transformers import Trainer, TrainingArguments

    model, _ = language_models()
    ids = tokens(3, 9)
    arguments = TrainingArguments(
        str(tmp_path), label_smoothing_factor=0.3, use_cpu=True, report_to=[]
    )
    loss = Trainer(model, arguments).compute_loss(model, dict(input_ids=ids, labels=ids))
    logits = model(ids).logits[:, :-1].mT
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:], label_smoothing=0.3)
    torch.testing.assert_close(loss, expected)


def test_new_rows_of_a_vocabulary_may_be_those_of_a_new_model():
    rows = []
    for mean_resizing in (True, False):
        model, _ = language_models()
        old = model.get_input_embeddings().weight.clone()
        new = model.resize_token_embeddings(13, mean_resizing=mean_resizing).weight
        assert torch.equal(new[:11], old)
        rows.append(new[11:])
    torch.testing.assert_close(rows[0], old.mean(0).expand(2, -1))
    assert 0 < rows[1].abs().max() < 0.1 and not torch.equal(*rows[1])


def picture(height=90, width=120):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def test_images_are_processed_as_in_the_configs(tmp_path):
    from mmcv.transforms import Compose
    from transformers import AutoImageProcessor

    processor = hf.AFTImageProcessor()
    image = picture(300, 500)
    found = processor(image, return_tensors='pt')['pixel_values']
    steps = [
        dict(type='mmpretrain.ResizeEdge', scale=256, backend='pillow', interpolation='bicubic'),
        dict(type='mmpretrain.CenterCrop', crop_size=224),
    ]
    expected = Compose(steps)(dict(img=np.array(image)))['img'] / 255
    mean, std = (np.array(x) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    expected = torch.tensor((expected - mean) / std, dtype=torch.float32).permute(2, 0, 1)
    torch.testing.assert_close(found[0], expected)

    processor = hf.AFTImageProcessor(
        size=dict(shortest_edge=40), crop_size=dict(height=32, width=32), do_convert_rgb=False
    )
    processor.save_pretrained(tmp_path)
    loaded = AutoImageProcessor.from_pretrained(tmp_path)
    assert type(loaded) is hf.AFTImageProcessor
    grey = loaded(image.convert('L'), image_mean=[0.5], image_std=[0.5])['pixel_values']
    assert np.shape(grey) == (1, 1, 32, 32)


def test_a_pipeline_classifies_images(tmp_path):
    from transformers import pipeline

    names = {0: 'cat', 1: 'dog', 2: 'owl'}
    config = hf.AFTConfig(IMAGES, num_labels=3, id2label=names)
    model = hf.AFTForImageClassification(config).eval()
    torch.nn.init.normal_(model.head['fc'].weight)
    processor = hf.AFTImageProcessor(
        size=dict(shortest_edge=36), crop_size=dict(height=32, width=32)
    )
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    found = pipeline('image-classification', model=str(tmp_path), top_k=3)(picture())
    inputs = processor(picture(), return_tensors='pt')
    expected = model(**inputs).logits.softmax(-1)[0].tolist()
    scores = {result['label']: result['score'] for result in found}
    assert scores == pytest.approx({names[i]: p for i, p in enumerate(expected)}, rel=1e-4)


def test_peft_saves_the_classifier_and_the_position_biases(tmp_path):
    peft = pytest.importorskip('peft', reason='peft is not installed')
    torch.manual_seed(0)
    mixer = dict(type='aft_mm.AFTConv', num_heads=4, kernel_size=3)
    base = hf.AFTForImageClassification(hf.AFTConfig(dict(IMAGES, token_mixer=mixer)))
    base.save_pretrained(tmp_path / 'base')
    before = {name: x.clone() for name, x in base.state_dict().items()}
    config = peft.LoraConfig(
        target_modules=['query', 'key', 'value', 'proj'], modules_to_save=['fc', 'pos_bias']
    )
    model = peft.get_peft_model(base, config)
    trained = [name for name, x in model.named_parameters() if x.requires_grad]
    assert any('fc' in name for name in trained) and any('pos_bias' in name for name in trained)
    images, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 0, 1])
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for _ in range(2):
        model(images, labels=labels).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(tmp_path / 'adapter')
    fresh = hf.AFTForImageClassification.from_pretrained(tmp_path / 'base')
    assert all(torch.equal(x, before[name]) for name, x in fresh.state_dict().items())
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / 'adapter').eval()
    found, expected = loaded(images).logits, model(images).logits
    torch.testing.assert_close(found, expected)
    text, _ = language_models()
    text = peft.get_peft_model(text, peft.LoraConfig('CAUSAL_LM', target_modules=['value']))
    ids = tokens(2, 5)
    assert text(ids, labels=ids).loss.isfinite()
    assert text.generate(input_ids=ids, max_length=8).shape == (2, 8)
