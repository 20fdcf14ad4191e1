"""Streaming on a real CUDA device: the same logits as with all weights there, inside the budget."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import brim
from support.placed import place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def weight_bytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 8192, (2, 33), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("ram_share", [2.0, 0.45], ids=["the rest in RAM", "some of it on disk"])
@torch.no_grad()
def test_logits_are_those_of_the_whole_model_on_the_device(ids, ram_share):
    model = llama()
    total = weight_bytes(model)
    expected = llama().cuda()(ids.cuda()).logits.cpu()
    budget = 130 << 20
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    handle = place(
        model, vram=int(total * 0.5), ram=int(total * ram_share) + budget, example={"input_ids": ids}, device="cuda"
    )
    assert set(handle.plan.choices("weight_streaming").values()) > {"resident"}
    for _ in range(4):
        assert torch.equal(model(ids.cuda()).logits.cpu(), expected)
    assert torch.cuda.max_memory_allocated() - before <= handle.plan.budget_bytes["vram"] + (9 << 20)
    assert handle.misses <= 1
    handle.remove()
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert torch.equal(model.cuda()(ids.cuda()).logits.cpu(), expected)


@torch.no_grad()
def test_blocks_come_and_go_without_an_allocation(ids):
    """What stands for the weights of a block that is away is made once."""

    def allocations() -> int:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        model(ids.cuda())
        return torch.cuda.memory_stats()["allocation.all.allocated"] - before

    model = llama().cuda()
    resident = [allocations() for _ in range(2)][-1]
    model = llama()
    handle = place(model, vram=weight_bytes(model) // 2, device="cuda", example={"input_ids": ids})
    assert "stream:ram" in handle.plan.choices("weight_streaming").values()
    assert [allocations() for _ in range(3)][-1] == resident
    handle.remove()


@torch.no_grad()
def test_generation_and_state_dict_while_fitted(ids):
    model = llama()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = llama().cuda().generate(ids.cuda(), max_new_tokens=8, do_sample=False).cpu()
    handle = place(model, vram=weight_bytes(model) // 2, device="cuda", activations="16MiB")
    assert torch.equal(model.generate(ids.cuda(), max_new_tokens=8, do_sample=False).cpu(), expected)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), state[name]), name
    model.load_state_dict({name: tensor * 2 for name, tensor in state.items()})
    twin = llama()
    twin.load_state_dict({name: tensor * 2 for name, tensor in state.items()})
    assert torch.equal(model(ids.cuda()).logits, twin.cuda()(ids.cuda()).logits)
    handle.remove()


@torch.no_grad()
def test_a_checkpoint_is_loaded_inside_the_budget(tmp_path, ids):
    llama().save_pretrained(tmp_path)
    # Not llama() itself: its rotary frequencies were rounded with the weights, and a checkpoint does not hold them.
    expected = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).cuda()(ids.cuda()).logits
    inputs_bytes = 64 << 20
    vram_bytes = weight_bytes(llama()) // 2 + inputs_bytes + (64 << 20)
    model = brim.load(tmp_path, vram=vram_bytes, ram="8GiB", device="cuda", host_compute=False)
    assert torch.equal(model(ids.cuda()).logits, expected)
    model.brim.remove()


@torch.no_grad()
def test_streamed_batch_norm_statistics_come_back():
    def net() -> torch.nn.Sequential:
        torch.manual_seed(0)
        parts = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512)) for _ in range(8)]
        return torch.nn.Sequential(*parts).train()

    x = torch.randn(64, 512)
    twin, model = net().cuda(), net()
    handle = place(model, vram=weight_bytes(model) // 2 + (4 << 20), device="cuda", activations="2MiB")
    for _ in range(3):
        assert torch.equal(model(x.cuda()), twin(x.cuda()))
    handle.remove()
    for (name, mine), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, theirs.cpu()), name


class Narrow(torch.nn.Module):
    """Opens a region of its own in its forward pass."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return self.inner(x)


@pytest.mark.parametrize("where", ["around", "inside"])
@torch.no_grad()
def test_autocast_keeps_no_copy_of_weights(where):
    def net():
        torch.manual_seed(0)
        inner = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(12)])
        return inner if where == "around" else Narrow(inner)

    x, held = torch.ones(2, 1024, device="cuda"), []
    with torch.autocast("cuda", torch.bfloat16, enabled=where == "around"):
        expected = net().cuda()(x)
    model = net()
    handle = place(model, vram=30 << 20, device="cuda", activations="3MiB")
    assert set(handle.plan.choices("weight_streaming").values()) == {"resident", "stream:ram"}
    begin = torch.cuda.memory_allocated()
    look = lambda *_: held.append(torch.cuda.memory_allocated() - begin)  # noqa: E731
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(look)
    with torch.autocast("cuda", torch.bfloat16, enabled=where == "around"):
        for _ in range(2):
            assert torch.equal(model(x), expected)
            assert torch.is_autocast_cache_enabled()
    assert max(held) <= 3 << 20  # the layer's own copy, and what it makes
    handle.remove()


@pytest.mark.parametrize(("vram", "kept"), [(60 << 20, 0), (120 << 20, 24 << 20)], ids=["no room", "room"])
@torch.no_grad()
def test_where_nothing_is_streamed_autocast_keeps_copies_that_the_budget_holds(vram, kept):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(12)])
    x, held = torch.ones(2, 1024, device="cuda"), []
    handle = place(model, vram=vram, device="cuda", activations="3MiB")
    assert set(handle.plan.choices("weight_streaming").values()) == {"resident"}
    begin = torch.cuda.memory_allocated()
    model[-1].register_forward_hook(lambda *_: held.append(torch.cuda.memory_allocated() - begin))
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            model(x)
    assert kept <= max(held) <= kept + (3 << 20)
    handle.remove()
