"""The SDK: sessions, leases and reservations, the same over every kind of store."""
