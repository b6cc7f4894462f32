"""A Trainer of transformers takes the splits of every kind of task as they are."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rankwise.data import tasks

pytest.importorskip("accelerate")

MODELS = {
    "language": "ToSTForCausalLM",
    "sequence": "ToSTForSequenceClassification",
    "image": "ToSTForImageClassification",
}


def make(name: str, folder: Path) -> tasks.Task:
    if name == "mqar":
        return tasks.mqar(8, 4, vocab_size=32, length=16, pairs=2)
    if name == "listops":
        return tasks.listops(8, 4, min_length=3, max_length=20, max_arguments=3)
    draw, labels = np.random.default_rng(0), np.arange(8) % 10
    pixels = draw.integers(0, 256, (8, 8, 8, 3), np.uint8)
    np.savez(folder / "cifar10.npz", x_train=pixels, y_train=labels, x_test=pixels[:4], y_test=labels[:4])
    return tasks.cifar10(folder, augment=True)


@pytest.mark.parametrize(("name", "own_collate"), [("mqar", False), ("listops", True), ("cifar10", True)])
def test_a_trainer_trains_and_evaluates(name: str, own_collate: bool, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from rankwise import models

    task = make(name, tmp_path)
    sizes = {"vocab_size": task.vocab_size, "num_labels": task.num_labels, "pad_token_id": task.pad_token_id}
    if task.image_shape is not None:
        sizes |= {"image_size": task.image_shape[-1], "num_channels": task.image_shape[0], "patch_size": 4}
    config = models.ToSTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        layer_types="softmax",
        max_position_embeddings=task.length,
        causal=task.kind == "language",
        **{key: value for key, value in sizes.items() if value is not None},
    )
    torch.manual_seed(0)
    model = getattr(models, MODELS[task.kind])(config)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    args = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=2,
        per_device_train_batch_size=4,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=task.train,
        eval_dataset=task.test,
        data_collator=task.collate if own_collate else None,
    )
    trainer.train()
    assert any(not torch.equal(value, before[key]) for key, value in model.state_dict().items())
    predicted = trainer.predict(task.test)
    assert np.isfinite(predicted.metrics["test_loss"])
    logits = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
    labels = torch.from_numpy(predicted.label_ids)
    assert 0 <= tasks.accuracy(torch.from_numpy(logits), labels) <= 1
    if task.kind == "language":  # the model's loss is over the labels that accuracy counts
        shifted = torch.nn.functional.cross_entropy(
            torch.from_numpy(logits[:, :-1]).flatten(0, 1), labels[:, 1:].flatten()
        )
        assert shifted.item() == pytest.approx(predicted.metrics["test_loss"], rel=1e-5)
