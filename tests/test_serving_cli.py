"""`ascend-lab serve-sim`: the answers' keys, models as servers, and files that are wrong."""

from functools import cache

import numpy as np
import pytest
from command_lines import refused, run, run_json

from ascend_lab.compiler import zoo
from ascend_lab.compiler.compile import compile_stages
from ascend_lab.deploy.serving import read_scenario, theory
from ascend_lab.deploy.serving.model import network_seconds

PLAIN = """
[service]
law = "exponential"
mean_s = 1.0
[arrivals]
law = "poisson"
rate_per_s = 3.0
[server]
instances = 1
max_batch = 4
max_delay_s = 0.0
queue_limit = 0
[run]
requests = 30000
seed = 4
"""


@pytest.fixture
def config(tmp_path):
    return tmp_path / "server.toml"


@pytest.fixture
def simulate(config, capsys):
    def found(text):
        config.write_text(text, "utf-8")
        return run_json(capsys, "serve-sim", config)

    return found


def test_the_answer_has_the_promised_keys_and_values(simulate):
    data = simulate(PLAIN)
    keys = {"throughput_per_s", "latency_s", "wait_s", "mean_batch", "utilisation", "lost"}
    assert keys <= set(data)
    assert set(data["latency_s"]) == {"p50", "p95", "p99", "mean"}
    queue = theory.batches(3, 1, 4)
    assert data["throughput_per_s"] == pytest.approx(3, rel=0.02)
    assert data["latency_s"]["mean"] == pytest.approx(queue.W, rel=0.1)
    assert data["wait_s"]["mean"] == pytest.approx(queue.Wq, rel=0.15)
    assert data["mean_batch"] == pytest.approx(queue.mean_batch, rel=0.02)
    assert data["utilisation"] == pytest.approx(queue.utilisation, abs=0.01)
    assert (data["lost"], data["served"]) == (0, 30000)
    assert simulate(PLAIN) == data
    assert simulate(PLAIN.replace("seed = 4", "seed = 5")) != data


def test_text_and_figure_say_the_same(tmp_path, capsys, config, simulate):
    data = simulate(PLAIN)
    figure = tmp_path / "f.svg"
    out = run(capsys, "serve-sim", config, "--figure", figure)[1]
    assert f"{data['throughput_per_s']:.6g} requests/s (simulated), 30000 answered, 0 lost" in out
    assert out.count("batch    ") == 4 and "####" in out
    assert "<svg" in figure.read_text("utf-8")


def test_a_network_on_a_chip_is_a_server(simulate, monkeypatch):
    timed = "ascend_lab.deploy.serving.scenario_file.network_seconds"
    monkeypatch.setattr(timed, cache(network_seconds))
    text = '[service]\nmodel = "zoo:squeezenet"\nchip = "Ascend310"\n'
    text += "[arrivals]\nrate_per_s = 200\n[server]\nmax_batch = 4\n[run]\nrequests = 2000\n"
    data = simulate(text)
    seconds = data["service"]["model"]["seconds"]
    own = {b: compile_stages(zoo.build("squeezenet", batch=b), "Ascend310").timeline().time_s
           for b in (1, 4)}  # fmt: skip
    assert [seconds["1"], seconds["4"]] == pytest.approx([own[1], own[4]], rel=1e-12)
    assert data["service"]["model"]["worst_error"] < 0.1
    assert data["latency_s"]["p50"] > own[1] * (1 - 1e-9)
    top = 'model = "zoo:squeezenet"\nchip = "Ascend310"\n' + text.split("\n", 3)[3]
    assert simulate(top) == data
    table = '[model]\nname = "zoo:squeezenet"\nchip = "Ascend310"\n' + text.split("\n", 3)[3]
    assert simulate(table) == data


