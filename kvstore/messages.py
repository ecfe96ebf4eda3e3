"""What a session asks of the core, and what the core answers.

All of it is plain values: the same records cross a function call in the embedded store and a
socket elsewhere. Times in requests are durations, so that no two clocks need to agree.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.types import Outcome, Place


class PartLink(msgspec.Struct, frozen=True, gc=False):
    """What joins the parts of one block, where a block has several."""

    block: bytes  # the same 32 bytes in all parts of the block
    group: tuple[str | None, int]  # companion and cache group
    is_always_needed: bool  # no prefix that contains the block can do without this part


class BlockSpec(NamedTuple):
    """What the core must know of a block, or of one of its parts, that is to be written."""

    key: bytes
    parent_key: bytes | None  # None for the first block of a sequence
    length_bytes: int
    token_count: int
    is_partial: bool
    link: PartLink | None = None  # None: the block has this part only


class Column(NamedTuple):
    """The keys of one part of consecutive blocks, and which of them a prefix needs.

    A prefix of n blocks needs those from `first_needed[n]` on; None: all of them. `first_needed`
    never decreases, and has one element more than `keys`.

        block             0    1    2    3    4         a window of two blocks:
        first_needed   0    0    0    1    2    3
    """

    keys: Sequence[bytes]
    first_needed: Sequence[int] | None


# `holder` is the process that a lease or a reservation belongs to: 0 in a store inside one process.
# A request about a lease or a reservation of somebody else's is answered as if it had ended.
#
# Requests that look for a prefix say in `keys` and `first_needed` what a `Column` says, for the
# first part or the only one, and in `more` the same for the other parts, in the layout's order.
# All columns have as many keys.


class MatchRequest(NamedTuple):
    """How long a prefix of `keys` is held? Changes nothing.

    With `wait_seconds`, waits that long for blocks that another writer is filling.
    """

    domain: bytes
    keys: Sequence[bytes]
    wait_seconds: float
    first_needed: Sequence[int] | None = None
    more: Sequence[Column] = ()


class MatchAnswer(NamedTuple):
    """The longest prefix held, and why the next block is not."""

    blocks: int
    by_tier: dict[str, int]
    reason: Outcome | None


class LeaseRequest(NamedTuple):
    """Hold the longest prefix of `keys` that is, or within `wait_seconds` becomes, readable."""

    domain: bytes
    keys: Sequence[bytes]
    tokens: int  # of all keys, for the counters
    ttl_seconds: float
    wait_seconds: float
    first_needed: Sequence[int] | None = None
    more: Sequence[Column] = ()
    holder: int = 0


class AdoptRequest(NamedTuple):
    """Hold a lease once more, which ends when all have released it as often as they hold it.

    `keys` are of the blocks that the adopter takes it for, `width` for each block, all parts of a
    block together. Answered with a `LeaseAnswer`; one without a lease where it has ended, where no
    core gave this token, where it is of another domain, or on other blocks than these.
    """

    domain: bytes
    token: bytes
    keys: Sequence[bytes]
    width: int = 1
    holder: int = 0


class TokenRequest(NamedTuple):
    """What lets another process adopt a lease?"""

    lease_id: int
    holder: int = 0


class TokenAnswer(NamedTuple):
    """Opaque bytes, of use to whoever talks to the same core; None where the lease has ended."""

    token: bytes | None


class LeaseAnswer(NamedTuple):
    """A lease on `places`, until `deadline` on the core's clock. `lease_id` 0: nothing held.

    `blocks`, `places` and `moves` as in `ReadAnswer`.
    """

    lease_id: int
    blocks: int
    places: list[Place | None]
    deadline: float
    by_tier: dict[str, int]
    reason: Outcome | None
    moves: int


class ReadRequest(NamedTuple):
    """Where is the longest prefix of `keys`? It counts as read, and nothing is held.

    Whoever copies from these places looks at their generations afterwards: one that has changed
    means that its block was evicted under the copy.
    """

    domain: bytes
    keys: Sequence[bytes]
    tokens: int  # of all keys, for the counters
    wait_seconds: float
    first_needed: Sequence[int] | None = None
    more: Sequence[Column] = ()


class ReadAnswer(NamedTuple):
    """The longest prefix that is readable: its length, its places, and why it ends there.

    `places` has one element for each part of each block, all parts of a block together; None
    where a prefix of this length does not need the part. `moves` is how often slots had changed
    hands then: where it still is, all generations are.
    """

    blocks: int
    places: list[Place | None]
    reason: Outcome | None
    moves: int


class RenewRequest(NamedTuple):
    """Let a lease end no earlier than `ttl_seconds` from now; never shortens it."""

    lease_id: int
    ttl_seconds: float
    holder: int = 0


class RenewAnswer(NamedTuple):
    """The lease's deadline; None where it had ended before."""

    deadline: float | None


class LostRequest(NamedTuple):
    """Blocks that were granted to a reader and whose copy came too late, for the counters."""

    blocks: int
    outcome: Outcome


class LostAnswer(NamedTuple):
    """Counted."""


