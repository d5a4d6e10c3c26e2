"""The native linear layers, on every instruction set that this processor runs, against numpy."""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from engine.kernels.cpu.abi import Epilogue, WeightType
from engine.kernels.cpu.library import kernel_tables
from engine.models.dequantize import dequantize
from tests.native_linear import GROUPS, NativeLinear, rotate

Floats = npt.NDArray[np.float32]

GGUF: Final = (WeightType.Q8_0, WeightType.Q4_0, WeightType.Q4_1)
_BLOCK_BYTES: Final = {WeightType.Q8_0: 34, WeightType.Q4_0: 18, WeightType.Q4_1: 20}

# [out, in]: whole and ragged panels, inputs that are and are not whole groups, odd inputs.
SHAPES: Final = ((16, 64), (40, 96), (33, 100), (1, 7), (130, 576), (64, 1536), (16, 2240))

tables = pytest.mark.parametrize(
    "table", kernel_tables(), ids=[table.name.decode() for table in kernel_tables()]
)
weight_types = pytest.mark.parametrize("weight_type", WeightType, ids=lambda it: it.name)


def make_rows(
    weight_type: WeightType, shape: tuple[int, int], seed: int = 0
) -> tuple[npt.NDArray[Any], Floats]:
    """Return what is packed, and its exact values as float32 [out, in]."""
    random = np.random.default_rng(seed)
    if weight_type not in GGUF:
        values = random.standard_normal(shape).astype(np.float32)
        values[0, : shape[1] // 2] *= 1e-3
        values[-1] *= 0
        return values, values
    num_out, num_in = shape
    blocks = random.integers(0, 256, (num_out, num_in // 32, _BLOCK_BYTES[weight_type]), np.uint8)
    halves = 2 if weight_type is WeightType.Q4_1 else 1
    scales = random.standard_normal((num_out, num_in // 32, halves)).astype(np.float16)
    scales[0] = np.float16(6e-8)  # the smallest subnormal
    blocks[:, :, : 2 * halves] = scales.view(np.uint8)
    return blocks.reshape(num_out, -1), dequantize(blocks.reshape(-1), weight_type.name, shape)


def make_layer(
    table: Any, weight_type: WeightType, shape: tuple[int, int], **options: Any
) -> NativeLinear:
    """Return a layer of random weights; GGUF types take whole blocks of 32 only."""
    shape = whole_blocks(weight_type, shape)
    return NativeLinear(table, weight_type, make_rows(weight_type, shape)[0], shape[1], **options)


def whole_blocks(weight_type: WeightType, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the shape with inputs that the type can have."""
    return (shape[0], -(-shape[1] // 32) * 32) if weight_type in GGUF else shape


def activations(num_rows: int, num_in: int, seed: int = 1) -> Floats:
    """Return rows of different sizes, one of them zero, with outliers in a few."""
    x = np.random.default_rng(seed).standard_normal((num_rows, num_in)).astype(np.float32)
    x *= np.float32(10.0) ** np.linspace(-3, 3, num_rows, dtype=np.float32)[:, None]
    x[::2, num_in // 2] *= 40
    x[::3, num_in - 1] *= 30
    x[num_rows // 2 :: 50] = 0
    return x


def weights_of(layer: NativeLinear) -> npt.NDArray[np.float64]:
    """Return the weights that are multiplied, float64 [out, in]: int8's are rotated."""
    if layer.type is WeightType.INT8:
        return layer.multiplied_weights()
    return np.stack([layer.unpack(row) for row in range(layer.out_features)]).astype(np.float64)


def activation_terms(
    layer: NativeLinear, x: Floats
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return what the layer multiplies for x, rounded parts and middles; int8's x is rotated."""
    group = GROUPS[layer.type]
    if group < 32:
        return x.astype(np.float64), np.zeros(x.shape)
    padded = -(-layer.in_features // group) * group
    rows = layer.prepare(x)
    quants = rows.quants[: len(x) * padded].reshape(len(x), -1, group)
    scales = rows.scales[: len(x) * padded // group].reshape(len(x), -1, 1)
    rounded = (quants * scales.astype(np.float64)).reshape(len(x), padded)
    if not layer.centred:
        return rounded, np.zeros(rounded.shape)
    middles = rows.middles[: len(x) * padded // group].astype(np.float64)
    return rounded, middles.repeat(group).reshape(len(x), padded)


def seen_activations(layer: NativeLinear, x: Floats) -> npt.NDArray[np.float64]:
    """Return x as the layer multiplies it."""
    return np.add(*activation_terms(layer, x))


def products(layer: NativeLinear, x: Floats) -> tuple[npt.NDArray[np.float64], ...]:
    """Return what the layer should compute, and the sums of its terms' magnitudes."""
    weights, (rounded, middles) = weights_of(layer), activation_terms(layer, x)
    magnitude = (np.abs(rounded) + np.abs(middles)) @ np.abs(weights.T)
    return (rounded + middles) @ weights.T, magnitude


def close(got: Floats, want: npt.NDArray[np.float64], magnitude: npt.NDArray[np.float64]) -> None:
    """Judge float32 sums by the sum of their terms' magnitudes."""
    assert np.all(np.abs(got - want) <= 1e-6 * magnitude + 1e-30)


@tables
@weight_types
@pytest.mark.parametrize("shape", SHAPES)
def test_a_packed_row_unpacks_to_what_the_type_can_hold(
    table: Any, weight_type: WeightType, shape: tuple[int, int]
) -> None:
    shape = whole_blocks(weight_type, shape)
    rows, values = make_rows(weight_type, shape)
    layer = NativeLinear(table, weight_type, rows, shape[1])
    got = np.stack([layer.unpack(row) for row in range(shape[0])])
    if weight_type is WeightType.BF16:
        assert np.all(np.abs(got - values) <= np.abs(values) * 2.0**-8)
        assert np.all(got.view(np.uint32) & 0xFFFF == 0)
    elif weight_type is WeightType.INT8:
        rotated = rotate(values / 16).reshape(shape[0], -1, 64)
        multiplied = layer.multiplied_weights().reshape(rotated.shape)
        step = np.abs(rotated).max(axis=2, keepdims=True) / 127
        assert np.all(np.abs(multiplied - rotated) <= step * 0.501)
        back = rotate(layer.multiplied_weights())[:, : shape[1]]
        assert np.allclose(got, back, rtol=0, atol=1e-5)
    else:
        assert np.array_equal(got, values)


@tables
@weight_types
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_products_are_those_of_the_packed_weights_and_the_seen_activations(
    table: Any, weight_type: WeightType, shape: tuple[int, int], num_rows: int
) -> None:
    layer = make_layer(table, weight_type, shape)
    x = activations(num_rows, layer.in_features)
    got = layer.multiply(x)
    close(got[:, : shape[0]], *products(layer, x))
    assert np.all(got[:, shape[0] :] == 0)


@tables
@pytest.mark.parametrize("weight_type", [*GGUF, WeightType.INT8], ids=lambda it: it.name)
@pytest.mark.parametrize("centred", [True, False])
def test_activations_are_rounded_to_the_nearest_of_254_steps_a_group(
    table: Any, weight_type: WeightType, centred: bool
) -> None:
    layer = make_layer(table, weight_type, (16, 576), centred=centred)
    group = GROUPS[weight_type]
    x = activations(9, 576)
    wanted = rotate(x) if weight_type is WeightType.INT8 else x
    error = np.abs(seen_activations(layer, x) - wanted).reshape(9, -1, group)
    largest = np.abs(wanted).reshape(9, -1, group).max(axis=2, keepdims=True)
    assert np.all(error <= largest / 127 * 0.501)
    assert error.max() > 0


@tables
@pytest.mark.parametrize("weight_type", GGUF, ids=lambda it: it.name)
def test_a_group_with_an_outlier_is_rounded_in_half_the_step(
    table: Any, weight_type: WeightType
) -> None:
    layer = make_layer(table, weight_type, (16, 2240))  # 70 groups: two words of bits
    x = np.random.default_rng(5).uniform(-1, 1, (3, 2240)).astype(np.float32)
    x[0, 5], x[1, 2239], x[2, 40] = 100, -100, 0
    parts = x.reshape(3, 70, 32)
    middles = layer.prepare(x).middles[:210].reshape(3, 70)
    assert [list(np.flatnonzero(row)) for row in middles] == [[0], [69], []]
    error = np.abs(seen_activations(layer, x).reshape(parts.shape) - parts)
    for row, group in ((0, 0), (1, 69)):
        span = float(np.ptp(parts[row, group]))
        assert np.all(error[row, group] <= span / 2 / 127 * 0.501)


@tables
@pytest.mark.parametrize("weight_type", GGUF, ids=lambda it: it.name)
def test_few_groups_of_a_row_have_a_middle_whatever_is_in_it(
    table: Any, weight_type: WeightType
) -> None:
    layer = make_layer(table, weight_type, (16, 2240))
    for scale in (0, 1, 1e10):
        x = np.full((1, 2240), scale, np.float32)  # each group would gain from it
        assert np.count_nonzero(layer.prepare(x).middles[:70]) == 0
    for outliers, centred in ((3, 3), (12, 0)):
        x = np.zeros((1, 2240), np.float32)
        x[0, : outliers * 32 : 32] = 7
        assert np.count_nonzero(layer.prepare(x).middles[:70]) == centred


@tables
@weight_types
def test_a_row_is_bitwise_the_same_alone_and_among_others(
    table: Any, weight_type: WeightType
) -> None:
    layer = make_layer(table, weight_type, (7 * 16, 192))
    x = activations(40, 192)
    alone = np.concatenate([layer.multiply(x[row : row + 1]) for row in range(len(x))])
    for num_rows in range(2, len(x) + 1):
        assert np.array_equal(layer.multiply(x[:num_rows]), alone[:num_rows])


@tables
@weight_types
def test_a_panel_is_bitwise_the_same_whatever_range_it_is_computed_in(
    table: Any, weight_type: WeightType
) -> None:
    layer = make_layer(table, weight_type, (11 * 16, 192))
    for num_rows in (1, 2, 5, 9, 33):
        x = activations(num_rows, 192)
        whole = layer.multiply(x)
        for cuts in ((1, 2, 3), (3, 9), (4,), (5, 10)):
            edges = [0, *cuts, layer.panels]
            for first, last in itertools.pairwise(edges):
                columns = slice(first * 16, last * 16)
                part = layer.multiply(x, panels=(first, last))
                assert np.array_equal(part[:, columns], whole[:, columns])
                assert np.isnan(part[:, last * 16 :]).all()  # nothing else is written
                assert np.isnan(part[:, : first * 16]).all()


@tables
@weight_types
@pytest.mark.parametrize("num_rows", [1, 8, 13])
def test_a_bias_is_added_and_a_residual_is_added_to(
    table: Any, weight_type: WeightType, num_rows: int
) -> None:
    bias = np.linspace(-1, 1, 40, dtype=np.float32)
    layer = make_layer(table, weight_type, (40, 96), bias=bias)
    plain = make_layer(table, weight_type, (40, 96))
    x = activations(num_rows, 96)
    biased = plain.multiply(x)[:, :40] + bias
    assert np.array_equal(layer.multiply(x)[:, :40], biased)
    residual = activations(num_rows, 48, seed=3)
    added = layer.multiply(x, Epilogue.ADD, residual)
    assert np.array_equal(added[:, :40], residual[:, :40] + biased)


@tables
@weight_types
@pytest.mark.parametrize("half", [16, 24, 96])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_gated_halves_are_interleaved_and_multiplied(
    table: Any, weight_type: WeightType, half: int, num_rows: int
) -> None:
    layer = make_layer(table, weight_type, (2 * half, 96), interleave=True)
    plain = make_layer(table, weight_type, (2 * half, 96))
    x = activations(num_rows, 96)
    both = plain.multiply(x)[:, : 2 * half].astype(np.float64)
    gate, up = both[:, :half], both[:, half:]
    got = layer.multiply(x, Epilogue.GATED_SILU)[:, :half]
    want = gate / (1 + np.exp(-np.clip(gate, -80, None))) * up
    assert np.allclose(got, want, rtol=2e-5, atol=1e-15)


@tables
@weight_types
@pytest.mark.parametrize("centred", [True, False])
def test_many_rows_of_a_wide_layer(table: Any, weight_type: WeightType, centred: bool) -> None:
    layer = make_layer(table, weight_type, (96, 576), centred=centred)
    x = activations(512, 576)
    close(layer.multiply(x)[:, :96], *products(layer, x))
