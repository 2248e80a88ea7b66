# AN4 with spelled transcripts, whose words can be counted; the words are those of etc/an4.dic.
_base_ = './an4_phonemes.py'

words = (
    'A AND APOSTROPHE APRIL AREA AUGUST B C CODE D DECEMBER E EIGHT EIGHTEEN EIGHTEENTH EIGHTH EIGHTY '
    'ELEVEN ELEVENTH ENTER ERASE F FEBRUARY FIFTEEN FIFTEENTH FIFTH FIFTY FIRST FIVE FORTY FOUR '
    'FOURTEEN FOURTH G GO H HALF HELP HUNDRED I J JANUARY JULY JUNE K L M MARCH MAY N NINE NINETEEN '
    'NINETY NINTH NO NOVEMBER O OCTOBER OF OH ONE P Q R REPEAT RUBOUT S SECOND SEPTEMBER SEVEN '
    'SEVENTEEN SEVENTH SEVENTY SIX SIXTEEN SIXTEENTH SIXTH SIXTY START STOP T TEN THIRD THIRTEEN '
    'THIRTIETH THIRTY THOUSAND THREE TWELFTH TWELVE TWENTIETH TWENTY TWO U V W X Y YES Z ZERO'
).split()
units = dict(_delete_=True, symbols=' ABCDEFGHIJKLMNOPQRSTUVWXYZ')

train_dataloader = dict(dataset=dict(units=units))
val_dataloader = dict(dataset=dict(units=units))
test_dataloader = dict(dataset=dict(units=units))

# Errors of free spelling, and of the most likely words of the list.
val_evaluator = [
    dict(type='aft_mm.ErrorRate', per=per, lexicon=lexicon)
    for lexicon in (False, True)
    for per in ('character', 'word')
]
test_evaluator = val_evaluator
