"""Models that are asked about and never built: a number of parameters, a callable, a Hugging Face config.json."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from zrun_runtime.errors import ZeroRuntimeError
from zrun_runtime.memory import ModelSize
from zrun_runtime.model_size import Activations, Transformer, activations_of, size_of


@dataclass(frozen=True)
class Subject:
    """What is asked about. module: on the meta device; None if there is but a number."""

    name: str
    size: ModelSize
    module: nn.Module | None = None

    def activations(self, batch: int, tokens: int, dtype: torch.dtype) -> tuple[Activations, str]:
        """Bytes of a micro-batch, and how they were found."""
        if self.module is not None:
            try:
                return activations_of(self.module.to(dtype), batch, tokens), "counted on the meta device"
            except ZeroRuntimeError as error:
                reason = f"as of a usual transformer of this size: {error.message}"
        else:
            reason = "as of a usual transformer of this size"
        return Transformer.of(self.size.numel).activations(batch * tokens, dtype.itemsize), reason


def subject(params: float | None, model: str | None, hf_config: str | None) -> Subject:
    """The one that was named.

    Raises:
        click.UsageError: none or several are, or it cannot be built.
    """
    if sum(given is not None for given in (params, model, hf_config)) != 1:
        raise click.UsageError("say what is to be trained by one of --params, --model and --hf_config")
    if params is not None:
        numel = int(params)
        return Subject(f"{numel:,} parameters", Transformer.of(numel).size())
    built = _of_callable(model) if model is not None else _of_hugging_face(str(hf_config))
    size = size_of(built)
    if not size.numel:
        raise click.UsageError(f"{model or hf_config}: the model has no parameters")
    return Subject(f"{type(built).__name__}, {size.numel:,} parameters", size, built)


def _of_callable(spec: str) -> nn.Module:
    where, _, name = spec.partition(":")
    if not where or not name:
        raise click.UsageError(f"--model {spec}: write it as MODULE:CALLABLE")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it
    try:
        factory: Any = importlib.import_module(where)
        for part in name.split("."):
            factory = getattr(factory, part)
        with torch.device("meta"):
            built = factory()
    except Exception as error:  # whatever a stranger's code raises
        raise click.UsageError(f"--model {spec}: {type(error).__name__}: {error}") from error
    if not isinstance(built, nn.Module):
        raise click.UsageError(f"--model {spec}: gave a {type(built).__name__}, not a torch.nn.Module")
    return built


def _of_hugging_face(name: str) -> nn.Module:
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise click.UsageError(f"--hf_config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--hf_config {path} is not JSON: {error}") from error
    kind = data.pop("model_type", None) if isinstance(data, dict) else None
    if not isinstance(kind, str):
        raise click.UsageError(f"--hf_config {name}: it has no model_type, so it is not a model's config.json")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise click.UsageError(
            "--hf_config needs the package transformers (pip install transformers); without it use --params or --model"
        ) from error
    try:
        config = transformers.AutoConfig.for_model(kind, **data)
        known = [getattr(transformers, str(name), None) for name in config.architectures or ()]
        with torch.device("meta"):
            for architecture in known:
                if isinstance(architecture, type) and issubclass(architecture, nn.Module):
                    return architecture(config)
            try:
                return transformers.AutoModelForCausalLM.from_config(config)
            except ValueError:
                return transformers.AutoModel.from_config(config)
    except Exception as error:  # an architecture it does not know, keys that do not fit
        raise click.UsageError(f"--hf_config {name}: transformers cannot build it: {error}") from error
