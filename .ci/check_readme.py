"""Runs the commands of a README: every ```bash block that follows a line `<!-- run -->`, in order, in one shell.

They run in a given new directory which links to the project's experiments/, so that they leave nothing in the tree.
"""

import re
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r'<!-- run -->\s*\n```bash\n(.*?)^```', re.DOTALL | re.MULTILINE)


def main(readme: Path, scratch: Path) -> None:
    blocks = BLOCK.findall(readme.read_text())
    if not blocks:
        sys.exit(f'{readme} has no block marked <!-- run -->')
    scratch.mkdir()
    (scratch / 'experiments').symlink_to(readme.resolve().parent / 'experiments')
    done = subprocess.run(['bash', '-euxo', 'pipefail', '-c', '\n'.join(blocks)], cwd=scratch)
    if done.returncode:
        sys.exit(f'a command of {readme} failed with exit status {done.returncode}')
    print(f'{len(blocks)} blocks of {readme} ran')


if __name__ == '__main__':
    main(Path(sys.argv[1]), Path(sys.argv[2]))
