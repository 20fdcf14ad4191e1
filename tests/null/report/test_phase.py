"""The phase of a run is read from the frames of tracebacks and recorded stacks, the innermost first."""

from __future__ import annotations

import pytest

from brim.report.phase import BY_PHASE, Phase, phase_of

_CALL = 'File "/x/torch/nn/modules/module.py", line 1762, in _call_impl'
_STEP = 'File "/x/torch/optim/lr_scheduler.py", line 137, in wrapper'
_LINEAR = 'File "/x/torch/nn/modules/linear.py", line 125, in forward'
STACKS: dict[str, tuple[list[str], Phase | None]] = {
    "foreach": (
        [
            "exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)",
            'File "adamw.py", line 606, in _multi_tensor_adamw',
        ],
        Phase.OPTIMIZER,
    ),
    "an optimizer's states": (
        ['state["exp_avg"] = torch.zeros_like(', 'File "/x/torch/optim/adamw.py", line 134, in _init_group', _STEP],
        Phase.STATES,
    ),
    "a notebook's frame": (["File ~/x/torch/optim/adamw.py:243, in AdamW.step(self, closure)"], Phase.OPTIMIZER),
    "a frame of rich": ([r"C:\x\torch\optim\adamw.py:566 in _multi_tensor_adamw"], Phase.OPTIMIZER),
    "a recorded stack": (["step at /x/torch/optim/sgd.py:80", "train at train.py:3"], Phase.OPTIMIZER),
    "a forward pass inside of a closure": (
        [_LINEAR, _CALL, "loss = closure()", 'File "/x/torch/optim/adamw.py", line 197, in step'],
        Phase.FORWARD,
    ),
    "a loss": (
        ["return torch._C._nn.cross_entropy_loss(", 'File "/x/torch/nn/functional.py", line 3462, in cross_entropy'],
        Phase.LOSS,
    ),
    "a float32 copy of the logits": (
        ["logits = logits.float()", 'File "/x/modeling_llama.py", line 1200, in forward', _CALL],
        Phase.LOSS,
    ),
    "the last layer": ([_LINEAR, _CALL, "logits = self.lm_head(hidden_states[:, slice_indices, :])"], Phase.LOSS),
    "scores of attention": (
        ["attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32)", _CALL],
        Phase.ATTENTION,
    ),
    "a backward pass": (
        [
            "return Variable._execution_engine.run_backward(",
            'File "x/torch/autograd/graph.py", in _engine_run_backward',
        ],
        Phase.BACKWARD,
    ),
    "the forward pass of a function": (
        [
            'File "/x/torch/autograd/function.py", line 575, in apply',
            'File "/x/tensor_parallel/cross_entropy.py", line 1',
        ],
        Phase.LOSS,
    ),
    "a forward pass again": (
        [_LINEAR, _CALL, 'File "/x/torch/utils/checkpoint.py", line 1128, in unpack_hook', "loss.backward()"],
        Phase.BACKWARD,
    ),
    "a forward pass of evaluation": (
        [_LINEAR, _CALL, 'File "trainer.py", line 4, in prediction_step'],
        Phase.EVALUATION,
    ),
    "predictions joined": (["File nested_concat", "in evaluation_loop"], Phase.EVALUATION),
    "a line that also calls backward": ([_LINEAR, _CALL, "loss = model(x); loss.backward()"], Phase.FORWARD),
    "a second statement": (["loss = model(x); loss.backward()"], Phase.BACKWARD),
    "a token": ([_LINEAR, _CALL, 'File "/x/transformers/generation/utils.py", line 9, in _sample'], Phase.GENERATION),
    "weights": (['File "/x/torch/nn/modules/module.py", line 942, in _apply', "model.to(device)"], Phase.LOADING),
    "weights gathered": (['File "save.py", line 3, in _save_checkpoint'], Phase.SAVING),
    "nothing": (['File "main.py", line 3, in <module>'], None),
    "no frame": ([], None),
}


@pytest.mark.parametrize("name", STACKS)
def test_the_innermost_frames_tell_the_phase(name):
    frames, phase = STACKS[name]
    assert phase_of(frames) is phase


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_has_advice_and_begins_with_what_helps(phase):
    assert BY_PHASE[phase][0].helps


def _texts(phase: Phase) -> str:
    return " ".join(f"{advice.text} {advice.paste}" for advice in BY_PHASE[phase] if advice.helps)


def test_no_smaller_batch_is_advised_for_the_optimizers_step():
    for phase in (Phase.OPTIMIZER, Phase.STATES):
        assert all(word in _texts(phase) for word in ("fused=True", "8 bits"))
        assert "atch" not in _texts(phase)
    assert "foreach=False" in _texts(Phase.OPTIMIZER)


def test_a_loss_gets_advice_about_its_logits():
    assert all(word in _texts(Phase.LOSS) for word in ("chunks", "fused", "16 bits", "sequence"))
    assert not any(word in _texts(Phase.LOSS) for word in ("checkpoint", "brim generate"))
