"""Attention backends of serving engines: vLLM (`flashtune.serving.vllm`) and SGLang
(`flashtune.serving.sglang`).

An engine finds its backend through an entry point of the installed package. Importing this module
registers nothing.
"""

__all__ = ["sglang", "vllm"]


def __getattr__(name):
    if name in __all__:
        import importlib

        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
