"""A daemon in a process of its own, and a session with it from this one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

import kvstore
from tests.daemon_process import DaemonProcess
from tests.payload import BLOCK_BYTES, a_namespace


@pytest.fixture
def directory():
    """A short path: a socket's has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="kvs", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def daemon(directory):
    """16 MiB. All adds up at the end, if it still runs."""
    with DaemonProcess(directory) as daemon:
        yield daemon
        if daemon.process.returncode is None and daemon.process.poll() is None:
            with kvstore.connect(daemon.socket_path) as store:
                assert store.verify()["problems"] == []


@pytest.fixture
def store(daemon):
    with kvstore.connect(daemon.socket_path) as store:
        yield store


@pytest.fixture
def namespace():
    return a_namespace(BLOCK_BYTES)


@pytest.fixture
def session(store, namespace):
    return store.session(namespace)
