"""core.kv_layout: every element has its own place, and a difference is named."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest

from core.kv_layout import (
    KvDtype,
    KvLayout,
    Tile,
    TileOrder,
    block_major,
    blocks_of,
    summary_difference,
)


def layout(**changed: object) -> KvLayout:
    arguments = {
        "model": "m",
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_dim": 4,
        "block_size": 8,
        "dtype": KvDtype.BF16,
        **changed,
    }
    return block_major(**arguments)  # pyright: ignore[reportArgumentType] - test table


def test_strides_cover_a_block_exactly_once() -> None:
    made = layout()
    starts = [
        layer.offset + head * layer.head_stride + kv * layer.kv_stride + token * layer.token_stride
        for layer, head, kv, token in product(made.layers, range(2), range(2), range(8))
    ]
    vector_bytes = 4 * 2
    assert sorted(starts) == list(range(0, made.block_bytes, vector_bytes))
    assert starts == sorted(starts)  # [layer][kv_head][k|v][token][head_dim]


def test_smollm2_has_the_measured_size() -> None:
    made = layout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16)
    assert made.block_bytes == 360 << 10
    assert made.block_bytes // made.block_size == 23_040


def test_f32_takes_twice_the_bytes() -> None:
    assert layout(dtype=KvDtype.F32).block_bytes == 2 * layout().block_bytes


def native(dtype: KvDtype, order: TileOrder) -> KvLayout:
    return blocks_of(Tile(8, 4, dtype, order), model="m", num_layers=3, num_kv_heads=2)


def test_a_tile_order_changes_no_size_without_scales() -> None:
    pairs = native(KvDtype.BF16, "pairs")
    assert pairs.block_bytes == layout().block_bytes
    assert {layer.tile_order for layer in pairs.layers} == {"pairs"}
    assert {layer.scale_offset for layer in pairs.layers} == {-1}


@pytest.mark.parametrize(
    ("block_size", "head_dim", "scale_offset", "num_bytes"),
    [
        (16, 64, 1024, 1088),  # SmolLM2
        (8, 4, 64, 128),  # 32 bytes, padded to 64; 32 of scales, padded to 64
        (24, 18, 512, 640),  # 24 x 20 is 480; 96 of scales
        (8, 18, 192, 256),
    ],
)
def test_int8_tiles_carry_their_scales(
    block_size: int, head_dim: int, scale_offset: int, num_bytes: int
) -> None:
    tile = Tile(block_size, head_dim, KvDtype.INT8, "quads")
    assert (tile.scale_offset, tile.num_bytes) == (scale_offset, num_bytes)
    made = blocks_of(tile, model="m", num_layers=30, num_kv_heads=3)
    assert made.block_bytes == 30 * 3 * 2 * num_bytes
    assert made.layers[1].offset == 3 * 2 * num_bytes
    assert made.layers[1].kv_stride == num_bytes
    assert made.layers[1].scale_offset == scale_offset


@pytest.mark.parametrize(
    ("tile", "named"),
    [
        ((16, 64, KvDtype.INT8, "pairs"), "int8 in tile order 'pairs'"),
        ((16, 64, KvDtype.INT8, "token_major"), "int8 in tile order 'token_major'"),
        ((16, 64, KvDtype.BF16, "quads"), "bf16 in tile order 'quads'"),
        ((12, 64, KvDtype.BF16, "pairs"), "block_size 12"),
        ((16, 63, KvDtype.INT8, "quads"), "head_dim 63"),
    ],
)
def test_a_tile_that_no_executor_reads_is_refused(
    tile: tuple[int, int, KvDtype, TileOrder], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        Tile(*tile)


def test_blocks_for_rounds_up() -> None:
    assert [layout().blocks_for(n) for n in (0, 1, 8, 9, 16)] == [0, 1, 1, 2, 2]


def test_fingerprint_is_equal_iff_blocks_can_be_exchanged() -> None:
    others = [
        layout(model="n"),
        layout(num_layers=4),
        layout(num_kv_heads=4),
        layout(head_dim=8),
        layout(block_size=16),
        layout(dtype=KvDtype.F32),
        native(KvDtype.BF16, "pairs"),
        native(KvDtype.INT8, "quads"),
        msgspec.structs.replace(layout(), version=2),
    ]
    fingerprints = {made.fingerprint() for made in [layout(), *others]}
    assert len(fingerprints) == 10
    assert layout().fingerprint() == layout().fingerprint()
    assert len({made.summary() for made in [layout(), *others]}) == len(fingerprints)
    assert len(layout().fingerprint()) == 32


def test_difference_names_the_field_and_both_values() -> None:
    assert layout().difference(layout()) is None
    assert layout().difference(layout(block_size=16)) == "block_size: 8 here, 16 there"
    other = native(KvDtype.INT8, "quads")
    assert layout().difference(other) == "dtype: bf16 here, int8 there"
    other = native(KvDtype.BF16, "pairs")
    assert layout().difference(other) == "tile_order: token_major here, pairs there"


def test_summaries_name_the_first_difference() -> None:
    here = layout().summary()
    assert summary_difference(here, layout().summary()) is None
    dtype = layout(dtype=KvDtype.F32).summary()
    assert summary_difference(here, dtype) == ("layout.dtype", "bf16", "f32")
    pairs = native(KvDtype.BF16, "pairs").summary()
    assert summary_difference(here, pairs) == ("layout.tile_order", "token_major", "pairs")
    int8 = native(KvDtype.INT8, "quads").summary()
    assert summary_difference(here, int8) == ("layout.dtype", "bf16", "int8")
    older = here.replace("version=1 ", "")
    assert summary_difference(here, older) == ("layout", here, older)
    moved = msgspec.structs.replace(layout(), layers=layout().layers[::-1]).summary()
    differing = summary_difference(here, moved)
    assert differing is not None
    assert differing[0] == "layout.fingerprint", "only the table differs"


def test_layout_survives_the_wire() -> None:
    made = layout()
    assert msgspec.json.decode(msgspec.json.encode(made), type=KvLayout) == made
