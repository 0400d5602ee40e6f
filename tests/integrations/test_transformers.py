"""Sparse transformers in the Trainer, and in ``save_pretrained`` and ``from_pretrained``."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rewire

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from rewire.integrations.transformers import RewireCallback, attach  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore")]

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = transformers.BertConfig(**SIZES, intermediate_size=24, vocab_size=30, num_labels=3)


def bert() -> Any:
    torch.manual_seed(0)
    return rewire.sparsify(transformers.BertForSequenceClassification(BERT), 0.5)


class Sentences(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.ids = torch.randint(30, (48, 6), generator=random)
        self.labels = torch.randint(3, (48,), generator=random)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def trainer(folder: Path, model: nn.Module, callback: Any, **settings: Any) -> Any:
    settings = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 4, **settings}
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    return transformers.Trainer(
        model,
        arguments,
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        callbacks=[callback],
    )


def gse(**settings: Any) -> RewireCallback:
    return RewireCallback(rewire.GSE, **{"every": 3, "until": 100, **settings})


def assert_same(a: nn.Module, b: nn.Module) -> None:
    mine, other = a.state_dict(), b.state_dict()
    assert mine.keys() == other.keys()
    for name in mine:
        assert torch.equal(mine[name], other[name]), name


# The Trainer --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True},
    ],
    ids=["plain", "accumulation", "checkpointing"],
)
def test_a_stopped_run_resumes_bit_for_bit(tmp_path: Path, settings: dict[str, Any]) -> None:
    whole, callback = bert(), gse()
    trainer(tmp_path / "whole", whole, callback, **settings).train()
    steps = 24 // settings.get("gradient_accumulation_steps", 1)
    assert callback.rewirer is not None
    assert callback.rewirer.t == steps
    assert len(callback.rewirer.history) == steps // 3

    stop = {"num_train_epochs": 2, "max_steps": steps, **settings}
    halted = trainer(tmp_path / "run", bert(), gse(), **stop)
    halted.add_callback(Halt(8))
    halted.train()
    again, model = gse(), bert()
    trainer(tmp_path / "run", model, again, **settings).train(resume_from_checkpoint=True)
    assert again.rewirer is not None
    assert again.rewirer.t == steps
    assert list(again.rewirer.history) == list(callback.rewirer.history)
    assert_same(model, whole)


class Halt(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self.step


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    """It has connections of its own."""
    model, scores = bert(), iter(range(10, 0, -1))
    steps = {"save_steps": 6, "eval_strategy": "steps", "eval_steps": 6}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_score"}
    run = trainer(tmp_path, model, gse(), num_train_epochs=1, **steps, **best)
    run.compute_metrics = lambda _: {"score": next(scores)}
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-6")
    saved = [
        transformers.BertForSequenceClassification.from_pretrained(tmp_path / f"checkpoint-{step}")
        for step in (6, 12)
    ]
    assert_same(model, saved[0])
    assert saved[0].bert.pooler.dense.count != saved[1].bert.pooler.dense.count


def test_activation_checkpointing_changes_nothing(tmp_path: Path) -> None:
    """The gradients at S are those of the recomputed activations, once."""
    plain, saving = bert().double(), bert().double()
    for dropout in [*plain.modules(), *saving.modules()]:
        if isinstance(dropout, nn.Dropout):
            dropout.p = 0.0
    first, second = gse(), gse()
    trainer(tmp_path / "a", plain, first).train()
    trainer(tmp_path / "b", saving, second, gradient_checkpointing=True).train()
    assert first.rewirer is not None
    assert second.rewirer is not None
    assert list(first.rewirer.history) == list(second.rewirer.history)
    other = saving.state_dict()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(tensor, other[name])


def test_steps_that_are_skipped_do_not_count() -> None:
    from accelerate import Accelerator

    model = bert()
    optimizer = Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), 0.1))
    callback = gse()
    arguments = type("Arguments", (), {"world_size": 1})
    state = type("State", (), {"global_step": 0})
    given = {"model": model, "optimizer": optimizer}
    callback.on_train_begin(arguments, state, None, **given)
    assert callback.rewirer is not None
    for skipped, t in ((False, 1), (True, 1), (False, 2)):
        optimizer._is_overflow = skipped  # as it is where a scaler has found infinities
        callback.on_optimizer_step(arguments, state, None, **given)
        assert callback.rewirer.t == t


def test_it_resumes_from_another_folder_only_if_told(tmp_path: Path) -> None:
    trainer(tmp_path / "run", bert(), gse()).train()
    trainer(tmp_path / "other", bert(), gse(seed=1)).train()
    folder = str(tmp_path / "run" / "checkpoint-20")

    def resume(callback: RewireCallback) -> None:
        run = trainer(tmp_path / "new", bert(), callback, save_strategy="no")
        run.train(resume_from_checkpoint=folder)

    with pytest.raises(FileNotFoundError, match="resume_from"):
        resume(gse())
    with pytest.raises(ValueError, match="of step 16, and the Trainer resumes from step 20"):
        resume(gse(resume_from=tmp_path / "run" / "checkpoint-16"))
    with pytest.raises(ValueError, match="other connections"):
        resume(gse(resume_from=tmp_path / "other" / "checkpoint-20"))
    resume(callback := gse(resume_from=folder))
    assert callback.rewirer is not None
    assert callback.rewirer.t == 24


def test_several_processes_are_refused() -> None:
    arguments = type("Arguments", (), {"world_size": 2})
    with pytest.raises(ValueError, match=r"rewire\.distributed\.Parallel"):
        gse().on_train_begin(arguments, None, None, model=bert(), optimizer=None)


# save_pretrained and from_pretrained --------------------------------------------------------------

IDS = torch.tensor([[1, 2, 3, 4]])


def models() -> dict[str, Any]:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 30, "n_positions": 16}
    llama = transformers.LlamaConfig(**SIZES, intermediate_size=24, vocab_size=30)
    vit = transformers.ViTConfig(**SIZES, intermediate_size=24, image_size=8, patch_size=4)
    return {
        "bert": transformers.BertForSequenceClassification(BERT),
        "gpt2": transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)),
        "llama": transformers.LlamaForCausalLM(llama),
        "vit": transformers.ViTForImageClassification(vit),
    }


def output(model: nn.Module) -> Tensor:
    images = isinstance(model, transformers.ViTForImageClassification)
    given = torch.linspace(-1, 1, 192).view(1, 3, 8, 8) if images else IDS
    with torch.no_grad():
        return model.eval()(given).logits


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit"])
def test_from_pretrained_gives_the_model_that_was_saved(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model = models()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = rewire.sparsify(model, 0.7)
    attach(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_same(model, loaded)
    assert torch.equal(output(loaded), output(model))
    assert rewire.summary(loaded).connections == rewire.summary(model).connections
    assert all(p.requires_grad for p in loaded.parameters())
    loaded.save_pretrained(tmp_path / "again")  # by itself
    assert_same(type(model).from_pretrained(tmp_path / "again"), model)


def test_connections_are_those_of_the_time_of_saving(tmp_path: Path) -> None:
    model, callback = bert(), gse()
    run = trainer(tmp_path, model, callback)
    run.train()
    run.save_model(str(tmp_path / "final"))
    assert_same(
        transformers.BertForSequenceClassification.from_pretrained(tmp_path / "final"), model
    )


def test_a_model_that_was_loaded_trains_on(tmp_path: Path) -> None:
    model = bert()
    attach(model)
    model.save_pretrained(tmp_path / "start")
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "start")
    for one, folder in ((model, "a"), (loaded, "b")):
        trainer(tmp_path / folder, one, gse()).train()
    assert_same(model, loaded)


def test_another_head_or_none(tmp_path: Path) -> None:
    model = bert()
    attach(model)
    model.save_pretrained(tmp_path)
    body = transformers.BertModel.from_pretrained(tmp_path)
    assert_same(body, model.bert)
    body.save_pretrained(tmp_path / "body")
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "body")
    assert_same(again.bert, model.bert)
    assert isinstance(again.classifier, nn.Linear)


def test_without_the_module_loading_is_an_error(tmp_path: Path) -> None:
    model = bert()
    attach(model)
    model.save_pretrained(tmp_path)
    program = f"import transformers; transformers.BertModel.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0
    assert "ignore_mismatched_sizes" in done.stderr
    assert "rewire" in done.stderr  # "unknown quantization type"


def test_damaged_connections_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = bert()
    attach(model)
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["classifier.indices"][0] = 99
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError, match="output unit 0 are corrupt"):
        transformers.BertForSequenceClassification.from_pretrained(tmp_path)


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    dense = transformers.BertForSequenceClassification(BERT)
    with pytest.raises(ValueError, match=r"no sparse layers.*rewire\.sparsify"):
        attach(dense)
    masked = rewire.sparsify(dense, 0.5, storage="masked", weights="keep")
    with pytest.raises(ValueError, match=r"masked layers.*rewire\.save"):
        attach(masked)
    with pytest.raises(TypeError, match=r"rewire\.save"):
        attach(nn.Linear(2, 2))
    transformers.BertForSequenceClassification(BERT).save_pretrained(tmp_path)
    from rewire.integrations.transformers import RewireConfig

    with pytest.raises(ValueError, match='weights="keep"'):
        transformers.BertForSequenceClassification.from_pretrained(
            tmp_path, quantization_config=RewireConfig(["classifier"])
        )


def test_dequantize_makes_it_dense(tmp_path: Path) -> None:
    model = bert()
    expected = output(model)
    attach(model)
    model.dequantize()
    assert isinstance(model.classifier, nn.Linear)
    torch.testing.assert_close(output(model), expected)
    model.save_pretrained(tmp_path)
    dense = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    assert_same(dense, model)
