"""A script in a fork behaves as in a new Python process (`run` in conftest.py)."""

import pytest

SCRIPTS = {
    'the arguments': """
import json, os, sys
names = ('PYTHONPATH', 'GIVEN', 'INHERITED')
print(json.dumps([sys.argv, os.getcwd(), __name__, __file__, *map(os.environ.get, names)]))
own = [path for path in sys.path if 'own' in path]
print(own, sys.stdin.read(), json.__name__)
""",
    'an exit function': "import atexit; atexit.register(print, 'the end')",
    'an exit code': 'import sys; sys.exit(3)',
    'a message': "import sys; print('out'); sys.exit('a message')",
    'a signal': 'import os, signal; os.kill(os.getpid(), signal.SIGKILL)',
    'worker processes': """
from multiprocessing import Pool
def square(x):
    return x * x
if __name__ == '__main__':
    with Pool(2) as pool:
        print(pool.map(square, range(5)))
""",
}


@pytest.mark.parametrize('what', SCRIPTS)
def test_a_fork_behaves_as_a_new_python(run, tmp_path, monkeypatch, what):
    monkeypatch.setenv('INHERITED', 'yes')
    script, folder = tmp_path / 'own/script.py', tmp_path / 'folder'
    script.parent.mkdir()
    script.write_text(SCRIPTS[what])
    folder.mkdir()
    options = dict(cwd=folder, env=dict(GIVEN='given', PYTHONPATH=str(tmp_path / 'own2')))
    fork = run(script, 'a', 1, **options)
    fresh = run(script, 'a', 1, **options, fresh=True)
    assert (fork.returncode, fork.stdout, fork.stderr) == (
        fresh.returncode,
        fresh.stdout,
        fresh.stderr,
    )


def test_forks_have_different_seeds(run, tmp_path):
    code = 'import random, numpy; print(random.random(), numpy.random.rand())'
    (tmp_path / 'a.py').write_text(code)
    first, second = (run(tmp_path / 'a.py', cwd=tmp_path).stdout.split() for _ in range(2))
    assert first[0] != second[0] and first[1] != second[1]


def test_a_bug_leaves_its_traceback(run, tmp_path):
    (tmp_path / 'a.py').write_text('{}[0]')
    result = run(tmp_path / 'a.py', cwd=tmp_path)
    assert result.returncode == 1 and result.stderr.splitlines()[-1] == 'KeyError: 0'
