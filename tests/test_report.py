"""``rewire report``: what it makes of runs, whole ones and others, and how a browser shows it."""

import json
import math
import re
import shlex
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html import unescape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from typer.testing import CliRunner

from rewire.cli import app
from rewire.report import paper, runs, wires, wiring
from rewire.report.rerun import command
from rewire.report.views import VIEWS
from rewire.training import toml
from rewire.training.config import resolve

SMALL = [
    *("--width", "0.1", "--batch-size", "128", "--epochs", "3", "--drops", "2", "--quiet"),
]
REWIRED = ["--until", "3", "--every", "5"]


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def text(done: Any) -> str:
    return " ".join(done.output.replace("│", " ").split())


def report(*folders: Path, out: Path, more: tuple[str | Path, ...] = ()) -> str:
    done = run("report", *folders, "-o", out, *more)
    assert done.exit_code == 0, done.output
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real runs: GSE at two sparsities and SET with two seeds each, and dense."""
    top = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        for name, method in (
            ("gse-80", ["--method", "gse", "--sparsity", "0.8", *REWIRED]),
            ("gse-90", ["--method", "gse", "--sparsity", "0.9", *REWIRED]),
            ("set-90", ["--method", "set", "--scope", "layer", "--sparsity", "0.9", *REWIRED]),
        ):
            path = top / f"{name}-{seed}"
            assert run("train", *SMALL, *method, "--seed", str(seed), "--out", path).exit_code == 0
    assert run("train", *SMALL, "--method", "dense", "--out", top / "dense").exit_code == 0
    return top


@pytest.fixture(scope="module")
def page(trained: Path) -> str:
    return report(trained, out=trained.parent / "report.html")


def write_run(path: Path, accuracy: float, epochs: int = 3, **given: Any) -> Path:
    """A finished run with a few epochs, as far as the report looks at it."""
    path.mkdir(parents=True)
    method = given.pop("named", None)  # of another version
    config = toml.dumps(vars(resolve({"dataset": "cifar10", "model": "vgg16", **given})))
    if method is not None:
        config = re.sub(r'method = ".*"', f'method = "{method}"', config)
    (path / "config.toml").write_text(config)
    lines: list[dict[str, Any]] = [
        {
            "event": "epoch",
            "epoch": e,
            "step": 9 * e,
            "train_accuracy": 0.1,
            "seconds": e,
            "test_accuracy": 0.1 * e,
        }
        for e in range(1, epochs + 1)
    ]
    lines += [{"event": "end", "accuracy": accuracy, "steps": 9 * epochs, "seconds": epochs}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "model.safetensors").touch()
    return path


# Results ------------------------------------------------------------------------------------------


def test_accuracies_are_means_and_deviations_over_seeds(trained: Path, page: str) -> None:
    for name in ("gse-80", "gse-90", "set-90"):
        ends = [(trained / f"{name}-{seed}" / "metrics.jsonl").read_text() for seed in (0, 1)]
        accuracies = [100 * json.loads(end.splitlines()[-1])["accuracy"] for end in ends]
        assert f"{fmean(accuracies):.1f}<small>±{stdev(accuracies):.1f}</small>" in page


def test_it_shows_all_that_it_promises(page: str) -> None:
    headings = re.findall(r"<h3>(.*?)</h3>", page)
    assert headings == [
        "Results",
        "Accuracy while training",
        "Turnover and exploration",
        "Density of each layer over time",
        "Connections before and after",
        "Cost and speed",
    ]
    labels = [unescape(label) for label in re.findall(r'<svg[^>]*aria-label="(.*?)"', page)]
    for part in ("Accuracy against sparsity", "sparsity 90", "Turnover", "Explored", "Speed"):
        assert any(part in label for label in labels), part
    assert "runs: 7 finished" in page


def test_it_needs_nothing_but_itself(page: str) -> None:
    links = re.findall(r"""(?:src|href)=["'](.*?)["']""", page)
    assert links
    assert all(link.startswith(("#", "data:")) for link in links)
    assert "http://" not in page
    assert "https://" not in page


def test_the_same_runs_give_the_same_page(trained: Path, page: str, tmp_path: Path) -> None:
    assert report(trained, out=tmp_path / "again.html") == page


def test_the_same_run_twice_is_one(trained: Path, tmp_path: Path) -> None:
    shown = report(trained, trained / "dense", out=tmp_path / "report.html")
    assert "runs: 7 finished" in shown


def test_plots_are_files_too(trained: Path, tmp_path: Path) -> None:
    plots = tmp_path / "plots"
    report(trained / "gse-90-0", out=tmp_path / "report.html", more=("--plots", plots))
    names = sorted(path.stem for path in plots.glob("*.svg"))
    assert names
    assert names == sorted(path.stem for path in plots.glob("*.png"))
    for name in names:
        root = ElementTree.parse(plots / f"{name}.svg").getroot()
        assert root.findall(".//{*}polyline") or root.findall(".//{*}circle")
        with Image.open(plots / f"{name}.png") as image:
            assert np.asarray(image.convert("L")).std() > 1


# The paper ----------------------------------------------------------------------------------------


def test_the_papers_numbers() -> None:
    assert len(paper.printed("table1")) == 6 * (1 + 10 * 3)
    config = vars(resolve({"dataset": "cifar10", "model": "vgg16", "sparsity": 0.98}))
    found = paper.lookup(config)
    assert found is not None
    assert (found.accuracy, found.source) == (85.1, "Table 1")
    assert paper.lookup({**config, "subset": 2.0}) is None
    assert paper.lookup({**config, "sparsity": 0.97}) is None
    other = {"dataset": "cifar100", "model": "vit"}
    longer = paper.lookup(vars(resolve({**other, "sparsity": 0.98, "extend": 1.5})))
    assert longer is not None
    assert (longer.accuracy, longer.deviation, longer.source) == (45.3, 1.1, "Table 4")
    both = vars(resolve({"dataset": "cifar100", "model": "vgg16", "sparsity": 0.98}))
    twice = paper.lookup(both)  # without a deviation in Table 1, with one in Table 4
    assert twice is not None
    assert (twice.accuracy, twice.deviation, twice.source) == (40.8, 0.3, "Table 1")
    assert math.isnan(found.deviation)
    dense = paper.lookup(vars(resolve({**other, "method": "dense"})))
    assert dense is not None
    assert dense.accuracy == 58.8


def test_they_are_beside_ours(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.83, 0.85)):
        write_run(tmp_path / str(seed), accuracy, sparsity=0.98, seed=seed)
    write_run(tmp_path / "rigl", 0.8, sparsity=0.98, method="static", named="rigl")
    shown = report(tmp_path, out=tmp_path / "report.html")
    assert (
        '84.0<small>±1.4</small></b><span class="printed">85.1 (\N{MINUS SIGN}1.1)</span>' in shown
    )
    assert '80.0<span class="printed">83.7 (\N{MINUS SIGN}3.7)</span>' in shown


