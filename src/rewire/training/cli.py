"""``rewire train``, ``eval``, ``predict`` and ``export`` on the command line."""

from __future__ import annotations

import inspect
import json
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from rewire import files
from rewire.methods import METHODS
from rewire.methods.options import OPTIONS

if TYPE_CHECKING:
    from rewire.training.folder import Folder
    from rewire.training.progress import Progress

_DATA, _MODEL, _METHOD = "Data", "Model", "Method"
_SCHEDULE, _OPTIMIZER, _RUN = "Schedule", "Optimizer", "Run"


def _option(help: str, panel: str, default: str | bool = False, name: str = "", **more: Any) -> Any:
    names = (name,) if name else ()
    return typer.Option(*names, help=help, show_default=default, rich_help_panel=panel, **more)


def _numbers(text: str | None, option: str, example: str) -> list[float] | None:
    """Numbers with commas between them; none for an empty text."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise typer.BadParameter(f"{text!r} must be {example}", param_hint=option) from None


Root = Annotated[
    Path | None,
    _option("The folder to look for data in.", _DATA, "REWIRE_DATA, then the user's cache"),
]
Workers = Annotated[
    int | None, _option("Processes that decode images.", _DATA, "one for each CPU", min=0)
]
Threads = Annotated[int | None, _option("Threads to compute with.", _RUN, "torch's own", min=1)]
Device = Annotated[
    str, _option("cpu, or cuda (untested: it runs on reference operators).", _RUN, "cpu")
]
Folder_ = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _with_method_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option of its own for each option of methods, instead of ``**of_methods``."""
    described = inspect.signature(command, eval_str=True)
    *own, _ = described.parameters.values()
    kinds = {"int": int, "float": float, "str": str, "bool": bool}
    for name, option in OPTIONS.items():
        more = {"metavar": "A,B"} if option.many else {}
        declared = _option(option.help, _METHOD, option.shown, **more)
        kind = Annotated[kinds.get(option.kind, str) | None, declared]  # type: ignore[valid-type]
        command.__annotations__[name] = kind
        own.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        )
    command.__signature__ = described.replace(parameters=own)  # type: ignore[attr-defined]
    return command


