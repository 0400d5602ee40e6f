"""Every fusion rule on a graph of a few nodes: where it holds, and each reason why it does not."""

from __future__ import annotations

from engine_graphs import Builder
from rewire.engine import graph as ir
from rewire.engine import rules
from rewire.engine.channels import channels_second
from rewire.engine.lowering import lower
from rewire.engine.rules import ResidualSum, Uses

PANEL = 64


def uses(b: Builder, *outputs: int) -> Uses:
    return Uses(b.graph(*(outputs or (len(b.nodes) - 1,))))


def steps(b: Builder, *outputs: int) -> tuple[list[str], list[str]]:
    """Names of the steps, forward and backward, with what is fused into them."""
    plan = lower(b.graph(*(outputs or (len(b.nodes) - 1,))), PANEL)
    forward, backward = (
        [" + ".join((step.name, *step.fused)) for step in some if step.name != "Relayout"]
        for some in (plan.forward, plan.backward)
    )
    return forward, backward


def test_a_relu_that_alone_reads_a_product_is_done_by_it() -> None:
    b = Builder()
    y = b.conv(b.input(2, 3, 4, 4), 5)
    z = b.relu(y)
    assert rules.relu_after(uses(b), y) == z
    assert rules.tail(uses(b), y) == z
    assert steps(b) == (["ConvForward + ReLU"], ["ConvBackward + ReLU mask"])
    assert rules.relu_after(uses(b, y, z), y) is None  # somebody holds what it reads
    b.add(y, z)
    assert rules.relu_after(uses(b), y) is None  # somebody else reads it


def test_a_linear_layer_between_contiguous_tensors_works_on_rows() -> None:
    b = Builder()
    y = b.linear(b.input(8, 3), 5)
    assert rules.rows_product(uses(b), y)
    plan = lower(b.graph(y), PANEL)
    assert [step.name for step in plan.forward] == ["LinearRows"]  # and no Relayout
    assert [step.name for step in plan.backward] == ["LinearRowsBackward"]
    z = b.relu(y)
    assert not rules.rows_product(uses(b), y)  # it is not an output
    assert not rules.rows_product(uses(b, y, z), y)  # something else reads it, too
    w = b.linear(z, 2)
    assert not rules.rows_product(uses(b), w)  # its input is in the kernels' layout


def test_one_sample_is_not_moved() -> None:
    """Its contiguous memory is batch-last as well, and without gradients the output is written in place."""
    b = Builder()
    b.relu(b.conv(b.input(1, 3, 4, 4, grad=False), 5, bias=False, frozen=True))
    plan = lower(b.graph(1), PANEL)
    assert [step.name for step in plan.forward] == ["ConvForward"]
    assert plan.arena == 0


def test_a_product_measures_moments_for_a_batch_norm_in_training() -> None:
    b = Builder()
    y = b.conv(b.input(2, 3, 4, 4), 5)
    b.norm(y)
    assert rules.moments_in_product(uses(b), y)
    assert steps(b)[0] == ["ConvForward + moments", "Track", "NormForward"]

    b = Builder()
    y = b.conv(b.input(2, 3, 4, 4), 5)
    b.norm(y, training=False)
    assert not rules.moments_in_product(uses(b), y)
    assert steps(b)[0] == ["ConvForward", "NormForward"]

    b = Builder()
    y = b.conv(b.input(2, 3, 4, 4), 5)
    b.norm(b.relu(y))
    assert not rules.moments_in_product(uses(b), y)  # the batch norm reads something else
    assert steps(b)[0] == ["ConvForward + ReLU", "Moments", "Track", "NormForward"]


def test_a_batch_norm_is_done_by_the_convolution_that_alone_reads_it() -> None:
    b = Builder()
    n = b.norm(b.conv(b.input(2, 3, 4, 4), 5))
    r = b.relu(n)
    y = b.conv(r, 2)
    assert rules.norm_in_reader(uses(b), n)
    forward, backward = steps(b)
    assert forward == ["ConvForward + moments", "Track", "ConvForward + batch norm + ReLU"]
    assert backward == [
        "ConvBackward + gradient of the batch norm before",
        "ConvBackward + batch norm gradient",
    ]
    assert not rules.norm_in_reader(uses(b, r, y), n)  # somebody holds its output
    b.add(b.conv(r, 2), y)
    assert not rules.norm_in_reader(uses(b), n)  # two convolutions read it


