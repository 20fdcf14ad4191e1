"""``brim estimate`` of what it cannot trace, as typed: one clear error, exit code 2, nothing half done."""

import json

import pytest
import torch

from brim.cli import main

STEP = "factory.py:build"


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """``refused("MODEL", ...)``: what was said on standard error, checked to be one error and nothing else."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        assert main(["estimate", *arguments]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("Error: ") == 1
        assert "Traceback" not in said.err
        return said.err

    return run


def program(tmp_path, text):
    """A file whose function returns a step, as users write them."""
    (tmp_path / "factory.py").write_text("import torch\n" + text)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling_mine.MyModel"}}, "mine"),
        ({"model_type": "llama", "architectures": ["MyLlama"], "auto_map": {"AutoModel": "m.MyLlama"}}, "MyLlama"),
    ],
)
def test_a_model_that_needs_remote_code_is_refused_and_told_what_to_do(refused, tmp_path, config, told):
    """Whether its type is one that nobody knows, or a known one with a class of its own."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = refused(str(tmp_path), "--task", "train")
    assert told in said
    assert "which brim does not run" in said
    assert "file.py:function" in said


def test_code_beside_the_configuration_is_not_run(refused, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(
        {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}}
    ))  # fmt: skip
    (tmp_path / "configuration_mine.py").write_text("open('was_run', 'w').close()\n")
    refused(str(tmp_path))
    assert not (tmp_path / "was_run").exists()


def test_a_known_class_does_not_need_its_remote_code(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "auto_map": {"AutoModel": "m.Llama"},
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "vocab_size": 100,
    }))  # fmt: skip
    assert main(["estimate", str(tmp_path), "--seq", "16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"]["allocated"] > 0


OPAQUE = """
@torch.library.custom_op("brim_refusals::opaque{name}", mutates_args=())
def opaque(value: torch.Tensor) -> torch.Tensor:
    return value.clone()

def build():
    def step():
        opaque(torch.ones(4))
    return step
"""


def test_an_operation_without_a_fake_kernel_is_refused_with_its_line_and_the_way_out(refused, tmp_path):
    program(tmp_path, OPAQUE.replace("{name}", ""))
    said = refused(STEP)
    assert "brim_refusals.opaque.default has no fake kernel" in said
    assert "factory.py:9: opaque(torch.ones(4))" in said
    assert "torch.library.register_fake('brim_refusals::opaque')" in said


def test_an_operation_that_is_given_a_fake_kernel_is_traced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = OPAQUE.replace("{name}", "_told")
    program(tmp_path, text + "\nopaque.register_fake(torch.empty_like)\n")
    assert main(["estimate", STEP, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"]["allocated"] == 2 * 512


def test_a_fake_kernel_that_needs_values_is_refused_with_the_line(refused, tmp_path):
    program(
        tmp_path,
        OPAQUE.replace("{name}", "_values")
        + """
opaque.register_fake(lambda value: value.new_empty(int(value[0])))
""",
    )
    said = refused(STEP)
    assert "needs the values of a tensor" in said
    assert "factory.py" in said


@pytest.mark.parametrize(
    ("line", "subject"),
    [
        ("while loss > 0.5: loss = model(torch.randn(2, 4)).mean()", "decided"),
        ("if loss.item() > 1: pass", "decided"),
        ("torch.empty(int(torch.randint(5, (1,)).sum() + loss))", "made up"),
        ("loss[None][loss[None] > 0].sum()", "decided"),
        ("torch.nonzero(model(torch.randn(2, 4))).tolist()", "assumed"),
        ("loss.detach().numpy()", "made up"),
    ],
)
def test_a_step_that_needs_a_value_is_told_with_the_line(tmp_path, monkeypatch, capsys, line, subject):
    monkeypatch.chdir(tmp_path)
    program(
        tmp_path,
        f"""
model = torch.nn.Linear(4, 4)

def build():
    def step():
        loss = model(torch.randn(2, 4)).mean()
        {line}
        loss.backward()
    return step
""",
    )
    assert main(["estimate", STEP]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{subject}: " in said
    assert "factory.py:8" in said


def test_an_operation_of_the_backward_pass_without_a_fake_kernel_is_refused_too(refused, tmp_path):
    program(
        tmp_path,
        """
@torch.library.custom_op("brim_refusals::slope", mutates_args=())
def slope(value: torch.Tensor) -> torch.Tensor:
    return value.clone()

class Square(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        context.save_for_backward(value)
        return value * value

    @staticmethod
    def backward(context, gradient):
        return slope(gradient)

def build():
    weight = torch.nn.Parameter(torch.ones(4))
    def step():
        Square.apply(weight).sum().backward()
    return step
""",
    )
    assert "brim_refusals.slope.default has no fake kernel" in refused(STEP)


def test_nothing_of_a_refused_trace_stays(refused, tmp_path):
    program(tmp_path, OPAQUE.replace("{name}", "_once"))
    refused(STEP)
    assert type(torch.ones(2)) is torch.Tensor
    assert torch.ones(2).sum().item() == 2
