"""How an agent is started on a host, and the line to it."""
