"""Checkpoints of an engine: to save, to load, and whole weights for other programs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from zrun_runtime.checkpoint.errors import CheckpointError, raise_troubles
from zrun_runtime.checkpoint.export import write_whole
from zrun_runtime.checkpoint.load import Loader
from zrun_runtime.checkpoint.restore import Wanted
from zrun_runtime.checkpoint.save import Request, Saver
from zrun_runtime.collectives.rendezvous import Rendezvous
from zrun_runtime.data import ResumableLoader
from zrun_runtime.engine_state import EngineState
from zrun_runtime.errors import EngineError
from zrun_runtime.hook import in_backward
from zrun_runtime.precision import LossScaler
from zrun_runtime.progress import Progress

WAIT_FOR_WHOLE = 1800.0  # seconds that a disk may take for a whole model


class EngineCheckpoint(EngineState):
    """The part of the engine that writes and reads checkpoints."""

    none_if_nothing_loaded = False  # the client state then; frameworks look at it to see whether there was anything
    lr_scheduler: Any
    scaler: LossScaler | None
    progress: Progress
    micro_steps: int
    loaders: list[ResumableLoader]
    _saver: Saver
    _loader: Loader

    def _prepare_checkpoints(self) -> None:
        """Once, when the engine is built, on every rank."""
        self.loaders = []
        rendezvous = Rendezvous(self.world)
        self._saver = Saver(self, self.settings.checkpoint, rendezvous)
        self._loader = Loader(self, self.settings.checkpoint, rendezvous)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything that training goes on from into `save_dir`/`tag`, whole or not at all. For all ranks.

        Args:
            tag: the same on every rank; default: `global_step{N}`.
            client_state: what else to keep: plain data and tensors; a rank gets back what it gave.
            save_latest: `load_checkpoint` without a tag loads this one from now on.
            exclude_frozen_parameters: leave out parameters that are not trained.

        Returns:
            True.

        Raises:
            EngineError: in the middle of an accumulation window.
            CheckpointError: it could not be written, on any rank; earlier checkpoints are as they were.
            RanksDivergedError: not all ranks called it.
        """
        trouble = self._unfinished_window()
        tag = f"global_step{self.global_steps}" if tag is None else tag
        state = client_state if client_state is not None else {}
        # It may be written while the program goes on, and elsewhere than now.
        directory = _directory(save_dir, "save_checkpoint").absolute()
        request = Request(directory, tag, state, save_latest, exclude_frozen_parameters)
        with torch.inference_mode(False):
            self._saver.save(request, trouble)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
        fallback: bool = False,
    ) -> tuple[str | None, Any]:
        """Go on from a checkpoint, saved at any world size, stage and precision. For all ranks.

        Args:
            tag: default: what `latest` names.
            load_module_strict: the model and the checkpoint must have the same parameters and buffers.
            load_optimizer_states, load_lr_scheduler_states: also restore these.
            load_module_only: weights and buffers, nothing else.
            custom_load_fn: not supported: `load_module_state_dict` takes one.
            fallback: if the checkpoint is damaged, take the newest whole one instead, and say so.

        Returns:
            (the checkpoint's directory, the client state of this rank); (None, {}) and a warning if there is no
            `latest`. At another number of ranks than saved it, all get rank 0's client state.

        Raises:
            CheckpointError: it is damaged, or does not fit; the engine is as it was.
            RanksDivergedError: not all ranks called it.
        """
        if custom_load_fn is not None:
            raise EngineError(
                "load_checkpoint: custom_load_fn is not supported",
                "read the weights with zrun_runtime.checkpoint.export and give them to load_module_state_dict",
            )
        wanted = Wanted(load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        self._saver.wait()
        directory = _directory(load_dir, "load_checkpoint")
        if in_backward():
            raise EngineError("load_checkpoint: a backward is running", "load between steps, not in a hook")
        with torch.inference_mode(False):  # what is made inside that mode cannot be trained on after it
            path, state = self._loader.load(directory, tag, wanted, fallback)
        return path, None if path is None and self.none_if_nothing_loaded else state

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole model, in the dtype it has while it trains, into one file of rank 0. For all ranks.

        Args:
            save_filename: one that ends in .safetensors is such a file (names of tied parameters have copies), any
                other is torch's.

        Returns:
            True.

        Raises:
            CheckpointError: it could not be written; on every rank.
        """
        directory = _directory(save_dir, "save_16bit_model")
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        said: dict[str, str | None] = {"trouble": None}
        if self.world.rank == 0:
            try:
                write_whole(directory, save_filename, state)
            except CheckpointError as error:
                said["trouble"] = str(error)
        timeout = self.settings.checkpoint.timeout + WAIT_FOR_WHOLE
        raise_troubles("save_16bit_model", self._saver.meeting.exchange("save_16bit_model", said, timeout, last=True))
        return True

    save_fp16_model = save_16bit_model

    def _unfinished_window(self) -> EngineError | None:
        """What is wrong with saving now: gradients that no update has used yet would be lost."""
        if in_backward():
            return EngineError(
                "save_checkpoint: a backward is running: its gradients would be lost",
                "save after step(), not in a hook",
            )
        window, steps = self.window, self.settings.accumulation_steps
        if window.done:
            left = steps - window.done
            return EngineError(
                f"save_checkpoint: {window.done} of {steps} micro-batches of step {self.global_steps + 1} are done: "
                "their gradients would be lost",
                f"save at the boundary: after {left} more call{'s' if left > 1 else ''} of backward and step",
            )
        if any(grads.unused for grads in self.zero.reducer.order):
            return EngineError(
                "save_checkpoint: a backward ran and step() has not used its gradients yet, so they would be lost",
                "save at the boundary: after step(), or after zero_grad()",
            )
        return None


def _directory(given: Any, what: str) -> Path:
    """A directory that was given by name; `~` at its beginning is the user's own.

    Raises:
        EngineError: it is no name, on every rank that was given none.
    """
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise EngineError(f"{what}: {given!r} is no directory", "give the name of one, the same on every rank")
    return Path(os.path.expanduser(given))
