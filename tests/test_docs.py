"""What the documents tell a reader to do works when it is done to the letter."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r'^```(\w+)(?: (\w+))?\n(.*?)^```', re.DOTALL | re.MULTILINE)


def blocks(page, of=None):
    """(language, text) of the fenced blocks of a page, those of one chapter if `of` names it."""
    found = BLOCK.findall((ROOT / 'docs' / page).read_text())
    return [(language, text) for language, chapter, text in found if of in (None, chapter)]


def follow(chapter, scratch):
    """Does what a chapter of adding.md says in a copy of the project."""
    copied = ('transformer_jax', 'tests', 'benchmarks', 'experiments', 'setup.cfg')
    for name in copied:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, scratch / name)
    done = []
    for language, text in blocks('adding.md', chapter):
        if language == 'diff':
            command = ['git', 'apply', '--recount', '-C1', '-']
            subprocess.run(command, cwd=scratch, input=text, text=True, check=True)
        elif language == 'bash':
            program = text.strip().replace('python ', f'{sys.executable} ', 1).split()
            environment = {**os.environ, 'PYTHONPATH': str(scratch)}
            ran = subprocess.run(program, cwd=scratch, env=environment, capture_output=True, text=True)
            assert ran.returncode == 0 and re.search(r'\d+ passed', ran.stdout), ran.stdout[-3000:] + ran.stderr[-1000:]
        else:
            first, rest = text.split('\n', 1)
            (scratch / first.removeprefix('# FILE ')).write_text(rest)
        done.append(language)
    assert {'diff', 'python', 'bash'} <= set(done)


@pytest.mark.parametrize('chapter', ['layer', 'dataset'])
def test_the_chapters_of_adding_work_when_followed_literally(chapter, tmp_path):
    follow(chapter, tmp_path)


@pytest.mark.parity
def test_the_chapter_of_adding_a_family_works_when_followed_literally(tmp_path):
    pytest.importorskip('torch')
    pytest.importorskip('transformers')
    follow('family', tmp_path)


def test_the_python_of_decoding_runs_from_top_to_bottom():
    names: dict = {}
    code = [text for language, text in blocks('decoding.md') if language == 'python']
    assert len(code) >= 4
    for text in code:
        exec(text, names)
