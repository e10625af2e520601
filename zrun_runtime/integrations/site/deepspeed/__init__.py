"""`deepspeed` by zrun: the names of that package, over zrun_runtime.

Nothing is loaded here. Each name is looked up in `_names` when it is first used, and so is each submodule.
"""

from ._modules import take_over
from ._names import VERSION

__version__ = VERSION
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in VERSION.partition("+")[0].split("."))
__git_hash__ = __git_branch__ = "zrun"

take_over(__name__)
