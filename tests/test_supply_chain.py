"""What the workflows of a release and of a night run and attest."""

import re

import yaml


def workflows(root):
    return {
        path.stem: yaml.safe_load(path.read_text())
        for path in (root / '.github/workflows').glob('*.yml')
    }


def test_workflows_call_targets_of_the_makefile(root):
    targets = set(re.findall(r'^([\w-]+):', (root / 'Makefile').read_text(), re.M))
    called = {
        step['run'].split()[1]
        for workflow in workflows(root).values()
        for job in workflow['jobs'].values()
        for step in job['steps']
        if step.get('run', '').startswith('make ')
    }
    assert {'audit', 'wheels', 'release-check', 'check-tag'} <= called <= targets


def test_every_file_is_attested_before_it_is_published(root):
    job = workflows(root)['release']['jobs']['publish']
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