class ReleaseRequest(NamedTuple):
    """End a lease, as far as this holder goes."""

    lease_id: int
    holder: int = 0


class ReleaseAnswer(NamedTuple):
    """False where the lease had ended before: released twice, expired, or never granted."""

    was_held: bool


class ReserveRequest(NamedTuple):
    """Make room for the blocks from position `start` on.

    `blocks` has `width` elements for each block, one a part, all parts of a block together; None
    for a part that is not to be written, or of no interest. The blocks before `start` are there so
    that writing the tail of a prefix does not evict its beginning. The blocks are gone
    `expire_seconds` after their commit, if that is given.
    """

    domain: bytes
    blocks: Sequence[BlockSpec | None]
    start: int
    ttl_seconds: float
    wait_seconds: float
    expire_seconds: float | None
    width: int = 1
    holder: int = 0


class ReserveAnswer(NamedTuple):
    """One outcome a block from `start` on: `granted` where any part of it is to be written.

    `places` and `checksums` have one element for each part, as the request has: a place where it
    is to be written, and what is known of the contents of one that is there.
    """

    reservation_id: int
    outcomes: list[Outcome]
    places: list[Place | None]
    checksums: list[int | None]
    deadline: float


class CommitRequest(NamedTuple):
    """Make the first `blocks` positions of a reservation visible, `present` ones included."""

    reservation_id: int
    blocks: int
    differing_puts: int  # positions that are present with other bytes than this writer has
    holder: int = 0


class CommitAnswer(NamedTuple):
    """`ok`, or `expired` where the reservation had ended before and nothing became visible."""

    outcome: Outcome


class AbortRequest(NamedTuple):
    """Give back what was not committed. The writer touches that memory no more."""

    reservation_id: int
    holder: int = 0


class AbortAnswer(NamedTuple):
    """False where the reservation had ended before."""

    was_open: bool


class EndHolderRequest(NamedTuple):
    """A process is gone: so are its leases and reservations, and it writes no more."""

    holder: int


class EndHolderAnswer(NamedTuple):
    """How much it held."""

    leases: int
    reservations: int


class DeleteRequest(NamedTuple):
    """Hide blocks at once; their memory is freed after the last lease."""

    domain: bytes
    keys: Sequence[bytes]


class DeleteAnswer(NamedTuple):
    """`ok` for each block that was hidden, `absent` for the others."""

    outcomes: list[Outcome]


class PinKind(StrEnum):
    """How strongly a pinned block is kept."""

    SOFT = "soft"  # evicted after everything that is not pinned
    HARD = "hard"  # not evicted; counts against the tenant's quota


class PinRequest(NamedTuple):
    """Keep blocks for longer than their use alone would; they outlive the client."""

    domain: bytes
    keys: Sequence[bytes]
    kind: PinKind
    ttl_seconds: float | None  # None: until unpinned, for hard pins only
    width: int = 1  # keys of one block, one for each part, which are pinned all or none


class PinAnswer(NamedTuple):
    """`ok` for each key that is pinned, else why not: a reason, or `quota`."""

    outcomes: list[Outcome]


class UnpinRequest(NamedTuple):
    """End all pins of blocks."""

    domain: bytes
    keys: Sequence[bytes]


class UnpinAnswer(NamedTuple):
    """`ok` for each block that was pinned, `absent` for the others."""

    outcomes: list[Outcome]


class ScrubRequest(NamedTuple):
    """Read these blocks again, compare their checksums, drop what is corrupt."""

    domain: bytes
    keys: Sequence[bytes]


class ScrubAnswer(NamedTuple):
    """How many blocks were read, and the keys of those that were dropped."""

    checked: int
    corrupt: list[bytes]


Request = (
    MatchRequest
    | LeaseRequest
    | AdoptRequest
    | TokenRequest
    | ReadRequest
    | RenewRequest
    | ReleaseRequest
    | LostRequest
    | ReserveRequest
    | CommitRequest
    | AbortRequest
    | EndHolderRequest
    | DeleteRequest
    | PinRequest
    | UnpinRequest
    | ScrubRequest
)

Answer = (
    MatchAnswer
    | LeaseAnswer
    | TokenAnswer
    | ReadAnswer
    | RenewAnswer
    | ReleaseAnswer
    | LostAnswer
    | ReserveAnswer
    | CommitAnswer
    | AbortAnswer
    | EndHolderAnswer
    | DeleteAnswer
    | PinAnswer
    | UnpinAnswer
    | ScrubAnswer
)


class TransferKind(StrEnum):
    """Why the core wants bytes to be read."""

    CHECKSUM = "checksum"  # of a block that was committed just now
    SCRUB = "scrub"  # of a block at rest


class Transfer(NamedTuple):
    """Work on payload that the core asks its runner to do, and to `complete` afterwards."""

    transfer_id: int
    kind: TransferKind
    place: Place


class Step(NamedTuple):
    """What came of one event: answers by request id, and transfers to run."""

    answers: list[tuple[int, Answer]]
    transfers: list[Transfer]