def test_further_tables_are_read_and_reported(simulate):
    data = simulate(PLAIN.replace("rate_per_s = 3.0", "rate_per_s = 0.8")
                    .replace("max_batch = 4", "max_batch = 1") + """
[[priorities]]
share = 0.375
[[priorities]]
share = 0.625
timeout_s = 50
action = "delay"
[[failures]]
instance = 0
at_s = 100
repair_s = 5
""")  # fmt: skip
    waits = [row["wait_s"]["mean"] for row in data["priorities"]]
    assert waits == pytest.approx([1.142857, 5.714286], rel=0.2)
    data = simulate("""
[[steps]]
name = "decode"
[[steps]]
name = "classify"
after = ["decode"]
service = {mean_s = 0.5}
[service]
law = "exponential"
mean_s = 1
[arrivals]
rate_per_s = 0.5
[run]
requests = 30000
""")
    assert data["latency_s"]["mean"] == pytest.approx(
        sum(theory.mg1(0.5, mean_s).W for mean_s in (1, 0.5)), rel=0.05
    )
    assert set(data["steps"]) == {"decode", "classify"}


CANARY = """
[service]
law = "exponential"
mean_s = 0.01
[arrivals]
rate_per_s = 50
[run]
requests = 20000
[canary]
stages = [0.1, 0.5, 1.0]
window = 500
max_error_rate = 0.02
max_p95_s = 0.2
[[versions]]
name = "1"
[[versions]]
name = "2"
"""


def test_a_canary_is_promoted_or_rolled_back_and_loses_nothing(simulate):
    good = simulate(CANARY)
    assert good["canary"]["outcome"] == "promoted"
    assert [row["share"] for row in good["canary"]["history"]] == [0.1, 0.5, 1.0]
    wrong = simulate(CANARY + "error_rate = 0.2\n")
    slow = simulate(CANARY + "service = {mean_s = 0.1}\n")
    for data, why in ((wrong, "error rate"), (slow, "p95")):
        assert data["canary"]["outcome"] == "rolled back"
        assert why in data["canary"]["history"][-1]["decision"]
        assert (data["lost"], data["served"], data["canary"]["share"]) == (0, 20000, 0)
        rows = data["canary"]["versions"]
        assert rows["1"]["answered"] + rows["2"]["answered"] == 22000  # the warm-up too


OVERLOAD = (
    "overload: 4.5 items/s come to model, which bears 4 at most: waits grow with the run, "
    "unless requests are lost"
)


@pytest.mark.parametrize(
    ("old", "new", "notes"),
    [
        ("seed = 4", 2 * "[[priorities]]\nshare = 0.5\n", []),
        ("seed = 4", "[[priorities]]\n[[priorities]]", []),
        ('law = "poisson"', "clients = 3", ["[arrivals] clients changes nothing with law poisson"]),
        ('law = "poisson"', 'law = "closed"\nclients = 3',
         ["[arrivals] rate_per_s changes nothing with law closed"]),
        ("rate_per_s = 3.0", "rate_per_s = 3.0\nitems = [1, 2]",
         [OVERLOAD]),
    ],
)  # fmt: skip
def test_what_surprises_is_noted(old, new, notes, config, capsys):
    config.write_text(PLAIN.replace("30000", "300").replace(old, new), "utf-8")
    lines = run(capsys, "serve-sim", config)[1].splitlines()
    assert [line[8:] for line in lines if line.startswith("  note: ")] == notes


def test_a_compiled_model_cannot_be_served(tmp_path, capsys):
    (tmp_path / "s.alm").write_bytes(b"x")
    assert "compiled models cannot be served" in refused(capsys, "serve", tmp_path / "s.alm")


@pytest.mark.parametrize("name", ["none.toml", ".", "picture.gif"])
def test_no_file_a_folder_and_no_picture(name, config, capsys):
    config.write_text(PLAIN, "utf-8")
    first = (config, "--figure") if name == "picture.gif" else ()
    refused(capsys, "serve-sim", *first, config.parent / name)


def test_a_model_stands_beside_its_file(tmp_path, config):
    from ascend_lab.compiler.onnx import save_onnx

    save_onnx(zoo.build("squeezenet"), tmp_path / "net.onnx")
    config.write_text('model = "net.onnx"\nchip = "Ascend310"\n[arrivals]\nrate_per_s = 1\n')
    (seconds,) = read_scenario(config).scenario.steps[0].service.seconds
    own = compile_stages(zoo.build("squeezenet"), "Ascend310").timeline().time_s
    assert seconds == pytest.approx(own, rel=0.05)
    assert np.isfinite(seconds)
