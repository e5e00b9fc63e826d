"""A whole swarm in one process and in virtual time: real protocol, node and coordinator code."""
