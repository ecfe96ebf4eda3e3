"""All interleavings of two clients over two slots, to a depth where faults have room to show."""

from __future__ import annotations

import pytest

from tests.model.world import Action, World

#: Where to begin: empty, full of a prefix, and full of it with a reader on it.
STORED: tuple[Action, ...] = (("reserve", 0, "a", 0), ("commit", 0, 2))
STARTS: dict[str, tuple[Action, ...]] = {
    "empty": (),
    "stored": STORED,
    "leased": (*STORED, ("lease", 0, 0)),
}


def explore(units: int, depth: int, states_max: int, start: tuple[Action, ...] = ()) -> int:
    """Every action in every state that is reached within `depth` actions; how many states."""
    seen: set[object] = set()
    level = [start]
    for _ in range(depth):
        deeper: list[tuple[Action, ...]] = []
        for path in level:
            for action in replay(units, path).enabled():
                world = replay(units, path)
                try:
                    world.apply(action)
                    world.check()
                except BaseException as error:
                    error.add_note(f"after {[*path, action]}")
                    raise
                state = world.fingerprint()
                if state not in seen:
                    seen.add(state)
                    deeper.append((*path, action))
        level = deeper
        assert len(seen) < states_max, "more states than this test has time for"
    return len(seen)


def replay(units: int, path: tuple[Action, ...]) -> World:
    world = World(units)
    for action in path:
        world.apply(action)
    return world


@pytest.mark.slow
@pytest.mark.parametrize(
    ("units", "depth", "start"), [(2, 6, "empty"), (3, 5, "stored"), (2, 5, "leased")]
)
def test_no_interleaving_breaks_an_invariant(units: int, depth: int, start: str):
    """CO11, CO12, CO14, LI01, LI02."""
    assert explore(units, depth, states_max=60_000, start=STARTS[start]) > 1_000
