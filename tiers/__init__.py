"""Places where blocks live: one file a medium, and the contract that they share."""
