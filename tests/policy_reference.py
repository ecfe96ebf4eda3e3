"""What each policy means, said as plainly as can be: lists, and a look at every block."""

from __future__ import annotations

from kvstore.policy import Rung

#: The ghost, the credit and the turnover of `credit`, in the words of its description.
HITS_MAX = 4
CREDIT = 0.1
WEIGHT = 0.01


def rung_of(entry, *, partial_first):
    if entry.is_soft_pinned:
        return Rung.SOFT_PIN
    return (
        Rung.UNHIT_PARTIAL if partial_first and entry.is_partial and not entry.hits else Rung.PLAIN
    )


class PlainLru:
    """A list of names, the one that was used longest ago first."""

    partial_first = True
    children_first = True
    backwards = True

    def __init__(self):
        self.order = []

    def used(self, entries):
        names = [entry.key for entry in entries]
        for name in reversed(names) if self.backwards else names:
            if name in self.order:
                self.order.remove(name)
            self.order.append(name)

    def gone(self, entry, *, is_evicted):
        self.order.remove(entry.key)

    def age(self, entry):
        """The greater, the sooner it leaves."""
        return -self.order.index(entry.key)

    def victim(self, entries):
        """Of all blocks, the one that has to leave."""
        return min(
            (entry for entry in entries if entry.is_ready and not entry.users),
            key=lambda entry: (
                rung_of(entry, partial_first=self.partial_first),
                self.children_first and entry.children > 0,
                -self.age(entry),
            ),
            default=None,
        )


class PlainLruR(PlainLru):
    partial_first = False


class PlainLruN(PlainLru):
    partial_first = False
    children_first = False
    backwards = False


class PlainCredit(PlainLru):
    """Age in uses; each hit of this life and of earlier ones that are remembered gives credit."""

    def __init__(self):
        super().__init__()
        self.uses = 0
        self.turnover = 0.0
        self.last_use = {}
        self.earlier_hits = {}
        self.born = {}  # when it would have been used last, were it as young as its credit makes it
        self.ghost = []  # (name, hits), the one that was evicted longest ago first
        self.residents_max = 0

    def used(self, entries):
        self.uses += 1
        for place, entry in enumerate(entries):
            name = entry.key
            if name not in self.last_use:
                remembered = [hits for ghost, hits in self.ghost if ghost == name]
                self.ghost = [item for item in self.ghost if item[0] != name]
                self.earlier_hits[name] = sum(remembered) + len(remembered)
                self.born[name] = 0.0
            self.last_use[name] = self.uses
            hits = min(HITS_MAX, entry.hits + self.earlier_hits[name])
            order_in_run = (len(entries) - 1 - place) / (len(entries) + 1)
            born = self.uses + CREDIT * self.turnover * hits + order_in_run
            self.born[name] = max(self.born[name], born)
        self.residents_max = max(self.residents_max, len(self.last_use))

    def gone(self, entry, *, is_evicted):
        name = entry.key
        age = self.uses - self.last_use.pop(name)
        hits = entry.hits + self.earlier_hits.pop(name)
        del self.born[name]
        if is_evicted:
            self.turnover = (1 - WEIGHT) * self.turnover + WEIGHT * age
            self.ghost = [*self.ghost, (name, hits)][-self.residents_max :]

    def age(self, entry):
        # Rounded, since the policy adds the same numbers in another order.
        return -round(self.born[entry.key], 6)


REFERENCES = {
    "lru": PlainLru,
    "lru-r": PlainLruR,
    "lru-n": PlainLruN,
    "credit": PlainCredit,
}
