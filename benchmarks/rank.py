"""One rank of a benchmark: `rank.py file:function KEYWORDS DIRECTORY` writes the result to DIRECTORY/RANK.json."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import common
import torch.distributed as dist


def main(task: str, keywords: str, directory: str) -> None:
    """Call the function and write down what it returns."""
    common.die_with_parent()
    module, _, function = task.partition(":")
    result = getattr(importlib.import_module(module), function)(**json.loads(keywords))
    Path(directory, f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()  # nobody hangs up on a rank that is still at work
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
