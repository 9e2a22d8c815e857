"""The models at small sizes under dicp_cpu, and the checks themselves: a wrong result has to fail."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dicp.bench import arms, workloads
from dicp.bench.models import CASES, obstacle
from dicp.bench.models.resnet import resnet50
from dicp.bench.models.text import PROMPT
from model import architectures, checks, libraries, run
from model import arms as runs

# A case costs up to half a minute of one core, so by default each kind of model is there once:
# in float32 llama and gpt2 are those of dynamic sizes.
DEFAULT = {
    ("llama", "bf16"), ("resnet50", "fp32"), ("bert", "fp32"), ("vit", "fp32"), ("convnext", "fp32"),
    ("whisper", "fp32"), ("mixtral", "bf16"),
}  # fmt: skip
DEFAULT_DYNAMIC = {(name, "fp32") for name in ("llama", "gpt2")}
# In float32 the experts' products are an operator of transformers' own, written in Python.
EXTERNS = {("mixtral", "fp32")}


def cases() -> Iterator[Any]:
    for dynamic in (False, True):
        for name, dtype in itertools.product(CASES, run.DTYPES):
            standard = (name, dtype) in (DEFAULT_DYNAMIC if dynamic else DEFAULT)
            yield pytest.param(name, dtype, dynamic, marks=[] if standard else [pytest.mark.slow])


@pytest.mark.parametrize("name, dtype, dynamic", list(cases()))
def test_model_agrees_with_eager(name: str, dtype: str, dynamic: bool) -> None:
    result = run.run_case(name, "dicp_cpu", dtype, dynamic, "small", rounds=1)
    assert result.ok, "\n".join(result.problems)
    assert (name, dtype) in EXTERNS or result.extern == 0, f"{result.extern} ops ran as extern calls"


def faulty(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
    """A backend whose every floating result is a thousandth too large."""

    def call(*args: Any) -> Any:
        out = gm(*args)
        return tuple(x * 1.001 if isinstance(x, Tensor) and x.is_floating_point() else x for x in out)

    return call


def test_driver_with_a_wrong_backend_fails(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def compiled(model: Any, backend: str, dtype: torch.dtype, dynamic: bool) -> arms.Arm:
        return arms.Arm(backend, model, torch.compile(model, backend=faulty, dynamic=dynamic), dtype)

    monkeypatch.setattr(arms, "compiled_arm", compiled)
    assert run.main(["vit", "aot_eager", "--size", "small", "--dtype", "fp32"]) == 1
    said = capsys.readouterr().out
    assert "FAIL" in said
    assert "distance" in said


def test_driver_with_eager_passes(tmp_path: Any) -> None:
    report = tmp_path / "report.json"
    assert (
        run.main(["bert", "eager", "all", "--size", "small", "--dtype", "fp32", "--json", str(report)]) == 0
    )
    assert '"ok": true' in report.read_text()


def save_checkpoint(folder: Path) -> None:
    """A LLaMA in bf16 with a tokenizer of words, as transformers writes them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<unk>", *sorted(set(PROMPT.replace(",", " ").split()))])}
    reader = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    reader.pre_tokenizer = pre_tokenizers.Whitespace()
    CASES["llama"].build("small").bfloat16().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=reader, unk_token="<unk>").save_pretrained(folder)


def test_an_architecture_is_held_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")

    def wrong(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return lambda *args: tuple(2 * t for t in gm(*args))

    assert architectures.examine("albert", "eager")["status"] == "ok"
    torch._dynamo.reset()
    found = architectures.examine("albert", wrong)  # type: ignore[arg-type]
    assert found["status"] == "FAIL" and any("last_hidden_state" in p for p in found["problems"])
    left_out = architectures.examine("autoformer", "eager")
    assert left_out["status"] == "left out" and "prediction_length" in left_out["problems"][0]


class Normed(torch.nn.Module):
    """Its gradients in training mode are those of the batch's statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()


def test_an_architecture_that_trains_is_held_to_eager_in_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Normed] = []

    def build(name: str) -> torch.nn.Module:
        torch.manual_seed(0)
        made.append(Normed().eval())
        return made[-1]

    def inputs(model: Any) -> dict[str, Any]:
        return {"x": torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))}

    def wrong(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        """Right for inference alone."""
        return lambda *args: tuple(t * (2 if t.requires_grad else 1) for t in gm(*args))

    library = libraries.Library(lambda: ["normed"], build, inputs, trains=True)
    monkeypatch.setitem(architectures.LIBRARIES, "mine", library)
    assert architectures.examine("normed", "dicp_cpu", of="mine")["status"] == "ok"
    (model,) = made
    of_batch, of_past = (
        run(model, model, inputs(model)) for run in (architectures.training_gradients, architectures.gradients)
    )
    assert not torch.allclose(of_batch["conv.weight"], of_past["conv.weight"])
    assert model.norm.num_batches_tracked == 0 and not model.training
    torch._dynamo.reset()
    found = architectures.examine("normed", wrong, of="mine")  # type: ignore[arg-type]
    assert found["status"] == "FAIL" and all(p.startswith("gradient") for p in found["problems"])


def test_a_driver_takes_models_of_timm_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for timm, which the tests do not need."""
    monkeypatch.setitem(sys.modules, "timm", None)
    assert "timm is not installed" in (obstacle(["timm:normed"]) or "")
    timm, models = ModuleType("timm"), ModuleType("timm.models")
    timm.__dict__.update(
        __version__="1", __spec__=object(), models=models, is_model=lambda name: name == "normed",
        list_models=lambda pattern: ["normed"], create_model=lambda name, pretrained: Normed(),
    )  # fmt: skip
    models.__dict__.update(get_pretrained_cfg=lambda name: SimpleNamespace(input_size=(3, 9, 9)))
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "timm.models", models)
    assert "no such model; it has normed" in (obstacle(["timm:norm"]) or "")
    assert obstacle(["timm:normed", "resnet50"]) is None
    setting = workloads.Setting("inference", "fp32", batch=3)
    work = workloads.workload("timm:normed")
    assert work.amount(setting) == 6 and work.call("eager", setting)().shape == (6, 8, 7, 7)