@_with_method_options
def train(
    dataset: Annotated[
        str | None,
        _option(
            "digits, fashion-mnist, cifar10, cifar100, imagenet, or a folder.", _DATA, "digits"
        ),
    ] = None,
    root: Root = None,
    download: Annotated[
        bool, _option("Get the data if it is not there.", _DATA, name="--download")
    ] = False,
    workers: Workers = None,
    pad: Annotated[
        int | None,
        _option(
            "Pixels around training images, for random crops.",
            _DATA,
            "4; digits 1; fashion-mnist 0",
        ),
    ] = None,
    image_size: Annotated[
        int | None, _option("Height and width, for folders and ImageNet.", _DATA, "224")
    ] = None,
    crop: Annotated[
        str | None, _option("area or plain, for folders and ImageNet.", _DATA, "area")
    ] = None,
    model: Annotated[
        str | None,
        _option(
            "mlp, vit, resnet20, 32, 56, 110 or 50, vgg11, 13, 16 or 19.",
            _MODEL,
            "vgg16; digits and fashion-mnist mlp; imagenet and folders resnet50",
        ),
    ] = None,
    width: Annotated[float | None, _option("Multiplies the model's channels.", _MODEL, "1")] = None,
    sparsity: Annotated[
        float | None,
        _option("Share of the weights that is missing.", _MODEL, "0.95; digits 0.98; imagenet 0.9"),
    ] = None,
    assignment: Annotated[
        str | None,
        _option("How layers share connections: erdos-renyi, erk, uniform.", _MODEL, "erdos-renyi"),
    ] = None,
    exact: Annotated[
        bool | None,
        _option(
            "Meet the sparsity exactly: what full layers cannot take goes to others.",
            _MODEL,
            "exact",
            "--exact/--no-exact",
        ),
    ] = None,
    keep_dense: Annotated[
        list[str] | None,
        _option("A layer to leave dense, by name or glob; may be repeated.", _MODEL),
    ] = None,
    method: Annotated[str | None, _option(f"{', '.join(METHODS)}.", _METHOD, "gse")] = None,
    epochs: Annotated[
        float | None, _option("Length of the run.", _SCHEDULE, "200; digits 50; imagenet 100")
    ] = None,
    drops: Annotated[
        str | None,
        _option(
            "Epochs at which the learning rate drops.",
            _SCHEDULE,
            "80,120; digits 20,30; imagenet 30,60,90",
            metavar="A,B",
        ),
    ] = None,
    drop_factor: Annotated[
        float | None, _option("What a drop multiplies it with.", _SCHEDULE, "0.1")
    ] = None,
    warmup: Annotated[
        float | None, _option("Epochs in which it rises from zero.", _SCHEDULE, "0; imagenet 5")
    ] = None,
    scale: Annotated[
        float | None,
        _option("Multiplies epochs, drops, warmup, until and every.", _SCHEDULE, "1"),
    ] = None,
    extend: Annotated[
        float | None,
        _option(
            "Multiplies epochs, drops, warmup and until, not every: extended training.",
            _SCHEDULE,
            "1",
        ),
    ] = None,
    batch_size: Annotated[
        int | None, _option("Images in a step.", _OPTIMIZER, "128; digits 32")
    ] = None,
    optimizer: Annotated[str | None, _option("sgd, adam or adamw.", _OPTIMIZER, "sgd")] = None,
    lr: Annotated[
        float | None, _option("Learning rate.", _OPTIMIZER, "0.1; vit 0.01; adam 0.001")
    ] = None,
    momentum: Annotated[float | None, _option("Of sgd.", _OPTIMIZER, "0.9")] = None,
    weight_decay: Annotated[
        float | None, _option("Of all weights.", _OPTIMIZER, "1e-4; digits 1e-3")
    ] = None,
    label_smoothing: Annotated[
        float | None, _option("Of the loss.", _OPTIMIZER, "0; imagenet 0.1")
    ] = None,
    precision: Annotated[
        str | None,
        _option(
            "float32, or bfloat16: the model runs under autocast, its weights stay float32.",
            _RUN,
            "float32",
        ),
    ] = None,
    seed: Annotated[int | None, _option("Of all randomness.", _RUN, "0")] = None,
    config_file: Annotated[
        Path | None,
        _option(
            "Settings that are not on the command line.", _RUN, False, "--config", metavar="TOML"
        ),
    ] = None,
    out: Annotated[
        Path | None, _option("The folder of the run.", _RUN, "runs/ and a name from the settings")
    ] = None,
    resume: Annotated[
        Path | None, _option("Resume the run in this folder.", _RUN, metavar="DIR")
    ] = None,
    overwrite: Annotated[
        bool, _option("Start over: remove the run in the folder.", _RUN, name="--overwrite")
    ] = False,
    checkpoint_every: Annotated[
        str,
        _option("Steps, or a time such as 30s or 1h; also after epochs.", _RUN, "5m"),
    ] = "5m",
    device: Device = "cpu",
    threads: Threads = None,
    through_nan: Annotated[
        bool,
        _option("Continue when the loss is not finite.", _RUN, name="--through-nan"),
    ] = False,
    tensorboard: Annotated[
        bool, _option("Also log for TensorBoard.", _RUN, name="--tensorboard")
    ] = False,
    quiet: Annotated[bool, _option("Print nothing but problems.", _RUN, name="--quiet")] = False,
    as_json: Annotated[
        bool, _option("Print the metrics as JSON, line by line.", _RUN, name="--json")
    ] = False,
    **of_methods: Any,
) -> None:
    """Train a sparse model.

    Settings that are not given are the paper's recipe for the data set. Progress, checkpoints and the
    model go to one folder. Ctrl-C stops after the current step; the same command resumes from
    there, and ends with the same model as if it had not been stopped.

    Example: `rewire train --dataset cifar10 --model vgg16 --sparsity 0.98 --scale 0.1`
    """
    options = {**locals(), **of_methods}
    from rewire import distributed
    from rewire.data import DataError
    from rewire.training import config as configs
    from rewire.training import progress
    from rewire.training.folder import Folder, RunError
    from rewire.training.interrupts import Interrupted, Interrupts
    from rewire.training.interval import Interval
    from rewire.training.job import Job, load_data
    from rewire.training.loop import Diverged, Trainer
    from rewire.training.processes import Processes

    options |= {
        "drops": _numbers(drops, "--drops", "epochs with commas between them, such as 80,120"),
        **{
            name: _numbers(options[name], f"--{name}", "numbers with commas between them")
            for name, option in OPTIONS.items()
            if option.many
        },
        "keep_dense": keep_dense or None,
    }
    given = {name: options[name] for name in configs.NAMES if options[name] is not None}
    try:
        interval, place = Interval.parse(checkpoint_every), _device(device, threads)
        place = distributed.setup(place)
        processes = Processes()
        if resume is not None:
            others = {"config": config_file, "out": out, "overwrite": overwrite}
            folder = _resumed(resume, [*given, *(name for name, used in others.items() if used)])
            config = folder.config()
        else:
            settings = {} if config_file is None else configs.read(config_file, method)
            config = configs.resolve(settings | given)
            folder = Folder(Path("runs", config.label) if out is None else out)
        if root is None and not overwrite:
            root = folder.root
        data = processes.main_first(
            lambda: load_data(config, root, download=download, workers=workers)
        )
        job = Job(config, data, place)
        shown: Progress = progress.choose(
            quiet=quiet or not processes.main, as_json=as_json and processes.main
        )
        if tensorboard and processes.main:
            from rewire.training.tensorboard import Logged

            shown = Logged(shown, folder.path)
        with Interrupts() as interrupts, folder if processes.main else nullcontext():
            if processes.main:
                folder.claim(config, overwrite=overwrite)
                folder.remember_root(root)
            distributed.barrier()
            Trainer(job, folder, shown, interrupts, processes, interval, through_nan).run()
        distributed.teardown()
    except (ValueError, RunError, DataError, OSError, Diverged, MemoryError) as error:
        _fail(files.problem(error))
    except Interrupted as stop:
        _fail(
            f"Stopped by {signal.Signals(stop.signal).name} after step {stop.step:,}, which is saved. Go "
            f"on with the same command, or with `rewire train --resume {folder.path}`.",
            128 + stop.signal,
        )
    except KeyboardInterrupt:
        _fail("Stopped.", 130)


