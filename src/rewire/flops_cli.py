"""``rewire flops`` on the command line."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rewire.bench import options

if TYPE_CHECKING:
    from rich.table import Table

    from rewire.costs import Cost, Saving
    from rewire.flops import Flops

_SPARSITIES = (0.9, 0.95, 0.98, 0.99)
_IMAGENET = ("resnet50",)  # models that are made for it
_DIVISORS = {"rigl": "RigL's", "gse": "GSE's"}


def show(
    model: Annotated[
        str, typer.Option(help="mlp, vit, resnet20, 32, 56, 110 or 50, vgg11, 13, 16 or 19.")
    ] = "resnet50",
    dataset: Annotated[
        str | None,
        typer.Option(
            help="digits, fashion-mnist, cifar10, cifar100 or imagenet: sets the size of images.",
            show_default="imagenet for resnet50, digits for mlp, or else cifar10",
        ),
    ] = None,
    width: Annotated[float, typer.Option(help="Multiplies the model's channels.")] = 1.0,
    sparsity: Annotated[
        list[str] | None,
        options.list_option("SHARE", "Share of the weights that is missing", "0.9,0.95,0.98,0.99"),
    ] = None,
    method: Annotated[
        list[str] | None, options.list_option("NAME", "Only these methods", "all of them")
    ] = None,
    assignment: Annotated[
        str, typer.Option(help="How layers share connections: erdos-renyi, erk, uniform.")
    ] = "erdos-renyi",
    dense_head: Annotated[
        bool, typer.Option("--dense-head", help="Let the last layer stay dense.")
    ] = False,
    every: Annotated[int, typer.Option(min=1, help="Steps between rewirings (T).")] = 100,
    subset: Annotated[float, typer.Option(help="Draws of GSE per connection (gamma).")] = 1.0,
    until: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the run in which gradual pruning prunes.")
    ] = 0.6,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """FLOPs of inference and training, by method.

    Counted per sample as Evci et al. do: the products of linear layers and convolutions, a
    multiply-add as 2; training is a forward pass, the gradient of activations and that of weights. At
    the end stands what GSE saves over RigL, both ways of taking the ratio, with a dense and a sparse
    head.

    Example: `rewire flops --model vgg16 --dataset cifar100 --every 1000`
    """
    import torch

    from rewire import costs, data, flops, models
    from rewire.training.config import MODELS

    sparsities = options.parts(sparsity, options.sparsity) or _SPARSITIES
    name = dataset or (
        "imagenet" if model in _IMAGENET else "digits" if model == "mlp" else "cifar10"
    )
    try:
        if model not in MODELS:
            raise ValueError(f"there is no model {model!r}; choose one of {', '.join(MODELS)}")
        shape, classes = data.sizes(name)
        with torch.device("meta"):
            built = models.for_images(model, shape, classes, width)

        def at(share: float, head: bool = dense_head, exact: bool = False) -> Flops:
            return flops.assigned(
                built, shape, share, assignment=assignment, exact=exact, dense_head=head
            )

        forward = {share: at(share) for share in sparsities}
        rounds = {share: at(share, exact=True) for share in costs.ROUNDS}
        if not subset > 0:
            raise ValueError(f"--subset must be above 0, got {subset}")
        setting = costs.Setting(every, subset, until, 10 * classes)
        found = {
            share: costs.costs(here, [f for s, f in rounds.items() if s < share], setting)
            for share, here in forward.items()
        }
    except (ValueError, RuntimeError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    known = [cost.method for cost in next(iter(found.values()))]
    wanted = options.parts(method, str)
    for one in wanted:
        if one not in known:
            raise typer.BadParameter(
                f"there is no method {one!r}; choose from {', '.join(known)}", param_hint="--method"
            )
    found = {s: [c for c in cs if not wanted or c.method in wanted] for s, cs in found.items()}
    heads = {"dense": True, "sparse": False}
    savings = [
        costs.saving(at(share, head), share, word, every, subset)
        for word, head in heads.items()
        for share in sparsities
    ]
    if as_json:
        _json(found, savings, forward)
        return
    from rewire.bench.show import console
    from rewire.training.formatting import big, percent

    screen = console()
    head = "dense" if dense_head else "sparse"
    dense = big(forward[sparsities[0]].dense)
    screen.print(
        f"{model} on {name}, {head} head, {assignment}, T = {every}, gamma = {subset:g}\n"
        f"inference of the dense model: {dense}FLOPs per sample (f_D), training 3 f_D"
    )
    screen.print(_table(found, forward))
    screen.print(_formulas(next(iter(found.values()))))
    screen.print(_savings(savings))
    applies = model == "resnet50" and name == "imagenet" and (every, subset, width) == (100, 1, 1)
    if applies and assignment == "erdos-renyi" and (which := costs.papers(savings)):
        said = " and ".join(f"{percent(v)} at {percent(s)}" for s, v in costs.PAPER_SAVING.items())
        screen.print(
            f"The paper's {said} are those with a {which[0]} head, divided by "
            f"{_DIVISORS[which[1]]} FLOPs."
        )


def _table(found: dict[float, list[Cost]], forward: dict[float, Flops]) -> Table:
    from rewire.training.formatting import percent

    table = _plain("FLOPs per sample, of the dense model's", "")
    for share in found:
        table.add_column(f"{percent(share)} sparse", justify="right", no_wrap=True)
    inference = [percent(f.sparse / f.dense) for f in forward.values()]
    table.add_row("inference", *inference, end_section=True)
    dense = [3 * f.dense for f in forward.values()]
    for rows in zip(*found.values(), strict=True):
        cells = [percent(cost.training / d) for cost, d in zip(rows, dense, strict=True)]
        table.add_row(f"training, {rows[0].method}", *cells)
    return table


def _formulas(found: list[Cost]) -> Table:
    table = _plain("How they are counted", "training", "FLOPs per sample", "once, before")
    how: dict[tuple[str, str], list[str]] = {}
    for cost in found:
        how.setdefault((cost.formula, cost.once), []).append(cost.method)
    for formulas, methods in how.items():
        table.add_row(", ".join(methods), *formulas)
    table.caption = (
        "f_S: with the connections there are; f_G: with as many as GSE draws; f_A, f_B: with those of "
        "Top-KAST's sets; T: steps between rewirings"
    )
    table.caption_justify = "left"
    return table


def _plain(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _savings(savings: list[Saving]) -> Table:
    from rewire.training.formatting import percent

    table = _plain("What GSE saves over RigL", "head", "divided by")
    shares = list(dict.fromkeys(one.sparsity for one in savings))
    for share in shares:
        table.add_column(f"{percent(share)} sparse", justify="right", no_wrap=True)
    for head in dict.fromkeys(one.head for one in savings):
        for by, word in _DIVISORS.items():
            cells = [f"{100 * getattr(s, f'of_{by}'):.2f} %" for s in savings if s.head == head]
            table.add_row(head, f"{word} FLOPs", *cells)
    return table


def _json(
    found: dict[float, list[Cost]], savings: list[Saving], forward: dict[float, Flops]
) -> None:
    from rewire import costs

    which = costs.papers(savings)
    document: dict[str, Any] = {
        "inference": [
            {"sparsity": s, "flops": f.sparse, "dense_flops": f.dense} for s, f in forward.items()
        ],
        "training": [{"sparsity": s, **asdict(cost)} for s, cs in found.items() for cost in cs],
        "savings": [
            asdict(one) | {"of_rigl": one.of_rigl, "of_gse": one.of_gse} for one in savings
        ],
        "paper": None if which is None else {"head": which[0], "divided_by": which[1]},
    }
    typer.echo(json.dumps(document, indent=2))
