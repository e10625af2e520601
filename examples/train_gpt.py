"""Train a byte-level GPT on the English reference text that ships inside Python, and beat a bigram model.

    zrun --num_gpus 2 --backend gloo examples/train_gpt.py --config examples/configs/zero2.json

It is an ordinary DeepSpeed-style script: initialize, then forward, backward and step. It runs the same under zrun,
torchrun, or plain python. Exit status 1 if the trained model does not beat the bigram model on held-out text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from gpt import GPT, GPTConfig
from torch import Tensor
from torch.nn import functional

import zrun_runtime


def load_text() -> tuple[Tensor, Tensor]:
    """(train, validation): the bytes of Python's help topics, the last tenth of the topics held out. uint8."""
    names = sorted(topics)
    cut = len(names) * 9 // 10
    parts = ["\n\n".join(topics[name] for name in chosen) for chosen in (names[:cut], names[cut:])]
    train, validation = (torch.frombuffer(bytearray(part.encode()), dtype=torch.uint8) for part in parts)
    return train, validation


def bigram_loss(train: Tensor, validation: Tensor) -> float:
    """Nats per byte of the bigram model counted on `train` (add-one smoothing), on `validation`."""
    pairs = train[:-1].long() * 256 + train[1:].long()
    counts = torch.bincount(pairs, minlength=256 * 256).view(256, 256).double() + 1
    log_probabilities = (counts / counts.sum(1, keepdim=True)).log()
    return -log_probabilities[validation[:-1].long(), validation[1:].long()].mean().item()


def batches(text: Tensor, size: int, context: int, seed: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows for ever: inputs and targets, each (size, context) int64."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context - 1, (size,), generator=generator)
        window = torch.stack([text[s : s + context + 1] for s in starts.tolist()]).long().to(device)
        yield window[:, :-1], window[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, nats per byte."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(engine: zrun_runtime.Engine, text: Tensor, context: int) -> float:
    """Mean loss over the whole of `text`, in windows; every rank computes all of it."""
    engine.eval()
    windows = text[: len(text) // (context + 1) * (context + 1)].view(-1, context + 1).long().to(engine.device)
    losses = [loss_of(engine(chunk[:, :-1]), chunk[:, 1:]) * len(chunk) for chunk in windows.split(64)]
    engine.train()
    return (torch.stack(losses).sum() / len(windows)).item()


@torch.no_grad()
def sample(engine: zrun_runtime.Engine, prompt: str, length: int, context: int) -> str:
    """The prompt, continued. Every rank runs it, with the same choices, since weights may be sharded."""
    engine.eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([list(prompt.encode())], device=engine.device)
    for _ in range(length):
        probabilities = (engine(ids[:, -context:])[0, -1].float().cpu() / 0.8).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)[None].to(ids)], 1)
    engine.train()
    return bytes(ids[0].tolist()).decode(errors="replace")


def main() -> int:
    """Train, evaluate, show a sample; 0 if the bigram model was beaten."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="a DeepSpeed JSON config, such as examples/configs/zero2.json")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=0, help="set by some launchers; not needed")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model_config = GPTConfig()
    model = GPT(model_config)
    engine, _, _, _ = zrun_runtime.initialize(model=model, model_parameters=model.parameters(), config=args.config)
    engine.expect_steps(args.steps)
    rank = engine.world.rank

    train, validation = load_text()
    bigram = bigram_loss(train, validation)
    if rank == 0:
        print(
            f"text: {len(train):,} bytes to train on, {len(validation):,} held out; bigram loss {bigram:.4f}",
            flush=True,
        )
    size = engine.train_micro_batch_size_per_gpu()
    data = batches(train, size, model_config.context, seed=args.seed * 1000 + rank, device=engine.device)
    while engine.global_steps < args.steps:
        inputs, targets = next(data)
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()

    final = evaluate(engine, validation, model_config.context)
    text = sample(engine, "The statement", 200, model_config.context)
    if rank == 0:
        verdict = "beats" if final < bigram else "does NOT beat"
        print(f"\n{text}\n\nvalidation loss {final:.4f} {verdict} the bigram model's {bigram:.4f}", flush=True)
    return 0 if final < bigram else 1


if __name__ == "__main__":
    sys.exit(main())
