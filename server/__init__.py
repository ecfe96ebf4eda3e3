"""The daemon of a node: wiring, control socket, data port, admin."""
