"""Taking the figures, at small sizes: every contestant's are there, and one that fails does not stop the rest."""

import fcntl
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dicp.bench import __main__ as command
from dicp.bench import contestants, measure, run
from dicp.bench.models import zoo
from dicp.bench.workloads import WORKLOADS, Setting, cost

SMALL = Setting("inference", "fp32", "small")


def test_job_survives_the_way_to_its_process() -> None:
    job = run.Job("steady", "vit", Setting("training", "bf16", "small", True), ("eager", "dicp_cpu"), 3)
    assert run.Job.parse(job.text()) == job


def test_inference_is_that_of_models_in_eval_mode() -> None:
    """With batch norms and dropout as they serve, not as they train."""
    assert not [name for name, w in WORKLOADS.items() if w.case.build("small").training]


def test_one_that_fails_does_not_stop_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = contestants.Contestant("broken", "inductor", {"no_such_option": 1})
    monkeypatch.setitem(contestants.CONTESTANTS, "broken", broken)
    found = run.work(run.Job("steady", "convnext", SMALL, ("eager", "broken"), rounds=2))
    assert found["eager"]["ms"] > 0
    assert "failed" in found["broken"]


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_ceilings_are_measured_beside_the_contestants(dtype: str) -> None:
    found = run.work(run.Job("steady", "convnext", Setting("inference", dtype, "small"), ("dicp_cpu",), 3))
    assert found["ceilings"]["gflops"] > 1
    assert found["ceilings"]["read_gb_per_s"] > 0.1
    assert found["dicp_cpu"]["ms"] > 0


def test_worker_that_dies_is_a_failure() -> None:
    found = run.in_process(run.Job("steady", "no such model", SMALL, ("eager",)))
    assert "no such model" in found["eager"]["failed"]


def test_freezing_freezes() -> None:
    """For a function of Dynamo's, weights are then attributes of the graph, not inputs."""
    inputs: list[int] = []
    model = torch.nn.Linear(3, 3)

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any], **_: Any) -> Any:
        inputs.append(len(example_inputs))
        return gm.forward

    for options in ({"freezing": True}, {}):
        torch._dynamo.reset()
        compile = contestants.Contestant("a", backend, options).compiler(training=False)  # type: ignore[arg-type]
        with torch.no_grad():
            compile(model)(torch.randn(2, 3))
    assert inputs == [1, 3] and not torch._inductor.config.freezing


def test_freezing_takes_no_part_in_training() -> None:
    job = run.Job("steady", "convnext", Setting("training", "fp32", "small"), ("inductor-freezing",), 2)
    assert run.measure_row((), job, 1)["contestants"] == {}
    assert contestants.get("dicp_cuda").is_dicp
    assert not contestants.get("inductor-max-autotune").is_dicp


def test_cost_counts_products_and_weights_that_are_read() -> None:
    found = cost(WORKLOADS["gpt2"], SMALL)
    model = WORKLOADS["gpt2"].case.build("small")
    positions = model.transformer.wpe.weight
    assert found.weight_bytes == sum(p.nbytes for p in model.parameters()) - positions.nbytes
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2 and p is not positions)
    assert found.flops > 2 * matrices * WORKLOADS["gpt2"].amount(SMALL)


def test_cost_counts_the_products_of_experts() -> None:
    """Those of Mixtral take one product for all groups of rows; without it, attention and the head are left."""
    case = WORKLOADS["mixtral"].case
    model = case.build("small")
    experts = [p for p in model.parameters() if p.dim() == 3]
    tokens, chosen = WORKLOADS["mixtral"].amount(SMALL), model.config.num_experts_per_tok
    products = 2 * tokens * chosen * sum(p[0].numel() for p in experts)
    dense = sum(p.numel() for p in model.parameters() if p.dim() == 2) - model.model.embed_tokens.weight.numel()
    assert experts and cost(WORKLOADS["mixtral"], SMALL).flops >= products + 2 * tokens * dense


def test_command_with_one_kind(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    given = ["--models", "unet", "--phases", "inference", "--contestants", "eager,aot_eager", "--size", "small"]
    assert command.main([*given, "--dtypes", "bf16", "--rounds", "2", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["unit"] == "images" and row["work"] == 1
    assert all(found["ms"] > 0 for found in row["contestants"].values())


@pytest.mark.slow
def test_command_with_all_kinds(tmp_path: Path, capsys: Any) -> None:
    """The whole way, decoding included: eager against dicp_cpu, compile and memory in processes of their own."""
    out = tmp_path / "out.json"
    given = ["--models", "llama-decode", "--dtypes", "fp32", "--contestants", "eager,dicp_cpu", "--size", "small"]
    assert command.main([*given, "--rounds", "2", "--all", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    eager, mine = row["contestants"]["eager"], row["contestants"]["dicp_cpu"]
    assert mine["difference"] < 1e-5
    assert mine["cold_s"] > mine["own_s"] > 0
    assert {"ms", "peak_mb"} <= eager.keys() & mine.keys()
    assert "cold_s" not in eager
    said = capsys.readouterr().out
    assert "Per call" in said and "Cold compile" in said


def test_a_batch_is_what_a_model_usually_gets_so_many_times() -> None:
    usual, large = (Setting("inference", "fp32", "small", batch=n) for n in (1, 3))
    assert WORKLOADS["bert"].amount(large) == 3 * WORKLOADS["bert"].amount(usual)


def test_times_are_taken_by_one_process_at_a_time(tmp_path: Path) -> None:
    lock, entered = str(tmp_path / "lock"), threading.Event()

    def measure_alone() -> None:
        with measure.alone(lock):
            entered.set()

    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waits = threading.Thread(target=measure_alone)
        waits.start()
        assert not entered.wait(0.2)
        assert len(Path(lock + ".waiting").read_text().splitlines()) == 1
    waits.join(10)
    assert entered.is_set()


def test_a_turn_ends_when_what_it_began_is_done() -> None:
    done = []
    measure.turns([lambda: None], rounds=3, min_ms=0.0, wait=lambda: done.append(1))
    assert len(done) == 2 + 3


def test_contestants_are_those_of_the_device() -> None:
    assert command.parse(["--device", "cuda"]).contestants == list(contestants.ON_GPU)
    assert command.parse([]).contestants == list(contestants.STANDARD)
    assert "llama_7b-decode" not in command.parse([]).models


def test_timm_stands_for_a_list_of_its_models() -> None:
    models = command.parse(["--models", "bert,timm,timm:vit_tiny_patch16_224"]).models
    assert models[0] == "bert" and models[-1] == "timm:vit_tiny_patch16_224"
    assert models[1:-1] == [f"timm:{name}" for name in zoo.SET]
