"""Real architectures at toy size with random weights: those of transformers, built from their configs, and torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import zrun_runtime

from .scenario import CLASSES, Recipe, Run, Scenario, Spot, build
from .training import Trained, engine_of, follow

VOCABULARY = 53
IMAGE = 16
TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ARCHITECTURES: dict[str, type[Architecture]] = {}


class Architecture(Scenario):
    """A model as a library ships it; subclasses with an `architecture` are found in ARCHITECTURES."""

    architecture: ClassVar[str] = ""
    checkpoints: ClassVar[bool] = False  # the model knows how to checkpoint its layers
    hyper: ClassVar[dict[str, dict[str, Any]]] = {"sgd": {"lr": 0.02}}

    def __init_subclass__(cls) -> None:
        if cls.architecture:
            ARCHITECTURES[cls.architecture] = cls

    def __init__(self, checkpoint: str | None = None) -> None:
        self.checkpoint = checkpoint  # "reentrant" or "non-reentrant": every layer runs in one

    def model(self) -> Any:
        """A fresh model. The caller seeds."""
        raise NotImplementedError

    def build(self) -> nn.Module:
        model = self.model()
        if self.checkpoint:
            reentrant = self.checkpoint == "reentrant"
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model


class Text(Architecture):
    """Predicts the next token, or some of the same ones."""

    checkpoints = True

    def batch(self, spot: Spot) -> Any:
        tokens = torch.randint(3, VOCABULARY, (2, 8), generator=spot.generator())
        return {"input_ids": tokens, "labels": tokens}

    def loss(self, run: Run, batch: Any) -> Tensor:
        return run.forward(**batch).loss


class Gpt2(Text):
    architecture = "gpt2"

    def model(self) -> Any:
        config = transformers.GPT2Config(**TEXT, n_positions=16, n_embd=16, n_layer=3, n_head=2)
        return transformers.GPT2LMHeadModel(config)


class Llama(Text):
    architecture = "llama"

    def model(self) -> Any:
        config = transformers.LlamaConfig(
            **TEXT, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=16,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)


class Mixtral(Text):
    """A mixture of experts, with the loss that balances them."""

    architecture = "mixtral"

    def model(self) -> Any:
        config = transformers.MixtralConfig(
            **TEXT, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=16, num_local_experts=4, num_experts_per_tok=2,
            output_router_logits=True,
        )  # fmt: skip
        return transformers.MixtralForCausalLM(config)


class Mamba(Text):
    """State spaces: convolutions, and parameters that a layer reads itself."""

    architecture = "mamba"

    def model(self) -> Any:
        config = transformers.MambaConfig(**TEXT, hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=4)
        return transformers.MambaForCausalLM(config)


class T5(Text):
    """An encoder and a decoder that share their embedding with the head; a bias that the first layer lends to all."""

    architecture = "t5"

    def model(self) -> Any:
        config = transformers.T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0,
            relative_attention_num_buckets=8, feed_forward_proj="gated-gelu",
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config)


class Bert(Text):
    architecture = "bert"

    def model(self) -> Any:
        config = transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24,
            max_position_embeddings=16,
        )  # fmt: skip
        return transformers.BertForMaskedLM(config)


class Images(Architecture):
    """(3, 3, IMAGE, IMAGE) in, classes out."""

    def batch(self, spot: Spot) -> Any:
        generator = spot.generator()
        images = torch.randn(3, 3, IMAGE, IMAGE, generator=generator)
        return images, torch.randint(CLASSES, (3,), generator=generator)

    def loss(self, run: Run, batch: Any) -> Tensor:
        images, labels = batch
        return run.forward(pixel_values=images, labels=labels).loss


class Vit(Images):
    architecture = "vit"
    checkpoints = True

    def model(self) -> Any:
        config = transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24, image_size=IMAGE,
            patch_size=4, num_labels=CLASSES,
        )  # fmt: skip
        return transformers.ViTForImageClassification(config)


class ConvNext(Images):
    architecture = "convnext"

    def model(self) -> Any:
        config = transformers.ConvNextConfig(
            hidden_sizes=[8, 16], depths=[1, 2], num_stages=2, patch_size=2, image_size=IMAGE, num_labels=CLASSES
        )
        return transformers.ConvNextForImageClassification(config)


class ResNet(Images):
    """With batch norm: statistics are a rank's own."""

    architecture = "resnet"

    def model(self) -> Any:
        config = transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=CLASSES
        )
        return transformers.ResNetForImageClassification(config)


