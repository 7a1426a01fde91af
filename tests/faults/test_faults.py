"""Real runs, killed and damaged: nothing is lost. The long form is `python -m tests.faults.harness --kills=50`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import runs
from tests.faults.lab import Lab, Record

ROOT = Path(__file__).parents[2]
FAULTS = ('damaged checkpoint', 'SIGTERM', 'full disk', 'two runs in one directory', 'clock going backwards')


@pytest.fixture(scope='module')
def records(tmp_path_factory):
    """Records of the short form, in a process which has no device yet, for its runs are forked from it."""
    output = tmp_path_factory.mktemp('faults') / 'records.json'
    command = [sys.executable, '-m', 'tests.faults.harness', '--others=short', '--kills=5', f'--output={output}']
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, 'PYTHONPATH': str(ROOT)}, capture_output=True, text=True
    )
    assert output.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    return [Record(**fields) for fields in json.loads(output.read_text())]


@pytest.mark.faults
def test_kill_9_at_any_moment_loses_nothing(records):
    kills = [record for record in records if record.fault == 'kill -9']
    assert len(kills) == 5
    assert [record for record in kills if record.wrong] == []


@pytest.mark.faults
@pytest.mark.parametrize('fault', FAULTS)
def test_no_other_fault_loses_anything(records, fault):
    found = [record for record in records if record.fault == fault]
    assert found and [record for record in found if record.wrong] == []


def sitting_with(*lines):
    live = runs.Live.__new__(runs.Live)
    live.lines = [['log', 'INFO', line] for line in lines] + [['over', 'finished', '12']]
    return live


def test_the_judge_sees_a_lost_step_and_a_reason_which_was_not_given():
    before = {2: 'intact', 4: 'intact', 6: 'damaged', 8: 'unfinished'}
    reasons = ['skipping checkpoint 6 is damaged (altered)', 'removing checkpoint 8 in x: not finished']
    for lines, wrong in (
        ([*reasons, 'going on from the checkpoint of step 4'], []),
        ([*reasons, 'going on from the checkpoint of step 2'], ['began at 2 instead of 4']),
        ([*reasons[:1], 'going on from the checkpoint of step 4'], ['did not say that it skipped checkpoint 8']),
        ([*reasons[1:], 'going on from the checkpoint of step 4'], ['did not say that it skipped checkpoint 6']),
    ):
        record = Record('kill -9', '')
        Lab.check_start(Lab.__new__(Lab), record, sitting_with(*lines), before)
        assert len(record.wrong) == len(wrong), record.wrong
        assert all(text in found for text, found in zip(wrong, record.wrong, strict=True))


def test_the_judge_sees_other_bits_another_result_and_a_line_written_twice():
    outcome = runs.Outcome({'w': '1'}, {'w': '2'}, {'loss': 1.0}, [{'step': 1}])
    assert outcome.differences(outcome) == []
    for field, value in (('arrays', {'w': '3'}), ('averaged', {}), ('result', {}), ('log', [{'step': 1}] * 2)):
        assert outcome.differences(runs.dataclasses.replace(outcome, **{field: value})) == [field]
