"""The gather kernel without a GPU: its PTX is run thread by thread by a small reader of the instructions it uses."""

import re
import subprocess
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.backends import cuda_gather
from kv_transfer.backends.cuda_driver import CudaDriver
from kv_transfer.backends.cuda_gather import CHUNK, PTX, WARP, span_of, suits

MASKS = {"u32": (1 << 32) - 1, "b32": (1 << 32) - 1, "u64": (1 << 64) - 1, "b64": (1 << 64) - 1}
STEPS_MAX = 100_000


class Threads:
    """One thread at a time over one buffer of memory, whose addresses are indices."""

    def __init__(self, memory: np.ndarray):
        self.memory, self.written = memory, np.zeros(len(memory), np.int32)
        body = PTX[PTX.index("{") + 1 : PTX.rindex("}")]
        lines = [line.split("//")[0].strip() for line in body.splitlines()]
        self.code, self.labels = [], {}
        for line in lines:
            if line.endswith(":"):
                self.labels[line[:-1]] = len(self.code)
            elif line and not line.startswith(".reg"):
                guard, plain = re.fullmatch(r"(?:@(%\w+) )?(.*);", line).groups()
                name, _, rest = plain.partition(" ")
                operands = [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", rest)] if rest else []
                self.code.append((guard, name.split("."), operands))

    def run(self, parameters: dict[str, int], block: int, thread: int) -> None:
        registers = defaultdict(int, {"%tid.x": thread, "%ctaid.x": block, "%ntid.x": cuda_gather.THREADS})
        at = 0
        for _ in range(STEPS_MAX):
            guard, (name, *kinds), operands = self.code[at]
            at += 1
            if guard and not registers[guard]:
                continue
            if name == "ret":
                return
            if name == "bra":
                at = self.labels[operands[0]]
            elif name in ("ld", "st"):
                self.move(name, kinds, operands, registers, parameters)
            else:
                values = [registers[o] if o.startswith("%") else int(o) for o in operands[1:]]
                registers[operands[0]] = compute(name, kinds, values)
        raise AssertionError("the kernel does not end")

    def move(self, name, kinds, operands, registers, parameters):
        place, names = (operands[1], operands[0]) if name == "ld" else (operands[0], operands[1])
        inside = place.strip("[]").split(" + ")
        if kinds[0] == "param":
            registers[names] = parameters[inside[0]]
            return
        address = registers[inside[0]] + (int(inside[1]) if len(inside) > 1 else 0)
        size = 8 if kinds[-1] == "u64" else 4
        for index, register in enumerate(part.strip() for part in names.strip("{}").split(",")):
            part = slice(address + index * size, address + (index + 1) * size)
            assert part.stop <= len(self.memory)
            if name == "ld":
                registers[register] = int.from_bytes(self.memory[part].tobytes(), "little")
            else:
                self.memory[part] = np.frombuffer(registers[register].to_bytes(size, "little"), np.uint8)
                self.written[part] += 1


def compute(name, kinds, values):
    if name == "setp":
        return {
            "lt": values[0] < values[1],
            "ge": values[0] >= values[1],
            "gt": values[0] > values[1],
            "eq": values[0] == values[1],
        }[kinds[0]]
    found = {
        "mov": lambda: values[0],
        "cvt": lambda: values[0],
        "add": lambda: values[0] + values[1],
        "sub": lambda: values[0] - values[1],
        "min": lambda: min(values),
        "and": lambda: values[0] & values[1],
        "shr": lambda: values[0] >> values[1],
        "mul": lambda: values[0] * values[1],
        "mad": lambda: values[0] * values[1] + values[2],
    }[name]()
    return found & (MASKS["u64"] if "wide" in kinds else MASKS[kinds[-1] if name != "cvt" else "u64"])


@pytest.mark.parametrize(
    "sizes",
    [[16], [CHUNK], [CHUNK + 16, 16, 48, 2 * CHUNK - 16], [496, 512, 528] * 5, [32] * 300, [9 * CHUNK, 16, 16]],
    ids=["one-line", "one-chunk", "odd-ends", "around-a-line", "many-small", "one-large"],
)
def test_every_byte_is_copied_once_and_no_other_is_touched(sizes, monkeypatch):
    monkeypatch.setattr(cuda_gather, "THREADS", 2 * WARP)
    blocks, total = 2, sum(sizes)
    rng = np.random.default_rng(len(sizes))
    gaps = rng.integers(0, 3, 2 * len(sizes)) * 16
    begins = np.cumsum([0, *np.tile(sizes, 2)[:-1]]) + np.cumsum(gaps)
    sources, targets = begins[: len(sizes)], begins[len(sizes) :]
    if len(set(sizes)) == 1:
        targets = rng.permuted(targets)
    table = int(begins[-1]) + sizes[-1]
    memory = rng.integers(0, 256, table + 24 * len(sizes), dtype=np.uint8)
    memory[table:] = np.concatenate([targets, sources, np.cumsum(sizes)]).astype("<u8").view(np.uint8)
    expected = memory.copy()
    for target, source, size in zip(targets, sources, sizes, strict=True):
        expected[target : target + size] = memory[source : source + size]
    threads = Threads(memory)
    span = span_of(total, blocks)
    for block in range(blocks):
        for thread in range(2 * WARP):
            threads.run({"table": table, "count": len(sizes), "span": span}, block, thread)
    assert np.array_equal(memory, expected)
    assert int(threads.written.sum()) == total
    assert threads.written.max() == 1


def test_only_pieces_of_whole_lines_suit_it():
    whole = np.array([0, 4096, 65536])
    assert suits(whole, whole, np.array([16, 48, 4096]))
    assert not suits(whole, whole + 8, np.array([16, 48, 4096]))
    assert not suits(whole, whole, np.array([16, 48, 4100]))
    many = np.arange(cuda_gather.MAX_PIECES + 1) * 16
    assert not suits(many, many, np.full(len(many), 16))
    assert not suits(many[:0], many[:0], many[:0])


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100", "sm_103"])
def test_the_assembler_takes_it_without_spills(chip, tmp_path):
    nvidia = pytest.importorskip("triton.backends.nvidia")
    ptxas = Path(nvidia.__path__[0]) / "bin" / "ptxas"
    if not ptxas.exists():
        pytest.skip("triton brought no assembler")
    (tmp_path / "gather.ptx").write_text(PTX)
    told = subprocess.run(
        [ptxas, "-v", f"--gpu-name={chip}", "gather.ptx", "-o", "gather.cubin"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in told.stderr


class Library:
    """A `libcuda` that notes the names of calls; those in `failing` fail."""

    def __init__(self):
        self.calls, self.failing, self.kept = [], set(), []

    def __getattr__(self, name):
        def function(*arguments):
            self.calls.append(name)
            if name == "cuMemHostAlloc":
                self.kept.append(np.zeros(arguments[1].value, np.uint8))
                arguments[0]._obj.value = self.kept[-1].ctypes.data
            return 1 if name in self.failing else 0

        return function


SMALL = tuple(np.arange(8) * 4096 for _ in range(2))


@pytest.mark.parametrize(
    ("sizes", "blocks", "expected"),
    [
        (np.full(8, 4096), 4, "cuLaunchKernel"),
        (np.full(8, 4096), 0, "cuMemcpyBatchAsync_v2"),
        (np.full(8, 4 << 20), 4, "cuMemcpyBatchAsync_v2"),
        (np.full(8, 4095), 4, "cuMemcpyBatchAsync_v2"),
        (np.full(3, 4096), 4, "cuMemcpyAsync"),
    ],
    ids=["small", "no-blocks", "large", "odd", "few"],
)
def test_pieces_go_by_what_moves_them_fastest(monkeypatch, sizes, blocks, expected):
    library = Library()
    monkeypatch.setattr("ctypes.CDLL", lambda _: library)
    CudaDriver().copy_apart(0, *(column[: len(sizes)] for column in SMALL), sizes, blocks)
    starts = {"cuLaunchKernel", "cuMemcpyBatchAsync_v2", "cuMemcpyAsync"}
    assert starts & set(library.calls) == {expected}
    assert library.calls[-1] == "cuStreamSynchronize"


def test_a_kernel_that_cannot_be_loaded_is_not_asked_for_again(monkeypatch, caplog):
    library = Library()
    library.failing = {"cuModuleLoadData"}
    monkeypatch.setattr("ctypes.CDLL", lambda _: library)
    driver = CudaDriver()
    for _ in range(2):
        driver.copy_apart(0, *SMALL, np.full(8, 4096), 4)
    assert library.calls.count("cuModuleLoadData") == 1
    assert library.calls.count("cuMemcpyBatchAsync_v2") == 2
    assert "copied by the copy engines" in caplog.text