def test_a_batch_norm_is_done_by_the_pooling_that_alone_reads_it() -> None:
    b = Builder()
    n = b.norm(b.conv(b.input(2, 3, 4, 4), 5))
    b.max_pool(b.relu(n))
    assert rules.norm_in_reader(uses(b), n)
    forward, backward = steps(b)
    assert forward == ["ConvForward + moments", "Track", "MaxPool + batch norm + ReLU"]
    assert backward == [
        "MaxPoolBackward + gradient of the batch norm before",
        "ConvBackward + batch norm gradient",
    ]


def test_a_batch_norm_before_frozen_weights_has_an_output() -> None:
    b = Builder()
    n = b.norm(b.conv(b.input(2, 3, 4, 4), 5))
    b.conv(n, 2, frozen=True, bias=False)
    assert not rules.norm_in_reader(uses(b), n)
    assert steps(b)[1][0] == "InputGradient"


def test_the_gradient_of_a_batch_norm_is_completed_by_the_product_before() -> None:
    b = Builder()
    y = b.conv(b.input(2, 3, 4, 4), 5)
    n = b.norm(y)
    assert rules.defer_norm_gradient(uses(b), n)
    assert steps(b)[1] == ["NormBackward", "ConvBackward + batch norm gradient"]
    assert not rules.defer_norm_gradient(uses(b, y, n), n)  # its input has another gradient
    b.add(n, y)
    assert not rules.defer_norm_gradient(uses(b), n)

    b = Builder()
    n = b.norm(b.conv(b.input(2, 3, 4, 4), 5, frozen=True))
    assert not rules.defer_norm_gradient(uses(b), n)
    n = b.norm(b.input(2, 3, 4, 4))
    assert not rules.defer_norm_gradient(uses(b), n)  # no product has made its input


def test_a_residual_sum_is_done_with_its_batch_norm() -> None:
    b = Builder()
    x = b.input(2, 3, 4, 4)
    n = b.norm(b.conv(x, 3))
    total = b.add(x, n)
    z = b.relu(total)
    assert rules.residual_sum(uses(b), total) == ResidualSum(n, x, z)
    assert steps(b)[0] == ["ConvForward + moments", "Track", "NormForward + residual + ReLU"]
    assert rules.residual_sum(uses(b, n, z), total) is None

    b = Builder()
    n = b.norm(b.conv(b.input(2, 3, 4, 4), 3))
    total = b.add(n, n)
    assert rules.residual_sum(uses(b), total) is None
    assert steps(b)[0][-1] == "Pointwise + add"


def test_the_gradient_of_a_residual_sum_is_computed_by_the_convolution_that_reads_it_first() -> (
    None
):
    b = Builder()
    x = b.input(2, 3, 4, 4)
    n = b.norm(b.conv(x, 3))
    z = b.relu(b.add(n, x))
    y = b.conv(z, 3)
    b.add(b.norm(y), z)
    total = ResidualSum(n, x, z)
    assert rules.residual_gradient_in_reader(uses(b), total) == y
    assert "ConvBackward + batch norm gradient + gradient of the residual sum before" in steps(b)[1]
    assert rules.residual_gradient_in_reader(uses(b, z, len(b.nodes) - 1), total) is None

    b = Builder()
    n = b.norm(b.conv(b.input(2, 3, 4, 4), 3))
    z = b.relu(b.add(n, x := b.input(2, 3, 4, 4)))
    b.add(z, b.max_pool(z, 1))
    b.conv(z, 3)  # not the first
    assert rules.residual_gradient_in_reader(uses(b), ResidualSum(n, x, z)) is None

    b = Builder()
    n = b.norm(b.conv(b.input(2, 3, 4, 4), 3))
    total_ = b.add(n, x := b.input(2, 3, 4, 4))
    b.conv(total_, 3)  # no ReLU in between
    assert rules.residual_gradient_in_reader(uses(b), ResidualSum(n, x, total_)) is None


def test_the_mask_of_a_relu_is_applied_by_the_product_that_alone_reads_it() -> None:
    b = Builder()
    first = b.linear(b.input(2, 3), 5)
    second = b.linear(b.relu(first), 4)
    assert rules.relu_gradient_in_reader(uses(b), first) == second
    assert steps(b)[1] == [
        "ConvBackward + ReLU mask and bias gradient of the product before",
        "ConvBackward",
    ]

    b = Builder()
    first = b.linear(b.input(2, 3), 5)
    b.linear(b.relu(first), 4, frozen=True)
    assert rules.relu_gradient_in_reader(uses(b), first) is None
    assert steps(b)[1] == ["RowSums", "InputGradient", "ConvBackward + ReLU mask"]


