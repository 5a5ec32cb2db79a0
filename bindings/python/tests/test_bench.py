"""The reports of bench/ on made-up times: ratios, best peers, tables and charts; and the order
in which a bench times."""

import json
from itertools import permutations
from xml.etree import ElementTree

import attention_report
import cases
import chart
import context_parallel
import mixed_cases
import paged_prefill_cases
import pytest
from order import orders

NAMES = ["cudnn", "fa3", "flashtune", "call"]
MACHINE = dict(gpu="NVIDIA H200", torch="2.11.0", cudnn=91900)


def results(times):
    """The results of the suite "grid"; `times(case, pass)` is {peer: seconds}."""
    rows = [
        attention_report.row_of("grid", case, name, times(case, name), {})
        for case in cases.suites()["grid"]
        for name in attention_report.PASSES
    ]
    return dict(machine=MACHINE, rounds=20, tuned=False, peers=NAMES, rows=rows)


def flashtune_ahead_but_at_256(case, name):
    fa3 = 0.9 if case["head_dim"] == 256 else 1.5
    return {"cudnn": 2.0, "fa3": fa3, "flashtune": 1.0, "call": 0.5}


def entry(found, name, head_dim, rival):
    return next(one for one in found if (one["pass"], one["head_dim"], one["rival"]) == (name, head_dim, rival))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_every_function_follows_each_other_equally_often(count):
    rounds = list(orders(count, 2 * count))
    assert all(sorted(row) == list(range(count)) for row in rounds)
    for place in range(count):
        assert sorted(row[place] for row in rounds) == sorted(2 * list(range(count)))
    pairs = [pair for row in rounds for pair in zip(row, row[1:])]
    assert sorted(pairs) == sorted(2 * list(permutations(range(count), 2)))


def test_ratios_are_to_the_best_peer_of_the_same_row_and_leave_flashtune_out():
    case = cases.case(1024, 16, 16, 128, True)
    seconds = {"cudnn": 3.0, "fa3": 2.0, "flashtune": 1.0, "call": 0.5}
    row = attention_report.row_of("grid", case, "forward", seconds, {})
    assert row["best_peer"] == "fa3"
    assert row["ratio"] == {"cudnn": 3.0, "fa3": 2.0, "best": 2.0}


def test_a_peer_without_a_time_has_no_ratio():
    case = cases.case(1024, 16, 16, 128, True)
    row = attention_report.row_of("grid", case, "forward", {"cudnn": 3.0, "flashtune": 1.0}, {"fa3 forward": "why"})
    assert row["ratio"] == {"cudnn": 3.0, "best": 3.0}
    assert "-" in attention_report.line(row, NAMES).split()
    alone = attention_report.row_of("grid", case, "forward", {"flashtune": 1.0}, {})
    assert alone["best_peer"] is None and alone["ratio"] == {}


def test_the_summary_counts_cells_behind_by_pass_and_head_dim():
    rows = results(flashtune_ahead_but_at_256)["rows"]
    found = attention_report.summary(rows, NAMES)
    whole = entry(found, "forward", None, "best")
    assert (whole["cells"], whole["behind"]) == (36, 12)
    assert whole["min"] == pytest.approx(0.9) and "d256" in whole["min_cell"]
    assert whole["geometric_mean"] == pytest.approx((1.5**24 * 0.9**12) ** (1 / 36))
    assert entry(found, "backward", 64, "best")["behind"] == 0
    assert entry(found, "backward", 256, "cudnn")["geometric_mean"] == pytest.approx(2.0)
    assert not [one for one in found if one["rival"] in attention_report.OURS]


def test_markdown_tables_have_as_many_cells_in_each_row():
    text = attention_report.markdown(results(flashtune_ahead_but_at_256))
    assert "NVIDIA H200, PyTorch 2.11.0, cuDNN 9.19.0, bf16. One run of 20 rounds" in text
    assert "| forward | 256 | 0.90 | 0.90 | 12 of 12 | 2.00 | 0.90 |" in text
    assert "| 128 | yes | 1.50 FA3 |" in text
    for table in text.split("\n\n"):
        if table.startswith("|"):
            assert len({line.count("|") for line in table.splitlines()}) == 1


def test_rows_of_a_run_that_a_deadline_ended_make_a_report():
    whole = results(flashtune_ahead_but_at_256)
    cut = json.loads(json.dumps(dict(whole, rows=whole["rows"][:5])))
    assert "0 of 3" in attention_report.markdown(cut)
    assert set(chart.charts(cut)) == {"forward", "backward", "ratio"}
    nothing = dict(whole, rows=[])
    assert attention_report.summary_text(attention_report.summary([], NAMES))
    assert attention_report.markdown(nothing) and chart.charts(nothing) == {}


