# AN4, spelled, two layers behind three convolutions; the words are those of etc/an4.dic.
_base_ = [
    '../_base_/models/ctc_encoder.py',
    '../_base_/datasets/an4_phonemes.py',
    '../_base_/schedules/ctc_mini.py',
    '../_base_/ar_runtime.py',
]

words = (
    'A AND APOSTROPHE APRIL AREA AUGUST B C CODE D DECEMBER E EIGHT EIGHTEEN EIGHTEENTH EIGHTH EIGHTY '
    'ELEVEN ELEVENTH ENTER ERASE F FEBRUARY FIFTEEN FIFTEENTH FIFTH FIFTY FIRST FIVE FORTY FOUR '
    'FOURTEEN FOURTH G GO H HALF HELP HUNDRED I J JANUARY JULY JUNE K L M MARCH MAY N NINE NINETEEN '
    'NINETY NINTH NO NOVEMBER O OCTOBER OF OH ONE P Q R REPEAT RUBOUT S SECOND SEPTEMBER SEVEN '
    'SEVENTEEN SEVENTH SEVENTY SIX SIXTEEN SIXTEENTH SIXTH SIXTY START STOP T TEN THIRD THIRTEEN '
    'THIRTIETH THIRTY THOUSAND THREE TWELFTH TWELVE TWENTIETH TWENTY TWO U V W X Y YES Z ZERO'
).split()
units = dict(_delete_=True, symbols=' ABCDEFGHIJKLMNOPQRSTUVWXYZ')

# A convolution sees five stacks of 3 frames; the longest utterance has 210 stacks.
model = dict(
    lexicon=dict(units=dict(symbols=units['symbols']), words=words),
    encoder=dict(
        embed_dims=128,
        num_layers=2,
        grid=(256,),
        embedding=dict(
            type='aft_mm.ConvFrameEmbedding', num_features=39, num_layers=3, kernel_size=5
        ),
        token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=4),
    ),
    head=dict(embed_dims=128, num_classes=29),
)

train_dataloader = dict(batch_size=8, dataset=dict(units=units))
val_dataloader = dict(dataset=dict(units=units))
test_dataloader = dict(dataset=dict(units=units))

# Errors of free spelling, and of the most likely words of the list.
val_evaluator = [
    dict(type='aft_mm.ErrorRate', per=per, lexicon=lexicon)
    for lexicon in (False, True)
    for per in ('character', 'word')
]
test_evaluator = val_evaluator

train_cfg = dict(max_epochs=40, val_interval=20)
default_hooks = dict(checkpoint=dict(interval=20))
