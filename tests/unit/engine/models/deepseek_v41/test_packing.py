import pytest
import torch

from engine.models.deepseek_v41.packing import EightBitRow, FourBitRow, MixedRow, row_formats
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import tiny_config
from engine.models.deepseek_v41.quantize import Q4, Q8, Q4Kv, fake
from tests.fakes.deepseek_configs import v4_flash_config, v41_flash_config

torch.set_num_threads(1)
ROWS = [
    EightBitRow(512, Q8(32)),
    EightBitRow(64, Q8(32)),
    FourBitRow(512, Q4Kv(16)),
    FourBitRow(64, Q4Kv(16)),
    FourBitRow(128, Q4(32)),
    FourBitRow(32, Q4(32)),
]


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def sizes(raw):
    formats = row_formats(parse_config(raw))
    return formats.window.row_bytes, formats.entry.row_bytes, formats.index.row_bytes


def test_rows_of_the_real_model_have_the_published_sizes():
    assert sizes(v41_flash_config()) == (528, 288, 68)


def test_rows_of_the_tiny_model():
    assert sizes(tiny_config()) == (66, 36, 17)


def test_rows_of_v4():
    assert sizes(v4_flash_config()) == (584, 584, 68)


def test_entries_can_be_kept_in_eight_bits():
    raw = v41_flash_config()
    raw["text_config"]["use_fp4_sparse_kv"] = False
    assert sizes(raw) == (528, 528, 68)


@pytest.mark.parametrize("row", ROWS, ids=repr)
def test_unpacking_gives_the_quantizers_rounding(row):
    values = draw(2, 5, row.width)
    packed = row.pack(values)
    assert packed.dtype == torch.uint8 and packed.shape == (2, 5, row.row_bytes)
    assert torch.equal(row.unpack(packed, torch.float64), fake(row.quantizer, values))


@pytest.mark.parametrize("row", ROWS, ids=repr)
def test_all_dtypes_read_the_same_values(row):
    packed = row.pack(draw(4, row.width))
    exact = row.unpack(packed, torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(row.unpack(packed, dtype).double(), exact)


@pytest.mark.parametrize("row", [*ROWS, MixedRow(512, 64, Q8(64))], ids=repr)
def test_rows_can_be_read_from_the_middle_of_a_page(row):
    packed = row.pack(draw(6, row.width))
    page = torch.zeros(6, row.row_bytes + 3, dtype=torch.uint8)
    page[:, 3:] = packed
    assert torch.equal(row.unpack(page[1::2, 3:], torch.float32), row.unpack(packed[1::2], torch.float32))


@pytest.mark.parametrize("row", ROWS, ids=repr)
def test_every_byte_of_a_row_is_read(row):
    packed = row.pack(draw(1, row.width) + 3)
    values = row.unpack(packed, torch.float32)
    for i in range(row.row_bytes):
        changed = packed.clone()
        changed[0, i] ^= 0x11
        assert not torch.equal(row.unpack(changed, torch.float32), values)


def test_four_bit_rows_hold_codes_before_scales():
    values = torch.zeros(32)
    values[0], values[1] = 6.0, -0.5
    assert FourBitRow(32, Q4(32)).pack(values).tolist() == [0x97, *[0] * 15, 127]


def test_v4_rows_keep_rotary_dimensions_in_bfloat16():
    row, values = MixedRow(512, 64, Q8(64)), draw(3, 512)
    back = row.unpack(row.pack(values), torch.float64)
    assert torch.equal(back[:, 448:], values[:, 448:].bfloat16().double())
    assert torch.equal(back[:, :448], fake(Q8(64), values[:, :448]))
