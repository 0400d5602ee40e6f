from collections.abc import Sequence
from enum import Enum
from typing import Any, ClassVar

from torch import Tensor

f32: _Kernels
f64: _Kernels
bf16: _Kernels

def supported() -> list[str]: ...
def current() -> str: ...
def use(name: str) -> None: ...
def shares_torch_threads() -> bool: ...
def empty_cache() -> int: ...

class Loops:
    def __init__(
        self, rows: int, entries: float, pieces: int, count: int, threads: int, /
    ) -> None: ...
    def forward(self, times: int, /) -> None: ...
    def backward(self, times: int, /) -> None: ...

# Connections: see csrc/sampling.h, csrc/drawing.h and csrc/topology.h, which say what each function does.
# Tensors are contiguous and on the CPU; indices are int32, masks bool. Results are written to the last
# tensors that are given. Types and numbers of elements are checked before anything is computed.

class Stream:
    def __init__(self, seed: int, purpose: int, step: int, layer: int) -> None: ...

def first_bad_row(*, indptr: Tensor, indices: Tensor, n_in: int, threads: int) -> int: ...
def by_input(
    *,
    indptr: Tensor,
    indices: Tensor,
    in_channels: int,
    taps: int,
    slots: Tensor,
    outputs: Tensor,
    order: Tensor,
    threads: int,
) -> None: ...
def alias(*, weights: Sequence[Tensor], tables: Sequence[Tensor], threads: int) -> None: ...
def draw(
    *,
    stream: Stream,
    draws: int,
    n_in: int,
    n_out: int,
    inputs: Tensor | None,
    outputs: Tensor | None,
    groups: int,
    indptr: Tensor,
    indices: Tensor,
    to_indptr: Tensor,
    to_indices: Tensor,
    threads: int,
) -> int: ...
def complement(
    *,
    indptr: Tensor,
    indices: Tensor,
    n_in: int,
    n_out: int,
    to_indptr: Tensor,
    to_indices: Tensor,
    threads: int,
) -> None: ...
def replace(
    *,
    indptr: Tensor,
    indices: Tensor,
    pruned: Tensor,
    subset_indptr: Tensor,
    subset_indices: Tensor,
    grown: Tensor,
    to_indptr: Tensor,
    to_indices: Tensor,
    source: Tensor,
    threads: int,
) -> None: ...
def mark(
    *,
    indptr: Tensor,
    indices: Tensor,
    chosen: Tensor | None,
    n_in: int,
    n_out: int,
    bits: Tensor,
) -> int: ...
def sketch(
    *,
    indptr: Tensor,
    indices: Tensor,
    chosen: Tensor | None,
    n_in: int,
    n_out: int,
    registers: Tensor,
) -> None: ...

# Plans: see csrc/engine.h and csrc/steps.h, which say what each step does.

