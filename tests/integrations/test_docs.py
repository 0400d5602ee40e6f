"""The programs in docs/integrations.md run as they are written there, with smaller models and data."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rewire

pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()


def program(heading: str, number: int = 0) -> str:
    """A block of code under a heading."""
    section = re.split(r"^##+ ", PAGE.split(f"\n{heading}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)[number]


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def loader(*shape: int) -> Any:
    x, y = torch.randn(32, *shape), torch.randint(3, (32,))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)


def test_a_sparse_bert_with_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *["a", "good", "bad", "film", "story"]]
    Path("vocabulary.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizer("vocabulary.txt")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=24, vocab_size=len(words))
    transformers.BertForSequenceClassification(config).save_pretrained("bert")
    tokenizer.save_pretrained("bert")
    rows = [{"sentence": f"a {w} film", "label": w == "good"} for w in ("good", "bad") * 40]
    Path("rows.json").write_text(
        "\n".join(json.dumps(r | {"label": int(r["label"])}) for r in rows)
    )

    text = program("## Hugging Face Trainer")
    text = text.replace('"bert-base-uncased"', '"bert"')
    text = text.replace('"glue", "sst2"', '"json", data_files={"train": "rows.json"}')
    text = text.replace("every=200, until=6000", "every=4, until=24")
    text = text.replace("save_steps=1000", 'save_steps=10, use_cpu=True, report_to="none"')
    names: dict[str, Any] = {}
    exec(text, names)
    assert [r.step for r in names["callback"].rewirer.history] == [4, 8, 12, 16, 20, 24]
    assert (tmp_path / "runs/sst2/checkpoint-10/rewirer.pt").is_file()
    density = rewire.summary(names["model"]).density
    loaded: dict[str, Any] = {}
    exec(program("### `save_pretrained` and `from_pretrained`"), loaded)
    assert rewire.summary(loaded["model"]).density == density < 0.2
    assert torch.equal(
        loaded["model"].bert.pooler.dense.values, names["model"].bert.pooler.dense.values
    )


def test_a_lightning_run_that_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    text = program("## Lightning").replace("every=100", "every=5")
    names: dict[str, Any] = {"loader": loader(1, 28, 28)}
    exec(text, names)
    (callback,) = [c for c in names["trainer"].callbacks if hasattr(c, "rewirer")]
    assert callback.rewirer.t == 80
    assert len(callback.rewirer.history) == 16


def test_a_loop_of_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    names = {"MyModel": MyModel, "loader": loader(12), "loss_fn": nn.CrossEntropyLoss()}
    exec("import rewire, torch\n" + program("## Accelerate"), names)
    assert names["rewirer"].rewirer.t == 2  # type: ignore[attr-defined]
    assert (tmp_path / "checkpoint" / "custom_checkpoint_0.pkl").is_file()


def test_a_classifier() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_wine(return_X_y=True)
    names = {"X": x, "y": y, "X_test": x, "y_test": y}
    exec(program("## scikit-learn"), names)
    assert names["model"].score(x, y) > 0.9