def _resumed(path: Path, given: list[str]) -> Folder:
    from rewire.training.folder import Folder, RunError

    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise RunError(f"--resume continues a run with its own settings: leave out {options}")
    folder = Folder(path)
    if folder.finished:
        raise RunError(f"the run in {path} is finished: see `rewire eval {path}`")
    return folder


def _device(name: str, threads: int | None) -> Any:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the device {name!r} cannot be used here: {error}") from error
    return device


def _fail(message: str, code: int = 1) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)


def evaluate(
    path: Folder_,
    root: Root = None,
    workers: Workers = None,
    device: Device = "cpu",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Test the model of a run.

    Of a run that is not finished it is the model of the newest checkpoint.

    Example: `rewire eval runs/digits`
    """
    from rewire.data import DataError
    from rewire.training import inference
    from rewire.training.folder import RunError, plain
    from rewire.training.formatting import percent

    try:
        found = inference.evaluate(path, _device(device, threads), root=root, workers=workers)
    except (ValueError, RunError, DataError, OSError, MemoryError) as error:
        _fail(files.problem(error))
    if as_json:
        typer.echo(json.dumps(plain(found.as_dict())))
        return
    typer.echo(
        f"{found.what}: {percent(found.accuracy)} of {found.images:,} test images of {found.dataset} "
        f"right, loss {found.loss:.4f}"
    )
    worst = sorted(found.classes.items(), key=lambda item: item[1])[:5]
    typer.echo("lowest: " + ", ".join(f"{name} {percent(share)}" for name, share in worst))


def predict(
    path: Folder_,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files.")],
    top: Annotated[int, typer.Option(min=1, help="So many classes for each image.")] = 3,
    device: Device = "cpu",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Say what is in images.

    They are resized to what the model was trained with. Digits are light on dark.

    Example: `rewire predict runs/cifar10 cat.jpg dog.png`
    """
    from rewire.data import DataError
    from rewire.training import inference
    from rewire.training.folder import RunError, plain
    from rewire.training.formatting import percent

    try:
        found = inference.predict(path, images, top, _device(device, threads))
    except (ValueError, RunError, DataError, OSError, MemoryError) as error:
        _fail(files.problem(error))
    for image, guesses in zip(images, found, strict=True):
        if as_json:
            typer.echo(json.dumps(plain({"image": str(image), "classes": dict(guesses)})))
        else:
            words = ", ".join(f"{name} {percent(share)}" for name, share in guesses)
            typer.echo(f"{image}: {words}")


_FORMAT = """dense (a PyTorch state dict), csr (sparse matrices), onnx, or safetensors (for rewire.load).
By default onnx for .onnx, else dense."""


def export(
    path: Folder_,
    to: Annotated[Path, typer.Argument(metavar="FILE", help="Ends in .pt, .safetensors or .onnx.")],
    format: Annotated[str | None, typer.Option(help=_FORMAT)] = None,
    sparse_initializers: Annotated[
        bool, typer.Option("--sparse-initializers", help="Of ONNX: store connections alone.")
    ] = False,
) -> None:
    """Write the model of a run for others: a dense PyTorch state dict, CSR matrices, ONNX.

    Example: `rewire export runs/cifar10 vgg16.pt`, `rewire export runs/cifar10 vgg16.onnx`
    """
    from rewire import exporting
    from rewire.training import inference
    from rewire.training.folder import RunError

    try:
        model, what = inference.load(path)
        onnx = format == "onnx" or to.suffix == ".onnx"
        exporting.export(
            *(model, to),
            format=format,
            example=inference.example(path) if onnx else None,
            sparse_initializers=sparse_initializers,
        )
    except (ValueError, RunError, OSError, MemoryError) as error:
        _fail(files.problem(error))
    typer.echo(f"Wrote {what} to {to}")
