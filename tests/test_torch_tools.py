"""Torch's own tools on sparse layers: transforms, compiling, exporting, tracing, checkpoints."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwad
from torch import Tensor, fx, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import rewire
from bodies import assert_close, normal

pytestmark = pytest.mark.usefixtures("same_random_numbers")


def mlp() -> nn.Module:
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return rewire.sparsify(layers, sparsity=0.5).double()


def cnn() -> nn.Module:
    layers = [nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Conv1d(4, 4, 2)]
    whole = nn.Sequential(
        layers[0], layers[1], nn.Flatten(2), layers[2], nn.Flatten(), nn.Linear(20, 3)
    )
    return rewire.sparsify(whole, sparsity=0.5).double()


def transposed() -> nn.Module:
    layers = nn.Sequential(nn.ConvTranspose2d(2, 3, 3, stride=2), nn.Tanh(), nn.Flatten())
    return rewire.sparsify(layers, sparsity=0.5).double()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (6,)),
    "cnn": (cnn, (2, 5, 4)),
    "transposed": (transposed, (2, 3, 2)),
}


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module, Tensor]:
    """A model, its dense twin, and four samples."""
    make, shape = MODELS[request.param]
    model = make().eval()
    return model, rewire.densify(copy.deepcopy(model)), normal(4, *shape)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def as_dense(model: nn.Module, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients by name and place in the dense twin; where there is no connection, NaN."""
    found = {}
    for name, g in grads.items():
        path, _, kind = name.rpartition(".")
        layer = model.get_submodule(path)
        if kind != "values":
            found[name] = g
            continue
        twin = copy.deepcopy(layer)
        rows = g.flatten(0, -3) if g.dim() > 2 else g[None]
        dense = []
        for row in rows:
            twin.values.data.copy_(row)  # type: ignore[operator, union-attr]
            dense.append(twin.to_dense().weight.detach())  # type: ignore[operator]
        found[f"{path}.weight"] = torch.stack(dense) if g.dim() > 2 else dense[0]
    return found


def masked(model: nn.Module, name: str, g: Tensor) -> Tensor:
    """A dense gradient, where there are connections."""
    path, _, kind = name.rpartition(".")
    if kind != "weight":
        return g
    ones = copy.deepcopy(model.get_submodule(path))
    ones.values.data.fill_(1)  # type: ignore[operator, union-attr]
    return g * ones.to_dense().weight.detach()  # type: ignore[operator]


# torch.func ---------------------------------------------------------------------------------------


