"""What the workflow of a release attests."""

import yaml


def test_every_file_is_attested_before_it_is_published(root):
    text = (root / '.github/workflows/release.yml').read_text()
    job = yaml.safe_load(text)['jobs']['publish']
    assert job['permissions'] == dict.fromkeys(('attestations', 'contents', 'id-token'), 'write')
    steps = [step.get('uses', step.get('run')) for step in job['steps']]
    names = [text.split('@')[0].split()[0] for text in steps]
    assert names == [
        'actions/download-artifact',
        'actions/attest-build-provenance',
        'mv',
        'pypa/gh-action-pypi-publish',
        'gh',
    ]
    assert job['steps'][1]['with'] == {'subject-path': 'dist/*'}
    assert 'attestations' not in job['steps'][3]['with']  # on by default