class Clip(Images):
    """Two towers and a scalar."""

    architecture = "clip"

    def model(self) -> Any:
        shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        text = {**shape, **TEXT, "max_position_embeddings": 8}
        vision = {**shape, "image_size": IMAGE, "patch_size": 4}
        return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))

    def loss(self, run: Run, batch: Any) -> Tensor:
        tokens = torch.randint(3, VOCABULARY, (3, 8), generator=run.spot.generator())
        return run.forward(input_ids=tokens, pixel_values=batch[0], return_loss=True).loss


class Translator(Architecture):
    """torch's own encoder and decoder, whose attention reads the weights of modules that it never calls."""

    architecture = "torch_transformer"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 16)
            self.transformer = nn.Transformer(16, 2, 2, 2, 24, batch_first=True)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            hidden = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask)
            return F.linear(hidden, self.embedding.weight)

    def model(self) -> Any:
        return self.Net()

    def batch(self, spot: Spot) -> Any:
        return torch.randint(VOCABULARY, (2, 2, 8), generator=spot.generator())

    def loss(self, run: Run, batch: Any) -> Tensor:
        source, target = batch
        return F.cross_entropy(run.forward(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())


class Lstm(Architecture):
    """Two layers in two directions with projections."""

    architecture = "lstm"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 12, padding_idx=0)
            self.rnn = nn.LSTM(12, 16, 2, batch_first=True, dropout=0.1, bidirectional=True, proj_size=8)
            self.head = nn.Linear(16, VOCABULARY)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.rnn(self.embedding(tokens))[0])

    def model(self) -> Any:
        return self.Net()

    def batch(self, spot: Spot) -> Any:
        return torch.randint(VOCABULARY, (2, 9), generator=spot.generator())

    def loss(self, run: Run, batch: Any) -> Tensor:
        return F.cross_entropy(run.forward(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class TorchResNet(Images):
    """The classical residual network, in channels-last memory."""

    architecture = "torch_resnet"

    class Part(nn.Module):
        def __init__(self, inside: int, outside: int, stride: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
            self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
            self.norms = nn.ModuleList(nn.BatchNorm2d(outside) for _ in range(2))
            self.way: Callable[[Tensor], Tensor] = nn.Identity()
            if stride > 1 or inside != outside:
                self.way = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.relu(self.norms[0](self.first(x)), inplace=True)
            return F.relu(self.norms[1](self.second(hidden)).add_(self.way(x)), inplace=True)

    class Net(nn.Module):
        def __init__(self, part: type[nn.Module]) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
            sizes = [(8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 16, 2)]
            self.layers = nn.Sequential(*(part(*size) for size in sizes))
            self.head = nn.Linear(16, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers(self.stem(x)).mean((2, 3)))

    def model(self) -> Any:
        return self.Net(self.Part).to(memory_format=torch.channels_last)

    def loss(self, run: Run, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(run.forward(images.contiguous(memory_format=torch.channels_last)), labels)


@dataclass(frozen=True)
class Variant:
    """How an architecture is trained."""

    stage: int
    accumulation: int
    checkpoint: str | None = None  # see Architecture
    early: bool = False  # built in slices

    def __str__(self) -> str:
        marks = [f"stage{self.stage}", f"accumulation{self.accumulation}", self.checkpoint, self.early and "early"]
        return "-".join(mark for mark in marks if mark)


def train_real(rank: int, world: int, *, name: str, recipe: Recipe, variant: Variant) -> Trained:
    """The case: train an architecture for the recipe's steps."""
    scenario = ARCHITECTURES[name](variant.checkpoint)
    with zrun_runtime.zero.Init(enabled=variant.early):
        model = build(scenario, seed=rank)
    return follow(engine_of(model, scenario, variant.stage, recipe), scenario, recipe, rank)
