"""zrun: the launcher. It starts one agent per host and one worker per rank, and never imports torch."""

__version__ = "0.1.0"