def test_runs_of_other_settings_have_no_distance_but_what_differs(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 0.84, sparsity=0.98, every=100, warmup=5.0)
    write_run(tmp_path / "b", 0.6, method="dense", dataset="cifar100", model="vit")
    shown = report(tmp_path, out=tmp_path / "report.html")
    assert '84.0<span class="printed">the paper has every 1000, warmup 0</span>' in shown
    assert "85.1" not in shown
    assert "58.8 % in Tables 1 and 3, and 60.3 % in Table 5" in shown


def test_shorter_schedules_have_no_distance(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 0.7, sparsity=0.98, scale=0.1)
    write_run(tmp_path / "b", 0.7, dataset="cifar100", sparsity=0.98, keep_dense=("classifier.6",))
    shown = report(tmp_path, out=tmp_path / "report.html")
    assert '70.0<span class="printed">85.1</span>' in shown
    assert "Schedules are 0.1 of the paper" in shown
    assert '70.0<span class="printed">the paper has keep dense none</span>' in shown


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "table1": [{"sparsity": 0.95}, {"sparsity": 0.98}, {"method": "dense"}],
    "imagenet": [{"dataset": "imagenet", "model": "resnet50", "sparsity": 0.9}],
    "scaling": [
        {"dataset": "cifar100", "method": "dense"},
        {"dataset": "cifar100", "width": 2.0, "sparsity": 0.75},
    ],
    "extended": [
        {"dataset": "cifar100", "sparsity": 0.98, "extend": 1.0},
        {"dataset": "cifar100", "sparsity": 0.98, "extend": 2.0},
    ],
    "vit-scaling": [
        {"dataset": "cifar100", "model": "vit", "method": "dense", "width": width}
        for width in (1.0, 2.0)
    ],
    "subset": [
        {"sparsity": 0.98, "subset": subset, "distribution": distribution}
        for subset in (0.5, 1.0, 100.0)
        for distribution in ("uniform", "grabo")
    ],
    "assignment": [
        {"sparsity": sparsity, "assignment": assignment}
        for sparsity in (0.9, 0.98)
        for assignment in ("uniform", "erdos-renyi")
    ],
    "progress-methods": [{"sparsity": 0.98}, {"sparsity": 0.98, "method": "set"}],
    "progress-width": [
        {"dataset": "cifar100", "width": width, "sparsity": 1 - width**-2} for width in (2.0, 3.0)
    ],
}

