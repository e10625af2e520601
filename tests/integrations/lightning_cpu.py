"""Lightning with its DeepSpeedStrategy on the CPU.

The strategy insists on CUDAAccelerator, so the accelerators here say that they are one and train on the CPU.
"""

from __future__ import annotations

import lightning
import torch
from lightning.fabric.accelerators import CUDAAccelerator as FabricCuda
from lightning.fabric.strategies import DeepSpeedStrategy as FabricStrategy
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from torch.utils.data import DataLoader


class _OnCpu:
    def setup_device(self, device):
        pass

    def setup(self, trainer):
        pass

    def teardown(self):
        pass

    def get_device_stats(self, device):
        return {}

    @staticmethod
    def parse_devices(devices):
        return list(range(devices))

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("cpu", number) for number in devices]

    @staticmethod
    def auto_device_count():
        return 2

    @staticmethod
    def is_available():
        return True


class TrainerOnCpu(_OnCpu, CUDAAccelerator):
    pass


class FabricOnCpu(_OnCpu, FabricCuda):
    pass


class Module(lightning.LightningModule):
    def __init__(self, make, rate, divisor=1):
        super().__init__()
        self.make, self.rate, self.divisor, self.net, self.losses = make, rate, divisor, None, []

    def configure_model(self):
        self.net = self.make() if self.net is None else self.net

    def training_step(self, batch, index):
        features, classes = batch
        loss = nn.functional.cross_entropy(self.net(features), classes)
        self.losses.append(float(self.all_gather(loss.detach()).mean()))
        return loss / self.divisor

    def validation_step(self, batch, index):
        features, classes = batch
        self.log("validation", nn.functional.cross_entropy(self.net(features), classes), sync_dist=True)

    def test_step(self, batch, index):
        features, classes = batch
        self.log("tested", nn.functional.cross_entropy(self.net(features), classes), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.rate(optimizer), "interval": "step"}}


def fit(directory, stage, accumulation, make, data, rate):
    """stage: of ZeRO; None for Lightning's own DDP.

    With DeepSpeed both Lightning and the engine divide the loss by the accumulation; so it is with DDP here.
    """

    def trainer(steps):
        return lightning.Trainer(
            accelerator=TrainerOnCpu() if stage is not None else "cpu",
            devices=2,
            strategy=DeepSpeedStrategy(stage=stage, process_group_backend="gloo") if stage is not None else "ddp",
            accumulate_grad_batches=accumulation,
            gradient_clip_val=0.5,
            max_steps=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )

    loader = DataLoader(data, batch_size=4)
    first, module = trainer(8 // accumulation), Module(make, rate, accumulation if stage is None else 1)
    first.fit(module, loader, loader)
    first.save_checkpoint(directory / "kept")
    validation = float(first.callback_metrics["validation"])
    ended, again = trainer(8 // accumulation), Module(make, rate)
    ended.fit(again, loader, loader, ckpt_path=str(directory / "kept"))  # is at its end: nothing is trained
    return {
        "losses": module.losses,
        "validation": validation,
        "tested": first.test(module, loader, verbose=False)[0]["tested"],
        "world": first.world_size,
        "steps": [first.global_step, ended.global_step, len(again.losses)],
    }


def fabric(directory, stage, make, data):
    made = lightning.Fabric(
        accelerator=FabricOnCpu(),
        devices=2,
        strategy=FabricStrategy(
            config={
                "train_micro_batch_size_per_gpu": 4,
                "gradient_clipping": 0.5,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            },
            process_group_backend="gloo",
        ),
    )
    made.launch()
    model = make()
    model, optimizer = made.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = made.setup_dataloaders(DataLoader(data, batch_size=4))
    losses = []
    for features, classes in loader:
        loss = nn.functional.cross_entropy(model(features), classes)
        made.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(made.all_reduce(loss.detach())))
    made.save(directory / "kept", {"model": model, "optimizer": optimizer, "note": 7})
    state = {"model": model, "optimizer": optimizer, "note": 0}
    made.load(directory / "kept", state)
    return {"losses": losses, "note": state["note"]}
