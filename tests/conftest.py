"""Settings of all tests."""

from hypothesis import settings

# The same examples on every run and machine, however slow it is; and no file that remembers them.
settings.register_profile("house", deadline=None, derandomize=True, database=None)
settings.load_profile("house")
