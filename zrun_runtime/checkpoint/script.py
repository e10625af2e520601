"""`zero_to_fp32.py`, which lies beside `latest`: what people know to run when all they have is a directory."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from zrun_runtime.checkpoint.errors import CheckpointError
from zrun_runtime.checkpoint.export import convert_zero_checkpoint_to_fp32_state_dict
from zrun_runtime.checkpoint.files import replace_small

NAME = "zero_to_fp32.py"
_TEXT = '''#!/usr/bin/env python3
"""Whole fp32 weights out of the checkpoint beside this file: zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR, or --help."""

from zrun_runtime.checkpoint.script import main

main()
'''


def leave_script(directory: Path) -> None:
    """Put the script into a directory of checkpoints, unless it is there."""
    path = directory / NAME
    if not os.path.lexists(path):
        replace_small(path, _TEXT.encode(), secrets.token_hex(4))
        path.chmod(path.stat().st_mode | 0o111)


def main(words: Sequence[str] | None = None) -> None:
    """The script. Its options are those of DeepSpeed's script of that name."""
    parser = argparse.ArgumentParser(NAME, description="Write whole fp32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", type=Path, help="what save_checkpoint was given, or one checkpoint in it")
    parser.add_argument("output_dir", type=Path, help="becomes a directory with the weights in it")
    parser.add_argument("--max_shard_size", default="5GB", help="the most that one file holds")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors; else pytorch_model.bin")
    parser.add_argument("-t", "--tag", help="the checkpoint; without it, the one that `latest` names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="only what was trained")
    parser.add_argument("-d", "--debug", action="store_true", help="has no effect")
    given = vars(parser.parse_args(words))
    given.pop("debug")
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**given)
    except (CheckpointError, OSError) as error:
        sys.exit(str(error))
    print(f"weights are in {given['output_dir']}")
