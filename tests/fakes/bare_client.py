"""Runs the serving benchmark client of a published `sglang` or `vllm` wheel without the engine around it.

Packages whose own modules are wanted are entered without their `__init__`, and what their clients import only for other
tasks is stubbed. usage: python bare_client.py sglang|vllm [flags of `sglang.bench_serving` or `vllm bench serve`]
"""

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

STUBBED = {
    "sglang": ("zmq", "IPython", "datasets", "pybase64", "sglang.srt.disaggregation.utils", "sglang.srt.utils.common"),
    "vllm": (
        *(
            "cv2",
            "torch",
            "zmq",
            "pybase64",
            "vllm.inputs",
            "vllm.lora",
            "vllm.multimodal",
            "vllm.platforms",
            "vllm.distributed",
        ),
        *("vllm.transformers_utils.config", "vllm.sampling_params", "vllm.config"),
    ),
}
"""Modules replaced, with all below them."""
BARE = {
    "sglang": ("sglang", "sglang.srt", "sglang.srt.utils"),
    "vllm": ("vllm", "vllm.utils", "vllm.transformers_utils"),
}
"""Packages entered without running their `__init__`."""


class Nothing:
    """Takes anything and is false."""

    def __init__(self, *_args, **_options) -> None:
        pass

    def __bool__(self) -> bool:
        return False


class Stub(types.ModuleType):
    """Has every name, each a class of its own."""

    __path__ = ()

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Nothing,), {})


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, fullname, _path=None, _target=None):
        if any(fullname == name or fullname.startswith(name + ".") for name in self._names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        pass


def main() -> None:
    """Put the stubs in place and hand over to the client."""
    package = sys.argv.pop(1)
    found = importlib.util.find_spec(package)
    (root,) = found.submodule_search_locations
    sys.meta_path.insert(0, Stubs(STUBBED[package]))
    for name in BARE[package]:
        bare = types.ModuleType(name)
        bare.__path__ = [root + name.removeprefix(package).replace(".", "/")]
        sys.modules[name] = bare
    if package == "sglang":
        importlib.import_module("sglang.benchmark.serving").cli_main()
        return
    # Without a configuration from here the tokenizer's library reads the directory's own.
    vars(importlib.import_module("vllm.transformers_utils.config"))["get_config"] = lambda *_, **_options: None
    serve = importlib.import_module("vllm.benchmarks.serve")
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())


if __name__ == "__main__":
    main()