LINES = {
    "table1": {"GSE", "Dense", "paper"},
    "imagenet": {"GSE"},
    "scaling": {
        "VGG-16",
        "paper",
        "width 1\N{MULTIPLICATION SIGN}",
        "width 2\N{MULTIPLICATION SIGN}",
    },
    "extended": {"VGG-16", "paper", "epochs 200", "epochs 400"},
    "vit-scaling": {
        "Dense",
        "paper",
        "width 1\N{MULTIPLICATION SIGN}",
        "width 2\N{MULTIPLICATION SIGN}",
    },
    "subset": {"GSE · uniform", "GSE · GraBo", "paper"},
    "assignment": {"GSE · uniform", "GSE · Erdos-Renyi", "paper"},
    "progress-methods": {"GSE", "SET"},
    "progress-width": {
        "VGG-16",
        "paper",
        "width 2\N{MULTIPLICATION SIGN}",
        "width 3\N{MULTIPLICATION SIGN}",
    },
}


@pytest.mark.parametrize("experiment", VIEWS)
def test_every_experiment_has_its_section(experiment: str, tmp_path: Path) -> None:
    sweep = tmp_path / experiment
    for index, given in enumerate(SETTINGS[experiment]):
        for seed in (0, 1):
            accuracy = 0.5 + 0.01 * seed
            write_run(sweep / "runs" / f"{index}-{seed}", accuracy, seed=seed, **given)
    again = f"rewire reproduce {experiment} --seeds 2"
    about = {"experiment": experiment, "command": again, "scale": 1.0, "seeds": 2}
    (sweep / "sweep.toml").write_text(toml.dumps(about))
    shown = report(tmp_path, out=tmp_path / "report.html")
    view = VIEWS[experiment]
    assert re.findall("<h2>(.*?)<", shown)[0] == view.title
    assert f"{view.source}</span>" in shown
    assert f"<code>{again}</code>" in shown
    assert "50.5<small>±0.7</small>" in shown
    assert 'class="printed"' in shown
    lines = re.findall(r'<g data-series="\d+" data-label="(.*?)">', shown)
    assert set(map(unescape, lines)) == LINES[experiment]


def test_a_try_on_the_digits_is_called_so(tmp_path: Path) -> None:
    for name, dataset, model in (("try", "digits", "mlp"), ("real", "cifar10", "vgg16")):
        sweep = tmp_path / name
        write_run(sweep / "runs" / "a", 0.5, dataset=dataset, model=model, sparsity=0.98)
        about = {"experiment": "table1", "command": "", "scale": 1.0, "seeds": 1}
        (sweep / "sweep.toml").write_text(toml.dumps(about))
        shown = report(sweep, out=tmp_path / f"{name}.html")
        assert ("a try on the packaged digits" in shown) == (name == "try")


