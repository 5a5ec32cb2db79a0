#!/usr/bin/env python3
"""Times attention of few queries over long K and V beside PyTorch's backends, round by round on the
same tensors of one GPU.

"paged16" and "paged64" are flashtune's flash_attn_with_kvcache on the same K and V in pages of 16
or 64 keys, in random order. L2 is cold: each call waits in the stream behind the read of a buffer
larger than L2. "launched" is the plain call, "graph" the same call captured into a CUDA graph. Host
time counts only where it exceeds that read. A graph shortens the gaps between the kernels of a
call.

Prints the microseconds of each call. For each of flashtune's calls it then prints the TB/s of K and
V, that rate over the rate of a device-to-device copy in the same run ("x copy"), and each peer's
time over flashtune's. Geometric means follow, of all cells and of large cells alone (K and V of 512
MiB and more).
"""

import decode_cases
import loop
import machine
import peers
import report
import torch
from query_tensors import tensors
from timing import COLD_ROUNDS, captured, round_robin, round_robin_cold

MODES = ("launched", "graph")
RIVALS = ("cudnn", "fa2")
PAGE_SIZES = {"paged16": 16, "paged64": 64}
OURS = ("flashtune", *PAGE_SIZES)
# K and V take at most this share, since a peer may copy them. Longer ones only take proportionally
# longer.
SHARE_OF_MEMORY = 1 / 8
COPY_BYTES = 1 << 30


def copy_rate():
    """Bytes per second of a device-to-device copy, read and written bytes together."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    (seconds,) = round_robin([lambda: target.copy_(source)])
    return 2 * COPY_BYTES / seconds


def load(names):
    """{peer: a function (q, k, v, causal) -> a call without arguments}, and {peer: reason} of
    those that this machine lacks."""
    found, missing = peers.load([name for name in names if name not in PAGE_SIZES])
    loaded = {name: contiguous(attend) for name, attend in found.items()}
    for name in names:
        if name in PAGE_SIZES:
            try:
                loaded[name] = paged(PAGE_SIZES[name])
            except ImportError as error:
                missing[name] = report.reason(error)
    return loaded, missing


def contiguous(attend):
    return lambda q, k, v, causal: lambda: attend(q, k, v, causal, 0.0)


def paged(page_size):
    from flashtune.flash_attn_interface import flash_attn_with_kvcache

    def call_on(q, k, v, causal):
        batch, keys = k.shape[:2]
        pages = batch * keys // page_size
        k_pages, v_pages = (x.view(pages, page_size, *x.shape[2:]) for x in (k, v))
        table = torch.randperm(pages, dtype=torch.int32, device=k.device).view(batch, -1)
        lengths = torch.full((batch,), keys, dtype=torch.int32, device=k.device)
        return lambda: flash_attn_with_kvcache(
            q, k_pages, v_pages, cache_seqlens=lengths, block_table=table, causal=causal
        )

    return call_on


def measure(case, loaded, tune, rounds):
    """{mode: {peer: seconds}}, and {peer: reason} of those that do not run."""
    q, k, v = tensors(case)
    # A single query sees all keys, causal or not.
    causal = case["queries"] > 1
    if tune:
        import flashtune

        flashtune.autotune(q, k, v, causal=causal)
    calls, refused = {mode: {} for mode in MODES}, {}
    for name, call_on in loaded.items():
        try:
            call = call_on(q, k, v, causal)
            call()
            torch.cuda.synchronize()
        except Exception as error:
            refused[name] = report.reason(error)
            continue
        calls["launched"][name] = call
        try:
            calls["graph"][name] = captured(call)
        except Exception as error:
            refused[f"{name} in a graph"] = report.reason(error)
    times = {mode: dict(zip(runs, round_robin_cold(list(runs.values()), rounds))) for mode, runs in calls.items()}
    return times, refused


def rows_of(suite, case, times, refused, bytes_per_second):
    kv_bytes = decode_cases.kv_bytes(case)
    for mode, seconds in times.items():
        row = dict(suite=suite, **case, kv_bytes=kv_bytes, mode=mode, refused=refused)
        row["us"] = {peer: time * 1e6 for peer, time in seconds.items()}
        row["tbps"] = {peer: kv_bytes / time / 1e12 for peer, time in seconds.items()}
        # The copy counts as a rival that moves the same bytes.
        others = {"copy": kv_bytes / bytes_per_second, **{rival: seconds[rival] for rival in RIVALS if rival in seconds}}
        row["ratio"] = {
            ours: {rival: time / seconds[ours] for rival, time in others.items()} for ours in OURS if ours in seconds
        }
        yield row


def show(row, names):
    times = "".join(f"{row['us'][name]:11.1f}" if name in row["us"] else f"{'-':>11}" for name in names)
    print(f"{row['suite']:9}{decode_cases.label(row):32}{row['mode']:9}{times}", flush=True)
    for ours, ratios in row["ratio"].items():
        over = "".join(f"  {ratio:.2f} x {rival}" for rival, ratio in ratios.items())
        print(f"{'':9}{ours:>32}: {row['tbps'][ours]:.2f} TB/s{over}", flush=True)


def summary(rows):
    """One entry for each suite (once more for its large cells), way to call, call of
    flashtune's, and rival or copy."""
    groups = {}
    for row in rows:
        groups.setdefault((row["suite"], row["mode"]), []).append(row)
        if row["kv_bytes"] >= decode_cases.LARGE_BYTES:
            groups.setdefault((f"{row['suite']} large", row["mode"]), []).append(row)
    found = []
    for (suite, mode), members in groups.items():
        for ours in OURS:
            for rival in ("copy", *RIVALS):
                cells = [row for row in members if rival in row["ratio"].get(ours, {})]
                if not cells:
                    continue
                entry = dict(suite=suite, mode=mode, ours=ours, rival=rival)
                entry.update(
                    report.mean_and_least(
                        cells, lambda row, ours=ours, rival=rival: row["ratio"][ours][rival], decode_cases.label
                    )
                )
                found.append(entry)
    return found


