"""All interleavings of two clients over two slots, to a depth where faults have room to show."""

from __future__ import annotations

import pytest

from tests.model.world import SETTINGS, Action, World

#: Where to begin: empty, full of a prefix, and full of it with a reader on it.
STORED: tuple[Action, ...] = (("reserve", 0, "a", 0), ("commit", 0, 2))
PARTS_STORED: tuple[Action, ...] = (("reserve", 0, "both", 0), ("commit", 0, 1))
STARTS: dict[str, tuple[Action, ...]] = {
    "empty": (),
    "stored": STORED,
    "leased": (*STORED, ("lease", 0, "a", 0)),
    "part leased": (*PARTS_STORED, ("lease", 0, "second", 0)),
}


def explore(
    units: int, depth: int, states_max: int, start: tuple[Action, ...], setting: str
) -> int:
    """Every action in every state that is reached within `depth` actions; how many states."""
    seen: set[object] = set()
    level = [start]
    for _ in range(depth):
        deeper: list[tuple[Action, ...]] = []
        for path in level:
            for action in replay(units, path, setting).enabled():
                world = replay(units, path, setting)
                try:
                    world.apply(action)
                    world.check()
                except BaseException as error:
                    error.add_note(f"{setting}, {units} units, after {[*path, action]}")
                    raise
                state = world.fingerprint()
                if state not in seen:
                    seen.add(state)
                    deeper.append((*path, action))
        level = deeper
        assert len(seen) < states_max, "more states than this test has time for"
    return len(seen)


def replay(units: int, path: tuple[Action, ...], setting: str) -> World:
    world = World(units, SETTINGS[setting])
    for action in path:
        world.apply(action)
    return world


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "units", "depth", "start"),
    [
        ("one part", 2, 6, "empty"),
        ("one part", 3, 5, "stored"),
        ("one part", 2, 5, "leased"),
        ("window", 2, 5, "empty"),
        ("window", 2, 4, "part leased"),
        ("two ranks", 2, 4, "part leased"),
    ],
)
def test_no_interleaving_breaks_an_invariant(setting: str, units: int, depth: int, start: str):
    """CO11, CO12, CO14, LI01, LI02."""
    assert explore(units, depth, 60_000, STARTS[start], setting) > 1_000