def test_experiments_without_training(tmp_path: Path) -> None:
    records: dict[str, list[dict[str, Any]]] = {
        "flops": [
            {"head": "dense", "sparsity": s, "saving_of_gse": 0.03, "saving_of_rigl": 0.02}
            for s in (0.9, 0.95)
        ],
        "matmul": [
            {"sparsity": 0.9, "units": n, "dense_ms": n / 7, "ours_ms": n / 9} for n in (256, 512)
        ],
    }
    for name, rows in records.items():
        (tmp_path / name).mkdir()
        again = f"rewire reproduce {name}"
        (tmp_path / name / "sweep.toml").write_text(toml.dumps({"experiment": name}))
        results = json.dumps({"command": again, "records": rows})
        (tmp_path / name / "results.json").write_text(results)
    shown = report(tmp_path, out=tmp_path / "report.html")
    assert "<code>rewire reproduce flops</code>" in shown
    assert "Figure 4" in shown
    assert "Figure 8" in shown
    assert '"dense head, of GSE\'s cost","var(--gse)",[3.0,3.0,null]' in unescape(shown)
    assert '"paper","var(--ink)",[null,2.4,null]' in unescape(shown)
    assert '"paper","var(--ink)",[null,null,13.3]' in unescape(shown)
    assert '"Ours","var(--gse)",[28.44,56.89]' in unescape(shown)


def test_rounds_are_runs_and_sweeps_may_share_them(tmp_path: Path) -> None:
    sweeps = [tmp_path / name for name in ("table1", "progress-methods")]
    for sweep in sweeps:
        (sweep / "runs").mkdir(parents=True)
        (sweep / "sweep.toml").write_text(toml.dumps({"experiment": sweep.name}))
    there = sweeps[0] / "runs"
    write_run(there / "gse", 0.6, sparsity=0.98)
    whole = write_run(there / "lottery", 0.7, sparsity=0.98, method="static", named="lottery")
    with (whole / "config.toml").open("a") as config:
        config.write("rounds = [0.0, 0.9, 0.98]\n")
    for index, sparsity in enumerate((0.0, 0.9, 0.98)):
        path = write_run(
            whole / f"round-{index}", 0.71 + sparsity / 10, method="static", sparsity=sparsity
        )
        settings = (path / "config.toml").read_text().replace("static", "lottery")
        (path / "config.toml").write_text(settings + 'rounds = []\ninitial = "fan-in"\n')
    (sweeps[1] / "runs" / "gse").symlink_to(there / "gse")
    shown = report(tmp_path, out=tmp_path / "report.html")
    assert "runs: 4 finished" in shown
    tables = re.findall(r'<div class="scroll pivot".*?</table>', shown)
    assert len(tables) == 2
    assert '60.0<span class="printed">85.1' in tables[0]
    assert '80.8</b><span class="printed">83.3' in tables[0]  # the last round, where GSE is too
    assert "80.0" not in tables[0]  # the one at 90 %, where nothing else is
    assert '60.0<span class="printed">85.1' in tables[1]
    (*_, last) = runs.find([whole]).runs
    assert last.seconds == 9  # of all rounds


# Connections --------------------------------------------------------------------------------------


def test_connections_before_and_after(trained: Path) -> None:
    path = trained / "gse-90-0"
    (found,) = runs.find([path]).runs
    layers = wiring.layers(found)
    start, end = load_file(path / "start.safetensors"), load_file(path / "model.safetensors")

    def pairs(tensors: Any, name: str) -> set[tuple[int, int]]:
        indptr, indices = tensors[f"{name}.indptr"], tensors[f"{name}.indices"]
        rows = range(len(indptr) - 1)
        return {(row, int(i)) for row in rows for i in indices[indptr[row] : indptr[row + 1]]}

    assert [layer.name for layer in layers] == ["1", "3", "5"]
    for layer in layers:
        before, after = pairs(start, layer.name), pairs(end, layer.name)
        assert len(before) == len(layer.before)
        assert layer.kept == pytest.approx(len(before & after) / len(before))
        assert layer.kept < 1
    first, then = layers[0].matrices()
    assert first != then
    assert layers[0].pixels() is not None
    assert layers[1].pixels() is None
    assert sum(len(layer.before) for layer in layers) == sum(len(layer.after) for layer in layers)

    density = wiring.densities(found, layers)
    for layer in layers:
        steps, values = density[layer.name]
        assert steps[0] == 0
        assert values[0] == pytest.approx(100 * len(layer.before) / (layer.n_in * layer.n_out))
        assert values[-1] == pytest.approx(100 * len(layer.after) / (layer.n_in * layer.n_out))


