"""The command line: one module per command, loaded only when it is the one asked for."""
