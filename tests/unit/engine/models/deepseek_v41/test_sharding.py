import pytest
import torch

from core.errors import ConfigError
from engine.models.deepseek_v41.exporter import write_shards
from engine.models.deepseek_v41.inventory import inventory
from engine.models.deepseek_v41.loader import open_checkpoint
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import tiny_config
from engine.models.deepseek_v41.sharding import Ranks, local_experts, shards, table_rows
from tests.fakes.deepseek_configs import v41_flash_config

torch.set_num_threads(1)
TYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
}


def held(config, size, rank, *, split_heads=False):
    ranks = Ranks(rank=rank, size=size, split_heads=split_heads)
    return {shard.name: shard.part for shard in shards(config, inventory(config), ranks)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Every byte of it is drawn, so that no two slices are alike."""
    config = parse_config(tiny_config())
    generator = torch.Generator().manual_seed(1)

    def tensors():
        for spec in inventory(config):
            data = torch.randint(0, 256, (spec.num_bytes,), dtype=torch.uint8, generator=generator)
            yield spec.name, data.view(TYPES[spec.dtype]).view(spec.shape)

    directory = tmp_path_factory.mktemp("shards")
    write_shards(directory, tensors(), 2 << 20)
    return open_checkpoint(directory, config)


@pytest.mark.parametrize(("size", "split_heads"), [(1, False), (2, False), (4, False), (1, True), (2, True)])
def test_the_parts_of_all_ranks_make_the_whole(checkpoint, size, split_heads):
    config = parse_config(tiny_config())
    plans = [held(config, size, rank, split_heads=split_heads) for rank in range(size)]
    for spec in inventory(config):
        whole = checkpoint.get(spec.name).view(torch.uint8)
        parts = [plan[spec.name] for plan in plans if spec.name in plan]
        read = [checkpoint.get_slice(spec.name, part).view(torch.uint8) for part in parts]
        if parts[0] is None:
            assert len(parts) in (1, size) and all(torch.equal(part, whole) for part in read), spec.name
        elif parts[0].dim == 0:
            assert torch.equal(torch.cat(read, 0), whole), spec.name
        else:
            assert torch.equal(torch.cat([part.flatten(1) for part in read], 1), whole.flatten(1)), spec.name


def test_an_expert_is_on_one_rank_and_everything_else_on_all():
    config = parse_config(tiny_config())
    plans = [held(config, 4, rank) for rank in range(4)]
    for spec in inventory(config):
        holders = [rank for rank, plan in enumerate(plans) if spec.name in plan]
        if ".experts." in spec.name:
            assert len(holders) == 1
        else:
            assert holders == [0, 1, 2, 3]
    assert "layers.0.ffn.experts.3.w1.weight" in plans[1]
    assert "mtp.0.ffn.experts.1.w1.weight" in plans[1]


def test_eight_ranks_of_the_real_model_hold_what_they_should():
    config = parse_config(v41_flash_config())
    specs = {spec.name: spec for spec in inventory(config)}
    totals = []
    for rank in (0, 7):
        total = 0
        for name, part in held(config, 8, rank).items():
            spec = specs[name]
            rows = spec.shape[0] if part is None else part.stop - part.start
            total += spec.num_bytes // spec.shape[0] * rows
        totals.append(total)
    # 37 GB of experts, 25 GB of tables, 11 to 12 GB that every rank has.
    assert all(72e9 < total < 76e9 for total in totals)


def test_tables_are_divided_into_equal_padded_rows():
    ranges = [table_rows(384_006_168, Ranks(rank=rank, size=8)) for rank in range(8)]
    assert ranges[0].start == 0 and ranges[-1].stop == 384_006_168
    assert all(a.stop == b.start for a, b in zip(ranges, ranges[1:], strict=False))
    assert {len(r) for r in ranges[:-1]} == {48_000_800}
    assert len(ranges[-1]) <= 48_000_800


def test_a_table_smaller_than_its_padding_leaves_last_ranks_empty():
    assert [len(table_rows(100, Ranks(rank=rank, size=4))) for rank in range(4)] == [64, 36, 0, 0]


def test_experts_are_contiguous():
    assert list(local_experts(384, Ranks(rank=7, size=8))) == list(range(336, 384))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (Ranks(rank=2, size=2), "rank 2 is outside"),
        (Ranks(rank=0, size=3), "8 routed experts do not divide over 3 ranks"),
        (Ranks(rank=0, size=8), "4 draft experts do not divide over 8 ranks"),
        (Ranks(rank=0, size=4, split_heads=True), "2 output groups do not divide over 4 ranks"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(ranks, message):
    config = parse_config(tiny_config())
    with pytest.raises(ConfigError, match=message):
        list(shards(config, inventory(config), ranks))


def test_scales_must_divide_with_their_weights():
    raw = tiny_config()
    raw["text_config"] |= {"o_lora_rank": 16}
    with pytest.raises(ConfigError, match="scales of attention weights do not divide"):
        config = parse_config(raw)
        list(shards(config, inventory(config), Ranks(rank=0, size=2, split_heads=True)))