def test_degrees_of_wide_layers_are_written_out() -> None:
    keys = np.arange(2 * 1500)  # two inputs, each with all of 1500 outputs
    shown = wires._degrees(wiring.Layer("wide", 1500, 2, keys, keys[:-1]))
    assert "1,500.0 → 1,499.5 on average, 1,500 → 1,500 at most; inputs without any: 0 → 0" in shown


def test_connections_that_stay_in_their_layer_have_no_plot(trained: Path) -> None:
    (found,) = runs.find([trained / "set-90-0"]).runs
    assert wiring.layers(found)
    assert not wiring.densities(found, wiring.layers(found))


# Runs that are not whole --------------------------------------------------------------------------


def test_damaged_and_unfinished_runs_are_shown_as_such(trained: Path, tmp_path: Path) -> None:
    def broken(name: str, *damages: tuple[str, bytes | None]) -> None:
        shutil.copytree(trained / "gse-90-0", tmp_path / name)
        for file, content in damages:
            path = tmp_path / name / file
            path.unlink() if content is None else path.write_bytes(content)

    metrics = (trained / "gse-90-0" / "metrics.jsonl").read_bytes()
    lines = metrics.splitlines(keepends=True)
    cut = b"".join(lines[:-1]) + lines[-1][:20]
    broken("writing", ("model.safetensors", None), ("metrics.jsonl", cut))
    broken("garbage", ("metrics.jsonl", b'\xff\x00{\n[1]\n"a"\n{"event": "epoch"}\n' + metrics))
    nulls = b'{"event": "epoch", "epoch": 9, "test_accuracy": null, "seconds": "?"}\n'
    broken("null", ("metrics.jsonl", nulls), ("model.safetensors", None))
    broken("empty", ("metrics.jsonl", b""))
    broken("config", ("config.toml", b"dataset = "))
    broken("kinds", ("config.toml", b'dataset = "digits"\nwidth = "wide"\n'))
    broken("tensors", ("start.safetensors", b"\x05"), ("model.safetensors", b"no"))
    broken("new", ("metrics.jsonl", None), ("model.safetensors", None))
    shutil.rmtree(tmp_path / "new" / "checkpoints")
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "config.toml").write_text("[tool]\n")  # no run at all
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.toml").write_text("experiment = ")
    (tmp_path / "sweep" / "results.json").write_text('{"records": 3}')
    shown = report(tmp_path, trained / "dense", out=tmp_path / "report.html")
    assert "runs: 2 finished, 3 unfinished, 4 damaged" in shown  # finished: tensors and dense
    rows = dict(re.findall(r'<tr><td>(\w+)</td><td><span class="chip (\w+)"', shown))
    assert rows == {
        "config": "damaged",
        "empty": "damaged",
        "garbage": "damaged",
        "kinds": "damaged",
        "new": "unfinished",
        "null": "unfinished",
        "writing": "unfinished",
    }
    assert "4 lines of metrics.jsonl cannot be read" in shown
    assert "rewire train --resume" in shown
    assert "results.json cannot be read" in shown


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'&"
    write_run(tmp_path / "a", 0.5, dataset=f"images/{evil}")
    write_run(tmp_path / "b", 0.5, dataset="cifar10")
    sweep = toml.dumps({"experiment": evil, "command": evil})
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.toml").write_text(sweep)
    write_run(tmp_path / "sweep" / "c", 0.5, dataset=f"images/{evil}")
    write_run(tmp_path / "sweep" / "d", 0.5)
    shown = report(tmp_path, out=tmp_path / "report.html", more=("--title", evil))
    assert "<script>alert" not in shown
    assert shown.count("<script>") == 1


