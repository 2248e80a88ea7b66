"""Transcripts and their units."""

import pytest

from aft_mm.datasets import KaldiFeatures, read_transcripts
from aft_mm.tokenizers import TextUnits, read_lexicon


def test_words_are_looked_up_and_unknown_ones_are_one_unit(tmp_path):
    path = tmp_path / 'words.dic'
    path.write_bytes(
        b';;; comment\n# another\nA  AH0\nA(2)  EY1\n\xc9T\xc9  EH1 T EY2 # French\nTWO T UW1\n'
    )
    lexicon = str(path)
    assert read_lexicon(lexicon) == {'A': ('AH0',), 'ÉTÉ': ('EH1', 'T', 'EY2'), 'TWO': ('T', 'UW1')}
    units = TextUnits(['AH', 'EH', 'EY', 'T', 'UW'], lexicon, case='upper')
    found, unknown = units.encode('  a été   three ')
    assert found == (2, 3, 5, 4, 1) and unknown == ['THREE']
    assert units.decode(found) == 'AH EH T EY <unk>'
    stressed = TextUnits(['AH0', 'EH1', 'EY2', 'T', 'UW1'], lexicon)
    assert stressed.encode('TWO') == ((5, 6), []) and stressed.encode('two') == ((1,), ['two'])
    with pytest.raises(ValueError, match="says 'ÉTÉ' with 'EY', which is none of the 4 symbols"):
        TextUnits(['AH', 'EH', 'T', 'UW'], lexicon).encode('a')
    path.write_text('A AH\nB\n')
    with pytest.raises(ValueError, match="line 2 of lexicon .* has the word 'B' and no phonemes"):
        read_lexicon(lexicon)
    with pytest.raises(FileNotFoundError, match="'no.dic' does not exist"):
        TextUnits(['A'], 'no.dic').encode('a')


def test_characters():
    units = TextUnits(' abc', case='lower')
    assert units.names == ('<blank>', '<unk>', ' ', 'a', 'b', 'c')
    assert units.encode('A  cab!') == ((3, 2, 5, 3, 4, 1), ['!'])
    assert units.decode((3, 2, 5, 1)) == 'a c<unk>'
    for symbols, lexicon in (('aa', None), ('', None), (['AH', 'B'], None), (['AH', ''], 'a.dic')):
        with pytest.raises(ValueError, match='symbols must be'):
            TextUnits(symbols, lexicon)


@pytest.mark.parametrize(
    ('content', 'texts'),
    [
        (b'a1 yes  no\nb\tother\nc\n', {'a1': 'yes no', 'b': 'other', 'c': ''}),
        (b'take 1\tyes no\ntake 2\t\nb c\n', {'take 1': 'yes no', 'take 2': '', 'b': 'c'}),
        (b'<s> YES NO </s> (a-1)\n(b)\n', {'a-1': 'YES NO', 'b': ''}),
        (b'\xef\xbb\xbfa yes\r\nb no\r\n', {'a': 'yes', 'b': 'no'}),
        (b'a \xff yes\n', {'a': '\ufffd yes'}),
        (b'u1 hello (laughter)\nu2 bye\n', {'u1': 'hello (laughter)', 'u2': 'bye'}),
        (b'u1 (a)\nu2 (b)\nu3 c\nu4 d\n', {'u1': '(a)', 'u2': '(b)', 'u3': 'c', 'u4': 'd'}),
        (b'u1 (noise)\nu2 (noise)\n', {'u1': '(noise)', 'u2': '(noise)'}),
    ],
)
def test_formats(tmp_path, content, texts):
    path = tmp_path / 'text'
    path.write_bytes(content)
    assert read_transcripts(str(path))[0] == texts


@pytest.mark.parametrize(
    ('content', 'sentence'),
    [
        (b'', 'has no utterance'),
        (b'\n\n', 'has no utterance'),
        (b'a yes\nb no\na no\n', "line 3 of .* repeats the utterance 'a'"),
        (b'YES (a)\nNO\nNO (b)\n', 'line 2 of .* must end with an id in brackets, as most'),
        (b'YES\nNO (a)\nNO (b)\n', 'line 1 of .* must end with an id in brackets'),
        (b'YES (a)\nNO (b)\nYES (a)\n', "line 3 of .* repeats the utterance 'a'"),
    ],
)
def test_files_without_use_are_refused(tmp_path, content, sentence):
    path = tmp_path / 'text'
    path.write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        read_transcripts(str(path))


def test_a_text_of_kaldi_may_end_in_brackets_in_every_line(tmp_path):
    (tmp_path / 'text').write_text('u1 yes (a)\nu2 no (b)\n')
    (tmp_path / 'feats.scp').write_text('u1 x.ark:0\nu2 x.ark:0\n')
    data = KaldiFeatures(str(tmp_path), units=dict(symbols='abc'), lazy_init=True, pipeline=[])
    assert [found[::2] for found in data.find()] == [('u1', 'yes (a)'), ('u2', 'no (b)')]
