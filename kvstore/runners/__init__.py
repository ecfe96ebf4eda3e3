"""What drives the core: a runner serialises calls, waits, and carries out transfers."""
