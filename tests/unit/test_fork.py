"""A forked child and the store of its parent: refused at once, and neither hangs nor harms."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: `child(f)` prints what `f` gave or raised in a forked child, or the signal that ended it.
PRELUDE = """
import gc, os, signal, sys, threading
import numpy as np
import kvstore
from tests.payload import BLOCK_BYTES, a_namespace, empty_buffers, filled, payloads, writers

def child(f):
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        signal.alarm(5)  # a child that hangs is ended by it
        try:
            print(f())
        except BaseException as error:
            print(type(error).__name__)
        sys.stdout.flush()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if status:
        print(signal.Signals(status).name)

namespace = a_namespace(BLOCK_BYTES)
store = kvstore.open(dram_capacity_bytes="64MiB")
session = store.session(namespace)
keys = filled(session, 1, 2)
lease = session.lease(keys)
"""

#: The parent goes on as if nothing had been.
CODA = """
buffers = empty_buffers(2)
assert lease.copy_into(buffers) == ["ok", "ok"], "in the parent"
assert writers(buffers, keys) == [1, 1]
lease.release()
store.check()
store.close()
"""


def run(script, coda=CODA):
    """The lines that children printed."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script + coda],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_every_call_in_the_child_raises_at_once():
    """CC07."""
    lines = run("""
child(lambda: session.match(keys))
child(lambda: session.lease(keys))
child(lambda: session.reserve(keys))
child(lambda: session.put(keys, payloads(keys)))
child(lambda: session.get_into(keys, empty_buffers(2)))
child(lambda: session.delete(keys))
child(lambda: lease.renew(5))
child(lambda: store.check())
child(lambda: store.stats())
child(lambda: store.close())
""")
    assert lines == ["StoreForked"] * 9 + ["None"]


def test_a_lock_that_a_thread_of_the_parent_holds_does_not_hang_the_child():
    """CC07."""
    lines = run("""
held, done = threading.Event(), threading.Event()
def hold():
    with store._runner._lock:
        held.set()
        done.wait(30)
thread = threading.Thread(target=hold)
thread.start()
held.wait(30)
child(lambda: session.match(keys))
child(lambda: store.stats())
child(lambda: store.close())
done.set()
thread.join()
""")
    assert lines == ["StoreForked", "StoreForked", "None"]


def test_a_scrub_in_the_child_does_not_hang():
    """CC07."""
    lines = run("""
held, done = threading.Event(), threading.Event()
def hold():
    with store._runner._lock:
        held.set()
        done.wait(30)
thread = threading.Thread(target=hold)
thread.start()
held.wait(30)
child(lambda: store.scrub())
done.set()
thread.join()
""")
    assert lines == ["StoreForked"]


def test_a_lease_of_the_parent_is_refused_in_the_child():
    """CC07."""
    lines = run("""
child(lambda: lease.copy_into(empty_buffers(2)))
child(lambda: bytes(lease.views[0][:1]))
""")
    assert lines == ["StoreForked"] * 2


def test_a_lease_of_the_parent_is_not_valid_in_the_child():
    assert run("child(lambda: lease.valid())") == ["False"]


def test_memory_of_the_child_outlives_the_store_that_it_inherited():
    """The child's own mappings come to lie where the pool was; giving that back must spare them."""
    lines = run("""
box = [store, session, lease]
def f():
    arrays = [np.ones(8 << 20, np.uint8) for _ in range(12)]
    global store, session, lease
    del store, session, lease
    box.clear()
    gc.collect()
    return sum(int(array.sum()) for array in arrays) == 12 * (8 << 20)
child(f)
""")
    assert lines == ["True"]


def test_leaving_blocks_in_the_child_passes_its_own_error_on():
    lines = run("""
reservation = session.reserve(namespace.keys([8]))
def leave(held):
    with held:
        raise ZeroDivisionError
for held in (lease, reservation, session, store):
    child(lambda: leave(held))
""")
    assert lines == ["ZeroDivisionError"] * 4


def test_a_child_opens_a_store_of_its_own():
    """CC07."""
    lines = run("""
def f():
    with kvstore.open(dram_capacity_bytes="1MiB") as own, own.session(namespace) as mine:
        return mine.put(keys, payloads(keys, 9)) == ["ok", "ok"] and mine.match(keys).blocks
child(f)
""")
    assert lines == ["2"]


def test_the_store_of_a_child_of_a_child_is_refused_too():
    lines = run("""
def f():
    child(lambda: session.match(keys))
    return session.match(keys)
child(f)
""")
    assert lines == ["StoreForked"] * 2
