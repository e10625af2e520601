"""`deepspeed.runtime.constants`, as far as they are keys of the config: TRAIN_BATCH_SIZE is "train_batch_size"."""

from __future__ import annotations

from zrun_runtime.config.schema import Document

ROUTE_TRAIN, ROUTE_EVAL, ROUTE_PREDICT, ROUTE_ENCODE = "train", "eval", "predict", "encode"


def __getattr__(name: str) -> str:
    key = name.lower()
    if name.isupper() and key in Document.model_fields:
        return key
    raise AttributeError(f"zrun's deepspeed does not know deepspeed.runtime.constants.{name}: it is no key of a config")