def main():
    names = [*RIVALS, *OURS]
    parser = loop.parser(__doc__, decode_cases.SUITES, "autotune each problem first, but not its pages", COLD_ROUNDS)
    known = ", ".join(names)
    parser.add_argument("--peers", default=",".join(names), help=f"comma-separated, from: {known}, fa3, fa4; default: {known}")
    arguments = parser.parse_args()

    measured_on = machine.describe()
    max_kv_bytes = torch.cuda.get_device_properties(0).total_memory * SHARE_OF_MEMORY
    loaded, missing = load(arguments.peers.split(","))
    for name, why in missing.items():
        print(f"peer {name} is not here: {why}")
    bytes_per_second = copy_rate()
    print(f"a device-to-device copy moves {bytes_per_second / 1e12:.2f} TB/s; K and V have at most {max_kv_bytes / 2**30:.1f} GiB")
    print(f"{'suite':9}{'problem, us':32}{'mode':9}" + "".join(f"{name:>11}" for name in loaded))

    def rows_of_case(suite, case):
        for row in rows_of(suite, case, *measure(case, loaded, arguments.tune, arguments.rounds), bytes_per_second):
            show(row, loaded)
            yield row

    def results(rows):
        return dict(machine=measured_on, copy_tbps=bytes_per_second / 1e12, rows=rows, summary=summary(rows))

    chosen = decode_cases.suites(arguments.quick, max_kv_bytes)
    problems = [(suite, case) for suite in arguments.suites for case in chosen[suite]]
    rows, skipped = loop.run(problems, rows_of_case, results, arguments)

    print(f"\n{'suite':15}{'mode':10}{'who':11}{'over':8}{'geometric mean':>15}{'min':>7}  cell of the minimum (cells)")
    for entry in summary(rows):
        print(
            f"{entry['suite']:15}{entry['mode']:10}{entry['ours']:11}{entry['rival']:8}{entry['geometric_mean']:15.3f}"
            f"{entry['min']:7.2f}  {entry['min_cell']} ({entry['cells']})"
        )
    report.show_gaps(rows, decode_cases.label, skipped)


if __name__ == "__main__":
    main()
