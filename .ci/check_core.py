"""Checks the core install: no TensorFlow, no torch; `import transformer_jax` is quick and initialises no device."""

import importlib.metadata
import subprocess
import sys

FORBIDDEN = ('tensorflow', 'tensorflow-cpu', 'torch')
LONGEST_IMPORT = 2.0  # seconds, the best of three
PROBE = """
import time; start = time.perf_counter()
import transformer_jax
seconds = time.perf_counter() - start
import sys
if 'jax' in sys.modules:
    from jax._src import xla_bridge
    assert not xla_bridge.backends_are_initialized(), 'import transformer_jax initialised a device'
print(seconds)
"""


def main() -> None:
    installed = {distribution.metadata['Name'].lower() for distribution in importlib.metadata.distributions()}
    found = installed.intersection(FORBIDDEN)
    if found:
        sys.exit(f'the core install brought {", ".join(sorted(found))}; core dependencies must not')
    seconds = min(
        float(subprocess.run([sys.executable, '-c', PROBE], check=True, stdout=subprocess.PIPE, text=True).stdout)
        for _ in range(3)
    )
    if seconds > LONGEST_IMPORT:
        sys.exit(f'import transformer_jax took {seconds:.2f} s; it should take less than {LONGEST_IMPORT} s')
    print(f'core install: no {", no ".join(FORBIDDEN)}; import takes {seconds:.2f} s and touches no device')


if __name__ == '__main__':
    main()