def test_driver_loads_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    save_checkpoint(tmp_path)
    monkeypatch.setenv("LLAMA_MODEL_DIR", str(tmp_path))
    assert run.main(["llama", "eager", "--size", "small", "--dtype", "fp32"]) == 0
    assert "generated: " in capsys.readouterr().out


def test_driver_says_what_is_wrong_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("LLAMA_MODEL_DIR", str(tmp_path / "none"))
    assert run.main(["llama", "eager", "--size", "small"]) == 2
    assert "is no directory" in capsys.readouterr().err
    monkeypatch.setenv("LLAMA_MODEL_DIR", str(tmp_path))
    assert run.main(["llama", "eager", "--size", "small"]) == 2
    assert "no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert run.main(["llama", "eager", "--size", "small"]) == 2
    assert "no weights" in capsys.readouterr().err
    assert obstacle(["bert", "resnet50"]) is None


def test_driver_without_transformers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "transformers is not installed" in (obstacle(CASES) or "")
    assert obstacle(["resnet50"]) is None


def exact_and_eager() -> tuple[Tensor, Tensor]:
    exact = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return exact, (exact * (1 + 1e-6)).float()


@pytest.mark.parametrize("error, ok", [(1.5e-6, True), (2.5e-6, False)])
def test_rule_allows_twice_eagers_distance(error: float, ok: bool) -> None:
    exact, eager = exact_and_eager()
    assert checks.judge("x", (exact * (1 + error)).float(), [eager], exact).ok is ok


def test_rule_nan_where_exact_is_finite_fails() -> None:
    exact, eager = exact_and_eager()
    wrong = eager.clone()
    wrong[3] = torch.nan
    assert not checks.judge("x", wrong, [eager], exact).ok


def test_rule_other_dtype_or_shape_fails() -> None:
    exact, eager = exact_and_eager()
    assert not checks.judge("x", eager.double(), [eager], exact).ok
    assert not checks.judge("x", eager[:-1], [eager], exact).ok


def test_group_with_kinks_a_tensor_that_is_zero_but_for_rounding_decides_nothing() -> None:
    """As the gradient of a key's bias: neither fails it by its own noise nor allows others an error as large."""
    g = torch.Generator().manual_seed(0)
    truth = {"w": torch.randn(50, generator=g).double(), "key": torch.full((50,), 1e-19).double()}
    eager = {"w": truth["w"].float(), "key": torch.full((50,), 1e-9)}
    other = {"w": truth["w"].float(), "key": torch.full((50,), -3e-9)}
    wrong = {"w": truth["w"].float() * 1.001, "key": eager["key"]}
    assert all(v.ok for v in checks.judge_group("g", other, [eager], truth, kinks=True))
    assert not all(v.ok for v in checks.judge_group("g", wrong, [eager], truth, kinks=True))


def test_group_with_kinks_one_wrong_tensor_fails() -> None:
    exact, eager = exact_and_eager()
    wrong = (exact * 1.001).float()
    good, bad = {"a": eager, "b": eager}, {"a": eager, "b": wrong}
    truth = {"a": exact, "b": exact}
    assert all(v.ok for v in checks.judge_group("g", good, [good], truth, kinks=True))
    assert not all(v.ok for v in checks.judge_group("g", bad, [good], truth, kinks=True))
    assert not checks.judge_group("g", {"a": eager}, [good], truth, kinks=True)[0].ok


def test_exact_run_is_float64_throughout() -> None:
    model = CASES["llama"].build("small")  # its norms compute in float32 of their own accord
    inputs = CASES["llama"].inputs("small", 0, torch.float32)
    arm = runs.exact_arm(CASES["llama"], model)
    plain = arms.Arm("plain", arm.model, arm.model, torch.float32)
    exact, mixed = arms.scores(arm, inputs), arms.scores(plain, inputs)
    assert exact.dtype == mixed.dtype == torch.float64
    assert not torch.equal(exact, mixed)


def test_resnet50_is_the_published_architecture() -> None:
    assert sum(p.numel() for p in resnet50().parameters()) == 25_557_032