def loss(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    return lambda p, x: functional_call(model, p, (x,)).square().sum()


def test_grad_of_functional_call(case: Any) -> None:
    model, dense, x = case
    found = as_dense(model, grad(loss(model))(weights_of(model), x))
    expected = grad(loss(dense))(weights_of(dense), x)
    assert found.keys() == expected.keys()
    for name, g in expected.items():
        assert_close(found[name], masked(model, name, g))


def test_gradients_of_each_sample(case: Any) -> None:
    model, dense, x = case

    def one(model: nn.Module) -> Any:
        return lambda p, x: loss(model)(p, x[None])

    found = as_dense(model, vmap(grad(one(model)), (None, 0))(weights_of(model), x))
    expected = vmap(grad(one(dense)), (None, 0))(weights_of(dense), x)
    for name, g in expected.items():
        assert found[name].shape == g.shape
        assert_close(found[name], masked(model, name, g))


@pytest.mark.parametrize("dim", [0, 1])
def test_vmap_over_inputs(case: Any, dim: int) -> None:
    model, dense, x = case
    batches = torch.stack([x, 2 * x, -x], dim)
    assert_close(vmap(model, dim)(batches).detach(), vmap(dense, dim)(batches).detach())
    g = vmap(grad(lambda x: model(x).square().sum()), dim)(batches)
    assert_close(g, vmap(grad(lambda x: dense(x).square().sum()), dim)(batches))


def test_an_ensemble(case: Any) -> None:
    model, _, x = case
    members = [weights_of(model), {n: 2 * p for n, p in weights_of(model).items()}]
    stacked = {n: torch.stack([m[n] for m in members]) for n in members[0]}
    found = vmap(lambda p: functional_call(model, p, (x,)))(stacked)
    for i, member in enumerate(members):
        assert_close(found[i].detach(), functional_call(model, member, (x,)).detach())
    grads = vmap(lambda p: grad(loss(model))(p, x))(stacked)
    for i, member in enumerate(members):
        for name, g in grad(loss(model))(member, x).items():
            assert_close(grads[name][i], g)


@pytest.mark.parametrize("transform", [jacrev, jacfwd])
def test_jacobians(case: Any, transform: Any) -> None:
    model, dense, x = case
    assert_close(transform(model)(x).detach(), transform(dense)(x).detach())


def test_second_derivatives(case: Any) -> None:
    model, dense, x = case
    x = x[:1]

    def f(model: nn.Module) -> Any:
        return lambda x: model(x).square().sum()

    expected = hessian(f(dense))(x).detach()
    assert_close(hessian(f(model))(x).detach(), expected)  # forward over reverse
    assert_close(jacrev(jacrev(f(model)))(x).detach(), expected)
    p, q = weights_of(model), weights_of(dense)
    found = jacrev(grad(lambda x: loss(model)(p, x)))(x)
    assert_close(found, jacrev(grad(lambda x: loss(dense)(q, x)))(x))
    mixed = grad(lambda p: grad(lambda x: loss(model)(p, x))(x).square().sum())(p)
    other = grad(lambda p: grad(lambda x: loss(dense)(p, x))(x).square().sum())(q)
    for name, g in as_dense(model, mixed).items():
        assert_close(g, masked(model, name, other[name]))


def test_forward_mode(case: Any) -> None:
    model, dense, x = case
    tangent = normal(*x.shape, seed=1)
    _, found = jvp(model, (x,), (tangent,))
    assert_close(found.detach(), jvp(dense, (x,), (tangent,))[1].detach())
    with fwad.dual_level():
        y = model(fwad.make_dual(x, tangent))
        assert_close(fwad.unpack_dual(y).tangent.detach(), found.detach())


def test_forward_mode_in_weights() -> None:
    model, x = mlp(), normal(4, 6)
    weights, tangents = (
        weights_of(model),
        {n: torch.ones_like(p) for n, p in weights_of(model).items()},
    )
    _, found = jvp(lambda p: functional_call(model, p, (x,)), (weights,), (tangents,))
    step = 1e-6
    ahead = functional_call(model, {n: p + step for n, p in weights.items()}, (x,))
    behind = functional_call(model, {n: p - step for n, p in weights.items()}, (x,))
    assert_close(found.detach(), ((ahead - behind) / (2 * step)).detach(), 1e-8)


def test_transforms_have_nothing_for_a_rewirer() -> None:
    model, x = mlp(), normal(4, 6)
    rewire.RigL(model, torch.optim.SGD(model.parameters(), 0.1), every=1, until=9)
    with pytest.raises(RuntimeError, match=r"cannot be taken from a transform of torch\.func"):
        grad(loss(model))(weights_of(model), x)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        jvp(model, (x,), (x,))


# torch.compile and torch.export -------------------------------------------------------------------


@pytest.fixture
def compiler() -> Any:
    """Counts graphs; leaves torch's options as they were."""
    from torch._dynamo import config, reset
    from torch._dynamo.testing import CompileCounterWithBackend

    reset()
    with config.patch({}):
        names = ("force_parameter_static_shapes", "force_nn_module_property_static_shapes")
        before = {name: getattr(config, name) for name in names}
        yield CompileCounterWithBackend("aot_eager")
        for name, value in before.items():
            setattr(config, name, value)
    reset()


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_rewirings_compile_once_more(name: str, compiler: Any) -> None:
    make, shape = MODELS[name]
    model, plain = make(), make()
    plain.load_state_dict(model.state_dict())
    compiled = rewire.compile(model, backend=compiler, fullgraph=True)
    graphs = []
    rewirers = []
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for m in (model, plain)]
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        rewirers.append(rewire.SET(m, optimizer, every=2, until=100))
    for step in range(10):
        x = normal(4, *shape, seed=step)
        for m, optimizer, rewirer in zip((compiled, plain), optimizers, rewirers, strict=True):
            m(x).square().sum().backward()
            optimizer.step()
            rewirer.step()
            optimizer.zero_grad()
        graphs.append(compiler.frame_count)
    assert len(rewirers[0].history) == 5
    assert len({r.layers[next(iter(r.layers))].active for r in rewirers[0].history}) > 1
    assert graphs[-1] == graphs[4] <= 3  # the second size of a layer makes its size dynamic
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.detach(), other.detach())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler's
def test_guided_rewirings_compile_a_bounded_number_of_times(compiler: Any) -> None:
    model = mlp()
    compiled = rewire.compile(model, backend=compiler)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    rewirer = rewire.GSE(model, optimizer, every=2, until=100)
    graphs = []
    for step in range(14):
        compiled(normal(4, 6, seed=step)).square().sum().backward()
        optimizer.step()
        rewirer.step()
        graphs.append(compiler.frame_count)
    assert len(rewirer.history) == 7
    assert graphs[-1] == graphs[7]


@pytest.mark.parametrize("name", MODELS)
def test_export_with_any_batch(name: str) -> None:
    make, shape = MODELS[name]
    model = make().eval()
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(model, (normal(4, *shape),), dynamic_shapes=({0: batch},))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    x = normal(7, *shape, seed=2)
    assert_close(loaded(x).detach(), model(x).detach())


def program(how: str, model: nn.Module, x: Tensor) -> Any:
    """A graph of the model's calls, with its parameters in it."""
    if how == "export":
        return torch.export.export(model, (x,)).module()
    return torch.jit.trace(model, x)  # type: ignore[no-untyped-call]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize("name", MODELS)
