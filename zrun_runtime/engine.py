"""The Engine: what `initialize` returns. It keeps the order of things; the arithmetic is elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from zrun_runtime.accounts import first_nonfinite, state_bytes
from zrun_runtime.collectives import Collectives
from zrun_runtime.compiled import keep_hooks_outside, refuse_region
from zrun_runtime.config import Config
from zrun_runtime.data import LoaderOptions, build_loader
from zrun_runtime.engine_checkpoint import EngineCheckpoint
from zrun_runtime.errors import EngineError
from zrun_runtime.formation import Formation
from zrun_runtime.hook import in_backward
from zrun_runtime.monitors import Monitors
from zrun_runtime.optim import ShardedOptimizer
from zrun_runtime.optimizer_names import name_optimizer, tell_optimizer
from zrun_runtime.pacing import step_schedule
from zrun_runtime.precision import LossScaleError, LossScaler, LossScaleSettings
from zrun_runtime.progress import Progress, StepReport
from zrun_runtime.stopwatch import timed
from zrun_runtime.telemetry import notice
from zrun_runtime.tree import cast_floats
from zrun_runtime.types_of_inputs import autocast, cast_dtype, clash
from zrun_runtime.zero_model import Verdict, ZeroModel

_STALE_VALUES = (
    "backward: the graph needs values of sharded parameters that are gone. They live from a forward to the end of "
    "its backward; a backward through gradients (create_graph=True), or of a graph from before a step, comes too late"
)
_STALE_HINT = "compute gradient penalties with ZeRO 2 or less, and do not keep graphs over a step"


class Engine(EngineCheckpoint):
    """A model, its sharded state and its optimizer, driven by forward, backward and step.

    Method names and meanings are those of DeepSpeed's engine, so training loops written for it run unchanged.

    Attributes:
        module: the model itself. Its parameters are views into flat buffers, or placeholders while they are sharded.
        optimizer: the torch optimizer (the caller's own object if one was given); None if nothing is trained.
        global_steps: accumulation boundaries passed, skipped ones included. micro_steps: calls of `step`.
        skipped_steps: boundaries at which a non-finite gradient kept the weights as they were.
    """

    def __init__(
        self,
        module: nn.Module,
        zero: ZeroModel,
        updater: ShardedOptimizer | None,
        lr_scheduler: Any,
        config: Config,
        collectives: Collectives,
    ) -> None:
        super().__init__()
        self.module = module
        self.zero = zero
        self.formation = Formation(zero, updater) if updater is not None else None
        self.updater = zero.updater = updater
        self.lr_scheduler = lr_scheduler
        self.settings = config
        self.collectives = collectives
        self.global_steps = self.micro_steps = self.skipped_steps = 0
        self.scaler = LossScaler.start(LossScaleSettings.from_config(config.fp16)) if config.scales_loss else None
        self.progress = Progress.of(config, collectives.world)
        self._losses: list[Tensor] = []
        self._last: Verdict | None = None
        self._scaled = False  # the caller scaled a loss of this window
        self._prepare_checkpoints()
        self.window.on_plain_backward = self._begin_plain_backward
        if updater is not None:
            sharded = zero.settings.plan.shards_params
            name_optimizer(updater.optimizer, config.gradient_clipping, self.dynamic_loss_scale(), sharded)
            self._tell_optimizer()

    # ---- forward, backward, step

    @timed("forward")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; floating-point inputs are cast first where the config asks for it (`auto_cast`).

        Raises:
            EngineError: float32 inputs meet 16-bit weights; it names the module.
        """
        dtype = cast_dtype(self.settings)
        if dtype is not None:
            args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
        if self.formation is not None and not in_backward():
            self.formation.follow()
        keep_hooks_outside([self.module])
        try:
            with autocast(self.settings, self.device, not self.zero.settings.plan.shards_params):
                return self.module(*args, **kwargs)
        except RuntimeError as error:
            found = clash(error, self.module, self.settings)
            if found is None:
                raise
            raise found from error
        except KeyboardInterrupt:
            self.zero.holder.abandon_forward()  # torch runs no hooks after it
            raise

    @timed("backward")
    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute gradients of `loss`, divided by the accumulation steps, and start to reduce them.

        Args:
            loss: a scalar that depends on the model.
            retain_graph: as in torch: keep the graph for another backward.
            scale_wrt_gas: False leaves the division by the accumulation steps to the caller.

        Returns:
            The loss, divided as it was differentiated, without the loss scale.

        Raises:
            EngineError: there is no optimizer, or the loss is not a scalar with a graph.
        """
        if self.updater is None:
            raise EngineError("backward: nothing is trained", "give initialize an optimizer, or parameters that train")
        self._needs_states("backward")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise EngineError(
                f"backward: expected a scalar loss with a graph, got {_describe(loss)}",
                "compute the loss from the engine's output, with gradients enabled",
            )
        steps = self.settings.accumulation_steps
        self._losses.append(loss.detach() if scale_wrt_gas else loss.detach() * steps)
        if scale_wrt_gas:
            loss = loss / steps
        scaled = self._times_scale(loss)
        hooks = self.zero.hooks
        with self.window.drive():
            try:
                scaled.backward(retain_graph=retain_graph)
                hooks.end_backward()
            except BaseException as error:
                hooks.abandon_backward()
                if self.zero.settings.plan.shards_params and "modified by an inplace operation" in str(error):
                    raise EngineError(_STALE_VALUES, _STALE_HINT) from error
                raise
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale of fp16, for those who call `backward` on it themselves."""
        self._scaled = True
        return self._times_scale(loss)

    def _times_scale(self, loss: Tensor) -> Tensor:
        return loss * self.scaler.scale if self.scaler is not None else loss

    def _begin_plain_backward(self) -> None:
        if self.scaler is not None and not self._scaled:
            raise EngineError(
                "loss.backward(): fp16 gradients need the loss scale, and the loss was not scaled",
                "call engine.backward(loss), or engine.scale(loss).backward()",
            )

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At an accumulation boundary: update the weights, or skip if a gradient is not finite. Else only count.

        When it returns, every parameter that is full between uses has its new values on every rank.

        Args:
            lr_kwargs: passed on to the scheduler's `step`.
        """
        self._needs_states("step")
        if self.window.held:
            raise EngineError("step: inside no_sync() gradients are not reduced", "call step after the context")
        boundary = self.window.at_boundary
        if self.window.counts_too_slowly and not boundary:
            self._warn_of_counting()
        self.micro_steps += 1
        self.window.move_on(updated=boundary)
        if not boundary:
            return
        if self.formation is None:
            raise EngineError("step: nothing is trained", "give initialize an optimizer, or parameters that train")
        self.formation.follow(stepping=True)
        verdict = self._update(self.formation, lr_kwargs or {})
        self.zero.end_step()
        self.global_steps += 1
        self._scaled = False
        self._report(verdict)
        self._saver.raise_failure()
        self._tell_optimizer()

    @timed("step")
    def _update(self, formation: Formation, lr_kwargs: dict[str, Any]) -> Verdict:
        verdict = self.zero.vote(self._losses, self.loss_scale(), formation.mark(), formation.options_mark())
        if verdict.finite:
            formation.retire()
            self.zero.update(verdict)
            step_schedule(self.lr_scheduler, lr_kwargs, self.collectives.world.rank)
        else:
            self._skip()
        self._adapt_loss_scale(overflow=not verdict.finite)
        return verdict

    def _skip(self) -> None:
        self.skipped_steps += 1
        if self.collectives.world.rank == 0:
            text = f"step {self.global_steps + 1} skipped on every rank: a gradient is not finite"
            notice("warning", f"{text} ({self.skipped_steps} skipped so far)")

    def _warn_of_counting(self) -> None:
        if self.micro_steps == 0 and self.collectives.world.rank == 0:
            notice(
                "warning",
                f"step() was called once after {self.window.backwards} backwards, and counts as one micro-batch of "
                f"{self.window.steps}: call it after every backward, or set managed_gradient_accumulation to false",
            )

    def _adapt_loss_scale(self, overflow: bool) -> None:
        if self.scaler is None:
            return
        before = self.scaler
        try:
            self.scaler = before.after(overflow)
        except LossScaleError as error:
            culprit = first_nonfinite(self.zero)
            raise LossScaleError(f"{error.message}; the first gradient that is not: {culprit}", error.hint) from None
        if overflow and self.collectives.world.rank == 0:
            notice("info", self.scaler.change_since(before))

    def _tell_optimizer(self) -> None:
        if self.updater is not None:
            overflow, norm = self._last is not None and not self._last.finite, self.get_global_grad_norm()
            tell_optimizer(self.updater.optimizer, overflow=overflow, loss_scale=self.loss_scale(), norm=norm)

    def _samples(self) -> int:
        if self.window.managed:
            return self.train_batch_size()
        return len(self._losses) * self.train_micro_batch_size_per_gpu() * self.world.size

    def _report(self, verdict: Verdict) -> None:
        self._last = verdict
        self.collectives.watch.step = self.global_steps
        rates = self.get_lr()
        self.progress.step_done(
            StepReport(
                step=self.global_steps,
                samples=self._samples(),
                skipped_steps=self.skipped_steps,
                loss=verdict.loss,
                learning_rate=float(rates[0]) if rates else None,
                loss_scale=verdict.loss_scale if self.scaler is not None else None,
                grad_norm=verdict.grad_norm if verdict.finite else None,
            )
        )
        self._losses.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those already reduced included."""
        self.zero.end_step()

    def expect_steps(self, total: int | None) -> None:
        """Tell the console how many optimizer steps there will be, so that it can show what remains."""
        self.progress.total_steps = total

    # ---- questions

    @property
    def global_samples(self) -> int:
        """Samples of all ranks in the steps so far."""
        return self.progress.samples

    def get_global_grad_norm(self) -> float | None:
        """L2 norm over all ranks and parameters at the last boundary, before clipping; inf if it was skipped."""
        return self._last.grad_norm if self._last is not None else None

    @property
    def monitor(self) -> Monitors:
        """Takes numbers of the program's own: `write_events([(name, value, samples)])`; rank 0 writes them."""
        return self.progress.monitors

    def mean_loss(self) -> float:
        """The loss at the last boundary, mean over ranks and micro-batches; NaN if `backward` never saw one."""
        return self._last.loss if self._last is not None and self._last.loss is not None else float("nan")

    def loss_scale(self) -> float:
        """What the loss is multiplied by before its backward; 1 without fp16."""
        return self.scaler.scale if self.scaler is not None else 1.0

    def was_step_applied(self) -> bool:
        """The last boundary changed the weights."""
        return self._last is not None and self._last.finite

    def traffic(self) -> dict[str, int]:
        """Bytes this rank sent since the last call, by kind: reduce_scatter, all_gather, other."""
        return self.collectives.traffic.take()

    def state_bytes(self) -> dict[str, int]:
        """Bytes of model state this rank holds now, by kind: params, master, grads, optimizer."""
        return state_bytes(self.zero)

    # ---- data, state, copies

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A loader of this rank's micro-batches.

        Args:
            batch_size: samples a micro-batch; default: the config's.
            route: "train" shuffles; "eval" and "predict" keep the order.
            data_sampler: in place of the one that gives every rank its own share.
            num_local_io_workers: processes that read; default: none, this process reads.
        """
        drop_last = self.settings.dataloader_drop_last
        how = LoaderOptions(
            collate_fn, data_sampler, route == "train", drop_last, pin_memory, num_local_io_workers or 0
        )
        loader = build_loader(dataset, batch_size or self.train_micro_batch_size_per_gpu(), self.world, how)
        if route == "train":
            self.loaders.append(loader)
        return loader

    def compile(self, backend: str | None = None, compile_kwargs: dict[str, Any] | None = None, **more: Any) -> None:
        """Compile the model's forward with torch.compile; `more`, DeepSpeed's own passes, has no effect.

        Raises:
            EngineError: parameters come and go between uses, which compiled code would not see.
        """
        options = {**(compile_kwargs or {}), **({"backend": backend} if backend else {})}
        refuse_region("", self.module, [unit.module for unit in self.zero.holder.calls])
        self.module.compile(**options)

    @property
    def is_compiled(self) -> bool:
        """`compile` was called."""
        return self.module._compiled_call_impl is not None

    def destroy(self) -> None:
        """Take every hook off the model, once the last checkpoint is written. Sharded parameters stay sharded."""
        self._saver.wait()
        self.zero.remove()
        self._saver.raise_failure()

    def __getattr__(self, name: str) -> Any:
        """What the engine does not know, the model may."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise EngineError(
            "an Engine cannot be pickled: it holds a process group and shards of this rank",
            "use engine.state_dict() for the weights",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise EngineError("an Engine cannot be copied", "copy engine.module, or build a second engine")


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without a graph")