def test_charts_are_xml_with_a_line_for_each_peer_or_class():
    drawn = chart.charts(results(flashtune_ahead_but_at_256))
    lines = {name: ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}polyline") for name, svg in drawn.items()}
    # Six classes of cudnn, fa3 and flashtune; "call" is not drawn.
    assert {name: len(list(found)) for name, found in lines.items()} == {"forward": 18, "backward": 18, "ratio": 12}


def test_page_sizes_of_the_paged_bench_keep_their_order_and_wrong_ones_are_named():
    assert paged_prefill_cases.page_sizes("64,16,64,1") == (64, 16, 1)
    for text in ("16,x", "0", "", "16,-8"):
        with pytest.raises(ValueError, match="is not a positive integer"):
            paged_prefill_cases.page_sizes(text)


def test_the_paged_bench_compares_pages_with_the_dense_time_and_with_peers():
    seconds = {"flashtune": 2.0, "page16": 3.0, "fa3page16": 6.0, "page64": 2.5, "fa3page256": 1.0}
    seconds |= {"page6": 4.0, "flashinferpage16": 9.0}
    ratios = paged_prefill_cases.ratios(seconds, (6, 16, 64, 256))
    assert ratios == {
        "page6/dense": 2.0, "page16/dense": 1.5, "fa3page16/page16": 2.0, "flashinferpage16/page16": 3.0,
        "page64/dense": 1.25,
    }  # fmt: skip
    first, *_ = paged_prefill_cases.cases("chunks", quick=True)
    assert paged_prefill_cases.label(first) == "b4 q2048 k16384 h32/8 d128"
    assert len(paged_prefill_cases.cases("chunks", quick=True)) == 2


def test_the_paged_bench_refuses_unknown_suites_and_page_sizes(capsys):
    pytest.importorskip("torch")
    import paged_prefill

    arguments = paged_prefill.parser().parse_args(["--suites", "wide", "--pages", "16,256", "--rounds", "3"])
    assert (arguments.suites, arguments.pages, arguments.rounds) == (["wide"], (16, 256), 3)
    for words in (["--pages", "0"], ["--suites", "narrow"], ["--rounds", "x"]):
        with pytest.raises(SystemExit):
            paged_prefill.parser().parse_args(words)
    told = capsys.readouterr().err
    assert "page size '0' is not a positive integer" in told and "no suite is called narrow" in told


def test_mixes_follow_from_their_seed_and_hold_chunks_and_single_tokens():
    first, second = (list(mixed_cases.cases("mixes", seed, quick=False)) for seed in (1, 2))
    assert len(first) == len(second) == 10
    assert first == list(mixed_cases.cases("mixes", 1, quick=False)) != second
    for case in first + second:
        chunks = mixed_cases.chunks_of(case)
        assert 0 < chunks < len(case["queries"]) == len(case["keys"])
        assert set(case["queries"][chunks:]) == {1} and sum(case["queries"][:chunks]) <= 8192
        assert all(queries <= keys for queries, keys in zip(case["queries"], case["keys"]))
    assert mixed_cases.ratio({"one call": 6.0, "prefill": 3.0, "decode": 1.0}) == 1.5
    assert mixed_cases.ratio({"one call": 6.0, "decode": 4.0}) == 1.5


def test_two_gpus_are_compared_with_one_and_messages_that_take_no_longer_are_hidden():
    sizes = dict(tokens=1024, heads=4, heads_kv=4)
    one = dict(sizes, method="one", forward={"ms": 8.0}, both={"ms": 24.0})
    ring = {"ms": 5.0, "alone ms": 2.0, "compute ms": 4.0}
    rows = [one, dict(sizes, method="ring", forward=ring, both=dict(ring, ms=4.0)), dict(sizes, method="torch", refused="why")]
    one, ring, refused = context_parallel.with_ratios(rows, head_dim=64)
    assert ring["forward"]["speed-up"] == 1.6 and ring["forward"]["hidden"] == 0.5
    assert ring["both"]["speed-up"] == 6.0 and ring["both"]["hidden"] == 1.0
    assert one["both"]["TFLOP/s"] == pytest.approx(14 * 4 * 1024**2 / 2 * 64 / 24e9) and "speed-up" not in one["both"]
    assert "forward" not in refused
