import pytest
import torch

from core.errors import ConfigError
from core.kv import ComponentKind
from engine.cache.kv_memory import KVMemory, anonymous_buffers
from engine.config import EngineConfig, plan_capacity
from engine.models.deepseek_v41.caches import MAIN, CacheMap, Caches, Places
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import tiny_config
from tests.fakes.deepseek_configs import v4_flash_config, v41_flash_config

REAL, V4, TINY = (parse_config(raw) for raw in (v41_flash_config(), v4_flash_config(), tiny_config()))


def sizes(config, page_tokens):
    return {c.name: c.record_bytes for c in CacheMap(config, page_tokens, "f32").layout(3, 2).components}


def test_a_page_of_the_real_model_has_890_bytes_per_token_and_rings_of_134_rows():
    found = sizes(REAL, 256)
    assert found["global"] == 256 * 890 == 227_840
    assert found["window.encoder"] == found["window.decoder"] == 20 * 134 * 528 == 1_415_040
    assert found["window.draft"] == 3 * 134 * 528
    assert found["pending"] == 3 * 7 * 4096
    cache = CacheMap(REAL, 256, "f32")
    assert (cache.entries[2].width, cache.index_codes[2].width + cache.index_scales[2].width) == (288, 68)
    assert all(part.offset % 16 == 0 for part in (*cache.entries.values(), *cache.index_codes.values()))


def test_a_page_of_v4_flash_has_its_published_bytes_per_token():
    assert sizes(V4, 256)["global"] == 256 * 3514.25
    pending = CacheMap(V4, 256, "f32").pending
    assert pending[2, MAIN].count == 8
    assert pending[2, MAIN].count * pending[2, MAIN].width * 4 == 64 << 10
    assert pending[3, MAIN].count * pending[3, MAIN].width * 4 == 512 << 10


def test_parts_of_a_record_fill_it_without_gaps_or_overlaps():
    for config, page in ((TINY, 8), (TINY, 16), (REAL, 256), (V4, 128)):
        cache = CacheMap(config, page, "f64")
        groups = [[*cache.entries.values(), *cache.index_codes.values(), *cache.index_scales.values()]]
        groups += [list(parts.values()) for parts in (*cache.windows.values(), cache.pending) if parts]
        for parts in groups:
            assert [part.offset for part in parts] == [0, *(part.end for part in parts[:-1])]


def test_pages_that_split_a_group_of_tokens_are_refused():
    with pytest.raises(ConfigError, match="splits the groups of 2 tokens"):
        CacheMap(TINY, 9, "f32")
    with pytest.raises(ConfigError, match="128"):
        CacheMap(V4, 64, "f32")


def test_entries_and_index_keys_of_all_owners_come_back_as_their_formats_give_them():
    cache = CacheMap(TINY, 8, "f64")
    layout = cache.layout(5, 2)
    caches = Caches(cache, KVMemory(layout, anonymous_buffers(layout)), torch.float64)
    generator = torch.Generator().manual_seed(1)
    written = {}
    for layer in (2, 5, 8):
        count = cache.entries[layer].count
        pages = torch.tensor([3, 1]).repeat_interleave(count)
        places = Places(pages, torch.arange(count).repeat(2))
        main, keys = (torch.randn(2 * count, w, generator=generator, dtype=torch.float64) for w in (64, 32))
        caches.write_entries(layer, places, main)
        caches.write_index(layer, places, keys)
        written[layer] = places, main, keys
    for layer, (places, main, keys) in written.items():
        row = cache.formats
        assert torch.equal(caches.entries(layer, places), row.entry.unpack(row.entry.pack(main), torch.float64))
        found = caches.index_keys(layer, torch.tensor([[3, 1]]))[0]
        assert torch.equal(found, row.index.unpack(row.index.pack(keys), torch.float64))


def test_a_ring_is_addressed_by_position():
    cache = CacheMap(TINY, 8, "f64")
    layout = cache.layout(3, 2)
    caches = Caches(cache, KVMemory(layout, anonymous_buffers(layout)), torch.float64)
    ring, other = caches.window(9), caches.window(10)
    assert ring.capacity == 8 + 6
    rows = torch.arange(14 * 66).view(14, 66).to(torch.uint8)
    positions = torch.arange(100, 114)
    ring.write(torch.ones(14, dtype=torch.int64), positions, rows)
    assert torch.equal(ring.read(torch.ones(14, dtype=torch.int64), positions), rows)
    assert not ring.read(torch.zeros(14, dtype=torch.int64), positions).any()
    assert not other.read(torch.ones(14, dtype=torch.int64), positions).any()


def test_the_capacity_plan_tells_the_bytes_of_every_part():
    config = EngineConfig(page_tokens=256, num_pages=3, num_rows=2, chunk_tokens=512)
    layout = CacheMap(REAL, 256, "f32").layout(3, 2)
    text = "\n".join(plan_capacity(config, layout, 1 << 20).lines())
    assert "global: 227840 B per page = main 3 x 36864, main 1 x 73728, index 3 x 8192, index 1 x 16384" in text
    assert "window.encoder: 1415040 B per row = window 20 x 70752" in text
    assert {c.kind for c in layout.components[1:]} == {ComponentKind.RING}
