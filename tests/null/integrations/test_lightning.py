"""``BrimCallback`` in Lightning's real Trainer: it predicts a step, changes nothing, and explains failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import brim
from brim.integrations.lightning import BrimCallback

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


class Regression(LightningModule):
    def __init__(self, fails: BaseException | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        self.fails = fails

    def training_step(self, batch: Any, _: int) -> dict[str, torch.Tensor]:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        if self.fails is not None and self._trainer is not None:
            raise self.fails
        return {"loss": loss}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Manual(Regression):
    automatic_optimization = False

    def training_step(self, batch: Any, _: int) -> dict[str, torch.Tensor]:
        return {}


def trained(module: type[Regression], *callbacks: Any, fails: BaseException | None = None, **more: Any) -> Regression:
    seed_everything(5, verbose=False)
    model, rows = module(fails), torch.randn(2, 32, 64)
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[*callbacks], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **more,
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(*rows), batch_size=8, shuffle=True))
    return model


def by_hand(passes: int) -> int:
    def build() -> Any:
        model, batch = Regression(), (torch.zeros(8, 64), torch.zeros(8, 64))
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            for _ in range(passes):
                nn.functional.mse_loss(model.net(batch[0]), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return brim.simulate(brim.trace(build, steps=2, target="cpu")).peak_bytes.allocated


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("brim: ")]


@pytest.mark.parametrize("passes", [1, 2])
def test_a_step_is_predicted_and_the_training_is_the_same(passes: int, capsys: pytest.CaptureFixture[str]) -> None:
    plain, callback = trained(Regression, accumulate_grad_batches=passes), BrimCallback()
    model = trained(Regression, callback, accumulate_grad_batches=passes)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert callback.predicted is not None
    assert callback.predicted.peak_bytes.allocated == pytest.approx(by_hand(passes), rel=0.01)
    (line,) = lines(capsys)
    assert line.startswith("brim: a step of Regression takes ") and line.endswith("; tensors in RAM")


def test_a_step_in_bf16_with_clipped_gradients_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    callback = BrimCallback()
    trained(Regression, callback, precision="bf16-mixed", gradient_clip_val=1.0)
    assert callback.predicted is not None, lines(capsys)


def test_a_step_of_manual_optimization_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    callback = BrimCallback()
    trained(Manual, callback)
    assert callback.predicted is None
    (line,) = lines(capsys)
    assert "manual optimization" in line


def test_an_error_of_memory_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.68 GiB of which 1.00 GiB "
        "is free. Including non-PyTorch memory, this process has 22.60 GiB memory in use. Of the allocated memory "
        "22.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
    )
    with pytest.raises(torch.OutOfMemoryError):
        trained(Regression, BrimCallback(), fails=torch.OutOfMemoryError(text))
    assert any("2 GiB" in line for line in lines(capsys))
