"""Runs the serving benchmark client of the published `sglang` wheel without the engine around it.

Of the engine it needs a constant and two address helpers; what it imports beside them only for other tasks is stubbed.
usage: python sglang_client.py [flags of sglang.bench_serving]
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

STUBBED = frozenset({"zmq", "IPython", "datasets", "pybase64"})
STUBBED_PARTS = frozenset({"sglang.srt.disaggregation.utils", "sglang.srt.utils.common"})
BARE = ("sglang", "sglang.srt", "sglang.srt.utils")
"""Packages whose own modules are wanted, but not what their `__init__` pulls in."""


class Stub(types.ModuleType):
    """Has every name, each an empty class."""

    __path__ = ()

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs."""

    def find_spec(self, fullname, _path=None, _target=None):
        if fullname.partition(".")[0] in STUBBED or fullname in STUBBED_PARTS:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        pass


def main() -> None:
    """Put the stubs in place and hand over to the client."""
    found = importlib.util.find_spec("sglang")
    (root,) = found.submodule_search_locations
    sys.meta_path.insert(0, Stubs())
    for name in BARE:
        bare = types.ModuleType(name)
        bare.__path__ = [root + name.removeprefix("sglang").replace(".", "/")]
        sys.modules[name] = bare
    serving = importlib.import_module("sglang.benchmark.serving")
    serving.cli_main()


if __name__ == "__main__":
    main()
