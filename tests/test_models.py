"""The models: the paper's parameter counts, shapes, gradients, widths and bad arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rewire import models
from rewire.models.resnet import PaddedShortcut
from rewire.models.transformer import Block
from rewire.models.vit import positions

SMALL: dict[str, dict[str, Any]] = {
    name: {"num_classes": 7, "width": 0.25} for name in models.MODELS if name != "gpt"
} | {"gpt": {"vocabulary": 7, "context": 12, "width": 16, "depth": 2, "heads": 2}}

every_model = pytest.mark.parametrize("name", models.MODELS)


def on_meta(name: str, **kwargs: Any) -> nn.Module:
    with torch.device("meta"):
        return models.build(name, **kwargs)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def weights(model: nn.Module) -> int:
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    return sum(layer.weight.numel() for layer in layers)


def an_input(name: str, batch: int = 8) -> Tensor:
    if name == "gpt":
        return torch.randint(7, (batch, 12))
    shape = {"mlp": (1, 28, 28), "resnet50": (3, 64, 64)}.get(name, (3, 32, 32))
    return torch.randn(batch, *shape)


@pytest.mark.parametrize(
    ("name", "num_classes", "expected"),
    [
        ("resnet56", 10, 853_018),
        ("resnet56", 100, 858_868),
        ("vgg16", 10, 1_256_730),
        ("vgg16", 100, 1_302_900),
        ("vit", 10, 4_237_930),
        ("vit", 100, 4_284_100),
        ("resnet50", 1000, 25_557_032),
        # Table 6 of He et al. in millions: 0.27, 0.46, 1.7.
        ("resnet20", 10, 269_722),
        ("resnet32", 10, 464_154),
        ("resnet110", 10, 1_727_962),
    ],
)
def test_parameters_are_those_of_the_paper(name: str, num_classes: int, expected: int) -> None:
    assert parameters(on_meta(name, num_classes=num_classes)) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet56", 848_944),
        ("vgg16", 1_252_528),
        ("vit", 4_224_000),
        ("resnet50", 25_502_912),
    ],
)
def test_weights_are_those_of_linear_and_convolution(name: str, expected: int) -> None:
    assert weights(on_meta(name)) == expected


def test_resnet50_costs_what_the_paper_says() -> None:
    model = on_meta("resnet50").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, 3, 224, 224, device="meta"))
    assert counter.get_total_flops() == pytest.approx(8.18e9, rel=1e-3)


@pytest.mark.parametrize(("name", "depth"), [("vgg11", 11), ("vgg13", 13), ("vgg19", 19)])
def test_a_vgg_is_as_deep_as_its_name(name: str, depth: int) -> None:
    layers = [m for m in on_meta(name).modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert len(layers) == depth


@every_model
def test_gradient_reaches_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name, **SMALL[name])
    out = model(an_input(name))
    assert out.shape == ((8, 12, 7) if name == "gpt" else (8, 7))
    (out * torch.randn_like(out)).sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.any() or parameter.dim() == 1, key  # batch norm undoes a bias


@every_model
def test_a_model_can_be_built_on_meta_and_filled_later(name: str) -> None:
    torch.manual_seed(0)
    real = models.build(name, **SMALL[name]).eval()
    model = on_meta(name, **SMALL[name]).eval()
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    model.to_empty(device="cpu").load_state_dict(real.state_dict())
    x = an_input(name, batch=2)
    assert torch.equal(model(x), real(x))


@pytest.mark.parametrize("name", [name for name in models.MODELS if name != "gpt"])
@pytest.mark.parametrize("width", [1e-3, 0.3, 2.0])
def test_any_width_runs(name: str, width: float) -> None:
    model = on_meta(name, num_classes=3, width=width)
    assert model(an_input(name, batch=2).to("meta")).shape == (2, 3)


def test_width_multiplies_channels() -> None:
    assert on_meta("mlp", hidden=(30, 5), width=0.1)[1].out_features == 3  # type: ignore[index]
    assert on_meta("mlp", hidden=(30, 5), width=0.1)[3].out_features == 1  # type: ignore[index]
    wide = on_meta("resnet20", width=2.0)
    assert wide.linear.in_features == 128  # type: ignore[union-attr]
    block = on_meta("vit", width=0.5).blocks[0]  # type: ignore[index]
    assert isinstance(block, Block)
    assert block.attention.to_qkv.weight.shape == (3 * 3 * 64, 256)
    assert block.attention.to_out.weight.shape == (256, 3 * 64)


def test_mlp_without_hidden_layers_is_linear() -> None:
    assert parameters(models.mlp(20, hidden=(), num_classes=3)) == 63


def test_padded_shortcut_by_hand() -> None:
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    expected = torch.zeros(1, 4, 2, 2)
    expected[0, 1] = torch.tensor([[0.0, 2.0], [8.0, 10.0]])
    assert torch.equal(PaddedShortcut(3)(x), expected)


def test_positions_by_hand() -> None:
    # (column, row) = (0, 0), (1, 0), (0, 1), (1, 1) at the one frequency 1.
    sine, cosine = torch.tensor([0.0, 1.0]).sin(), torch.tensor([0.0, 1.0]).cos()
    expected = torch.stack(
        [
            torch.stack([sine[column], cosine[column], sine[row], cosine[row]])
            for row in (0, 1)
            for column in (0, 1)
        ]
    )
    assert torch.allclose(positions(2, 4, like=torch.empty(0)), expected)
    assert positions(8, 512, like=torch.empty(0, dtype=torch.float64)).dtype == torch.float64
    rows = positions(8, 512, like=torch.empty(0)).tolist()
    assert len({tuple(row) for row in rows}) == 64


def test_vit_patches_are_image_patches() -> None:
    model = models.vit(width=0.1, image_size=8, patch_size=4)
    images = torch.randn(2, 3, 8, 8)
    patches = model._patches(images)
    assert patches.shape == (2, 4, 48)
    assert torch.equal(patches[1, 2], images[1, :, 4:, :4].permute(1, 2, 0).flatten())


def test_gpt_does_not_see_the_future() -> None:
    torch.manual_seed(0)
    model = models.gpt(**SMALL["gpt"]).eval()
    tokens = an_input("gpt", batch=1)
    changed = tokens.clone()
    changed[0, 6] = (tokens[0, 6] + 1) % 7
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :6], after[:, :6], atol=1e-6)
    assert not torch.allclose(before[:, 6:], after[:, 6:], atol=1e-6)


def test_dropout_is_off_in_evaluation() -> None:
    model = models.gpt(**SMALL["gpt"], dropout=0.5)
    tokens = an_input("gpt")
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("name", [name for name in models.MODELS if name != "gpt"])
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_classes", 0),
        ("num_classes", -3),
        ("num_classes", 2.5),
        ("width", 0),
        ("width", -1.0),
        ("width", float("nan")),
        ("width", float("inf")),
    ],
)
def test_bad_classes_and_widths(name: str, argument: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{argument} must be .*, got {value}"):
        models.build(name, **{argument: value})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: models.mlp(in_features=0), "in_features must be"),
        (lambda: models.mlp(hidden=(5, 0)), r"hidden\[1\] must be"),
        (lambda: models.vit(image_size=30), "multiple of patch_size, got 30 and 4"),
        (lambda: models.vit(patch_size=0), "patch_size must be"),
        (lambda: models.vit(width=0.1)(torch.zeros(2, 3, 28, 28)), r"got \(2, 3, 28, 28\)"),
        (lambda: models.gpt(vocabulary=0), "vocabulary must be"),
        (lambda: models.gpt(width=10, heads=3), "multiple of heads, got 10 and 3"),
        (lambda: models.gpt(dropout=1.0), "dropout must be"),
        (lambda: models.gpt(**SMALL["gpt"])(torch.zeros(1, 13, dtype=torch.int64)), "at most 12"),
        (lambda: models.build("resnet57"), "no model 'resnet57'; choose one of mlp, .*resnet56"),
    ],
)
def test_bad_arguments_are_explained(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_every_builder_is_exported() -> None:
    assert {*models.MODELS, "MODELS", "build", "built_with", "for_images"} == set(models.__all__)
    assert all(getattr(models, name) is builder for name, builder in models.MODELS.items())