class Geometry:
    fields: ClassVar[tuple[str, ...]]
    @property
    def batch(self) -> int: ...
    @property
    def in_channels(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def out_channels(self) -> int: ...
    @property
    def out_height(self) -> int: ...
    @property
    def out_width(self) -> int: ...
    @property
    def kh(self) -> int: ...
    @property
    def kw(self) -> int: ...
    @property
    def sh(self) -> int: ...
    @property
    def sw(self) -> int: ...
    @property
    def ph(self) -> int: ...
    @property
    def pw(self) -> int: ...
    @property
    def dh(self) -> int: ...
    @property
    def dw(self) -> int: ...
    @property
    def panel(self) -> int: ...
    @property
    def in_panels(self) -> bool: ...
    @property
    def out_panels(self) -> bool: ...
    def __init__(
        self,
        batch: int,
        in_channels: int,
        height: int,
        width: int,
        out_channels: int,
        out_height: int,
        out_width: int,
        kh: int,
        kw: int,
        sh: int,
        sw: int,
        ph: int,
        pw: int,
        dh: int,
        dw: int,
        panel: int = ...,
        in_panels: bool = ...,
        out_panels: bool = ...,
    ) -> None: ...

class Images:
    fields: ClassVar[tuple[str, ...]]
    @property
    def panels(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def panel(self) -> int: ...
    @property
    def in_panels(self) -> bool: ...
    def __init__(
        self,
        panels: int,
        channels: int,
        height: int,
        width: int,
        panel: int,
        in_panels: bool = ...,
    ) -> None: ...

class Thinning:
    fields: ClassVar[tuple[str, ...]]
    @property
    def down(self) -> int: ...
    @property
    def across(self) -> int: ...
    @property
    def before(self) -> int: ...
    @property
    def after(self) -> int: ...
    def __init__(
        self,
        down: int,
        across: int,
        before: int,
        after: int,
    ) -> None: ...

class Padding:
    fields: ClassVar[tuple[str, ...]]
    @property
    def channels_before(self) -> int: ...
    @property
    def channels_after(self) -> int: ...
    @property
    def top(self) -> int: ...
    @property
    def bottom(self) -> int: ...
    @property
    def left(self) -> int: ...
    @property
    def right(self) -> int: ...
    def __init__(
        self,
        channels_before: int = ...,
        channels_after: int = ...,
        top: int = ...,
        bottom: int = ...,
        left: int = ...,
        right: int = ...,
    ) -> None: ...

class Side:
    fields: ClassVar[tuple[str, ...]]
    @property
    def ptr(self) -> list[int]: ...
    @property
    def pixels(self) -> list[int]: ...
    @property
    def weight(self) -> list[float]: ...
    def __init__(
        self,
        ptr: list[int],
        pixels: list[int],
        weight: list[float],
    ) -> None: ...

class Pool:
    fields: ClassVar[tuple[str, ...]]
    @property
    def panels(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def out_height(self) -> int: ...
    @property
    def out_width(self) -> int: ...
    @property
    def kh(self) -> int: ...
    @property
    def kw(self) -> int: ...
    @property
    def sh(self) -> int: ...
    @property
    def sw(self) -> int: ...
    @property
    def ph(self) -> int: ...
    @property
    def pw(self) -> int: ...
    @property
    def count_padding(self) -> bool: ...
    @property
    def in_panels(self) -> bool: ...
    def __init__(
        self,
        panels: int,
        batch: int,
        channels: int,
        height: int,
        width: int,
        out_height: int,
        out_width: int,
        kh: int,
        kw: int,
        sh: int,
        sw: int,
        ph: int,
        pw: int,
        count_padding: bool = ...,
        in_panels: bool = ...,
    ) -> None: ...

class Operand:
    @property
    def external(self) -> bool: ...
    @property
    def offset(self) -> int: ...
    @property
    def bytes(self) -> int: ...

def External() -> Operand: ...
def Arena(offset: int, bytes: int) -> Operand: ...

class TopologyOperands:
    fields: ClassVar[tuple[str, ...]]
    @property
    def indptr(self) -> int: ...
    @property
    def indices(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    @property
    def order(self) -> int: ...
    def __init__(
        self,
        *,
        indptr: int = ...,
        indices: int = ...,
        slots: int = ...,
        outputs: int = ...,
        order: int = ...,
    ) -> None: ...

class NormOperands:
    fields: ClassVar[tuple[str, ...]]
    @property
    def weight(self) -> int: ...
    @property
    def bias(self) -> int: ...
    @property
    def mean(self) -> int: ...
    @property
    def variance(self) -> int: ...
    @property
    def training(self) -> bool: ...
    @property
    def relu(self) -> bool: ...
    @property
    def eps(self) -> float: ...
    def __init__(
        self,
        *,
        weight: int = ...,
        bias: int = ...,
        mean: int,
        variance: int,
        training: bool,
        relu: bool = ...,
        eps: float,
    ) -> None: ...

class NormGradientOperands:
    fields: ClassVar[tuple[str, ...]]
    @property
    def weight(self) -> int: ...
    @property
    def bias(self) -> int: ...
    @property
    def factors(self) -> int: ...
    def __init__(
        self,
        *,
        weight: int = ...,
        bias: int = ...,
        factors: int = ...,
    ) -> None: ...

class DeferredGradient:
    fields: ClassVar[tuple[str, ...]]
    @property
    def y(self) -> int: ...
    @property
    def factors(self) -> int: ...
    def __init__(
        self,
        *,
        y: int,
        factors: int,
    ) -> None: ...

class InputNorm:
    fields: ClassVar[tuple[str, ...]]
    @property
    def norm(self) -> NormOperands: ...
    @property
    def input(self) -> int: ...
    @property
    def more(self) -> int: ...
    def __init__(
        self,
        *,
        norm: NormOperands,
        input: int = ...,
        more: int = ...,
    ) -> None: ...

class Kind(Enum):
    values = 0
    numbers = 1
    indices = 2
    bytes = 3

class Layout(Enum):
    contiguous = 0
    batch_last = 1
    panels = 2

class Need:
    @property
    def role(self) -> str: ...
    @property
    def operand(self) -> int: ...
    @property
    def kind(self) -> Kind: ...
    @property
    def reads(self) -> bool: ...
    @property
    def writes(self) -> bool: ...
    @property
    def elements(self) -> int: ...

class Step:
    fields: ClassVar[tuple[str, ...]]
    @property
    def name(self) -> str: ...
    @property
    def elementwise(self) -> bool: ...
    @property
    def wide(self) -> bool: ...
    def needs(self) -> list[Need]: ...

class ConvForward(Step):
    @property
    def geometry(self) -> Geometry: ...
    @property
    def topology(self) -> TopologyOperands: ...
    @property
    def values(self) -> int: ...
    @property
    def bias(self) -> int: ...
    @property
    def x(self) -> int: ...
    @property
    def y(self) -> int: ...
    @property
    def norm(self) -> NormOperands | None: ...
    @property
    def relu(self) -> bool: ...
    @property
    def mean(self) -> int: ...
    @property
    def variance(self) -> int: ...
    def __init__(
        self,
        *,
        geometry: Geometry,
        topology: TopologyOperands,
        values: int,
        bias: int = ...,
        x: int,
        y: int,
        norm: NormOperands | None = ...,
        relu: bool = ...,
        mean: int = ...,
        variance: int = ...,
        wide: bool = ...,
    ) -> None: ...

class ConvBackward(Step):
    @property
    def geometry(self) -> Geometry: ...
    @property
    def topology(self) -> TopologyOperands: ...
    @property
    def values(self) -> int: ...
    @property
    def x(self) -> int: ...
    @property
    def dy(self) -> int: ...
    @property
    def before(self) -> InputNorm | None: ...
    @property
    def gate(self) -> int: ...
    @property
    def deferred(self) -> DeferredGradient | None: ...
    @property
    def dx(self) -> int: ...
    @property
    def dvalues(self) -> int: ...
    @property
    def dbias(self) -> int: ...
    @property
    def dnorm(self) -> NormGradientOperands | None: ...
    @property
    def relu_sums(self) -> int: ...
    def __init__(
        self,
        *,
        geometry: Geometry,
        topology: TopologyOperands,
        values: int,
        x: int,
        dy: int,
        before: InputNorm | None = ...,
        gate: int = ...,
        deferred: DeferredGradient | None = ...,
        dx: int,
        dvalues: int,
        dbias: int = ...,
        dnorm: NormGradientOperands | None = ...,
        relu_sums: int = ...,
        wide: bool = ...,
    ) -> None: ...

class WeightGradient(Step):
    @property
    def geometry(self) -> Geometry: ...
    @property
    def topology(self) -> TopologyOperands: ...
    @property
    def x(self) -> int: ...
    @property
    def dy(self) -> int: ...
    @property
    def gate(self) -> int: ...
    @property
    def deferred(self) -> DeferredGradient | None: ...
    @property
    def dvalues(self) -> int: ...
    @property
    def dbias(self) -> int: ...
    def __init__(
        self,
        *,
        geometry: Geometry,
        topology: TopologyOperands,
        x: int,
        dy: int,
        gate: int = ...,
        deferred: DeferredGradient | None = ...,
        dvalues: int,
        dbias: int = ...,
        wide: bool = ...,
    ) -> None: ...

class InputGradient(Step):
    @property
    def geometry(self) -> Geometry: ...
    @property
    def topology(self) -> TopologyOperands: ...
    @property
    def values(self) -> int: ...
    @property
    def dy(self) -> int: ...
    @property
    def dx(self) -> int: ...
    def __init__(
        self,
        *,
        geometry: Geometry,
        topology: TopologyOperands,
        values: int,
        dy: int,
        dx: int,
        wide: bool = ...,
    ) -> None: ...

class LinearRows(Step):
    @property
    def geometry(self) -> Geometry: ...
    @property
    def topology(self) -> TopologyOperands: ...
    @property
    def values(self) -> int: ...
    @property
    def bias(self) -> int: ...
    @property
    def x(self) -> int: ...
    @property
    def y(self) -> int: ...
    @property
    def relu(self) -> bool: ...
    def __init__(
        self,
        *,
        geometry: Geometry,
        topology: TopologyOperands,
        values: int,
        bias: int = ...,
        x: int,
        y: int,
        relu: bool = ...,
        wide: bool = ...,
    ) -> None: ...

class LinearRowsBackward(Step):
    @property
    def geometry(self) -> Geometry: ...
    @property
    def topology(self) -> TopologyOperands: ...
    @property
    def values(self) -> int: ...
    @property
    def x(self) -> int: ...
    @property
    def dy(self) -> int: ...
    @property
    def gate(self) -> int: ...
    @property
    def dx(self) -> int: ...
    @property
    def dvalues(self) -> int: ...
    @property
    def dbias(self) -> int: ...
    def __init__(
        self,
        *,
        geometry: Geometry,
        topology: TopologyOperands,
        values: int,
        x: int,
        dy: int,
        gate: int = ...,
        dx: int = ...,
        dvalues: int,
        dbias: int = ...,
        wide: bool = ...,
    ) -> None: ...

class LinearRowsInputGradient(Step):
    @property
    def geometry(self) -> Geometry: ...
    @property
    def topology(self) -> TopologyOperands: ...
    @property
    def values(self) -> int: ...
    @property
    def dy(self) -> int: ...
    @property
    def dx(self) -> int: ...
    def __init__(
        self,
        *,
        geometry: Geometry,
        topology: TopologyOperands,
        values: int,
        dy: int,
        dx: int,
        wide: bool = ...,
    ) -> None: ...

class LayerNormForward(Step):
    @property
    def panels(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def eps(self) -> float: ...
    @property
    def centered(self) -> bool: ...
    @property
    def weight(self) -> int: ...
    @property
    def bias(self) -> int: ...
    @property
    def x(self) -> int: ...
    @property
    def y(self) -> int: ...
    @property
    def mean(self) -> int: ...
    @property
    def scale(self) -> int: ...
    @property
    def wide_x(self) -> bool: ...
    @property
    def wide_y(self) -> bool: ...
    def __init__(
        self,
        *,
        panels: int,
        channels: int,
        columns: int,
        eps: float = ...,
        centered: bool = ...,
        wide_x: bool = ...,
        wide_y: bool = ...,
        weight: int = ...,
        bias: int = ...,
        x: int,
        y: int,
        mean: int = ...,
        scale: int = ...,
        wide: bool = ...,
    ) -> None: ...

class LayerNormBackward(Step):
    @property
    def panels(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def eps(self) -> float: ...
    @property
    def centered(self) -> bool: ...
    @property
    def weight(self) -> int: ...
    @property
    def x(self) -> int: ...
    @property
    def dy(self) -> int: ...
    @property
    def mean(self) -> int: ...
    @property
    def scale(self) -> int: ...
    @property
    def dx(self) -> int: ...
    @property
    def dweight(self) -> int: ...
    @property
    def dbias(self) -> int: ...
    @property
    def wide_x(self) -> bool: ...
    @property
    def wide_y(self) -> bool: ...
    def __init__(
        self,
        *,
        panels: int,
        channels: int,
        columns: int,
        eps: float = ...,
        centered: bool = ...,
        wide_x: bool = ...,
        wide_y: bool = ...,
        weight: int = ...,
        x: int,
        dy: int,
        mean: int = ...,
        scale: int,
        dx: int = ...,
        dweight: int = ...,
        dbias: int = ...,
        wide: bool = ...,
    ) -> None: ...

class TransposeEach(Step):
    @property
    def matrices(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def x(self) -> int: ...
    @property
    def y(self) -> int: ...
    def __init__(
        self,
        *,
        matrices: int,
        rows: int,
        columns: int,
        x: int,
        y: int,
        wide: bool = ...,
    ) -> None: ...

class Moments(Step):
    @property
    def channels(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def panel_rows(self) -> int: ...
    @property
    def x(self) -> int: ...
    @property
    def mean(self) -> int: ...
    @property
    def variance(self) -> int: ...
    def __init__(
        self,
        *,
        channels: int,
        length: int,
        panel_rows: int = ...,
        x: int,
        mean: int,
        variance: int,
        wide: bool = ...,
    ) -> None: ...

class Track(Step):
    @property
    def channels(self) -> int: ...
    @property
    def momentum(self) -> int: ...
    @property
    def unbiased(self) -> float: ...
    @property
    def mean(self) -> int: ...
    @property
    def variance(self) -> int: ...
    @property
    def running_mean(self) -> int: ...
    @property
    def running_variance(self) -> int: ...
    def __init__(
        self,
        *,
        channels: int,
        momentum: int,
        unbiased: float,
        mean: int,
        variance: int,
        running_mean: int,
        running_variance: int,
        wide: bool = ...,
    ) -> None: ...

class NormForward(Step):
    @property
    def channels(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def panel_rows(self) -> int: ...
    @property
    def norm(self) -> NormOperands: ...
    @property
    def x(self) -> int: ...
    @property
    def residual(self) -> int: ...
    @property
    def z(self) -> int: ...
    def __init__(
        self,
        *,
        channels: int,
        length: int,
        panel_rows: int = ...,
        norm: NormOperands,
        x: int,
        residual: int = ...,
        z: int,
        wide: bool = ...,
    ) -> None: ...

class NormBackward(Step):
    @property
    def channels(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def panel_rows(self) -> int: ...
    @property
    def norm(self) -> NormOperands: ...
    @property
    def x(self) -> int: ...
    @property
    def z(self) -> int: ...
    @property
    def dz(self) -> int: ...
    @property
    def more(self) -> int: ...
    @property
    def dx(self) -> int: ...
    @property
    def dresidual(self) -> int: ...
    @property
    def dweight(self) -> int: ...
    @property
    def dbias(self) -> int: ...
    @property
    def factors(self) -> int: ...
    def __init__(
        self,
        *,
        channels: int,
        length: int,
        panel_rows: int = ...,
        norm: NormOperands,
        x: int,
        z: int = ...,
        dz: int,
        more: int = ...,
        dx: int = ...,
        dresidual: int = ...,
        dweight: int = ...,
        dbias: int = ...,
        factors: int = ...,
        wide: bool = ...,
    ) -> None: ...

class ResolveDeferred(Step):
    @property
    def channels(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def panel_rows(self) -> int: ...
    @property
    def g(self) -> int: ...
    @property
    def x(self) -> int: ...
    @property
    def factors(self) -> int: ...
    @property
    def dx(self) -> int: ...
    def __init__(
        self,
        *,
        channels: int,
        length: int,
        panel_rows: int = ...,
        g: int,
        x: int,
        factors: int,
        dx: int,
        wide: bool = ...,
    ) -> None: ...

class RowSums(Step):
    @property
    def channels(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def panel_rows(self) -> int: ...
    @property
    def x(self) -> int: ...
    @property
    def sums(self) -> int: ...
    def __init__(
        self,
        *,
        channels: int,
        length: int,
        panel_rows: int = ...,
        x: int,
        sums: int,
        wide: bool = ...,
    ) -> None: ...

class GroupMoments(Step):
    @property
    def images(self) -> Images: ...
    @property
    def groups(self) -> int: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight(self) -> int: ...
    @property
    def x(self) -> int: ...
    @property
    def moments(self) -> int: ...
    @property
    def inverse(self) -> int: ...
    def __init__(
        self,
        *,
        images: Images,
        groups: int,
        eps: float,
        weight: int = ...,
        x: int,
        moments: int,
        inverse: int = ...,
        wide: bool = ...,
    ) -> None: ...

class GroupMomentsBackward(Step):
    @property
    def images(self) -> Images: ...
    @property
    def groups(self) -> int: ...
    @property
    def weight(self) -> int: ...
    @property
    def x(self) -> int: ...
    @property
    def moments(self) -> int: ...
    @property
    def inverse(self) -> int: ...
    @property
    def dmoments(self) -> int: ...
    @property
    def more(self) -> int: ...
    @property
    def dx(self) -> int: ...
    @property
    def dweight(self) -> int: ...
    def __init__(
        self,
        *,
        images: Images,
        groups: int,
        weight: int = ...,
        x: int,
        moments: int,
        inverse: int,
        dmoments: int,
        more: int = ...,
        dx: int = ...,
        dweight: int = ...,
        wide: bool = ...,
    ) -> None: ...

class MaxPool(Step):
    @property
    def pool(self) -> Pool: ...
    @property
    def norm(self) -> NormOperands | None: ...
    @property
    def x(self) -> int: ...
    @property
    def y(self) -> int: ...
    @property
    def which(self) -> int: ...
    def __init__(
        self,
        *,
        pool: Pool,
        norm: NormOperands | None = ...,
        x: int,
        y: int,
        which: int = ...,
        wide: bool = ...,
    ) -> None: ...

class MaxPoolBackward(Step):
    @property
    def pool(self) -> Pool: ...
    @property
    def norm(self) -> NormOperands | None: ...
    @property
    def x(self) -> int: ...
    @property
    def dy(self) -> int: ...
    @property
    def which(self) -> int: ...
    @property
    def dx(self) -> int: ...
    @property
    def dnorm(self) -> NormGradientOperands | None: ...
    def __init__(
        self,
        *,
        pool: Pool,
        norm: NormOperands | None = ...,
        x: int = ...,
        dy: int,
        which: int,
        dx: int,
        dnorm: NormGradientOperands | None = ...,
        wide: bool = ...,
    ) -> None: ...

class AvgPool(Step):
    @property
    def pool(self) -> Pool: ...
    @property
    def x(self) -> int: ...
    @property
    def y(self) -> int: ...
    def __init__(
        self,
        *,
        pool: Pool,
        x: int,
        y: int,
        wide: bool = ...,
    ) -> None: ...

class AvgPoolBackward(Step):
    @property
    def pool(self) -> Pool: ...
    @property
    def dy(self) -> int: ...
    @property
    def dx(self) -> int: ...
    def __init__(
        self,
        *,
        pool: Pool,
        dy: int,
        dx: int,
        wide: bool = ...,
    ) -> None: ...

class GlobalMean(Step):
    @property
    def images(self) -> Images: ...
    @property
    def x(self) -> int: ...
    @property
    def y(self) -> int: ...
    def __init__(
        self,
        *,
        images: Images,
        x: int,
        y: int,
        wide: bool = ...,
    ) -> None: ...

class GlobalMeanBackward(Step):
    @property
    def images(self) -> Images: ...
    @property
    def dy(self) -> int: ...
    @property
    def dx(self) -> int: ...
    def __init__(
        self,
        *,
        images: Images,
        dy: int,
        dx: int,
        wide: bool = ...,
    ) -> None: ...

class Slice(Step):
    @property
    def images(self) -> Images: ...
    @property
    def slicing(self) -> Thinning: ...
    @property
    def value(self) -> float: ...
    @property
    def x(self) -> int: ...
    @property
    def y(self) -> int: ...
    def __init__(
        self,
        *,
        images: Images,
        slicing: Thinning,
        value: float = ...,
        x: int,
        y: int,
        wide: bool = ...,
    ) -> None: ...

class SliceBackward(Step):
    @property
    def images(self) -> Images: ...
    @property
    def slicing(self) -> Thinning: ...
    @property
    def dy(self) -> int: ...
    @property
    def dx(self) -> int: ...
    def __init__(
        self,
        *,
        images: Images,
        slicing: Thinning,
        dy: int,
        dx: int,
        wide: bool = ...,
    ) -> None: ...

class Pad(Step):
    @property
    def images(self) -> Images: ...
    @property
    def padding(self) -> Padding: ...
    @property
    def value(self) -> float: ...
    @property
    def x(self) -> int: ...
    @property
    def y(self) -> int: ...
    def __init__(
        self,
        *,
        images: Images,
        padding: Padding,
        value: float = ...,
        x: int,
        y: int,
        wide: bool = ...,
    ) -> None: ...

class PadBackward(Step):
    @property
    def images(self) -> Images: ...
    @property
    def padding(self) -> Padding: ...
    @property
    def dy(self) -> int: ...
    @property
    def dx(self) -> int: ...
    def __init__(
        self,
        *,
        images: Images,
        padding: Padding,
        dy: int,
        dx: int,
        wide: bool = ...,
    ) -> None: ...

class Resample(Step):
    @property
    def images(self) -> Images: ...
    @property
    def down(self) -> Side: ...
    @property
    def across(self) -> Side: ...
    @property
    def x(self) -> int: ...
    @property
    def y(self) -> int: ...
    def __init__(
        self,
        *,
        images: Images,
        down: Side,
        across: Side,
        x: int,
        y: int,
        wide: bool = ...,
    ) -> None: ...

class Relayout(Step):
    @property
    def images(self) -> Images: ...
    @property
    def source(self) -> Layout: ...
    @property
    def target(self) -> Layout: ...
    @property
    def x(self) -> int: ...
    @property
    def y(self) -> int: ...
    def __init__(
        self,
        *,
        images: Images,
        source: Layout,
        target: Layout,
        x: int,
        y: int,
        wide: bool = ...,
    ) -> None: ...

class Activation(Enum):
    relu = 0
    hardtanh = 1
    leaky_relu = 2
    elu = 3
    silu = 4
    gelu = 5
    gelu_tanh = 6
    sigmoid = 7
    tanh = 8
    hardswish = 9
    hardsigmoid = 10
    softplus = 11

class Operation(Enum):
    affine = 0
    fma = 1
    centered = 2
    add = 3
    sub = 4
    mul = 5
    div = 6
    activate = 7
    gradient = 8

class Instruction:
    fields: ClassVar[tuple[str, ...]]
    @property
    def op(self) -> Operation: ...
    @property
    def out(self) -> int: ...
    @property
    def a(self) -> int: ...
    @property
    def b(self) -> int: ...
    @property
    def c(self) -> int: ...
    @property
    def activation(self) -> Activation: ...
    @property
    def p(self) -> float: ...
    @property
    def q(self) -> float: ...
    def __init__(
        self,
        *,
        op: Operation,
        out: int,
        a: int,
        b: int = ...,
        c: int = ...,
        activation: Activation = ...,
        p: float = ...,
        q: float = ...,
    ) -> None: ...

class Access:
    fields: ClassVar[tuple[str, ...]]
    @property
    def operand(self) -> int: ...
    @property
    def strides(self) -> list[int]: ...
    @property
    def offset(self) -> int: ...
    @property
    def wide(self) -> bool: ...
    def __init__(
        self,
        *,
        operand: int,
        strides: list[int],
        offset: int = ...,
        wide: bool = ...,
    ) -> None: ...

class SlotAccess:
    fields: ClassVar[tuple[str, ...]]
    @property
    def slot(self) -> int: ...
    @property
    def operand(self) -> int: ...
    @property
    def strides(self) -> list[int]: ...
    @property
    def offset(self) -> int: ...
    @property
    def wide(self) -> bool: ...
    def __init__(
        self,
        *,
        slot: int,
        operand: int,
        strides: list[int],
        offset: int = ...,
        wide: bool = ...,
    ) -> None: ...

class NormSums:
    fields: ClassVar[tuple[str, ...]]
    @property
    def index(self) -> int: ...
    @property
    def g(self) -> int: ...
    @property
    def gx(self) -> int: ...
    @property
    def gradients(self) -> NormGradientOperands: ...
    @property
    def x(self) -> int: ...
    @property
    def dx(self) -> int: ...
    def __init__(
        self,
        *,
        index: int,
        g: int,
        gx: int,
        gradients: NormGradientOperands,
        x: int = ...,
        dx: int = ...,
    ) -> None: ...

class Pointwise(Step):
    @property
    def loops(self) -> list[int]: ...
    @property
    def channel(self) -> int: ...
    @property
    def panel_rows(self) -> int: ...
    @property
    def reads(self) -> list[Access]: ...
    @property
    def norms(self) -> list[NormOperands]: ...
    @property
    def program(self) -> list[Instruction]: ...
    @property
    def writes(self) -> list[SlotAccess]: ...
    @property
    def sums(self) -> list[SlotAccess]: ...
    @property
    def norm_sums(self) -> list[NormSums]: ...
    def __init__(
        self,
        *,
        loops: list[int],
        channel: int = ...,
        panel_rows: int = ...,
        reads: list[Access],
        norms: list[NormOperands] = ...,
        program: list[Instruction] = ...,
        writes: list[SlotAccess] = ...,
        sums: list[SlotAccess] = ...,
        norm_sums: list[NormSums] = ...,
        wide: bool = ...,
    ) -> None: ...

class Copy(Step):
    @property
    def length(self) -> int: ...
    @property
    def x(self) -> int: ...
    @property
    def y(self) -> int: ...
    def __init__(
        self,
        *,
        length: int,
        x: int,
        y: int,
        wide: bool = ...,
    ) -> None: ...

class Fill(Step):
    @property
    def length(self) -> int: ...
    @property
    def value(self) -> float: ...
    @property
    def y(self) -> int: ...
    def __init__(
        self,
        *,
        length: int,
        value: float,
        y: int,
        wide: bool = ...,
    ) -> None: ...

class Convert(Step):
    @property
    def length(self) -> int: ...
    @property
    def widen(self) -> bool: ...
    @property
    def x(self) -> int: ...
    @property
    def y(self) -> int: ...
    def __init__(
        self,
        *,
        length: int,
        widen: bool,
        x: int,
        y: int,
        wide: bool = ...,
    ) -> None: ...

class Dropout(Step):
    @property
    def length(self) -> int: ...
    @property
    def probability(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def x(self) -> int: ...
    @property
    def y(self) -> int: ...
    def __init__(
        self,
        *,
        length: int,
        probability: float,
        seed: int,
        x: int,
        y: int,
        wide: bool = ...,
    ) -> None: ...

class Plan:
    @property
    def steps(self) -> list[Step]: ...
    @property
    def operands(self) -> list[Operand]: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def externals(self) -> int: ...
    def __init__(
        self, steps: Sequence[Step], operands: Sequence[Operand], arena_bytes: int = ...
    ) -> None: ...
    def run(
        self,
        first: int,
        last: int,
        addresses: list[int],
        elements: list[int],
        arena: int = ...,
        arena_bytes: int = ...,
        scalars: list[float] = ...,
        seeds: list[int] = ...,
        threads: int = ...,
    ) -> None: ...

class _Kernels:
    """The kernels of one element type; each type has a ``Plan`` of its own."""

    Plan: type[Plan]
    def select(
        self, *, scores: Tensor, count: int, largest: bool, chosen: Tensor, threads: int
    ) -> None: ...
    def follow(
        self, *, x: Tensor, source: Tensor, fresh: float, out: Tensor, threads: int
    ) -> None: ...
    def unit_sums(self, *, x: Tensor, signs: Tensor | None, sums: Tensor, threads: int) -> None: ...
    def signs(
        self,
        *,
        stream: Stream,
        first: int,
        samples: int,
        positions: int,
        out: Tensor,
        threads: int,
    ) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
