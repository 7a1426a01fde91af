"""The package: no device and no heavy library at import, one import site for each, and floors which stay floors."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import transformer_jax

ROOT = Path(transformer_jax.__file__).parent
# A room may import only rooms of its own floor or below; those on the ground know no model.
FLOORS = [
    {'errors'}, {'decode_config', 'subconfigs'}, {'config', 'data', 'sharding', 'checkpoints'}, {'presets', 'ops'},
    {'layers'}, {'models'}, {'training', 'decoding', 'huggingface', 'analysis', 'quantization'},
    {'sweeps'},
]  # fmt: skip
GROUND = {'data', 'sharding', 'checkpoints'}
ONE_SITE = {
    'orbax': 'checkpoints', 'tensorflow_datasets': 'data', 'sentencepiece': 'data', 'grain': 'data',
    'sacrebleu': 'training', 'matplotlib': 'analysis', 'tensorboardX': 'training', 'safetensors': 'huggingface',
}  # fmt: skip


def in_a_new_process(code):
    result = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT.parent)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_the_package_imports_nothing_heavy_and_initialises_no_backend():
    loaded = in_a_new_process(
        'import json, sys, transformer_jax\n'
        'config = transformer_jax.preset("transformer_base")\n'
        'print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))'
    )
    heavy = {'torch', 'tensorflow', 'tensorflow_datasets', 'orbax', 'grain', 'sentencepiece', 'matplotlib', 'jax'}
    assert not heavy & set(loaded)


def test_importing_every_module_initialises_no_backend_and_neither_torch_nor_tensorflow():
    found = in_a_new_process(
        'import importlib, json, pkgutil, sys, transformer_jax, experiments\n'
        'names = [m.name for p in (transformer_jax, experiments)\n'
        '         for m in pkgutil.walk_packages(p.__path__, p.__name__ + ".")]\n'
        'from absl import flags\n'
        'for name in names:\n'
        '    importlib.import_module(name)\n'
        '    # Programs share names of flags; only one of them is imported in real life.\n'
        '    if name.startswith("experiments"):\n'
        '        for flag in flags.FLAGS.get_flags_for_module(name): delattr(flags.FLAGS, flag.name)\n'
        'from jax._src import xla_bridge\n'
        'print(json.dumps([len(names), len(xla_bridge._backends), sorted({n.split(".")[0] for n in sys.modules})]))'
    )
    assert found[0] > 50
    assert found[1] == 0
    assert not {'torch', 'tensorflow', 'transformers'} & set(found[2])


def imports():
    """(file, module which it imports) of the whole library, those inside functions too."""
    for path in sorted(ROOT.rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                if node.module == 'transformer_jax':
                    yield from ((path, f'transformer_jax.{alias.name}') for alias in node.names)
                else:
                    yield path, node.module


def test_a_floor_imports_only_floors_below_it():
    height = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
    for path, module in imports():
        own = path.relative_to(ROOT).parts[0].removesuffix('.py')
        if not module.startswith('transformer_jax.') or own == '__init__':
            assert not module.startswith('experiments')
            continue
        other = module.split('.')[1]
        if own in GROUND:
            assert other == own or other in ('errors', 'config', 'decode_config'), (path, module)
        elif own != other:
            assert height[other] <= height[own], (path, module)


def test_type_checkers_see_the_names_which_are_imported_when_first_used():
    tree = ast.parse((ROOT / '__init__.py').read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname: node.module for node in block.body for alias in node.names}
    assert seen == transformer_jax._FACE


def test_each_heavy_library_has_one_room():
    for path, module in imports():
        room = ONE_SITE.get(module.split('.')[0])
        assert room in (None, path.relative_to(ROOT).parts[0]), (path, module)
        assert module.split('.')[0] not in ('torch', 'tensorflow', 'transformers')
