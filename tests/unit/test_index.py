"""The index: entries by domain and key, and why others are gone."""

from __future__ import annotations

from kvstore.index import Entry, Index
from kvstore.slots import Slots
from kvstore.types import SINGLE_DOMAIN, Outcome
from tests.core_driver import chain, keys

OTHER_DOMAIN = b"\2" * 32


def filled(specs, index=None, domain=SINGLE_DOMAIN):
    index = Index(16) if index is None else index
    slots = Slots(4096 * 64)
    entries = []
    for spec in specs:
        slot = slots.grant(spec.length_bytes)
        assert slot is not None
        entries.append(Entry.of(domain, spec, slot))
        entries[-1].is_ready = True
        index.insert(entries[-1])
    return index, entries


def test_a_prefix_ends_at_the_first_entry_that_is_not_ready():
    specs = chain("a", 5)
    index, entries = filled(specs)
    assert index.prefix(SINGLE_DOMAIN, keys(specs)) == entries
    entries[3].is_ready = False
    assert index.prefix(SINGLE_DOMAIN, keys(specs)) == entries[:3]
    assert index.why_missing(SINGLE_DOMAIN, specs[3].key) is Outcome.PENDING


def test_children_are_counted_while_they_are_resident():
    index, entries = filled(chain("a", 3))
    assert [entry.children for entry in entries] == [1, 1, 0]
    index.remove(entries[2], None)
    assert [entry.children for entry in entries[:2]] == [1, 0]


def test_domains_have_tables_of_their_own():
    specs = chain("a", 2)
    index, mine = filled(specs)
    _, theirs = filled(specs, index, OTHER_DOMAIN)
    assert len(index) == 4
    assert set(index) == {*mine, *theirs}
    for entry in theirs:
        index.remove(entry, Outcome.EVICTED)
    assert index.prefix(SINGLE_DOMAIN, keys(specs)) == mine
    assert index.why_missing(OTHER_DOMAIN, specs[0].key) is Outcome.EVICTED
    assert index.find(OTHER_DOMAIN, specs[0].key) is None
    assert index.prefix(b"\3" * 32, keys(specs)) == []


def test_a_loss_is_remembered_until_the_block_is_back():
    specs = chain("a", 1)
    index, (entry,) = filled(specs)
    index.remove(entry, Outcome.CORRUPT)
    assert index.why_missing(SINGLE_DOMAIN, entry.key) is Outcome.CORRUPT
    index.forget_history(entry)
    assert index.why_missing(SINGLE_DOMAIN, entry.key) is Outcome.ABSENT


def test_history_forgets_the_oldest_loss_and_a_new_loss_is_young_again():
    specs = [chain(name, 1)[0] for name in "abc"]
    index, entries = filled(specs, Index(history_entries=2))
    index.remove(entries[0], Outcome.EVICTED)
    index.remove(entries[1], Outcome.EVICTED)
    _, (again,) = filled(specs[:1], index)
    index.remove(again, Outcome.EVICTED)
    index.remove(entries[2], Outcome.EVICTED)
    reasons = [index.why_missing(SINGLE_DOMAIN, spec.key) for spec in specs]
    assert reasons == [Outcome.EVICTED, Outcome.ABSENT, Outcome.EVICTED]