@pytest.mark.parametrize("make", [False, True])
def test_no_runs_is_an_error(make: bool, tmp_path: Path) -> None:
    if make:
        (tmp_path / "nothing").mkdir()
    done = run("report", tmp_path / "nothing", "-o", tmp_path / "report.html")
    assert done.exit_code == 1
    assert ("there is no run in" if make else "there is no folder") in text(done)
    assert not (tmp_path / "report.html").exists()


# How to rerun -------------------------------------------------------------------------------------


def test_the_command_repeats_the_run(trained: Path, page: str, tmp_path: Path) -> None:
    config = (trained / "gse-90-1" / "config.toml").read_text()
    words = command(toml.read(trained / "gse-90-1" / "config.toml"))
    assert f"<code>{words}</code>" in page
    done = run(*shlex.split(words)[1:], "--quiet", "--out", tmp_path / "again")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "again" / "config.toml").read_text() == config


# In a browser -------------------------------------------------------------------------------------

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PROBE = """<script>addEventListener("load", () => {
  const root = document.documentElement, wide = root.scrollWidth > innerWidth;
  const svg = document.querySelector("svg.plot"), box = svg.getBoundingClientRect();
  const at = {clientX: box.left + box.width / 2, clientY: box.top + 9};
  svg.dispatchEvent(new PointerEvent("pointermove", at));
  const tip = document.getElementById("tip");
  const shown = tip.style.visibility === "visible" ? tip.textContent : "";
  document.querySelector(".legend button").click();
  const hidden = svg.querySelectorAll("g.off").length;
  const lines = document.querySelectorAll("polyline.line").length;
  const pictures = [...document.images].filter((image) => image.naturalWidth > 1).length;
  const broken = document.images.length - pictures;
  parent.postMessage({width: innerWidth, wide, shown, hidden, lines, pictures, broken}, "*");
});</script>"""


def browse(page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    quiet = ("gpu", "quic", "background-networking", "component-update", "sync", "dev-shm-usage")
    arguments = [*(f"--disable-{name}" for name in quiet), "--no-first-run", "--no-sandbox"]
    profile = page.parent / "profile"
    return subprocess.run(
        [
            *(BROWSER, "--headless", *arguments, f"--user-data-dir={profile}", "--hide-scrollbars"),
            *("--enable-logging=stderr", "--virtual-time-budget=3000", *flags, page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


@pytest.mark.skipif(BROWSER is None, reason="there is no browser")
def test_a_browser_shows_it(page: str, tmp_path: Path) -> None:
    probed, frame = tmp_path / "page.html", tmp_path / "frame.html"
    probed.write_text(page.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    frame.write_text(
        f'<iframe src="{probed.as_uri()}" style="border:0;width:390px;height:800px"></iframe>'
        "<pre></pre><script>addEventListener('message', (m) => "
        "document.querySelector('pre').textContent = JSON.stringify(m.data))</script>"
    )
    done = browse(frame, "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr  # neither errors nor refused requests
    found = json.loads(unescape(re.findall("<pre>(.*?)</pre>", done.stdout)[0]))
    assert found["width"] == 390
    assert not found["wide"]
    assert found["lines"] == page.count("<polyline")
    assert found["pictures"] == page.count("<img")
    assert found["broken"] == 0
    assert "GSE" in found["shown"]
    assert found["hidden"] == 1


@pytest.mark.skipif(BROWSER is None, reason="there is no browser")
def test_it_is_light_or_dark(page: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    means = []
    for scheme in (1, 0):  # light and dark
        picture = tmp_path / f"{scheme}.png"
        flags = (f"--screenshot={picture}", "--window-size=1280,1600")
        browse(file, *flags, f"--blink-settings=preferredColorScheme={scheme}")
        with Image.open(picture) as image:
            shades = np.asarray(image.convert("L"), dtype=float)
        assert shades.std() > 5
        means.append(shades.mean())
    assert means[0] > 200
    assert means[1] < 60


def test_numbers_that_are_missing_are_nan() -> None:
    assert math.isnan(runs.number({"a": None}, "a"))
    assert math.isnan(runs.number({}, "a"))
