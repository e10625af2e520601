"""Settings of all tests."""

import signal

from hypothesis import settings

# The same examples on every run and machine, however slow it is; and no file that remembers them.
settings.register_profile("house", deadline=None, derandomize=True, database=None)
settings.load_profile("house")

# A run in the background (nohup, `&` in a script) ignores these, and so would every launcher that tests send them to.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
