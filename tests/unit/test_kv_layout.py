"""core.kv_layout: every element has its own place, and a difference is named."""

from __future__ import annotations

from itertools import product

import msgspec

from core.kv_layout import KvDtype, KvLayout, block_major, summary_difference


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
        msgspec.structs.replace(layout(), version=2),
    ]
    fingerprints = {made.fingerprint() for made in [layout(), *others]}
    assert len(fingerprints) == 8
    assert layout().fingerprint() == layout().fingerprint()
    assert len({made.summary() for made in [layout(), *others]}) == len(fingerprints)
    assert len(layout().fingerprint()) == 32


def test_difference_names_the_field_and_both_values() -> None:
    assert layout().difference(layout()) is None
    assert layout().difference(layout(block_size=16)) == "block_size: 8 here, 16 there"


def test_summaries_name_the_first_difference() -> None:
    here = layout().summary()
    assert summary_difference(here, layout().summary()) is None
    dtype = layout(dtype=KvDtype.F32).summary()
    assert summary_difference(here, dtype) == ("layout.dtype", "bf16", "f32")
    older = here.replace("version=1 ", "")
    assert summary_difference(here, older) == ("layout", here, older)
    moved = msgspec.structs.replace(layout(), layers=layout().layers[::-1]).summary()
    differing = summary_difference(here, moved)
    assert differing is not None
    assert differing[0] == "layout.fingerprint", "only the table differs"


def test_layout_survives_the_wire() -> None:
    made = layout()
    assert msgspec.json.decode(msgspec.json.encode(made), type=KvLayout) == made
