"""Every error that kvstore raises on purpose.

A miss is never an error: it is an `Outcome` (see `kvstore.types`). An error says that a caller
asked for something that cannot be right, or that a part of the system is broken.

    KVStoreError
    ├── InvalidRequest (ValueError)   the call cannot be right: its message names what was wrong
    │   ├── InvalidNamespace          a field of a Namespace
    │   ├── InvalidLayout             a field of a Layout
    │   ├── InvalidTokens             token ids, or media ranges over them
    │   ├── InvalidKeys               block keys: of another namespace, not a prefix, twice
    │   ├── InvalidBuffer             a caller's buffer: size, contiguity, read-only
    │   └── InvalidBlocks             physical blocks or token counts do not fit a block table
    ├── ConfigError (ValueError)      a setting, with the place that it came from
    ├── LeaseError                    a lease was not what the caller took it for
    │   ├── LeaseExpired              its deadline passed before the caller was done
    │   └── LeaseInUse                a view of it is still exported
    ├── ReservationExpired            a commit came after the reservation's deadline
    ├── StoreClosed                   the store or the session was closed before the call
    ├── StoreForked                   an embedded store was used in a forked child
    ├── StoreBroken                   an interrupt hit the middle of a change; open another store
    ├── StoreReentered                a destructor or signal handler called into a running call
    ├── NoFreeBlocks                  a block pool has fewer free blocks than were asked for
    ├── TierError                     a tier failed as a whole; its blocks are misses meanwhile
    ├── DaemonUnavailable             no daemon answers; sessions take that for misses
    ├── WireError                     what came over a connection is no message of ours
    ├── UnsupportedCache              an engine's cache, or a way to use it, that we cannot keep
    └── InvariantViolated             `check()` found the index and the slots in disagreement
"""


class KVStoreError(Exception):
    """Base of all errors of this package."""


class InvalidRequest(KVStoreError, ValueError):
    """The call cannot be right; nothing was changed."""


class InvalidNamespace(InvalidRequest):
    """A field of a namespace is missing or out of range."""


class InvalidLayout(InvalidRequest):
    """A field of a layout is missing or out of range."""


class InvalidTokens(InvalidRequest):
    """Token ids or media ranges cannot be hashed into keys."""


class InvalidKeys(InvalidRequest):
    """Block keys do not fit the session, or do not follow each other."""


class InvalidBuffer(InvalidRequest):
    """A caller's buffer has the wrong size, is not contiguous, or is read-only."""


class InvalidBlocks(InvalidRequest):
    """Physical blocks or token counts do not fit the pool or the table."""


class ConfigError(KVStoreError, ValueError):
    """A setting is unknown, has the wrong type, or cannot be met on this machine."""


class LeaseError(KVStoreError):
    """A lease was not what the caller took it for."""


class LeaseExpired(LeaseError):
    """The deadline passed; bytes read since then may belong to another block."""


class LeaseInUse(LeaseError):
    """A view handed out by the lease, or something made from it, is still alive."""


class ReservationExpired(KVStoreError):
    """The commit came too late; nothing of it became visible."""


class StoreClosed(KVStoreError):
    """The store or the session was closed before the call."""


class StoreForked(KVStoreError):
    """An embedded store lives in the process that opened it, not in its forked children."""


class StoreBroken(KVStoreError):
    """A call was interrupted in the middle of a change, so the store refuses all further ones."""


class StoreReentered(KVStoreError):
    """A destructor or a signal handler called the store while it interrupted a call to it."""


class NoFreeBlocks(KVStoreError):
    """A block pool has fewer free blocks than were asked for; nothing was changed."""


class DaemonUnavailable(KVStoreError):
    """No daemon answers: none runs, it is of another version, or it hangs."""


class TierError(KVStoreError):
    """A tier failed as a whole."""


class WireError(KVStoreError):
    """What came over a connection is no message of ours; the connection is closed."""


class UnsupportedCache(KVStoreError):
    """An engine's cache cannot be stored and loaded without loss; the message says why."""


class InvariantViolated(KVStoreError):
    """Index and slots disagree: a bug in kvstore."""
