"""Several processes as one run: a roll call, then `jax.distributed`."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import selectors
import socket
import time
from collections.abc import Sequence

import jax
from jax._src.clusters import ClusterEnv

from transformer_jax.errors import UserError

_logger = logging.getLogger(__name__)
_RETRY_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Processes:
    """Who takes part: this process's number among `count`, and where process 0 listens ('host:port')."""

    coordinator: str
    index: int
    count: int
    local_devices: Sequence[int] | None = None


def start(
    coordinator: str | None = None,
    process_id: int | None = None,
    process_count: int | None = None,
    timeout_seconds: float = 300,
) -> Processes | None:
    """Joins this process to the others of its run; to be called before anything asks for a device.

    Without arguments the cluster tells (TPU pods on GCE or GKE, SLURM, Open MPI, Kubernetes, by jax's own detection),
    and where there is none, or one process alone, nothing is done and None is returned.

    Args:
      coordinator: 'host:port' of process 0; process_id: from 0; process_count: all together, or none of the three.
      timeout_seconds: how long to wait for the others.

    Raises:
      UserError: naming the processes which did not call in within `timeout_seconds`, for two of one number, or if the
        arguments are incomplete.
    """
    processes = _given(coordinator, process_id, process_count) or _detected(timeout_seconds)
    if processes is None or processes.count == 1:
        return None
    begin = time.monotonic()
    roll_call(processes, timeout_seconds)
    _logger.info(
        'process %d of %d: all called in at %s after %.1f s',
        processes.index, processes.count, processes.coordinator, time.monotonic() - begin,
    )  # fmt: skip
    jax.distributed.initialize(
        processes.coordinator,
        processes.count,
        processes.index,
        local_device_ids=processes.local_devices,
        cluster_detection_method='deactivate',
        initialization_timeout=max(round(timeout_seconds), 1),
    )
    _logger.info('%d devices of %d processes, %d of them here', jax.device_count(), processes.count,
                 jax.local_device_count())  # fmt: skip
    return processes


def _given(coordinator: str | None, process_id: int | None, process_count: int | None) -> Processes | None:
    values = {'coordinator': coordinator, 'process_id': process_id, 'process_count': process_count}
    missing = [f'--{name}' for name, value in values.items() if value is None]
    if len(missing) == len(values):
        return None
    if missing:
        given = ', '.join(f'--{name}={value}' for name, value in values.items() if value is not None)
        raise UserError(f'{given} needs {" and ".join(missing)} too; give all three, or none on a cluster which tells')
    if not 0 <= process_id < process_count:
        raise UserError(f'--process_id={process_id} is not one of --process_count={process_count}; count from 0')
    _address(coordinator)
    return Processes(coordinator, process_id, process_count)


def _detected(timeout_seconds: float) -> Processes | None:
    coordinator = os.environ.get('JAX_COORDINATOR_ADDRESS')
    try:
        address, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, None, None, None, None, round(timeout_seconds)
        )
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        _logger.warning('no cluster was found (%s: %s); going on alone', type(error).__name__, error)
        return None
    return None if count is None else Processes(address, index, count, devices)


def _address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(':')
    if not host or not port.isdigit():
        raise UserError(f"--coordinator='{coordinator}' is no address; give host:port of process 0")
    return host.strip('[]'), int(port)


def roll_call(processes: Processes, timeout_seconds: float) -> None:
    """Returns once every process has called process 0, on the port which the coordination service takes afterwards.

    jax's own start ends a process from within C++ when others are missing, and does not say which; so they are counted
    before it. A call is one line of JSON each way.

    Raises:
      UserError: on every process which is there, naming those which are not.
    """
    deadline = time.monotonic() + timeout_seconds
    message = _listen(processes, deadline) if processes.index == 0 else _call(processes, deadline)
    if message:
        raise UserError(f'{message} (waited {timeout_seconds:g} s at {processes.coordinator})')


def _listen(processes: Processes, deadline: float) -> str:
    """Process 0: waits for all calls, answers them, and returns what is wrong, '' if nothing."""
    _, port = _address(processes.coordinator)
    callers: dict[int, socket.socket] = {}
    unnamed: list[socket.socket] = []
    message = ''
    with _server(port) as server, selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while len(callers) < processes.count - 1 and not message and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is server:
                    connection, _ = server.accept()
                    unnamed.append(connection)
                    selector.register(connection, selectors.EVENT_READ)
                    continue
                connection = key.fileobj
                selector.unregister(connection)
                try:
                    index, count = json.loads(connection.recv(64))
                except (OSError, ValueError, TypeError):
                    continue  # Not one of us: a port scanner, or a process which died while it called.
                if count != processes.count:
                    message = f'process {index} counts {count} processes and process 0 counts {processes.count}'
                elif index in callers:
                    message = f'two processes call themselves process {index}; give each another --process_id'
                else:
                    callers[index] = connection
        missing = [index for index in range(1, processes.count) if index not in callers]
        if missing and not message:
            here = processes.count - len(missing)
            message = (
                f'{here} of {processes.count} processes called in; missing: process '
                f'{", ".join(map(str, missing))}; look whether their hosts run, or start fewer'
            )
    for connection in unnamed:
        with connection:
            try:
                connection.sendall(json.dumps(message).encode())
            except OSError:
                continue  # It has gone; jax will miss it soon enough.
    return message


def _server(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(('', port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)
    except OSError as error:
        raise UserError(f'process 0 cannot listen on port {port}: {error.strerror}; choose another port') from error


def _call(processes: Processes, deadline: float) -> str:
    """Another process: calls process 0 until it answers, and returns its answer."""
    address = _address(processes.coordinator)
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as connection:
                connection.sendall(json.dumps([processes.index, processes.count]).encode())
                # Process 0 may have begun to wait later than this one; its answer comes at its own deadline.
                connection.settimeout(left + 30)
                answer = connection.recv(4096)
                if answer:
                    return json.loads(answer)
        except OSError:
            pass  # Process 0 does not listen yet.
        time.sleep(min(_RETRY_SECONDS, max(deadline - time.monotonic(), 0)))
    return f'process {processes.index} got no answer from process 0'
