"""The English reference text that ships inside Python, as bytes cut into blocks, for the Hugging Face examples."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset

VOCABULARY = 256


class Blocks(Dataset[dict[str, Tensor]]):
    """Blocks of `length` bytes of the help topics, the last tenth of the topics or all the others."""

    def __init__(self, length: int, held_out: bool) -> None:
        names = sorted(topics)
        cut = len(names) * 9 // 10
        text = "\n\n".join(topics[name] for name in (names[cut:] if held_out else names[:cut]))
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self.blocks = data[: len(data) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.blocks[index].long()
        return {"input_ids": ids, "labels": ids}
