"""The experiments of the paper that do not train: FLOPs, and the timing of sparse products."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewire import files
from rewire.reproduce.run import Facets, choose

if TYPE_CHECKING:
    from rewire.reproduce.sweep import Sweep

RESULTS = "results.json"
Record = dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """One thing to measure.

    Attributes:
        key: what it is, by name; part of its record.
        take: measures it and gives the rest of the record.
    """

    key: Record
    take: Callable[[], Record]

    @cached_property
    def facets(self) -> Facets:
        """What it can be chosen by."""
        return {name: (_word(value),) for name, value in self.key.items()}

    @property
    def name(self) -> str:
        return ", ".join(f"{name} {_word(value)}" for name, value in self.key.items())


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def read(path: Path) -> list[Record]:
    """The records of a sweep so far."""
    try:
        document = files.parse_json((path / RESULTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    records: list[Record] = document["records"]
    return records


def write(path: Path, command: str, records: Sequence[Record], machine: Record) -> None:
    """Write the records of a sweep, and how they came about."""
    document = {"command": command, "machine": machine, "records": list(records)}
    files.write_text(path / RESULTS, json.dumps(document, indent=1) + "\n")


def same(record: Record, key: Record) -> bool:
    """Whether a record is that of a key."""
    return all(record.get(name) == value for name, value in key.items())


# FLOPs --------------------------------------------------------------------------------------------

FLOPS_SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.96, 0.97, 0.98, 0.99)
EVERY, SUBSET = 100, 1.0


def flops(scale: float) -> Iterator[Measurement]:
    """GSE's training against RigL's for ResNet-50 on ImageNet; nothing is run, so nothing is scaled."""
    for head in ("dense", "sparse"):
        for sparsity in FLOPS_SPARSITIES:
            key = {"model": "resnet50", "head": head, "sparsity": sparsity}
            yield Measurement(key, partial(_saving, head, sparsity))


def _saving(head: str, sparsity: float) -> Record:
    import torch

    from rewire import costs, data, models
    from rewire import flops as counting

    shape, classes = data.sizes("imagenet")
    with torch.device("meta"):
        model = models.for_images("resnet50", shape, classes)
    here = counting.assigned(model, shape, sparsity, dense_head=head == "dense")
    found = costs.saving(here, sparsity, head, EVERY, SUBSET)
    return {
        "every": EVERY,
        "subset": SUBSET,
        "inference": here.sparse,
        "dense_inference": here.dense,
        "gse": found.gse,
        "rigl": found.rigl,
        "saving_of_rigl": found.of_rigl,
        "saving_of_gse": found.of_gse,
    }


# Products -----------------------------------------------------------------------------------------

UNITS = (2048, 4096, 8192, 16384)
MATMUL_SPARSITIES = tuple(round(1 - 0.2 * 0.005 ** (i / 9), 6) for i in range(10))
"""The authors': ten from 80 to 99.9 %, the densities evenly spaced in logarithms."""
BATCH, REPEATS = 128, 10


def matmul(scale: float) -> Iterator[Measurement]:
    """A sparse n x n matrix times a dense n x 128 one, in four formats; ``scale`` multiplies n."""
    for size in dict.fromkeys(max(1, round(units * scale)) for units in UNITS):
        for sparsity in MATMUL_SPARSITIES:
            key = {"units": size, "sparsity": sparsity}
            yield Measurement(key, partial(_products, size, sparsity))


def _products(units: int, sparsity: float) -> Record:
    """Mean seconds of ten products, taken in turns, for each format."""
    import torch
    from torch import nn

    import rewire
    from rewire.bench.timing import interleaved

    with torch.device("meta"):
        layer = nn.Linear(units, units, bias=False)
    sparse: Any = rewire.sparsify(layer, sparsity, assignment="uniform")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        csr = sparse.to_sparse_csr().detach()
        coo, dense = csr.to_sparse_coo().coalesce(), csr.to_dense()
    x = torch.randn(units, BATCH, generator=torch.Generator().manual_seed(0))
    batch_last = x.t()  # (batch, units), in the memory of x: what our layers pass on to each other
    with torch.no_grad():
        timings = interleaved(
            {
                "dense": lambda: dense @ x,
                "coo": lambda: torch.sparse.mm(coo, x),
                "csr": lambda: csr @ x,
                "ours": lambda: sparse(batch_last),
            },
            REPEATS,
        )
    means = {name: sum(t.samples) / len(t.samples) for name, t in timings.items()}
    return {"batch": BATCH, "connections": sparse.values.numel()} | {
        f"{name}_ms": 1e3 * seconds for name, seconds in means.items()
    }


@dataclass(frozen=True)
class Measured:
    """An experiment without training.

    Attributes:
        about: in a few words.
        measurements: what to measure, at a scale.
        columns: of its table: their titles, and the record's names.
    """

    about: str
    measurements: Callable[[float], Iterator[Measurement]]
    columns: dict[str, str]


MEASURED = {
    "flops": Measured(
        "training FLOPs of GSE and RigL for ResNet-50",
        flops,
        {
            "head": "head",
            "sparsity": "sparsity",
            "GSE": "gse",
            "RigL": "rigl",
            "saved, of RigL's": "saving_of_rigl",
            "of GSE's": "saving_of_gse",
        },
    ),
    "matmul": Measured(
        "sparse times dense matrix: dense, COO, CSR and ours",
        matmul,
        {
            "units": "units",
            "sparsity": "sparsity",
            "dense, ms": "dense_ms",
            "COO": "coo_ms",
            "CSR": "csr_ms",
            "ours": "ours_ms",
        },
    ),
}


# Doing it -----------------------------------------------------------------------------------------


def measure(sweep: Sweep, threads: int, *, dry_run: bool = False) -> None:
    """Measure what is not measured yet, and show all of it; or list it."""
    from rich import box
    from rich.table import Table

    from rewire.bench import machine, timing
    from rewire.bench.show import Progress, console

    experiment = MEASURED[sweep.about.experiment]
    wanted = choose([*experiment.measurements(sweep.about.scale)], sweep.about.only)
    records = read(sweep.path)
    todo = [m for m in wanted if not any(same(r, m.key) for r in records)]
    if dry_run:
        for one in wanted:
            print(one.name + ("" if one in todo else ": finished"))
        return
    sweep.claim()
    screen = console()
    with timing.threads(threads):
        facts = machine.facts()
        with Progress(screen, len(todo)) as progress:
            for one in todo:
                progress.start(one.name)
                records.append(one.key | one.take())
                write(sweep.path, sweep.about.command, records, facts)
                shown = experiment.columns.items()
                told = (f"{t} {_cell(n, records[-1][n])}" for t, n in shown if n not in one.key)
                progress.finish(", ".join(told))
    table = Table(box=box.SIMPLE)
    for title in experiment.columns:
        table.add_column(title, justify="right", no_wrap=True)
    for one in wanted:
        (record,) = (r for r in records if same(r, one.key))
        table.add_row(*(_cell(name, record[name]) for name in experiment.columns.values()))
    screen.print(table)


def _cell(name: str, value: object) -> str:
    if isinstance(value, float):
        return f"{100 * value:.2f} %" if name.startswith("saving") else f"{value:.4g}"
    return str(value)
