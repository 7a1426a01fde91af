"""Runs of several processes are those of tests/training, which pytest finds only beside its own tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / 'training'))
