"""The choice of arithmetic, the layouts that kernels can address, and decode groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from core.errors import ConfigError
from core.ids import BlockId, SlotId
from core.kv_layout import KvDtype, KvLayout, LayerLayout, block_major
from engine.executor.interface import SlotWork
from engine.executor.step_rows import arrange
from engine.kernels.cpu_features import cpu_flags, instruction_set, torch_weights
from engine.kernels.paged_kv import PagedKv
from kv_transfer.region import HostRegion

CPU = torch.device("cpu")


def test_bf16_only_where_the_processor_multiplies_it() -> None:
    assert torch_weights("auto", "cpu", frozenset({"avx512f"})) == "f32"
    assert torch_weights("auto", "cpu", frozenset({"avx512f", "avx512_bf16"})) == "bf16"
    assert torch_weights("auto", "cpu", frozenset({"amx_bf16"})) == "bf16"
    assert torch_weights("auto", "cuda:0", frozenset()) == "bf16"
    assert torch_weights("f32", "cpu", frozenset({"avx512_bf16"})) == "f32"
    assert torch_weights("bf16", "cpu", frozenset()) == "bf16"
    for choice in ("int8", "native"):
        with pytest.raises(ConfigError, match=rf"engine\.weights = '{choice}': needs the native"):
            torch_weights(choice, "cpu", frozenset())


def test_flags_as_linux_lists_them(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16\n\nflags\t: other\n")
    assert cpu_flags(cpuinfo) == {"fpu", "avx2", "avx512_bf16"}
    assert cpu_flags(tmp_path / "missing") == frozenset()
    cpuinfo.write_text("processor : 0\n")
    assert cpu_flags(cpuinfo) == frozenset()
    assert instruction_set(frozenset({"avx2", "avx512_bf16"})) == "avx2+avx512_bf16"
    assert instruction_set(frozenset()) == "generic"


def layout(**changes: Any) -> KvLayout:
    plain = block_major(
        model="m", num_layers=2, num_kv_heads=2, head_dim=4, block_size=8, dtype=KvDtype.F32
    )
    return replace(plain, **changes)


def head_outermost() -> KvLayout:
    """``[block][kv_head][layer][k|v]``: another order of the same tiles."""
    tile = 8 * 4 * 4
    layers = tuple(
        LayerLayout(layer * 2 * tile, 4 * tile, tile, 16, KvDtype.F32) for layer in range(2)
    )
    return layout(layers=layers)


@pytest.mark.parametrize("order", [layout(), head_outermost()], ids=["layers", "heads"])
def test_values_land_where_the_layout_says(order: KvLayout) -> None:
    region = HostRegion(4 * order.block_bytes)
    pool = PagedKv(order, region, 4)
    values = torch.arange(3 * 2 * 2 * 4).float().view(3, 2, 2, 4)
    blocks, offsets = torch.tensor([2, 2, 1]), torch.tensor([6, 7, 0])
    pool.write(1, pool.rows_at(blocks, offsets), values)
    bytes_of = torch.frombuffer(region.view(), dtype=torch.uint8)
    place = order.layers[1]
    for token, (block, offset) in enumerate([(2, 6), (2, 7), (1, 0)]):
        for head in (0, 1):
            for kv in (0, 1):
                start = block * order.block_bytes + place.offset + head * place.head_stride
                start += kv * place.kv_stride + offset * place.token_stride
                stored = bytes_of[start : start + 16].clone().view(torch.float32)
                assert torch.equal(stored, values[token, head, kv])
    gathered = pool.gather(1, pool.tiles_at(torch.tensor([2, 1]))).view(2, 2, 2, 8, 4)
    assert torch.equal(gathered[:, :, 0, 6:].transpose(0, 2).transpose(1, 2), values[:2])
    assert torch.equal(gathered[:, :, 1, 0], values[2])
    assert not pool.gather(0, pool.tiles_at(torch.tensor([2, 1]))).any()
    del bytes_of, pool
    region.close()


def test_copies_and_zeroes_reach_all_layers() -> None:
    order = layout()
    region = HostRegion(3 * order.block_bytes)
    pool = PagedKv(order, region, 3)
    memory = torch.frombuffer(region.view(), dtype=torch.float32).view(3, -1)
    memory[0] = torch.arange(memory.shape[1])
    pool.copy(BlockId(0), BlockId(2))
    assert torch.equal(memory[2], memory[0])
    pool.zero_tail(BlockId(2), 5)
    by_token = memory.view(3, -1, 8, 4)
    assert torch.equal(by_token[2, :, :5], by_token[0, :, :5])
    assert not by_token[2, :, 5:].any()
    pool.zero([BlockId(0), BlockId(2)])
    assert not memory.any()
    del memory, by_token, pool
    region.close()


def test_layouts_that_are_no_array_of_tiles_are_refused() -> None:
    region = HostRegion(1 << 20)
    first, second = layout().layers
    for layers, named in [
        ((replace(first, token_stride=32), second), "contiguous"),
        ((first, replace(second, offset=second.offset + 4)), "multiples"),
        ((first, replace(second, head_stride=512)), "only their offsets may"),
        ((replace(first, tile_order="x"), replace(second, tile_order="x")), "tile order"),
    ]:
        with pytest.raises(ValueError, match=named):
            PagedKv(layout(layers=layers), region, 1)
    with pytest.raises(ValueError, match="do not fit"):
        PagedKv(layout(), region, 10_000)
    region.close()


def test_decode_rows_come_first_grouped_by_context() -> None:
    lengths = {SlotId(0): 4, SlotId(1): 900, SlotId(2): 400, SlotId(3): 32, SlotId(4): 950}
    work = [
        SlotWork(SlotId(3), 16, 1),
        SlotWork(SlotId(0), 1, 1),
        SlotWork(SlotId(1), 1, 1),
        SlotWork(SlotId(2), 3, 1, (7, 8)),
        SlotWork(SlotId(4), 1, 1),
    ]
    rows = arrange(work, lengths, 16)
    assert rows.slots == [4, 1, 2, 2, 2, 0, *[3] * 16]
    assert rows.offsets == [0, 0, 0, 1, 2, 0, *range(16)]
    assert rows.groups == [(0, 2, 60), (2, 5, 26), (5, 6, 1)]
    assert [tuple(chunk) for chunk in rows.chunks] == [(3, 6, 22, 32, 3)]
    assert [list(item.rows) for item in rows.samples] == [[21], [5], [1], [2, 3, 4], [0]]
    assert rows.longest == 951


def test_short_contexts_share_a_group() -> None:
    lengths = {SlotId(slot): length for slot, length in enumerate((130, 40, 3))}
    rows = arrange([SlotWork(SlotId(slot), 1, 0) for slot in range(3)], lengths, 16)
    assert rows.groups == [(0, 3, 9)]
    assert rows.samples == []
