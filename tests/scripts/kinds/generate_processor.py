"""Text of a decoder with a processor of scores and a criterion to stop that read values."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        vocab_size=2000,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
).eval()
ids = torch.randint(5, 500, (2, 8))


class P(LogitsProcessor):
    def __call__(self, ids, scores):
        if scores.max().item() > 1e9:
            raise ValueError
        scores[:, 7] = -float("inf")
        return scores


class C(StoppingCriteria):
    def __call__(self, ids, scores, **kw):
        return torch.tensor([ids.shape[1] > 11] * ids.shape[0])


print(
    model.generate(
        ids,
        max_new_tokens=6,
        do_sample=False,
        logits_processor=LogitsProcessorList([P()]),
        stopping_criteria=StoppingCriteriaList([C()]),
        output_scores=True,
        return_dict_in_generate=True,
    ).sequences.tolist()
)