def test_programs_do_not_mix_values_and_connections(name: str, how: str, scope: Any) -> None:
    """They share parameters with the model: those of other connections are refused."""
    make, shape = MODELS[name]
    model, x = make(), normal(4, *shape)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    rewirer = rewire.SET(model, optimizer, every=2, until=100, scope=scope)
    live, apart = program(how, model, x), program(how, copy.deepcopy(model), x)
    before = model(x).detach()

    def train() -> None:
        model(x).square().sum().backward()
        optimizer.step()
        rewirer.step()

    train()
    assert_close(live(x).detach(), model(x).detach())  # as long as connections are the same
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert_close(live(x).detach(), model(x).detach())
    train()
    assert rewirer.history[-1].grown > 0
    with pytest.raises(Exception, match="trace or export the model again"):
        live(x)
    assert_close(apart(x).detach(), before)
    rewired = program(how, model, x)
    assert_close(rewired(x).detach(), model(x).detach())
    model.load_state_dict(make().state_dict())
    with pytest.raises(Exception, match="trace or export the model again"):
        rewired(x)


# torch.fx -----------------------------------------------------------------------------------------


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.up = nn.ConvTranspose1d(6, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.attention(x, x, x)[0].transpose(1, 2)) + 1  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", [*MODELS, "attention"])
def test_layers_are_leaves_of_symbolic_traces(name: str) -> None:
    attending = rewire.sparsify(Attending(), 0.5).double()
    make, shape = MODELS.get(name, (lambda: attending, (5, 6)))
    model, x = make().eval(), normal(4, *shape)
    graph = fx.symbolic_trace(model)
    names = {node.target for node in graph.graph.nodes if node.op == "call_module"}
    sparse = {n for n, m in model.named_modules() if isinstance(m, rewire.SparseLayer)}
    if name == "attention":
        sparse = {"attention", "up"}
    assert sparse <= names
    assert_close(graph(x).detach(), model(x).detach())


# State dicts --------------------------------------------------------------------------------------


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("strict", [True, False])
def test_a_dense_state_dict_in_a_sparse_model_names_the_function(strict: bool) -> None:
    before = copy.deepcopy((model := mlp()).state_dict())
    with pytest.raises(RuntimeError, match=r'0 is sparse.*rewire\.sparsify\(.*weights="keep"'):
        model.load_state_dict(dense().state_dict(), strict=strict)
    assert torch.equal(model.state_dict()["0.values"], before["0.values"])
    layer = rewire.sparsify(Attending(), 0.5)
    with pytest.raises(RuntimeError, match=r"attention is sparse.*rewire\.sparsify"):
        layer.load_state_dict(Attending().state_dict(), strict=strict)


@pytest.mark.parametrize("strict", [True, False])
def test_a_sparse_state_dict_in_a_masked_model_names_the_function(strict: bool) -> None:
    model = rewire.sparsify(dense(), 0.5, storage="masked")
    with pytest.raises(RuntimeError, match=r'0 is masked.*storage="sparse".*rewire\.load'):
        model.load_state_dict(mlp().state_dict(), strict=strict)


def test_a_sparse_state_dict_in_a_dense_model() -> None:
    """torch says which keys there are; ``dense_state_dict`` is what a dense model loads."""
    model, plain, x = mlp(), dense(), normal(4, 6)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.values"):
        plain.load_state_dict(model.state_dict())
    plain.load_state_dict(rewire.dense_state_dict(model))
    assert_close(plain(x).detach(), model(x).detach())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_distributed_checkpoints_hold_other_sizes(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from rewire.integrations.dcp import load, save

    def run() -> tuple[dict[str, Any], Callable[[int, int], None]]:
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        rewirer = rewire.GSE(model, optimizer, every=2, until=100)

        def train(first: int, last: int) -> None:
            for step in range(first, last):
                optimizer.zero_grad()
                model(normal(4, 6, seed=step)).square().sum().backward()
                optimizer.step()
                rewirer.step()

        return {"rewirer": rewirer, "model": model, "optimizer": optimizer}, train

    whole, train = run()
    train(0, 9)
    first, train = run()
    train(0, 5)
    save({name: part.state_dict() for name, part in first.items()}, tmp_path / "ours")
    second, train = run()
    assert second["model"][0].count != first["model"][0].count  # sizes differ
    state = load(tmp_path / "ours")
    for name, part in second.items():
        part.load_state_dict(state[name])
    train(5, 9)
    mine, other = second["model"].state_dict(), whole["model"].state_dict()
    for name, tensor in other.items():
        assert torch.equal(mine[name], tensor), name

    dcp.save({"model": first["model"].state_dict()}, checkpoint_id=tmp_path / "plain")
    fresh, _ = run()
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
        dcp.load({"model": fresh["model"].state_dict()}, checkpoint_id=tmp_path / "plain")
    with pytest.raises(ValueError, match=r"not written by rewire\.integrations\.dcp\.save"):
        load(tmp_path / "plain")


# TorchScript --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripting_is_an_error() -> None:
    with pytest.raises(Exception, match="annotation"):
        torch.jit.script(mlp())
