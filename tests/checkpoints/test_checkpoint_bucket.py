"""Checkpoints are read out of a bucket: gs:// paths, arrays by tensorstore's own client, from a server on loopback."""

from __future__ import annotations

import http.server
import json
import threading
import urllib.parse

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fsspec.implementations.dirfs import DirFileSystem

from transformer_jax.checkpoints import CheckpointManager, list_arrays, list_steps, restore_params


class Bucket(http.server.BaseHTTPRequestHandler):
    """The two requests of the JSON interface of Cloud Storage which reading needs: an object, and a list."""

    protocol_version = 'HTTP/1.1'
    root = None
    asked: list[str] = []

    def do_GET(self):
        path, _, query = self.path.partition('?')
        options = urllib.parse.parse_qs(query)
        self.asked.append(path)
        prefix = '/storage/v1/b/bucket/o'
        if path.rstrip('/') == prefix:
            start = options.get('prefix', [''])[0]
            names = sorted(str(file.relative_to(self.root)) for file in self.root.rglob('*') if file.is_file())
            self._answer(200, json.dumps({'items': [self._item(name) for name in names if name.startswith(start)]}))
            return
        file = self.root / urllib.parse.unquote(path.removeprefix(prefix + '/'))
        if not file.is_file():
            self._answer(404, '{"error": {"code": 404}}')
        elif options.get('alt') != ['media']:
            self._answer(200, json.dumps(self._item(str(file.relative_to(self.root)))))
        else:
            content, status = file.read_bytes(), 200
            if 'Range' in self.headers:
                first, _, last = self.headers['Range'].removeprefix('bytes=').partition('-')
                self.extra = {'Content-Range': f'bytes {first}-{last or len(content) - 1}/{len(content)}'}
                content, status = content[int(first) : int(last) + 1 if last else None], 206
            self._answer(status, content)

    def _item(self, name):
        size = str((self.root / name).stat().st_size)
        return {'name': name, 'bucket': 'bucket', 'size': size, 'generation': '1', 'updated': '2026-01-01T00:00:00Z'}

    def _answer(self, status, content):
        content = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        for name, value in {'x-goog-generation': '1', **getattr(self, 'extra', {})}.items():
            self.send_header(name, value)
        self.extra = {}
        self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A folder which is also gs://bucket: for epath by a file system of fsspec, for tensorstore by a server."""

    class Folder(DirFileSystem):
        protocol = 'gcs'

        def __init__(self, **options):
            super().__init__(path=str(tmp_path), fs=fsspec.filesystem('file'))

        @classmethod
        def _strip_protocol(cls, path):
            return str(path).removeprefix('gs://')

        def _join(self, path):
            return super()._join(self._strip_protocol(path) if isinstance(path, str) else path)

    fsspec.register_implementation('gcs', Folder, clobber=True)
    (tmp_path / 'bucket').mkdir()
    Bucket.root, Bucket.asked = tmp_path / 'bucket', []
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Bucket)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv('TENSORSTORE_GCS_HTTP_URL', f'http://127.0.0.1:{server.server_port}')
    monkeypatch.setenv('GOOGLE_AUTH_TOKEN_FOR_TESTING', 'none')
    yield tmp_path / 'bucket'
    server.shutdown()
    server.server_close()


def test_what_was_saved_on_a_disk_and_copied_to_a_bucket_is_read_from_there(bucket):
    state = {'params': {'w': jnp.arange(12.0).reshape(3, 4), 'b': jnp.ones(2, jnp.bfloat16)}, 'step': jnp.int32(7)}
    with CheckpointManager(bucket / 'run' / 'checkpoints') as manager:
        manager.save(7, state, {'metrics': {'loss': 1.5}})
    (summary,) = list_steps('gs://bucket/run', verify=True)
    assert (summary.step, summary.state, summary.metrics) == (7, 'intact', {'loss': 1.5})
    assert list_arrays('gs://bucket/run') == list_arrays(bucket / 'run')
    assert not Bucket.asked
    params = restore_params('gs://bucket/run')
    jax.tree.map(np.testing.assert_array_equal, params, jax.tree.map(np.asarray, state['params']))
    assert any('params.w' in path for path in Bucket.asked)
    reader = CheckpointManager('gs://bucket/run/checkpoints', read_only=True)
    restored = reader.restore(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state))
    assert restored.step == 7 and int(restored.state['step']) == 7
