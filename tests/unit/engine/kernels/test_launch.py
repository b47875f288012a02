"""A launch finds the compiled kernel of an earlier one exactly where Triton would compile the same again."""

import itertools

import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from engine.kernels import launch  # noqa: E402


@launch.kernel
def _scaled(X, Y, count, factor, WIDTH: tl.constexpr, TWICE: tl.constexpr = False):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(X + at, mask=at < count, other=0.0) * factor
    tl.store(Y + at, x + x if TWICE else x, mask=at < count)


class Recorder:
    """A driver of a GPU that is not there: says what was launched."""

    def __init__(self):
        self.launched, self.loaded, self.utils, self.launcher_cls = [], itertools.count(1), self, self.launcher
        self.device = 0

    def load_binary(self, *_):
        return 0, next(self.loaded), 0, 0, 1024

    def unload_module(self, *_):
        pass

    def get_device_properties(self, _):
        return {"max_shared_mem": 1 << 20}

    def launcher(self, *_):
        def start(*args):
            size, _, function, rest = args[:3], args[3], args[4], args[9:]
            self.launched.append((size, function, rest))

        return start

    def get_current_device(self):
        return self.device

    def get_current_stream(self, _):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def gpu(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(driver, "_active", recorder)
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    yield recorder
    _scaled.device_caches.clear()
    _scaled._found.clear()


def test_a_launch_is_what_triton_would_launch(gpu, monkeypatch):
    x, y = torch.zeros(64), torch.ones(64)
    _scaled[(2,)](x, y, 64, 0.5, WIDTH=32, num_warps=1)
    monkeypatch.setattr(_scaled, "run", lambda *_, **__: pytest.fail("Triton was asked again"))
    _scaled[(3, 4)](y, x, 48, 0.25, WIDTH=32, num_warps=1)
    (_, first, given_), (again_size, again, args) = gpu.launched
    assert (again_size, again) == ((3, 4, 1), first)
    assert [id(args[0]), id(args[1]), *args[2:]] == [id(y), id(x), 48, 0.25, 32, False]
    assert len(given_) == len(args)


def test_what_is_compiled_anew_is_not_mistaken_for_what_is_there(gpu):
    x, y = torch.zeros(65), torch.ones(64)
    for args, keywords in (
        ((x[:64], y, 64, 0.5), {"WIDTH": 32}),
        ((x[1:], y, 64, 0.5), {"WIDTH": 32}),
        ((x[:64], y, 63, 0.5), {"WIDTH": 32}),
        ((x[:64], y, 1, 0.5), {"WIDTH": 32}),
        ((x[:64], y.bfloat16(), 64, 0.5), {"WIDTH": 32}),
        ((x[:64], y, 64, 0.5), {"WIDTH": 64}),
        ((x[:64], y, 64, 0.5), {"WIDTH": 32, "TWICE": True}),
        ((x[:64], y, 64, 0.5), {"WIDTH": 32, "num_warps": 2}),
    ):
        for _ in range(2):
            _scaled[(2,)](*args, **keywords)
    functions = [function for _, function, _ in gpu.launched]
    assert functions[::2] == functions[1::2]
    assert len(set(functions)) == 8
    gpu.device = 1
    _scaled[(2,)](x[:64], y, 64, 0.5, WIDTH=32)
    assert gpu.launched[-1][1] not in functions


def test_a_value_that_comes_by_name_is_taken_from_each_launch(gpu):
    x, y = torch.zeros(64), torch.ones(64)
    for count in (48, 64):
        _scaled[(2,)](x, y, factor=0.5, count=count, WIDTH=32)
    assert [rest[2] for _, _, rest in gpu.launched] == [48, 64]


numbers = st.one_of(st.integers(-(1 << 62), 1 << 62), st.sampled_from([0, 1, 2, 16, 17, -16, 1 << 31, -(1 << 31) - 1]))
storage = torch.zeros(256, dtype=torch.uint8)
tensors = st.builds(
    lambda at, dtype: storage[at : at + 128 : 1].view(dtype) if at % 8 == 0 else storage[at : at + 128],
    st.integers(0, 64),
    st.sampled_from([torch.uint8, torch.int32, torch.bfloat16, torch.float32]),
)
values = st.one_of(numbers, tensors, st.floats(allow_nan=False), st.none(), st.booleans())


@given(st.one_of(st.tuples(values, values), st.tuples(numbers, numbers), st.tuples(tensors, tensors)), st.booleans())
@settings(max_examples=400, deadline=None)
def test_kinds_differ_wherever_triton_compiles_anew(pair, specialized):
    native = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    backend = type(pytest.importorskip("triton.compiler").make_backend(GPUTarget("cuda", 90, 32)))
    a, b = (native(backend, value, False, specialized, specialized) for value in pair)
    kind = launch._kind if specialized else launch._kind_of_any_number
    if a != b:
        assert kind(pair[0]) != kind(pair[1])