def test_a_slice_and_the_channels_around_it_are_one_copy() -> None:
    b = Builder()
    s = b.slice(b.input(2, 3, 4, 4))
    p = b.pad(s, 1, 2)
    assert rules.pad_after_slice(uses(b), s) == p
    assert steps(b) == (["Slice + pad"], ["SliceBackward + pad"])

    b = Builder()
    s = b.slice(b.input(2, 3, 4, 4))
    b.pad(s, 1, 2, 0, 1, 0, 0)  # rows, too
    assert rules.pad_after_slice(uses(b), s) is None
    assert steps(b) == (["Slice", "Pad"], ["PadBackward", "SliceBackward"])


def test_a_watched_layer_is_not_fused_with_what_is_before_it() -> None:
    b = Builder()
    n = b.norm(b.conv(b.input(2, 3, 4, 4), 5))
    watched = b.conv(n, 2, probe=True)
    b.norm(watched)
    assert not rules.norm_in_reader(uses(b), n)
    assert not rules.defer_norm_gradient(uses(b), len(b.nodes) - 1)
    plan = lower(b.graph(len(b.nodes) - 1), PANEL)
    (seen,) = plan.probes.values()
    assert [(node, x.shape, dy.shape) for node, x, dy in seen] == [
        (watched, (2, 5, 4, 4), (2, 2, 4, 4))
    ]


def test_a_group_norm_is_moments_and_one_pass_with_what_follows() -> None:
    b = Builder()
    x = b.conv(b.input(128, 3, 4, 4), 6)
    y = b.activation(b.group_norm(x, 2), "silu")
    forward, backward = steps(b, y)
    assert forward == ["ConvForward", "GroupMoments", "Pointwise + sub + mul + add + silu"]
    large = [step for step in backward if step.startswith(("Conv", "Group", "Pointwise + "))]
    assert large == ["Pointwise + sub + mul + add + silu", "GroupMomentsBackward", "ConvBackward"]
    plan = lower(b.graph(y), PANEL)
    (step,) = (step for step in plan.backward if step.name == "GroupMomentsBackward")
    assert step.arguments["more"] is not None  # the gradient past the moments, which it adds


def test_a_channel_shuffle_is_one_copy() -> None:
    b = Builder()
    x = b.conv(b.input(128, 3, 4, 4), 6)
    split = b.view(x, 128, 2, 3, 4, 4)
    turned = b.node("permute", ir.Permute((0, 2, 1, 3, 4)), (split,), (128, 3, 2, 4, 4))
    y = b.conv(b.view(b.clone(turned), 128, 6, 4, 4), 5)
    forward, backward = steps(b, y)
    assert forward == ["ConvForward", "Pointwise", "ConvForward"]
    assert backward == ["ConvBackward", "Pointwise", "ConvBackward"]


def test_one_number_for_each_sample_is_repeated_for_rows() -> None:
    b = Builder()
    x = b.node("permute", ir.Permute((0, 2, 1)), (b.view(b.input(4, 6, 3, 3), 4, 6, 9),), (4, 9, 6))
    y = b.node("layer_norm", ir.LayerNorm(1e-5, True), (x, None, None), (4, 9, 6))
    z = b.binary("mul", y, b.input(4, 1, 1, grad=False))
    nodes = channels_second(b.graph(z)).graph.nodes
    assert [node.shape for node in nodes if node.op in ("resample", "mul")] == [
        (4, 1, 9, 1),
        (36, 6),
    ]


def test_a_scale_of_channels_that_are_last_turns_nothing() -> None:
    b = Builder()
    image = b.conv(b.input(3, 3, 8, 8), 6)
    x = b.node("permute", ir.Permute((0, 2, 3, 1)), (image,), (3, 8, 8, 6))
    y = b.node("layer_norm", ir.LayerNorm(1e-5, True), (x, None, None), (3, 8, 8, 6))
    scaled = b.binary("mul", y, b.input(6))
    z = b.node("permute", ir.Permute((0, 3, 1, 2)), (scaled,), (3, 6, 8, 8))
    nodes = channels_second(b.graph(z)).graph.nodes
    assert "turn" not in [node.op for node in nodes]
