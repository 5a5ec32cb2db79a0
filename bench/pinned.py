"""Pins configs: makes the library plan a problem with one given config.

A config is imported as a record of exactly its problem, in a folder of records of its own, with
shipped records out of sight. Each import claims a lesser time than the one before it, so that it
replaces that one. The module knows no timing.
"""

import contextlib
import json
import os
import shutil
from pathlib import Path


def use_folder(folder):
    """Sends kernels and records to `folder`, deletes the records there, and hides the shipped ones.
    It comes before the import of flashtune, whose context reads both variables once. Returns the
    path."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    os.makedirs(folder + "/no-records", exist_ok=True)
    for name in ("records.index", "records.sled"):
        shutil.rmtree(f"{folder}/{name}", ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.remove(folder + "/records.journal")
    os.environ["FLASHTUNE_CACHE_DIR"] = folder
    os.environ["FLASHTUNE_TUNING_DB"] = folder + "/no-records"
    return Path(folder)


def bucket(size):
    """As src/plan/canonical.rs."""
    if size < 4:
        return size
    power = 1 << (size.bit_length() - 1)
    ratio = size * 1024 // power
    return power if ratio < 1254 else power + power // 2 if ratio < 1774 else 2 * power


def name(config):
    """The config as plan_info names it."""
    return "sm90 " + " ".join(f"{knob}={config[knob]}" for knob in sorted(config))


class Pins:
    """Pins configs on one device."""

    def __init__(self, folder):
        import torch

        properties = torch.cuda.get_device_properties(0)
        self.device = {"device": properties.name, "arch": "sm_90", "sm_count": properties.multi_processor_count}
        self.file, self.imports = folder / f"record-{os.getpid()}.jsonl", 0

    def pin(self, case, config, backward=False):
        """Makes `config` that of a case of random_cases.py. Returns whether the library took it: it
        refuses a config that breaks a constraint."""
        import flashtune

        self.imports += 1
        record = self._record(case, config, 1e6 * 0.999**self.imports, backward)
        self.file.write_text(json.dumps(record) + "\n")
        return flashtune.import_records(str(self.file), device=0) == 1

    def _record(self, case, config, median_us, backward):
        heads, heads_kv, dim = case["heads"], case["heads_kv"], case["head_dim"]
        word, mask = "backward" if backward else "forward", "causal" if case["causal"] else "full"
        sizes = f"gqa{bucket(heads // heads_kv)} b{bucket(case['batch'])} hq{bucket(heads)}"
        lengths = f"sq{bucket(case['seqlen_q'])} sk{bucket(case['seqlen_k'])}"
        return {
            "key": f"v1 {word} bf16 d{dim} dv{dim} {mask} nodropout vec8 {sizes} {lengths}",
            **self.device,
            "config": {"family": "sm90", **config},
            "median_us": median_us,
            "spread": 0.0,
            "check_error": 0.0,
            "problem": {
                "pass": word,
                "dtype": "bf16",
                "batch_size": case["batch"],
                "num_heads_q": heads,
                "num_heads_kv": heads_kv,
                "seqlen_q": case["seqlen_q"],
                "seqlen_k": case["seqlen_k"],
                "head_dim": dim,
                "head_dim_v": dim,
                "causal": "bottom-right" if case["causal"] else "none",
                "dropout": False,
                "layout": "vec8",
            },
            "driver_version": 0,
            "nvrtc_version": [0, 0],
            "library_version": "0",
        }
